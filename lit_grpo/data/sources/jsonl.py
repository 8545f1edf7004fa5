"""Prompts from a JSON Lines file, gzip or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lit_grpo.data.sources.files import decoded, text_lines
from lit_grpo.data.sources.table import FileSource, Record
from lit_grpo.errors import UserError


class JsonlPrompts(FileSource):
    """Questions in a JSON Lines file: one object a line, in UTF-8, gzip or not."""

    def records(self) -> Iterator[Record]:
        for number, line in text_lines(self.path, self.key):
            if line.strip():
                where = f"{self.path}:{number}"
                yield json_object(decoded(line, where), where), where


def json_object(line: str, where: str) -> dict[str, Any]:
    """Read the JSON object that a line holds.

    Raises:
        UserError: the line holds anything else.
    """
    try:
        value = json.loads(line)
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
            remedy="write one object a line; a whole JSON list becomes that with jq -c '.[]'",
        )
    return value
