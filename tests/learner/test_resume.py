"""A run that is killed and resumed equals the run that never stopped, to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.callbacks import RolloutCheckpoint
from tests import tiny
from tests.paths import ROOT

SCRIPT = """
    import json, os, signal, sys
    import lightning.pytorch as pl, torch
    from lit_grpo.callbacks import RolloutCheckpoint
    from lit_grpo.objectives import ObjectiveConfig
    from lit_grpo.policy import CriticConfig, OptimizerConfig
    from tests import tiny

    folder, kill_after, resume = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "resume"
    torch.set_num_threads(1)
    pl.seed_everything(3)

    class Log(tiny.Recorder):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            super().on_train_batch_end(trainer, module, outputs, batch, index)
            line = {"rollout": batch.index, "metrics": self.metrics[-1], "ids": self.ids[-1],
                    "prompts": self.prompts[-1], "weights": tiny.weights(module).double().sum().item(),
                    "draw": torch.rand(1).item()}
            with open(f"{folder}/log.jsonl", "a") as file:
                file.write(json.dumps(line) + "\\n")
                file.flush()

    class Kill(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if batch.index == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

    module = tiny.module(updates_per_rollout=2, minibatch_prompts=2,
                         objective=ObjectiveConfig(recipe="ppo", kl_coef=0.1),
                         critic=CriticConfig(trunk="shared", warmup_rollouts=3),
                         optimizer=OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=3))
    checkpoint = RolloutCheckpoint(every_n_rollouts=2, dirpath=f"{folder}/checkpoints")
    trainer = tiny.trainer(callbacks=[Log(), Kill(), checkpoint], enable_checkpointing=True)
    last = f"{folder}/checkpoints/last.ckpt" if resume else None
    trainer.fit(module, datamodule=tiny.data(rollouts=7), ckpt_path=last)
    states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    torch.save({"weights": module.state_dict(), "optimizers": states}, f"{folder}/end.pt")
"""


def run(folder: Path, kill_after: int = -1, resume: bool = False) -> int:
    folder.mkdir(exist_ok=True)
    script = folder / "run.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder), str(kill_after), "resume" if resume else "start"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder, timeout=300)
    if done.returncode not in (0, -signal.SIGKILL):
        raise AssertionError(done.stderr[-3000:])
    return done.returncode


def lines(folder: Path) -> dict[int, Any]:
    """The last line written for each rollout."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {record["rollout"]: record for record in records}


@pytest.mark.parametrize("kill_after", [5])
def test_killed_and_resumed_equals_unbroken_to_the_bit(tmp_path, kill_after):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert run(straight) == 0
    assert run(broken, kill_after) == -signal.SIGKILL
    assert sorted(lines(broken)) == list(range(kill_after))
    assert run(broken, resume=True) == 0
    assert lines(broken) == lines(straight)  # metrics, tokens, prompts, weights and the global generator
    a, b = (torch.load(folder / "end.pt") for folder in (straight, broken))
    assert "policy.value_head.weight" in a["weights"]
    same(a["weights"], b["weights"])
    assert len(a["optimizers"]) == 2, "of the policy and of its value head"
    for one, other in zip(a["optimizers"], b["optimizers"], strict=True):
        assert one.keys() == other.keys() != set()
        for key, state in one.items():
            same(state, other[key])


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_the_first_rollout_after_resume_is_not_sampled_from_the_base_weights(tmp_path):
    def run(rollouts: int, path: Any = None) -> Any:
        recorder, checkpoint = tiny.Recorder(), RolloutCheckpoint(dirpath=str(tmp_path))
        trainer = tiny.trainer(callbacks=[recorder, checkpoint], enable_checkpointing=True)
        trainer.fit(tiny.module(), datamodule=tiny.data(rollouts=rollouts), ckpt_path=path)
        return recorder

    run(2)
    recorder = run(3, tmp_path / "last.ckpt")
    assert recorder.versions == [(2, 2)]
    assert recorder.metrics[0]["mismatch/logprob_max"] < 1e-5


def test_checkpoint_holds_only_plain_types(tmp_path):
    module = tiny.module()
    trainer = tiny.trainer()
    trainer.fit(module, datamodule=tiny.data(rollouts=1))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)
    assert state["lit_grpo"]["policy_version"] == 1
    rebuilt = type(module)(**state["hyper_parameters"])
    assert rebuilt.policy_config == module.policy_config
    assert rebuilt.objective_config == module.objective_config
    assert rebuilt.optimizer_config == module.optimizer_config
