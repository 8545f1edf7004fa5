"""Watches the curve of the reward itself: whether it rises, falls, or jumps more than its batch explains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import DiagnosisKind, FindingKind, finding_kind, in_words
from lit_grpo.callbacks.monitors import statistics
from lit_grpo.callbacks.monitors.jump import AFTER
from lit_grpo.callbacks.monitors.monitor import REARM, Monitor, positive
from lit_grpo.callbacks.monitors.sampled import GROUPS, REWARDS, reward_key, unsolved_key
from lit_grpo.callbacks.monitors.statistics import NEWEST, RUN_LENGTH, RUN_LENGTH_CRITICAL

NO_PROGRESS = DiagnosisKind(
    "no_progress",
    "the reward does not rise",
    "the learning rate is too low, a penalty holds the policy, few groups have a gradient, or the reward does not tell "
    "better from worse (answers of other prompts?)",
)
REWARD_FALLS = DiagnosisKind(
    "reward_falls",
    "the reward falls",
    "steps are too large, the objective pulls elsewhere, or the prompts become harder",
)
REWARD_CHAOTIC = DiagnosisKind(
    "reward_chaotic",
    "the reward jumps more than its batch explains",
    "steps are too large, or the prompts of a rollout are no fair sample of all",
)


DEAD = (
    "from one rollout to the next no completion is right, or all get the same reward",
    "a verifier that fails or accepts everything, or prompts out of reach: the policy has moved too little for it",
)
"""Title and likely cause of a jump after which nothing tells right from wrong."""
REWARDS_CHANGED = DiagnosisKind(
    "rewards_changed",
    "the reward jumps further than the policy has moved",
    "a verifier that fails or was exchanged, or prompts of another difficulty",
    outlives_rollback=True,
)


class RewardMonitor(Monitor):
    """Monitor of the curve of the reward: flat, falling, chaotic.

    Where dynamic sampling leaves groups out, the reward of everything that was sampled is judged for its course.

    Findings: ``reward_gone`` (for ``gone`` rollouts or more no group had a correct completion, although some did
    before, and chance would bring that once in 100,000 rollouts or less: critical; it needs neither a long history nor
    a scale), ``reward_flat`` (over the last 300 rollouts, or all if there are ``flat_rollouts`` or more, the reward has
    not risen, and a rise of ``flat`` standard deviations of the completions' rewards would have been seen: with few
    completions a rollout that takes longer; a warning where it has never risen in the run and
    prompts are left unsolved, else only ``info``), ``reward_falling`` (the mean of the last ``recent`` rollouts lies
    below the best of as many in a row by more standard errors than chance gives once in 10,000 rollouts, and by more
    than ``fall`` of it), ``reward_chaotic`` (over ``chaos_rollouts`` the reward scatters more than ``chaos`` times as
    much as the mean of its groups can, ``reward/std`` / sqrt(``groups/count``), even if all completions of a group were
    equal; a noisy or chaotic reward curve is a clear sign that something is wrong, S1), ``reward_jumped`` (from one
    rollout to the next the reward has changed by more than the update between them can have done, see
    :func:`lit_grpo.callbacks.monitors.jump.find_jump`: the verifier or the prompts are others, and every comparison
    with earlier rewards begins anew; critical where all groups are uniform from then on, so that nothing is learned).

    Args:
        flat_rollouts: rollouts in which the reward must rise.
        flat: rise, in standard deviations of single rewards (``reward/std``), that is too small to matter.
        solved: share of groups that are all correct above which nothing is left to learn.
        recent: rollouts whose mean is compared.
        fall: share of the best that must be lost.
        chaos: multiple of the scatter that a batch explains.
        chaos_rollouts: rollouts over which it is measured.
        gone: rollouts without any correct completion.
        chaos_groups: fewest groups a rollout from which their scatter is known.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (*REWARDS, "reward/std", "groups/count", "groups/zero_std_frac", *GROUPS)
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind(
            "reward_jumped",
            REWARDS_CHANGED,
            rank=330,
            remedies=(
                "judge completions from before the jump again: has the verifier changed its mind?",
                "look at the verifier's log and at the data at this rollout",
                "if harder or easier prompts begin here on purpose, nothing",
            ),
        ),
        FindingKind(
            "reward_gone",
            REWARD_FALLS,
            rank=588,
            remedies=("return to the last checkpoint before the onset", "lower the learning rate"),
        ),
        FindingKind(
            "reward_falling",
            REWARD_FALLS,
            rank=590,
            remedies=("lower the learning rate", "return to the last checkpoint before the onset"),
        ),
        FindingKind(
            "reward_chaotic",
            REWARD_CHAOTIC,
            rank=595,
            remedies=("lower the learning rate", "shuffle the prompts", "take more prompts a rollout"),
        ),
        FindingKind(
            "reward_flat",
            NO_PROGRESS,
            rank=705,
            remedies=(
                "look at groups/zero_advantage_frac: has anything a gradient?",
                "raise the learning rate, or train longer",
                "take prompts of which some are solved now and then",
            ),
        ),
    )
    memory: ClassVar[int] = 300
    also_saved: ClassVar[tuple[str, ...]] = ("_has_risen",)

    def __init__(
        self,
        flat_rollouts: int = 100,
        flat: float = 0.1,
        solved: float = 0.8,
        recent: int = 10,
        fall: float = 0.1,
        chaos: float = 1.5,
        chaos_rollouts: int = 30,
        chaos_groups: int = 8,
        gone: int = 4,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("RewardMonitor", flat_rollouts=flat_rollouts, flat=flat, recent=recent, chaos=chaos, gone=gone)
        self.flat_rollouts, self.flat, self.solved = flat_rollouts, flat, solved
        self.recent, self.fall = recent, fall
        self.chaos, self.chaos_rollouts, self.chaos_groups = chaos, chaos_rollouts, chaos_groups
        self.gone = gone
        self._has_risen = False

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        yield from self._jumped(step)
        yield from self._gone()
        key = reward_key(self.history)
        values = self.history.values[key]
        if not values or self.history.steps[key][-1] != step:
            return
        if not self._has_risen and len(values) >= 2 * self.recent:
            rose = statistics.rise(values, self.recent, self.recent)
            self._has_risen = rose.errors > self.history.bound(key, len(values), RUN_LENGTH)
        yield from self._falling(key, values)
        yield from self._chaotic()
        yield from self._flat(key, values)

    def _jumped(self, step: int) -> Iterable[Finding]:
        jump, history = self.history.jump, self.history
        if jump is None:
            return
        dead = False
        for key in ("groups/zero_std_frac", unsolved_key(history)):
            if (size := len(history.steps_since(key, jump.step + 1))) >= AFTER:
                dead |= min(history.values[key][-size:]) == 1.0
        if step - jump.step > AFTER + REARM and not dead:
            return
        about = finding_kind("reward_jumped")
        if dead:
            about = in_words("reward_jumped", *DEAD)
        yield self.finding(
            "reward_jumped",
            "critical" if dead else "warning",
            f"the reward jumped from {jump.before:.3g} to {jump.after:.3g}, of which the updates explain"
            f" {jump.explained:.2g} at most",
            (
                reward_key(self.history),
                AFTER,
                jump.after,
                jump.before + math.copysign(jump.explained, jump.after - jump.before),
                jump.before,
            ),
            onset=jump.step + 1,
            about=about,
        )

    def _gone(self) -> Iterable[Finding]:
        history = self.history
        key, groups = unsolved_key(history), history.last("groups/count")
        wrong = history.values[key]
        lost = next((n for n, share in enumerate(reversed(wrong)) if share < 1), len(wrong))
        before = wrong[max(0, len(wrong) - lost - NEWEST) : len(wrong) - lost]
        if not groups or lost < self.gone or not before:
            return
        # What the updates cannot have done is a jump, and no step that was too large.
        if history.jump is not None and history.steps[key][-lost] == history.jump.step + 1:
            return
        # Groups that were all wrong before, at most as many as two standard errors allow: with few, anything may be.
        seen = groups * len(before)
        share = fmean(before)
        most = share + 2 * math.sqrt(share * (1 - share) / seen) + 1 / seen
        if most < 1 and most ** (groups * lost) < 1 / RUN_LENGTH_CRITICAL:
            yield self.finding(
                "reward_gone",
                "critical",
                f"no completion was correct in {lost} rollouts, where {1 - share:.0%} of the groups had one before",
                (key, lost, 1.0, most, share),
                onset=history.steps[key][-lost],
            )

    def _falling(self, key: str, values: list[float]) -> Iterable[Finding]:
        fell = statistics.fall(values, self.recent, self.recent)
        if fell.errors > self.history.bound(key, len(values), RUN_LENGTH) and fell.share > self.fall:
            yield self.finding(
                "reward_falling",
                "warning",
                f"the reward fell from {fell.before:.3g} to {fell.now:.3g}, by {fell.errors:.1f} standard errors",
                (key, self.recent, fell.now, fell.before - self.fall * fell.scale, fell.before),
                onset=self.history.steps[key][fell.place],
            )

    def _chaotic(self) -> Iterable[Finding]:
        history, size = self.history, self.chaos_rollouts
        values, spread = history.window("reward", size), history.median("reward/std", size)
        groups = history.median("groups/count", size)
        if len(values) < size or not spread or not groups or groups < self.chaos_groups:
            return
        explained = spread / math.sqrt(groups)
        scatter = statistics.noise(values)
        # The square of the scatter of n values is chi-square / n, bounded as by Wilson and Hilferty.
        chance = (1 + statistics.bound(RUN_LENGTH, 1, 10**6) * math.sqrt(2 / (9 * size))) ** 1.5
        if scatter > max(self.chaos, chance) * explained:
            yield self.finding(
                "reward_chaotic",
                "warning",
                f"the reward scatters by {scatter:.2g} from rollout to rollout, and {groups:.0f} groups explain"
                f" {explained:.2g}",
                ("scatter of reward", size, scatter, self.chaos * explained, explained),
                onset=history.steps["reward"][-size],
            )

    def _flat(self, key: str, values: list[float]) -> Iterable[Finding]:
        size = len(values)
        spread = self.history.median("reward/std", size)
        if size < self.flat_rollouts or not spread:
            return
        quarter = size // 4
        before, now = fmean(values[:quarter]), fmean(values[-quarter:])
        error = statistics.noise(values) * math.sqrt(2 / quarter)
        gain = now - before
        # No rise, and enough rollouts to have seen one.
        if gain > 2 * error or gain + 2 * error > self.flat * spread:
            return
        right = self.history.mean("sampling/all_correct_frac", size) or self.history.mean(
            "groups/all_correct_frac", size
        )
        solved = right is not None and right > self.solved
        yield self.finding(
            "reward_flat",
            "info" if solved or self._has_risen else "warning",
            f"in {size} rollouts the reward has moved by {gain:.2g}, with an error of {error:.2g}",
            (key, size, now, before + self.flat * spread, before),
            onset=self.history.steps[key][-size],
        )
