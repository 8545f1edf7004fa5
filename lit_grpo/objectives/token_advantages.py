"""Advantage estimators that give one number per token: GAE, whitened returns, and DCPO's history per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lit_grpo.errors import UserError
from lit_grpo.objectives.advantages import AdvantageInputs, Estimator
from lit_grpo.objectives.state import ObjectiveState, PromptHistory
from lit_grpo.objectives.tensors import Reduce, masked, over_ranks
from lit_grpo.utils.bounds import Bound


def token_rewards(inputs: AdvantageInputs) -> Tensor:
    """Return R_t, [N, T]: the KL penalty of each token, plus the reward of the completion at its last token."""
    mask = inputs.mask
    rewards = masked(inputs.rewards[:, None].expand(mask.shape), last_tokens(mask))
    return rewards if inputs.token_rewards is None else rewards + masked(inputs.token_rewards, mask)


def whiten(value: Tensor, mask: Tensor, *, ddof: int = 0, reduce: Reduce | None = None) -> Tensor:
    """Whiten values, [N, T], over the masked tokens of the batch on all ranks; 0 outside the mask.

    The result is (x - mean) / sqrt(max(var, 1e-8)), with divisor tokens - ``ddof`` of the variance.
    """
    value = masked(value, mask)
    total, count = over_ranks(torch.stack([value.sum(), mask.sum().to(value.dtype)]), reduce)
    centred = masked(value - total / count.clamp_min(1), mask)
    variance = over_ranks((centred * centred).sum(), reduce) / (count - ddof).clamp_min(1)
    return centred / variance.clamp_min(1e-8).sqrt()


def last_tokens(mask: Tensor) -> Tensor:
    """Return the last token of each completion of a mask, [N, T] bool -> [N, T] bool."""
    after = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    return mask & ~after


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    final_values: Tensor | None = None,
) -> Tensor:
    """Compute the generalised advantage estimate (1506.02438), [N, T], 0 outside the mask.

    delta_t = R_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}.

    Args:
        rewards: R_t, [N, T].
        values: V_t, the value of the state before token t, [N, T].
        mask: the generated tokens, [N, T] bool.
        gamma: discount.
        lam: lambda, a number or [N].
        final_values: V after the last token of each completion, [N]; None: 0, as of states in which all is over.
    """
    rewards, values = masked(rewards, mask), masked(values, mask)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    if final_values is not None:
        following = torch.where(last_tokens(mask), final_values[:, None].to(values.dtype), following)
    delta = rewards + gamma * following - values
    carry = torch.zeros_like(delta[:, 0]) if delta.shape[1] else delta.sum(1)
    columns: list[Tensor] = []
    for t in range(delta.shape[1] - 1, -1, -1):
        # Masked, so that nothing flows from the padding into the last token.
        carry = masked(delta[:, t] + gamma * lam * carry, mask[:, t])
        columns.append(carry)
    return torch.stack(columns[::-1], dim=1) if columns else delta


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Return lambda_i = 1 - 1 / (alpha n_i), clamped to [0, 1]: [N] -> [N] float64. VAPO, 2504.05118."""
    return (1 - 1 / (alpha * lengths.double()).clamp_min(1e-12)).clamp(0, 1)


@dataclass(frozen=True)
class BatchWhiten(Estimator):
    """Return-to-go of the token rewards, whitened over all tokens of the batch. REINFORCE++, 2501.03262."""

    kind: ClassVar[str] = "batch_whiten"
    per_token: ClassVar[bool] = True
    whiten_ddof: Annotated[int, Bound(least=0)] = 0
    """Divisor of the whitening's variance is tokens - whiten_ddof."""

    def rewards(self, inputs: AdvantageInputs) -> Tensor:
        """Return the rewards of single tokens, [N, T]."""
        return token_rewards(inputs)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        returns = self.rewards(inputs).flip(1).cumsum(1).flip(1)
        return whiten(returns, inputs.mask, ddof=self.whiten_ddof, reduce=inputs.reduce)


@dataclass(frozen=True)
class GroupMeanWhiten(BatchWhiten):
    """``batch_whiten`` with r - mu_g in place of r. REINFORCE++-baseline, 2501.03262."""

    kind: ClassVar[str] = "group_mean_then_whiten"
    grouped: ClassVar[bool] = True

    def rewards(self, inputs: AdvantageInputs) -> Tensor:
        r, groups = inputs.rewards, inputs.groups
        centred = masked(r - groups.spread(groups.mean(r)), ~groups.spread(groups.uniform(r)))
        return token_rewards(replace(inputs, rewards=centred))


@dataclass(frozen=True)
class Gae(Estimator):
    """GAE(gamma, lambda), optionally whitened. PPO, 1707.06347.

    ``value_low`` and ``value_high`` clamp the critic's values to the range of the reward before they are used.
    """

    kind: ClassVar[str] = "gae"
    needs: ClassVar[frozenset[str]] = frozenset({"values"})
    critic: ClassVar[bool] = True
    per_token: ClassVar[bool] = True
    gae_gamma: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Discount gamma of GAE."""
    gae_lambda: Annotated[float, Bound(least=0, most=1)] = 1.0
    """Lambda of GAE."""
    whiten: bool = False
    """Whiten GAE advantages over the tokens of the batch."""
    whiten_ddof: Annotated[int, Bound(least=0)] = 0
    value_low: Annotated[float, Bound(infinite=True)] = float("-inf")
    """Clamp the critic's values from below before GAE."""
    value_high: Annotated[float, Bound(infinite=True)] = float("inf")
    """Clamp the critic's values from above before GAE."""
    bootstrap_truncated: bool = False
    """Whether what a truncated completion might still have earned counts: after its last token the critic's value of
    the text so far stands, not 0."""

    def required(self) -> frozenset[str]:
        return self.needs | ({"final_values"} if self.bootstrap_truncated else set())

    @property
    def state_fields(self) -> frozenset[str]:
        return frozenset({"reward_range"})

    def advance(self, inputs: AdvantageInputs) -> tuple[Tensor, ObjectiveState]:
        state, rewards = inputs.state, inputs.rewards
        if len(rewards):
            state = state.including_rewards(float(rewards.min()), float(rewards.max()))
        return self(inputs), state

    def merge_states(self, states: Sequence[ObjectiveState]) -> ObjectiveState:
        merged = states[0]
        for state in states[1:]:
            if state.reward_range is not None:
                merged = merged.including_rewards(*state.reward_range)
        return merged

    def policy_lambda(self, inputs: AdvantageInputs) -> float | Tensor:
        """Return lambda of the policy's advantages: a number, or [N]."""
        return self.gae_lambda

    def target_lambda(self) -> float:
        """Return lambda of the critic's targets."""
        return self.gae_lambda

    def values(self, inputs: AdvantageInputs) -> Tensor:
        """Return the critic's values before the first update, clamped, [N, T], 0 outside the mask."""
        values = inputs.experience.values
        if values is None:
            raise UserError(f"the advantage {self.kind!r} needs the values of a critic, which are not known")
        clean = masked(values.to(inputs.rewards.dtype), inputs.mask)
        return masked(clean.clamp(self.value_low, self.value_high), inputs.mask)

    def final_values(self, inputs: AdvantageInputs) -> Tensor | None:
        """Return V after the last token, clamped, [N], 0 for completions that ended; None if it is 0 for all."""
        if not self.bootstrap_truncated:
            return None
        exp = inputs.experience
        if exp.final_values is None:
            raise UserError("bootstrap_truncated needs the critic's values after the last tokens, which are not known")
        # Masked twice: junk must not reach the clamp, and the clamp must not move the 0 of an ended completion.
        clean = masked(exp.final_values.to(inputs.rewards.dtype), exp.truncated)
        return masked(clean.clamp(self.value_low, self.value_high), exp.truncated)

    def _gae(self, inputs: AdvantageInputs, values: Tensor, lam: float | Tensor) -> Tensor:
        final = self.final_values(inputs)
        return gae(token_rewards(inputs), values, inputs.mask, self.gae_gamma, lam, final)

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        advantage = self._gae(inputs, self.values(inputs), self.policy_lambda(inputs))
        if self.whiten:
            advantage = whiten(advantage, inputs.mask, ddof=self.whiten_ddof, reduce=inputs.reduce)
        return advantage

    def returns(self, inputs: AdvantageInputs) -> Tensor:
        """Return the critic's targets, [N, T]: A + V, where A is not whitened."""
        values = self.values(inputs)
        return self._gae(inputs, values, self.target_lambda()) + values


@dataclass(frozen=True)
class GaeLength(Gae):
    """GAE(1, lambda_i) with lambda_i = clamp(1 - 1/(alpha n_i), 0, 1); the critic learns Monte Carlo returns
    (lambda 1). VAPO, 2504.05118.
    """

    kind: ClassVar[str] = "gae_length"
    length_alpha: Annotated[float, Bound(above=0)] = 0.05
    """alpha of lambda_i = 1 - 1/(alpha n_i)."""

    def cautions(self, max_new_tokens: int) -> list[str]:
        if self.length_alpha * max_new_tokens > 1:
            return []
        return [
            f"With length_alpha {self.length_alpha:g} lambda is 0 for every completion of at most "
            f"{1 / self.length_alpha:.0f} tokens, and max_new_tokens is {max_new_tokens}: advantages are then "
            "differences of neighbouring values alone. Raise model.objective.length_alpha (1 gives lambda 1 - 1/n)."
        ]

    def policy_lambda(self, inputs: AdvantageInputs) -> Tensor:
        return length_adaptive_lambda(inputs.experience.lengths, self.length_alpha).to(inputs.rewards.dtype)

    def target_lambda(self) -> float:
        return 1.0


@dataclass(frozen=True)
class SmoothAdvantage(Estimator):
    """Smooth advantage standardisation of DCPO, 2509.02333: the smaller in size of two mixtures of the step's and the
    cumulative standardisation of the prompt.

    At visit i of the prompt, with mean m and (G - 1)-standard deviation s of this step and cumulative M, S:
    M_i = ((i-1) M + m)/i, S_i^2 = ((i-1) S^2 + s^2 + (i-1)/i (m - M)^2)/i, a_new = (r-m)/s, a_tot = (r-M_i)/S_i,
    A = smaller |.| of (i-1)/i a_new + 1/i a_tot and 1/i a_new + (i-1)/i a_tot; a division by 0 gives 0.
    """

    kind: ClassVar[str] = "smooth_advantage"
    grouped: ClassVar[bool] = True

    @property
    def state_fields(self) -> frozenset[str]:
        return frozenset({"prompts"})

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return self.advance(inputs)[0]

    def advance(self, inputs: AdvantageInputs) -> tuple[Tensor, ObjectiveState]:
        exp, r, groups = inputs.experience, inputs.rewards, inputs.groups
        if exp.prompt_ids is None:
            raise UserError("the advantage 'sas' keeps a history per prompt and needs prompt_ids")
        prompt_of_group: dict[int, str] = {}
        for group, prompt in zip(groups.index.tolist(), exp.prompt_ids, strict=True):
            prompt_of_group[group] = prompt
        histories = dict(inputs.state.prompts)
        means, variances = groups.mean(r).double().tolist(), groups.variance(r).double().tolist()
        uniform = groups.uniform(r).tolist()
        rows: list[tuple[float, float, float, float, float]] = []
        for group, (mean, variance) in enumerate(zip(means, variances, strict=True)):
            # Rounding gives equal rewards a variance just above 0, and the quotient would not be 0.
            variance = 0.0 if uniform[group] else variance
            old = histories.get(prompt_of_group[group], PromptHistory(0.0, 0.0, 0.0))
            i = old.visits + 1
            total_mean = ((i - 1) * old.mean + mean) / i
            total_variance = ((i - 1) * old.std**2 + variance + (i - 1) / i * (mean - old.mean) ** 2) / i
            histories[prompt_of_group[group]] = PromptHistory(total_mean, total_variance**0.5, i)
            rows.append((mean, variance**0.5, total_mean, total_variance**0.5, i))
        table = r.new_tensor(rows).reshape(-1, 5)[groups.index]
        step_mean, step_std, total_means, total_stds, visit = table.unbind(1)
        a_new = masked((r - step_mean) / step_std.clamp_min(1e-30), step_std > 0)
        a_total = masked((r - total_means) / total_stds.clamp_min(1e-30), total_stds > 0)
        first = ((visit - 1) * a_new + a_total) / visit
        second = (a_new + (visit - 1) * a_total) / visit
        advantage = torch.where(first.abs() <= second.abs(), first, second)
        return advantage, replace(inputs.state, prompts=histories)

    def merge_states(self, states: Sequence[ObjectiveState]) -> ObjectiveState:
        # A prompt is on one rank at a time: of the histories that the ranks hold, the longest is the newest.
        histories: dict[str, PromptHistory] = {}
        for state in states:
            for prompt, history in state.prompts.items():
                if prompt not in histories or history.visits > histories[prompt].visits:
                    histories[prompt] = history
        return replace(states[0], prompts=histories)
