"""The Trainer counts the processes that a launcher has started, or the run does not begin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lit_grpo.distributed.launcher import check_launcher, launcher_in
from lit_grpo.distributed.strategy import FSDP2Strategy
from lit_grpo.errors import UserError
from tests import tiny
from tests.paths import ROOT

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0"}


def torchrun(processes: int, on_machine: int | None = None) -> dict[str, str]:
    return TORCHRUN | {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(on_machine or processes)}


def srun(processes: int, on_machine: str) -> dict[str, str]:
    return {"SLURM_STEP_NUM_TASKS": str(processes), "SLURM_STEP_TASKS_PER_NODE": on_machine, "SLURM_PROCID": "0"}


def trainer(**settings: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", enable_checkpointing=False, **quiet, **settings)


@pytest.mark.parametrize(
    ("environment", "settings", "says"),
    [
        (torchrun(2), {}, ["torchrun has started 2 processes", "counts 1 on 1 machine", "trainer.devices to 2 and"]),
        (torchrun(2), {"devices": 1, "strategy": "ddp"}, ["torchrun has started 2", "trainer.devices to 2 and"]),
        (torchrun(2), {"devices": 4, "strategy": FSDP2Strategy()}, ["torchrun has started 2", "counts 4 on 1 machine"]),
        (
            torchrun(16, 8),
            {"devices": 8, "strategy": "ddp"},
            ["started 16 processes", "counts 8 on 1 machine", "trainer.devices to 8, trainer.num_nodes to 2"],
        ),
        (srun(16, "8(x2)"), {}, ["srun has started 16", "trainer.devices to 8, trainer.num_nodes to 2"]),
        (srun(2, "2"), {}, ["srun has started 2 processes", "trainer.devices to 2 and"]),
        # One torchrun on each machine, begun by srun.
        (srun(2, "1(x2)") | torchrun(16, 8), {"devices": 8, "strategy": "ddp"}, ["torchrun has started 16"]),
    ],
)
def test_more_or_fewer_than_the_trainer_counts(
    environment: dict[str, str], settings: dict[str, Any], says: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        check_launcher(trainer(**settings), environment)
    screen = f"{caught.value.what} {caught.value.where} {caught.value.remedy}"
    assert caught.value.where == "trainer.devices"
    for words in says:
        assert words in screen


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, {}),
        ({}, {"devices": 2, "strategy": "ddp"}),
        (torchrun(1), {}),
        (torchrun(2), {"devices": 2, "strategy": "ddp"}),
        (torchrun(16, 8), {"devices": 8, "num_nodes": 2, "strategy": "ddp"}),
        (srun(16, "8(x2)"), {"devices": 8, "num_nodes": 2, "strategy": "ddp"}),
        (srun(2, "1(x2)") | torchrun(16, 8), {"devices": 8, "num_nodes": 2, "strategy": "ddp"}),
        # A batch script of a job of 16 tasks, in which one process is begun without srun.
        ({"SLURM_NTASKS": "16", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, {}),
        # Lightning's own launcher, which leaves some of torchrun's variables in its children.
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}, {"devices": 2, "strategy": "ddp"}),
        ({"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1"}, {"devices": 2, "num_nodes": 2, "strategy": "ddp"}),
    ],
)
def test_as_many_as_it_counts(environment: dict[str, str], settings: dict[str, Any]) -> None:
    check_launcher(trainer(**settings), environment)


def test_a_rank_that_is_left_in_the_environment() -> None:
    """Nothing would be written: Lightning's functions for rank 0 alone go by it."""
    with pytest.raises(UserError, match="RANK is 1: this process is one of several") as caught:
        check_launcher(trainer(), {"RANK": "1"})
    assert caught.value.where == "environment variable RANK"


def test_other_machines_must_be_found() -> None:
    """Without an address each would wait for others on its own."""
    with pytest.raises(UserError, match="2 machines, and nothing says where the first one is") as caught:
        check_launcher(trainer(devices=1, num_nodes=2, strategy="ddp"), {})
    assert caught.value.where == "trainer.num_nodes"


def test_who_is_waited_for_is_said(caplog: pytest.LogCaptureFixture) -> None:
    where = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}
    with caplog.at_level("INFO"):
        check_launcher(trainer(devices=1, num_nodes=2, strategy="ddp"), where)
    assert "waiting for the other machines of 2 at 10.0.0.1:29500" in caplog.text


def test_a_module_in_a_program_of_ones_own_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in torchrun(2).items():
        monkeypatch.setenv(name, value)
    module = tiny.module()
    with pytest.raises(UserError, match="torchrun has started 2 processes"):
        trainer().fit(module, datamodule=tiny.data())
    assert module.policy is None


def test_no_launcher() -> None:
    assert launcher_in({}) is None
    assert launcher_in({"WORLD_SIZE": "2"}) is None
    assert launcher_in(torchrun(1)) is None


def test_the_command_says_so_on_one_screen_before_a_model_is_loaded(tmp_path: Path) -> None:
    """Once, from the first process, with the exit code of bad input on each."""
    run = [sys.executable, "-m", "lit_grpo", "fit", "--config", str(ROOT / "configs" / "quickstart.yaml")]
    screens = []
    for rank in ("0", "1"):
        environment = os.environ | torchrun(2) | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
        done = subprocess.run(
            run, env=environment | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 2, done.stderr
        screens.append(done.stderr)
    assert "torchrun has started 2 processes, and the Trainer counts 1 on 1 machine" in screens[0]
    assert "trainer.devices" in screens[0]
    assert "Traceback" not in screens[0] + screens[1]
    assert "torchrun has started" not in screens[1]
    assert not list(tmp_path.iterdir()), "nothing is written"
