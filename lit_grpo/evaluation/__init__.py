"""Evaluation: pass@k, maj@k and best-of-k of named sets of questions, exact over ranks, every completion kept."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_grpo.evaluation.evaluator import EvaluationResult, Evaluator
    from lit_grpo.evaluation.metrics import AvgAtK, BestOfK, MajAtK, PassAtK, PromptMean
    from lit_grpo.evaluation.sets import EvaluationSet
    from lit_grpo.evaluation.writer import EvaluationWriter

_HOME = {
    "AvgAtK": "metrics",
    "BestOfK": "metrics",
    "EvaluationResult": "evaluator",
    "EvaluationSet": "sets",
    "EvaluationWriter": "writer",
    "Evaluator": "evaluator",
    "MajAtK": "metrics",
    "PassAtK": "metrics",
    "PromptMean": "metrics",
}

__all__ = [
    "AvgAtK",
    "BestOfK",
    "EvaluationResult",
    "EvaluationSet",
    "EvaluationWriter",
    "Evaluator",
    "MajAtK",
    "PassAtK",
    "PromptMean",
]


def __getattr__(name: str) -> Any:
    # The estimators are plain Python; who wants only them does not pay for torchmetrics and Lightning.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
