"""What people hand over as prompts in Python: a source, rows, a data set, a path."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lit_grpo.data.sources.any_file import FilePrompts
from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.data.sources.memory import InMemoryPrompts
from lit_grpo.errors import UserError
from lit_grpo.types import Prompt
from lit_grpo.utils.arguments import made_in_python


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
        given: a source; a list of rows, each a mapping or a :class:`Row`, or a mapping of columns; a data set of the
            package datasets or of torch, with rows by number; a table of pandas, polars or pyarrow; the path of a file
            or folder; or None.
        key: key of the configuration, for messages.

    Raises:
        UserError: it is nothing of these.
    """
    if given is None or isinstance(given, PromptSource):
        return given
    if isinstance(given, str | os.PathLike):
        files = FilePrompts(os.fspath(given))
        files.key = key
        return files
    if isinstance(given, type):
        raise UserError(f"{given.__name__} is a class", where=key, remedy=f"make one of it: {given.__name__}(...)")
    if isinstance(given, Mapping):
        return InMemoryPrompts(_rows_of_mapping(given, key))
    if (rows := _rows_of_table(given)) is not None:
        return InMemoryPrompts(rows)
    if isinstance(given, Iterator):
        # Whether it ends is not known, and a second fit would find it empty.
        raise UserError(
            f"the prompts are {_a(given)}, which gives its rows once",
            where=key,
            remedy="give a list of them: prompts=list(...)",
        )
    if not isinstance(given, (list, tuple)) or not given:
        what = f"an empty {type(given).__name__}" if isinstance(given, (list, tuple)) else _a(given)
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
    if isinstance(given[0], list | tuple) and len(given[0]) == 2:
        raise UserError(
            "the rows are pairs, and which is the question is not said",
            where=key,
            remedy="give mappings: prompts=[{'prompt': question, 'answer': answer} for question, answer in ROWS]",
        )
    if isinstance(given[0], str):
        raise UserError(
            "the prompts are a list of texts without answers",
            where=key,
            remedy="give mappings, prompts=[{'prompt': text} for text in TEXTS], with the 'answer' that a reward needs",
        )
    odd = next(row for row in given if not isinstance(row, (Mapping, Row)) or type(row) is not type(given[0]))
    # Its ids are of one tokenizer and template, which need not be those of the run.
    remedy = (
        "give the rows that they were made of (lit_grpo.data.Row, or mappings): the run encodes them itself"
        if isinstance(odd, Prompt)
        else "give every row as a mapping: {'prompt': ..., 'answer': ...}"
    )
    raise UserError(f"item {given.index(odd)} of the prompts is {_a(odd)}", where=key, remedy=remedy)


def _a(value: Any) -> str:
    """Name the class of a value with its article."""
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def _rows_of_mapping(given: Mapping[Any, Any], key: str) -> list[dict[str, Any]]:
    """Return the rows of a mapping of columns; anything else that is a mapping is refused with what to give."""
    splits = [str(name) for name, part in given.items() if hasattr(part, "column_names")]
    if splits:
        remedy = f"give one of its splits, {', '.join(splits)}"
    elif "class_path" in given:
        remedy = made_in_python(given)
    else:
        columns = {str(name): column for name, column in given.items() if isinstance(column, list | tuple)}
        if columns and len(columns) == len(given) and len({len(column) for column in columns.values()}) == 1:
            return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        remedy = "give a list of rows, or columns of one length"
    raise UserError(f"the prompts are {_a(given)}, not a list of rows", where=key, remedy=remedy)


def _rows_of_table(given: Any) -> Any:
    """Return the rows of a table or data set; None if it is neither."""
    # By their methods, so that none of the packages need be there. pandas, polars, pyarrow in this order.
    if callable(getattr(given, "to_dict", None)) and hasattr(given, "columns"):
        return given.to_dicts() if callable(getattr(given, "to_dicts", None)) else given.to_dict("records")
    if callable(getattr(given, "to_pylist", None)):
        return given.to_pylist()
    if hasattr(given, "column_names") and hasattr(given, "__iter__"):
        return given
    # A data set of torch; a sequence of Python has more than these two methods.
    if hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Sequence):
        return [given[i] for i in range(len(given))]
    return None
