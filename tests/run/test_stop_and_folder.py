"""Where a run is and why it stopped, whatever logger it has."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lit_grpo.run.folder import RunRecord, run_folder, run_logger, shown
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


def test_the_folder_is_that_of_our_logger_and_else_lightnings(tmp_path):
    record = Record()
    assert run_logger(trainer(object(), record)) is record
    assert run_folder(trainer(object(), record)) == Path("/runs/mine")
    assert run_folder(trainer(log_dir=str(tmp_path / "logs"))) == tmp_path / "logs"
    first, second = trainer(root=str(tmp_path / "root")), trainer(root=str(tmp_path / "root"))
    assert run_folder(first) == tmp_path / "root"
    assert not (tmp_path / "root").exists(), "nothing is made before something is written"
    (tmp_path / "root" / "checkpoints").mkdir(parents=True)
    assert run_folder(first) == tmp_path / "root"
    assert run_folder(second) == run_folder(second) == tmp_path / "root" / "run-2"


def test_a_path_is_shown_as_it_would_be_typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "runs" / "a") == "runs/a"
    assert shown(Path("/elsewhere")) == "/elsewhere"


def test_a_record_must_say_where_it_is():
    with pytest.raises(TypeError):
        RunRecord()  # type: ignore[abstract]
