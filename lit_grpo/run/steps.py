"""The number of a step: a rollout's, from 1, in every tracker, file, line and chart; 0 is before the first rollout."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def number_from_one(trainer: Trainer) -> None:
    """Let Lightning log the first batch under 1, where nothing is logged yet; a second call changes nothing.

    To be called when the training starts: a run that goes on has its number in the checkpoint, which is loaded by then.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    # Lightning counts from 0, and everything it logs for itself or for callbacks has this number.
    if loop._batches_that_stepped == 0:
        loop._batches_that_stepped = 1


def counts_as_evaluation(trainer: Trainer) -> bool:
    """Tell whether the evaluation under way is one, and not Lightning's look at a few questions before training.

    With ``num_sanity_val_steps: -1`` Lightning asks all of them then: that is the evaluation of the untrained policy.
    """
    return not trainer.sanity_checking or math.isinf(trainer.num_sanity_val_steps)
