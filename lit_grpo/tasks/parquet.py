"""Prompts from a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.tasks.table import Record, TableSource, existing_file, in_memory


class ParquetPrompts(TableSource):
    """One row of the table is one question.

    Args:
        path: of the file.
        question_column: column of the question.
        answer_column: column of the gold answer; see :class:`lit_grpo.tasks.table.TableSource`.
        id_column: column of the id; None: ``id`` if it is there, else the number of the row.
        where: keep the rows with these values.
        limit: keep the first so many rows.
        name: of the source; the file's name without ending if left out.
    """

    def __init__(
        self,
        path: str,
        question_column: str = "prompt",
        answer_column: str | None = "answer",
        id_column: str | None = None,
        where: dict[str, Any] | None = None,
        limit: int | None = None,
        name: str | None = None,
    ) -> None:
        self.path = str(path)
        super().__init__(
            question_column=question_column,
            answer_column=answer_column,
            id_column=id_column,
            where=where,
            limit=limit,
            name=name or Path(self.path).name.split(".")[0],
        )

    def place(self) -> str:
        return self.path

    def records(self) -> Iterator[Record]:
        import pyarrow
        import pyarrow.parquet

        file = existing_file(self.path, f"{type(self).__name__}.path")
        try:
            with pyarrow.parquet.ParquetFile(file) as table:
                batches = (row for batch in table.iter_batches() for row in batch.to_pylist())
                yield from in_memory(batches, self.path)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read the file as Parquet: {error}", where=self.path, remedy="fetch or write it again"
            ) from error
