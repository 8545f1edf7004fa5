"""Routing replay: the experts that the old policy, or the engine while sampling, chose are used again in the update
(mixture-of-experts models).

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
    """The routers of a transformers model, which can be listened to and told what to choose.

    What is told stays until the next forward pass: gradient checkpointing runs layers again in the backward pass.

    Args:
        model: with ``*TopKRouter`` modules that return (logits, gates, experts).
    """

    def __init__(self, model: nn.Module) -> None:
        self.given: Tensor | None = None
        """[tokens, layers, K]; None: they choose themselves."""
        self.chosen: dict[int, Tensor] = {}
        """Of the last pass, by layer: [tokens, K]."""
        routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        if not routers:
            raise UserError(
                f"{type(model).__name__} has no routers that can be told which experts to use",
                where="model.routing_replay",
                remedy="set routing_replay: none",
            )
        self._handles = [r.register_forward_hook(self._hook(layer, r)) for layer, r in enumerate(routers)]

    def _hook(self, layer: int, own: nn.Module) -> Any:
        def hook(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            if router is not own:  # a copy of the model has the same hooks, and samples beside the learner
                return output
            logits, gates, experts = output
            if self.given is not None:
                experts = self.given[:, layer].to(experts)
                chosen = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
                if getattr(router, "norm_topk_prob", True):
                    chosen = chosen / chosen.sum(-1, keepdim=True)
                gates = chosen.to(gates.dtype)
            self.chosen[layer] = experts.detach()
            return logits, gates, experts

        return hook

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def seen(self) -> Tensor:
        """Experts of the last pass, [tokens, layers, K] int16."""
        return torch.stack([self.chosen[layer] for layer in range(len(self._handles))], 1).to(torch.int16)


class RoutingTable:
    """The experts of every token of a rollout, those of a prompt once for all its completions.

    Args:
        prompt_lengths: of each completion's prompt, [N].
        groups: number of each completion's prompt, [N].
        width: T.
    """

    def __init__(self, prompt_lengths: Tensor, groups: Tensor, width: int) -> None:
        self.prompt_lengths, self.groups, self.width = prompt_lengths, groups, width
        self._experts: Tensor | None = None  # [groups * P + N * T, layers, K]

    def _places(self, inputs: PolicyInput, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Of each token of a micro-batch that is no padding: its place in the pass, and in the table."""
        device = inputs.owner.device
        lengths, groups = self.prompt_lengths.to(device), self.groups.to(device)
        owner, position = inputs.owner.flatten(), inputs.position_ids.flatten()
        real = (owner >= 0).nonzero()[:, 0]
        who, where = rows.to(device)[owner[real]], position[real]
        longest = int(self.prompt_lengths.max())
        after = where - lengths[who]
        of_prompt = groups[who] * longest + where
        of_completion = (int(self.groups.max()) + 1) * longest + who * self.width + after
        return real, torch.where(after < 0, of_prompt, of_completion)

    def put_sampled(self, prompts: Sequence[int], experts: Sequence[Tensor]) -> None:
        """Keep what an engine chose; of a prompt that it went through more than once, what it chose first.

        Args:
            prompts: number of each completion's prompt, N.
            experts: of each completion, [prompt + generated - 1, layers, K].
        """
        longest, layers, k = int(self.prompt_lengths.max()), *experts[0].shape[1:]
        after = (int(self.groups.max()) + 1) * longest
        # The last token of a completion went through no expert, and predicts nothing: it may go anywhere.
        table = torch.arange(k, dtype=torch.int16).expand(after + len(self.groups) * self.width, layers, k).clone()
        for i in reversed(range(len(experts))):
            length = int(self.prompt_lengths[i])
            table[prompts[i] * longest :][:length] = experts[i][:length]
            table[after + i * self.width :][: len(experts[i]) - length] = experts[i][length:]
        self._experts = table

    def put(self, inputs: PolicyInput, rows: Tensor, experts: Tensor) -> None:
        """Keep what a pass over completions ``rows`` saw, [tokens, layers, K]."""
        if self._experts is None:
            size = (int(self.groups.max()) + 1) * int(self.prompt_lengths.max()) + len(self.groups) * self.width
            self._experts = experts.new_zeros(size, *experts.shape[1:])
        here, there = self._places(inputs, rows)
        self._experts[there] = experts[here]

    def get(self, inputs: PolicyInput, rows: Tensor) -> Tensor:
        """What a pass over completions ``rows`` is to use, [tokens, layers, K] int64; padding goes anywhere."""
        assert self._experts is not None
        here, there = self._places(inputs, rows)
        self._experts = self._experts.to(there.device)
        layers, k = self._experts.shape[1:]
        out = torch.arange(k, device=here.device).expand(inputs.tokens, layers, k).clone()
        out[here] = self._experts[there].long()
        return out
