"""A whole run on two engine processes, one of which is killed, ends as one in this process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_grpo import LitGRPO, RolloutDataModule
from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.data import PromptFormat
from lit_grpo.engines import EngineConfig
from lit_grpo.engines.vllm_processes.group import EngineGroup
from lit_grpo.learner import models as models_file
from lit_grpo.policy import LoraConfig, PolicyConfig, TinyModel
from lit_grpo.policy.model import compiling
from lit_grpo.rollout.engine_start import EngineStarter
from lit_grpo.types import Completion, Rollout, Sampling
from tests import tiny
from tests.engines.vllm_processes.test_engine import UNPACKED
from tests.engines.vllm_processes.test_process import alive, below
from tests.paths import ROOT
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares weights to the bit; CUDA has bfloat16"),
]
POLICY = PolicyConfig(tiny=TinyModel(layers=2, width=64, heads=2))
ADAPTED = replace(POLICY, lora=LoraConfig(rank=4, alpha=16.0))
ROUNDING = 1e-4
"""Nats between engine and learner, both in float32."""


class Agreement(pl.Callback):
    """The largest gap, in nats, between what engine and learner say of a token of each rollout."""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Rollout, batch_idx: int) -> None:
        # Before the first update: the weights are those that the rollout was sampled with.
        own = pl_module.measure_rollout(batch).old_logprobs
        pairs = [(c.logprobs, row[: len(c.logprobs)]) for c, row in zip(batch.completions, own, strict=True)]
        self.gaps.append(max(float((torch.tensor(said) - row).abs().max()) for said, row in pairs))


class Killer(pl.Callback):
    """Kills a process of the engine after the first step, so that the next rollout finds it dead."""

    killed = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        engine = trainer.datamodule.producer.engine
        if not self.killed:
            supervisor = engine._group._processes[0]._process.pid
            self.killed = int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text())
            os.kill(self.killed, signal.SIGKILL)


class KilledWhileSampling(Killer):
    """Kills a process of the engine when the second rollout has given its third completion."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        engine = trainer.datamodule.producer.engine
        sampled = engine.generate
        given = 0

        def generate(*args: Any) -> Iterator[Completion]:
            nonlocal given
            for completion in sampled(*args):
                given += 1
                if given == 16 + 3:
                    super(KilledWhileSampling, self).on_train_batch_end(trainer)
                yield completion

        engine.generate = generate

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def run(
    processes: int, *callbacks: Any, policy: PolicyConfig = POLICY, rollouts: int = 3, resume: Path | None = None,
    adapters: str = "merged", staleness: int = 0, **of_data: Any,
) -> tuple[Any, tiny.Recorder]:  # fmt: skip
    recorder = tiny.Recorder()
    module = tiny.module(policy=policy, updates_per_rollout=2, max_staleness=staleness)
    engine = EngineConfig(
        name="vllm",
        max_num_seqs=8,
        processes=processes,
        adapters=adapters,  # type: ignore[arg-type]
        args={"kv_cache_memory_bytes": 2**26},
    )
    data = tiny.data(rollouts=rollouts, engine=engine, sampling=Sampling(max_new_tokens=24), **of_data)
    trainer = tiny.trainer(callbacks=[recorder, *callbacks], enable_checkpointing=bool(callbacks))
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=False)
    return module, recorder


def test_a_run_through_a_death_is_the_undisturbed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone, seen = run(1)
    killer = Killer()
    several, again = run(2, killer)
    assert killer.killed
    assert again.ids == seen.ids
    assert torch.equal(tiny.weights(several), tiny.weights(alone))


def test_a_learner_that_leaves_its_compiling_until_the_engine_samples_trains_as_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine is built before the prompts are read, and is ready before the first pass is compiled."""
    done: list[str] = []
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    monkeypatch.setattr(models_file, "resolve_backend", lambda config, *_: replace(config, compile=True))
    monkeypatch.setattr(EngineStarter, "ready", property(lambda self: self.begun is not None))
    for owner, name in ((EngineGroup, "build_ahead"), (RolloutDataModule, "prepare_train_prompts"),
                        (LitGRPO, "_compile_rest")):  # fmt: skip
        monkeypatch.setattr(owner, name, noting(done, name, getattr(owner, name)))
    compiling_policy = replace(POLICY, compile=True)
    late, seen = run(2, policy=compiling_policy, format=PromptFormat(max_prompt_tokens=9))
    torch._dynamo.reset()
    # At the start of the fit, which leaves all of it, and by who waits for the first completions.
    assert done[:4] == ["build_ahead", "prepare_train_prompts", "_compile_rest", "_compile_rest"]
    expected, whole = run(1)
    assert seen.ids == whole.ids
    torch.testing.assert_close(tiny.weights(late), tiny.weights(expected), rtol=1e-3, atol=1e-5)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning saves into the working folder where a trainer has callbacks and no folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("policy", "adapters"), [(POLICY, "merged"), (ADAPTED, "hot")], ids=["weights", "adapters"])
def test_two_processes_say_what_the_learner_says_after_every_step_and_go_on_from_a_checkpoint(
    tmp_path: Path, policy: PolicyConfig, adapters: str
) -> None:
    """One of them is killed in the middle of a rollout, too."""
    if policy.lora is not None:
        pytest.importorskip("peft")
    agreement, killer = Agreement(), KilledWhileSampling()
    saves = RolloutCheckpoint(every_n_rollouts=2, dirpath=str(tmp_path), keep_last=None)
    whole, seen = run(2, agreement, killer, saves, policy=policy, rollouts=4, adapters=adapters)
    assert killer.killed
    assert len(agreement.gaps) == 4
    assert max(agreement.gaps) < ROUNDING
    assert seen.versions == [(k, k) for k in range(4)]
    after = Agreement()
    checkpoint = tmp_path / "rollout-000002.ckpt"
    again, rest = run(2, after, policy=policy, rollouts=4, adapters=adapters, resume=checkpoint)
    assert rest.ids == seen.ids[2:]
    assert torch.equal(tiny.weights(again), tiny.weights(whole))
    assert max(after.gaps) < ROUNDING


def test_a_run_with_adapters_by_themselves_is_the_run_with_merged_ones() -> None:
    """Within rounding, which changes no token here."""
    pytest.importorskip("peft")
    agreement = Agreement()
    module, seen = run(1, agreement, policy=ADAPTED, adapters="hot")
    merged, expected = run(1, policy=ADAPTED)
    assert max(agreement.gaps) < ROUNDING
    assert seen.ids == expected.ids
    torch.testing.assert_close(tiny.weights(module), tiny.weights(merged), rtol=1e-3, atol=1e-5)


class AsOnACard(pl.Callback):
    """Hands weights over block by block, so that a process that is started again can have them of another alone."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        begun = trainer.datamodule.engine_starter.begun
        assert begun is not None, "the data module's setup is over"
        begun._group._weight_files = False


@pytest.mark.parametrize("way", ["files", "twin"])
def test_a_death_beside_the_learner_loses_neither_weights_nor_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The policy has moved on by then: they come from the files, or, as on a card, from the other process."""
    pytest.importorskip("peft")
    settings: dict[str, Any] = {"policy": ADAPTED, "adapters": "hot", "staleness": 1, "rollouts": 4}
    if way == "twin":
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "sitecustomize.py").write_text(UNPACKED)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    killer, loaded = KilledWhileSampling(), list[str]()
    for name in ("_load_files", "_load_from_twin"):
        monkeypatch.setattr(EngineGroup, name, noting(loaded, name, getattr(EngineGroup, name)))
    through, seen = run(2, killer, *([AsOnACard()] if way == "twin" else []), **settings)
    assert killer.killed
    # Every sync goes through the files where there are any.
    assert loaded.count("_load_from_twin") == (way == "twin")
    assert ("_load_files" in loaded) == (way == "files")
    undisturbed, expected = run(2, **settings)
    assert seen.versions == expected.versions == [(0, 0), (0, 1), (1, 2), (2, 3)]
    assert seen.ids == expected.ids
    torch.testing.assert_close(tiny.weights(through), tiny.weights(undisturbed), rtol=1e-3, atol=1e-5)


def noting(notes: list[str], name: str, real: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        notes.append(name)
        return real(*args, **kwargs)

    return call


CONFIG = """
model:
  policy: {{tiny: {{layers: 2, width: 64, heads: 2}}}}
data:
  prompts: {{class_path: lit_grpo.data.AdditionPrompts, init_args: {{digits: 1}}}}
  rewards: [{{class_path: tests.tiny.EvenReward}}]
  group_size: 4
  prompts_per_rollout: 4
  rollouts: 100000
  sampling: {{max_new_tokens: 40}}
  engine: {{name: vllm, processes: 2, max_num_seqs: 8, args: {{kv_cache_memory_bytes: 67108864}}}}
trainer: {{accelerator: cpu, logger: {{class_path: lit_grpo.tracking.RunLogger, init_args: {{run_dir: {folder},
  tracking_uri: none}}}}}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_a_run_that_is_ended_from_outside_leaves_no_process(tmp_path: Path, way: signal.Signals) -> None:
    folder = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=folder))
    with (tmp_path / "shown").open("w") as shown:
        run = subprocess.Popen(
            [sys.executable, "-m", "lit_grpo.cli.main", "fit", "--config", str(tmp_path / "run.yaml")],
            cwd=ROOT,
            stdout=shown,
            stderr=shown,
            start_new_session=True,
        )
    try:
        metrics = folder / "metrics.jsonl"
        wait_until(
            lambda: run.poll() is not None or (metrics.is_file() and metrics.stat().st_size > 0), "a step", seconds=300
        )
        assert run.poll() is None, (tmp_path / "shown").read_text()
        started = below(run.pid)
        engines = [pid for pid in started if b"vllm_processes.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(engines) == 4, "two, and the supervisor of each"
        # As the terminal does it, to the whole group in the foreground.
        os.killpg(run.pid, way)
        code = run.wait(timeout=120)
    finally:
        run.kill()
        run.wait()
    assert code == (-9 if way is signal.SIGKILL else 130)
    wait_until(lambda: not any(map(alive, started)), f"the end of {started}", seconds=60)
