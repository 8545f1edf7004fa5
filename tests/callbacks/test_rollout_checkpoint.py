"""Checkpoints: which are written, when, whole, and what a run resumed from them does."""

import errno
import shutil
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import Strategy

from lit_grpo.callbacks import RolloutCheckpoint, request_stop
from lit_grpo.errors import StopRun, UserError
from tests.tracking.stand_in import StandIn, StandInData, StandInLoader, make_trainer


class At(pl.Callback):
    """Does something in one hook of one batch."""

    def __init__(self, batch, hook, do):
        self.batch, self.do = batch, do
        setattr(self, hook, self._hook)

    def _hook(self, trainer, pl_module, *args):
        if args[-1] == self.batch:
            self.do(trainer)


def fit(folder, rollouts, *callbacks, module=None, loader=None, ckpt_path=None, **options):
    checkpoint = RolloutCheckpoint(**{"every_n_rollouts": 2, "keep_last": 2, "dirpath": str(folder), **options})
    module = module or StandIn()
    trainer = make_trainer(False, [*callbacks, checkpoint])
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        trainer.fit(module, datamodule=StandInData(rollouts, loader), ckpt_path=ckpt_path)
    finally:
        signal.signal(signal.SIGINT, interrupt)  # Lightning leaves Ctrl-C ignored after an interrupt
    return module, checkpoint


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def load(path):
    return torch.load(path, weights_only=True)


def raises(error):
    def do(trainer):
        raise error

    return do


def test_every_second_rollout_the_last_two_and_the_end(tmp_path):
    _, checkpoint = fit(tmp_path, 7)
    assert names(tmp_path) == ["last.ckpt", "rollout-000006.ckpt", "rollout-000007.ckpt"]
    assert (tmp_path / "last.ckpt").is_symlink()
    assert (tmp_path / "last.ckpt").resolve().name == "rollout-000007.ckpt"
    assert str((tmp_path / "last.ckpt").readlink()) == "rollout-000007.ckpt"  # relative: the folder can be moved
    assert checkpoint.last_path == tmp_path / "rollout-000007.ckpt"
    assert load(tmp_path / "last.ckpt")["hyper_parameters"]["policy"] == {"path": "somewhere"}


def test_keep_all(tmp_path):
    fit(tmp_path, 5, keep_last=None)
    assert names(tmp_path) == ["last.ckpt", *(f"rollout-00000{n}.ckpt" for n in (2, 4, 5))]


def test_a_resumed_run_equals_the_unbroken_one(tmp_path):
    whole, _ = fit(tmp_path / "a", 9)

    class Killed(BaseException):
        pass

    with pytest.raises(Killed):
        fit(tmp_path / "b", 9, At(5, "on_train_batch_start", raises(Killed())))
    steps = []
    module, _ = fit(
        tmp_path / "b",
        9,
        At(8, "on_train_batch_end", lambda trainer: steps.append(trainer.fit_loop.epoch_loop.batch_idx)),
        ckpt_path=str(tmp_path / "b" / "last.ckpt"),
    )
    assert torch.equal(module.weight, whole.weight)
    assert steps == [8]
    assert names(tmp_path / "a") == names(tmp_path / "b")


def test_a_finished_run_can_be_made_longer(tmp_path):
    whole, _ = fit(tmp_path / "a", 6)
    fit(tmp_path / "b", 4)
    longer, _ = fit(tmp_path / "b", 6, ckpt_path=str(tmp_path / "b" / "last.ckpt"))
    assert torch.equal(longer.weight, whole.weight)
    same, _ = fit(tmp_path / "b", 6, ckpt_path=str(tmp_path / "b" / "last.ckpt"))
    assert same.policy_version == 0, "a run that is as long as it should be has nothing left to do"
    assert (tmp_path / "b" / "rollout-000006.ckpt").exists()


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_batch_start"])
def test_a_stopped_run_is_saved_and_goes_on(tmp_path, hook, monkeypatch):
    """Also where the stop comes after the checkpoint's own hook, as from a module."""
    whole, _ = fit(tmp_path / "a", 6)
    module = StandIn()
    if hook == "on_train_batch_start":

        def stops(outputs, batch, batch_idx):
            if batch_idx == 2:
                request_stop(module.trainer, "enough", "test")

        monkeypatch.setattr(module, "on_train_batch_end", stops)
        fit(tmp_path / "b", 6, module=module)
    else:
        fit(tmp_path / "b", 6, At(2, hook, lambda trainer: request_stop(trainer, "enough", "test")))
    assert names(tmp_path / "b") == ["last.ckpt", "rollout-000002.ckpt", "rollout-000003.ckpt"]
    resumed, _ = fit(tmp_path / "b", 6, ckpt_path=str(tmp_path / "b" / "last.ckpt"))
    assert torch.equal(resumed.weight, whole.weight)


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), StopRun("collapse")])
def test_broken_between_rollouts_is_saved(tmp_path, error, monkeypatch):
    """In a monitor, before the checkpoint's turn, and while the next rollout is made."""
    whole, _ = fit(tmp_path / "whole", 4)
    with pytest.raises((type(error), SystemExit)):
        fit(tmp_path / "a", 4, At(0, "on_train_batch_end", raises(error)))
    assert names(tmp_path / "a") == ["last.ckpt", "rollout-000001.ckpt"]

    loader = StandInLoader(4)
    monkeypatch.setattr(loader, "before_yield", lambda index: raises(error)(None) if index == 1 else None)
    with pytest.raises((type(error), SystemExit)):
        fit(tmp_path / "b", 4, loader=loader)
    assert names(tmp_path / "b") == ["last.ckpt", "rollout-000001.ckpt"]
    for folder in ("a", "b"):
        resumed, _ = fit(tmp_path / folder, 4, ckpt_path=str(tmp_path / folder / "last.ckpt"))
        assert torch.equal(resumed.weight, whole.weight)


class Stateless:
    """A loader that does not say where it is."""

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(StandInLoader(6))


@pytest.mark.parametrize("make_loader", [lambda: StandInLoader(6), Stateless], ids=["stateful", "stateless"])
@pytest.mark.parametrize("where", ["inside the rollout", "before it"])
def test_broken_off_with_a_rollout_taken_is_not_saved(tmp_path, monkeypatch, make_loader, where):
    """The weights have changed already, or the loader has moved on past a rollout that is not trained on."""
    module, boom = StandIn(), raises(RuntimeError("boom"))
    monkeypatch.setattr(module, "during_step", lambda batch_idx: boom(None) if batch_idx == 3 else None)
    before = [At(3, "on_train_batch_start", boom)] if where == "before it" else []
    with pytest.raises(RuntimeError, match="boom"):
        fit(tmp_path, 6, *before, module=module, loader=make_loader())
    assert names(tmp_path) == ["last.ckpt", "rollout-000002.ckpt"]


def test_broken_after_the_loader_moved_on_is_not_saved(tmp_path):
    class Early(StandInLoader):
        def before_yield(self, index):
            if index == 3:
                self.next += 1
                raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fit(tmp_path, 6, loader=Early(6))
    assert names(tmp_path) == ["last.ckpt", "rollout-000002.ckpt"]


def test_a_save_that_fails_leaves_the_old_checkpoint_and_no_half_one(tmp_path, monkeypatch):
    fit(tmp_path, 2)
    before = load(tmp_path / "last.ckpt")["global_step"]

    def dies(self, checkpoint, path, **kwargs):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Strategy, "save_checkpoint", dies)
    with pytest.raises(UserError, match=r"last state could not be saved: No space(.|\n)*go on from .*rollout-000002"):
        fit(tmp_path, 4, ckpt_path=str(tmp_path / "last.ckpt"))
    assert not list(tmp_path.glob(".*"))
    assert [name for name in names(tmp_path) if name.endswith(".ckpt")] == ["last.ckpt", "rollout-000002.ckpt"]
    assert load(tmp_path / "last.ckpt")["global_step"] == before
    monkeypatch.undo()
    fit(tmp_path, 4, ckpt_path=str(tmp_path / "last.ckpt"))
    assert names(tmp_path) == ["last.ckpt", "rollout-000002.ckpt", "rollout-000004.ckpt"]


def test_a_folder_checkpoint_is_put_in_place_and_replaced(tmp_path, monkeypatch):
    """As sharded strategies write it."""
    written: list[Path] = []

    def as_folder(self, checkpoint, path, **kwargs):
        path.mkdir()
        (path / "shard").write_text(str(len(written)))
        written.append(path)

    monkeypatch.setattr(Strategy, "save_checkpoint", as_folder)
    # As of a run that goes on from an earlier checkpoint of its own, which this stand-in for one cannot be read as.
    monkeypatch.setattr(RolloutCheckpoint, "_refuse_another_runs", lambda *_: None)
    fit(tmp_path, 2)
    fit(tmp_path, 2)  # an earlier life of this run left a folder of that name
    assert names(tmp_path) == ["last.ckpt", "rollout-000002.ckpt"]
    assert (tmp_path / "last.ckpt" / "shard").read_text() == "1"
    fit(tmp_path, 9)
    assert names(tmp_path) == ["last.ckpt", "rollout-000008.ckpt", "rollout-000009.ckpt"]


def test_without_symbolic_links_last_is_a_hard_link(tmp_path, monkeypatch):
    def no_links(self, target):
        raise OSError("not on this file system")

    monkeypatch.setattr("pathlib.Path.symlink_to", no_links)
    fit(tmp_path, 3)
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert (tmp_path / "last.ckpt").samefile(tmp_path / "rollout-000003.ckpt")


def test_a_copied_folder_still_resumes(tmp_path):
    fit(tmp_path / "a", 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b", symlinks=True)
    shutil.rmtree(tmp_path / "a")
    module, _ = fit(tmp_path / "b", 3, ckpt_path=str(tmp_path / "b" / "last.ckpt"))
    assert module.trainer.global_step == 3


def test_bad_arguments():
    with pytest.raises(UserError, match="every_n_rollouts is 0"):
        RolloutCheckpoint(every_n_rollouts=0)
    with pytest.raises(UserError, match="keep_last is 0"):
        RolloutCheckpoint(keep_last=0)
