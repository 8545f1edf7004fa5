"""One call of a user's function for :class:`lit_grpo.rewards.FunctionReward`, in a worker process or in this one.

It is a module of its own, because a worker imports all of the module that holds its function.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lit_grpo.rewards.returned import NoScoreError, as_score
from lit_grpo.types import Score
from lit_grpo.utils.imports import import_by_path
from lit_grpo.utils.text import shorten

_SHOWN = 300


@dataclass(frozen=True)
class Call:
    """One call of the function, as it is sent to a worker."""

    path: str
    values: Any
    """Arguments by name; a list of such for several calls of an async function."""
    arguments: Mapping[str, Any]
    """Further arguments by name."""
    count: int | None
    """Number of completions of a batch function; None for a function of one completion."""
    seconds: float | None
    """Limit of each of several calls of an async function; None: none."""
    concurrency: int
    """Calls of an async function at once."""


class Reply(NamedTuple):
    """What came of a call."""

    scores: list[Any]
    """What the function returned for each completion: a number, a Score, or a NoScoreError in its place."""
    timed_out: bool
    seconds: float
    error: str = ""
    """What went wrong, for a person to read; there are no scores then."""


def call_isolated(call: Call) -> dict[str, Any]:
    """Import the function and make the call, in a worker process."""
    try:
        function = import_by_path(call.path)
    except BaseException as error:
        return {"raised": _describe(error)}
    return call_function(function, call)


def call_function(function: Callable[..., Any], call: Call) -> dict[str, Any]:
    """Make a call and return plain data: ``scores``, one for each completion, or ``raised``, what it raised."""
    try:
        if isinstance(call.values, list):
            returned = asyncio.run(_together(function, call))
        else:
            returned = function(**call.values, **call.arguments)
            if inspect.iscoroutine(returned):
                returned = asyncio.run(returned)
            returned = [returned] if call.count is None else _listed(returned, call.count)
        return {"scores": [_packed(value) for value in returned]}
    # SystemExit too: a function that leaves has given no score.
    except BaseException as error:
        return {"raised": _describe(error)}


async def _together(function: Callable[..., Any], call: Call) -> list[Any]:
    semaphore = asyncio.Semaphore(call.concurrency)

    async def one(values: Mapping[str, Any]) -> Any:
        async with semaphore:
            try:
                return await asyncio.wait_for(function(**values, **call.arguments), call.seconds)
            except TimeoutError:
                # Without a limit it is the function's own, and an error like any other.
                if call.seconds is None:
                    raise
                return Score(0.0, timed_out=True, seconds=call.seconds)

    return list(await asyncio.gather(*(one(values) for values in call.values)))


def _listed(returned: Any, count: int) -> list[Any]:
    if isinstance(returned, str | bytes | Mapping):
        raise TypeError(f"it returned {_shown(returned)}, not a list of {count} numbers")
    try:
        listed = list(returned)
    except TypeError as error:
        raise TypeError(f"it returned {_shown(returned)}, not a list of {count} numbers") from error
    return listed


def _packed(value: Any) -> Any:
    """Turn a score into what JSON can hold: a number, a list for a Score, a text for what is neither."""
    try:
        score = as_score(value)
    except NoScoreError as error:
        return {"problem": str(error)}
    # JSON has no NaN, which is the value of a skipped score.
    number = None if score.skipped else score.value
    return number if not isinstance(value, Score) else [number, *score[1:4], score.details, score.seconds]


def _shown(value: Any) -> str:
    return shorten(repr(value), _SHOWN, " […{omitted} characters…] ", keep_end=True)


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost place outside this file is the user's.
    place = next((f" at {f.filename}:{f.lineno}" for f in reversed(frames) if f.filename != __file__), "")
    return shorten(f"{type(error).__name__}: {error}", 1000, " […{omitted} characters…] ", keep_end=True) + place
