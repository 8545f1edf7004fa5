"""The start of the engine of a stage: beside the learner's own start where that can be, else when it is needed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from lightning.pytorch.utilities import rank_zero_info

from lit_grpo.engines import EngineContext, EngineStart, begin_engine, begins_early, make_engine
from lit_grpo.engines.base import EnginePolicy, RolloutEngine, StartSeconds
from lit_grpo.engines.config import EngineConfig
from lit_grpo.rollout.generator import ENGINE_REMEDIES
from lit_grpo.utils.memory import screen_if_out_of_memory

_LONG_START = 2.0
"""Seconds from which on it is said how long an engine took to be ready."""


class EngineStarter:
    """Starts the engine that a configuration names, in up to three parts: begin, build, finish.

    Args:
        config: which engine, and its settings.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.begun: EngineStart | None = None
        """The engine that is being started while the model is made; None: nothing is under way."""
        self.seconds: StartSeconds | None = None
        """How long the engine took to be ready; None: there is none yet."""
        self._policy: EnginePolicy | None = None
        """What the start knows of the policy as long as that has no weights."""
        self._began = 0.0
        self._building = False

    def begin(self, make_policy: Callable[[], EnginePolicy], make: Callable[[EnginePolicy], EngineContext]) -> None:
        """Begin to start the engine where that can go on beside the learner's own start.

        Args:
            make_policy: makes what can be known of the policy before its weights are there.
            make: makes the context of the stage for such a policy; it may not know the prompts yet.
        """
        if not begins_early(self.config):
            return
        self._policy, self._began, self._building = make_policy(), time.monotonic(), False
        self.begun = begin_engine(self.config, make(self._policy))

    def build(self, make: Callable[[EnginePolicy], EngineContext]) -> None:
        """Go on with what was begun, now that it is known what will be asked; returns at once. A second call is none.

        Args:
            make: as of :meth:`begin`.
        """
        if self.begun is not None and self._policy is not None and not self._building:
            self._building = True
            self.begun.build(make(self._policy))

    @property
    def ready(self) -> bool:
        """Whether an engine that was begun is ready, or has failed, and is still to be taken over."""
        return self.begun is not None and self.begun.ready

    def finish(self, context: EngineContext, device: torch.device) -> RolloutEngine:
        """Return the engine when it is ready, for the policy that is trained.

        Args:
            context: context of the stage.
            device: device of the learner.

        Raises:
            UserError: the engine refuses its settings.
            MemoryShortageError: there is too little memory for it.
        """
        came = time.monotonic()
        with screen_if_out_of_memory("starting the engine", device, where="data.engine", remedies=ENGINE_REMEDIES):
            # Taken over: from here on a start that fails has closed itself.
            begun, self.begun = self.begun, None
            engine = make_engine(self.config, context, begun)
        ready = time.monotonic()
        self.seconds = StartSeconds(ready - (came if begun is None else self._began), ready - came)
        if self.seconds.taken > _LONG_START:
            rank_zero_info(f"{self.seconds}.")
        return engine

    def give_up(self) -> None:
        """Give up what was begun, and leave nothing of it behind. Safe to call twice."""
        begun, self.begun = self.begun, None
        if begun is not None:
            begun.close()
