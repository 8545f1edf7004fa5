"""Files that are there whole or not at all, whatever interrupts the writing.

Everything goes through a temporary name in the same folder and one rename: a rename is atomic only within one file
system, and ``/tmp`` is often another. The content is brought to the disk before the rename, because after a power
failure some file systems keep the new name and lose what was written under it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

OWNER_ALONE = 0o600
"""Mode of files that may hold what other people on the machine must not read."""


def write_atomically(path: Path, content: str | bytes, *, to_disk: bool = True) -> None:
    """Write ``content`` (text as UTF-8) to ``path``, so that readers see the old file or the whole new one.

    Where ``path`` is a symbolic link, the link is replaced and the file it leads to is left alone.

    Args:
        path: the file.
        content: what it then holds.
        to_disk: wait until the disk has it. Without, a power failure may lose it, and nothing else may; beside a large
            checkpoint that is written to the same disk, waiting takes seconds.

    Raises:
        OSError: the disk refuses; ``path`` is then what it was.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    # A name of its own for each writer: threads, ranks and runs may write the same file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        # "x" refuses a name that is taken, and so never writes through a link that somebody has put there.
        with temporary.open("xb") as file:
            file.write(data)
        if to_disk:
            move_into_place(temporary, path)
        else:
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def move_into_place(source: Path, target: Path) -> None:
    """Bring a finished file or folder to the disk, and let it take the place of ``target``.

    Args:
        source: in the same folder as ``target``; gone afterwards.
        target: a file, a folder or a link, replaced as a whole; it need not be there.

    Raises:
        OSError: the disk refuses; ``target`` is then what it was.
    """
    for file in [source, *source.rglob("*")] if source.is_dir() else [source]:
        _sync(file)
    if target.is_dir() and not target.is_symlink():
        # No rename replaces a folder that is not empty, so the old one steps aside. A process that is killed between
        # the two renames leaves it under the hidden name.
        aside = target.with_name(f".{target.name}.old")
        remove(aside)
        target.rename(aside)
        try:
            source.rename(target)
        except BaseException:
            aside.rename(target)
            raise
        remove(aside)
    else:
        source.replace(target)
    # The new name stands in the folder, which has to be on the disk too.
    _sync(target.parent)


def link_atomically(link: Path, target: Path) -> None:
    """Let ``link`` lead to ``target`` in the same folder, whatever stood under its name before.

    Raises:
        OSError: the file system has neither symbolic nor hard links.
    """
    temporary = link.with_name(f".{link.name}.tmp")
    remove(temporary)
    try:
        # Relative, so that the folder can be moved with the link in it.
        temporary.symlink_to(target.name)
    except (OSError, NotImplementedError):
        try:
            temporary.hardlink_to(target)
        except NotImplementedError as error:
            raise OSError(str(error)) from error
    # A folder of that name cannot be replaced by a rename.
    if link.is_dir() and not link.is_symlink():
        remove(link)
    temporary.replace(link)


def remove(path: Path) -> None:
    """Remove a file, a link (not what it leads to) or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
