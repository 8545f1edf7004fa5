"""Prompts from JSON files, gzip or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lit_grpo.data.sources.files import decoded, text_lines
from lit_grpo.data.sources.table import FileSource, Record, in_memory
from lit_grpo.errors import UserError


class JsonlPrompts(FileSource):
    """Questions in JSON files, in UTF-8, gzip or not: one object a line (JSON Lines), or one list of objects."""

    endings = (".jsonl", ".json", ".ndjson")

    def read(self, path: str) -> Iterator[Record]:
        lines = text_lines(path, self.key)
        for number, line in lines:
            if not line.strip():
                continue
            if number == 1 and line.lstrip().startswith(b"["):
                rest = b"".join([line, *(more for _, more in lines)])
                yield from json_list(decoded(rest, path), path)
                return
            where = f"{path}:{number}"
            yield json_object(decoded(line, where), where), where


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object, in which no key may stand twice: Python would take the last without a word."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {double!r} is there twice")
    return made


def json_list(text: str, path: str) -> Iterator[Record]:
    """Read the rows of a file that is one JSON list.

    Raises:
        UserError: it is no JSON, or an item is no object.
    """
    try:
        rows = json.loads(text, object_pairs_hook=_without_doubles)
    except (RecursionError, ValueError) as error:
        raise UserError(
            f"the file begins as a JSON list and cannot be read as one: {error}",
            where=path,
            remedy="write one object a line, or one whole list of objects",
        ) from error
    return in_memory(rows, path)


def json_object(line: str, where: str) -> dict[str, Any]:
    """Read the JSON object that a line holds.

    Raises:
        UserError: the line holds anything else.
    """
    try:
        value = json.loads(line, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError as error:
        raise UserError(
            f"the line is no JSON: {error.msg} at column {error.colno}",
            where=where,
            remedy="each line must hold one whole object, {...}",
        ) from error
    except (RecursionError, ValueError) as error:
        # JSON that is nested too deep, or holds a number of more digits than Python reads.
        raise UserError(f"the line cannot be read: {error}", where=where, remedy="mend or remove it") from error
    if not isinstance(value, dict):
        raise UserError(
            f"the line holds no JSON object but {type(value).__name__}",
            where=where,
            remedy="write one object a line, or one whole list of objects",
        )
    return value
