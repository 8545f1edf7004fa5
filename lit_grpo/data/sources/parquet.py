"""Prompts from Parquet files, gzip or not."""

from __future__ import annotations

from collections.abc import Iterator
from gzip import GzipFile
from io import BytesIO

from lit_grpo.data.sources.files import unpacked
from lit_grpo.data.sources.table import FileSource, Record, in_memory
from lit_grpo.errors import UserError


class ParquetPrompts(FileSource):
    """Questions in Parquet files, one a row; a file that is packed with gzip as a whole is unpacked in memory."""

    endings = (".parquet",)

    def read(self, path: str) -> Iterator[Record]:
        import pyarrow
        import pyarrow.parquet

        with unpacked(path, self.key) as content:
            try:
                # pyarrow seeks to the end first, which a gzip stream cannot do without unpacking it again and again.
                source = BytesIO(content.read()) if isinstance(content, GzipFile) else content
                with pyarrow.parquet.ParquetFile(source) as table:
                    batches = (row for batch in table.iter_batches() for row in batch.to_pylist())
                    yield from in_memory(batches, path)
            except (pyarrow.ArrowException, UnicodeDecodeError) as error:
                raise UserError(
                    f"cannot read the file as Parquet: {error}", where=path, remedy="fetch or write it again"
                ) from error
