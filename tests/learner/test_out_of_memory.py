"""Memory that runs out in the learner: the step is done again in smaller pieces, or one screen says what is short."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.learner.budget import RAISE_AFTER, MicroBatchBudget
from lit_grpo.learner.engine_agreement import FirstUpdate
from lit_grpo.learner.forward import ForwardRunner
from lit_grpo.learner.optimizer_step import OptimizerStepper
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, OptimizerConfig
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.utils.memory import MemoryShortageError
from tests import tiny
from tests.learner.helpers import fit, rollout, vector

GPU = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.2 GiB is free."
)
CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "2684354560 bytes. Error code 12 (Cannot allocate memory)"
)
# Adam makes a whole step of a gradient that is nothing but rounding; SGD is as exact as the gradient is.
SGD = OptimizerConfig(type="torch.optim.SGD", lr=1e-1)
WHOLE: dict[str, Any] = {"micro_batch_size": None, "step_kl_samples": 0, "optimizer": SGD}


class Fault:
    """Raises an error in the calls of a method that are numbered, from 0; ``after`` lets the method run first."""

    def __init__(self, monkeypatch: Any, owner: Any, name: str, error: BaseException, at: Callable[[int], bool],
                 after: bool = False) -> None:  # fmt: skip
        self.calls = 0
        original = getattr(owner, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            if at(number) and not after:
                raise error
            result = original(*args, **kwargs)
            if at(number):
                raise error
            return result

        monkeypatch.setattr(owner, name, faulty)


def assert_same(one: Any, other: Any) -> None:
    """Weights, metrics and log-probabilities are those of a run in which nothing happened."""
    (module, watch), (plain, expected) = one, other
    for now, then in zip(watch.policy, expected.policy, strict=True):
        assert torch.allclose(now, then, atol=1e-6, rtol=0)
    for now, then in zip(watch.metrics, expected.metrics, strict=True):
        now = {key: value for key, value in now.items() if key != "optim/repeated_steps"}
        then = {key: value for key, value in then.items() if key != "optim/repeated_steps"}
        assert now == pytest.approx(then, abs=2e-5, rel=2e-5)
    if module.critic is not None:
        assert torch.allclose(vector(module.critic), vector(plain.critic), atol=1e-6, rtol=0)


SETTINGS: dict[str, dict[str, Any]] = {
    "one update": {},
    "two updates with a pass before them": {"updates_per_rollout": 2, "objective": ObjectiveConfig(recipe="ppo"),
                                            "critic": CriticConfig(backbone="shared", warmup_rollouts=0)},
    "a critic of its own": {"objective": ObjectiveConfig(recipe="ppo"), "critic": CriticConfig(warmup_rollouts=0)},
    "two passes over a step": {"objective": ObjectiveConfig(lopti_eta=0.5)},
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("error", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("after", [False, True], ids=["before the backward pass", "after it"])
def test_a_step_without_memory_is_done_again_with_nothing_lost(monkeypatch, settings, error, after):
    settings = WHOLE | {"zero_advantage_samples": None} | settings
    expected = fit(2, **settings)
    # In the second micro-batch: the gradient of the first is there already, and must not count twice.
    fault = Fault(monkeypatch, OptimizerStepper, "_micro_batch", error, lambda number: number == 1, after)
    found = fit(2, **(settings | {"micro_batch_tokens": 20}))
    assert fault.calls > 3
    assert_same(found, expected)
    assert found[0].counters.repeated_steps == 1
    assert found[1].metrics[-1]["optim/repeated_steps"] == 1
    # Half of what was in that micro-batch, and so no more than half of what was allowed.
    assert found[0].budget.tokens <= 10
    assert found[0].step_metrics["memory/micro_batch_tokens"] == found[0].budget.tokens
    assert found[0].micro_batch_tokens == 20


def test_what_the_first_update_saw_is_counted_once(monkeypatch):
    seen: list[torch.Tensor] = []
    original = FirstUpdate.check

    def check(self: FirstUpdate, *args: Any, **kwargs: Any) -> None:
        seen.append(self.seen()[0].sort().values)
        original(self, *args, **kwargs)

    monkeypatch.setattr(FirstUpdate, "check", check)
    Fault(monkeypatch, OptimizerStepper, "_micro_batch", GPU, lambda number: number == 1)
    fit(1, **(WHOLE | {"micro_batch_tokens": 20, "zero_advantage_samples": None}))
    assert seen[0].tolist() == list(range(8))


def test_half_a_gradient_of_a_backward_pass_that_broke_off_is_thrown_away(monkeypatch):
    expected = fit(2, **WHOLE)
    calls = 0

    def backward(self: Any, loss: Any) -> None:
        nonlocal calls
        calls += 1
        weights = [p for p in self.policy.parameters() if p.requires_grad]
        if calls == 1:
            # The later layers have their gradient, of the others there is none.
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.grad = 3.0 * gradient
            raise GPU
        loss.backward()

    monkeypatch.setattr(type(expected[0]), "manual_backward", backward)
    assert_same(fit(2, **WHOLE), expected)


def test_a_pass_before_the_updates_goes_on_in_smaller_pieces(monkeypatch):
    settings = WHOLE | {"objective": ObjectiveConfig(recipe="ppo", kl_coef=0.1), "critic": CriticConfig(),
                        "updates_per_rollout": 2}  # fmt: skip
    expected = fit(2, **settings)
    for name in ("_without_gradient", "values"):
        Fault(monkeypatch, ForwardRunner, name, CPU, lambda number: number == 0)
    found = fit(2, **settings)
    assert_same(found, expected)
    # No optimizer step had begun, so none was done again.
    assert found[0].counters.repeated_steps == 0
    assert found[0].budget.halvings == 2


def test_memory_that_goes_on_running_out_ends_in_one_screen(monkeypatch):
    Fault(monkeypatch, OptimizerStepper, "_micro_batch", GPU, lambda _: True)
    with pytest.raises(MemoryShortageError) as caught:
        fit(1, **WHOLE)
    text = str(caught.value)
    assert "memory ran out while learning from a rollout, on a micro-batch of 1 completion with" in text
    assert "2.50 GiB were asked for" in text
    # This process and its memory, and what of the machine's is free.
    assert "of main memory are free" in text or "that this container may use are free" in text
    assert "his process holds" in text
    assert "model.micro_batch_tokens" in text
    assert "gradient_checkpointing" in text


def test_other_errors_pass_as_they_are(monkeypatch):
    Fault(monkeypatch, OptimizerStepper, "_micro_batch", RuntimeError("shapes differ"), lambda _: True)
    with pytest.raises(RuntimeError, match="shapes differ"):
        fit(1, **WHOLE)


@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [
        (torch.optim.SGD, "step", "changing the weights"),
        (Policy, "verify_against_model_forward", "preparing the models"),
        (Policy, "__init__", "loading the model"),
    ],
)
def test_memory_that_runs_out_elsewhere_is_told_in_one_screen(monkeypatch, owner, name, words):
    Fault(monkeypatch, owner, name, CPU, lambda _: True)
    with pytest.raises(MemoryShortageError, match=words):
        fit(1, **WHOLE)


def test_a_resumed_run_keeps_to_what_fitted(monkeypatch, tmp_path: Path):
    def run(folder: Path, rollouts: int, resume: bool = False, **changes: Any) -> Any:
        module = tiny.module(**(WHOLE | {"micro_batch_tokens": 40} | changes))
        saves = RolloutCheckpoint(every_n_rollouts=1, dirpath=str(folder))
        trainer = tiny.trainer(callbacks=[saves], enable_checkpointing=True)
        trainer.fit(module, datamodule=tiny.data(rollouts=rollouts),
                    ckpt_path=folder / "last.ckpt" if resume else None)  # fmt: skip
        return module

    with monkeypatch.context() as patched:
        Fault(patched, OptimizerStepper, "_micro_batch", GPU, lambda number: number == 0)
        straight = run(tmp_path / "straight", 4)
    with monkeypatch.context() as patched:
        Fault(patched, OptimizerStepper, "_micro_batch", GPU, lambda number: number == 0)
        first = run(tmp_path / "cut", 2)
    assert first.budget.tokens is not None
    assert first.budget.tokens < 40
    resumed = run(tmp_path / "cut", 4, resume=True)
    assert resumed.budget.tokens == straight.budget.tokens == first.budget.tokens
    assert torch.equal(tiny.weights(resumed), tiny.weights(straight))
    # Who sets another bound means it.
    other = run(tmp_path / "cut", 5, resume=True, micro_batch_tokens=50)
    assert other.budget.tokens == 50


def test_the_budget_is_halved_once_for_what_was_cut_before(monkeypatch):
    """Micro-batches that wait were cut by the old bound, and are cut anew instead of failing one by one."""
    batch = rollout(lengths=[6] * 8)
    fits = 9

    original = OptimizerStepper._micro_batch

    def limited(self: Any, batch: Any, step: Any, plan: Any, chosen: Any, *args: Any, **kwargs: Any) -> Any:
        if self.forward.gives_way.tokens_of(batch, chosen) > fits:
            raise GPU
        return original(self, batch, step, plan, chosen, *args, **kwargs)

    monkeypatch.setattr(OptimizerStepper, "_micro_batch", limited)
    module, _ = fit(batches=[batch], **(WHOLE | {"micro_batch_tokens": 16}))
    assert (module.budget.tokens, module.budget.halvings) == (8, 1) or module.budget.halvings <= 2


# -------------------------------------------------------------------------------------------------- up again


def short_of_memory(monkeypatch: Any, holds: Callable[[int], int]) -> None:
    """Let memory run out in every micro-batch with more tokens than ``holds`` says of its number."""
    original, calls = OptimizerStepper._micro_batch, 0

    def limited(self: Any, batch: Any, step: Any, plan: Any, chosen: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if self.forward.gives_way.tokens_of(batch, chosen) > holds(calls - 1):
            raise GPU
        return original(self, batch, step, plan, chosen, *args, **kwargs)

    monkeypatch.setattr(OptimizerStepper, "_micro_batch", limited)


class Bounds(pl.Callback):
    """Keeps the bound that each rollout ended with."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen.append(pl_module.step_metrics["memory/micro_batch_tokens"])


def test_after_rollouts_in_which_memory_sufficed_the_bound_is_what_it_was(monkeypatch):
    monkeypatch.setattr("lit_grpo.learner.budget.RAISE_AFTER", 2)
    settings = WHOLE | {"micro_batch_tokens": 40, "zero_advantage_samples": None}
    expected = fit(8, **settings)
    # Another program takes memory for a moment.
    short_of_memory(monkeypatch, lambda number: 5 if number < 1 else 1000)
    bounds = Bounds()
    module, watch = fit(8, callbacks=[bounds], **settings)
    assert_same((module, watch), expected)
    assert module.budget.halvings == 1
    low = bounds.seen[0]
    assert 10 < low < 20
    assert bounds.seen == [low] * 3 + [2 * low] * 2 + [40] * 3


def test_where_memory_runs_out_again_the_smaller_bound_stays(monkeypatch):
    monkeypatch.setattr("lit_grpo.learner.budget.RAISE_AFTER", 2)
    batch = [rollout(lengths=[6] * 8, seed=seed) for seed in range(9)]
    short_of_memory(monkeypatch, lambda _: 20)
    bounds = Bounds()
    module, _ = fit(batches=batch, callbacks=[bounds], **(WHOLE | {"micro_batch_tokens": 40}))
    low = bounds.seen[0]
    assert low <= 20
    # What is logged is the bound that a rollout ended with: in that with a larger one it ran out.
    assert bounds.seen == [low] * 9
    assert module.budget.halvings == 2
    assert module.counters.repeated_steps == 2


def test_a_run_that_is_cut_goes_up_again_when_it_would_have(monkeypatch, tmp_path: Path):
    monkeypatch.setattr("lit_grpo.learner.budget.RAISE_AFTER", 3)

    def run(folder: Path, rollouts: int, resume: bool = False) -> Any:
        module = tiny.module(**(WHOLE | {"micro_batch_tokens": 40}))
        recorder = tiny.Recorder()
        saves = RolloutCheckpoint(every_n_rollouts=1, dirpath=str(folder))
        trainer = tiny.trainer(callbacks=[saves, recorder], enable_checkpointing=True)
        trainer.fit(module, datamodule=tiny.data(rollouts=rollouts),
                    ckpt_path=folder / "last.ckpt" if resume else None)  # fmt: skip
        return module

    def short() -> Any:
        patched = pytest.MonkeyPatch()
        Fault(patched, OptimizerStepper, "_micro_batch", GPU, lambda number: number == 0)
        return patched

    for folder, parts in (("straight", (6,)), ("cut", (3, 6))):
        for number, part in enumerate(parts):
            patched = short() if number == 0 else pytest.MonkeyPatch()
            module = run(tmp_path / folder, part, resume=number > 0)
            patched.undo()
        if folder == "straight":
            straight = module
    assert module.budget.state() == straight.budget.state()
    assert module.budget.raised
    assert torch.equal(tiny.weights(module), tiny.weights(straight))


def agree(*ranks: MicroBatchBudget) -> None:
    """Let the budgets of several ranks find their maximum, as a reduction does."""
    given: list[Tensor] = []

    def note(own: Tensor) -> Tensor:
        given.append(own)
        return own

    for budget in ranks:
        copy.deepcopy(budget).agree(note)
    most = torch.stack(given).amax(0)
    for budget in ranks:
        budget.agree(lambda _: most)


@pytest.mark.parametrize("first", [40, None])
@pytest.mark.parametrize("times", [1, 2])
def test_ranks_go_down_and_up_together(first: int | None, times: int) -> None:
    """The bound of one that fitted is lowered to that of the other, and both are raised in the same rollout."""
    failed, fitted = MicroBatchBudget(first), MicroBatchBudget(first)
    for number in range(times):
        failed.halve(40 >> number)
    low = 40 >> times
    seen = []
    for _ in range(2 * RAISE_AFTER + 2):
        agree(failed, fitted)
        assert failed.end_rollout() == fitted.end_rollout()
        assert failed.state() == fitted.state()
        seen.append((failed.tokens, fitted.tokens))
        if len(seen) == RAISE_AFTER + 2:
            fitted.halve(2 * low)
    assert seen[RAISE_AFTER - 1 : RAISE_AFTER + 2] == [(low, low), (2 * low, 2 * low), (2 * low, 2 * low)]
    assert seen[-1] == (low, low)
