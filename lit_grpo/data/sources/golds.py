"""Gold answers as people store them: a text, a number, a list of which any is right, or a field of a mapping."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lit_grpo.errors import UserError

_FIELDS = ("target", "ground_truth", "answer", "value", "text")
"""Fields of a mapping that hold the gold: Search-R1's, prime-rl's, TriviaQA's and SQuAD's."""
_ALIASES = "aliases"
"""Field of further golds beside ``value``, as TriviaQA has it."""


def is_missing(value: Any) -> bool:
    """Say whether a value stands for nothing: null, or the NaN that pandas writes for it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def plain(value: Any) -> Any:
    """Return the Python value of an array or number of numpy, and everything else as it is."""
    # By the method, for numpy need not be loaded to know its values.
    if isinstance(value, (str, int, float, Mapping, list, tuple)) or value is None:
        return value
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) else value


@lru_cache(maxsize=64)
def parsed(text: str) -> Any:
    """Return what a text of JSON holds where it is an object or a list, else None."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_golds(value: Any, column: str, where: str, *, as_json: bool = False) -> tuple[str, ...]:
    """Return the gold answers that a column holds, any of which is right; empty where it holds none.

    Args:
        value: text, number, list of these, or a mapping of which one field holds them.
        column: name of the column, for messages.
        where: file and line.
        as_json: whether a text may be a list of texts, or a mapping, written as JSON (verl's ``ground_truth``). A list
            of numbers stays a text, for ``[1, 2]`` may be an interval or a list that is the answer itself.

    Raises:
        UserError: a truth value, a list of something else, or a mapping without a field that is known.
    """
    value = plain(value)
    if is_missing(value):
        return ()
    if isinstance(value, str):
        inside = parsed(value) if as_json else None
        texts = isinstance(inside, list) and bool(inside) and all(isinstance(item, str) for item in inside)
        if texts or (isinstance(inside, dict) and _field_of(inside) is not None):
            return read_golds(inside, column, where)
        return (encodable(value, column, where),)
    # bool is a subclass of int; how true is to be written as an answer would be a guess.
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return (str(value),)
    if isinstance(value, Mapping):
        return _golds_of_mapping(value, column, where)
    if isinstance(value, Sequence):
        # A list of one list is how a batch of one was stored.
        if len(value) == 1 and isinstance(plain(value[0]), (list, tuple)):
            return read_golds(value[0], column, where)
        items = [plain(item) for item in value]
        if all(isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in items):
            golds = [gold for item in items for gold in read_golds(item, column, where)]
            return tuple(dict.fromkeys(golds))
    raise UserError(
        f"the answer in column {column!r} is neither text nor a number but {type(value).__name__}",
        where=where,
        remedy="write it as text, and several right answers as a list of texts",
    )


def _field_of(value: Mapping[str, Any]) -> str | None:
    """Return the field of a mapping that holds the gold; None where it cannot be told."""
    if len(value) == 1:
        return str(next(iter(value)))
    there = [name for name in _FIELDS if name in value]
    return there[0] if len(there) == 1 else None


def _golds_of_mapping(value: Mapping[str, Any], column: str, where: str) -> tuple[str, ...]:
    field = _field_of(value)
    if field is None:
        first = next((name for name in _FIELDS if name in value), next(iter(value), "target"))
        raise UserError(
            f"the answer in column {column!r} has several fields: {', '.join(map(str, value)) or 'none'}",
            where=where,
            remedy=f"say which one is the answer: answer_column: {column}.{first}",
        )
    golds = read_golds(value[field], f"{column}.{field}", where)
    more = read_golds(value[_ALIASES], f"{column}.{_ALIASES}", where) if field == "value" and _ALIASES in value else ()
    return tuple(dict.fromkeys((*golds, *more)))


def encodable(text: str, column: str, where: str) -> str:
    """Return a text that a tokenizer can read.

    Raises:
        UserError: it holds half of a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can write half a pair, and no tokenizer can read it.
        raise UserError(
            f"column {column!r} holds half a character ({text[error.start]!a})", where=where, remedy="mend the row"
        ) from error
    return text
