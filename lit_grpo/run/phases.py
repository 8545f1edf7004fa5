"""The phases of a rollout, whose seconds a run logs: one list for whoever adds them up, draws or watches them."""

from __future__ import annotations

from collections.abc import Collection

PHASES = {
    "time/sync": "weights to the engine",
    "time/generate": "sampling",
    "time/learner_idle": "waiting for sampling",
    "time/reward": "rewards",
    "time/update": "training",
}
"""Name of each phase by the metric key of its seconds, in the order of one rollout."""


def learner_phases(logged: Collection[str]) -> dict[str, str]:
    """Return the logged phases that add up to the learner's time.

    Args:
        logged: metric keys that have a value.
    """
    phases = {key: name for key, name in PHASES.items() if key in logged}
    # With sampling beside training the learner spends only what it waits; sampling and rewards overlap with its work.
    if "time/learner_idle" in phases:
        phases = {key: name for key, name in phases.items() if key not in ("time/generate", "time/reward")}
    return phases
