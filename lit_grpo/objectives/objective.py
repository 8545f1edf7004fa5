"""Objective: a method as one composition of parts. Pure functions of tensors; the trainer owns the loop.

    L = - sum_{i,t} w_i f_i c_{i,t} lambda_{i,t} F(ratio_{i,t}, A_{i,t})  +  sum_k coef_k R_k

w aggregation weight, f filter, c sampler weight, lambda token weight, F trust region; all but the ratio inside F (and
log pi where there is no ratio) are detached. The order of one rollout:

    state = objective.new_state()                                 # once per run; goes into checkpoints
    advantages, state = objective.advantages(exp, state, reduce)  # once per rollout, whole groups
    for each optimizer step, for each pass:
        plan = objective.plan(exp.select(rows), advantages[rows], state, reduce=reduce, pass_index=p)
        for each micro-batch: objective.loss(logprobs, plan.select(...), ...).loss.backward()
    state = objective.end_of_rollout(state, approx_kl=kl)         # methods that adapt
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_grpo.errors import UserError
from lit_grpo.objectives import checks, surrogate
from lit_grpo.objectives.advantages import AdvantageInputs, Estimator, GroupStd
from lit_grpo.objectives.aggregation import Aggregation, Counts, SeqMean
from lit_grpo.objectives.filters import Filters
from lit_grpo.objectives.part import Part
from lit_grpo.objectives.plan import StepPlan
from lit_grpo.objectives.ratios import ONE_PER_SEQUENCE, WITHOUT_OLD, RatioKind
from lit_grpo.objectives.regularizers import Regularizers
from lit_grpo.objectives.sampler_correction import NoCorrection, SamplerCorrection
from lit_grpo.objectives.shaping import Shaping
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.objectives.tensors import Groups, Reduce, masked, over_ranks
from lit_grpo.objectives.token_weights import (
    EntropySignal,
    TokenWeights,
    conflict_masks,
    lopti_mask,
    mean_entropy,
    top_entropy_mask,
)
from lit_grpo.objectives.trust_regions import Clip, NoTrustRegion, TrustRegion
from lit_grpo.types import Experience, LossOutput

__all__ = ["Objective", "StepPlan"]

NO_IMPORTANCE_SAMPLING = "+no_importance_sampling"
"""End of the name of an objective whose data are off-policy though its ratio is none or self."""


@dataclass(frozen=True)
class Objective:
    """A method as parts that can each be replaced (``dataclasses.replace`` or overrides of :meth:`from_recipe`)."""

    recipe: str = "custom"
    """The recipe that it started from."""
    shaping: Shaping = field(default_factory=Shaping)
    advantage: Estimator = field(default_factory=GroupStd)
    ratio: RatioKind = "token"
    trust_region: TrustRegion = field(default_factory=Clip)
    sampler: SamplerCorrection = field(default_factory=NoCorrection)
    aggregation: Aggregation = field(default_factory=SeqMean)
    filters: Filters = field(default_factory=Filters)
    token_weights: TokenWeights = field(default_factory=TokenWeights)
    entropy_signal: EntropySignal = field(default_factory=EntropySignal)
    regularizers: Regularizers = field(default_factory=Regularizers)
    critic_warmup_rollouts: int = 0
    """Rollouts at the start that train the critic alone, unless the settings of the critic say otherwise."""
    off_policy: bool = False
    """Whether the run takes several optimizer steps per rollout (:meth:`for_run`), all but the first off-policy."""
    demonstrations: bool = False
    """Whether completions are the solutions of the data, so that nothing is sampled and there are no rewards."""

    def __post_init__(self) -> None:
        checks.check_parts(self)

    # ------------------------------------------------------------------------------------------------ what it is

    @classmethod
    def from_recipe(cls, name: str, **overrides: Any) -> Objective:
        """Make a named method; ``overrides`` are fields of :class:`ObjectiveConfig` (``clip_high=0.3``).

        Raises:
            UserError: unknown recipe or override (with the nearest valid name), or a contradiction (with the reason).
        """
        from lit_grpo.objectives.overrides import build

        return build(name, overrides)

    @property
    def name(self) -> str:
        """``dapo``, or ``dapo+aggregation=seq_mean`` where a part is not the recipe's own.

        It ends in ``+no_importance_sampling`` where data are off-policy and no ratio says so.
        """
        from lit_grpo.objectives.recipes import RECIPES

        if self.recipe not in RECIPES:
            return self.recipe + (NO_IMPORTANCE_SAMPLING if self.without_importance_sampling else "")
        recipe = RECIPES[self.recipe]
        own, original = self.labels(), recipe.objective.labels()
        # Said once: without importance sampling the ratio is none or self, whatever the recipe's own is.
        left_out = recipe.optional | ({"ratio"} if self.without_importance_sampling else set())
        changed = [f"+{k}={v}" for k, v in own.items() if v != original[k] and k not in left_out]
        return self.recipe + "".join(changed) + (NO_IMPORTANCE_SAMPLING if self.without_importance_sampling else "")

    def parts(self) -> Iterator[Part]:
        """Yield every part with settings, in the order of the fields."""
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if isinstance(value, Part):
                yield value

    def labels(self) -> dict[str, str]:
        """Return the kinds and switches that make the method the one named; numbers of its parts are not among them."""
        labels = {
            "advantage": self.advantage.kind,
            "ratio": self.ratio,
            "trust_region": self.trust_region.kind,
            "sampler_correction": self.sampler.kind,
            "aggregation": self.aggregation.kind,
        }
        switches = (self.filters, self.token_weights, self.entropy_signal, self.regularizers, self.shaping)
        for part in switches:
            labels |= part.labels()
        return labels

    def describe(self) -> dict[str, Any]:
        """Return the plain values of every part, for logs: ``{"name": ..., "clip_high": ..., ...}``."""
        out: dict[str, Any] = {"name": self.name, "recipe": self.recipe, "ratio": self.ratio}
        out |= {k: getattr(self, k).kind for k in ("advantage", "trust_region", "aggregation")}
        out["sampler_correction"] = self.sampler.kind
        for part in self.parts():
            # A user's own part may be a plain object.
            if is_dataclass(part):
                out |= {f.name: getattr(part, f.name) for f in fields(part) if f.name != "function"}
        return out | {"passes": self.passes, "off_policy": self.off_policy} | {"demonstrations": self.demonstrations}

    def for_run(self, max_new_tokens: int, updates_per_rollout: int = 1) -> Objective:
        """Return the objective with what the run fixes.

        Args:
            max_new_tokens: the generation limit, which M of ``sum_const`` and L_max are.
            updates_per_rollout: optimizer steps per rollout, passes of one step not counted.
        """
        shaping = self.shaping
        if shaping.overlong_penalty and not shaping.overlong_max:
            shaping = replace(shaping, overlong_max=max_new_tokens)
        return replace(
            self,
            shaping=shaping,
            aggregation=self.aggregation.for_run(max_new_tokens),
            off_policy=updates_per_rollout * self.passes > 1,
        )

    def check(self, *, group_size: int, updates_per_rollout: int, has_critic: bool) -> None:
        """Refuse contradictions with the run.

        Args:
            group_size: completions per prompt.
            updates_per_rollout: optimizer steps per rollout, passes of one step not counted.
            has_critic: whether the run has a value function.

        Raises:
            UserError: with the reason and the key.
        """
        checks.check_run(self, group_size, updates_per_rollout, has_critic)

    # ------------------------------------------------------------------------------------------------ what it needs

    @property
    def passes(self) -> int:
        """Optimizer passes over the same completions."""
        return 2 if self.token_weights.lopti_eta else 1

    @property
    def without_importance_sampling(self) -> bool:
        """Whether off-policy data are treated as if they were on-policy: no ratio corrects, so no clip acts."""
        return self.off_policy and self.ratio in WITHOUT_OLD and not self.demonstrations

    @property
    def trust_region_idles(self) -> bool:
        """Whether the recipe is known for its trust region and several updates, and the run takes a single one.

        The ratio is then 1 throughout, and the trust region never acts. GRPO's own clip does not count.
        """
        from lit_grpo.objectives.recipes import RECIPES

        recipe, region = RECIPES.get(self.recipe), self.trust_region
        # A user's own may do something at ratio 1, too.
        own = region.kind == "custom" or type(region).__module__ != Clip.__module__
        if self.off_policy or own or (recipe is not None and recipe.updates == 1):
            return False
        return region not in (Clip(), NoTrustRegion())

    @property
    def dynamic_sampling(self) -> bool:
        """Whether uniform groups should be replaced by sampling more prompts."""
        return self.filters.dynamic_sampling

    @property
    def initial_entropy_prompts(self) -> int:
        """Training prompts whose completions by the untouched model must be measured first, 0 if none.

        The trainer measures the mean of <H>_i over them and puts it into the state
        (:meth:`ObjectiveState.with_initial_entropy`) before the first rollout.
        """
        return 100 if self.entropy_signal.gated and self.entropy_signal.initial_entropy is None else 0

    @property
    def uses_correct(self) -> tuple[str, ...]:
        """The settings that ask which completions are correct, by key; empty if the rewards alone are enough."""
        return tuple(key for part in self.parts() for key in part.uses_correct)

    @property
    def varies_by_token(self) -> bool:
        """Whether tokens of one completion can have different advantages or weights."""
        return self.token_weights.vary_by_token or self.advantage.per_token

    def requires(self, updates_per_rollout: int) -> frozenset[str]:
        """Return the fields of the experience that a pass without gradient must fill before the first update."""
        needed = set(self.advantage.required())
        if self.uses_old(updates_per_rollout):
            needed.add("old_logprobs")
        if self.regularizers.kl_coef:
            needed.add("ref_logprobs")
        if self.regularizers.value_coef:
            needed.add("values")
        if self.shaping.entropy_reward or self.entropy_signal.on or self.token_weights.top_entropy:
            needed.add("entropy")
        if self.trust_region.needs_router_scores and updates_per_rollout * self.passes > 1:
            needed.add("router_logscores_old")
        return frozenset(needed)

    def uses_old(self, updates_per_rollout: int) -> bool:
        """Tell whether pi_old must be known before the first update."""
        # With a single update pi_old is the policy of the forward pass itself, so most methods save a pass. With
        # several it is needed even where no part of the loss has it: how far the policy has moved, and how far it was
        # from the sampler, would otherwise be measured against the policy in mid-update.
        early = self.regularizers.kl_reward or self.sampler.needs_old_early or self.token_weights.lopti_eta
        return bool(early) or updates_per_rollout > 1

    def loss_requires(self) -> frozenset[str]:
        """Return names of what :meth:`loss` needs of the current forward pass besides log-probabilities."""
        needed = set()
        if self.regularizers.entropy_coef:
            needed.add("entropy")
        if self.regularizers.value_coef:
            needed.add("values")
        if self.trust_region.needs_router_scores:
            needed.add("router_logscores")
        return frozenset(needed)

    # ------------------------------------------------------------------------------------------------ state

    @property
    def state_fields(self) -> frozenset[str]:
        """Fields of :class:`ObjectiveState` that the parts use; the others keep their defaults."""
        return frozenset().union(*(part.state_fields for part in self.parts()))

    def new_state(self) -> ObjectiveState:
        """Make the state at the start of a run."""
        used = self.state_fields
        return ObjectiveState(
            beta=self.trust_region.penalty_coefficient(ObjectiveState()) if "beta" in used else None,
            initial_entropy=self.entropy_signal.initial_entropy if "initial_entropy" in used else None,
        )

    def adopt_state(self, state: ObjectiveState) -> ObjectiveState:
        """Return the state with which a run goes on under this objective: what both use is kept, the rest is new."""
        # What was seen of the run is no part's own: any later objective may need it.
        names = self.state_fields | {"first_rollout_entropy"}
        kept = {name: value for name in names if (value := getattr(state, name)) is not None}
        return replace(self.new_state(), **kept)

    def merge_states(self, states: Sequence[ObjectiveState]) -> ObjectiveState:
        """Join the states of all ranks after :meth:`advantages`: each prompt's longest history, the widest range."""
        return self.advantage.merge_states(states)

    def end_of_rollout(self, state: ObjectiveState, *, approx_kl: float | None) -> ObjectiveState:
        """Adapt to the rollout: the coefficient of an adaptive penalty to the measured KL.

        Args:
            state: after :meth:`advantages`.
            approx_kl: mean of k3 = rho - 1 - log rho against the old policy, over the tokens of all ranks; None if no
                step was taken.
        """
        if state.beta is None or approx_kl is None:
            return state
        return replace(state, beta=self.trust_region.adapted(state.beta, approx_kl))

    # ------------------------------------------------------------------------------------------------ rollout

    def rewards(self, exp: Experience, state: ObjectiveState) -> tuple[Tensor, Tensor]:
        """Return rewards before and after length penalties, map and entropy, both [N] float64 and without a KL term."""
        base = self.shaping.base(exp, exp.rewards.double(), max(state.rollouts - 1, 0))
        return base, self.shaping.shape(exp, base)

    def correct(self, exp: Experience, state: ObjectiveState) -> Tensor | None:
        """Return which completions count as correct, after label noise, [N] bool.

        None if the experience does not say it and nothing asks; if something asks, rewards above 0 count.
        """
        if exp.correct is None and not self.uses_correct:
            return None
        return self.shaping.correct(exp, max(state.rollouts - 1, 0))

    def advantage_inputs(self, exp: Experience, state: ObjectiveState, reduce: Reduce | None) -> AdvantageInputs:
        """Make the inputs of the estimator: shaped rewards, with the KL term where it belongs."""
        _, shaped = self.rewards(exp, state)
        token_penalty = None
        if self.regularizers.kl_reward:
            if exp.old_logprobs is None or exp.ref_logprobs is None:
                raise UserError("a KL term in the reward needs old_logprobs and ref_logprobs before the first update")
            difference = masked((exp.old_logprobs - exp.ref_logprobs).double(), exp.mask)
            token_penalty = -self.regularizers.kl_coef * difference
            if not self.advantage.per_token:
                shaped, token_penalty = shaped + token_penalty.sum(1), None
        groups, correct = Groups.of(exp.group_ids), self.correct(exp, state)
        return AdvantageInputs(exp, shaped, groups, token_penalty, state, reduce, correct)

    @torch.no_grad()
    def advantages(
        self, exp: Experience, state: ObjectiveState, reduce: Reduce | None = None
    ) -> tuple[Tensor, ObjectiveState]:
        """Compute the advantages of all completions of a rollout; once per rollout, groups whole.

        Returns:
            The advantages, [N, T], detached; that of a whole completion stands in all of its columns, padding included.
            The state to plan and to end this rollout with: a new one for methods with a history (DCPO, label noise).
        """
        if "rollouts" in self.shaping.state_fields:
            state = replace(state, rollouts=state.rollouts + 1)
        value, state = self.advantage.advance(self.advantage_inputs(exp, state, reduce))
        if value.ndim == 1:
            value = value[:, None].expand(len(value), exp.width)
        return value.to(_dtype(exp.rewards)), state

    @torch.no_grad()
    def returns(self, exp: Experience, state: ObjectiveState, reduce: Reduce | None = None) -> Tensor:
        """Return the critic's targets, [N, T].

        Raises:
            UserError: the objective uses no critic.
        """
        return self.advantage.returns(self.advantage_inputs(exp, state, reduce)).to(_dtype(exp.rewards))

    # ------------------------------------------------------------------------------------------------ step

    @torch.no_grad()
    def plan(
        self,
        exp: Experience,
        advantages: Tensor,
        state: ObjectiveState,
        *,
        reduce: Reduce | None = None,
        pass_index: int = 0,
    ) -> StepPlan:
        """Fix filters, weights and denominators of one optimizer step over all ranks.

        Args:
            exp: the completions of the step, groups whole.
            advantages: their rows of :meth:`advantages`, [N, T].
            state: state of the run, which is not changed.
            reduce: sum over ranks, None for one process.
            pass_index: 0, or 1 in the second pass over the same completions.
        """
        groups = Groups.of(exp.group_ids)
        base, shaped = self.rewards(exp, state)
        correct = self.correct(exp, state)
        kept, counted = self.filters(base, correct, exp.truncated, groups)
        mask = exp.mask & kept[:, None]
        conflicts = None
        factors = torch.ones_like(advantages)
        if self.token_weights.conflict_overlap != "none":
            _required(exp, "token_ids")
        # The share of conflict tokens is logged for every method; only GTPO weighs by it.
        if exp.token_ids is not None and not self.advantage.per_token:
            # Every column of a completion holds its one advantage; where there is no column the sum is 0.
            sign = advantages[:, 0] if exp.width else advantages.sum(1)
            masks = conflict_masks(exp.token_ids, exp.lengths, exp.mask, sign, groups)
            conflicts = masks.either
            if self.token_weights.conflict_overlap != "none":
                factors = masks.weights(sign, self.token_weights.conflict_overlap)
        # Tokens in the denominators: at first all, whether or not their term is 0.
        counting = exp.mask
        if self.token_weights.top_entropy:
            top = top_entropy_mask(_required(exp, "entropy"), mask, self.token_weights.top_entropy, reduce)
            factors = factors * top
            if self.token_weights.top_entropy_denominator == "kept":
                counting = counting & top
        if self.sampler.sampler_denominator == "kept":
            corrected = self.sampler(_required(exp, "old_logprobs"), _required(exp, "sampler_logprobs"), exp.mask)
            counting = counting & (corrected.weights > 0)
        counts = Counts(
            tokens=counting.sum(1),
            counted=counted,
            member=kept,
            groups=groups,
            dtype=advantages.dtype,
            reduce=reduce,
            conflicts=None if conflicts is None else conflicts.sum(1),
        )
        weights = self.aggregation(counts)
        if self.aggregation.sums_trajectory and self.ratio in ONE_PER_SEQUENCE:
            # The ratio gives one term per completion: that term weighs 1/N, not each of its n_i copies.
            weights = weights / exp.lengths.clamp_min(1)
        pass_mask = torch.ones_like(mask)
        if self.token_weights.lopti_eta:
            old = masked(_required(exp, "old_logprobs"), exp.mask)
            pass_mask = lopti_mask(old, self.token_weights.lopti_eta, pass_index)
        signal, entropy_filtered = self._signal(exp, advantages, state)
        signal = masked(signal, exp.mask)

        # A completion none of whose tokens gets a gradient is left out of the forward that has one.
        contributes = mask & pass_mask & ((signal * factors != 0) | self._regularised(kept, correct)[:, None])
        active = contributes.any(1)
        # One collective for all three. Every rank takes part, also one that has none of the step's completions.
        in_nll = torch.zeros_like(kept) if correct is None else kept & correct
        totals = torch.stack([active.sum(), (exp.lengths * in_nll).sum(), mask.sum()]).double()
        active_total, correct_tokens, tokens = over_ranks(totals, reduce).tolist()
        regularizers = self.regularizers
        returns = self.returns(exp, state, reduce).to(advantages.dtype) if regularizers.value_coef else None
        value_range = state.reward_range
        if value_range is None:
            value_range = (float(shaped.min()), float(shaped.max())) if len(shaped) else (0.0, 1.0)
        return StepPlan(
            lengths=exp.lengths,
            kept=kept,
            active=active,
            advantages=signal,
            weights=masked(weights, kept),
            token_weights=factors,
            pass_mask=pass_mask,
            conflicts=conflicts,
            entropy_filtered=entropy_filtered,
            correct=correct,
            old_logprobs=exp.old_logprobs,
            sampler_logprobs=exp.sampler_logprobs,
            ref_logprobs=exp.ref_logprobs,
            values=exp.values,
            returns=returns,
            router_logscores_old=exp.router_logscores_old,
            empty=active_total == 0,
            active_total=active_total,
            nll_weight=regularizers.nll_coef / correct_tokens if correct_tokens else 0.0,
            value_weight=regularizers.value_coef / tokens if tokens else 0.0,
            beta=self.trust_region.penalty_coefficient(state),
            value_range=value_range,
        )

    def _regularised(self, kept: Tensor, correct: Tensor | None) -> Tensor:
        """Return which completions have a term besides the policy term, [N] bool."""
        r = self.regularizers
        if r.kl_loss or r.entropy_coef or r.value_coef or self.trust_region.penalizes:
            return torch.ones_like(kept)
        return correct if r.nll_coef and correct is not None else torch.zeros_like(kept)

    def _signal(self, exp: Experience, advantages: Tensor, state: ObjectiveState) -> tuple[Tensor, Tensor | None]:
        """Return the advantages, [N, T], with GTPO's entropy terms if they are on.

        Also the completions that GTPO's entropy filter takes out, [N] bool; None where the filter is off.
        """
        if not self.entropy_signal.on:
            return advantages, None
        entropy = mean_entropy(_required(exp, "entropy"), exp.mask).to(advantages.dtype)
        signal = advantages - self.entropy_signal.entropy_gamma * entropy[:, None]
        # Junk past the last token must not decide the sign of a completion.
        sign = masked(advantages, exp.mask)
        delta = self.entropy_signal.delta(entropy, sign, state.initial_entropy)
        return signal * delta[:, None], None if self.entropy_signal.entropy_filter == "none" else delta == 0

    def loss(
        self,
        logprobs: Tensor,
        plan: StepPlan,
        *,
        entropy: Tensor | None = None,
        values: Tensor | None = None,
        router_logscores: Tensor | None = None,
    ) -> LossOutput:
        """Compute the part of the step's loss that one micro-batch adds; the parts sum to the loss, whatever the split.

        Args:
            logprobs: log pi of the sampled tokens, [n, T'], T' at least the longest completion of the micro-batch.
            plan: the step's plan, rows of this micro-batch selected.
            entropy: [n, T'], with gradient if the objective has an entropy bonus.
            values: the critic's values, [n, T'], with gradient.
            router_logscores: log-scores of the experts that were active under the old policy, [n, T', layers, K].
        """
        given = {"entropy": entropy, "values": values, "router_logscores": router_logscores}
        for missing in sorted(k for k in self.loss_requires() if given[k] is None):
            if missing != "router_logscores" or plan.router_logscores_old is not None:
                raise UserError(f"the objective {self.name} needs {missing} of the current forward")
        return surrogate.loss(self, logprobs, plan, entropy, values, router_logscores)


def _dtype(rewards: Tensor) -> torch.dtype:
    return torch.float64 if rewards.dtype == torch.float64 else torch.float32


def _required(exp: Experience, name: str) -> Tensor:
    value: Tensor | None = getattr(exp, name)
    if value is None:
        raise UserError(f"the objective needs {name} before the first update, which is not known")
    return value
