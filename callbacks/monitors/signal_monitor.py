"""Watches how many groups have a gradient, and whether rewards contradict themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import (
    NO_SIGNAL,
    NONE_RIGHT,
    SOLVED,
    DiagnosisKind,
    FindingKind,
    finding_kind,
    in_words,
)
from lit_grpo.callbacks.monitors.monitor import positive
from lit_grpo.callbacks.monitors.sampled import GROUPS, unsolved_key
from lit_grpo.callbacks.monitors.statistics import RUN_LENGTH, binomial_tail
from lit_grpo.callbacks.monitors.threshold import Rule, ThresholdMonitor

REWARD_NOISE = DiagnosisKind(
    "reward_noise",
    "rewards contradict themselves",
    "a random or broken verifier: equal completions are judged differently",
    outlives_rollback=True,
)
ADVANTAGES_DIFFER = (
    "equal completions to one prompt have different advantages",
    "labels that are changed, or rewards that are mixed up, between reward and advantage",
)
"""Title and likely cause where the rewards of equal completions are equal."""
SMALL_BATCH = DiagnosisKind(
    "small_batch",
    "few groups have a gradient",
    "a rollout has few prompts, or many whose answers are all rewarded alike",
    outlives_rollback=True,
)
VERIFIER_FAILURE = DiagnosisKind(
    "verifier_failure",
    "rewards time out or fail",
    "the verifier hangs, crashes or is overloaded",
    outlives_rollback=True,
)


class SignalMonitor(ThresholdMonitor):
    """Monitor of groups without a gradient, of the batch that is left, and of rewards that contradict themselves.

    Findings: ``zero_gradient`` (the share of groups with equal rewards is above ``zero_gradient``: half of the compute
    is lost), ``solved`` (the same, where most of these groups have right answers alone: only ``info``, unless hardly
    any group has had a gradient for ``patience`` rollouts, for such a run learns nothing more), ``all_wrong`` (the
    share without any correct completion is above ``all_wrong``; critical above ``hopeless`` for ``patience``
    rollouts), ``none_right`` (the same where other rewards, or parts of the marks, still give most groups a gradient:
    only ``info``), ``source_uniform`` (of several sources one whose completions, of 64 groups or more, all got the same
    reward), ``small_batch`` (fewer than ``batch`` groups with a gradient), ``reward_noise`` (equal completions to one
    prompt get different rewards, or different advantages),
    ``reward_inverted`` (better completions get the smaller advantage), ``reward_failures`` (rewards time out or fail).

    The noise test is exact for a reward that depends on the completion alone: such a reward never contradicts itself,
    so a few contradicting pairs are proof. It needs equal completions, which short answers give in plenty. With a
    reward that is drawn (a model as judge) set ``actions: {reward_noise: log}``.

    Args:
        zero_gradient: largest share of groups with equal rewards.
        all_wrong: largest share of groups without any correct completion.
        hopeless: share of such groups that is critical if it lasts.
        patience: rollouts in a row that ``hopeless`` must last.
        batch: fewest groups with a gradient in a rollout.
        smooth: rollouts that medians are taken over.
        noise: share of contradicting pairs that is critical.
        pairs: contradicting pairs within ``smooth`` rollouts from which on there is a finding.
        inverted: share of groups whose better completions get the smaller advantage that is a finding after ``smooth``
            rollouts in a row. Chance alone gives 0.5.
        failures: largest share of completions whose reward times out or fails; above one half it is critical.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (
        "groups/zero_advantage_frac",
        *GROUPS,
        "completions/tokens",
        "completions/length",
        "groups/count",
        "groups/equal_pairs",
        "sanity/reward_contradiction_frac",
        "sanity/advantage_contradiction_frac",
        "sanity/inverted_advantage_frac",
    )
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind(
            "reward_failures",
            VERIFIER_FAILURE,
            rank=300,
            remedies=("raise the reward's time limit", "look at the completions it fails on"),
        ),
        FindingKind(
            "reward_noise",
            REWARD_NOISE,
            rank=310,
            remedies=(
                "judge the same completion twice and mend the reward until both verdicts agree",
                "if the reward is drawn on purpose, average several draws",
            ),
        ),
        FindingKind(
            "reward_inverted",
            REWARD_NOISE,
            rank=320,
            remedies=("look for a flipped sign or flipped labels between the reward and the advantage",),
            title="the advantages run against the rewards",
            likely_cause="a flipped sign, or flipped labels, between reward and advantage",
        ),
        FindingKind(
            "all_wrong",
            NO_SIGNAL,
            rank=610,
            remedies=("take easier prompts, or filter them by pass rate", "take larger groups", "train format first"),
            title="most prompts get no right answer, and have no gradient",
            likely_cause="the prompts are far too hard, or the verifier accepts no answer to them",
        ),
        FindingKind(
            "source_uniform",
            DiagnosisKind(
                "source_without_signal",
                "all completions of one source get the same reward",
                "its answers or its verifier do not fit it, or its prompts are out of reach or solved",
                outlives_rollback=True,
            ),
            rank=615,
            remedies=("read some of its completions, and what their reward says", "leave the source out"),
        ),
        FindingKind(
            "zero_gradient",
            NO_SIGNAL,
            rank=620,
            remedies=("sample until groups are mixed (recipe dapo)", "filter prompts by pass rate", "larger groups"),
        ),
        FindingKind(
            "solved",
            SOLVED,
            rank=622,
            remedies=(
                "take harder prompts, or end the run",
                "sample until groups are mixed (recipe dapo)",
                "filter prompts by pass rate",
            ),
        ),
        FindingKind(
            "none_right",
            NONE_RIGHT,
            rank=707,
            remedies=("lower the reward's correct_threshold if a part of the marks is right", "take easier prompts"),
        ),
        FindingKind("small_batch", SMALL_BATCH, 710, ("more prompts in each rollout (prompts_per_rollout)",)),
    )

    def __init__(
        self,
        zero_gradient: float = 0.5,
        all_wrong: float = 0.5,
        hopeless: float = 0.95,
        patience: int = 20,
        batch: int = 32,
        smooth: int = 10,
        noise: float = 0.02,
        pairs: int = 10,
        inverted: float = 0.9,
        failures: float = 0.1,
        actions: dict[str, str] | None = None,
    ) -> None:
        positive("SignalMonitor", zero_gradient=zero_gradient, patience=patience, smooth=smooth, pairs=pairs)
        rule = Rule(
            "sanity/inverted_advantage_frac",
            above=inverted,
            for_rollouts=smooth,
            severity="critical",
            name="reward_inverted",
            text="in {value:.0%} of the groups the better completions have the smaller advantage",
            statistic="mean",
        )
        super().__init__([rule], actions)
        self.zero_gradient, self.all_wrong, self.hopeless, self.patience = zero_gradient, all_wrong, hopeless, patience
        self.batch, self.smooth, self.noise, self.pairs, self.failures = batch, smooth, noise, pairs, failures

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        for key in metrics:
            if key.startswith("source/"):
                self.history.watch(key)
        return super().observe(step, metrics)

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        yield from self._groups(step)
        yield from self._sources(metrics)
        yield from self._noise("sanity/reward_contradiction_frac", "rewards")
        # With a critic its values are in the advantages, and contradictions are the CriticMonitor's concern.
        # Labels that are flipped on purpose contradict themselves in the advantages, and nothing is broken.
        if not math.isfinite(metrics.get("critic/value_outside_frac", math.nan)) and not self.facts.label_noise:
            yield from self._noise("sanity/advantage_contradiction_frac", "advantages")
        yield from super().check(step, metrics)
        yield from self._failures(metrics)

    def _groups(self, step: int) -> Iterable[Finding]:
        history = self.history
        groups = history.last("groups/count")
        # With few groups a rollout, shares are of many rollouts, or a handful of prompts would decide.
        rollouts = 1 if not groups else math.ceil(self.batch * 2 / groups)
        size = max(self.smooth, rollouts)
        if history.count("groups/zero_advantage_frac") < size:
            return
        middle = history.mean if rollouts > self.smooth else history.median
        # What was sampled is judged where dynamic sampling leaves the uniform groups out.
        wrong_key, right_key = unsolved_key(history), unsolved_key(history).replace("wrong", "correct")
        zero, wrong, right = (
            middle("groups/zero_advantage_frac", size),
            middle(wrong_key, size),
            middle(right_key, size),
        )
        assert zero is not None
        if wrong is not None and wrong > self.all_wrong:
            # A run that learns the format first, or is paid for parts of an answer, has no right one for long, and yet
            # learns.
            learns = zero <= self.zero_gradient
            lasts = history.holds(wrong_key, max(self.patience, rollouts), lambda value: value > self.hopeless)
            lasts = lasts and not learns
            yield self.finding(
                "none_right" if learns else "all_wrong",
                "critical" if lasts else "info" if learns else "warning",
                f"{wrong:.0%} of the groups have no correct completion",
                (wrong_key, size, wrong, self.hopeless if lasts else self.all_wrong),
                onset=history.began(wrong_key, lambda value: value > self.all_wrong, step),
            )
        elif zero > self.zero_gradient:
            solved = right is not None and right > zero / 2
            # A run that has solved some of its prompts is healthy; one that has none left learns nothing more.
            none_left = history.holds(
                "groups/zero_advantage_frac", max(self.patience, rollouts), lambda value: value > 0.99
            )
            yield self.finding(
                "solved" if solved else "zero_gradient",
                "info" if solved and not none_left else "warning",
                f"{zero:.0%} of the groups have no advantage, so no gradient"
                + (", most of them because they are solved" if solved else ""),
                ("groups/zero_advantage_frac", size, zero, self.zero_gradient),
                onset=history.began("groups/zero_advantage_frac", lambda value: value > self.zero_gradient, step),
            )
        if groups is not None and groups * (1 - zero) < self.batch:
            yield self.finding(
                "small_batch",
                "info",
                f"{groups * (1 - zero):.0f} groups of a rollout have a gradient: a small batch",
                ("groups/count mixed", size, groups * (1 - zero), self.batch),
            )

    def _sources(self, metrics: Mapping[str, float]) -> Iterable[Finding]:
        """Look for a source whose completions all get one reward, where others are told apart."""
        history, groups = self.history, self.history.last("groups/count")
        shares = [key for key in metrics if key.startswith("source/") and key.endswith("/prompts_frac")]
        if len(shares) < 2 or not groups:
            return
        for share in shares:
            key = share.removesuffix("prompts_frac") + "reward"
            seen, size, values = 0.0, 0, history.values.get(key, [])
            parts = [part for part in history.values[share] if part > 0]
            while (seen < 2 * self.batch or size < 3) and size < min(len(values), len(parts)):
                size += 1
                seen += groups * parts[-size]
            # Means of a rollout that are all the same are means of rewards that are.
            if seen < 2 * self.batch or size < 3 or len(set(values[-size:])) > 1:
                continue
            name = key.removeprefix("source/").removesuffix("/reward")
            yield self.finding(
                "source_uniform",
                "warning",
                f"all completions of {name}, of {seen:.0f} prompts, got a reward of {values[-1]:.3g}",
                (key, size, values[-1], values[-1]),
                onset=history.steps[key][-size],
            )
            return

    def _noise(self, key: str, what: str) -> Iterable[Finding]:
        history = self.history
        pairs = dict(zip(history.steps["groups/equal_pairs"], history.values["groups/equal_pairs"], strict=True))
        # Matched by step, since a rollout without an equal pair logs no share.
        both = [(pairs.get(s, 0.0), v) for s, v in zip(history.steps[key], history.values[key], strict=True)]
        recent = both[-self.smooth :]
        against, total = sum(n * share for n, share in recent), sum(n for n, _ in recent)
        if against < self.pairs or not total:
            return
        share = against / total
        about = finding_kind("reward_noise")
        if what == "advantages":
            about = in_words("reward_noise", *ADVANTAGES_DIFFER)
        yield self.finding(
            "reward_noise",
            "critical" if share > self.noise else "warning",
            f"{share:.1%} of the pairs of equal completions get different {what}",
            (key, len(recent), share, self.noise),
            onset=history.began(key, lambda value: value > 0, self.step),
            about=about,
        )

    def _failures(self, metrics: Mapping[str, float]) -> Iterable[Finding]:
        count = self.history.completions()
        for key, value in sorted(metrics.items()):
            if not key.startswith(("reward_errors/timeout_frac/", "reward_errors/failed_frac/")):
                continue
            # One of eight completions is 12 %, and happens.
            chance = 0.0 if count is None else binomial_tail(value * count, count, self.failures / 2)
            if value > self.failures and chance < 1 / RUN_LENGTH:
                yield self.finding(
                    "reward_failures",
                    "critical" if value > 0.5 else "warning",
                    f"{value:.0%} of the completions were not judged ({key})",
                    (key, 1, value, self.failures),
                )
                return
