"""Sampling beside the learner: how old a rollout is, exactly, and that nothing is sampled from half-changed weights."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.errors import EngineError, StopRun, UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.types import Sampling
from tests import tiny
from tests.ranks import enter, on_two_ranks
from tests.waiting import wait_until

ROLLOUTS = 6


class Truth(pl.Callback):
    """Keeps the weights of every version, and finds by them which version really sampled each rollout.

    Nothing that the run says of itself is trusted: the engine's log-probabilities are compared with those that every
    version kept gives the same tokens.
    """

    def __init__(self, slow: float = 0.0) -> None:
        self.versions: list[Any] = []
        self.sampled_by: list[int] = []
        self.said: list[set[int]] = []
        self.threads: set[str] = set()
        self.slow = slow

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        self.versions.append({k: v.clone() for k, v in pl_module.policy.state_dict().items()})
        self.said.append({c.policy_version for c in batch.completions})
        present = self.versions[-1]
        gaps = []
        for weights in self.versions:
            pl_module.policy.load_state_dict(weights)
            with torch.no_grad():
                stats = pl_module.policy(
                    pl_module.policy_inputs(batch, torch.arange(len(batch.completions))), 1.0, "none"
                )
            rows = zip(stats.logprobs, batch.completions, strict=True)
            gaps.append(max(float((own[: len(c.logprobs)] - torch.tensor(c.logprobs)).abs().max()) for own, c in rows))
        pl_module.policy.load_state_dict(present)
        best = min(range(len(gaps)), key=gaps.__getitem__)
        assert gaps[best] < 1e-5, "no version that ever was explains what was sampled"
        assert all(gap > 1e-4 for version, gap in enumerate(gaps) if version != best)
        self.sampled_by.append(best)
        time.sleep(self.slow)


def run(staleness: int, truth: Truth, data: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, Any]:
    recorder = tiny.Recorder()
    module = tiny.module(max_staleness=staleness, **changes)
    given: dict[str, Any] = {"rollouts": ROLLOUTS} | (data or {})
    tiny.trainer(callbacks=[truth, recorder]).fit(module, datamodule=tiny.data(**given))
    return module, recorder


@pytest.mark.parametrize("slow", [0.0, 0.1], ids=["at full speed", "slow learner"])
@pytest.mark.parametrize(
    "updates", [{"micro_batch_size": 3}, {"updates_per_rollout": 4, "minibatch_prompts": 2}], ids=["one", "four"]
)
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.slow
def test_a_rollout_is_exactly_as_old_as_allowed(staleness, updates, slow):
    truth = Truth(slow)
    _, recorder = run(staleness, truth, **updates)
    expected = [max(0, k - staleness) for k in range(ROLLOUTS)]
    assert truth.sampled_by == expected
    assert truth.said == [{version} for version in expected]
    assert [m["rollout/staleness"] for m in recorder.metrics] == [float(k - v) for k, v in enumerate(expected)]


@pytest.mark.parametrize(("engine", "learner"), [(0.0, 0.1), (0.3, 0.0)], ids=["slow learner", "slow engine"])
@pytest.mark.slow
def test_staleness_2_is_never_exceeded(monkeypatch, engine, learner):
    generate = TransformersEngine.generate

    def slowly(self: Any, *asked: Any) -> Any:
        time.sleep(engine)
        return generate(self, *asked)

    monkeypatch.setattr(TransformersEngine, "generate", slowly)
    truth = Truth(learner)
    run(2, truth)
    ages = [k - version for k, version in enumerate(truth.sampled_by)]
    assert max(ages) <= 2
    assert ages[0] == 0
    assert truth.said == [{version} for version in truth.sampled_by]


def test_the_correction_is_on_where_samples_are_stale():
    module, recorder = run(1, Truth())
    assert module.objective.sampler.kind == "tis_token"
    assert recorder.metrics[2]["sampler_mismatch/logprob_abs_diff"] > 1e-4
    assert "time/learner_idle" not in recorder.metrics[2]  # timed keys are left out by the recorder
    own, _ = run(1, Truth(), objective=ObjectiveConfig(sampler_correction="none"))
    assert own.objective.sampler.kind == "none"


def test_the_same_prompts_in_the_same_order_as_without():
    prompts = [run(staleness, Truth())[1].prompts for staleness in (0, 1, 2)]
    assert prompts[0] == prompts[1] == prompts[2]


def test_dynamic_sampling_takes_no_prompt_twice():
    truth = Truth()
    dapo = ObjectiveConfig(recipe="dapo", entropy_coef=0.0)
    module = tiny.module(max_staleness=1, objective=dapo)
    recorder = tiny.Recorder()
    data = tiny.data(rollouts=4, group_size=2)
    trainer = tiny.trainer(callbacks=[truth, recorder])
    trainer.fit(module, datamodule=data)
    flat = [name for names in recorder.prompts for name in names]
    assert len(set(flat)) == len(flat)
    assert truth.sampled_by == [0, 0, 1, 2]


def test_evaluation_between_two_rollouts_uses_the_newest_weights():
    class Newest(pl.Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
            self.seen.append((batch.policy_version, pl_module.policy_version))

    from lit_grpo.data import AdditionPrompts

    newest, recorder = Newest(), tiny.Recorder()
    data = tiny.data(rollouts=4, val_prompts=AdditionPrompts(digits=1, n=4))
    trainer = tiny.trainer(callbacks=[newest, recorder], val_check_interval=2, check_val_every_n_epoch=None)
    trainer.fit(tiny.module(max_staleness=1), datamodule=data)
    assert newest.seen
    assert all(sampled == now for sampled, now in newest.seen)
    assert all(m["rollout/staleness"] <= 1 for m in recorder.metrics)


@pytest.mark.parametrize("recipe", ["grpo", "dapo"])
def test_a_resumed_run_trains_on_what_was_sampled_ahead(tmp_path, recipe):
    """The weights that sampled it are gone by then, so the checkpoint must hold it."""
    objective, few = ObjectiveConfig(recipe=recipe, entropy_coef=0.0), {"group_size": 2}
    whole, straight = run(1, Truth(), few, objective=objective)
    saver = RolloutCheckpoint(every_n_rollouts=2, dirpath=str(tmp_path), keep_last=None)
    first = tiny.Recorder()
    tiny.trainer(callbacks=[first, saver], enable_checkpointing=True).fit(
        tiny.module(max_staleness=1, objective=objective), datamodule=tiny.data(rollouts=ROLLOUTS, **few)
    )
    again = tiny.Recorder()
    module = tiny.module(max_staleness=1, objective=objective)
    tiny.trainer(callbacks=[again]).fit(
        module, datamodule=tiny.data(rollouts=ROLLOUTS, **few), ckpt_path=tmp_path / "rollout-000002.ckpt"
    )
    assert straight.prompts == first.prompts == first.prompts[:2] + again.prompts
    assert straight.ids == first.ids[:2] + again.ids
    assert [m["rollout/staleness"] for m in again.metrics] == [1.0, 1.0, 1.0, 1.0]
    assert torch.equal(tiny.weights(module), tiny.weights(whole))


def test_what_is_saved_right_after_a_return_is_what_was_returned_to(tmp_path):
    """Not what had been sampled before it, by weights that are given up."""
    states = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, out: Any, batch: Any, index: int) -> None:
            loader = trainer.train_dataloader
            states.append(loader.state_dict())
            if index == 3:
                loader.load_state_dict(states[1])
                states.append(loader.state_dict())
                raise StopRun("enough")

    with pytest.raises(StopRun):
        tiny.trainer(callbacks=[Look()]).fit(tiny.module(max_staleness=1), datamodule=tiny.data(rollouts=ROLLOUTS))
    before, after = states[1]["ahead"], states[-1]["ahead"]
    assert torch.equal(before[0][0]["token_ids"], after[0][0]["token_ids"])
    assert states[3]["ahead"][0][0]["places"] != after[0][0]["places"]


def test_what_was_sampled_ahead_under_other_settings_is_sampled_anew(tmp_path):
    saver = RolloutCheckpoint(every_n_rollouts=2, dirpath=str(tmp_path), keep_last=None)
    tiny.trainer(callbacks=[saver], enable_checkpointing=True).fit(
        tiny.module(max_staleness=1), datamodule=tiny.data(rollouts=ROLLOUTS)
    )
    again = tiny.Recorder()
    tiny.trainer(callbacks=[again]).fit(
        tiny.module(max_staleness=1),
        datamodule=tiny.data(rollouts=ROLLOUTS, group_size=6),
        ckpt_path=tmp_path / "rollout-000002.ckpt",
    )
    assert [m["rollout/staleness"] for m in again.metrics] == [0.0, 1.0, 1.0, 1.0]
    assert all(len(ids) == 4 * 6 for ids in again.ids)


class Fails(TransformersEngine):
    """Runs out of memory after some completions, as often as told."""

    left = 0
    after = 3
    asked: list[int] = []  # noqa: RUF012

    def generate(self, requests: Any, sampling: Any) -> Any:
        type(self).asked.append(sum(len(r.seeds) for r in requests))
        for number, completion in enumerate(super().generate(requests, sampling)):
            if number == type(self).after and type(self).left > 0:
                type(self).left -= 1
                raise EngineError("no memory", transient=True)
            yield completion


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_engine_out_of_memory_is_asked_again_for_less_and_nothing_is_lost(monkeypatch, staleness):
    whole = run(staleness, Truth())[1]
    monkeypatch.setattr("lit_grpo.engines.transformers.engine.TransformersEngine", Fails)
    Fails.left, Fails.after, Fails.asked = 2, 3, []
    with pytest.warns(UserWarning, match="trying again for the 13 samples that are missing, 6 at a time"):
        again = run(staleness, Truth())[1]
    assert again.ids == whole.ids
    assert max(Fails.asked[1:3]) <= 6


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_engine_that_goes_on_failing_ends_the_run_with_a_checkpoint(monkeypatch, tmp_path, staleness):
    monkeypatch.setattr("lit_grpo.engines.transformers.engine.TransformersEngine", Fails)
    Fails.left, Fails.after, Fails.asked = 0, 0, []

    class Break(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, out: Any, batch: Any, index: int) -> None:
            Fails.left = 100 if index == 1 else 0

    saver = RolloutCheckpoint(every_n_rollouts=100, dirpath=str(tmp_path))
    with pytest.raises(EngineError, match="no memory"):
        tiny.trainer(callbacks=[Break(), saver], enable_checkpointing=True).fit(
            tiny.module(max_staleness=staleness), datamodule=tiny.data(rollouts=ROLLOUTS)
        )
    assert saver.saved_rollout in (2, 3)  # what was sampled ahead before the failure is still trained on
    assert (tmp_path / "last.ckpt").exists()


def test_a_run_that_ends_early_leaves_no_thread_behind():
    before = {t.name for t in threading.enumerate()}

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            raise StopRun("enough")

    with pytest.raises(StopRun):
        tiny.trainer(callbacks=[Stop()]).fit(tiny.module(max_staleness=1), datamodule=tiny.data(rollouts=ROLLOUTS))
    wait_until(
        lambda: not any(t.name.startswith("rollout") for t in threading.enumerate()),
        f"the sampling thread ends; before the run there were {before}",
    )


def test_an_engine_that_samples_all_the_time_cannot_sleep(monkeypatch):
    from lit_grpo.engines import EngineConfig

    monkeypatch.setattr("lit_grpo.engines.vllm.installed.find_spec", lambda name: object())
    data = tiny.data(engine=EngineConfig(name="vllm", sleep=2))
    with pytest.raises(UserError, match="cannot sleep"):
        tiny.trainer().fit(tiny.module(max_staleness=1), datamodule=data)


CASES = [(0, "grpo"), (1, "grpo"), (1, "dapo")]


def job(rank: int, folder: str) -> dict[tuple[int, str], Any]:
    out = {}
    for staleness, recipe in CASES:
        enter(rank)
        truth, recorder = Truth(), tiny.Recorder()
        objective = ObjectiveConfig(recipe=recipe)  # type: ignore[arg-type]
        module = tiny.module(max_staleness=staleness, updates_per_rollout=2, objective=objective, micro_batch_size=3)
        trainer = tiny.trainer(devices=2, strategy="ddp", callbacks=[truth, recorder])
        trainer.fit(module, datamodule=tiny.data(rollouts=4, sampling=Sampling(max_new_tokens=4)))
        seen = {"by": truth.sampled_by, "said": truth.said, "prompts": recorder.prompts}
        out[staleness, recipe] = seen | {"weights": tiny.weights(module)}
    return out


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    both = on_two_ranks(job, tmp_path)
    for staleness, recipe in CASES:
        first, second = (rank[staleness, recipe] for rank in both)
        expected = [max(0, k - staleness) for k in range(4)]
        assert first["by"] == second["by"] == expected
        assert first["said"] == second["said"] == [{version} for version in expected]
        assert torch.equal(first["weights"], second["weights"])
        for one, other in zip(first["prompts"], second["prompts"], strict=True):
            assert set(one).isdisjoint(other)
