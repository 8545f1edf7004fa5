"""Prompts from a JSON Lines file, gzip or not."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.tasks.table import Record, TableSource, existing_file

_GZIP_MAGIC = b"\x1f\x8b"
_OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


class JsonlPrompts(TableSource):
    """One JSON object a line, in UTF-8. A gzip file is known by its first bytes, whatever its name.

    Args:
        path: of the file.
        question_column: key of the question.
        answer_column: key of the gold answer; see :class:`lit_grpo.tasks.table.TableSource`.
        id_column: key of the id; None: ``id`` if it is there, else the number of the row.
        where: keep the rows with these values.
        limit: keep the first so many rows.
        name: of the source; the file's name without endings if left out.
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
        for number, line in enumerate(self._lines(), start=1):
            if line.strip():
                where = f"{self.path}:{number}"
                yield _object(line, where), where

    def _lines(self) -> Iterator[bytes]:
        """Lines as bytes: only a line feed ends one (text mode would also split at U+2028 inside a string)."""
        file = existing_file(self.path, f"{type(self).__name__}.path")
        try:
            with file.open("rb") as raw:
                start = raw.read(2)
                raw.seek(0)
                if start in _OTHER_BOMS:
                    raise UserError(
                        f"{self.path} is {_OTHER_BOMS[start]}, not UTF-8",
                        where=f"{self.path}:1",
                        remedy=f"iconv -f {_OTHER_BOMS[start]} -t UTF-8 {file.name} > new.jsonl",
                    )
                if start == _GZIP_MAGIC:
                    with gzip.open(raw, "rb") as unpacked:
                        yield from unpacked
                else:
                    yield from raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"the gzip file is damaged: {error}", where=self.path, remedy="fetch it again") from error
        except OSError as error:
            raise UserError(f"cannot read the file: {error}", where=self.path) from error


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig" if where.endswith(":1") else "utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"the line is not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}",
            where=where,
            remedy="convert the file, for instance with iconv -f latin1 -t UTF-8",
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"the line is no JSON: {error.msg} at column {error.colno}",
            where=where,
            remedy="each line must hold one whole object, {...}",
        ) from error
    except (RecursionError, ValueError) as error:  # nested too deep, or a number of too many digits
        raise UserError(f"the line cannot be read: {error}", where=where, remedy="mend or remove it") from error
    if not isinstance(value, dict):
        raise UserError(
            f"the line holds no JSON object but {type(value).__name__}",
            where=where,
            remedy="write one object a line; a whole JSON list becomes that with jq -c '.[]'",
        )
    return value
