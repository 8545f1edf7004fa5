"""Claims that need no training: a softmax policy so small that every completion can be written down.

The policy has a table of logits, [positions, vocabulary]; token 0 ends a completion. The losses are those of the
recipes: what a loss gives each token's log-probability is taken from it by differentiation, and expectations are sums
over all completions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lit_grpo.objectives import Objective
from lit_grpo.objectives.tensors import Groups
from lit_grpo.objectives.token_weights import conflict_masks
from lit_grpo.types import Experience
from scripts.study_cases.results import PartResult
from scripts.study_cases.results import above as above_drawn
from scripts.study_cases.results import below as below_drawn

above, below = partial(above_drawn, drawn=False), partial(below_drawn, drawn=False)
SEEDS = (0, 1, 2)
ZERO = 1e-10
"""Norm below which a float64 gradient counts as zero."""


@dataclass(frozen=True)
class Toy:
    """All completions of a softmax policy with a table of logits.

    Attributes:
        vocabulary: number of tokens.
        longest: length limit T.
        ends: whether token 0 ends a completion; else all have the length T.
    """

    vocabulary: int
    longest: int
    ends: bool = True

    @cached_property
    def completions(self) -> list[tuple[int, ...]]:
        """Every completion that can be drawn."""
        if not self.ends:
            return list(itertools.product(range(self.vocabulary), repeat=self.longest))
        found: list[tuple[int, ...]] = []
        for length in range(1, self.longest + 1):
            bodies = itertools.product(range(1, self.vocabulary), repeat=length - 1)
            last = (0,) if length < self.longest else range(self.vocabulary)
            found += [(*body, token) for body in bodies for token in last]
        return found

    @cached_property
    def lengths(self) -> Tensor:
        return torch.tensor([len(one) for one in self.completions])

    @cached_property
    def ids(self) -> Tensor:
        """Token ids, [completions, T]; 0 in the padding."""
        return torch.tensor([list(one) + [0] * (self.longest - len(one)) for one in self.completions])

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.longest)[None] < self.lengths[:, None]

    def logits(self, seed: int, scale: float = 1.0) -> Tensor:
        """Draw a table of logits, [T, vocabulary]."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(self.longest, self.vocabulary, generator=generator, dtype=torch.float64)
        return (scale * drawn).requires_grad_()

    def logprobs(self, logits: Tensor) -> Tensor:
        """Log-probabilities of all tokens of all completions, [completions, T]; 0 in the padding."""
        table = logits.log_softmax(-1)
        return table[torch.arange(self.longest), self.ids].masked_fill(~self.mask, 0.0)

    def gradient(
        self, recipe: str, logits: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None, **changes: Any
    ) -> Tensor:
        """Return the expected gradient of a likelihood loss by the logits, over the completions of its sign.

        Args:
            recipe: its name: ``pl``, ``nl``, ``tnpl`` or ``tnnl``.
            logits: of the policy.
            chosen: completions that are correct (incorrect for the negative losses), [completions] bool; None: all.
            weights: weight of each completion in place of its probability, [completions].
            changes: overrides of the recipe.
        """
        chosen = torch.ones(len(self.lengths), dtype=torch.bool) if chosen is None else chosen
        logprobs = self.logprobs(logits)
        pull = token_weights(recipe, self, chosen, float(not recipe.endswith("nl")), **changes)
        # Given the sign, and in logarithms: a loss may take all probability from its completions.
        share = logprobs.sum(1).detach().masked_fill(~chosen, -torch.inf).softmax(0)
        share = share if weights is None else weights * chosen / (weights * chosen).sum()
        (found,) = torch.autograd.grad((share[:, None] * pull * logprobs).sum(), logits)
        return found

    def mean_length(self, logits: Tensor) -> Tensor:
        """Expected length of a completion."""
        return (self.logprobs(logits).sum(1).exp() * self.lengths).sum()


def token_weights(recipe: str, toy: Toy, chosen: Tensor, reward: float, **changes: Any) -> Tensor:
    """Return what the loss of each completion alone gives its tokens' log-probabilities, [completions, T]."""
    pull = torch.zeros(len(chosen), toy.longest, dtype=torch.float64)
    count = int(chosen.sum())
    rewards = torch.full((count,), reward, dtype=torch.float64)
    # Each completion is a prompt's only one, so a mean over prompts is a mean over completions, with equal weights.
    groups = torch.arange(count)
    given = loss_gradient(recipe, toy.ids[chosen], toy.lengths[chosen], groups, rewards, toy.longest, **changes)
    pull[chosen] = count * given
    return pull


def loss_gradient(
    recipe: str, ids: Tensor, lengths: Tensor, groups: Tensor, rewards: Tensor, longest: int, **changes: Any
) -> Tensor:
    """Return the gradient of a recipe's loss by the log-probabilities of an on-policy batch, [N, T]."""
    made = Objective.from_recipe(recipe, **changes).for_run(longest)
    zeros = torch.zeros(len(ids), longest, dtype=torch.float64)
    experience = Experience(
        lengths=lengths,
        group_ids=groups,
        rewards=rewards,
        truncated=torch.zeros(len(ids), dtype=torch.bool),
        width=longest,
        correct=rewards > 0,
        token_ids=ids,
        old_logprobs=zeros,
        entropy=zeros,
        prompt_ids=[str(int(group)) for group in groups],
    )
    advantages, state = made.advantages(experience, made.new_state())
    plan = made.plan(experience, advantages, state)
    now = zeros.clone().requires_grad_()
    (found,) = torch.autograd.grad(made.loss(now, plan).loss, now)
    return found


def entropy(logits: Tensor) -> float:
    """Entropy of one position's distribution, in nats."""
    table = logits.detach().log_softmax(-1)
    return float(-(table.exp() * table).sum())


TOY, FIXED = Toy(4, 4), Toy(4, 3, ends=False)


# ------------------------------------------------------------------------------------------------ Eq. 8 to 14


def positive_critical() -> list[PartResult]:
    sure = torch.zeros(TOY.longest, TOY.vocabulary, dtype=torch.float64)
    sure[:-1, 1], sure[-1, 0] = 60.0, 60.0
    sure.requires_grad_()
    norms = [float(TOY.gradient("pl", TOY.logits(seed)).norm()) for seed in SEEDS]
    return [
        below("norm of the expected gradient of L_PL where one completion has probability 1",
              [float(TOY.gradient("pl", sure).norm())], ZERO),
        above("its norm at policies drawn at random", norms, 1e-3),
    ]  # fmt: skip


def negative_critical() -> list[PartResult]:
    flat = torch.zeros(FIXED.longest, FIXED.vocabulary, dtype=torch.float64, requires_grad=True)
    sampled = []
    for seed in SEEDS:
        drawn = torch.bincount(_draw(FIXED, flat, 8, seed), minlength=len(FIXED.lengths)).double()
        sampled.append(float(FIXED.gradient("nl", flat, weights=drawn).norm()))
    return [
        below("norm of the expected gradient of L_NL at the uniform policy, all completions of one length and wrong",
              [float(FIXED.gradient("nl", flat).norm())], ZERO),
        above("its norm over 8 completions that were drawn (the critical point is not stable)", sampled, 1e-2),
    ]  # fmt: skip


def negative_not_only_uniform() -> list[PartResult]:
    norms = [float(FIXED.gradient("nl", FIXED.logits(seed)).norm()) for seed in SEEDS]
    return [above("norm of the expected gradient of L_NL at policies that are not uniform", norms, 1e-6)]


def positive_length() -> list[PartResult]:
    return _length("pl", -1.0)


def negative_length() -> list[PartResult]:
    return _length("nl", 1.0)


def _length(recipe: str, sign: float) -> list[PartResult]:
    gaps, moves = [], []
    for seed in SEEDS:
        logits = TOY.logits(seed)
        found = TOY.gradient(recipe, logits)
        inverse = (TOY.logprobs(logits).sum(1).exp() / TOY.lengths).sum()
        (predicted,) = torch.autograd.grad(sign * inverse, logits)
        gaps.append(float((found - predicted).norm()))
        (towards,) = torch.autograd.grad(TOY.mean_length(logits), logits)
        moves.append(-float((found * towards).sum()))
    name = f"L_{recipe.upper()}"
    equal = f"difference of the expected gradient of {name} from that of {'-' if sign < 0 else ''}E[1/|a|]"
    moved = f"change of the expected length along a descent of {name}, per unit of step"
    return [below(equal, gaps, ZERO), below(moved, moves) if sign < 0 else above(moved, moves)]


def token_normalised_minimum() -> list[PartResult]:
    chosen = torch.ones(len(TOY.lengths), dtype=torch.bool)
    # On-policy all ratios are 1, so the sum of what tokens are given is the value of the loss.
    positive = token_weights("tnpl", TOY, chosen, 1.0).sum(1)
    negative = token_weights("tnnl", TOY, chosen, 0.0).sum(1)
    at_least, at_negative = positive.argmin(), negative.argmin()
    shortest = int(TOY.lengths[at_negative])
    return [
        below("length of the completion of least L_TNPL, less the limit T",
              [abs(float(TOY.lengths[at_least]) - TOY.longest)], 0.5),
        below("length of the completion of least L_TNNL, less 1", [abs(shortest - 1.0)], 0.5),
    ]  # fmt: skip


def token_normalised_pressure() -> list[PartResult]:
    parts = []
    for recipe, longer in (("tnpl", True), ("tnnl", False)):
        moves = []
        for seed in SEEDS:
            logits = TOY.logits(seed)
            (towards,) = torch.autograd.grad(TOY.mean_length(logits), logits)
            moves.append(-float((TOY.gradient(recipe, logits) * towards).sum()))
        says = f"change of the expected length along a descent of L_{recipe.upper()}, per unit of step"
        parts.append(above(says, moves, 1e-6) if longer else below(says, moves, -1e-6))
    return parts


ONE = Toy(8, 1, ends=False)
GOOD = torch.arange(8) < 4


def one_token_expected() -> list[PartResult]:
    ends_positive: list[float] = []
    ends_negative: list[float] = []
    for seed in SEEDS:
        for recipe, chosen, ends in (("pl", GOOD, ends_positive), ("nl", ~GOOD, ends_negative)):
            logits = ONE.logits(seed)
            for _ in range(500):
                logits = (logits - 2 * ONE.gradient(recipe, logits, chosen)).detach().requires_grad_()
            ends.append(entropy(logits[0]))
    return [
        below("entropy after 500 steps of expected descent of L_PL, 4 of 8 tokens correct (predicted: 0)",
              ends_positive, 0.05),
        above("the same of L_NL, 4 of 8 tokens wrong (predicted: ln 8 = 2.08)", ends_negative, 2.0),
    ]  # fmt: skip


def positive_sampled() -> list[PartResult]:
    before, after = _sampled("pl")
    return [
        above_drawn("entropy at the start", before, 1.5),
        below_drawn("entropy after 4000 steps of L_PL on 8 drawn completions, all of them correct", after, 0.4),
    ]


def negative_sampled() -> list[PartResult]:
    before, after = _sampled("nl")
    gained = [end - start for start, end in zip(before, after, strict=True)]
    return [above_drawn("change of the entropy over 4000 steps of L_NL on 8 drawn completions, all wrong", gained)]


def _sampled(recipe: str) -> tuple[list[float], list[float]]:
    """Return entropies before and after 4000 steps on 8 drawn one-token completions, all right or all wrong.

    The expected gradient is zero at every policy then: what moves the policy is the drawing alone.
    """
    before, after = [], []
    for seed in SEEDS:
        logits, generator = ONE.logits(seed, 0.5), torch.Generator().manual_seed(seed)
        before.append(entropy(logits[0]))
        pull = token_weights(recipe, ONE, torch.ones(8, dtype=torch.bool), float(recipe == "pl"))
        for _ in range(4000):
            drawn = torch.multinomial(logits.detach().softmax(-1)[0], 8, replacement=True, generator=generator)
            share = torch.bincount(drawn, minlength=8).double() / 8
            (step,) = torch.autograd.grad((share[:, None] * pull * ONE.logprobs(logits)).sum(), logits)
            logits = (logits - 0.5 * step).detach().requires_grad_()
        after.append(entropy(logits[0]))
    return before, after


def _draw(toy: Toy, logits: Tensor, count: int, seed: int) -> Tensor:
    """Draw completions, [count] numbers into ``toy.completions``."""
    generator = torch.Generator().manual_seed(seed)
    shares = toy.logprobs(logits).sum(1).exp().detach()
    return torch.multinomial(shares, count, replacement=True, generator=generator)


# ------------------------------------------------------------------------------------------------ baselines


def _rewards(seed: int) -> Tensor:
    """Draw a reward for every completion of the toy: longer ones are right more often."""
    generator = torch.Generator().manual_seed(100 + seed)
    chance = TOY.lengths / (TOY.longest + 1)
    return (torch.rand(len(TOY.lengths), generator=generator, dtype=torch.float64) < chance).double()


def _policy_gradient(seed: int, baseline: float) -> tuple[Tensor, float]:
    """Return expected gradient of REINFORCE with a baseline, and the total variance of that of one completion."""
    logits, rewards = TOY.logits(seed), _rewards(seed)
    scores = _scores(logits)
    alone = torch.arange(len(rewards))
    # The sum over tokens is what one completion gives; the recipe divides by the number of completions.
    pull = len(rewards) * loss_gradient(
        "reinforce", TOY.ids, TOY.lengths, alone, rewards, TOY.longest, baseline=baseline
    )
    each = pull[:, :1, None] * scores
    share = TOY.logprobs(logits).sum(1).exp().detach()
    mean = (share[:, None, None] * each).sum(0)
    return mean, float((share * (each - mean).square().sum((1, 2))).sum())


def _scores(logits: Tensor) -> Tensor:
    """Return the gradient of each completion's log-probability by the logits, [completions, T, vocabulary]."""
    hot = torch.nn.functional.one_hot(TOY.ids, TOY.vocabulary).double()
    return ((hot - logits.detach().softmax(-1)) * TOY.mask[..., None]).detach()


def best_baseline() -> list[PartResult]:
    excess, gaps, of_mean = [], [], []
    for seed in SEEDS:
        logits, rewards = TOY.logits(seed), _rewards(seed)
        norms = _scores(logits).square().sum((1, 2))
        share = TOY.logprobs(logits).sum(1).exp().detach()
        best = float((share * norms * rewards).sum() / (share * norms).sum())
        least = _policy_gradient(seed, best)[1]
        others = [_policy_gradient(seed, k / 20)[1] for k in range(-10, 31)]
        excess.append(min(others) - least)
        of_mean.append(_policy_gradient(seed, float((share * rewards).sum()))[1] / least - 1)
        drawn = _draw(TOY, logits, 100_000, seed)
        made = Objective.from_recipe("reinforce_bstar", optimal_baseline_weights="given").for_run(TOY.longest)
        experience = Experience(
            TOY.lengths[drawn], torch.zeros(len(drawn), dtype=torch.long), rewards[drawn],
            torch.zeros(len(drawn), dtype=torch.bool), width=TOY.longest, score_sqnorm=norms[drawn],
            prompt_ids=["q"] * len(drawn),
        )  # fmt: skip
        advantages, _ = made.advantages(experience, made.new_state())
        gaps.append(abs(float((rewards[drawn] - advantages[:, 0]).mean()) - best))
    return [
        above("least variance under 41 other baselines from -0.5 to 1.5, less that under b*", excess, -1e-12),
        above("variance under the mean reward over that under b*, less 1", of_mean),
        below("difference of the recipe's b* over 100,000 drawn completions from the exact one", gaps, 0.01),
    ]


def baseline_no_bias() -> list[PartResult]:
    gaps = [
        float((_policy_gradient(seed, 0.0)[0] - _policy_gradient(seed, other)[0]).norm())
        for seed, other in zip(SEEDS, (0.3, 1.7, -2.0), strict=True)
    ]
    return [below("change of the expected gradient when a constant baseline is taken", gaps, ZERO)]


def group_mean_bias() -> list[PartResult]:
    ratios = []
    for seed in SEEDS:
        logits, rewards = TOY.logits(seed), _rewards(seed)
        share, scores = TOY.logprobs(logits).sum(1).exp().detach(), _scores(logits)
        # Groups of two, exactly: the other completion of the group moves the mean, and has its own probability.
        own = rewards - (rewards[:, None] + rewards[None, :]).mul(share[None, :]).sum(1) / 2
        found = (share * own)[:, None, None].mul(scores).sum(0)
        true = (share * rewards)[:, None, None].mul(scores).sum(0)
        ratios.append(float((found - true / 2).norm() / true.norm()))
    return [below("relative difference of the expected gradient under the mean of a group of 2 from half the true one",
                  ratios, 1e-9)]  # fmt: skip


# ------------------------------------------------------------------------------------------------ conflicts


def conflicts_by_size() -> list[PartResult]:
    rates: dict[int, list[float]] = {size: [] for size in (2, 4, 8, 16)}
    for size, found in rates.items():
        for seed in SEEDS:
            chosen = _draw(TOY, TOY.logits(seed), 512 * size, 10 + seed)
            rewards, groups = _rewards(seed)[chosen], Groups.of(torch.arange(512 * size) // size)
            centred = rewards - groups.spread(groups.mean(rewards))
            ids, lengths, mask = TOY.ids[chosen], TOY.lengths[chosen], TOY.mask[chosen]
            masks = conflict_masks(ids, lengths, mask, centred, groups)
            found.append(float((masks.either & mask).sum() / mask.sum()))
    return [
        above(f"share of tokens in conflict in groups of {b}, less that in groups of {a}",
              [y - x for x, y in zip(rates[a], rates[b], strict=True)])
        for a, b in ((2, 4), (4, 8), (8, 16))
    ]  # fmt: skip


def conflict_correction() -> list[PartResult]:
    grpo: list[float] = []
    corrected: list[float] = []
    equal: list[float] = []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        for kept, corrects, same in ((grpo, False, False), (corrected, True, False), (equal, False, True)):
            kept.append(_pushed_down(generator, corrects=corrects, same=same))
    return [
        above("share of groups in which GRPO pushes the opening tag down, correct completions being the longer ones",
              grpo, 0.5),
        below("the same under GTPO's correction alone (Eq. 8)", corrected, 1e-12),
        below("the same under GRPO where all completions have one length", equal, 1e-12),
    ]  # fmt: skip


def _pushed_down(generator: torch.Generator, *, corrects: bool, same: bool) -> float:
    """Return the share of 256 groups of 8 whose opening tag loses, of those with both kinds of completions."""
    count, size, longest = 256, 8, 12
    rewards = torch.randint(0, 2, (count * size,), generator=generator).double()
    extra = torch.randint(0, 3, (count * size,), generator=generator)
    lengths = torch.full_like(extra, 8) if same else 4 + extra + 5 * rewards.long()
    ids = torch.randint(3, 20, (count * size, longest), generator=generator)
    ids[:, 0] = 1
    ids[torch.arange(len(ids)), lengths - 1] = 2
    groups = torch.arange(count * size) // size
    changes = {"entropy_gamma": 0.0, "entropy_filter": "none"} if corrects else {}
    given = loss_gradient("gtpo" if corrects else "grpo", ids, lengths, groups, rewards, longest, **changes)
    push = -given[:, 0].reshape(count, size).sum(1)
    share = rewards.reshape(count, size).mean(1)
    mixed = (share > 0) & (share < 1)
    return float((push[mixed] < -1e-12).double().mean())


EXACT: dict[str, Callable[[], Sequence[PartResult]]] = {
    "eq11_pl_is_critical": positive_critical,
    "eq11_nl_is_critical": negative_critical,
    "eq11_nl_only_uniform": negative_not_only_uniform,
    "eq8_pl_shortens": positive_length,
    "eq9_nl_lengthens": negative_length,
    "eq13_14_least_loss": token_normalised_minimum,
    "eq13_14_length_pressure": token_normalised_pressure,
    "eq10_one_token_expected": one_token_expected,
    "c_pl_sampled": positive_sampled,
    "c_nl_sampled": negative_sampled,
    "b_star_least_variance": best_baseline,
    "baseline_no_bias": baseline_no_bias,
    "group_mean_shrinks": group_mean_bias,
    "conflicts_grow_with_g_exact": conflicts_by_size,
    "conflict_correction_exact": conflict_correction,
}
"""Calculation by name of the claim."""
