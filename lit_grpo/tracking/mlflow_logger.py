"""The logger of a run: everything goes to a folder on disk first, and to MLflow as far as MLflow can be reached."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lit_grpo.errors import StopRun, UserError
from lit_grpo.run.folder import (
    ROOT_DIR,
    RUNS,
    RunRecord,
    check_can_be_made,
    check_place,
    folder_name,
    new_folder,
    shown,
)
from lit_grpo.run.lock import FolderLock
from lit_grpo.tracking.dead_runs import close_dead_runs
from lit_grpo.tracking.lazy_client import LazyClient
from lit_grpo.tracking.mlflow_target import PARAM_LENGTH, MlflowTarget
from lit_grpo.tracking.no_store import NO_STORE, NoStore
from lit_grpo.tracking.repeated_steps import RepeatedSteps, forget_job
from lit_grpo.tracking.run_note import RunNote, read_note
from lit_grpo.tracking.sender import Sender
from lit_grpo.tracking.spool import FILE_NAME, STAMPS, LastLine, Spool, mend
from lit_grpo.tracking.store_address import StoreAddress
from lit_grpo.utils.files import OWNER_ALONE, write_atomically
from lit_grpo.utils.secrets import masked, masked_text

log = logging.getLogger(__name__)

PARAMS_FILE = "params.json"
QUIET_SECONDS = 30.0
"""Seconds after which a run is made in MLflow if nothing was logged yet: importing it takes from a run's own start."""


class RunLogger(Logger, RunRecord):
    """Logger that keeps a run in a folder and sends it to MLflow from a thread.

    Every record is in ``<run_dir>/metrics.jsonl`` before it is sent. A server that is down, slow or refuses a record
    never stops, slows or fails a fit: one warning tells of the first failure, and the end of the run of how many.

    The run ends in MLflow as ``FINISHED``; ``KILLED`` if a monitor, SIGTERM or Ctrl-C stopped it; ``FAILED`` after an
    error. A run folder that already holds a run is continued: the same files, and the same MLflow run if it is there.
    What MLflow had not got when a process died is sent by the one that continues its run, steps that are trained again
    appear once (:meth:`continue_from`), and a run that nobody continues is closed as ``FAILED`` by the next run with
    the same root. While a run goes on its folder is locked: a second run in it is refused.

    Args:
        root: folder of all runs; with the default store also the folder of ``mlflow.db`` and ``artifacts/``. None:
            ``runs`` in the Trainer's ``default_root_dir``.
        experiment: name of the MLflow experiment.
        run_name: name of the run and its folder; date and time if None.
        run_dir: folder of an existing run to continue, or of a new one instead of ``<root>/<run_name>``.
        tracking_uri: MLflow store or server; else ``MLFLOW_TRACKING_URI``; else ``sqlite:///<root>/mlflow.db``.
            ``none``: the run is kept in its folder alone.
        artifact_location: place where a new experiment keeps its artifacts; by default ``<root>/artifacts`` for an
            SQLite store and the server's choice otherwise.
        tags: tags of the MLflow run.
        patience: seconds without progress after which the end of a run stops waiting for the server. It tries again
            every second meanwhile, also where the connection is refused.
        checkpoints: which checkpoint becomes an artifact at the end of the run: ``best`` by its evaluation, else the
            last; the ``last``; or ``none``. It is uploaded within ``patience``.
    """

    def __init__(
        self,
        root: str | None = None,
        experiment: str = "lit-grpo",
        run_name: str | None = None,
        run_dir: str | None = None,
        tracking_uri: str | None = None,
        artifact_location: str | None = None,
        tags: dict[str, str] | None = None,
        patience: float = 30.0,
        checkpoints: Literal["none", "best", "last"] = "none",
    ) -> None:
        super().__init__()
        self._given_uri, self._given_location = tracking_uri, artifact_location
        self._has_root = root is not None
        self._set_root(Path(root or RUNS))
        self.experiment_name = experiment
        self._run_name = run_name
        self._run_dir = Path(run_dir).absolute() if run_dir else None
        # Without a root of its own the place is known when a Trainer has it: `place_below` checks that.
        check_place(self._run_dir or (self.root if root is not None else None), None if self._run_dir else run_name)
        self._tags = masked(dict(tags or {}))
        self._patience = patience
        self.checkpoints = checkpoints
        # MLflow retries for four minutes by default, and the end of a run waits for the request under way.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
        self._opened: tuple[Spool, Sender, MlflowTarget | NoStore] | None = None
        self._params: dict[str, str] = {}
        self._stop: str | None = None
        self._reported = 0
        self._run_id: str | None = None
        self._default_name: str | None = None
        self._spool_failed = False
        self._lock: FolderLock | None = None
        self._note = RunNote(self._make_run_dir, lambda: self._lock is not None and self._lock.held, self._sent)
        self._ended = False
        """Whether the run was finalized, and nothing was recorded since."""
        self._repeated: RepeatedSteps | None = None
        """Steps that this run may make again; None before :meth:`continue_from`."""
        self._last_line = LastLine()
        """What this process has written of the last step."""

    # The folder of the run.

    def _set_root(self, root: Path) -> None:
        self.root = root.absolute()
        self._store = StoreAddress.choose(self.root, self._given_uri, self._given_location)

    @property
    def tracking_uri(self) -> str:
        """Address of the MLflow store or server; ``none``: the run is kept in its folder alone."""
        return self._store.uri

    @property
    def artifact_location(self) -> str | None:
        """Place where a new experiment keeps its artifacts; None: the server chooses."""
        return self._store.artifact_location

    def place_below(self, folder: Path) -> None:
        """Keep the runs in ``folder/runs``, unless a root was given or the run has its folder already.

        Args:
            folder: the Trainer's ``default_root_dir``.

        Raises:
            UserError: nothing can be written there.
        """
        if not self._has_root and self._opened is None and self._lock is None:
            self._set_root(folder / RUNS)
            if self._run_dir is None and _is_rank_zero():
                check_can_be_made(self.root, ROOT_DIR)

    @property
    def named_folder(self) -> Path | None:
        """Folder that was given to this run, or that it goes on in; None: it gets a new one."""
        return self._run_dir

    @property
    def run_name(self) -> str | None:
        """Name that was given to the run and its folder; None: it is made from the clock."""
        return self._run_name

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run, created at the first use; None on ranks other than 0."""
        return self._make_run_dir() if _is_rank_zero() else None

    def _make_run_dir(self) -> Path:
        try:
            if self._run_dir is None:
                self._run_dir = new_folder(self.root, self._folder_name())
            self._run_dir.mkdir(parents=True, exist_ok=True)
            # A run that has ended may be asked for its folder, which another process may have by now.
            if not self._ended:
                self._lock = self._lock or FolderLock(self._run_dir)
                if not self._lock.held:
                    self._lock.take()
        except OSError as error:
            raise UserError(
                f"the folder of the run cannot be written: {error}",
                where=str(self._run_dir or self.root),
                remedy="choose a place that can be written, with room on its disk (trainer.logger.root)",
            ) from error
        return self._run_dir

    def _folder_name(self) -> str:
        self._default_name = self._default_name or folder_name()
        return self._run_name or self._default_name

    def continue_run(self, folder: Path) -> None:
        """Continue the run in ``folder``, unless another run name or folder was given.

        The name of that run itself is none of another: the configuration that a named run leaves behind holds it.
        """
        own_name = self._run_name in (None, folder.name, read_note(folder).get("run_name"))
        if self._run_dir is None and own_name:
            self._run_dir = folder

    @property
    def started(self) -> bool:
        """True once anything was recorded."""
        return self._opened is not None

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run; None until the server has created it."""
        return self._run_id

    @property
    def spool_path(self) -> Path | None:
        """Path of the file that holds every record; None on ranks other than 0."""
        run_dir = self.run_dir
        return run_dir / FILE_NAME if run_dir else None

    # Lightning's interface of a logger.

    @property
    def name(self) -> str:
        """Empty name, as ``version`` is empty: Lightning would add both to ``save_dir``, the folder of this one run."""
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str | None:
        """The run folder as a string, where ``trainer.log_dir`` and stock callbacks write."""
        # Lightning asks for it before the data is checked, so unlike `run_dir` it creates no folder.
        return str(self._run_dir or self.root / self._folder_name()) if _is_rank_zero() else None

    @property
    def experiment(self) -> Any:
        """MLflow's own ``MlflowClient``, for what this class does not offer; None on ranks other than 0.

        Its calls wait for the server. Use it with :attr:`run_id`, after :meth:`flush` has returned True.
        """
        return LazyClient(lambda: self._open()[2]) if _is_rank_zero() else None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a line to the spool and queue it for the server; takes well under a millisecond and never raises."""
        record: dict[str, Any] = {"step": int(step or 0), "wall_time": time.time()}
        record.update({key: float(value) for key, value in metrics.items()})
        record = self._last_line.new_part(record)
        if not record.keys() - STAMPS:
            return
        spool, sender, _ = self._open()
        # The disk comes first: what is there can be sent later, even by a resumed run.
        try:
            if self._repeated is not None and not self._repeated.is_new(record):
                return
            length = spool.append(record)
        except OSError as error:
            if not self._spool_failed:
                log.warning("Tracking: %s cannot be written (%s). Training goes on.", spool.path, error)
            self._spool_failed = True
            # The record cannot be read back from the disk, so it is queued in memory.
            sender.put(lambda target: target.metrics([record]))
        else:
            sender.wrote(length)

    @rank_zero_only
    def continue_from(self, step: int) -> None:
        """Let the lines of the steps from ``step`` on, which an earlier process has left, be those that are made now.

        A line that is made again with the same values (times aside) keeps its place, in the file and in MLflow. One
        with other values takes the place of the earlier line and of all that followed it.
        """
        spool, sender, _ = self._open()
        if not spool.path.exists() or self._last_line:
            return
        # It trains again, so why it stopped before is not how it ends.
        tags = self._note.read().get("tags", {})
        if ended := [name for name in tags if name.startswith("stop.")]:
            self._note.update(tags={name: value for name, value in tags.items() if name not in ended})
            sender.put(lambda target: target.remove_tags(ended))
        self._repeated = RepeatedSteps(step, spool, sender, self._note)

    def _send_earlier_lines(self) -> None:
        """Send what an earlier process has left, where this one makes no step again, as after a last checkpoint."""
        if self._opened is not None and (self._repeated is None or self._repeated.over):
            spool, sender, _ = self._opened
            sender.wrote(_size(spool.path))

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Add parameters; values too long for MLflow are visibly cut there and whole in ``params.json``."""
        flat = {k.replace("/", "."): str(v) for k, v in _flatten_dict(masked(_convert_params(params))).items()}
        known = self._params
        # Lightning logs the module's and the data module's arguments, which the configuration holds under `model.` and
        # `data.` already.
        flat = {k: v for k, v in flat.items() if all(known.get(f"{prefix}.{k}") != v for prefix in ("model", "data"))}
        flat = {k: v for k, v in flat.items() if known.get(k) != v}
        if not flat:
            return
        known.update(flat)
        _, sender, _ = self._open()
        path = self._write(json.dumps(known, indent=1, sort_keys=True), PARAMS_FILE)
        sender.put(lambda target: target.params(flat))
        if any(len(value) > PARAM_LENGTH for value in flat.values()):
            sender.put(lambda target: target.artifact(path, None))

    @rank_zero_only
    def save(self) -> None:
        """Do nothing: every record is on disk when the call that logs it returns."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Send what is left, end the MLflow run, and warn of what could not be sent; never raises."""
        if self._opened is None:
            self._release(everything_sent=True)
            return
        log.debug("finalizing the run: waiting for the sender")
        spool, sender, _ = self._opened
        final = self._final_status(status)
        # Written down before it is sent: where it does not arrive, a later run of the same root sends it.
        self._note.update(ended=final)
        self._send_earlier_lines()
        sender.end(final)
        everything_sent = sender.flush(self._patience)
        report = self.delivery_report()
        if report and sender.unsent > self._reported:
            log.warning("%s", report)
            self._reported = sender.unsent
        self._note.update()
        spool.close()
        self._last_line = LastLine()
        self._release(everything_sent)
        log.debug("the run is finalized")

    def _release(self, everything_sent: bool) -> None:
        self._ended = True
        if self._lock is not None and self._lock.held:
            # The file that stays says that MLflow has not been told the end.
            self._lock.release(leave_file=not everything_sent)

    def _final_status(self, status: str) -> str:
        # Lightning finalizes inside its except block, so the error that ends the run is the one being handled.
        error = sys.exc_info()[1]
        succeeded = status in ("success", "finished")
        if self._stop or (not succeeded and isinstance(error, StopRun | KeyboardInterrupt | SystemExit)):
            return "KILLED"
        return "FINISHED" if succeeded else "FAILED"

    # Interface for callbacks.

    @rank_zero_only
    def log_text(self, text: str, name: str) -> None:
        """Write ``<run_dir>/<name>``, whole or not at all, and send it as an artifact.

        It does not wait for the disk, so that a power failure may lose it.
        """
        self.log_artifact(self._write(text, name, to_disk=False))

    def _write(self, text: str, name: str, *, to_disk: bool = True) -> Path:
        path = self._make_run_dir() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text, to_disk=to_disk)
        if name == PARAMS_FILE:
            path.chmod(OWNER_ALONE)
        return path

    @rank_zero_only
    def log_artifact(self, path: str | os.PathLike[str], folder: str | None = None) -> None:
        """Queue a file or folder as an artifact; it must stay where it is until the run has ended."""
        self._open()[1].put(lambda target: target.artifact(Path(path), folder))

    @rank_zero_only
    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Queue tags of the MLflow run; also kept in ``run.json``."""
        text = {key: str(value) for key, value in tags.items()}
        self._open()[1].put(lambda target: target.tags(text))
        # A diagnosis sets some between two steps.
        self._note.update_behind(tags={**self._note.read().get("tags", {}), **text})

    @rank_zero_only
    def log_inputs(self, datasets: Mapping[str, Mapping[str, Any]], model: Mapping[str, Any]) -> None:
        """Queue data sets and model as inputs of the MLflow run; also kept in ``run.json``.

        Args:
            datasets: by name, each with its ``count`` of prompts and ``digest``.
            model: ``name``, ``path`` and ``settings`` of the model that the run begins with.
        """
        self._open()[1].put(lambda target: target.inputs(datasets, model))
        self._note.update(inputs={"datasets": {k: dict(v) for k, v in datasets.items()}, "model": masked(dict(model))})

    def begin_from(self, folder: Path, checkpoint: Path) -> None:
        """Note that the run goes on from a checkpoint of another run, its parent: MLflow's page shows it below that.

        Args:
            folder: folder of the other run.
            checkpoint: the checkpoint.
        """
        note = read_note(folder)
        self._tags |= {"begun_from": shown(checkpoint)}
        if note.get("run_id") and note.get("tracking_uri") == self._store.shown:
            self._tags["mlflow.parentRunId"] = str(note["run_id"])

    @rank_zero_only
    def mark_stopped(self, reason: str) -> None:
        """Note that the run is being stopped on purpose: it ends as ``KILLED``, with the tag ``stop.reason``."""
        if self._stop is None:
            self._stop = reason
            self.set_tags({"stop.reason": reason})

    @rank_zero_only
    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything is sent; return False if that fails or makes no progress for ``timeout`` seconds."""
        self._send_earlier_lines()
        return self._opened is None or self._opened[1].flush(self._patience if timeout is None else timeout)

    @property
    def unsent(self) -> int:
        """Number of records that are not in MLflow."""
        return self._opened[1].unsent if self._opened else 0

    def delivery_report(self, shown_by_caller: bool = False) -> str | None:
        """Say in one sentence how many records MLflow does not have; None if it has all.

        Args:
            shown_by_caller: True if the caller shows it, so that the end of the run need not say it again.
        """
        if self._opened is None or not (count := self._opened[1].unsent):
            return None
        if shown_by_caller:
            # One more, for the final status, which is still to be sent.
            self._reported = count + 1
        spool, sender, _ = self._opened
        records = "1 record" if count == 1 else f"{count} records"
        reason = f" ({masked_text(str(sender.last_error))})" if sender.last_error else " yet"
        return f"{records} could not be sent to {self._store.shown}{reason}; all are in {shown(spool.path)}"

    def page_address(self) -> str | None:
        """Return the address of the run's page where MLflow shows the local store; None for a server, or before it."""
        return None if self._opened is None else self._store.page(self._run_id, self._note.read().get("experiment_id"))

    def view_command(self) -> str | None:
        """Return the address of the run in MLflow, or the command that shows its store; None without a store."""
        return self._store.view_command(self._run_id)

    # Opening.

    def _open(self) -> tuple[Spool, Sender, MlflowTarget | NoStore]:
        if self._ended:
            self._ended = False
            self._make_run_dir()
        if self._opened is None:
            if self.tracking_uri == NO_STORE:
                return self._open_without_store()
            # Imported on the main thread: a worker process forked while a thread holds an import lock would hang.
            import mlflow.tracking  # noqa: F401

            # These two log each step of creating the tables of a new SQLite store.
            logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
            logging.getLogger("alembic").setLevel(logging.WARNING)
            run_dir = self._make_run_dir()
            spool = Spool(run_dir / FILE_NAME)
            with contextlib.suppress(OSError):
                mend(spool.path)
            note = self._note.read()
            same_store = note.get("tracking_uri") == self._store.shown
            identity = note.get("identity") if same_store else None
            target = MlflowTarget(
                self.tracking_uri,
                self.experiment_name,
                run_dir.name,
                note.get("run_id") if same_store else None,
                self.artifact_location,
                self._tags,
                self._on_start,
                identity or uuid.uuid4().hex,
                search=identity is not None,
            )
            if not same_store or "started" not in note:
                started = datetime.now().astimezone().isoformat(timespec="seconds")
                note = {"tracking_uri": self._store.shown, "experiment": self.experiment_name, "run_id": None}
                note |= {"started": started, "sent": 0, "forget": None}
                self._note.update(**note)
            # A resumed run sends what MLflow is not known to have. Some of it may have arrived just before the other
            # process died, and MLflow keeps a metric that comes twice with its time and value once.
            offset = min(note.get("sent") or 0, _size(spool.path))
            sender = Sender(target, spool.path, offset, self._note.update, quiet=QUIET_SECONDS)
            if note.get("forget") is not None:
                sender.put(forget_job(note["forget"], self._note))
            self._opened = spool, sender, target
            self._note.update(run_name=self._run_name, identity=target.identity, ended=None)
            close_dead_runs(self.root, run_dir, self._store.shown, sender)
        return self._opened

    def _open_without_store(self) -> tuple[Spool, Sender, MlflowTarget | NoStore]:
        run_dir = self._make_run_dir()
        spool, target = Spool(run_dir / FILE_NAME), NoStore()
        with contextlib.suppress(OSError):
            mend(spool.path)
        self._opened = spool, Sender(target, spool.path, _size(spool.path), self._note.update), target
        note = self._note.read()
        started = note.get("started") or datetime.now().astimezone().isoformat(timespec="seconds")
        self._note.update(run_name=self._run_name, tracking_uri=NO_STORE, run_id=None, started=started, ended=None)
        return self._opened

    def _on_start(self, run_id: str, experiment_id: str) -> None:
        self._run_id = run_id
        self._note.update(run_id=run_id, experiment_id=experiment_id)

    def _sent(self) -> dict[str, Any]:
        return {} if self._opened is None else {"sent": self._opened[1].sent_bytes}


def _is_rank_zero() -> bool:
    return getattr(rank_zero_only, "rank", 0) == 0


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
