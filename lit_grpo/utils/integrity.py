"""Seals on checkpoints: a hash of each part, written with it, by which damage is found before anything is loaded.

A file that torch writes is a zip archive. Its seal stands in the comment behind the archive, which readers skip, so the
file stays one file that can be copied. Its parts are stretches of equal length, hashed side by side. A folder of shards
has its seal in a file of its own, with the hash of every other file. A file without a seal, from elsewhere, is checked
by the archive's own sums.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SEAL_FILE = "seal.json"
"""File of a folder of shards that holds the hash of every other file."""
_MARK = b'{"lit_grpo_seal":'
_END = b"PK\x05\x06"
_END_LENGTH = 22
_PART = 64 << 20
"""Bytes of a part, unless the file is so long that there would be more than :data:`_PARTS` of them."""
# A comment holds 65,535 bytes at most, and a part takes 35 of them.
_PARTS = 1024
_READ = 4 << 20
_DIGITS = 32


class DamagedError(ValueError):
    """A checkpoint that is not what was written: torn, changed, incomplete, or no checkpoint at all."""


def seal(path: Path) -> None:
    """Write the hash of each part of a finished checkpoint into it; a file that is no zip archive is left alone.

    Args:
        path: the checkpoint, which nobody reads yet.

    Raises:
        OSError: the disk refuses.
    """
    if path.is_dir():
        seal_folder(path, file_hashes(path, files_of(path)))
        return
    end = _end_of_archive(path)
    if end is None:
        return
    size = path.stat().st_size
    part = max(_PART, -(-size // _PARTS))
    # The length of the comment is part of what is hashed, so the comment is measured before it is filled.
    count = -(-size // part)
    comment = _comment(part, ["0" * _DIGITS] * count)
    with path.open("r+b") as file:
        file.seek(end + _END_LENGTH - 2)
        file.write(struct.pack("<H", len(comment)))
    comment = _comment(part, _hashes(path, size, part))
    with path.open("ab") as file:
        file.write(comment)


def check(path: Path) -> bool:
    """Check that a checkpoint is what was written.

    Returns:
        Whether it has a seal; without one only the archive's own sums are checked.

    Raises:
        DamagedError: it is not; the message says what is wrong with it.
    """
    if path.is_dir():
        return check_folder(path)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DamagedError(f"it cannot be read ({error})") from error
    if not size:
        raise DamagedError("the file is empty")
    found = _read_seal(path)
    if found is None:
        _check_without_seal(path)
        return False
    start, part, wanted = found
    actual = _hashes(path, start, part)
    wrong = [number for number, (a, b) in enumerate(zip(actual, wanted, strict=False)) if a != b]
    if len(actual) != len(wanted) or wrong:
        number = wrong[0] if wrong else min(len(actual), len(wanted))
        where = f"bytes {number * part:,} to {min(start, (number + 1) * part):,} of {start:,}"
        raise DamagedError(f"it has changed since it was written ({where})")
    return True


def files_of(folder: Path) -> list[str]:
    """Return the names of the files of a folder of shards, in order, without its seal."""
    return sorted(file.name for file in folder.iterdir() if file.is_file() and file.name != SEAL_FILE)


def file_hashes(folder: Path, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the length and the hashes of the parts of some files of a folder, by name."""
    out: dict[str, list[Any]] = {}
    for name in names:
        size = (folder / name).stat().st_size
        out[name] = [size, *_hashes(folder / name, size, _PART)]
    return out


def seal_folder(folder: Path, hashes: Mapping[str, list[Any]]) -> None:
    """Write the seal of a folder of shards from the :func:`file_hashes` of all its files."""
    text = json.dumps({"part": _PART, "files": dict(hashes)})
    own = hashlib.sha256(text.encode()).hexdigest()
    (folder / SEAL_FILE).write_text(json.dumps({"sha256": own, "seal": text}))


def check_folder(folder: Path, names: Iterable[str] | None = None) -> bool:
    """Check a folder of shards, or only some of its files, against its seal; see :func:`check`."""
    try:
        outer = json.loads((folder / SEAL_FILE).read_text())
        text = outer["seal"]
        content = json.loads(text)
        # By name, so that a seal of another form is one that does not match.
        part, wanted = content["part"], content["files"]
        whole = hashlib.sha256(text.encode()).hexdigest() == outer["sha256"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"its {SEAL_FILE} cannot be read ({error})") from error
    if not whole:
        raise DamagedError(f"its {SEAL_FILE} has changed since it was written")
    if missing := sorted(set(wanted) - set(files_of(folder))):
        raise DamagedError(f"{missing[0]} is missing")
    for name in wanted if names is None else names:
        if name not in wanted:
            continue
        size = (folder / name).stat().st_size
        if [size, *_hashes(folder / name, size, part)] != wanted[name]:
            raise DamagedError(f"{name} has changed since it was written")
    return True


def _comment(part: int, hashes: list[str]) -> bytes:
    text = json.dumps({"lit_grpo_seal": 1, "part": part, "sha256": hashes}, separators=(",", ":"))
    # The hash of the comment itself: a flipped digit in it must not be laid to the part that it stands for.
    return (text[:-1] + f',"own":"{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"}}').encode()


def _read_seal(path: Path) -> tuple[int, int, list[str]] | None:
    """Return where the seal begins, the length of a part, and the hashes; None where there is no seal.

    Raises:
        DamagedError: there is one, which is not as it was written.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 0xFFFF))
        tail = file.read()
    at = tail.rfind(_MARK)
    if at < 0:
        return None
    comment = tail[at:]
    try:
        content = json.loads(comment)
        part, hashes = int(content["part"]), [str(one) for one in content["sha256"]]
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError("its seal cannot be read: the file is torn or has changed since it was written") from error
    if part < 1 or comment != _comment(part, hashes):
        raise DamagedError("its seal has changed since it was written")
    return path.stat().st_size - len(comment), part, hashes


def _check_without_seal(path: Path) -> None:
    # Where a seal was cut off, the archive before it still says that one follows.
    if not zipfile.is_zipfile(path) or _end_of_archive(path) is None:
        raise DamagedError("it is torn, or no checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            # The comment is where the seal stands, and torch writes none.
            if archive.comment:
                raise DamagedError("its seal has changed since it was written")
            wrong = archive.testzip()
    except DamagedError:
        raise
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, EOFError, NotImplementedError) as error:
        raise DamagedError(f"it is torn or has changed since it was written ({error})") from error
    if wrong is not None:
        raise DamagedError(f"{wrong} in it has changed since it was written")


def _end_of_archive(path: Path) -> int | None:
    """Return where the last record of a zip archive without a comment begins; None where it is none."""
    size = path.stat().st_size
    if size < _END_LENGTH:
        return None
    with path.open("rb") as file:
        file.seek(size - _END_LENGTH)
        tail = file.read()
    return size - _END_LENGTH if tail.startswith(_END) and tail.endswith(b"\0\0") else None


def _hashes(path: Path, size: int, part: int) -> list[str]:
    """Hash the first ``size`` bytes of a file in parts, several at a time: hashing lets other threads run."""
    starts = range(0, size, part)
    workers = min(8, len(starts), os.cpu_count() or 1)
    if workers <= 1:
        return [_hash(path, start, min(part, size - start)) for start in starts]
    with ThreadPoolExecutor(workers, "seal") as pool:
        return list(pool.map(lambda start: _hash(path, start, min(part, size - start)), starts))


def _hash(path: Path, start: int, length: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while length > 0 and (block := file.read(min(_READ, length))):
            digest.update(block)
            length -= len(block)
    # Cut: 128 bits tell any damage, and the comment has little room.
    return digest.hexdigest()[:_DIGITS]
