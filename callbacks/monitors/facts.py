"""What a monitor may ask of the module that is trained, where the logged numbers do not say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CONSTANT_TOKENS = ("sum_const", "per_prompt_set_const")
"""Aggregations that divide by a constant number of tokens."""
ONE_RATIO_PER_SEQUENCE = ("sequence", "sequence_token", "sequence_product", "geometric")
"""Kinds of the importance ratio that are one number for a whole completion, and so clip it whole."""


@dataclass(frozen=True)
class Facts:
    """What is known of an objective; None where it is unknown, as in every module that is none of ours."""

    label_noise: bool | None = None
    """Whether labels are flipped on purpose."""
    token_normalised: bool | None = None
    """Whether the loss divides by a constant number of tokens."""
    sequence_ratio: bool | None = None
    """Whether the importance ratio is one number for a completion."""
    entropy_coef: float | None = None
    """Coefficient of the entropy in the loss: above 0 it is paid, below 0 it is punished; -1 where it is the reward."""
    reward_range: tuple[float, float] | None = None
    """Least and greatest total reward of a completion, where the rewards say it and the objective asks for it."""
    sampler_corrected: bool | None = None
    """Whether tokens are weighed against the mismatch of sampler and learner."""


UNKNOWN = Facts()


def facts_of(module: Any) -> Facts:
    """Read the facts from the module's ``objective``; a module without one, or with another kind, is unknown."""
    objective = getattr(module, "objective", None)

    def ask(*names: str) -> Any:
        value = objective
        for name in names:
            value = getattr(value, name, None)
        return value

    noise, aggregation = ask("shaping", "label_noise"), ask("aggregation", "kind")
    ratio, correction = ask("ratio"), ask("sampler", "kind")
    entropy = -1.0 if ask("shaping", "entropy_reward") else ask("regularizers", "entropy_coef")
    bounds = getattr(getattr(module, "objective_state", None), "reward_range", None)
    return Facts(
        reward_range=tuple(bounds) if isinstance(bounds, tuple | list) and len(bounds) == 2 else None,
        label_noise=None if noise is None else bool(noise),
        token_normalised=None if aggregation is None else aggregation in CONSTANT_TOKENS,
        sequence_ratio=ratio in ONE_RATIO_PER_SEQUENCE if isinstance(ratio, str) else None,
        entropy_coef=float(entropy) if isinstance(entropy, int | float) else None,
        sampler_corrected=None if correction is None else correction != "none",
    )
