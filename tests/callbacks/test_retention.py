"""Which checkpoints are kept, what is left when a run is killed, and what a full disk does."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import Strategy

from lit_grpo.callbacks import HealthMonitor, RolloutCheckpoint
from lit_grpo.callbacks.checkpoint_files import remove_half_written
from lit_grpo.callbacks.checkpoint_writer import CheckpointWriter
from lit_grpo.data import AdditionPrompts
from lit_grpo.errors import UserError
from lit_grpo.utils.integrity import DamagedError, check, seal
from tests import tiny

ROLLOUTS = 9


class Values(pl.Callback):
    """Puts made-up values into the evaluation, one after the other."""

    def __init__(self, values: list[float]) -> None:
        self.values = list(values)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        trainer._logger_connector._callback_metrics["val/reward"] = torch.tensor(self.values.pop(0))


def fit(
    folder: Path, *callbacks: Any, rollouts: int = ROLLOUTS, path: Any = None, values: Any = None, **changes: Any
) -> RolloutCheckpoint:
    own = RolloutCheckpoint(**{"every_n_rollouts": 2, "dirpath": str(folder / "checkpoints"), **changes})
    given: dict[str, Any] = {"val_prompts": AdditionPrompts(digits=1, n=2)} if values is not None else {}
    first = [Values(values)] if values is not None else []
    trainer = tiny.trainer(
        callbacks=[*first, *callbacks, own], enable_checkpointing=True, default_root_dir=str(folder),
        **({"val_check_interval": 1, "check_val_every_n_epoch": None} if values is not None else {}),
    )  # fmt: skip
    trainer.fit(tiny.module(), datamodule=tiny.data(rollouts=rollouts, **given), ckpt_path=path)
    return own


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    own = fit(tmp_path, values=[0.1, 0.2, 0.9, 0.3, 0.8, 0.7, 0.1, 0.1, 0.2])
    assert names(tmp_path) == ["best.ckpt", "last.ckpt", *(f"rollout-00000{n}.ckpt" for n in (3, 8, 9))]
    assert (tmp_path / "checkpoints" / "best.ckpt").resolve().name == "rollout-000003.ckpt", "saved for its value alone"
    assert own.best_model_path.endswith("rollout-000003.ckpt")


def test_the_best_may_be_the_smallest_or_none(tmp_path):
    values = [0.5, 0.4, 0.6, 0.1, 0.8, 0.7, 0.2, 0.9, float("nan")]
    fit(tmp_path / "a", values=values, mode="min")
    assert (tmp_path / "a" / "checkpoints" / "best.ckpt").resolve().name == "rollout-000004.ckpt"
    fit(tmp_path / "b", values=values, keep_best=0)
    assert names(tmp_path / "b") == ["last.ckpt", "rollout-000008.ckpt", "rollout-000009.ckpt"]


def test_a_resumed_run_knows_the_best_so_far(tmp_path):
    fit(tmp_path, values=[0.1, 0.9, 0.3, 0.2], rollouts=4)
    fit(tmp_path, values=[0.5, 0.8, 0.7, 0.6, 0.4], path=tmp_path / "checkpoints" / "last.ckpt")
    assert (tmp_path / "checkpoints" / "best.ckpt").resolve().name == "rollout-000002.ckpt"
    assert names(tmp_path) == ["best.ckpt", "last.ckpt", *(f"rollout-00000{n}.ckpt" for n in (2, 8, 9))]


def test_bytes_are_said_at_the_start_and_are_about_right(tmp_path, caplog):
    caplog.set_level("INFO")
    own = fit(tmp_path, rollouts=3, values=[0.1, 0.2, 0.3])
    (said,) = [r.getMessage() for r in caplog.records if "checkpoints take about" in r.getMessage()]
    assert "the newest 2 and the best 1 by val/reward are kept, at most" in said
    caplog.clear()
    fit(tmp_path / "unvalidated", rollouts=3)
    assert "; the newest 2 are kept, at most" in caplog.text
    assert "free" in said
    number, unit = said.split("about ")[1].split()[:2]
    assert own.last_path is not None
    real = own.last_path.stat().st_size
    assert 0.5 < float(number) * {"kB": 1e3, "MB": 1e6}[unit] / real < 1.5


def test_what_a_killed_run_left_half_written_goes_at_the_next_start(tmp_path):
    fit(tmp_path, rollouts=2)
    folder = tmp_path / "checkpoints"
    (folder / ".rollout-000004.ckpt.tmp").write_bytes(b"half")
    (folder / ".last.ckpt.tmp").symlink_to("nowhere")
    (folder / ".rollout-000003.ckpt.tmp").mkdir()
    (folder / ".rollout-000003.ckpt.tmp" / "shard").write_bytes(b"half")
    (folder / "mine.txt").write_text("stays")
    fit(tmp_path, rollouts=3, path=folder / "last.ckpt")
    assert not list(folder.glob(".*"))
    assert (folder / "mine.txt").exists()


def test_a_folder_that_stood_aside_goes_back_where_nothing_took_its_place(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f".{name}.ckpt.old").mkdir()
        (tmp_path / f".{name}.ckpt.old" / "old").touch()
    (tmp_path / "b.ckpt").mkdir()
    assert remove_half_written(tmp_path) == [".b.ckpt.old"]
    assert [path.name for path in tmp_path.rglob("*")] == ["a.ckpt", "b.ckpt", "old"] or (
        tmp_path / "a.ckpt/old"
    ).exists()
    assert not list(tmp_path.glob(".*"))


class Full:
    """A disk that holds a number of checkpoints."""

    def __init__(self, monkeypatch: Any, root: Path, room: int) -> None:
        self.root, self.room, self.refused = root, room, 0
        save = Strategy.save_checkpoint

        def on_full_disk(strategy: Any, checkpoint: Any, path: Any, *args: Any, **kwargs: Any) -> None:
            if len(list(root.rglob("rollout-*.ckpt"))) >= self.room:
                self.refused += 1
                Path(path).write_bytes(b"half")
                raise OSError(errno.ENOSPC, "No space left on device")
            save(strategy, checkpoint, path, *args, **kwargs)

        monkeypatch.setattr(Strategy, "save_checkpoint", on_full_disk)
        monkeypatch.setattr("lit_grpo.callbacks.rollout_checkpoint.free_bytes", lambda folder: 0)


def test_a_full_disk_pauses_saving_and_training_goes_on(tmp_path, monkeypatch):
    disk = Full(monkeypatch, tmp_path, 1)

    class Clean(pl.Callback):
        """Makes room before the last rollout, as a person would."""

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 8:
                disk.room = 9

    with pytest.warns(UserWarning, match="could not be saved .No space left on device.; training goes on"):
        fit(tmp_path, Clean())
    assert disk.refused == 3
    assert names(tmp_path) == ["last.ckpt", "rollout-000002.ckpt", "rollout-000009.ckpt"]
    assert not list((tmp_path / "checkpoints").glob(".*")), "no partial file"
    assert all(check(path) for path in (tmp_path / "checkpoints").glob("rollout-*.ckpt"))


def test_a_run_that_cannot_save_its_end_says_so_and_where_to_go_on(tmp_path, monkeypatch):
    Full(monkeypatch, tmp_path, 1)
    with (
        pytest.warns(UserWarning, match="training goes on"),
        pytest.raises(UserError, match=r"last state could not be saved(.|\n)*go on from .*rollout-000002.ckpt"),
    ):
        fit(tmp_path)
    # What is named is whole.
    monkeypatch.undo()
    fit(tmp_path, path=tmp_path / "checkpoints" / "rollout-000002.ckpt")


def test_places_to_roll_back_to_make_room_first_and_the_last_good_one_never(tmp_path, monkeypatch, caplog):
    ring = HealthMonitor(monitors=[], actions={"critical": "rollback"}, checkpoint_every=1, checkpoints=8)
    own = tmp_path / "checkpoints"
    seen: list[list[str]] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            CheckpointWriter.finish_of(trainer)
            seen.append(sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("rollout-*.ckpt")))

    Full(monkeypatch, tmp_path, 4)
    with pytest.warns(UserWarning, match="could not be saved to roll back to"):
        fit(tmp_path, ring, Look())
    assert (own / "last.ckpt").resolve().name == "rollout-000009.ckpt"
    assert any("make room" in record.getMessage() for record in caplog.records)
    # At every moment after the first save one whole checkpoint of the run was there.
    assert all(any(name.startswith("checkpoints") for name in names) for names in seen[2:])


def test_a_folder_that_cannot_be_written_is_told_before_the_first_rollout(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match="no checkpoint can be written into"):
        fit(tmp_path)


def test_a_damaged_place_to_return_to_is_passed_over(tmp_path):
    from tests.callbacks.test_rollback import Kick, health
    from tests.callbacks.test_rollback import fit as fit_kicked

    class Damage(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            CheckpointWriter.finish_of(trainer)
            path = tmp_path / "rollback" / "rollout-000004.ckpt"
            if batch_idx == 5 and path.exists():
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(content)

    watcher = health()
    fit_kicked(tmp_path, Damage(), Kick(5, "learning rate"), watcher)
    assert watcher.targets == [2]


@pytest.mark.parametrize("number", range(0, 900, 37))
def test_a_flipped_bit_anywhere_is_found(tmp_path, number):
    path = tmp_path / "a.ckpt"
    torch.save({"a": torch.arange(20.0), "b": [1, {"c": torch.zeros(3)}]}, path)
    seal(path)
    assert check(path)
    assert torch.load(path, weights_only=True)["b"][0] == 1
    content = bytearray(path.read_bytes())
    content[len(content) * number // 900] ^= 1 << number % 8
    path.write_bytes(content)
    with pytest.raises(DamagedError):
        check(path)
