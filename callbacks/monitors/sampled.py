"""What the policy sampled, apart from what was trained on: they differ where dynamic sampling drops uniform groups.

``reward`` and ``groups/*`` are of the groups that were kept, which are mixed by construction: their reward stays near a
half while the policy learns or collapses. Whoever asks how good the policy is, must ask of everything it sampled.
"""

from __future__ import annotations

from lit_grpo.callbacks.monitors.history import REWARDS, History

__all__ = ["GROUPS", "REWARDS", "reward_key", "unsolved", "unsolved_key"]

GROUPS = (
    "groups/all_wrong_frac",
    "groups/all_correct_frac",
    "sampling/prompts",
    "sampling/kept",
    "sampling/surplus",
    "sampling/all_wrong_frac",
    "sampling/all_correct_frac",
)


def reward_key(history: History) -> str:
    """Return the key of the mean reward of everything that was sampled."""
    return REWARDS[0] if history.values.get(REWARDS[0]) else REWARDS[1]


def unsolved_key(history: History) -> str:
    """Return the key of the share of sampled groups without a correct completion."""
    return f"{'sampling' if history.values.get('sampling/all_wrong_frac') else 'groups'}/all_wrong_frac"


def unsolved(history: History, size: int) -> float | None:
    """Return the share of sampled groups without a correct completion, mean of the last ``size`` rollouts, or None.

    Where dynamic sampling is on and does not log it, it follows from the rewards: the uniform groups are counted as
    unsolved if their mean reward is below that of the mixed groups, since a uniform group is either all right or all
    wrong.
    """
    prompts, kept = history.mean("sampling/prompts", size), history.mean("sampling/kept", size)
    if history.values.get("sampling/all_wrong_frac") or not prompts or kept is None:
        return history.mean(unsolved_key(history), size)
    mixed = min(1.0, (kept + (history.mean("sampling/surplus", size) or 0.0)) / prompts)
    everything, of_mixed = history.mean("sampling/reward", size), history.mean("reward", size)
    if everything is None or of_mixed is None or mixed >= 1:
        return history.mean("groups/all_wrong_frac", size)
    of_uniform = (everything - mixed * of_mixed) / (1 - mixed)
    return 1 - mixed if of_uniform < of_mixed else 0.0
