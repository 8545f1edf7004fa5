"""A run that is killed and resumed equals the run that never stopped, to the last bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, OptimizerConfig
from tests import tiny
from tests.ranks import run_in_process


class Log(tiny.Recorder):
    """Appends what each rollout did to a file, so that it outlives the process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        line = {
            "rollout": batch.index,
            "metrics": self.metrics[-1],
            "ids": self.ids[-1],
            "prompts": self.prompts[-1],
            "weights": tiny.weights(pl_module).double().sum().item(),
            "draw": torch.rand(1).item(),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class Kill(pl.Callback):
    def __init__(self, before_rollout: int) -> None:
        self.before_rollout = before_rollout

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.index == self.before_rollout:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, kill_after: int, resume: bool) -> None:
    pl.seed_everything(3)
    module = tiny.module(
        updates_per_rollout=2,
        minibatch_prompts=2,
        objective=ObjectiveConfig(recipe="ppo", kl_coef=0.1),
        critic=CriticConfig(backbone="shared", warmup_rollouts=3),
        optimizer=OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=3),
    )
    checkpoint = RolloutCheckpoint(every_n_rollouts=2, dirpath=str(folder / "checkpoints"))
    callbacks = [Log(folder / "log.jsonl"), Kill(kill_after), checkpoint]
    trainer = tiny.trainer(callbacks=callbacks, enable_checkpointing=True)
    last = folder / "checkpoints" / "last.ckpt" if resume else None
    trainer.fit(module, datamodule=tiny.data(rollouts=7), ckpt_path=last)
    states = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
    torch.save({"weights": module.state_dict(), "optimizers": states}, folder / "end.pt")


def run(folder: Path, kill_after: int = -1, resume: bool = False) -> int:
    """Train in a process of its own; its exit code."""
    folder.mkdir(exist_ok=True)
    # Forks of one server hash strings alike. A new interpreter does not: a resumed run must not depend on that either.
    return run_in_process(train, folder, kill_after, resume, new_interpreter=resume)


def lines(folder: Path) -> dict[int, Any]:
    """The last line written for each rollout."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {record["rollout"]: record for record in records}


@pytest.mark.parametrize("kill_after", [5])
@pytest.mark.slow
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
    assert recorder.metrics[0]["sampler_mismatch/logprob_abs_diff_max"] < 1e-5


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
