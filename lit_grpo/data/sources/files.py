"""Files of prompts: opened, unpacked if they are gzip, and read as UTF-8 line by line."""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, cast

from lit_grpo.errors import UserError
from lit_grpo.utils.spelling import near_files

# By content and not by name: a downloaded file may be packed whatever its name ends in.
_GZIP_MAGIC = b"\x1f\x8b"
_OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def files_of(given: Sequence[str], endings: Sequence[str], key: str) -> list[str]:
    """Return the files that paths, folders and patterns name, in their order.

    A folder that ``save_to_disk`` wrote stands for itself: :func:`read_saved` reads it.

    Args:
        given: paths of files and folders, and patterns such as ``train-*.parquet``.
        endings: endings of the names that are taken from a folder, ``.gz`` behind them left out.
        key: key of the configuration that holds the paths, for messages.

    Raises:
        UserError: a pattern fits nothing, or a folder holds no such file.
    """
    found: list[str] = []
    for path in given:
        file = Path(path).expanduser()
        # A file whose own name has such a sign comes before a pattern of that spelling.
        if file.exists() or not glob.has_magic(path):
            found += _files_in(path, endings, key) if file.is_dir() and saved_kind(path) is None else [path]
            continue
        # Path.glob takes no absolute pattern.
        fitting = sorted(glob.glob(str(file), recursive=True))  # noqa: PTH207
        if not fitting:
            raise UserError(f"no file fits {path!r}", where=key, remedy="check the folder and the pattern")
        for one in fitting:
            whole = not Path(one).is_dir() or saved_kind(one) is not None
            found += [one] if whole else _files_in(one, endings, key)
    return found


def _files_in(folder: str, endings: Sequence[str], key: str) -> list[str]:
    root = Path(folder).expanduser()
    inside = sorted(p for p in root.rglob("*") if p.is_file())
    # Hidden files and folders are those of tools, as .cache and .git.
    inside = [p for p in inside if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    fitting = [str(p) for p in inside if p.name.removesuffix(".gz").endswith(tuple(endings))]
    if fitting:
        return fitting
    names = ", ".join(str(p.relative_to(root)) for p in inside[:5]) or "nothing"
    raise UserError(
        f"the folder {folder} holds no file of the kind {' or '.join(endings)}; it holds {names}",
        where=key,
        remedy="choose the class for these files (JsonlPrompts, CsvPrompts, ParquetPrompts; FilePrompts reads all of "
        "them), or name a file",
    )


def saved_kind(path: str) -> Literal["Dataset", "DatasetDict"] | None:
    """Say which kind of data set ``save_to_disk`` wrote into a folder; None where it is no such folder."""
    folder = Path(path).expanduser()
    if (folder / "dataset_dict.json").is_file():
        return "DatasetDict"
    return "Dataset" if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file() else None


def read_saved(path: str, split: str | None, key: str) -> Any:
    """Return the rows of a folder that ``save_to_disk`` wrote.

    Args:
        path: the folder.
        split: name of the split, of a ``DatasetDict``; None: its only one.
        key: key of the configuration that holds the path, for messages.

    Raises:
        UserError: the package datasets is missing, the folder is damaged, or it has no such split.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{path} was written by save_to_disk, and reading it needs the package datasets",
            where=key,
            remedy="pip install lit-grpo[hub]",
        ) from error
    try:
        table: Any = datasets.load_from_disk(str(Path(path).expanduser()))
    except Exception as error:  # the package raises a dozen unrelated kinds
        raise UserError(
            f"cannot read the saved data set {path}: {error}", where=key, remedy="write it again"
        ) from error
    if not isinstance(table, Mapping):
        return table
    names = list(table)
    if split is None and len(names) == 1:
        return table[names[0]]
    if split not in table:
        # The folder of a split is a saved data set by itself, which every class can read.
        first = Path(path) / ("train" if "train" in names else names[0])
        raise UserError(
            f"{path} holds several splits: {', '.join(names)}"
            if split is None
            else f"{path} has no split {split!r}, only {', '.join(names)}",
            where=key,
            remedy=f"give the folder of one: {first}" if split is None else f"set split: {first.name}",
        )
    return table[split]


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
    close = near_files(file.name, _names(parent))
    raise UserError(
        f"there is no file {path}",
        where=key,
        remedy=f"did you mean {parent / close[0]}?" if close else f"looked in {parent}",
    )


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_file())
