"""Prompts from files of any kind that is read here, told by their names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lit_grpo.data.sources.csv_file import CsvPrompts
from lit_grpo.data.sources.jsonl import JsonlPrompts
from lit_grpo.data.sources.parquet import ParquetPrompts
from lit_grpo.data.sources.table import FileSource, Record
from lit_grpo.errors import UserError
from lit_grpo.utils.imports import fault_of_class


class FilePrompts(FileSource):
    """Questions in files of JSON, CSV or Parquet, whichever the ending of each name says, gzip or not.

    ``.jsonl``, ``.json`` and ``.ndjson`` are read as by ``JsonlPrompts``, ``.csv`` and ``.tsv`` as by ``CsvPrompts``,
    ``.parquet`` as by ``ParquetPrompts``. Other files beside them in a folder are left alone.
    """

    endings = (*JsonlPrompts.endings, *CsvPrompts.endings, *ParquetPrompts.endings)

    def read(self, path: str) -> Iterator[Record]:
        name = path.removesuffix(".gz")
        if name.endswith(JsonlPrompts.endings):
            yield from self._by(JsonlPrompts(path)).read(path)
        elif name.endswith(CsvPrompts.endings):
            yield from self._by(CsvPrompts(path, delimiter="\t" if name.endswith(".tsv") else ",")).read(path)
        elif name.endswith(ParquetPrompts.endings):
            yield from self._by(ParquetPrompts(path)).read(path)
        else:
            # The class of a module that fails while it is imported is taken for text.
            if (fault := fault_of_class(path)) is not None:
                raise fault
            raise UserError(
                f"the name {path} does not say what kind of file it is",
                where=self.key,
                remedy=f"give a file that ends in one of {', '.join(self.endings)} (or .gz behind it), or choose "
                "JsonlPrompts, CsvPrompts or ParquetPrompts",
            )

    def _by(self, reader: FileSource) -> FileSource:
        """Let the source of one kind of file say in its messages where this one's path stands."""
        reader.key = self.key
        return reader

    def matches(self, value: Any, wanted: Any) -> bool:
        # A CSV file has only text, where YAML reads 3 as a number.
        return bool(value == wanted or (isinstance(value, str) and value == str(wanted)))
