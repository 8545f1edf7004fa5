"""Prompts from CSV files, gzip or not."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lit_grpo.data.sources.files import decoded, text_lines
from lit_grpo.data.sources.table import FileSource, Record
from lit_grpo.errors import UserError


class CsvPrompts(FileSource):
    r"""Questions in CSV files with a header line, in UTF-8, gzip or not; a quoted field may span lines (RFC 4180).

    Every value is text: ``where: {level: 3}`` keeps the rows that say ``3``, and an empty field is a missing one.

    Args:
        delimiter: one character between two fields; ``"\t"`` for tab-separated files.
    """

    endings = (".csv", ".tsv")

    def __init__(self, path: str | list[str], delimiter: str = ",", **columns: Any) -> None:
        super().__init__(path, **columns)
        if len(delimiter) != 1:
            raise UserError(
                f"the delimiter is {delimiter!r}", where="CsvPrompts.delimiter", remedy="give one character"
            )
        self.delimiter = delimiter

    def read(self, path: str) -> Iterator[Record]:
        table = csv.reader(self._lines(path), delimiter=self.delimiter, strict=True)
        header: list[str] | None = None
        start = 1
        try:
            for fields in table:
                # A row may span lines, so its first line is the one behind the last line of the row before.
                where = f"{path}:{start}"
                start = table.line_num + 1
                # The reader gives an empty line as a row without fields.
                if not fields:
                    continue
                if header is None:
                    header = self._header(fields, where)
                    continue
                if len(fields) != len(header):
                    raise UserError(
                        f"the row has {len(fields)} fields, the header {len(header)}",
                        where=where,
                        remedy=f"quote fields that hold {self.delimiter!r} or a line break, or set delimiter",
                    )
                yield dict(zip(header, fields, strict=True)), where
        except csv.Error as error:
            raise UserError(
                f"the row cannot be read as CSV: {error}",
                where=f"{path}:{start}",
                remedy="look for a quotation mark that is not closed, or not doubled inside a field",
            ) from error

    def _lines(self, path: str) -> Iterator[str]:
        for number, line in text_lines(path, self.key):
            yield decoded(line, f"{path}:{number}")

    def _header(self, fields: list[str], where: str) -> list[str]:
        header = [field.strip() for field in fields]
        doubles = [name for name, count in Counter(header).items() if count > 1]
        if doubles:
            what = f"the column {doubles[0]!r} is there twice" if doubles[0] else "two columns have no name"
            raise UserError(what, where=where, remedy="give every column a name of its own")
        return header

    def matches(self, value: Any, wanted: Any) -> bool:
        # YAML reads 3 as a number, a CSV file has only text.
        return bool(value == str(wanted))
