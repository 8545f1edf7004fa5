"""The advantages of a rollout, over the completions that some reward scored, with the histories of all ranks."""

from __future__ import annotations

from torch import Tensor

from lit_grpo.distributed.reduction import RankReduction
from lit_grpo.learner.batch import gather_rows, scored_rows
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.types import Experience, Rollout


def compute_advantages(
    objective: Objective, state: ObjectiveState, batch: Rollout, experience: Experience, ranks: RankReduction
) -> tuple[Tensor, ObjectiveState]:
    """Compute the advantages of a rollout.

    Args:
        objective: the objective of this rollout.
        state: histories of the objective before the rollout.
        batch: the rollout.
        experience: its tensors, with the fields that the advantages need.
        ranks: exchange between the ranks of the run; every rank takes part.

    Returns:
        The advantages, [N, T], and the histories that the objective goes on with, the same on every rank.
    """
    # A completion that no reward scored has no part in any statistic: the objective never sees it.
    scored = scored_rows(batch)
    seen = experience if scored is None else experience.select(scored)
    advantages, state = objective.advantages(seen, state, ranks.sum_or_none)
    if scored is not None:
        advantages = gather_rows([(scored, advantages)], len(batch.completions))
    # Ranks see different prompts, and each keeps the history of all of them. Whether there is a history is asked of
    # the objective and not of the state: every rank must take part in the gather, or none.
    if ranks.several and objective.advantage.state_fields:
        state = objective.merge_states(ranks.gather(state))
    return advantages, state
