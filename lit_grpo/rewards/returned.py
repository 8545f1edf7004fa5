"""What a reward may give for a completion, and what is said where it gives something else."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from decimal import Decimal
from numbers import Number, Real
from typing import Any

from lit_grpo.types import Score
from lit_grpo.utils.text import shorten

_SHOWN = 80

SKIPPED = Score(math.nan, skipped=True)
"""What None stands for: the reward leaves this completion to the others, or out."""


class NoScoreError(TypeError):
    """Error for what a reward gave in the place of a score; its text is the predicate of a sentence."""


def as_score(value: Any) -> Score:
    """Return what a reward gave as a :class:`Score` of plain values.

    A number is one, of Python, NumPy or torch, true and false, a fraction, a decimal; and so is an array or tensor of
    a single number. More than a number is said by a :class:`Score`. None, also as the value of one, is a score that is
    ``skipped``: the reward leaves the completion to the others.

    Raises:
        NoScoreError: it is something else, a plain tuple or text with a number in it included. Whether a number is
            finite is not looked at.
    """
    if value is None:
        return SKIPPED
    if not isinstance(value, Score):
        return Score(_number(value, value))
    details = value.details
    if details is not None and not isinstance(details, Mapping):
        raise NoScoreError(f"gave a Score whose details are {_shown(details)}, not figures by name")
    for name in ("timed_out", "failed", "no_answer", "skipped"):
        flag = getattr(value, name)
        if type(flag).__name__ not in ("bool", "bool_"):
            raise NoScoreError(f"gave a Score whose {name} is {_shown(flag)}, not true or false")
    figures = (
        None if details is None else {str(k): _number(v, value, f" for its figure {k!r}") for k, v in details.items()}
    )
    given: Any = value.value
    skipped = given is None or bool(value.skipped)
    return Score(
        math.nan if skipped else _number(given, value),
        bool(value.timed_out),
        bool(value.failed),
        bool(value.no_answer),
        figures,
        _number(value.seconds, value, " for its seconds"),
        skipped,
    )


def given_score(value: Any) -> Score:
    """Return what a wrapped reward gave as a :class:`Score`; an error in the place of a score is raised."""
    if isinstance(value, Exception):
        raise value
    return as_score(value)


def _number(given: Any, whole: Any, place: str = "") -> float:
    if isinstance(given, complex) or (isinstance(given, Number) and not isinstance(given, Real | Decimal)):
        raise NoScoreError(f"gave {_shown(given)}{place}, a complex number")
    try:
        if isinstance(given, Real | Decimal):
            return float(given)
        # NumPy's and torch's numbers, and their arrays of one number.
        if not isinstance(given, str | bytes | tuple | list | Mapping) and callable(getattr(given, "item", None)):
            item = given.item()
            if isinstance(item, Real):
                return float(item)
    # What a reward gives may be any object of a user's, whose methods may raise anything.
    except Exception as error:
        raise NoScoreError(f"gave {_shown(given)}{place}, which is not a number") from error
    raise NoScoreError(f"gave {_shown(given)}{place}, which is not a number{_hint(given)}")


def _hint(given: Any) -> str:
    if inspect.iscoroutine(given) or inspect.isawaitable(given):
        if inspect.iscoroutine(given):
            # Otherwise Python warns of one that was never awaited.
            given.close()
        return " but a coroutine: `async def` works in a FunctionReward, whose own function it must be"
    if inspect.isgenerator(given):
        return " but a generator: return a list"
    if isinstance(given, tuple | Mapping):
        kind = "plain tuple" if isinstance(given, tuple) else "mapping"
        return f" but a {kind}: for more than a number return lit_grpo.types.Score(value, details={{name: number}})"
    if isinstance(given, str | bytes):
        return " but text"
    return ""


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return shorten(text, _SHOWN, " […{omitted} characters…] ", keep_end=True)
