"""What an objective remembers from one rollout to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class PromptHistory(NamedTuple):
    """Rewards of one prompt over all of its visits (DCPO)."""

    mean: float
    std: float
    visits: float


@dataclass(frozen=True)
class ObjectiveState:
    """Memory of an objective, never changed in place: what adapts returns a new state.

    Each part uses the fields that its ``state_fields`` names; the others keep their defaults.
    """

    prompts: Mapping[str, PromptHistory] = field(default_factory=dict)
    """Reward statistics by prompt id (``sas``)."""
    reward_range: tuple[float, float] | None = None
    """Least and greatest shaped reward, seen or possible; None as long as no reward is known (``gae``)."""
    beta: float | None = None
    """Current coefficient of an adaptive KL penalty (``kl_penalty`` with ``trpo_target_kl``)."""
    initial_entropy: float | None = None
    """Mean of <H>_i of the untouched model, in nats; None until it is measured (``entropy_filter``)."""
    first_rollout_entropy: float | None = None
    """Mean of <H>_i over the first rollout, sampled by the untouched model, in nats; kept for an entropy filter that is
    switched on in mid-run, when that model is gone. None until the first rollout, or if it was not measured."""
    rollouts: int = 0
    """Rollouts that advantages were computed for (``label_noise``)."""
    custom: Mapping[str, Any] = field(default_factory=dict)
    """History of a user's own estimator, in plain types."""

    def with_initial_entropy(self, value: float) -> ObjectiveState:
        """Return the state with the measured entropy of the untouched model, in nats."""
        return replace(self, initial_entropy=float(value))

    def with_reward_range(self, low: float, high: float) -> ObjectiveState:
        """Return the state with a known range of the shaped reward."""
        return replace(self, reward_range=(low, high))

    def including_rewards(self, low: float, high: float) -> ObjectiveState:
        """Return the state with its reward range widened to hold ``low`` and ``high``."""
        ends = [*(self.reward_range or ()), low, high]
        return replace(self, reward_range=(min(ends), max(ends)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint: the fields that are not at their default."""
        values: dict[str, Any] = {}
        if self.prompts:
            values["prompts"] = {name: list(history) for name, history in self.prompts.items()}
        if self.reward_range is not None:
            values["reward_range"] = list(self.reward_range)
        if self.beta is not None:
            values["beta"] = self.beta
        if self.initial_entropy is not None:
            values["initial_entropy"] = self.initial_entropy
        if self.first_rollout_entropy is not None:
            values["first_rollout_entropy"] = self.first_rollout_entropy
        if self.rollouts:
            values["rollouts"] = self.rollouts
        if self.custom:
            values["custom"] = dict(self.custom)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ObjectiveState:
        """Make a state from what :meth:`to_dict` returned."""
        known = dict(values)
        if "prompts" in known:
            known["prompts"] = {name: PromptHistory(*history) for name, history in known["prompts"].items()}
        if "reward_range" in known:
            # An empty range means that no reward was known yet.
            known["reward_range"] = tuple(known["reward_range"]) or None
        return cls(**known)
