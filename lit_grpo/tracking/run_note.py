"""``run.json``, the note in the folder of a run: which MLflow run it is, what was sent, how it ended."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lit_grpo.utils.files import OWNER_ALONE, write_atomically

log = logging.getLogger(__name__)

RUN_FILE = "run.json"


class RunNote:
    """The note of one run, which several threads of its process may change.

    Args:
        folder: returns the folder of the run, which it makes if need be.
        may_write: tells whether this process holds the lock of the folder; without it nothing is written, for another
            process may continue the run.
        latest: returns entries that go into every note that is written, as they are at that moment.
    """

    def __init__(
        self, folder: Callable[[], Path], may_write: Callable[[], bool], latest: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._folder, self._may_write, self._latest = folder, may_write, latest
        self._lock = threading.Lock()
        self._failed = False
        """Whether it was said that the note cannot be written."""

    def read(self) -> dict[str, Any]:
        """Return the entries of the note; none where it cannot be read."""
        return read_note(self._folder())

    def update(self, **entries: Any) -> None:
        """Change entries of the note; a disk that refuses is warned of once."""
        # The sender's thread may still be trying when the run has ended, and another process may continue it.
        if not self._may_write():
            return
        try:
            # The sender's thread writes here too.
            with self._lock:
                # Asked for in here, so that a later note never says less than an earlier one.
                latest = self._latest()
                path = self._folder() / RUN_FILE
                write_atomically(path, json.dumps({**self.read(), **latest, **entries}, indent=1))
                path.chmod(OWNER_ALONE)
        except OSError as error:
            if not self._failed:
                log.warning("Tracking: %s cannot be written (%s).", RUN_FILE, error)
            self._failed = True


def read_note(folder: Path) -> dict[str, Any]:
    """Return the entries of the note in a folder; none where there is no note that can be read."""
    try:
        content = json.loads((folder / RUN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
