"""Tells a reward that jumps because rewards or prompts have changed from one that the policy has moved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from lit_grpo.callbacks.monitors import statistics
from lit_grpo.callbacks.monitors.statistics import RUN_LENGTH_CRITICAL

AFTER, BEFORE, FEWEST_BEFORE = 3, 8, 5
"""Rollouts after the jump, the most and the fewest ahead of it, whose mean rewards are compared."""
AT_ONCE = 0.75
"""Share of the change that must lie between the last two rollouts ahead of it and the first two after it."""
UPDATES = 3
"""Updates that are taken to have moved the policy between the means, all in one direction."""
NEEDED = ("reward/std", "policy/step_kl", "completions/length")
"""What must be known besides the reward."""


class Jump(NamedTuple):
    """A change of the reward from one rollout to the next that the updates between them cannot have made."""

    step: int
    """Last rollout ahead of it."""
    before: float
    """Mean reward ahead of it."""
    after: float
    """Mean reward after it."""
    explained: float
    """The most that the updates can have changed the mean reward by."""


def find_jump(
    steps: Sequence[int],
    rewards: Sequence[float],
    others: Mapping[str, tuple[Sequence[int], Sequence[float]]],
    after_it: int = AFTER,
) -> Jump | None:
    """Look for a jump that lies some rollouts back.

    A policy that an update moves by KL(before || after) = d over a whole completion changes the mean of a reward with
    standard deviation s by about s sqrt(2 d) at most: the inner product of reward and score is bounded by the product
    of their sizes. ``policy/step_kl`` times the mean length is d. The jump must be larger than what :data:`UPDATES`
    such updates in one direction do, beyond chance (once in 100,000 rollouts), and lie between two rollouts and not in
    a slope.

    Args:
        steps: rollouts trained on at each reward.
        rewards: mean reward of each rollout.
        others: steps and values of each of :data:`NEEDED`. A rollout without a ``policy/step_kl`` took no step.
        after_it: rollouts since the jump.

    Returns:
        The jump; None where there is none, or where the size of the steps is not known.
    """
    place = len(rewards) - after_it
    before = rewards[max(0, place - BEFORE) : place]
    if len(before) < FEWEST_BEFORE or not all(others.get(key, ((), ()))[1] for key in NEEDED):
        return None
    after = rewards[place:]
    then, now = fmean(before), fmean(after)
    error = statistics.noise(rewards) * math.sqrt(1 / len(before) + 1 / len(after))
    chance = statistics.bound(RUN_LENGTH_CRITICAL, 2, max(4, min(len(rewards), statistics.NEWEST) - 1))
    change = now - then
    if abs(change) <= chance * error:
        return None
    at_once = (fmean(after[:2]) - fmean(before[-2:])) / change
    # The first value after it is nearer to those that follow than to those before.
    if at_once < AT_ONCE or (after[0] - then) / change < 0.5:
        return None
    kl = dict(zip(*others["policy/step_kl"], strict=True))
    # It is measured on a few completions, so that of some updates around the jump stands for each.
    moved = fmean(math.sqrt(max(0.0, kl.get(step, 0.0))) for step in steps[max(0, place - 4) : place + 1])
    length = median(others["completions/length"][1][-BEFORE - AFTER :])
    spread = max(others["reward/std"][1][-BEFORE - AFTER :])
    explained = UPDATES * moved * spread * math.sqrt(2 * length)
    if abs(change) <= explained:
        return None
    return Jump(steps[place - 1], then, now, explained)
