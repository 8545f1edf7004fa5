"""Forward passes of a rollout: the one before the first update, and the loss of each micro-batch."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from lit_grpo.distributed.sharding import reshard
from lit_grpo.errors import UserError
from lit_grpo.learner.batch import gather_rows, positions
from lit_grpo.learner.budget import GivesWay, MemoryRanOut, attempt
from lit_grpo.learner.metric_sums import StepMetrics
from lit_grpo.objectives.objective import Objective, StepPlan
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.objectives.tensors import token_mean
from lit_grpo.policy.critic import Critic
from lit_grpo.policy.forward.batching import PolicyInput, pad_rows
from lit_grpo.policy.forward.policy import EntropyMode, Policy, TokenStats, ValueMode
from lit_grpo.policy.forward.routing import RoutingTable
from lit_grpo.types import Experience, LossOutput, Rollout, Sum

T = TypeVar("T")
FROM_POLICY = frozenset({"old_logprobs", "entropy", "sum_squared_probs", "router_logscores_old"})
"""Fields of an experience that one forward pass of the policy gives."""
COMPUTABLE = FROM_POLICY | {"ref_logprobs", "values", "final_values", "score_sqnorm"}
"""Fields of an experience that :meth:`ForwardRunner.old_forward` can compute."""


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """The inputs of one optimizer step: which completions are learned from, by which objective and advantages."""

    objective: Objective
    state: ObjectiveState = field(default_factory=ObjectiveState)
    """Histories of the objective, which the step reads only."""
    experience: Experience
    """Tensors of the whole rollout."""
    advantages: Tensor
    """Advantages of the whole rollout, [N, T]."""
    rows: Tensor
    """Completions of the step, as indices into the rollout, [n]."""
    update: int = 0
    """Position among the optimizer steps of the rollout, counting the passes of one step once."""
    pass_index: int = 0
    """Number of the pass over the same completions (Lopti takes two)."""
    warmup: bool = False
    """Only the critic learns: the policy, and a backbone that it shares with the critic, stay untouched."""
    routing: RoutingTable | None = None
    """Experts that every pass of the policy is to use; None: those that its routers choose."""


@dataclass(frozen=True)
class ForwardResults:
    """Tensors of a rollout by the models before its first update, [N, T] or [N]; None where not asked for."""

    old_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    sum_squared_probs: Tensor | None = None
    values: Tensor | None = None
    final_values: Tensor | None = None
    ref_logprobs: Tensor | None = None
    score_sqnorm: Tensor | None = None
    router_logscores_old: Tensor | None = None
    router_experts_old: Tensor | None = None
    routing: RoutingTable | None = None
    """Experts that the updates are to use again, under ``routing_replay``."""

    def added_to(self, experience: Experience) -> Experience:
        """Return the experience with every tensor that is known here."""
        known = {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}
        known.pop("routing", None)
        return replace(experience, **known)


@dataclass(frozen=True, kw_only=True)
class ForwardRunner:
    """The models of a run, and how a rollout goes through them. Holds nothing of any rollout."""

    policy: Policy
    reference: Policy | None = None
    critic: Critic | None = None
    """A critic with a backbone of its own; otherwise values come from the policy's value head."""
    micro_batches: Callable[[Rollout, Tensor], Iterator[Tensor]]
    """Cuts some completions of a rollout into micro-batches."""
    inputs: Callable[[Rollout, Tensor], PolicyInput]
    """Makes the model input of some completions of a rollout."""
    routing_replay: Literal["none", "old", "sampler"] = "none"
    """``old``: experts that the policy chooses before the first update are used again in every update; ``sampler``:
    those that the engine chose are used in every pass of the policy. See :mod:`lit_grpo.policy.forward.routing`."""
    max_over_ranks: Callable[[Sequence[int]], list[int]] | None = None
    """Returns the largest of each number over all ranks; given where models are sharded, else None."""
    device: torch.device | str = "cpu"
    """Device on which the models compute."""
    gives_way: GivesWay | None = None
    """What happens where memory runs out; None: the error passes as it is."""

    # ---------------------------------------------------------------------------------------------- before an update

    def old_forward(
        self, batch: Rollout, experience: Experience, needed: frozenset[str], rows: Tensor | None = None
    ) -> ForwardResults:
        """Compute what an objective needs before the first update, without gradient.

        Args:
            batch: the rollout.
            experience: its tensors.
            needed: names of fields, see ``Objective.requires``; the router's are left out where the model has none.
            rows: the only completions that will be looked at; fields of the others hold NaN. None: all.

        Raises:
            ValueError: a field that no forward pass can compute.
        """
        if unknown := needed - COMPUTABLE:
            raise ValueError(f"no pass computes {', '.join(sorted(unknown))}")
        everything = torch.arange(len(batch.completions))
        if not self.policy.routes:
            needed = needed - {"router_logscores_old"}
        by_field: defaultdict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        routing = self._new_routing_table(batch, experience)
        if self.routing_replay == "old" or needed & (FROM_POLICY | {"ref_logprobs", "values"}):
            for micro_batch, found in self.each_micro_batch(
                batch,
                everything if rows is None else rows,
                lambda chosen: self._without_gradient(batch, chosen, needed, routing),
                "computing log-probabilities before an update",
            ):
                for name, values in found.items():
                    by_field[name].append((micro_batch, values))
        score_sqnorm = None
        if "score_sqnorm" in needed:
            score_sqnorm = torch.stack([self.score_sqnorm(batch, row, routing) for row in everything.split(1)])
        tensors: dict[str, Any] = {}
        # NaN, so that a completion that was left out is never mistaken for a measured one; ids of experts have no NaN.
        for name, micro_batches in by_field.items():
            missing = float("nan") if micro_batches[0][1].is_floating_point() else 0
            tensors[name] = gather_rows(micro_batches, len(batch.completions), missing)
        if "final_values" in needed:
            tensors["final_values"] = self.final_values(batch)
        self.reshard()
        return ForwardResults(score_sqnorm=score_sqnorm, routing=routing, **tensors)

    def _new_routing_table(self, batch: Rollout, experience: Experience) -> RoutingTable | None:
        if self.routing_replay == "none":
            return None
        prompt_lengths = torch.tensor([len(p.token_ids) for p in batch.prompts])
        groups = experience.group_ids.cpu()
        routing = RoutingTable(prompt_lengths[groups], groups, experience.width)
        if self.routing_replay == "sampler":
            routing.put_sampled(groups.tolist(), _sampled_experts(batch))
        return routing

    @torch.no_grad()
    def _without_gradient(
        self, batch: Rollout, rows: Tensor | None, needed: frozenset[str], routing: RoutingTable | None
    ) -> dict[str, Tensor]:
        """Compute fields of the completions ``rows``, [n, T, ...], or of one dummy token where that is None."""
        inputs = self._inputs_or_dummy(batch, rows)
        replays = self.routing_replay == "old"
        out: dict[str, Tensor | None] = {}
        if replays or needed & FROM_POLICY:
            stats = self.policy(
                inputs,
                batch.temperature,
                "detached" if "entropy" in needed else "none",
                squares="sum_squared_probs" in needed,
                experts="active" if "router_logscores_old" in needed else None,
                routing="recorded" if replays else _routing_for(routing, inputs, rows),
                values="head" if "values" in needed and self.critic is None else "none",
            )
            if replays and routing is not None and rows is not None:
                assert stats.routing is not None
                routing.put(inputs, rows, stats.routing)
            out["old_logprobs"] = stats.logprobs if "old_logprobs" in needed else None
            out["entropy"] = stats.entropy
            out["sum_squared_probs"] = stats.sum_squared_probs
            out["values"] = stats.values
            out["router_logscores_old"], out["router_experts_old"] = stats.router_logscores, stats.router_experts
        if "ref_logprobs" in needed:
            if self.reference is None:
                raise RuntimeError("the objective needs a reference model, and none was made")
            out["ref_logprobs"] = self.reference(inputs, batch.temperature, "none").logprobs
        if "values" in needed and out.get("values") is None:
            out["values"] = self.values(inputs)
        return {name: values for name, values in out.items() if values is not None}

    def score_sqnorm(self, batch: Rollout, row: Tensor, routing: RoutingTable | None = None) -> Tensor:
        """Return the squared norm of the gradient of log pi(o|q) by all trainable weights, for one completion.

        It is exact, and slow: each completion takes a backward pass by itself.
        """
        if self.policy.sharded:
            raise RuntimeError("sharded weights have no gradient of a single completion")
        weights = [p for p in self.policy.parameters() if p.requires_grad]
        with torch.enable_grad():
            inputs = self.inputs(batch, row)
            stats = self.policy(inputs, batch.temperature, "none", routing=_routing_for(routing, inputs, row))
            gradients = torch.autograd.grad(stats.logprobs.sum(), weights, allow_unused=True)
        squares = [g.double().square().sum() for g in gradients if g is not None]
        return torch.stack(squares).sum().float()

    @torch.no_grad()
    def sequence_entropy(self, batch: Rollout) -> Tensor:
        """Return <H>_i, the mean entropy over the tokens of each completion, [N]; 0 for an empty one."""
        means = []
        for rows, stats in self.each_micro_batch(
            batch,
            torch.arange(len(batch.completions)),
            lambda chosen: self.policy(self._inputs_or_dummy(batch, chosen), batch.temperature, "detached"),
            "measuring entropies",
        ):
            lengths = torch.tensor([len(batch.completions[i].token_ids) for i in rows.tolist()])
            mask = torch.arange(stats.logprobs.shape[1])[None, :] < lengths[:, None]
            assert stats.entropy is not None
            means.append((rows, token_mean(stats.entropy, mask.to(stats.entropy.device))))
        self.reshard()
        return gather_rows(means, len(batch.completions))

    # ---------------------------------------------------------------------------------------------- in an update

    def loss(
        self, batch: Rollout, step: OptimizerStep, rows: Tensor, plan: StepPlan, multiplicity: Tensor | None = None
    ) -> tuple[LossOutput, TokenStats]:
        """Compute the loss of one micro-batch; also returns what the policy now says of its tokens.

        Args:
            batch: the rollout.
            step: what the loss is made from.
            rows: completions of the micro-batch, [n].
            plan: their rows of the step's plan.
            multiplicity: how many completions each of them stands for in the metrics, [n]; None: itself alone.
        """
        objective, wanted = step.objective, step.objective.loss_requires()
        inputs = self.inputs(batch, rows)
        values = self.critic(inputs) if self.critic is not None and "values" in wanted else None
        experts = None
        if step.experience.router_experts_old is not None:
            experts = step.experience.router_experts_old[rows.to(plan.lengths.device)]
        entropy: EntropyMode = "grad" if "entropy" in wanted else "detached"
        stats: TokenStats = self.policy(
            inputs,
            batch.temperature,
            entropy,
            experts=experts,
            routing=_routing_for(step.routing, inputs, rows),
            values=self.value_mode("values" in wanted),
            frozen=step.warmup,
        )
        values = stats.values if values is None else values

        def loss_of(selected: slice) -> LossOutput:
            scores = stats.router_logscores
            everything = selected == slice(None)
            return objective.loss(
                stats.logprobs[selected],
                plan if everything else plan.select(torch.arange(len(rows), device=plan.lengths.device)[selected]),
                entropy=None if stats.entropy is None else stats.entropy[selected],
                values=None if values is None else values[selected],
                router_logscores=None if scores is None else scores[selected],
            )

        if multiplicity is None:
            out = loss_of(slice(None))
            return replace(out, metrics=out.metrics | _router_metrics(objective, stats, plan)), stats
        # The metrics of each completion are weighted by themselves, so each needs a loss of its own.
        losses = [loss_of(slice(k, k + 1)) for k in range(len(rows))]
        sums = StepMetrics()
        for out, count in zip(losses, multiplicity.tolist(), strict=True):
            sums.update({key: Sum(total * count, weight * count) for key, (total, weight) in out.metrics.items()})
            sums.update({}, out.maxima)
        total = torch.stack([out.loss for out in losses]).sum()
        metrics = sums.sums | _router_metrics(objective, stats, plan, multiplicity)
        return LossOutput(total, torch.cat([out.token_weights for out in losses]), metrics, sums.maxima), stats

    def dummy_forward(self, step: OptimizerStep) -> Tensor:
        """Run the passes of :meth:`loss` on one token, and return 0 with a gradient of 0 for every weight that learns.

        By this a rank with fewer micro-batches than others takes part in the collectives of their passes.
        """
        # Forward and backward of sharded models gather weights and sum gradients over ranks, and whoever is missing is
        # waited for. Times 0 and not detached: the backward pass must go through every weight.
        total = torch.zeros((), device=self.device)
        inputs = self._one_token()
        wants_values = "values" in step.objective.loss_requires()
        if self.critic is not None and wants_values:
            total = total + self.critic(inputs).sum()
        stats = self.policy(inputs, 1.0, "none", values=self.value_mode(wants_values), frozen=step.warmup)
        return (total + stats.logprobs.sum() + (0.0 if stats.values is None else stats.values.sum())) * 0.0

    def value_mode(self, wanted: bool) -> ValueMode:
        """Return whether the value head's gradient ends at its own weights or goes on into the backbone."""
        head = self.policy.value_head
        if head is None or not wanted:
            return "none"
        return "head" if head.config.detach else "backbone"

    # ---------------------------------------------------------------------------------------------- values, ranks

    def values(self, inputs: PolicyInput) -> Tensor:
        """Return the critic's value of the state before each token, [n, T]."""
        out: Tensor = self.critic(inputs) if self.critic is not None else self.policy.values(inputs)
        return out

    @torch.no_grad()
    def rollout_values(self, batch: Rollout) -> Tensor:
        """Return the values of a whole rollout by the critic as it is now, [N, T]."""
        found = self.each_micro_batch(
            batch,
            torch.arange(len(batch.completions)),
            lambda chosen: self.values(self._inputs_or_dummy(batch, chosen)),
            "computing the critic's values",
        )
        self.reshard()
        return gather_rows(found, len(batch.completions))

    @torch.no_grad()
    def logprobs(self, batch: Rollout, rows: Tensor) -> Tensor:
        """Return log-probabilities of completions ``rows``, [n], by the policy as it is now, [n, T]."""
        done = self.each_micro_batch(
            batch,
            rows,
            lambda chosen: self.policy(self._inputs_or_dummy(batch, chosen), batch.temperature, "none").logprobs,
            "computing log-probabilities",
        )
        found = [(positions(rows, chosen), logprobs) for chosen, logprobs in done]
        self.reshard()
        return gather_rows(found, len(rows)) if found else torch.zeros(0, 0, device=self.device)

    @torch.no_grad()
    def final_values(self, batch: Rollout) -> Tensor:
        """Return the critic's value of the state after the last token of truncated completions, [N]; 0 for others."""
        # Values are those before a token. With one more token, whichever, the last of them is the one that is wanted:
        # attention is causal, so that the token itself has no influence on it.
        completions = [
            replace(c, token_ids=(*c.token_ids, 0), logprobs=(*c.logprobs, 0.0)) if c.truncated else c
            for c in batch.completions
        ]
        longer = replace(batch, completions=completions)
        truncated = torch.tensor([c.truncated for c in completions])
        out = torch.zeros(len(completions), device=self.device)
        for rows, values in self.each_micro_batch(
            longer,
            truncated.nonzero()[:, 0],
            lambda chosen: self.values(self._inputs_or_dummy(longer, chosen)),
            "computing the critic's values",
        ):
            last = torch.tensor([len(completions[i].token_ids) - 1 for i in rows.tolist()], device=values.device)
            out[rows.to(out.device)] = values.gather(1, last[:, None])[:, 0].to(out)
        return out

    def each_micro_batch(
        self, batch: Rollout, rows: Tensor, run: Callable[[Tensor | None], T], doing: str
    ) -> list[tuple[Tensor, T]]:
        """Run a pass without gradient over completions in micro-batches, in smaller ones once memory has run out.

        Args:
            batch: the rollout.
            rows: completions that go through, [n].
            run: the pass over some of them; over a dummy where it is given None, on a rank that has fewer than others.
            doing: what is done, in words.

        Returns:
            The completions of each micro-batch, [m], and what the pass returned for them.

        Raises:
            MemoryShortageError: memory ran out on a single completion.
        """
        done: list[tuple[Tensor, T]] = []
        cut = self.pad_micro_batches_across_ranks(list(self.micro_batches(batch, rows)))
        waiting = deque(chosen for _, chosen in cut)
        while waiting:
            chosen = waiting.popleft()
            try:
                result = self.attempt(partial(run, chosen), chosen)
            except MemoryRanOut as failure:
                assert self.gives_way is not None
                self.gives_way.give_way(batch, failure, doing)
                # What has been computed stays: no pass depends on another.
                left = [chosen, *waiting]
                waiting = deque(self.micro_batches(batch, torch.cat([one for one in left if one is not None])))
                continue
            if chosen is not None:
                done.append((chosen, result))
        return done

    def attempt(self, run: Callable[[], T], rows: Tensor | None) -> T:
        """Return ``run()``, a pass over completions ``rows``, or over a dummy where that is None.

        Raises:
            MemoryRanOut: memory ran out, and :attr:`gives_way` says what happens then.
        """
        return run() if self.gives_way is None or rows is None else attempt(run, rows)

    def pad_micro_batches_across_ranks(self, *cuts: Sequence[Tensor]) -> Iterator[tuple[int, Tensor | None]]:
        """Yield (number of the list, micro-batch) in order, each list filled up with None to its length on other ranks.

        Where nothing is sharded, lists stay as they are.
        """
        # Every pass of a sharded model gathers its weights from all ranks, so all must make equally many.
        counts = [len(cut) for cut in cuts]
        if self.max_over_ranks is not None:
            counts = self.max_over_ranks(counts)
        for number, (cut, count) in enumerate(zip(cuts, counts, strict=True)):
            yield from ((number, rows) for rows in cut)
            yield from ((number, None) for _ in range(count - len(cut)))

    def reshard(self) -> None:
        """Free the weights that passes without gradient left gathered."""
        reshard(self.policy, self.reference, self.critic)

    def _inputs_or_dummy(self, batch: Rollout, rows: Tensor | None) -> PolicyInput:
        return self._one_token() if rows is None else self.inputs(batch, rows)

    def _one_token(self) -> PolicyInput:
        return pad_rows([(0,)], [(0,)], width=1, device=self.device)


def _routing_for(routing: RoutingTable | None, inputs: PolicyInput, rows: Tensor | None) -> Tensor | None:
    """Return the experts for a pass over completions ``rows``, [tokens, layers, K]; None lets the routers choose."""
    return None if routing is None or rows is None else routing.get(inputs, rows)


@torch.no_grad()
def _router_metrics(
    objective: Objective, stats: TokenStats, plan: StepPlan, multiplicity: Tensor | None = None
) -> dict[str, Sum]:
    """Return the mean of RSPO's router factor over tokens; nothing where the model has no routers."""
    if stats.router_logscores is None or plan.router_logscores_old is None:
        return {}
    factor = objective.trust_region.router_factor(stats.router_logscores, plan.router_logscores_old)
    weights = plan.tokens if multiplicity is None else plan.tokens * multiplicity.to(factor)[:, None]
    return {"policy/router_factor": Sum((factor * weights).sum(), weights.sum())}


def _sampled_experts(batch: Rollout) -> list[Tensor]:
    """Return the experts that the engine chose for every completion.

    Raises:
        UserError: the engine does not say.
    """
    found = [c.experts for c in batch.completions if c.experts is not None]
    if len(found) < len(batch.completions):
        raise UserError(
            "the completions do not say which experts their tokens went through",
            where="model.routing_replay",
            remedy="set routing_replay: old, or sample with the transformers engine",
        )
    return found
