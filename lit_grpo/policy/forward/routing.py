"""Routing replay for mixture-of-experts models: the update uses the experts that old policy or engine chose.

After an update a router may send a token to other experts than those that its probability under the old policy came
from, and the ratio of the two then compares different networks. With replay the old choice stays; the gates of the
chosen experts are computed anew from the router's logits, so that gradients flow to the router. GSPO (2507.18071,
section 5.3) names it as what GRPO needs for such models. Replaying the engine's choice (rollout routing replay,
2510.11370) also takes away what engine and learner differ by where two experts are nearly equally good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_grpo.errors import UserError
from lit_grpo.policy.forward.batching import PolicyInput


class Routers:
    """The routers of a transformers model, whose choice of experts can be recorded and replaced.

    Args:
        model: a model with ``*TopKRouter`` modules that return (logits, gates, experts).
    """

    def __init__(self, model: nn.Module) -> None:
        # It stays set after a forward pass: gradient checkpointing runs the layers again in the backward pass.
        self.replay: Tensor | None = None
        """The experts to use, [tokens, layers, K]; None: the routers choose."""
        self._recorded: dict[int, Tensor] = {}
        """Layer -> the experts of the last pass, [tokens, K]."""
        routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        if not routers:
            raise UserError(
                f"{type(model).__name__} has no routers that can be told which experts to use",
                where="model.routing_replay",
                remedy="set routing_replay: none",
            )
        # By hooks, so that the routers of every family stay as transformers wrote them.
        self._handles = [r.register_forward_hook(self._hook(layer, r)) for layer, r in enumerate(routers)]

    def _hook(self, layer: int, own: nn.Module) -> Any:
        def hook(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            # A copy of the model has the same hooks, and samples beside the learner.
            if router is not own:
                return output
            logits, gates, experts = output
            if self.replay is not None:
                experts = self.replay[:, layer].to(experts)
                # Computed anew from the logits, so that gradients reach the router.
                weights = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
                if getattr(router, "norm_topk_prob", True):
                    weights = weights / weights.sum(-1, keepdim=True)
                gates = weights.to(gates.dtype)
            self._recorded[layer] = experts.detach()
            return logits, gates, experts

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def recorded(self) -> Tensor:
        """Return the experts of the last pass, [tokens, layers, K] int16."""
        return torch.stack([self._recorded[layer] for layer in range(len(self._handles))], 1).to(torch.int16)


class RoutingTable:
    """The experts of every token of a rollout; those of a prompt are held once for all its completions.

    Args:
        prompt_lengths: length of each completion's prompt, [N].
        groups: number of each completion's prompt, [N].
        width: T, positions of a completion.
    """

    def __init__(self, prompt_lengths: Tensor, groups: Tensor, width: int) -> None:
        self.prompt_lengths, self.groups, self.width = prompt_lengths, groups, width
        self._experts: Tensor | None = None
        """Experts of all prompts, then of all completions, [groups * P + N * T, layers, K]; P is the longest prompt."""

    def _indices(self, inputs: PolicyInput, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return two indices of each token that is no padding: in the micro-batch, and in the table."""
        device = inputs.owner.device
        lengths, groups = self.prompt_lengths.to(device), self.groups.to(device)
        owner, position = inputs.owner.flatten(), inputs.position_ids.flatten()
        real = (owner >= 0).nonzero()[:, 0]
        completion, position = rows.to(device)[owner[real]], position[real]
        longest = int(self.prompt_lengths.max())
        in_completion = position - lengths[completion]
        prompt_index = groups[completion] * longest + position
        completion_index = (int(self.groups.max()) + 1) * longest + completion * self.width + in_completion
        return real, torch.where(in_completion < 0, prompt_index, completion_index)

    def put_sampled(self, prompts: Sequence[int], experts: Sequence[Tensor]) -> None:
        """Store what an engine chose while it sampled.

        Args:
            prompts: number of each completion's prompt, N.
            experts: experts of each completion's tokens, [prompt + generated - 1, layers, K]. Where those of one prompt
                differ between its completions, the first completion's are kept.
        """
        longest, layers, k = int(self.prompt_lengths.max()), *experts[0].shape[1:]
        completions_start = (int(self.groups.max()) + 1) * longest
        size = completions_start + len(self.groups) * self.width
        # The last token of a completion went through no expert, and predicts nothing: any will do for it.
        table = torch.arange(k, dtype=torch.int16).expand(size, layers, k).clone()
        # Backwards, so that the first completion of a prompt writes its experts last.
        for i in reversed(range(len(experts))):
            length = int(self.prompt_lengths[i])
            table[prompts[i] * longest :][:length] = experts[i][:length]
            table[completions_start + i * self.width :][: len(experts[i]) - length] = experts[i][length:]
        self._experts = table

    def put(self, inputs: PolicyInput, rows: Tensor, experts: Tensor) -> None:
        """Store the experts that a pass over completions ``rows`` used, [tokens, layers, K]."""
        if self._experts is None:
            size = (int(self.groups.max()) + 1) * int(self.prompt_lengths.max()) + len(self.groups) * self.width
            self._experts = experts.new_zeros(size, *experts.shape[1:])
        in_batch, in_table = self._indices(inputs, rows)
        self._experts[in_table] = experts[in_batch]

    def get(self, inputs: PolicyInput, rows: Tensor) -> Tensor:
        """Return the experts for a pass over completions ``rows``, [tokens, layers, K] int64; any for padding."""
        assert self._experts is not None
        in_batch, in_table = self._indices(inputs, rows)
        self._experts = self._experts.to(in_table.device)
        layers, k = self._experts.shape[1:]
        out = torch.arange(k, device=in_batch.device).expand(inputs.tokens, layers, k).clone()
        out[in_batch] = self._experts[in_table].long()
        return out
