"""The file that takes what processes of vLLM write; it goes with the run, unless a message has named it."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path

from lit_grpo.engines.vllm_server.supervisor import LOG_NOTE

TAIL_LINES = 15


class ProcessLog:
    """One file for what the processes of an engine write; removed at the end, unless a message has named it.

    Args:
        scratch: folder whose removal takes the file with it where this process was killed; None: it stays then.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        descriptor, name = tempfile.mkstemp(prefix="lit-grpo-vllm-", suffix=".log")
        os.close(descriptor)
        self.path = Path(name)
        self._note = None if scratch is None else scratch / LOG_NOTE
        if self._note is not None:
            self._note.write_text(name, encoding="utf-8")
        self._remove = weakref.finalize(self, _remove_log, self.path, os.getpid())

    def keep(self, begin: int = 0) -> str:
        """Return what the file holds from byte ``begin`` on, and keep it from now on."""
        self._remove.detach()
        if self._note is not None:
            self._note.unlink(missing_ok=True)
        # A run that is given up while its engine starts has removed it.
        content = self.path.read_bytes() if self.path.exists() else b""
        return content[begin:].decode("utf-8", errors="replace").strip()

    def tail(self) -> str:
        """Return the end of the file in the words of a message, and keep it from now on."""
        return f"The end of the log of the engine processes ({self.path}):\n{last_lines(self.keep())}"

    def close(self) -> None:
        """Remove the file, unless a message has named it."""
        self._remove()


def last_lines(text: str) -> str:
    """Return the end of a log, indented as it stands in a message."""
    return "  " + "\n  ".join(text.splitlines()[-TAIL_LINES:])


def _remove_log(path: Path, owner: int) -> None:
    # A process that this one has forked ends by itself, and leaves the file.
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
