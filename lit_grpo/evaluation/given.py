"""Evaluation sets as Python code gives them: settings, or a mapping or the questions alone in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lit_grpo.data import BENCHMARKS
from lit_grpo.data.sources.given import as_source
from lit_grpo.errors import UserError
from lit_grpo.evaluation.sets import EvaluationSet
from lit_grpo.utils.dataclasses import from_arguments


def as_evaluation_sets(given: Any, key: str) -> dict[str, EvaluationSet]:
    """Return evaluation sets by name.

    Args:
        given: by name, each a set, its settings or its questions; None: no sets.
        key: key in the configuration, for messages.

    Raises:
        UserError: the sets have no names, or one of them is none.
    """
    if given is not None and not isinstance(given, Mapping):
        kind = key.rpartition(".")[2]
        name = given if isinstance(given, str) and given in BENCHMARKS else None
        raise UserError(
            f"{kind} is a {type(given).__name__}, and sets of questions have names, under which they are logged",
            where=key,
            remedy=f"{kind}={{{name!r}: {{}}}}" if name else f"{kind}={{'mine': QUESTIONS}}",
        )
    return {str(name): _as_evaluation_set(one, f"{key}.{name}") for name, one in (given or {}).items()}


def _as_evaluation_set(given: Any, key: str) -> EvaluationSet:
    if isinstance(given, (EvaluationSet, dict)):
        made = from_arguments(EvaluationSet, given, key)
        return replace(made, prompts=as_source(made.prompts, f"{key}.prompts"))
    return EvaluationSet(prompts=as_source(given, key))
