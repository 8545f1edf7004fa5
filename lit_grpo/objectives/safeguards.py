"""What an objective lacks against a collapse: the smallest change of it that adds that and keeps everything else."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.ratios import WITHOUT_OLD
from lit_grpo.objectives.trust_regions import Clip, Dcpo, TrustRegion

Safeguard = Literal["exploration", "both_signs", "pay_for_reward", "no_entropy_bonus"]
"""``exploration``: nothing pays for certainty, and rare tokens may grow. ``both_signs``: correct and incorrect
completions, compared with their group, within a clip. ``pay_for_reward``: advantages follow the rewards alone.
``no_entropy_bonus``: nothing pays for uncertainty, and what is pushed down has something that is pushed up."""

HIGHER_CLIP = 0.28
"""DAPO's upper clip range, which lets tokens of low probability grow (2503.14476, section 3.1)."""


def changes_that_add(safeguard: Safeguard, objective: Objective) -> dict[str, Any]:
    """Return the overrides that add a safeguard to an objective of a run; empty if it has it already.

    No override takes a filter, a correction, a clip, a penalty on KL or an aggregation away, so that a recipe keeps
    what it was chosen for. An override of None gives up the setting of a part that is replaced.

    Args:
        safeguard: what the cause of a collapse lacks.
        objective: the present objective, with what the run fixes (:meth:`Objective.for_run`).

    Raises:
        ValueError: there is no such safeguard.
    """
    if safeguard not in get_args(Safeguard):
        raise ValueError(f"there is no safeguard {safeguard!r}")
    # An objective that a person wrote takes no overrides, and supervised fine-tuning has neither rewards nor samples.
    if objective.recipe == "custom" or objective.demonstrations:
        return {}
    if safeguard == "both_signs":
        return _both_signs(objective)
    if safeguard == "pay_for_reward":
        return _pay_for_reward(objective)
    if safeguard == "no_entropy_bonus":
        signs = {} if _learns_from(objective, correct=True) else _both_signs(objective)
        return signs | ({"entropy_coef": 0.0} if objective.regularizers.entropy_coef > 0 else {})
    changes = _pay_for_reward(objective)
    if not _learns_from(objective, correct=False):
        changes |= _both_signs(objective)
    if objective.regularizers.entropy_coef < 0:
        changes["entropy_coef"] = 0.0
    # With one update every ratio is 1, and no clip acts.
    if objective.off_policy and ("trust_region" in changes or _clips_below(objective.trust_region, HIGHER_CLIP)):
        changes["clip_high"] = HIGHER_CLIP
    return changes


def _clips_below(region: TrustRegion, bound: float) -> bool:
    return isinstance(region, Clip | Dcpo) and region.clip_high < bound


def _learns_from(o: Objective, *, correct: bool) -> bool:
    """Tell whether completions that are correct (or those that are not) can have a term in the loss."""
    if o.filters.keep_sign == ("negatives" if correct else "positives"):
        return False
    weight: Any = getattr(o.advantage, "positive_weight" if correct else "negative_weight", None)
    return o.advantage.kind != "sign" or weight != 0


def _both_signs(o: Objective) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if o.filters.keep_sign != "all":
        changes["keep_sign"] = "all"
    if o.advantage.kind == "sign":
        # The sign alone would have both, but no brake: it pushes as hard where a prompt is solved.
        dropped = ("positive_weight", "negative_weight", "custom_advantage")
        changes |= {"advantage": "group_std", **dict.fromkeys(dropped)}
    if o.off_policy and o.ratio in WITHOUT_OLD and o.trust_region.kind == "none":
        changes |= {"ratio": "token", "trust_region": "clip"}
    return changes


def _pay_for_reward(o: Objective) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if o.shaping.entropy_reward:
        changes["entropy_reward"] = False
        if o.shaping.invalid_entropy is not None:
            changes["invalid_entropy"] = None
    if o.entropy_signal.entropy_gamma > 0:
        changes["entropy_gamma"] = 0.0
    return changes
