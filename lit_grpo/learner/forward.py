"""A rollout on its way through the models: what is known before the first update, and the loss of a micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from lit_grpo.distributed.sharding import reshard
from lit_grpo.errors import UserError
from lit_grpo.learner.batch import gather_rows
from lit_grpo.learner.metric_sums import StepMetrics
from lit_grpo.objectives.objective import Objective, StepPlan
from lit_grpo.objectives.tensors import token_mean
from lit_grpo.policy.critic import Critic
from lit_grpo.policy.forward.batching import PolicyInput, pad_rows
from lit_grpo.policy.forward.policy import EntropyMode, Policy, TokenStats, ValueMode
from lit_grpo.policy.forward.routing import RoutingTable
from lit_grpo.types import Experience, LossOutput, Rollout, Sum

OF_POLICY = frozenset({"old_logprobs", "entropy", "sum_squared_probs", "router_logscores_old"})


class OptimizerStep(NamedTuple):
    """What one optimizer step is made from."""

    objective: Objective
    experience: Experience
    advantages: Tensor
    """Of the whole rollout, [N, T]."""
    rows: Tensor
    """Completions of the step."""
    pass_index: int
    warmup: bool
    """Only the critic learns: the policy, and a trunk that it shares with the critic, stay untouched."""
    update: int = 0
    """Its place among the optimizer steps of the rollout, passes of one step not counted."""


@dataclass
class Passes:
    """How a rollout goes through the models: the models, and the cut into micro-batches."""

    policy: Policy
    reference: Policy | None
    critic: Critic | None
    """A critic with a trunk of its own; otherwise values come from the policy's value head."""
    micro_batches: Callable[[Rollout, Tensor], Iterator[Tensor]]
    inputs: Callable[[Rollout, Tensor], PolicyInput]
    replay: bool = False
    """The experts that the old policy chooses are used again in every update; see
    :mod:`lit_grpo.policy.forward.routing`."""
    routing: RoutingTable | None = None
    """Those of the rollout at hand, once it is filled."""
    largest: Callable[[Sequence[int]], list[int]] | None = None
    """Of sharded models: the largest of each number over all ranks. Their passes are collectives, so a rank with fewer
    micro-batches than another makes up for it with passes that count nothing."""

    device: torch.device | str = "cpu"
    """On which the models compute."""
    sampled: bool = False
    """The experts that the engine chose are used in every pass of the policy, instead."""

    def aligned(self, *parts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor | None]]:
        """(which list, micro-batch) in order, each list filled up with None to its length on other ranks."""
        counts = [len(part) for part in parts]
        if self.largest is not None:
            counts = self.largest(counts)
        for number, (part, count) in enumerate(zip(parts, counts, strict=True)):
            yield from ((number, rows) for rows in part)
            yield from ((number, None) for _ in range(count - len(part)))

    def idle(self, step: OptimizerStep) -> Tensor:
        """The passes of :meth:`loss` on a single token: 0, with gradients of 0 for every weight that learns."""
        total = torch.zeros((), device=self.device)
        inputs = self._one_token()
        wants_values = "values" in step.objective.loss_requires()
        if self.critic is not None and wants_values:
            total = total + self.critic(inputs).sum()
        stats = self.policy(inputs, 1.0, "none", values=self.of_head(wants_values), frozen=step.warmup)
        return (total + stats.logprobs.sum() + (0.0 if stats.values is None else stats.values.sum())) * 0.0

    def of_head(self, wanted: bool) -> ValueMode:
        """Whose gradient the policy's value head gives in a loss: its own, the trunk's too, or none without a head."""
        head = self.policy.value_head
        if head is None or not wanted:
            return "none"
        return "head" if head.config.detach else "trunk"

    def _one_token(self) -> PolicyInput:
        return pad_rows([(0,)], [(0,)], width=1, device=self.device)

    def rest(self) -> None:
        """Give back what passes without gradient left gathered."""
        reshard(self.policy, self.reference, self.critic)

    def fill(self, batch: Rollout, experience: Experience, needed: frozenset[str], rows: Tensor | None = None) -> None:
        """Put the fields named in ``needed`` (see ``Objective.requires``) into ``experience``.

        Args:
            batch: the rollout.
            experience: its tensors.
            needed: names of fields; the router's are left out where the model has none.
            rows: the only completions that will be looked at; of the others the fields hold NaN. None: all.

        Raises:
            ValueError: a field that no pass can compute.
        """
        computable = OF_POLICY | {"ref_logprobs", "values", "score_sqnorm"}
        if unknown := needed - computable:
            raise ValueError(f"no pass computes {', '.join(sorted(unknown))}")
        everything = torch.arange(len(batch.completions))
        if not self.policy.routes:
            needed = needed - {"router_logscores_old"}
        found: defaultdict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        if self.replay or self.sampled:
            lengths = torch.tensor([len(p.token_ids) for p in batch.prompts])
            groups = experience.group_ids.cpu()
            self.routing = RoutingTable(lengths[groups], groups, experience.width)
            if self.sampled:
                self.routing.put_sampled(groups.tolist(), _experts(batch))
        if self.replay or needed & (OF_POLICY | {"ref_logprobs", "values"}):
            for _, part in self.aligned(list(self.micro_batches(batch, everything if rows is None else rows))):
                inputs = self._one_token() if part is None else self.inputs(batch, part)
                for name, values in self._without_gradient(inputs, part, batch.temperature, needed).items():
                    if part is not None:
                        found[name].append((part, values))
        if "score_sqnorm" in needed:
            norms = [self.score_sqnorm(batch, row) for row in everything.split(1)]
            experience.score_sqnorm = torch.stack(norms)
        for name, parts in found.items():
            assert name in {f.name for f in fields(experience)}
            missing = float("nan") if parts[0][1].is_floating_point() else 0
            setattr(experience, name, gather_rows(parts, len(batch.completions), missing))
        self.rest()

    def _told(self, inputs: PolicyInput, rows: Tensor | None) -> Tensor | None:
        """The experts that a pass over completions ``rows`` is to use; None: those that the routers choose."""
        return None if self.routing is None or rows is None else self.routing.get(inputs, rows)

    @torch.no_grad()
    def _without_gradient(
        self, inputs: PolicyInput, rows: Tensor | None, temperature: float, needed: frozenset[str]
    ) -> dict[str, Tensor]:
        """Fields of some completions, [n, T, ...]; ``rows`` None: of none, see :meth:`aligned`."""
        out: dict[str, Tensor | None] = {}
        if self.replay or needed & OF_POLICY:
            stats = self.policy(
                inputs,
                temperature,
                "detached" if "entropy" in needed else "none",
                squares="sum_squared_probs" in needed,
                experts="active" if "router_logscores_old" in needed else None,
                routing="recorded" if self.replay else self._told(inputs, rows),
                values="head" if "values" in needed and self.critic is None else "none",
            )
            if self.replay and self.routing is not None and rows is not None:
                assert stats.routing is not None
                self.routing.put(inputs, rows, stats.routing)
            out["old_logprobs"] = stats.logprobs if "old_logprobs" in needed else None
            out["entropy"] = stats.entropy
            out["sum_squared_probs"] = stats.sum_squared_probs
            out["values"] = stats.values
            out["router_logscores_old"], out["router_experts_old"] = stats.router_logscores, stats.router_experts
        if "ref_logprobs" in needed:
            assert self.reference is not None
            out["ref_logprobs"] = self.reference(inputs, temperature, "none").logprobs
        if "values" in needed and out.get("values") is None:
            out["values"] = self.values(inputs)
        return {name: values for name, values in out.items() if values is not None}

    def loss(
        self,
        batch: Rollout,
        step: OptimizerStep,
        rows: Tensor,
        plan: StepPlan,
        metrics: StepMetrics,
        shares: Tensor | None = None,
    ) -> tuple[LossOutput, TokenStats]:
        """Loss of one micro-batch, and what the policy says of it now.

        Args:
            batch: the rollout.
            step: what the loss is made from.
            rows: completions of the micro-batch.
            plan: their rows of the step's plan.
            metrics: added to.
            shares: how many completions each of them stands for in the metrics, [n]; None: itself alone.
        """
        objective, wanted = step.objective, step.objective.loss_requires()
        inputs = self.inputs(batch, rows)
        values = self.critic(inputs) if self.critic is not None and "values" in wanted else None
        experts = None
        if step.experience.router_experts_old is not None:
            experts = step.experience.router_experts_old[rows.to(plan.lengths.device)]
        entropy: EntropyMode = "grad" if "entropy" in wanted else "detached"
        routing = self._told(inputs, rows)
        stats: TokenStats = self.policy(
            inputs,
            batch.temperature,
            entropy,
            experts=experts,
            routing=routing,
            values=self.of_head("values" in wanted),
            frozen=step.warmup,
        )
        values = stats.values if values is None else values
        if stats.router_logscores is not None and plan.router_logscores_old is not None:
            factor = objective.trust_region.router_factor(stats.router_logscores, plan.router_logscores_old)
            weights = plan.tokens if shares is None else plan.tokens * shares.to(factor)[:, None]
            metrics.add("router/factor", (factor * weights).sum(), weights.sum())

        def loss(k: slice) -> LossOutput:
            scores = stats.router_logscores
            return objective.loss(
                stats.logprobs[k],
                plan if k == slice(None) else plan.select(torch.arange(len(rows), device=plan.lengths.device)[k]),
                entropy=None if stats.entropy is None else stats.entropy[k],
                values=None if values is None else values[k],
                router_logscores=None if scores is None else scores[k],
            )

        if shares is None:
            return loss(slice(None)), stats
        each = [loss(slice(k, k + 1)) for k in range(len(rows))]
        sums = StepMetrics()
        for one, share in zip(each, shares.tolist(), strict=True):
            sums.update({key: Sum(total * share, weight * share) for key, (total, weight) in one.metrics.items()})
            sums.update({}, one.maxima)
        total = torch.stack([one.loss for one in each]).sum()
        return LossOutput(total, torch.cat([one.token_weights for one in each]), sums.sums, sums.maxima), stats

    def values(self, inputs: PolicyInput) -> Tensor:
        """The critic's value of the state before each token, [n, T]."""
        out: Tensor = self.critic(inputs) if self.critic is not None else self.policy.values(inputs)
        return out

    @torch.no_grad()
    def values_of(self, batch: Rollout) -> Tensor:
        """Values of the whole rollout by the critic as it is now, [N, T]."""
        everything = torch.arange(len(batch.completions))
        parts = []
        for _, rows in self.aligned(list(self.micro_batches(batch, everything))):
            values = self.values(self._one_token() if rows is None else self.inputs(batch, rows))
            if rows is not None:
                parts.append((rows, values))
        self.rest()
        return gather_rows(parts, len(batch.completions))

    def score_sqnorm(self, batch: Rollout, row: Tensor) -> Tensor:
        """Squared norm of the gradient of log pi(o|q) with respect to all trainable weights, for one completion.

        Exact, and slow: a backward pass for each completion by itself.
        """
        if self.policy.sharded:
            raise RuntimeError("sharded weights have no gradient of a single completion")
        weights = [p for p in self.policy.parameters() if p.requires_grad]
        with torch.enable_grad():
            inputs = self.inputs(batch, row)
            stats = self.policy(inputs, batch.temperature, "none", routing=self._told(inputs, row))
            gradients = torch.autograd.grad(stats.logprobs.sum(), weights, allow_unused=True)
        squares = [g.double().square().sum() for g in gradients if g is not None]
        return torch.stack(squares).sum().float()

    @torch.no_grad()
    def sequence_entropy(self, batch: Rollout) -> Tensor:
        """<H>_i: mean entropy over the tokens of each completion, [N]; 0 for an empty one."""
        parts = []
        for _, rows in self.aligned(list(self.micro_batches(batch, torch.arange(len(batch.completions))))):
            inputs = self._one_token() if rows is None else self.inputs(batch, rows)
            stats = self.policy(inputs, batch.temperature, "detached")
            if rows is None:
                continue
            lengths = torch.tensor([len(batch.completions[i].token_ids) for i in rows.tolist()])
            mask = torch.arange(stats.logprobs.shape[1])[None, :] < lengths[:, None]
            assert stats.entropy is not None
            parts.append((rows, token_mean(stats.entropy, mask.to(stats.entropy.device))))
        self.rest()
        return gather_rows(parts, len(batch.completions))


def _experts(batch: Rollout) -> list[Tensor]:
    """Of every completion.

    Raises:
        UserError: an engine that gives none.
    """
    found = [c.experts for c in batch.completions if c.experts is not None]
    if len(found) < len(batch.completions):
        raise UserError(
            "the completions do not say which experts their tokens went through",
            where="model.routing_replay",
            remedy="set routing_replay: old, or sample with the transformers engine",
        )
    return found
