"""Checkpoints are written while training goes on, and hold what was there when they were due."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import Strategy

from lit_grpo.callbacks import HealthMonitor, RolloutCheckpoint, request_stop
from lit_grpo.callbacks.checkpoint_writer import CheckpointWriter
from lit_grpo.callbacks.host_copy import HostCopy
from lit_grpo.callbacks.host_memory import HostMemory
from lit_grpo.errors import StopRun
from lit_grpo.utils.integrity import check
from tests.ranks import run_in_process
from tests.tracking.stand_in import StandIn, StandInData, make_trainer


class Slow:
    """A disk on which a write takes until it is let go; the first ``blocked`` of them."""

    def __init__(self, monkeypatch: Any, blocked: int = 1, error: BaseException | None = None) -> None:
        self.go, self.begun, self.written = threading.Event(), list[str](), list[str]()
        save = Strategy.save_checkpoint

        def slowly(strategy: Any, content: Any, path: Path, *args: Any, **kwargs: Any) -> None:
            self.begun.append(path.name)
            if len(self.begun) <= blocked:
                assert self.go.wait(60), "nobody waited for the write"
                if error is not None:
                    raise error
            save(strategy, content, path, *args, **kwargs)
            self.written.append(path.name)

        monkeypatch.setattr(Strategy, "save_checkpoint", slowly)


class Seen(pl.Callback):
    """The weight after each rollout and what was on disk then; may do something before a rollout."""

    def __init__(self, folder: Path, do: dict[int, Any] | None = None) -> None:
        self.folder, self.do = folder, do or {}
        self.weights: list[torch.Tensor] = []
        self.files: list[list[str]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in self.do:
            self.do[batch_idx](trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append(pl_module.weight.detach().clone())
        self.files.append(names(self.folder))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def fit(folder: Path, rollouts: int, *callbacks: Any, path: Any = None, **options: Any) -> RolloutCheckpoint:
    settings: dict[str, Any] = {"every_n_rollouts": 2, "dirpath": str(folder)}
    saver = RolloutCheckpoint(**(settings | options))
    make_trainer(False, [*callbacks, saver]).fit(StandIn(), datamodule=StandInData(rollouts), ckpt_path=path)
    return saver


def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def weight_in(path: Path) -> torch.Tensor:
    weight: torch.Tensor = torch.load(path, weights_only=True)["state_dict"]["weight"]
    return weight


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    disk = Slow(monkeypatch)
    # Rollouts 3 and 4 are trained on while the write after 2 hangs.
    seen = Seen(tmp_path, {3: lambda _: disk.go.set()})
    fit(tmp_path, 5, seen, keep_last=None)
    assert len(disk.written) == 3
    # Nothing bears the name of a checkpoint before it is whole.
    assert seen.files[2] == [".rollout-000002.ckpt.tmp"] or seen.files[2] == []
    # What was there when it was due, not what training has made of it since.
    for rollout in (2, 4, 5):
        assert torch.equal(weight_in(tmp_path / f"rollout-00000{rollout}.ckpt"), seen.weights[rollout - 1])
        assert check(tmp_path / f"rollout-00000{rollout}.ckpt")
    assert (tmp_path / "last.ckpt").resolve().name == "rollout-000005.ckpt"


def test_on_request_training_waits_for_the_disk(tmp_path):
    seen = Seen(tmp_path)
    fit(tmp_path, 5, seen, in_background=False, keep_last=None)
    assert seen.files[2] == ["last.ckpt", "rollout-000002.ckpt"]


def test_there_is_never_more_than_one_copy(tmp_path, monkeypatch):
    live, most = set[int](), [0]
    take, release = HostCopy.of, HostCopy.release

    def of(self: HostCopy, content: Any) -> Any:
        live.add(id(self))
        most.append(len(live))
        return take(self, content)

    def released(self: HostCopy) -> None:
        live.discard(id(self))
        release(self)

    monkeypatch.setattr(HostCopy, "of", of)
    monkeypatch.setattr(HostCopy, "release", released)
    disk = Slow(monkeypatch)
    # The second is due while the first hangs: its step waits.
    threading.Timer(0.5, disk.go.set).start()
    fit(tmp_path, 9, every_n_rollouts=1, keep_last=None)
    assert disk.begun == [f".rollout-00000{n}.ckpt.tmp" for n in range(1, 10)]
    assert max(most) == 1
    assert not live


def test_room_for_a_copy_is_made_once_ahead_of_the_first_checkpoint(tmp_path, monkeypatch):
    asked = list[list[tuple[int, ...]]]()
    monkeypatch.setattr(HostMemory, "reserve", lambda _, tensors: asked.append([tuple(t.shape) for t in tensors]))
    fit(tmp_path, 5, every_n_rollouts=2)
    # After the first step, without which an optimizer has no moments.
    assert len(asked) == 1
    assert asked[0].count((2,)) == 3, "the weight and its two moments"
    fit(tmp_path / "waits", 3, in_background=False)
    assert len(asked) == 1


@pytest.mark.parametrize("ended", [False, True], ids=["under way", "ended"])
def test_what_a_rollback_returns_to_shares_the_copy_of_the_same_moment(tmp_path, monkeypatch, ended):
    copied = 0
    copy, start = HostCopy._copy_of_plain, CheckpointWriter._start

    def count(self: HostCopy, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal copied
        copied += tensor.numel() == 2
        return copy(self, tensor)

    def then(self: CheckpointWriter, *job: Any) -> None:
        start(self, *job)
        # The first of the ring is of the untouched run; the next is of the moment that the run's own is to share.
        if ended or not disk.written:
            thread = self._thread
            until(lambda: thread is None or not thread.is_alive())
            if not ended:
                disk.go.clear()

    monkeypatch.setattr(HostCopy, "_copy_of_plain", count)
    monkeypatch.setattr(CheckpointWriter, "_start", then)
    disk = Slow(monkeypatch, blocked=2)
    disk.go.set()
    monitor = HealthMonitor(monitors=[], actions={"critical": "rollback"}, checkpoint_every=2, checkpoints=8)
    seen = Seen(tmp_path / "own", {2: lambda _: disk.go.set()})
    saver = RolloutCheckpoint(every_n_rollouts=2, dirpath=str(tmp_path / "own"))
    trainer = make_trainer(False, [monitor, seen, saver], default_root_dir=str(tmp_path / "run"))
    trainer.fit(StandIn(), datamodule=StandInData(3))
    assert len(disk.written) == 4, "0 and 2 to go back to, and 2 and 3 of the run itself"
    # The weight and its two moments once for the ring and the run's own after rollout 2, the weight alone after 0.
    assert copied == 1 + 3
    assert torch.equal(weight_in(tmp_path / "own" / "rollout-000002.ckpt"), seen.weights[1])


def test_a_write_that_fails_is_told_and_taken_back(tmp_path, monkeypatch):
    disk = Slow(monkeypatch, error=OSError(errno.EIO, "Input/output error"))
    seen = Seen(tmp_path, {3: lambda _: disk.go.set()})
    with pytest.warns(UserWarning, match="Rollout 2 could not be saved .Input/output error.; training goes on"):
        saver = fit(tmp_path, 5, seen, keep_last=None)
    assert names(tmp_path) == ["last.ckpt", "rollout-000004.ckpt", "rollout-000005.ckpt"]
    # The next ones know nothing of it.
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    (own,) = (value for value in state.values() if "saved_rollout" in value)
    assert own["saved"] == ["rollout-000004.ckpt", "rollout-000005.ckpt"]
    assert saver.saved_rollout == 5


def test_it_is_told_of_a_failure_between_two_rollouts(tmp_path, monkeypatch):
    disk = Slow(monkeypatch, error=OSError(errno.EIO, "Input/output error"))
    disk.go.set()

    def dead(trainer: Any) -> None:
        until(lambda: not any(thread.name == "checkpoint" for thread in threading.enumerate()))

    told: list[Any] = []
    monkeypatch.setattr(RolloutCheckpoint, "_note_unsaved", lambda self, rollout, error: told.append(rollout))
    # Long before the next one is due.
    fit(tmp_path, 5, Seen(tmp_path, {2: dead, 3: lambda _: told.append("before rollout 3")}), every_n_rollouts=2)
    assert told == [2, "before rollout 3"]


def test_another_error_of_the_writer_ends_the_run(tmp_path, monkeypatch):
    disk = Slow(monkeypatch, error=AttributeError("a writer's bug"))
    disk.go.set()
    with pytest.raises(AttributeError, match="a writer's bug"):
        fit(tmp_path, 9)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), StopRun("collapse")])
def test_a_run_that_breaks_off_waits_for_what_is_being_written(tmp_path, monkeypatch, error):
    disk = Slow(monkeypatch)

    def breaks(trainer: Any) -> None:
        threading.Timer(0.3, disk.go.set).start()
        raise error

    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((type(error), SystemExit)):
            fit(tmp_path, 9, Seen(tmp_path, {3: breaks}))
    finally:
        signal.signal(signal.SIGINT, interrupt)
    # Inside of a rollout nothing more is saved.
    assert names(tmp_path) == ["last.ckpt", "rollout-000002.ckpt"]
    assert check(tmp_path / "last.ckpt")


def test_a_stop_is_in_place_when_the_run_returns(tmp_path, monkeypatch):
    disk = Slow(monkeypatch)

    def stop(trainer: Any) -> None:
        threading.Timer(0.3, disk.go.set).start()
        request_stop(trainer, "enough", "test")

    fit(tmp_path, 9, Seen(tmp_path, {2: stop}))
    assert names(tmp_path) == ["last.ckpt", "rollout-000002.ckpt", "rollout-000003.ckpt"]


def test_no_memory_for_a_copy_writes_from_the_run_itself(tmp_path, monkeypatch, caplog):
    def none(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")

    monkeypatch.setattr(HostCopy, "_copy_of_plain", none)
    seen = Seen(tmp_path)
    fit(tmp_path, 5, seen, keep_last=None)
    assert seen.files[2] == ["last.ckpt", "rollout-000002.ckpt"]
    assert "no memory for a copy of the run" in caplog.text


def killed(folder: Path) -> None:
    """Die while the second checkpoint is half-written, two rollouts after it was due."""
    save, calls = Strategy.save_checkpoint, 0

    def half(strategy: Any, content: Any, path: Path, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            path.write_bytes(b"half")
            threading.Event().wait(60)
        save(strategy, content, path, *args, **kwargs)

    Strategy.save_checkpoint = half  # type: ignore[method-assign,assignment]

    def die(_: Any) -> None:
        until((folder / ".rollout-000004.ckpt.tmp").exists)
        os.kill(os.getpid(), signal.SIGKILL)

    fit(folder, 9, Seen(folder, {5: die}), keep_last=1)


def test_killed_while_writing_the_checkpoint_before_it_holds(tmp_path):
    assert run_in_process(killed, tmp_path / "a") == -signal.SIGKILL
    assert names(tmp_path / "a") == [".rollout-000004.ckpt.tmp", "last.ckpt", "rollout-000002.ckpt"]
    fit(tmp_path / "a", 9, path=str(tmp_path / "a" / "last.ckpt"), keep_last=1)
    fit(tmp_path / "b", 9, keep_last=1)
    assert names(tmp_path / "a") == names(tmp_path / "b") == ["last.ckpt", "rollout-000009.ckpt"]
    assert torch.equal(weight_in(tmp_path / "a" / "last.ckpt"), weight_in(tmp_path / "b" / "last.ckpt"))


def test_a_copy_holds_every_tensor_once_and_nothing_of_the_original():
    weight = torch.randn(3, 4)
    other = [1, {"a": [2]}]
    state = OrderedDict(one=weight, tied=weight, part=weight[1:], column=weight.t())
    copied = HostCopy(HostMemory()).of({"state_dict": state, "other": other, "none": None, "pair": (weight, 1.5)})
    weight.zero_()
    other[1]["a"].append(3)  # type: ignore[index]
    found = copied["state_dict"]
    assert isinstance(found, OrderedDict)
    assert found["one"] is found["tied"] is copied["pair"][0]
    assert torch.equal(found["part"], found["one"][1:])
    assert torch.equal(found["column"], found["one"].t())
    assert found["one"].abs().sum() > 0
    assert copied["other"] == [1, {"a": [2]}]
    assert copied["pair"][1] == 1.5


def test_checkpoints_of_one_moment_share_their_tensors():
    weight = torch.randn(3)
    host = HostCopy(HostMemory())
    first, second = host.of({"w": weight, "n": 1}), host.of({"w": weight, "n": 2})
    assert first["w"] is second["w"]
    assert (first["n"], second["n"]) == (1, 2)
