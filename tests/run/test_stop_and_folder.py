"""Where a run is and why it stopped, whatever logger it has."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_grpo.run.folder import RunRecord, new_folder, run_folder, run_logger, shown
from lit_grpo.run.stop import StopReason, request_stop, stop_reason


class Record(RunRecord):
    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.tags: dict[str, Any] = {}

    @property
    def run_dir(self) -> Path | None:
        return Path("/runs/mine")

    def mark_stopped(self, reason):
        self.stopped.append(reason)

    def set_tags(self, tags):
        self.tags |= tags


class Running(SimpleNamespace):
    """A stand-in for a trainer, which like one is equal to itself alone."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def trainer(*loggers: Any, step: int = 7, log_dir: str | None = None, root: str = "/root") -> Any:
    return Running(
        loggers=list(loggers),
        should_stop=False,
        log_dir=log_dir,
        default_root_dir=root,
        is_global_zero=True,
        strategy=SimpleNamespace(broadcast=lambda value: value),
        fit_loop=SimpleNamespace(
            epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(ready=step)))
        ),
    )


def test_the_first_reason_holds_and_reaches_the_logger():
    record = Record()
    running = trainer(object(), record)
    assert stop_reason(running) is None
    request_stop(running, "entropy fell", "EntropyMonitor")
    request_stop(running, "too slow", "ThroughputMonitor")
    assert running.should_stop
    assert stop_reason(running) == StopReason("entropy fell", "EntropyMonitor", 7)
    assert record.stopped == ["entropy fell"]
    assert record.tags == {"stop.callback": "EntropyMonitor", "stop.step": 7}


def test_a_run_without_our_logger_is_stopped_too():
    running = trainer(object())
    request_stop(running, "entropy fell", "EntropyMonitor")
    assert running.should_stop
    assert stop_reason(running) is not None


def test_the_folder_is_that_of_our_logger_and_else_a_new_one(tmp_path):
    record = Record()
    assert run_logger(trainer(object(), record)) is record
    assert run_folder(trainer(object(), record)) == Path("/runs/mine")
    first, second = trainer(root=str(tmp_path)), trainer(root=str(tmp_path))
    folder = run_folder(first)
    assert folder.parent == tmp_path / "runs", "never the folder that a person works in"
    assert folder.is_dir(), "made at once, so that nobody else takes it"
    assert run_folder(first) == folder
    assert run_folder(second) == run_folder(second) != folder


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        folders = list(pool.map(lambda _: new_folder(tmp_path, "same"), range(64)))
    assert len(set(folders)) == 64


def test_a_path_is_shown_as_it_would_be_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "runs" / "a") == "runs/a"
    assert shown(Path("/elsewhere")) == "/elsewhere"


def test_a_record_must_say_where_it_is():
    with pytest.raises(TypeError):
        RunRecord()  # type: ignore[abstract]
