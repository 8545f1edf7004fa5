"""What people hand over as prompts in Python: a source, rows, a data set, a path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_grpo.data.sources.any_file import FilePrompts
from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.data.sources.memory import InMemoryPrompts
from lit_grpo.errors import UserError
from lit_grpo.types import Prompt


class ReadyRows(PromptSource):
    """Rows that are made already; their ids must differ.

    Args:
        rows: the rows, in order.
        name: name of the source.
    """

    def __init__(self, rows: Sequence[Row], name: str = "memory") -> None:
        self.name = name
        double = next((name for name, count in Counter(row.id for row in rows).items() if count > 1), None)
        if double is not None:
            raise UserError(
                f"the id {double!r} stands in two rows; a prompt's history is kept under its id",
                where=name,
                remedy="make the ids unique",
            )
        self._rows = [replace(row, where=row.where or f"{name}: row {i}") for i, row in enumerate(rows, start=1)]

    def rows(self) -> Sequence[Row]:
        return self._rows


def as_source(given: Any, key: str) -> PromptSource | None:
    """Return the source of prompts that a value stands for.

    Args:
        given: a source; a list of rows, each a mapping or a :class:`Row`; a data set of the package datasets; a table
            of pandas; the path of a file or folder; or None.
        key: key of the configuration, for messages.

    Raises:
        UserError: it is nothing of these.
    """
    if given is None or isinstance(given, PromptSource):
        return given
    if isinstance(given, (str, Path)):
        files = FilePrompts(str(given))
        files.key = key
        return files
    if isinstance(given, type):
        raise UserError(f"{given.__name__} is a class", where=key, remedy=f"make one of it: {given.__name__}(...)")
    # By their methods, so that neither package need be there.
    if callable(getattr(given, "to_dict", None)) and hasattr(given, "columns"):
        return InMemoryPrompts(given.to_dict("records"))
    if isinstance(given, Mapping):
        splits = [str(name) for name, part in given.items() if hasattr(part, "column_names")]
        raise UserError(
            f"the prompts are a {type(given).__name__}, not a list of rows",
            where=key,
            remedy=f"give one of its splits, {', '.join(splits)}" if splits else "give a list of such rows",
        )
    if hasattr(given, "column_names") and hasattr(given, "__iter__"):
        return InMemoryPrompts(given)
    if not isinstance(given, (list, tuple)) or not given:
        what = f"an empty {type(given).__name__}" if isinstance(given, (list, tuple)) else f"a {type(given).__name__}"
        raise UserError(
            f"the prompts are {what}, and no source",
            where=key,
            remedy="give a source (JsonlPrompts, ...), a list of rows ({'prompt': ..., 'answer': ...}), a data set of "
            "the package datasets, or a path",
        )
    if all(isinstance(row, Row) for row in given):
        return ReadyRows(given)
    if all(isinstance(row, Mapping) for row in given):
        return InMemoryPrompts(list(given))
    odd = next(row for row in given if not isinstance(row, (Mapping, Row)) or type(row) is not type(given[0]))
    # Its ids are of one tokenizer and template, which need not be those of the run.
    remedy = (
        "give the rows that they were made of (lit_grpo.data.Row, or mappings): the run encodes them itself"
        if isinstance(odd, Prompt)
        else "give every row as a mapping: {'prompt': ..., 'answer': ...}"
    )
    raise UserError(f"item {given.index(odd)} of the prompts is a {type(odd).__name__}", where=key, remedy=remedy)
