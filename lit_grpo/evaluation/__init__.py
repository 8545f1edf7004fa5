"""Evaluation: pass@k, maj@k and best-of-k of named sets of questions, exact over ranks, every completion kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_grpo.utils.imports import lazy_attributes

if TYPE_CHECKING:
    from lit_grpo.evaluation.evaluator import EvaluationResult as EvaluationResult
    from lit_grpo.evaluation.evaluator import Evaluator as Evaluator
    from lit_grpo.evaluation.metrics import AvgAtK as AvgAtK
    from lit_grpo.evaluation.metrics import BestOfK as BestOfK
    from lit_grpo.evaluation.metrics import MajAtK as MajAtK
    from lit_grpo.evaluation.metrics import PassAtK as PassAtK
    from lit_grpo.evaluation.metrics import PromptMean as PromptMean
    from lit_grpo.evaluation.module import EvaluatedModule as EvaluatedModule
    from lit_grpo.evaluation.sets import EvaluationSet as EvaluationSet
    from lit_grpo.evaluation.writer import EvaluationWriter as EvaluationWriter

_MODULES = {
    "AvgAtK": "metrics",
    "BestOfK": "metrics",
    "EvaluatedModule": "module",
    "EvaluationResult": "evaluator",
    "EvaluationSet": "sets",
    "EvaluationWriter": "writer",
    "Evaluator": "evaluator",
    "MajAtK": "metrics",
    "PassAtK": "metrics",
    "PromptMean": "metrics",
}

# The estimators are plain Python; who wants only them does not pay for torchmetrics and Lightning.
__getattr__ = lazy_attributes(__name__, _MODULES)
__all__ = sorted(_MODULES)
