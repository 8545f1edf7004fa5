"""The console that everything is drawn on: as wide as the terminal, in ASCII where the terminal knows nothing else."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console
from rich.file_proxy import FileProxy

_ASCII_LOCALES = ("C", "POSIX")


class _AsciiConsole(Console):
    """Console that draws boxes of ``+``, ``-`` and ``|``, whatever the stream could carry."""

    @property
    def encoding(self) -> str:
        return "ascii"


def ascii_only(stream: Any, environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether a stream, or the locale of its terminal, knows no characters beyond ASCII.

    Under ``LC_ALL=C`` Python writes UTF-8 all the same, which the terminal then shows as it pleases.
    """
    # The first that is set holds, as for the C library. Python itself sets LC_CTYPE where there is no locale at all.
    locale = next((environment[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if environment.get(name)), "")
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    return locale in _ASCII_LOCALES or not encoding.startswith("utf")


class _Through(io.TextIOBase):
    """Standard output as it stands, for a console that would write past another's drawing, which has replaced it."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(getattr(sys.stdout, "encoding", None) or "utf-8")

    def write(self, text: str) -> int:
        return sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()

    def isatty(self) -> bool:
        return sys.stdout.isatty()


_drawn_on: list[Console] = []


@contextmanager
def drawing_on(console: Console) -> Iterator[None]:
    """Let everything that is printed to standard output meanwhile go over a console that is drawn anew in place."""
    _drawn_on.append(console)
    try:
        yield
    finally:
        _drawn_on.remove(console)


def make_console(file: IO[str] | None = None, **settings: Any) -> Console:
    """Make the console for a stream, or return the one that standard output is drawn on at present.

    Args:
        file: the stream; None: standard output, whichever that is when something is printed.
        settings: further arguments of :class:`rich.console.Console`.
    """
    if file is None and _drawn_on:
        return _drawn_on[-1]
    # Of another progress bar that draws by rich, such as Lightning's.
    if file is None and isinstance(sys.stdout, FileProxy):
        file = _Through()  # type: ignore[assignment]
    kind = _AsciiConsole if ascii_only(sys.stdout if file is None else file) else Console
    # Numbers and paths are coloured by nobody's guess, and nothing in square brackets is markup.
    return kind(file=file, highlight=False, markup=False, **settings)


def can_redraw(console: Console) -> bool:
    """Tell whether lines that stand on the console can be drawn anew: no log file, no pipe, no ``TERM=dumb``."""
    return console.is_terminal and not console.is_dumb_terminal
