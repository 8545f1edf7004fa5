"""What libraries say while a run is under way goes to a file of the run, and not to the person.

Lightning, torch, transformers, vLLM and MLflow log, warn and draw bars of their own. Each message is judged by the file
that it comes from: those of lit-grpo and of the person's own code are shown, those of installed packages are written to
``log.txt`` in the folder of the run. Errors are shown as well, and so is the table of a profiler that was asked for.

Only Python's own ways to log and warn are used, and no file descriptor is moved: what crashes can always say so, and
processes that are started inherit the real streams.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TextIO

from lit_grpo.utils.files import OWNER_ALONE
from lit_grpo.utils.own_code import is_of_this_package, is_ours
from lit_grpo.utils.secrets import masked_screen

LOG_FILE = "log.txt"
"""Name of the file, in the folder of the run, of what libraries say."""
_MOST_KEPT = 10_000
"""Lines that are kept in memory until the folder of the run is known; of more, the first are dropped."""


_ASKED_FOR = f"{os.sep}{Path('lightning', 'pytorch', 'profilers')}{os.sep}"
"""Part of the path of source files that say nothing unless somebody has set ``trainer.profiler``."""


class LibraryOutput:
    """Receiver of what libraries log and warn: a file, once its folder is known, and memory until then."""

    def __init__(self) -> None:
        self.path: Path | None = None
        """The file; None as long as it is not open."""
        self._waiting: deque[str] = deque(maxlen=_MOST_KEPT)
        self._file: TextIO | None = None
        self._lock = threading.RLock()

    def open(self, path: Path) -> None:
        """Append everything to a file from now on, and what was kept so far. A disk that refuses stops no run."""
        with self._lock:
            if self._file is not None:
                return
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
                path.chmod(OWNER_ALONE)
            except OSError:
                return
            self.path = path
            waiting = list(self._waiting)
            self._waiting.clear()
            for line in waiting:
                self._put(line)

    def write(self, source: str, text: str) -> None:
        """Write a message down, with the time and its source."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with self._lock:
            self._put(masked_screen(f"{stamp} {source}: {text.rstrip()}\n"))

    def _put(self, line: str) -> None:
        if self._file is None:
            self._waiting.append(line)
            return
        try:
            self._file.write(line)
            self._file.flush()
        # A full disk, or a file that the end of the process has closed.
        except (OSError, ValueError):
            self._waiting.append(line)

    def unwritten(self) -> list[str]:
        """Return the lines that are in no file."""
        with self._lock:
            return list(self._waiting)

    def close(self) -> None:
        """Close the file. What comes later is kept in memory."""
        with self._lock:
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self._file, self.path = None, None


class _Sorter(logging.Filter):
    """Filter of every logger: what an installed package logs goes to the file, and no further unless it is an error."""

    def __init__(self, output: LibraryOutput, shown_from: int) -> None:
        super().__init__()
        self.output, self.shown_from = output, shown_from

    def filter(self, record: logging.LogRecord) -> bool:
        if is_ours(record.pathname):
            return True
        # Details that were meant for nobody: jsonargparse logs whole configurations, with what is secret in them.
        if record.levelno >= logging.INFO:
            self.output.write(f"{record.levelname} {record.name}", _message(record))
        return record.levelno >= self.shown_from or _ASKED_FOR in record.pathname


def _message(record: logging.LogRecord) -> str:
    return logging.Formatter("%(message)s").format(record)


class _Screen(logging.StreamHandler[Any]):
    """Handler that shows messages as they are, on whatever standard error is at that moment."""

    def __init__(self) -> None:
        # As of logging's own handler of last resort: not StreamHandler's, which would set the stream.
        logging.Handler.__init__(self)

    @property
    def stream(self) -> IO[str]:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        # LIT_GRPO_LOG has given lit-grpo's logger a handler of its own.
        if not (record.name.split(".")[0] == "lit_grpo" and logging.getLogger("lit_grpo").handlers):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if not is_ours(record.pathname):
            text = f"{record.name.partition('.')[0]}: {text}"
        return in_paragraphs(text, sys.stderr)


def in_paragraphs(text: str, stream: Any) -> str:
    """Break long lines for a terminal between words, the continued ones indented; for a file leave them whole."""
    if not stream.isatty():
        return text
    width = max(20, shutil.get_terminal_size((80, 24)).columns - 1)
    lines: list[str] = []
    for line in text.splitlines():
        # Lines that are indented are laid out already, such as a prompt or a traceback.
        if len(line) <= width or line.startswith(" "):
            lines.append(line)
        else:
            lines += textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


_current: list[LibraryOutput] = []


def current_output() -> LibraryOutput | None:
    """Return the receiver that is in force; None where libraries write as they always do, as in a program's own run."""
    return _current[-1] if _current else None


@contextmanager
def library_output_to_file(shown_from: int = logging.ERROR) -> Iterator[LibraryOutput]:
    """Send what libraries say to a :class:`LibraryOutput`, and leave logging and warnings as they were afterwards.

    It has to begin before the libraries are imported: Lightning takes a handler of its own where there is none.

    Args:
        shown_from: level from which on what libraries say is shown as well.
    """
    output = LibraryOutput()
    sorter, screen, root = _Sorter(output, shown_from), _Screen(), logging.getLogger()
    loggers = [root, *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger))]
    for logger in loggers:
        logger.addFilter(sorter)
    root.addHandler(screen)
    kind = logging.getLoggerClass()
    logging.setLoggerClass(_sorted_by(sorter, kind))
    shown_before = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is not None:
            shown_before(message, category, filename, lineno, file, line)
        elif is_of_this_package(filename):
            print(in_paragraphs(f"warning: {message}", sys.stderr), file=sys.stderr, flush=True)
        elif is_ours(filename):
            place = f"{filename}:{lineno}: {category.__name__}"
            print(in_paragraphs(f"{place}: {message}", sys.stderr), file=sys.stderr, flush=True)
        else:
            output.write(f"{filename}:{lineno} {category.__name__}", str(message))
            if shown_from <= logging.WARNING:
                print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=sys.stderr)

    warnings.showwarning = show
    _current.append(output)
    try:
        yield output
    finally:
        _current.remove(output)
        if warnings.showwarning is show:
            warnings.showwarning = shown_before
        logging.setLoggerClass(kind)
        root.removeHandler(screen)
        for one in (root, *logging.root.manager.loggerDict.values()):
            if isinstance(one, logging.Logger):
                one.removeFilter(sorter)
        output.close()


def _sorted_by(sorter: _Sorter, kind: type[logging.Logger]) -> type[logging.Logger]:
    """Return the class of loggers that are made from now on: those of libraries that are not imported yet.

    They leave it to the root logger to write on the screen: a handler of their own would write past whatever is drawn
    there, since it keeps the stream that it found when the library was imported.
    """

    class SortedLogger(kind):  # type: ignore[valid-type,misc]
        def __init__(self, name: str, level: int = logging.NOTSET) -> None:
            super().__init__(name, level)
            self.addFilter(sorter)

        @property
        def propagate(self) -> bool:
            return True

        @propagate.setter
        def propagate(self, value: bool) -> None:
            pass

        def addHandler(self, hdlr: logging.Handler) -> None:  # noqa: N802 - logging's name
            if not _writes_on_screen(hdlr):
                super().addHandler(hdlr)

    return SortedLogger


def _writes_on_screen(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams
