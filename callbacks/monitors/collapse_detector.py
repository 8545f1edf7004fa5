"""Tells collapses apart by their signatures in entropy, length, diversity and gradient norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding, Severity
from lit_grpo.callbacks.diagnosis.kinds import FindingKind, finding_kind, in_words
from lit_grpo.callbacks.monitors import statistics
from lit_grpo.callbacks.monitors.collapse_kinds import (
    BY_SIGN,
    FINDINGS,
    REMEDIES_NL,
    REMEDIES_OTHER,
    REMEDIES_PL,
    REMEDIES_RATE,
    WORSE,
)
from lit_grpo.callbacks.monitors.monitor import Monitor, Numbers, positive
from lit_grpo.callbacks.monitors.sampled import REWARDS, reward_key
from lit_grpo.callbacks.monitors.statistics import RUN_LENGTH_CRITICAL

EARLY_STEPS, GROWN_STEPS, LEAST_STEP = 8, 8.0, 5e-3
"""First rollouts whose steps are usual, multiple of them that has grown, and the least that counts, in nats a token."""
HELD_OUT, PASSED_OVER = "val/reward", "curriculum/passed_over"
MORE_CUT = 0.15
"""Growth of the share of truncated completions that is a sign of C_NL."""
SURE_CUT = 3.5
"""Standard errors that it must have: few, since the objective alone makes the sign likely."""
AT_ITS_BEST = 0.1
"""Share of its best mean of five rollouts, or of its range, that a reward may lack and still be at its best."""


class CollapseDetector(Monitor):
    """Monitor of two kinds of collapse, told apart by their signatures, and of a reward that falls beyond doubt.

    In C_PL, of minimal entropy, entropy, length and diversity fall together. In C_NL, of maximal entropy, entropy and
    length explode, the gradient norm spikes, and in the end a few tokens are repeated. The names are those of the study
    of positive-only and negative-only losses. Over ``window`` rollouts:

    - ``c_pl``: entropy fell by more than ``fall``, length too, and ``groups/distinct_frac`` fell.
    - ``c_nl``: entropy rose by more than ``rise``, length by more than ``growth`` (or ``truncated`` is above
      ``truncation``), and the gradient norm is above ``spike`` times its median. Or, the later stage: the repetition of
      completions is above ``repetition`` after entropy had risen.

    The same shapes are ``minimal_entropy`` and ``maximal_entropy`` where advantages have a baseline and push both ways:
    then they do not say why, and any cause that is seen at the same time names the diagnosis.

    The signatures of the first two are those of a collapse that is complete: in the runs of the diagnosis benchmark
    they came 10 to 30 rollouts after a fifth of the reward was lost. So a reward that falls beyond doubt is a collapse
    too: by more than ``lost`` of its best and by ``sure`` standard errors. Where the objective learns from signs
    without a baseline ``sure_one_sided`` are enough, and ``sure_steep`` where the gradient norm has risen as well, as
    it does before a collapse of such losses. These bounds were chosen on the benchmark's tuning seeds, where healthy
    runs stay below 4 standard errors. Then the cause gives the name: ``advantage_inverted`` where better completions
    get the smaller advantage in more than ``unrelated`` of the groups, ``c_pl`` and ``c_nl`` by what the loss pushes up
    (``policy/upward_frac``), and ``unstable``, which is a learning rate that is too high, where none of that explains
    it.

    With a loss that divides by a constant number of tokens, collapses change form (S0, Eq. 13 and 14, figure 17):
    positives-only gets certain and long, and random when it collapses (``tn_pl``); negatives-only gets uncertain and
    short (``tn_nl``). Where entropy and length contradict that, the direction in which the loss pushes gives the name.

    The signatures in entropy and length say nothing while the reward is within a tenth of its best: a task is learned
    in the same way. Where advantages are signs and all of one sign, two more findings need no fall of the reward. More
    and more truncated completions, while the reward does not rise, are ``c_nl``, and steps (``policy/step_kl``) that
    have grown to eight times those of the first eight rollouts are a warning of ``c_pl`` or ``c_nl``: nothing holds
    such an objective back, so it is the cause of what the steps then do.

    Args:
        window: rollouts over which values are compared.
        smooth: rollouts that each median is taken over.
        fall: share of entropy and of length whose loss counts as a fall.
        rise: growth of the entropy that counts as a rise, as a share of what it was.
        growth: growth of the length that counts, as a share of what it was.
        truncation: share of truncated completions that counts as growth of the length.
        spike: multiple of its median at which the gradient norm counts as a spike.
        repetition: share of repeated 4-grams above which completions are degenerate.
        lost: share of the best reward whose loss is looked at.
        sure: standard errors beyond which the fall of the reward is no chance, see
            :meth:`lit_grpo.callbacks.monitors.history.History.fall`.
        sure_one_sided: the same bound where advantages are signs.
        sure_steep: the same bound, over six rollouts, where advantages are signs and the gradient norm has risen.
        steeper: multiple of its median from which on the gradient norm has risen.
        unrelated: share of groups whose better completions get the smaller advantage, above which advantages do not
            follow the rewards.
        token_normalised: whether the loss divides by a constant; None: as the
            aggregation of the module's objective says.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (
        "policy/entropy",
        "completions/length",
        "groups/distinct_frac",
        "optim/grad_norm",
        "completions/truncated_frac",
        "completions/repetition_frac",
        *REWARDS,
        "policy/advantage_abs",
        "policy/advantage_abs_max",
        "sanity/inverted_advantage_frac",
        "policy/upward_frac",
        "policy/step_kl",
        HELD_OUT,
        PASSED_OVER,
    )
    findings: ClassVar[tuple[FindingKind, ...]] = FINDINGS

    def __init__(
        self,
        window: int = 20,
        smooth: int = 3,
        fall: float = 0.5,
        rise: float = 1.0,
        growth: float = 0.5,
        truncation: float = 0.5,
        spike: float = 5.0,
        repetition: float = 0.5,
        lost: float = 0.15,
        sure: float = 5.0,
        sure_one_sided: float = 4.5,
        sure_steep: float = 2.5,
        steeper: float = 1.3,
        unrelated: float = 0.15,
        token_normalised: bool | None = None,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("CollapseDetector", window=window, smooth=smooth, fall=fall, rise=rise, growth=growth, spike=spike)
        self.window, self.smooth, self.fall, self.rise, self.growth = window, smooth, fall, rise, growth
        self.truncation, self.spike, self.repetition = truncation, spike, repetition
        self.lost, self.sure, self.sure_one_sided, self.unrelated = lost, sure, sure_one_sided, unrelated
        self.sure_steep, self.steeper = sure_steep, steeper
        self.history.watch("policy/step_kl", early=EARLY_STEPS)
        self._token_normalised = token_normalised

    @property
    def token_normalised(self) -> bool:
        """Whether the loss divides by a constant: as was said, or as the module's objective says, else no."""
        return bool(self.facts.token_normalised if self._token_normalised is None else self._token_normalised)

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        # What looks like a collapse while the reward is at its best is how a task is learned.
        if not self._is_at_its_best():
            yield from self._minimal(step)
            yield from self._maximal(step)
        yield from self._falling(step)
        yield from self._longer(step)
        yield from self._one_sided()

    def _then_and_now(self, key: str, *, high: bool) -> tuple[float, float] | None:
        """Return the largest (or smallest) smoothed value of the window, and the present one."""
        values = self.history.window(key, self.window + self.smooth)
        if len(values) < 2 * self.smooth:
            return None
        smoothed = [median(values[i : i + self.smooth]) for i in range(len(values) - self.smooth + 1)]
        return (max if high else min)(smoothed[:-1]), smoothed[-1]

    def _minimal(self, step: int) -> Iterable[Finding]:
        entropy, length = (
            self._then_and_now("policy/entropy", high=True),
            self._then_and_now("completions/length", high=True),
        )
        distinct = self._then_and_now("groups/distinct_frac", high=True)
        if entropy is None or length is None:
            return
        fewer = distinct is None or distinct[1] < distinct[0]
        keep = 1 - self.fall
        if entropy[1] < keep * entropy[0] and length[1] < keep * length[0] and fewer:
            evidence: list[Numbers] = [
                ("policy/entropy", self.window, entropy[1], keep * entropy[0], entropy[0]),
                ("completions/length", self.window, length[1], keep * length[0], length[0]),
            ]
            if distinct is not None:
                evidence.append(("groups/distinct_frac", self.window, distinct[1], distinct[0], distinct[0]))
            kind = ("tn_nl" if self._only("down") else "tn_pl") if self.token_normalised else "c_pl"
            both = self._pushes_both_ways()
            yield self.finding(
                "minimal_entropy" if both else kind,
                "critical",
                "entropy, length and diversity have fallen together: the policy says one short thing",
                *evidence,
                onset=self._turn("policy/entropy", high=True),
                remedies=None if both else REMEDIES_NL if kind == "tn_nl" else REMEDIES_PL,
            )
            return
        shortest = self._then_and_now("completions/length", high=False)
        if self.token_normalised and entropy[1] < keep * entropy[0] and shortest is not None:
            longer = (1 + self.growth) * shortest[0]
            # The other way of length is the shape of a loss of one sign alone.
            if shortest[1] > longer and not self._only("down") and not self._pushes_both_ways():
                yield self.finding(
                    "tn_pl",
                    "critical",
                    "entropy falls while completions grow to the limit: the policy is certain of one long thing",
                    ("policy/entropy", self.window, entropy[1], keep * entropy[0], entropy[0]),
                    ("completions/length", self.window, shortest[1], longer, shortest[0]),
                    onset=self._turn("policy/entropy", high=True),
                    remedies=REMEDIES_PL,
                )

    def _maximal(self, step: int) -> Iterable[Finding]:
        entropy, length = (
            self._then_and_now("policy/entropy", high=False),
            self._then_and_now("completions/length", high=False),
        )
        norm, usual = (
            self.history.median("optim/grad_norm", self.smooth),
            self.history.median("optim/grad_norm", 50, self.smooth),
        )
        repeated = self.history.median("completions/repetition_frac", self.smooth)
        if entropy is None or length is None:
            return
        truncated = self.history.median("completions/truncated_frac", self.smooth) or 0.0
        shorter = self._then_and_now("completions/length", high=True)
        wild = entropy[1] > (1 + self.rise) * entropy[0]
        long = length[1] > (1 + self.growth) * length[0] or truncated > self.truncation
        short = shorter is not None and shorter[1] < (1 - self.fall) * shorter[0]
        steep = norm is not None and bool(usual) and norm > self.spike * (usual or 1.0)
        degenerate = repeated is not None and repeated > self.repetition
        kind = None
        if self.token_normalised and wild and short:
            # Both together are the whole of S0's Eq. 14, and neither spikes nor repeats tokens.
            kind = "tn_pl" if self._only("up") else "tn_nl"
        elif wild and long and (steep or degenerate):
            kind = "c_nl" if not self.token_normalised else "tn_nl" if self._only("down") else "tn_pl"
        if kind is None:
            return
        both = self._pushes_both_ways()
        kind = "maximal_entropy" if both else kind
        evidence: list[Numbers] = [
            ("policy/entropy", self.window, entropy[1], (1 + self.rise) * entropy[0], entropy[0]),
            ("completions/length", self.window, length[1], (1 + self.growth) * length[0], length[0])
            if shorter is None or not short
            else ("completions/length", self.window, shorter[1], (1 - self.fall) * shorter[0], shorter[0]),
        ]
        if steep and norm is not None and usual:
            evidence.append(("grad_norm / median", 50, norm / usual, self.spike))
        if degenerate and repeated is not None:
            evidence.append(("completions/repetition_frac", self.smooth, repeated, self.repetition))
        yield self.finding(
            kind,
            "critical",
            "entropy has exploded while completions became short: the policy no longer knows what to say"
            if short and not long
            else "entropy and length have exploded: the policy no longer knows what to say or when to end",
            *evidence,
            onset=self._turn("policy/entropy", high=False),
            remedies=None if both else REMEDIES_PL if kind == "tn_pl" else REMEDIES_NL,
        )

    def _falling(self, step: int) -> Iterable[Finding]:
        """Look for a reward that falls beyond doubt, and name the collapse by what the objective learns from."""
        key = reward_key(self.history)
        share, errors = self.history.fall(key)
        signs = self._has_sign_advantages()
        # Never fewer than chance reaches once in so many rollouts, over all windows that are compared.
        chance = statistics.bound(RUN_LENGTH_CRITICAL, self.history.count(key), statistics.NEWEST)
        bound = self.sure_one_sided if signs else max(self.sure, chance)
        norm, usual = self.history.median("optim/grad_norm", 5), self.history.median("optim/grad_norm", 50, 5)
        if signs and norm and usual and norm > self.steeper * usual:
            share, errors, bound = *self.history.fall(key, recent=6), self.sure_steep
        if share <= self.lost or errors <= bound or self.history.may_have_jumped(step):
            return
        now, best = self.history.mean(key, 3) or 0.0, self.history.best(key, 8) or 0.0
        upward, inverted = (
            self.history.mean("policy/upward_frac", 10),
            self.history.mean("sanity/inverted_advantage_frac", 10),
        )
        entropy = self._then_and_now("policy/entropy", high=False)
        remedies: tuple[str, ...]
        severity: Severity = "critical"
        about: FindingKind | None = None
        at_stake = best - statistics.floor_of(self.history.values[key])
        evidence: list[Numbers] = [(key, 3, now, best - self.lost * max(abs(best), at_stake), best)]
        if entropy is not None:
            evidence.append(("policy/entropy", self.window, entropy[1], entropy[0], entropy[0]))
        if inverted is not None and inverted > self.unrelated:
            kind, what, remedies = "advantage_inverted", "the advantages do not follow the rewards", REMEDIES_OTHER
            evidence.append(("sanity/inverted_advantage_frac", 10, inverted, self.unrelated))
        elif signs and upward is not None and upward > 0.9:
            kind, what, remedies = "c_pl", "only positives are reinforced", REMEDIES_PL
        elif signs and upward is not None and upward < 0.1:
            kind, what, remedies = "c_nl", "only negatives are pushed down", REMEDIES_NL
        elif signs:
            rising = entropy is not None and entropy[1] > entropy[0]
            kind, what = "c_nl" if rising else "c_pl", "signs are learned from without a baseline"
            about = in_words(kind, finding_kind(kind).title, BY_SIGN)
            remedies = REMEDIES_NL if rising else REMEDIES_PL
        else:
            kind, what, remedies = "unstable", "nothing but the size of the updates explains it", REMEDIES_RATE
            since, held = self._peak(), self._held_out_loss(key, best, now)
            steps = [kl for at, kl in zip(*self._step_sizes(), strict=True) if at >= since]
            if held is not None and held < share / 3:
                kind, what, severity = "reward_lost", "the held-out reward has not", "warning"
                evidence.append((f"{HELD_OUT} lost", 1, held, share / 3))
            elif steps and fmean(steps) < LEAST_STEP:
                kind, what = "reward_lost", "the updates were small"
                # Where prompts that are solved are passed over, those that are left are harder.
                severity = "warning" if self.history.count(PASSED_OVER) else "critical"
                if held is not None:
                    about = in_words(kind, finding_kind(kind).title, WORSE)
                    evidence.append((f"{HELD_OUT} lost", 1, held, share / 3))
                evidence.append(("policy/step_kl", len(steps), fmean(steps), LEAST_STEP))
            elif steps:
                evidence.append(("policy/step_kl", len(steps), fmean(steps), LEAST_STEP))
            remedies = finding_kind(kind).remedies
        if self.token_normalised and kind in ("c_pl", "c_nl"):
            kind, about = kind.replace("c_", "tn_"), None
        if signs and upward is not None:
            evidence.append(("policy/upward_frac", 10, upward, 0.9 if upward > 0.5 else 0.1))
        yield self.finding(
            kind,
            severity,
            f"the reward has lost {share:.0%} of its best, {errors:.1f} standard errors, and {what}",
            *evidence,
            onset=self._peak(),
            remedies=remedies,
            about=about,
        )

    def _held_out_loss(self, key: str, best: float, now: float) -> float | None:
        """Return the share of the held-out reward that was lost since the reward was best.

        None without an evaluation from then and another from after half of what is lost was lost.
        """
        peak, rewards, at = self._peak(), self.history.values[key], self.history.steps[key]
        half = (best + now) / 2
        low = [at[k] for k in range(2, len(rewards)) if at[k] > peak and fmean(rewards[k - 2 : k + 1]) < half]
        steps, values = self.history.steps[HELD_OUT], self.history.values[HELD_OUT]
        before = [value for step, value in zip(steps, values, strict=True) if step <= peak + 1]
        if not low or not before or not before[-1]:
            return None
        # Between two evaluations the last one's reward is logged again with every step.
        known = [value for step, value in zip(steps, values, strict=True) if step <= low[0]]
        after = [v for step, v in zip(steps, values, strict=True) if step > low[0] and v != known[-1]]
        if not after:
            return None
        return (before[-1] - after[-1]) / abs(before[-1])

    def _step_sizes(self) -> tuple[list[int], list[float]]:
        key = "policy/step_kl"
        return self.history.steps[key], self.history.values[key]

    def _longer(self, step: int) -> Iterable[Finding]:
        """Look for C_NL before the reward falls: entropy and length rise together where the loss only pushes down."""
        upward, cut = (
            self.history.mean("policy/upward_frac", 10),
            self.history.median("completions/truncated_frac", self.smooth),
        )
        entropy, length = (
            self._then_and_now("policy/entropy", high=False),
            self._then_and_now("completions/length", high=False),
        )
        if (
            upward is None
            or upward > 0.1
            or cut is None
            or entropy is None
            or length is None
            or not self._has_sign_advantages()
        ):
            return
        cuts = statistics.rise(self.history.window("completions/truncated_frac", 2 * self.window), 5, 10)
        if (
            cuts.now - cuts.before > MORE_CUT
            and cuts.errors > SURE_CUT
            and not self.history.rises(reward_key(self.history))
        ):
            yield self.finding(
                "tn_nl" if self.token_normalised else "c_nl",
                "critical",
                "more and more completions reach the length limit, and only negatives are pushed down",
                ("completions/truncated_frac", 5, cuts.now, cuts.before + MORE_CUT, cuts.before),
                ("policy/upward_frac", 10, upward, 0.1),
                onset=self._turn("completions/truncated_frac", high=False),
                remedies=REMEDIES_NL,
            )
            return
        if entropy[1] > 1.3 * entropy[0] and length[1] > 1.1 * length[0] and cut > 0.05:
            yield self.finding(
                "tn_nl" if self.token_normalised else "c_nl",
                "critical",
                "entropy and length rise together, and only negatives are pushed down",
                ("policy/entropy", self.window, entropy[1], 1.3 * entropy[0], entropy[0]),
                ("completions/length", self.window, length[1], 1.1 * length[0], length[0]),
                ("completions/truncated_frac", self.smooth, cut, 0.05),
                ("policy/upward_frac", 10, upward, 0.1),
                onset=self._turn("policy/entropy", high=False),
                remedies=REMEDIES_NL,
            )

    def _one_sided(self) -> Iterable[Finding]:
        """Look for steps that grow where the loss pushes one way alone: nothing holds such an objective back."""
        key = "policy/step_kl"
        early, recent = self.history.early[key], self.history.window(key, 3)
        if len(early) < EARLY_STEPS or len(recent) < 3 or not self._has_sign_advantages():
            return
        up, down = self._only("up"), self._only("down")
        usual = median(early)
        if not (up or down) or median(recent) < max(GROWN_STEPS * usual, LEAST_STEP):
            return
        kind = "pl" if up else "nl"
        yield self.finding(
            f"tn_{kind}" if self.token_normalised else f"c_{kind}",
            "warning",
            "steps grow, and only " + ("positives are reinforced" if up else "negatives are pushed down"),
            (key, 3, median(recent), GROWN_STEPS * usual, usual),
            onset=self.history.began(key, lambda value: value > GROWN_STEPS / 2 * usual, self.step),
            remedies=REMEDIES_PL if up else REMEDIES_NL,
        )

    def _is_at_its_best(self) -> bool:
        """Tell whether the mean reward of five rollouts is within a tenth of its best; False where none is logged."""
        key = reward_key(self.history)
        values = self.history.values[key]
        if not values:
            return False
        means = [fmean(values[i : i + 5]) for i in range(max(1, len(values) - 4))]
        best = max(means)
        # Rewards may be negative: then their range says what a tenth is.
        return best - means[-1] <= AT_ITS_BEST * max(abs(best), best - min(means))

    def _only(self, way: str) -> bool:
        """Tell whether the loss is known to push probabilities only ``up``, or only ``down``."""
        upward = self.history.mean("policy/upward_frac", 10)
        return upward is not None and (upward > 0.9 if way == "up" else upward < 0.1)

    def _pushes_both_ways(self) -> bool:
        """Tell whether the loss is known to push probabilities up and down, by advantages that have a baseline."""
        if self._has_sign_advantages():
            return False
        if self.history.mean("policy/upward_frac", 10) is None:
            return False
        return not (self._only("up") or self._only("down"))

    def _has_sign_advantages(self) -> bool:
        """Tell whether advantages are signs, without a baseline, so that solved prompts push as hard as others."""
        # Seen in the numbers and not asked of the module: a monitor works in any project.
        mean, largest = self.history.last("policy/advantage_abs"), self.history.last("policy/advantage_abs_max")
        return mean is not None and largest is not None and 0.99 < mean <= largest < 1.01

    def _peak(self) -> int:
        """Find the step at which the best mean of 8 rewards ends, where the fall began."""
        key = reward_key(self.history)
        values, steps = self.history.values[key], self.history.steps[key]
        ends = range(8, len(values) - 2)
        return steps[max(ends, key=lambda end: fmean(values[end - 8 : end])) - 1]

    def _turn(self, key: str, *, high: bool) -> int:
        """Find the step of the window's largest (or smallest) value, where the way down or up began."""
        values, steps = self.history.window(key, self.window), self.history.steps[key][-self.window :]
        return (max if high else min)(zip(values, steps, strict=True))[1]
