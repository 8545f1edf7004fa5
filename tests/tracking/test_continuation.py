"""A run whose process died goes on: every step once in the file and in MLflow, whatever was lost on the way."""

import json
import math
import os
import signal
import time
from functools import partial
from typing import Any, cast

import pytest

from lit_grpo.errors import UserError
from lit_grpo.run.lock import FolderLock
from lit_grpo.tracking import RunLogger
from lit_grpo.tracking.earlier_lines import EarlierLines
from lit_grpo.tracking.sender import Sender
from lit_grpo.tracking.spool import Spool, mend, same_values
from tests.ranks import run_in_process
from tests.tracking.test_sender import FakeTarget
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def root(mlflow_runs):
    return mlflow_runs


def in_a_process_that_dies(function, *args, **kwargs):
    """Run ``function`` in a process that then ends as SIGKILL ends it, without any last word."""
    assert run_in_process(and_die, partial(function, *args, **kwargs)) == -signal.SIGKILL


def and_die(function):
    function()
    os.kill(os.getpid(), signal.SIGKILL)


def tenth(step):
    return step / 10


def log(root, steps, *, folder="mine", sends=True, value=tenth, start=None):
    logger = RunLogger(root=str(root), run_dir=str(root / folder), patience=1)
    if not sends:
        Sender._send_all = lambda self: (_ for _ in ()).throw(ConnectionError("refused"))  # type: ignore[method-assign]
    if start is not None:
        logger.continue_from(start)
    for step in steps:
        logger.log_metrics({"reward": value(step), "time/update": time.time(), "epoch": 0}, step=step)
    if sends:
        assert logger.flush(PATIENCE)
    return logger


def lines(root, folder="mine"):
    return [json.loads(line) for line in (root / folder / "metrics.jsonl").read_text().splitlines()]


def stored(root, run_id, key="reward"):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    return [(m.step, m.value) for m in client.get_metric_history(run_id, key)], client.get_run(run_id)


def test_what_was_not_sent_before_a_kill_is_sent_by_the_run_that_goes_on(root):
    in_a_process_that_dies(log, root, range(3))
    in_a_process_that_dies(log, root, range(3, 8), sends=False)
    logger = log(root, range(6, 10), start=6)
    logger.finalize("success")
    history, run = stored(root, logger.run_id)
    assert history == [(step, pytest.approx(step / 10)) for step in range(10)]
    assert run.info.status == "FINISHED"
    assert [line["step"] for line in lines(root)] == list(range(10))


def test_what_is_left_of_the_last_steps_is_sent_by_a_run_that_has_none_to_make(root):
    in_a_process_that_dies(log, root, range(3))
    in_a_process_that_dies(log, root, range(3, 5), sends=False)
    logger = log(root, [])
    logger.set_tags({"some": "tag"})
    logger.finalize("success")
    assert [step for step, _ in stored(root, logger.run_id)[0]] == list(range(5))


def test_a_run_that_goes_on_is_no_longer_a_stopped_one(root):
    logger = log(root, [1, 2])
    logger.mark_stopped("interrupted by Ctrl-C")
    logger.set_tags({"stop.callback": "keyboard", "stop.step": 2, "team": "maths"})
    logger.finalize("success")
    _, run = stored(root, logger.run_id)
    assert run.info.status == "KILLED"
    assert run.data.tags["stop.reason"] == "interrupted by Ctrl-C"
    # As the processes of two commands are, these are two loggers of one folder.
    again = log(root, [3], start=3)
    assert again.run_id == logger.run_id
    again.finalize("success")
    _, run = stored(root, again.run_id)
    assert run.info.status == "FINISHED"
    assert [name for name in run.data.tags if name.startswith("stop.")] == []
    tags = json.loads((root / "mine/run.json").read_text())["tags"]
    assert tags["team"] == "maths"
    assert [name for name in tags if name.startswith("stop.")] == []


def test_a_step_made_again_to_the_same_values_keeps_its_line(root):
    in_a_process_that_dies(log, root, range(8))
    before = lines(root)
    logger = log(root, range(5, 10), start=5)
    logger.finalize("success")
    assert lines(root)[:8] == before
    assert [step for step, _ in stored(root, logger.run_id)[0]] == list(range(10))
    assert [step for step, _ in stored(root, logger.run_id, "time/update")[0]] == list(range(10))


def test_a_step_made_again_otherwise_replaces_the_line_and_all_that_followed(root):
    in_a_process_that_dies(log, root, range(8))
    logger = log(root, range(5, 7), start=5, value=lambda step: float(step))
    logger.finalize("success")
    expected = [(step, step / 10) for step in range(5)] + [(5, 5.0), (6, 6.0)]
    assert [(line["step"], line["reward"]) for line in lines(root)] == expected
    history, run = stored(root, logger.run_id)
    assert history == [(step, pytest.approx(value)) for step, value in expected]
    assert run.data.metrics["reward"] == 6.0


def test_a_replacement_that_could_not_be_sent_is_made_up_for_by_the_next_process(root):
    in_a_process_that_dies(log, root, range(8))
    in_a_process_that_dies(log, root, range(4, 7), start=4, value=float, sends=False)
    logger = log(root, range(6, 9), start=6, value=float)
    logger.finalize("success")
    expected = [(step, step / 10 if step < 4 else float(step)) for step in range(9)]
    assert [(line["step"], line["reward"]) for line in lines(root)] == expected
    assert stored(root, logger.run_id)[0] == [(step, pytest.approx(value)) for step, value in expected]


def test_a_run_that_nobody_goes_on_with_is_closed_by_the_next(root):
    in_a_process_that_dies(log, root, range(2))
    dead = json.loads((root / "mine" / "run.json").read_text())["run_id"]
    assert stored(root, dead)[1].info.status == "RUNNING"
    logger = log(root, range(2), folder="other")
    logger.finalize("success")
    run = stored(root, dead)[1]
    assert (run.info.status, run.data.tags["stop.reason"]) == ("FAILED", "its process died without a word")
    assert not (root / "mine" / "run.lock").exists()


def test_a_run_that_goes_on_is_not_closed_by_another(root):
    running = log(root, range(2))
    assert (root / "mine" / "run.lock").exists()
    other = log(root, range(2), folder="other")
    other.finalize("success")
    assert stored(root, running.run_id)[1].info.status == "RUNNING"
    running.finalize("success")


def dies_before_it_notes_the_id(root):
    RunLogger._on_start = lambda self, *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    log(root, range(2))


def test_an_mlflow_run_whose_id_was_never_noted_is_found_again(root):
    in_a_process_that_dies(dies_before_it_notes_the_id, root)
    assert json.loads((root / "mine" / "run.json").read_text())["run_id"] is None
    logger = log(root, range(3), start=0)
    logger.finalize("success")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    experiment = client.get_experiment_by_name("lit-grpo")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status) == (logger.run_id, "FINISHED")


def test_a_second_run_in_one_folder_is_refused(root):
    running = log(root, range(1))
    with pytest.raises(UserError, match=f"process {os.getpid()} on "):
        log(root, range(1))
    running.finalize("success")
    log(root, range(1, 2)).finalize("success")


def test_the_name_of_a_run_goes_on_with_that_run_alone(tmp_path):
    made = RunLogger(root=str(tmp_path), run_name="mine")
    folder = made.run_dir
    assert folder is not None
    (folder / "run.json").write_text(json.dumps({"run_name": "mine"}))
    made.finalize("success")
    for name, expected in ((None, "mine"), ("mine", "mine"), ("other", "other")):
        logger = RunLogger(root=str(tmp_path), run_name=name)
        logger.continue_run(folder)
        assert logger.run_dir == tmp_path / expected
        logger.finalize("success")


def test_a_clock_that_is_wrong_costs_no_point(root, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: -86400.0)
    logger = log(root, range(3))
    monkeypatch.undo()
    logger.finalize("success")
    assert [step for step, _ in stored(root, logger.run_id)[0]] == [0, 1, 2]
    assert logger.unsent == 0


def test_patience_waits_for_a_server_that_refuses_the_connection(tmp_path):
    target, spool = FakeTarget(), Spool(tmp_path / "metrics.jsonl")
    sender, tries = Sender(target, spool.path), []

    def start():
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionRefusedError("[Errno 111] refused")

    target.start = start  # type: ignore[method-assign]
    sender.wrote(spool.append({"step": 0, "wall_time": 0.0, "reward": 1.0}))
    assert sender.flush(PATIENCE)
    assert target.steps == [0]


@pytest.mark.parametrize("opens", [True, False])
def test_patience_is_spent_once(tmp_path, opens):
    target, spool = FakeTarget(), Spool(tmp_path / "metrics.jsonl")
    target.down = True
    if opens:
        target.start = lambda: None  # type: ignore[method-assign]
    sender = Sender(target, spool.path)
    sender.wrote(spool.append({"step": 0, "wall_time": 0.0, "reward": 1.0}))
    assert not sender.flush(0.1)
    # It would wait for an hour.
    assert not sender.flush(3600.0)
    target.down = False
    assert sender.flush(PATIENCE)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"step": 0}\n{"step": 1, "rew', '{"step": 0}\n'),
        ('{"step": 0}\n{"step": 1}', '{"step": 0}\n{"step": 1}\n'),
        ('{"step": 0', ""),
        ("", ""),
        ('{"step": 0}\n', '{"step": 0}\n'),
        ('{"step": 0}\n' + "x" * 200_000, '{"step": 0}\n'),
    ],
)
def test_half_a_line_is_completed_or_removed(tmp_path, text, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    mend(path)
    assert path.read_text() == kept


def test_a_disk_that_takes_half_a_line_leaves_no_half(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "metrics.jsonl")
    spool.append({"step": 0})
    file: Any = spool._file

    class Full:
        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, data):
            if len(data) > 5:
                return file.write(data[:5])
            raise OSError(28, "No space left on device")

    spool._file = cast(Any, Full())
    with pytest.raises(OSError, match="No space"):
        spool.append({"step": 12345})
    spool._file = file
    spool.append({"step": 1})
    assert [json.loads(line)["step"] for line in spool.path.read_text().splitlines()] == [0, 1]


def test_times_and_unknown_values_make_no_difference():
    first = {"step": 1, "wall_time": 5.0, "reward": 0.5, "time/update": 1.0, "memory/peak": 1.0, "value": math.nan}
    assert same_values(first, {"step": 1, "wall_time": 9.0, "reward": 0.5, "time/update": 2.0})
    assert not same_values(first, {"step": 1, "wall_time": 5.0, "reward": 0.25})


def test_an_evaluation_of_a_step_is_a_line_of_its_own(tmp_path):
    spool = Spool(tmp_path / "metrics.jsonl")
    spool.append({"step": 4, "epoch": 0, "reward": 1.0})
    spool.append({"step": 4, "epoch": 0, "val/reward": 2.0})
    spool.append({"step": 5, "epoch": 0, "reward": 3.0})
    earlier = EarlierLines(spool.path, 4)
    assert earlier.holds({"step": 4, "epoch": 0, "reward": 1.0})
    assert not earlier.holds({"step": 4, "epoch": 0, "val/reward": 7.0})
    void = earlier.replaced_by({"step": 4, "epoch": 0, "val/reward": 7.0})
    assert [line.record.get("reward") for line in void] == [None, 3.0]


def test_what_is_logged_twice_is_written_once(root):
    logger = RunLogger(root=str(root), run_name="mine")
    logger.log_metrics({"reward": 1.0, "bad": math.nan, "epoch": 0}, step=0)
    logger.log_metrics({"reward": 1.0, "bad": math.nan, "epoch": 0}, step=0)
    logger.log_metrics({"reward": 1.0, "bad": math.nan, "added": 2.0, "epoch": 0}, step=0)
    logger.finalize("success")
    assert [set(line) - {"step", "wall_time"} for line in lines(root)] == [{"reward", "bad", "epoch"}, {"added"}]


def test_a_dead_lock_is_no_obstacle(root):
    in_a_process_that_dies(log, root, range(2))
    assert (root / "mine" / "run.lock").exists()
    wait_until(lambda: FolderLock(root / "mine").try_take() is None, "the dead process's lock is free")
