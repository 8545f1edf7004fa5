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
        self._waiting: dict[str, Any] = {}
        """Entries that are not in the file yet. Replaced and never changed, so that threads may read it."""
        self._waiting_lock = threading.Lock()

    def read(self) -> dict[str, Any]:
        """Return the entries of the note; none where it cannot be read."""
        # In this order: what is written meanwhile is then in one of the two.
        waiting = self._waiting
        return read_note(self._folder()) | waiting

    def update_behind(self, **entries: Any) -> None:
        """Change entries of the note in a thread, for who must not wait for the disk; :meth:`read` knows them at once.

        Beside a large checkpoint that is written to the same disk the note would take seconds. Any later
        :meth:`update` writes them too; a process that is killed before loses them.
        """
        with self._waiting_lock:
            self._waiting = self._waiting | entries
        # They are few: a diagnosis that begins or ends has some.
        threading.Thread(target=self.update, name="run-note", daemon=True).start()

    def update(self, **entries: Any) -> None:
        """Change entries of the note; a disk that refuses is warned of once."""
        try:
            # Several threads write here.
            with self._lock:
                # One of them may still be trying when the run has ended, and another process may continue it.
                if not self._may_write():
                    return
                # Asked for in here, so that a later note never says less than an earlier one.
                latest, waiting = self._latest(), self._waiting
                path = self._folder() / RUN_FILE
                write_atomically(path, json.dumps({**read_note(path.parent), **waiting, **latest, **entries}, indent=1))
                path.chmod(OWNER_ALONE)
            with self._waiting_lock:
                # Not what has come since.
                self._waiting = {k: v for k, v in self._waiting.items() if k not in waiting or v is not waiting[k]}
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
