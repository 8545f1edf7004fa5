"""Watches whether completions grow or shrink without getting better, and whether they still end by themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import LENGTH_EXPLOSION, DiagnosisKind, FindingKind, in_words
from lit_grpo.callbacks.monitors import statistics
from lit_grpo.callbacks.monitors.monitor import Monitor, positive
from lit_grpo.callbacks.monitors.sampled import REWARDS, reward_key
from lit_grpo.callbacks.monitors.statistics import RUN_LENGTH, RUN_LENGTH_CRITICAL, binomial_tail

REMEDIES_LONG = (
    "aggregate with a token mean or a constant (agg: token_mean, sum_const), which takes 1/length out of the loss",
    "add a soft penalty on overlong completions",
    "look at what is truncated",
)
TRUNCATION = DiagnosisKind(
    "truncation",
    "completions hit the length limit",
    "the limit is too low, the engine does not know the end token, or the policy does not end",
)
REMEDIES_LIMIT = (
    "raise the length limit (max_new_tokens)",
    "check that engine and tokenizer know the model's end token, and that the chat template is its own",
)
NEVER_ENDED_FOR = 5
"""First rollouts that are looked at."""
MORE_CUT = 0.25
"""Growth of the share of truncated completions, over the rollouts that lengths are compared over, that is a finding."""
MOST, NONE_RIGHT = 0.5, 0.95
"""Share of truncated completions, and of groups without a correct one, that all rollouts so far exceed."""


def into_the_limit() -> FindingKind:
    """Return the kind of a growth into the length limit, whatever the reward does."""
    return in_words(
        "length_growing",
        "more and more completions reach the length limit",
        "long answers are paid, or nothing is paid for an answer that ends",
    )


class LengthMonitor(Monitor):
    """Monitor of the mean length, its gap between incorrect and correct completions, and the share that is truncated.

    Findings: ``length_growing`` (``growth`` times what it was ``trend`` rollouts ago while the reward is not
    better; critical where ``truncation_once`` of the completions are cut;
    more and more completions that are cut, a quarter of all more than before; and growth into the limit with rising
    entropy, which is critical whatever the reward says, for it may be paid), ``length_falling`` (below ``fall`` of
    what it was, or below ``floor``; critical where the reward has fallen as well), ``length_gap`` (incorrect
    completions are longer than correct ones by ``gap`` times the correct length, or by more and more for ``trend``
    rollouts while the reward is flat), ``truncated`` (above ``truncation`` for ``patience`` rollouts, or above
    ``truncation_once``), ``never_ended`` (since the first rollout of the run more than half of the completions are
    truncated and more than 95 % of the groups have no correct one: the limit or the end token is wrong, which
    explains the lost signal and the repetition that come with it).

    Args:
        growth: multiple of the smallest length within ``trend`` above which completions have grown.
        fall: multiple of the largest length within ``trend`` below which completions have shrunk.
        floor: length in tokens that is always too short; set it where an answer cannot be shorter.
        trend: rollouts over which lengths are compared.
        gap: multiple of the mean correct length by which incorrect completions may be longer.
        truncation: share of truncated completions that is a finding after ``patience`` rollouts.
        truncation_once: share of truncated completions that is a finding at once.
        sudden: multiple of the smallest length of the last ``sudden_within`` rollouts that is critical together with
            ``truncation_sudden`` cut completions and ``sudden_entropy`` times the smallest entropy.
        sudden_within: rollouts over which sudden growth is looked for.
        sudden_entropy: multiple of the smallest entropy within ``sudden_within``.
        truncation_sudden: share of truncated completions that makes sudden growth critical.
        patience: rollouts in a row for which ``truncation`` must be exceeded.
        better: standard errors by which the reward must have risen to count as better.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (
        "completions/length",
        "completions/correct_length",
        "completions/incorrect_length",
        "completions/truncated_frac",
        "groups/all_wrong_frac",
        "completions/tokens",
        *REWARDS,
        "policy/entropy",
    )
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind(
            "length_growing",
            LENGTH_EXPLOSION,
            600,
            REMEDIES_LONG,
            title="completions grow, and the reward has not visibly risen",
            likely_cause="long answers are paid, or wrong long ones are punished too little (1/length in the loss)",
        ),
        FindingKind(
            "length_falling",
            DiagnosisKind(
                "length_collapse",
                "completions have become much shorter",
                "short answers are paid or get more right, or the limit punishes long ones",
            ),
            rank=605,
            remedies=("add negatives or an entropy bonus", "check that the reward does not pay for brevity"),
        ),
        FindingKind("never_ended", TRUNCATION, 503, REMEDIES_LIMIT),
        FindingKind("truncated", TRUNCATION, 640),
        FindingKind(
            "length_gap",
            DiagnosisKind(
                "length_gap",
                "wrong completions are longer than right ones",
                "wrong long ones are punished too little (1/length in the loss), or hard prompts take longer",
            ),
            650,
            REMEDIES_LONG,
        ),
    )

    def __init__(
        self,
        growth: float = 1.5,
        fall: float = 0.5,
        floor: float = 1.5,
        trend: int = 50,
        gap: float = 1.0,
        truncation: float = 0.1,
        truncation_once: float = 0.3,
        sudden: float = 1.1,
        sudden_within: int = 15,
        sudden_entropy: float = 1.3,
        truncation_sudden: float = 0.05,
        patience: int = 10,
        better: float = 2.0,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("LengthMonitor", growth=growth, fall=fall, trend=trend, gap=gap, patience=patience)
        self.growth, self.fall, self.floor, self.trend, self.gap = growth, fall, floor, trend, gap
        self.truncation, self.truncation_once = truncation, truncation_once
        self.patience, self.better = patience, better
        self.sudden, self.sudden_within, self.sudden_entropy = sudden, sudden_within, sudden_entropy
        self.truncation_sudden = truncation_sudden

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        yield from self._sudden(step)
        yield from self._change(step)
        yield from self._more_cut()
        yield from self._gap(step)
        yield from self._truncated(step)

    def _has_gained(self, size: int) -> bool:
        """Tell whether the mean reward has visibly risen over the last ``size`` rollouts; False where it is unknown."""
        key, few = reward_key(self.history), min(5, max(1, size // 2))
        now, then = self.history.mean(key, few), self.history.mean(key, few, back=size - few)
        if now is None or then is None:
            return False
        return now - then > self.better * statistics.noise(self.history.values[key]) * math.sqrt(2 / few)

    def _change(self, step: int) -> Iterable[Finding]:
        size = min(self.trend, self.history.count("completions/length"))
        # Medians of three need earlier values to be compared with.
        if size < max(self.patience, 6):
            return
        now = self.history.median("completions/length", 3)
        values = self.history.window("completions/length", size)
        assert now is not None
        low = min(self.history.median("completions/length", 3, back) or 0.0 for back in range(3, size - 2))
        high = max(self.history.median("completions/length", 3, back) or 0.0 for back in range(3, size - 2))
        reward = reward_key(self.history)
        (lost, _), fallen = self.history.fall(reward), self.history.fallen(reward, errors=5.0)
        sure, surer = (self.history.bound("completions/length", size, n) for n in (RUN_LENGTH, RUN_LENGTH_CRITICAL))
        longer, shorter = (self.history.errors_between("completions/length", then, now) for then in (low, high))
        cut = self.history.median("completions/truncated_frac", 3) or 0.0
        if low and now > self.growth * low and longer > sure and not self._has_gained(size):
            # Not where the reward has fallen: harder prompts have longer answers and fewer right ones.
            bad = cut > self.truncation_once and longer > surer
            start = self.history.steps["completions/length"][-size:][values.index(min(values))]
            yield self.finding(
                "length_growing",
                "critical" if bad else "warning",
                f"completions grew from {low:.3g} to {now:.3g} tokens and the reward has not visibly risen",
                ("completions/length", size, now, self.growth * low, low),
                ("reward lost", 3, lost, 0.15),
                onset=start,
                about=into_the_limit() if cut > self.truncation_once else None,
            )
        if now < self.floor or (now < self.fall * high and shorter > sure):
            start = self.history.steps["completions/length"][-size:][values.index(max(values))]
            yield self.finding(
                "length_falling",
                "critical" if fallen else "info",
                f"completions shrank from {high:.3g} to {now:.3g} tokens",
                ("completions/length", size, now, max(self.floor, self.fall * high), high),
                ("reward lost", 3, lost, 0.15),
                onset=start,
            )

    def _sudden(self, step: int) -> Iterable[Finding]:
        """Look for growth into the limit with rising entropy."""
        # Whatever the reward says: it may be one that pays for length.
        history, size = self.history, min(self.sudden_within, self.history.count("completions/length") - 3)
        if size < 5 or history.count("policy/entropy") < size + 3:
            return
        now, cut = (
            history.median("completions/length", 3) or 0.0,
            history.median("completions/truncated_frac", 3) or 0.0,
        )
        unsure = history.median("policy/entropy", 3) or 0.0
        low, calm = (
            min(history.median(key, 3, back) or 0.0 for back in range(3, size + 1))
            for key in ("completions/length", "policy/entropy")
        )
        sure = history.bound("completions/length", size, RUN_LENGTH)
        longer = history.errors_between("completions/length", low, now) > sure
        less_sure = history.errors_between("policy/entropy", calm, unsure) > sure
        if not longer or not less_sure:
            return
        if now > self.sudden * low and cut > self.truncation_sudden and unsure > self.sudden_entropy * calm:
            yield self.finding(
                "length_growing",
                "critical",
                f"completions grow into the limit: {low:.3g} to {now:.3g} tokens, {cut:.0%} cut, and entropy rises",
                ("completions/length", size, now, self.sudden * low, low),
                ("completions/truncated_frac", 3, cut, self.truncation_sudden),
                ("policy/entropy", size, unsure, self.sudden_entropy * calm, calm),
                onset=history.began("completions/truncated_frac", lambda value: value > 0, step),
                remedies=("check that no reward pays for length", *REMEDIES_LONG),
                about=into_the_limit(),
            )

    def _more_cut(self) -> Iterable[Finding]:
        """Look for a limit that is run into by more and more completions, where lengths can hardly grow any more."""
        # Whatever the reward says: it may be one that pays for length.
        key, history = "completions/truncated_frac", self.history
        cuts = statistics.rise(history.window(key, self.trend), 5, 10)
        if cuts.now < MOST or cuts.now - cuts.before < MORE_CUT:
            return
        if cuts.errors <= history.bound(key, min(self.trend, history.count(key)), RUN_LENGTH):
            return
        yield self.finding(
            "length_growing",
            "warning",
            f"more and more completions reach the length limit: {cuts.before:.0%} to {cuts.now:.0%}",
            (key, 5, cuts.now, cuts.before + MORE_CUT, cuts.before),
            onset=history.steps[key][-min(self.trend, history.count(key)) :][cuts.place],
            remedies=("check that no reward pays for length", *REMEDIES_LONG),
            about=into_the_limit(),
        )

    def _gap(self, step: int) -> Iterable[Finding]:
        right, wrong = (
            self.history.median("completions/correct_length", 10),
            self.history.median("completions/incorrect_length", 10),
        )
        if right is None or wrong is None or self.history.count("completions/correct_length") < self.patience:
            return
        gap = wrong - right
        sure = statistics.bound(RUN_LENGTH)
        if gap > self.gap * right and self._gap_errors(gap - self.gap * right) > sure:
            yield self.finding(
                "length_gap",
                "warning",
                f"incorrect completions are {gap:.3g} tokens longer than correct ones",
                ("completions/incorrect_length - completions/correct_length", 10, gap, self.gap * right),
            )
            return
        rights, wrongs = (
            self.history.then_and_now(f"completions/{s}_length", 10, self.trend) for s in ("correct", "incorrect")
        )
        if rights is None or wrongs is None:
            return
        before = wrongs[0] - rights[0]
        wider = self._gap_errors((gap - before) / math.sqrt(2)) > sure
        if gap > max(1.2 * before, before + 0.1 * right) and wider and not self._has_gained(self.trend):
            yield self.finding(
                "length_gap",
                "info",
                f"incorrect completions grow while the reward is flat: {gap:.3g} tokens longer, {before:.3g} before",
                ("completions/incorrect_length - completions/correct_length", self.trend, gap, 1.2 * before, before),
                onset=step - self.trend,
            )

    def _gap_errors(self, gap: float) -> float:
        """Return a difference of the lengths of incorrect and correct completions, medians of ten, in its errors."""
        noises = (statistics.noise(self.history.values[f"completions/{s}_length"]) for s in ("correct", "incorrect"))
        error = math.hypot(*noises) * 1.25 / math.sqrt(10)
        return gap / error if error > 0 else math.copysign(math.inf, gap)

    def _is_chance(self, cut: float) -> bool:
        """Tell whether so many of the newest completions are cut by chance, where a third of the bound is usual."""
        count, usual = self.history.completions(), min(self.truncation, self.truncation_once / 3)
        return count is not None and binomial_tail(cut * count, count, usual) > 1 / RUN_LENGTH

    def _truncated(self, step: int) -> Iterable[Finding]:
        now = self.history.now("completions/truncated_frac", step)
        if now is None:
            return
        cut, wrong = self.history.values["completions/truncated_frac"], self.history.values["groups/all_wrong_frac"]
        begun = self.history.steps["completions/truncated_frac"][0]
        if min(len(cut), len(wrong)) >= NEVER_ENDED_FOR and begun <= 1 and min(cut) > MOST and min(wrong) > NONE_RIGHT:
            yield self.finding(
                "never_ended",
                "warning",
                f"since the run began most completions hit the length limit, {now:.0%} now, and none is correct",
                ("completions/truncated_frac", len(cut), min(cut), MOST),
                ("groups/all_wrong_frac", len(wrong), min(wrong), NONE_RIGHT),
                onset=begun,
            )
        lasting = self.history.holds("completions/truncated_frac", self.patience, lambda value: value > self.truncation)
        at_once = now > self.truncation_once and not self._is_chance(now)
        if at_once or lasting:
            bound = self.truncation_once if at_once else self.truncation
            remedies = ["raise the length limit (max_new_tokens)", "add a soft penalty on overlong completions"]
            # Where most completions are truncated, masking them would leave nearly nothing to learn from.
            if now <= 0.5:
                remedies.append("mask truncated completions")
            yield self.finding(
                "truncated",
                "warning",
                f"{now:.0%} of the completions hit the length limit",
                ("completions/truncated_frac", self.patience if lasting else 1, now, bound),
                onset=self.history.began("completions/truncated_frac", lambda value: value > self.truncation, step),
                remedies=tuple(remedies),
            )
