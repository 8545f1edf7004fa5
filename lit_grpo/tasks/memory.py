"""Prompts given as Python or YAML values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lit_grpo.tasks.table import Record, TableSource, in_memory


class InMemoryPrompts(TableSource):
    """A list of mappings, checked like a file.

    Args:
        data: the rows, for instance ``[{prompt: "1+1=", answer: "2"}]``.
        question_column: key of the question.
        answer_column: key of the gold answer; see :class:`lit_grpo.tasks.table.TableSource`.
        id_column: key of the id; None: ``id`` if it is there, else the number of the row.
        where: keep the rows with these values.
        limit: keep the first so many rows.
        name: of the source.
    """

    def __init__(
        self,
        data: list[dict[str, Any]],
        question_column: str = "prompt",
        answer_column: str | None = "answer",
        id_column: str | None = None,
        where: dict[str, Any] | None = None,
        limit: int | None = None,
        name: str = "memory",
    ) -> None:
        self.data = data
        super().__init__(
            question_column=question_column,
            answer_column=answer_column,
            id_column=id_column,
            where=where,
            limit=limit,
            name=name,
        )

    def records(self) -> Iterator[Record]:
        return in_memory(self.data, self.name)
