"""The first measurement of entropy: the mean of the untouched model, which some objectives compare with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_grpo.errors import UserError
from lit_grpo.learner.forward import ForwardRunner
from lit_grpo.learner.metric_sums import Reduce
from lit_grpo.learner.run_objective import with_untouched_entropy
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.types import Rollout


def with_initial_entropy(
    objective: Objective,
    state: ObjectiveState,
    rollouts: int,
    forward: ForwardRunner,
    completions: Callable[[int], Rollout] | None,
    reduce_sum: Reduce,
) -> ObjectiveState:
    """Return the state of an objective with the mean entropy of the untouched model, measured if that is still there.

    Args:
        objective: compares with that entropy.
        state: its histories.
        rollouts: number of rollouts that the model has been trained on.
        forward: the models.
        completions: as of :func:`measure_initial_entropy`.
        reduce_sum: likewise.

    Raises:
        UserError: nothing can sample the completions, or the model has been trained on already and the first rollout
            measured nothing.
    """
    # A run that is resumed under an objective that asks for it: the untouched model is gone.
    if rollouts:
        return with_untouched_entropy(objective, state, rollouts)
    return state.with_initial_entropy(measure_initial_entropy(forward, objective, completions, reduce_sum))


def measure_initial_entropy(
    forward: ForwardRunner, objective: Objective, completions: Callable[[int], Rollout] | None, reduce_sum: Reduce
) -> float:
    """Measure the mean entropy <H> of completions that the untouched model samples, in nats.

    Args:
        forward: the models, on which nothing has been trained yet.
        objective: says how many prompts the completions are sampled for.
        completions: samples completions of the first n training prompts; None: nothing can sample them.
        reduce_sum: sum of a tensor over ranks.

    Raises:
        UserError: nothing can sample the completions.
    """
    if completions is None:
        raise UserError(
            f"{objective.name} compares with the entropy of the untouched model, "
            "which only RolloutDataModule lets it measure",
            where="model.objective.initial_entropy",
            remedy="set initial_entropy to the measured mean, in nats",
        )
    entropy = forward.sequence_entropy(completions(objective.initial_entropy_prompts)).double()
    # Sum and number travel in one collective, and the mean is taken after it: ranks may hold different numbers.
    sums = torch.stack([entropy.sum(), entropy.new_tensor(float(len(entropy)))])
    total, number = reduce_sum(sums).tolist()
    rank_zero_info(f"entropy of the untouched model: {total / number:.4f} nats, over {number:.0f} completions")
    return float(total / number)
