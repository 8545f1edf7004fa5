"""Values from the engine that cannot be, and weights that an optimizer step has ruined: said at once, never learned."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.callbacks import HealthMonitor, RolloutCheckpoint
from lit_grpo.callbacks.monitors import GradientNormMonitor
from lit_grpo.engines.completion_checks import check_completion
from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.errors import EngineError, StopRun
from lit_grpo.learner.engine_agreement import GuardConfig
from lit_grpo.policy import OptimizerConfig
from lit_grpo.types import Completion, Request, Sampling
from tests import tiny
from tests.learner.helpers import fit

NAN, INF = math.nan, math.inf


def one(values: tuple[float, ...], place: int, value: float) -> tuple[float, ...]:
    """The values with another one at a place, from the end if the place is not there."""
    place = min(place, len(values) - 1)
    return (*values[:place], value, *values[place + 1 :])


SPOILT: dict[str, tuple[Any, str]] = {
    "all NaN": (lambda c: {"logprobs": (NAN,) * len(c.token_ids)}, "log-probability nan at place 0"),
    "one NaN": (lambda c: {"logprobs": one(c.logprobs, 1, NAN)}, "log-probability nan"),
    "all -inf": (lambda c: {"logprobs": (-INF,) * len(c.token_ids)}, "log-probability -inf at place 0"),
    "one -inf": (lambda c: {"logprobs": one(c.logprobs, 2, -INF)}, "log-probability -inf"),
    "+inf": (lambda c: {"logprobs": one(c.logprobs, 0, INF)}, "log-probability inf"),
    "above 0": (lambda c: {"logprobs": one(c.logprobs, 0, 0.5)}, "log-probability 0.5"),
    "absent": (lambda c: {"logprobs": ()}, "without log-probabilities"),
    "too short": (lambda c: {"logprobs": (*c.logprobs, -1.0)}, "log-probabilities"),
    "id too large": (lambda c: {"token_ids": (10**6, *c.token_ids[1:])}, "id 1000000 at place 0, outside"),
    "id negative": (lambda c: {"token_ids": (-1, *c.token_ids[1:])}, "id -1 at place 0, outside"),
    "id no number": (lambda c: {"token_ids": (1.0, *c.token_ids[1:])}, r"id 1\.0 at place 0, outside"),
    "too long": (lambda c: {"token_ids": c.token_ids * 9, "logprobs": c.logprobs * 9}, "at most 5 were allowed"),
    "unknown request": (lambda c: {"request": 77}, "request 77, which was not asked for"),
    "unknown sample": (lambda c: {"sample": 77}, "sample 77 of request .*, which was not asked for"),
    "unknown reason": (lambda c: {"finish_reason": "abort"}, "ended .* with 'abort'"),
}


def spoil(monkeypatch: pytest.MonkeyPatch, change: Any, rollout: int, before: int = 2) -> None:
    """Let the engine change what it gives in one rollout; it samples twice ``before``, to check its first sync."""
    generate, calls = TransformersEngine.generate, []

    def wrong(self: Any, requests: Any, sampling: Any) -> Any:
        calls.append(1)
        for completion in generate(self, requests, sampling):
            yield replace(completion, **change(completion)) if len(calls) > rollout + before else completion

    monkeypatch.setattr(TransformersEngine, "generate", wrong)


@pytest.mark.parametrize("rollout", [0, 1])
@pytest.mark.parametrize("name", SPOILT)
def test_the_run_ends_before_it_learns_from_it(monkeypatch, name, rollout):
    change, message = SPOILT[name]
    spoil(monkeypatch, change, rollout)
    module = tiny.module()
    with pytest.raises(EngineError, match=message):
        tiny.trainer().fit(module, datamodule=tiny.data(rollouts=3))
    assert module.optimizer_steps == rollout


def test_what_cannot_be_is_said_in_the_check_of_the_first_sync_too(monkeypatch):
    spoil(monkeypatch, lambda c: {"logprobs": (NAN,) * len(c.token_ids)}, 0, before=0)
    module = tiny.module()
    with pytest.raises(EngineError, match="log-probability nan at place 0"):
        tiny.trainer().fit(module, datamodule=tiny.data(rollouts=1))


def test_without_the_guard_an_engine_may_give_none_and_that_is_said(monkeypatch):
    spoil(monkeypatch, lambda c: {"logprobs": ()}, 0, before=0)
    module = tiny.module(guards=GuardConfig(max_engine_gap=None))
    with pytest.warns(UserWarning, match="The engine gives no log-probabilities"):
        tiny.trainer().fit(module, datamodule=tiny.data(rollouts=2))
    assert module.optimizer_steps == 2


def test_without_the_guard_infinite_ones_end_the_run_all_the_same(monkeypatch):
    spoil(monkeypatch, lambda c: {"logprobs": (-INF,) * len(c.token_ids)}, 0, before=0)
    with pytest.raises(EngineError, match="-inf"):
        tiny.trainer().fit(tiny.module(guards=GuardConfig(max_engine_gap=None)), datamodule=tiny.data(rollouts=2))


def test_rollouts_of_another_source_are_held_to_it_too():
    """Without an engine, the learner itself looks."""
    rollout = tiny.rollout([1.0, 0.0, 0.0, 1.0], [2, 3, 1, 2], 4)
    with pytest.warns(UserWarning, match="have no log-probabilities of their sampler"):
        fit(1, batches=[rollout])
    for completion in rollout.completions[1:]:
        object.__setattr__(completion, "logprobs", tuple([-INF] * len(completion.token_ids)))
    with pytest.raises(StopRun, match="of 6 sampled tokens of rollout 1 are infinite"):
        fit(1, batches=[rollout])


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    ids: Any = tuple(np.array([1, 2], dtype=np.int32))
    completion = Completion(0, 0, ids, (np.float32(-0.5), np.float32(-0.25)), "stop", 0)  # type: ignore[arg-type]
    check_completion(completion, [Request(0, (1,), (5,))], Sampling(max_new_tokens=2), vocab_size=3)


class Saves(RolloutCheckpoint):
    """Saves each rollout into a folder of the test."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1, None, str(folder))


def ruin(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Let one optimizer step leave NaN in the last of the weights, with finite gradients."""
    step, calls = torch.optim.AdamW.step, []

    def ruined(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = step(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == call:
            with torch.no_grad():
                self.param_groups[-1]["params"][-1].view(-1)[-1] = NAN
        return out

    monkeypatch.setattr(torch.optim.AdamW, "step", ruined)


def is_finite(module: Any) -> bool:
    return bool(tiny.weights(module).isfinite().all())


@pytest.mark.parametrize("actions", [None, {"critical": "log"}])
def test_weights_that_a_step_ruins_end_the_run_and_are_not_saved(monkeypatch, tmp_path, actions):
    ruin(monkeypatch, 3)
    callbacks = [Saves(tmp_path), *([] if actions is None else [HealthMonitor(actions=actions)])]
    module = tiny.module()
    with pytest.raises(StopRun, match=r"has left 1 of .* weight tensors of the policy .* not finite") as found:
        tiny.trainer(callbacks=callbacks, enable_checkpointing=True, default_root_dir=tmp_path).fit(
            module, datamodule=tiny.data(rollouts=6)
        )
    assert found.value.diagnosis == "non_finite"
    assert module.skipped_steps == 0
    assert (tmp_path / "last.ckpt").resolve().name == "rollout-000002.ckpt"
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert all(weight.isfinite().all() for weight in saved["state_dict"].values())


@pytest.mark.parametrize("actions", [{"critical": "rollback"}, {"non_finite": "rollback"}])
def test_weights_that_a_step_ruins_are_brought_back_where_the_actions_say_so(monkeypatch, tmp_path, actions):
    ruin(monkeypatch, 3)
    # The bound on truncation is nothing that a random model keeps to.
    monitor = HealthMonitor([GradientNormMonitor()], actions=actions, checkpoint_every=1)
    module = tiny.module(optimizer=OptimizerConfig(lr=1e-4))
    tiny.trainer(callbacks=[monitor, Saves(tmp_path)], enable_checkpointing=True, default_root_dir=tmp_path).fit(
        module, datamodule=tiny.data(rollouts=5)
    )
    assert len(monitor.targets) == 1
    assert is_finite(module)
    assert module.policy_version == 5


def test_spikes_do_not_end_a_run_that_is_only_to_log_them(monkeypatch, tmp_path):
    """Every second gradient is ten thousand times as large, all with a finite norm."""
    from lit_grpo.learner.optimizer_step import OptimizerStepper

    accumulate, calls = OptimizerStepper._accumulate, []

    def steep(self: Any, *args: Any) -> Any:
        loss = accumulate(self, *args)
        calls.append(1)
        if len(calls) > 12:
            for bundle in self.bundles:
                for weight in bundle.weights:
                    if weight.grad is not None:
                        weight.grad.mul_(1e4 ** (len(calls) % 3))
        return loss

    monkeypatch.setattr(OptimizerStepper, "_accumulate", steep)
    module = tiny.module(max_grad_norm=None, optimizer=OptimizerConfig(lr=1e-4))
    monitor = HealthMonitor(actions={"critical": "log"})
    tiny.trainer(callbacks=[monitor], default_root_dir=tmp_path).fit(module, datamodule=tiny.data(rollouts=60))
    assert module.policy_version == 60
    assert module.clipped_steps > 10
    assert module.skipped_in_a_row == 0
