"""The handshake between the module that learns and the data module that makes its rollouts.

The data module asks :meth:`RolloutLearner.requirements` what the rollouts must hold, and tells the shape of the run by
:meth:`RolloutLearner.connect`, once, in its ``setup`` and before any model is loaded. Neither looks into the other
after that: the engine follows :meth:`RolloutLearner.named_weights` and ``policy_version``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from lit_grpo.errors import UserError
from lit_grpo.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor

RewardRange = tuple[float, float]
"""Least and greatest total reward of a completion."""
UNKNOWN_RANGE: RewardRange = (-math.inf, math.inf)
"""The range of rewards that do not say theirs."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The shape of a run, as the data module tells it to the learner."""

    rollouts: int
    """Number of rollouts in the whole run."""
    group_size: int
    """Number of completions of each prompt."""
    prompts_per_rollout: int
    """Number of prompts in each rollout, over all ranks."""
    max_new_tokens: int
    """Most tokens that a training completion may have."""
    temperature: float = 1.0
    """Sampling temperature of training completions."""
    reward_range: RewardRange = UNKNOWN_RANGE
    """Least and greatest total reward, before any shaping by the objective."""
    primary_range: RewardRange | None = None
    """Least and greatest that the reward that says what is right adds to the total; None: no reward says it, so that
    rollouts have no ``correct``."""
    initial_completions: Callable[[int], Rollout] | None = None
    """Samples completions of the first n training prompts with the untouched model, the same on every rank. None: there
    is no engine to sample them."""
    engine_waits: Callable[[], bool] = lambda: False
    """Tells whether an engine that was begun beside the learner is ready, and waits for the learner alone: what the
    learner does not need before its first update can then wait. Always False where there is more than one process."""


@dataclass(frozen=True, kw_only=True)
class LearnerRequirements:
    """A learner's requirements of its rollouts, as it tells them to the data module."""

    completions_from: Literal["engine", "dataset"] = "engine"
    """Where completions come from: an ``engine`` samples them, or they are the solutions of the ``dataset`` (supervised
    fine-tuning)."""
    dynamic_sampling: bool = False
    """Whether uniform groups are replaced by sampling more prompts."""
    uniform_by: Literal["reward", "correct"] = "reward"
    """By what a group is uniform: equal total rewards, or all completions correct or none."""
    max_staleness: int = 0
    """Number of rollouts that may be sampled before their turn, with weights that are older by as many."""
    sampled_experts: bool = False
    """Whether completions must say which experts their tokens went through (``routing_replay: sampler``)."""
    extracted_answers: bool = False
    """Whether some reward must tell which completions hold no answer at all."""
    engine_logprobs: bool = False
    """Whether the engine must give the log-probability of every token, which the learner compares with its own."""
    check_sync: Callable[[Callable[[int], object], Callable[[], Rollout]], None] | None = None
    """Checks that an engine takes over weights, once, before it samples anything; None: that is not checked.

    It is given a function that brings the learner's weights to the engine as of a version, and one that has the engine
    sample a few completions at temperature 1. Every rank calls it, and the engine holds the learner's weights
    afterwards."""
    finish_preparing: Callable[[], None] | None = None
    """Does what the learner has left for the time in which an engine in processes of its own samples first, see
    :attr:`RunContext.engine_waits`; returns at once where nothing is left. None: this learner never leaves anything."""


class RolloutLearner(Protocol):
    """A LightningModule that learns from the rollouts of :class:`lit_grpo.RolloutDataModule`.

    :class:`lit_grpo.LitGRPO` is one. ``policy`` and ``policy_config`` are what the engine is built from, see
    :func:`lit_grpo.engines.make_engine`.
    """

    policy_version: int
    """Number of rollouts that the weights have been trained on."""
    policy: Any
    policy_config: Any

    @property
    def tokenizer(self) -> Any: ...

    def requirements(self) -> LearnerRequirements:
        """Return what rollouts must hold. It is asked often and before the model is made, so it must be cheap."""
        ...

    def connect(self, context: RunContext) -> None:
        """Fit objective and schedule to the run, before the model is made.

        Raises:
            UserError: the learner's settings and the run contradict each other.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights as (transformers name, full tensor).

        Where adapters come by themselves (``data.engine.adapters: hot``) a :class:`lit_grpo.types.WeightForm` is given.
        """
        ...


_CONSEQUENCES = {
    "named_weights": "so the engine cannot follow it",
    "requirements": "so it is not known what rollouts it needs",
    "connect": "so it cannot be told the shape of the run",
}
"""Method of :class:`RolloutLearner` -> what cannot be done with a module that lacks it, for the error."""


def as_learner(module: object) -> RolloutLearner:
    """Return ``module`` if it can learn from rollouts.

    Raises:
        UserError: it lacks a method of :class:`RolloutLearner`.
    """
    # No isinstance on a runtime_checkable protocol: that evaluates properties, and `tokenizer` loads files.
    for method, consequence in _CONSEQUENCES.items():
        if not callable(getattr(type(module), method, None)):
            raise UserError(
                f"{type(module).__name__} has no {method}(), {consequence}",
                where="model",
                remedy="use lit_grpo.LitGRPO or a subclass",
            )
    return cast(RolloutLearner, module)
