"""Files of prompts: opened, unpacked if they are gzip, and read as UTF-8 line by line."""

from __future__ import annotations

import difflib
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from lit_grpo.errors import UserError

# By content and not by name: a downloaded file may be packed whatever its name ends in.
_GZIP_MAGIC = b"\x1f\x8b"
_OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@contextmanager
def unpacked(path: str, key: str) -> Iterator[IO[bytes]]:
    """Open the file at ``path``; a gzip file is known by its first bytes, whatever its name, and unpacked.

    Raises:
        UserError: the file is missing (names the most similar one), cannot be read, or is damaged.
    """
    file = existing_file(path, key)
    try:
        with file.open("rb") as raw:
            start = raw.read(2)
            raw.seek(0)
            if start == _GZIP_MAGIC:
                with gzip.open(raw, "rb") as content:
                    yield cast(IO[bytes], content)
            else:
                yield raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"the gzip file is damaged: {error}", where=path, remedy="fetch it again") from error
    except OSError as error:
        raise UserError(f"cannot read the file: {error}", where=path) from error


def text_lines(path: str, key: str) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of each line, without a byte-order mark.

    Raises:
        UserError: as :func:`unpacked`; or the file is UTF-16.
    """
    # As bytes, so that only a line feed ends a line, and a line that is no UTF-8 can be named by its number.
    with unpacked(path, key) as content:
        for number, line in enumerate(content, start=1):
            if number == 1:
                if line[:2] in _OTHER_BOMS:
                    name = _OTHER_BOMS[line[:2]]
                    raise UserError(
                        f"{path} is {name}, not UTF-8",
                        where=f"{path}:1",
                        remedy=f"iconv -f {name} -t UTF-8 {Path(path).name} > new",
                    )
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield number, line


def decoded(line: bytes, where: str) -> str:
    """Decode a line of UTF-8.

    Raises:
        UserError: names the byte that is no UTF-8.
    """
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"the line is not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}",
            where=where,
            remedy="convert the file, for instance with iconv -f latin1 -t UTF-8",
        ) from error


def existing_file(path: str, key: str) -> Path:
    """Check that a file exists, and return its path.

    Raises:
        UserError: the file is missing (names the most similar file beside it) or a folder.
    """
    file = Path(path).expanduser()
    if file.is_file():
        return file
    if file.is_dir():
        inside = ", ".join(_names(file)[:5]) or "none"
        raise UserError(f"{path} is a folder, not a file", where=key, remedy=f"name one of its files: {inside}")
    # The nearest folder that is there: where a whole branch of the path is missing, that is the mistake to name.
    parent = next(p for p in [*file.absolute().parents] if p.is_dir())
    if parent != file.absolute().parent:
        raise UserError(
            f"there is no file {path}", where=key, remedy=f"the folder is missing as well; {parent} is there"
        )
    close = difflib.get_close_matches(file.name, _names(parent), n=1, cutoff=0.4)
    raise UserError(
        f"there is no file {path}",
        where=key,
        remedy=f"did you mean {parent / close[0]}?" if close else f"looked in {parent}",
    )


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_file())
