"""Compiled passes: made before the first rollout, once for all layers, and never again, whatever the lengths."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from lit_grpo import module as module_file
from lit_grpo.learner import models as models_file
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, OptimizerConfig, PolicyConfig, TinyModel
from lit_grpo.policy.model import compiling, load
from lit_grpo.rollout.engine_start import EngineStarter
from lit_grpo.types import Sampling
from tests import tiny
from tests.learner.helpers import Given
from tests.policy.forward.varlen_on_cpu import varlen_attn

STEPS = 40


@pytest.fixture(autouse=True)
def _tracing_alone(monkeypatch: Any, tmp_path: Path) -> Any:
    """Everything but the generation of code, which takes minutes on a CPU, and the attention of GPUs by loops."""
    torch._dynamo.reset()
    compiling.compiled.cache_clear()
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(load, "_check_varlen", lambda *_: None)
    yield
    torch._dynamo.reset()
    compiling.compiled.cache_clear()


def natural(step: int) -> Any:
    """Four groups of four: lengths and rewards by chance, a long one now and then, and what comes late in a run."""
    chance = random.Random(step)
    lengths = [chance.randint(1, 40) for _ in range(16)]
    rewards = [float(chance.random() < 0.5) for _ in range(16)]
    if step >= 10:
        # Beyond the bound on the longest segment so far, and once more.
        lengths[3] = 300 if step < 20 else 600
    if step >= 5:
        # The first group without gradient: its completions go through without one.
        rewards[:4] = [1.0] * 4
    if step == 25:
        lengths = [1] * 16
    return tiny.rollout(rewards, lengths, 4, seed=step)


class Graphs(tiny.Recorder):
    """Also counts the graphs that were made until each rollout's end, and before the first begins."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.made = -1, list[int]()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = counters["stats"]["unique_graphs"]

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.made.append(counters["stats"]["unique_graphs"])


def fit(monkeypatch: Any, steps: int, *, compiled: bool = True, layers: int = 2, **changes: Any) -> Graphs:
    counters.clear()
    monkeypatch.setattr(models_file, "resolve_backend",
                        lambda config, *_: replace(config, attention="varlen", compile=compiled))  # fmt: skip
    settings: dict[str, Any] = {
        "policy": PolicyConfig(tiny=TinyModel(width=32, layers=layers, heads=2), compile=compiled),
        "optimizer": OptimizerConfig(type="torch.optim.SGD", lr=0.05),
        "micro_batch_size": None,
        "micro_batch_tokens": 300,
    }
    made, graphs = tiny.module(**(settings | changes)), Graphs()
    made.connect(tiny.context(steps, prompts_per_rollout=4, max_new_tokens=700))
    tiny.trainer(callbacks=[graphs]).fit(made, Given(*(natural(step) for step in range(steps))))
    return graphs


@pytest.mark.slow
def test_forty_steps_of_natural_lengths_compile_nothing(monkeypatch):
    graphs = fit(monkeypatch, STEPS)
    assert graphs.before > 0
    assert graphs.made == [graphs.before] * STEPS


class Disturbing(tiny.pl.Callback):
    """Skips steps now and then, two in a row among them, and has a step find no memory at its first attempt."""

    asked = 0
    skipped = 0
    evaluated = 0

    def veto_update(self, trainer: Any, module: Any, metrics: dict[str, float]) -> str | None:
        # By the steps that were asked for, and not by the rollouts: one without any advantage asks for none.
        self.asked += 1
        skips = self.asked in (8, 9, 31)
        self.skipped += skips
        return "the test skips it" if skips else None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 40:
            # Smaller micro-batches from here on, as after a step that found no memory.
            pl_module.budget.halve(300)

    def on_validation_epoch_end(self, *args: Any) -> None:
        self.evaluated += 1


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1], ids=["on-policy", "beside the learner"])
def test_sixty_rollouts_of_a_whole_run_compile_nothing(monkeypatch, staleness):
    """Sampled, evaluated in between by the learner's own compiled model, with skipped steps and other micro-batches."""
    counters.clear()
    monkeypatch.setattr(models_file, "resolve_backend",
                        lambda config, *_: replace(config, attention="varlen", compile=True))  # fmt: skip
    policy = PolicyConfig(tiny=TinyModel(width=32, layers=2, heads=2), compile=True)
    optimizer = OptimizerConfig(type="torch.optim.SGD", lr=0.05)
    module = tiny.module(
        policy=policy, optimizer=optimizer, micro_batch_size=None, micro_batch_tokens=300, max_staleness=staleness
    )
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in (10, 2) for b in (345, 6, 77)]
    data = tiny.data(
        rollouts=60, prompts_per_rollout=6, sampling=Sampling(max_new_tokens=48), val={"mine": rows, "sampled": rows}
    )
    graphs, disturbing = Graphs(), Disturbing()
    tiny.trainer(callbacks=[graphs, disturbing], val_check_interval=10, num_sanity_val_steps=1).fit(module, data)
    assert (disturbing.evaluated, disturbing.skipped) == (7, 3)
    assert module.skipped_steps == 3
    lengths = {len(ids) for rollout in graphs.ids for ids in rollout}
    assert len(lengths) > 20
    assert graphs.before > 0
    assert graphs.made == [graphs.before] * 60


@pytest.mark.slow
@pytest.mark.parametrize("waits_from", [0, 1, 99])
def test_what_is_left_when_the_engine_waits_is_compiled_in_the_same_order_before_the_first_update(
    monkeypatch, waits_from
):
    """The check of the engine's weights in between compiles nothing: kept code is found by what comes first."""
    counters.clear()
    monkeypatch.setattr(models_file, "resolve_backend",
                        lambda config, *_: replace(config, attention="varlen", compile=True))  # fmt: skip
    asked: list[int] = []

    def waits(starter: EngineStarter) -> bool:
        asked.append(counters["stats"]["unique_graphs"])
        return len(asked) > waits_from

    monkeypatch.setattr(EngineStarter, "ready", property(waits))
    at_check: list[tuple[int, int]] = []
    check = module_file.check_engine

    def checked(*args: Any, **kwargs: Any) -> Any:
        before = counters["stats"]["unique_graphs"]
        found = check(*args, **kwargs)
        at_check.append((before, counters["stats"]["unique_graphs"]))
        return found

    monkeypatch.setattr(module_file, "check_engine", checked)
    made = tiny.module(
        policy=PolicyConfig(tiny=TinyModel(width=32, layers=2, heads=2), compile=True),
        optimizer=OptimizerConfig(type="torch.optim.SGD", lr=0.05), micro_batch_size=None, micro_batch_tokens=300,
    )  # fmt: skip
    graphs = Graphs()
    tiny.trainer(callbacks=[graphs]).fit(made, tiny.data(rollouts=3))
    ((before, after),) = at_check
    assert before == after, "the check compiled something"
    assert (before == 0) == (waits_from == 0)
    assert graphs.made == [graphs.made[0]] * 3
    assert graphs.made[0] > 0
    if waits_from == 99:
        # Nothing was left.
        assert before == graphs.made[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"objective": ObjectiveConfig(recipe="ppo", kl_coef=0.1), "critic": CriticConfig(warmup_rollouts=1)},
        {"objective": ObjectiveConfig(recipe="ppo"), "critic": CriticConfig(backbone="shared", warmup_rollouts=1)},
        {"objective": ObjectiveConfig(entropy_coef=0.1), "updates_per_rollout": 2, "minibatch_prompts": 2},
        {"policy": PolicyConfig(tiny=tiny.TINY, compile=True, logits_chunk=16), "micro_batch_tokens": 100},
        # More tokens than a chunk holds, which no micro-batch has before the first rollout.
        {"policy": PolicyConfig(tiny=tiny.TINY, compile=True, logits_chunk=330), "micro_batch_tokens": 1200},
    ],
    ids=["critic", "shared backbone", "entropy", "chunks", "large chunks"],
)
def test_nor_do_those_of_other_objectives(monkeypatch, changes):
    graphs = fit(monkeypatch, 12, **changes)
    assert graphs.made == [graphs.before] * 12


@pytest.mark.slow
def test_on_a_card_no_code_is_made_for_large_micro_batches_alone(monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    backend = compiling._backend()
    assert backend["backend"] == "inductor"
    # Of this version of torch, where it has them: another version may lack one, and would refuse it.
    assert set(backend["options"]) <= set(torch._inductor.list_options())
    assert backend["options"]["triton.mix_order_reduction"] is False
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    assert compiling._backend() == {"backend": "aot_eager"}


def test_layers_share_their_code(monkeypatch):
    two = fit(monkeypatch, 1, layers=2).before
    torch._dynamo.reset()
    compiling.compiled.cache_clear()
    assert fit(monkeypatch, 1, layers=5).before == two


@pytest.mark.slow
def test_compiling_changes_no_number_and_draws_none(monkeypatch):
    torch.manual_seed(0)
    expected = fit(monkeypatch, 3, compiled=False)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    found = fit(monkeypatch, 3)
    assert torch.equal(torch.rand(1), drawn)
    for now, then in zip(found.metrics, expected.metrics, strict=True):
        assert now == pytest.approx(then, abs=2e-5, rel=2e-4)


@pytest.mark.parametrize("given", [None, "/elsewhere"])
def test_code_is_kept_where_it_outlives_the_machine_s_temporary_files(monkeypatch, tmp_path, given):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if given is None:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    else:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
    compiling.keep_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == (given or str(tmp_path / "lit-grpo" / "inductor"))
    assert (tmp_path / "lit-grpo").is_dir() is (given is None)


def test_without_a_place_for_it_the_run_goes_on(monkeypatch, tmp_path, caplog):
    (tmp_path / "lit-grpo").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compiling.keep_code()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert "kept among temporary files" in caplog.text


@pytest.mark.parametrize(
    ("level", "own", "told"), [("DEBUG", "", True), ("INFO", "", False), ("DEBUG", "+dynamo", False)]
)
def test_what_compiles_again_is_told_where_it_is_asked_for(monkeypatch, caplog, level, own, told):
    asked = []
    monkeypatch.setattr(torch._logging, "set_logs", lambda **logs: asked.append(logs))
    monkeypatch.setenv("TORCH_LOGS", own)
    with caplog.at_level(level, logger="lit_grpo.policy.model.compiling"):
        compiling.tell_what_compiles_again()
    assert asked == ([{"recompiles": True}] if told else [])
