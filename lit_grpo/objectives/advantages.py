"""Advantage estimators. Each is a frozen dataclass called with :class:`AdvantageInputs`.

Symbols: r reward of a completion, mu_g and sigma_g mean and standard deviation of r over the group of one prompt,
n tokens of a completion, G completions of a group. Every result is detached.

Conventions: a group whose rewards are all equal gets exactly 0, never 0/0; so does a group of one, unless
``single_sample_advantage`` is ``raw``. Empty completions count in the statistics of their group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from lit_grpo.errors import UserError
from lit_grpo.objectives.part import Part
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.objectives.tensors import Groups, Reduce, masked, over_ranks
from lit_grpo.types import Experience
from lit_grpo.utils.bounds import Bound


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an estimator: all completions of a rollout (whole groups), shaped rewards, history."""

    experience: Experience
    rewards: Tensor
    """Rewards after shaping, [N]."""
    groups: Groups
    token_rewards: Tensor | None = None
    """KL penalty of each token, [N, T], 0 outside the mask; None if there is none. Only for ``per_token`` estimators:
    the others find its sum over the sequence in ``rewards``."""
    state: ObjectiveState = field(default_factory=ObjectiveState)
    """The objective's state before this rollout."""
    reduce: Reduce | None = None
    """Sum over ranks, for statistics of the whole batch."""
    correct: Tensor | None = None
    """Correct completions, after label noise, [N] bool. None: no reward says what is right."""

    @property
    def mask(self) -> Tensor:
        """The generated tokens, [N, T] bool."""
        return self.experience.mask


class Estimator(Part):
    """Base of all advantage estimators; a user's own needs ``kind`` and ``__call__`` only.

    One with a history names its state in ``state_fields`` and overrides :meth:`advance` in place of ``__call__``.
    """

    kind: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    """Fields of the experience that must be known before the first update."""
    grouped: ClassVar[bool] = False
    """True if it compares the completions of one prompt, so that a group of one says nothing."""
    critic: ClassVar[bool] = False
    """True if a critic must give values."""
    per_token: ClassVar[bool] = False
    """True if the result is [N, T] and a KL penalty enters token by token."""
    single_sample_advantage: Literal["zero", "raw"] = "zero"
    """Advantage of a group of one, of estimators that compare with the group: 0, or its reward."""

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Return the advantages, [N], or [N, T] if they differ between tokens; detached."""
        raise NotImplementedError(f"{type(self).__name__} must implement __call__")

    def required(self) -> frozenset[str]:
        """Return the fields of the experience that this instance needs: ``needs``, unless a setting decides."""
        return self.needs

    def advance(self, inputs: AdvantageInputs) -> tuple[Tensor, ObjectiveState]:
        """Return the advantages, as ``__call__`` does, and the state after this rollout."""
        return self(inputs), inputs.state

    def merge_states(self, states: Sequence[ObjectiveState]) -> ObjectiveState:
        """Join the states of all ranks after :meth:`advance`: each rank has seen other prompts."""
        return states[0]

    def returns(self, inputs: AdvantageInputs) -> Tensor:
        """Return the critic's targets, [N, T].

        Raises:
            UserError: the estimator uses no critic.
        """
        raise UserError(f"the advantage {self.kind!r} uses no critic, so there are no targets for one")

    def cautions(self, max_new_tokens: int) -> list[str]:
        """Return warnings, one sentence each, about settings that are allowed and yet hardly meant.

        Args:
            max_new_tokens: most tokens of a completion in the run.
        """
        return []


def _finish(advantage: Tensor, inputs: AdvantageInputs, single_sample_advantage: str) -> Tensor:
    """Set the advantages of uniform groups to exact zero, and of groups of one as ``single_sample_advantage`` says."""
    groups = inputs.groups
    advantage = masked(advantage, ~groups.spread(groups.uniform(inputs.rewards)))
    if single_sample_advantage == "raw":
        advantage = torch.where(groups.spread(groups.size) == 1, inputs.rewards, advantage)
    return advantage


@dataclass(frozen=True)
class Raw(Estimator):
    """A = r - b with a constant b. REINFORCE (Williams 1992)."""

    kind: ClassVar[str] = "raw"
    baseline: float = 0.0
    """Constant b of r - b."""

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return inputs.rewards - self.baseline


@dataclass(frozen=True)
class GroupStd(Estimator):
    """A = (r - mu_g) / (sigma_g + eps). GRPO, 2402.03300. Divisor of the variance: G - std_ddof."""

    kind: ClassVar[str] = "group_std"
    grouped: ClassVar[bool] = True
    std_ddof: Annotated[int, Bound(least=0)] = 1
    """Divisor of the variance is the number of rewards minus std_ddof."""
    std_eps: Annotated[float, Bound(least=0)] = 1e-6
    """Added to the standard deviation."""
    single_sample_advantage: Literal["zero", "raw"] = "zero"
    """Advantage of a group of one: 0, or its reward."""

    def scale(self, inputs: AdvantageInputs) -> Tensor:
        """Return what the centred rewards are divided by, without ``std_eps``, [N]."""
        groups = inputs.groups
        return groups.spread(groups.variance(inputs.rewards, self.std_ddof)).sqrt()

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups
        centred = inputs.rewards - groups.spread(groups.mean(inputs.rewards))
        return _finish(centred / (self.scale(inputs) + self.std_eps), inputs, self.single_sample_advantage)


@dataclass(frozen=True)
class GroupVariance(GroupStd):
    """A = (r - mu_g) / (sigma_g^2 + eps): a printed formula read literally; mean |A| is 2 for every share of correct
    answers, so the gradient does not shrink near a solved prompt. For ablations only.
    """

    kind: ClassVar[str] = "group_var"

    def scale(self, inputs: AdvantageInputs) -> Tensor:
        return inputs.groups.spread(inputs.groups.variance(inputs.rewards, self.std_ddof))


@dataclass(frozen=True)
class BatchStd(GroupStd):
    """A = (r - mu_g) / (sigma_batch + eps), sigma_batch of the raw rewards of the batch. LitePPO, 2508.08221."""

    kind: ClassVar[str] = "batch_std"

    def scale(self, inputs: AdvantageInputs) -> Tensor:
        r = inputs.rewards
        # Two sums over ranks and not one of squares: the variance is that around the mean of all ranks, without the
        # cancellation of a difference of large squares.
        count, total = over_ranks(torch.stack([r.new_tensor(float(len(r))), r.sum()]), inputs.reduce)
        squares = over_ranks(((r - total / count) ** 2).sum(), inputs.reduce)
        return (squares / (count - self.std_ddof).clamp_min(1)).sqrt()


@dataclass(frozen=True)
class GroupMean(Estimator):
    """A = r - mu_g. Dr. GRPO, 2503.20783; Olmo 3."""

    kind: ClassVar[str] = "group_mean"
    grouped: ClassVar[bool] = True
    single_sample_advantage: Literal["zero", "raw"] = "zero"

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        groups = inputs.groups
        return _finish(
            inputs.rewards - groups.spread(groups.mean(inputs.rewards)), inputs, self.single_sample_advantage
        )


@dataclass(frozen=True)
class LeaveOneOut(Estimator):
    """A_i = r_i - mean of the other G - 1 rewards = G/(G-1) (r_i - mu_g). RLOO, 2402.14740."""

    kind: ClassVar[str] = "rloo"
    grouped: ClassVar[bool] = True
    single_sample_advantage: Literal["zero", "raw"] = "zero"

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        groups, r = inputs.groups, inputs.rewards
        size = groups.spread(groups.size)
        centred = r - groups.spread(groups.mean(r))
        return _finish(centred * size / (size - 1).clamp_min(1), inputs, self.single_sample_advantage)


@dataclass(frozen=True)
class Sign(Estimator):
    """A = positive if correct else negative: the likelihood losses and the positive-only or negative-only methods."""

    kind: ClassVar[str] = "sign"
    positive_weight: Annotated[float, Bound(least=0)] = 1.0
    """Advantage of correct completions."""
    negative_weight: float = -1.0
    """Advantage of the others."""

    @property
    def uses_correct(self) -> tuple[str, ...]:
        return () if self.positive_weight == self.negative_weight else ("advantage",)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        positive = torch.full_like(inputs.rewards, self.positive_weight)
        if not self.uses_correct:
            return positive
        correct = inputs.rewards > 0 if inputs.correct is None else inputs.correct
        return torch.where(correct, positive, torch.full_like(positive, self.negative_weight))


@dataclass(frozen=True)
class BStar(Estimator):
    """A_i = r_i - sum_j W_j r_j / sum_j W_j over the group, i included: the variance-minimising baseline.

    W estimates the squared norm of the score of the trajectory sum: ``given`` the exact norms (``score_sqnorm``);
    ``length`` W_j = n_j (OPO, 2505.23585); ``logit`` W_j = sum_t (1 - 2 pi + sum_v pi_v^2), the norm with respect to
    the logits; ``token_level`` the same accumulated up to position t, over the sequences still alive there.
    """

    kind: ClassVar[str] = "bstar"
    grouped: ClassVar[bool] = True
    optimal_baseline_weights: Literal["given", "length", "logit", "token_level"] = "length"
    """Weights W of the variance-minimising baseline."""

    def required(self) -> frozenset[str]:
        return {
            "given": frozenset({"score_sqnorm"}),
            "length": frozenset[str](),
            "logit": frozenset({"old_logprobs", "sum_squared_probs"}),
            "token_level": frozenset({"old_logprobs", "sum_squared_probs"}),
        }[self.optimal_baseline_weights]

    def _logit_norms(self, inputs: AdvantageInputs) -> Tensor:
        exp, mask = inputs.experience, inputs.mask
        assert exp.old_logprobs is not None
        assert exp.sum_squared_probs is not None
        pi = masked(exp.old_logprobs.to(inputs.rewards.dtype), mask).exp()
        return masked(1 - 2 * pi + masked(exp.sum_squared_probs.to(pi.dtype), mask), mask)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        exp, r, groups = inputs.experience, inputs.rewards, inputs.groups
        for name in self.required():
            if getattr(exp, name) is None:
                raise UserError(
                    f"the baseline weights {self.optimal_baseline_weights!r} need {name}, which is not known"
                )
        if self.optimal_baseline_weights == "token_level":
            weights = masked(self._logit_norms(inputs).cumsum(1), inputs.mask)  # [N, T], alive positions only
            shape = (len(groups.size), weights.shape[1])
            norm = weights.new_zeros(shape).index_add_(0, groups.index, weights)[groups.index]
            value = weights.new_zeros(shape).index_add_(0, groups.index, weights * r[:, None])[groups.index]
            advantage = masked(r[:, None] - value / norm.clamp_min(1e-30), inputs.mask & (norm > 0))
            return masked(advantage, ~groups.spread(groups.uniform(r))[:, None])
        if self.optimal_baseline_weights == "given":
            assert exp.score_sqnorm is not None
            w = exp.score_sqnorm.to(r.dtype)
        elif self.optimal_baseline_weights == "length":
            w = exp.lengths.to(r.dtype)
        else:
            w = self._logit_norms(inputs).sum(1)
        norm = groups.spread(groups.sum(w))
        # All norms zero: no token can move, any baseline would do.
        advantage = masked(r - groups.spread(groups.sum(w * r)) / norm.clamp_min(1e-30), norm > 0)
        return _finish(advantage, inputs, "zero")


@dataclass(frozen=True)
class CustomAdvantage(Estimator):
    """A user's function of :class:`AdvantageInputs`; it returns [N] or [N, T]."""

    kind: ClassVar[str] = "custom"
    path: str = ""
    function: Any = field(default=None, compare=False, repr=False)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        value: Tensor = self.function(inputs)
        return value
