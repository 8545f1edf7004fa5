"""What else two ranks go through: one without work, a broken run that goes on, monitors that go back and stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_grpo.callbacks import FlightRecorder, HealthMonitor, RolloutCheckpoint, stop_reason
from lit_grpo.callbacks.diagnosis.actions import read_journal
from lit_grpo.callbacks.monitors import GradientNormMonitor, all_monitors
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig
from lit_grpo.run import flight
from tests import tiny
from tests.callbacks.test_rollback import Alarm
from tests.distributed.sharded import Unequal, fit, head
from tests.learner.helpers import Given, part, rollout
from tests.ranks import enter, on_two_ranks

pytestmark = pytest.mark.slow

# What two ranks have to learn from in each rollout, a group each: rewards, lengths.
UNEQUAL = [
    ([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], [3, 1, 5, 2, 4, 4, 1, 6]),  # the second rank nothing
    ([0.0] * 8, [3, 1, 5, 2, 4, 4, 1, 6]),  # neither anything
    ([1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [3, 1, 5, 2, 4, 4, 1, 6]),  # the first rank nothing
    ([1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [3, 1, 5, 2, 0, 0, 0, 0]),  # the second rank not a single token
]


def unequal(ranks: int, strategy: str, rank: int = 0) -> tuple[Any, Unequal]:
    wholes = [rollout(seed=k, rewards=rewards, lengths=lengths) for k, (rewards, lengths) in enumerate(UNEQUAL)]
    module = tiny.module(updates_per_rollout=2, micro_batch_size=1)
    module.connect(tiny.context(len(wholes)))
    loader = Given(*(wholes if ranks == 1 else [part(whole, rank) for whole in wholes]))
    return module, fit(module, loader, ranks=ranks, strategy=strategy)


def shared_trunk() -> Any:
    return tiny.module(
        objective=ObjectiveConfig(recipe="ppo", kl_coef=0.1),
        critic=CriticConfig(backbone="shared", warmup_rollouts=1, measure_every=1),
        updates_per_rollout=2,
        micro_batch_size=3,
    )


class BrokenOffError(Exception):
    pass


class Break(pl.Callback):
    """In the middle of a rollout."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.index == self.at:
            torch.rand(3)  # random numbers that the unbroken run does not draw
            raise BrokenOffError


def saved(folder: str, strategy: str, *callbacks: Any, **changes: Any) -> tuple[Any, Unequal]:
    module = shared_trunk()
    saver = RolloutCheckpoint(every_n_rollouts=1, dirpath=f"{folder}/checkpoints")
    recorder = fit(
        module,
        tiny.data(rollouts=3),
        ranks=2,
        strategy=strategy,
        callbacks=[*callbacks, saver],
        enable_checkpointing=True,
        default_root_dir=folder,
        **changes,
    )
    return module, recorder


class Fault(pl.Callback):
    """Rank 0 alone sees an update that is too large: after the third rollout once, and once after the fifth."""

    survives_rollback = True

    def __init__(self) -> None:
        self.left = [3, 5]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if self.left and pl_module.policy_version == self.left[0]:
            self.left.pop(0)
            if trainer.is_global_zero:
                pl_module.step_metrics["optim/update_to_weight_ratio"] = 1.0


def watched(ranks: int, strategy: str, folder: Path) -> dict[str, Any]:
    """A run under every monitor, which clips steps, goes back once, and is stopped."""
    others = [monitor for monitor in all_monitors() if not isinstance(monitor, GradientNormMonitor)]
    watcher = HealthMonitor(
        [*others, GradientNormMonitor(warmup=2, clip=1.0 + 1e-9), Alarm()],
        {"critical": "rollback"},
        rollbacks=1,
        checkpoint_every=1,
    )
    module = shared_trunk()
    saver = RolloutCheckpoint(every_n_rollouts=2, dirpath=str(folder / "checkpoints"))
    recorder = fit(
        module,
        tiny.data(rollouts=8),
        ranks=ranks,
        strategy=strategy,
        callbacks=[Fault(), FlightRecorder(), watcher, saver],
        enable_checkpointing=True,
        default_root_dir=str(folder),
    )
    reason = stop_reason(module.trainer)
    return {
        "targets": watcher.targets,
        "stop": None if reason is None else (reason.step, reason.reason, reason.monitor),
        "clipped": module.clipped_steps,
        "steps": [metrics["rollout/policy_version"] for metrics in recorder.metrics],
        "metrics": recorder.metrics,
        "ids": recorder.ids,
        "weights": tiny.weights(module),
        "head": head(module),
    }


def job(rank: int, folder: str) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for strategy in ("ddp", "fsdp"):
        enter(rank)
        module, recorder = unequal(2, strategy, rank)
        out["unequal", strategy] = recorder.metrics, recorder.micro_batches, tiny.weights(module)
    enter(rank)
    module, recorder = saved(f"{folder}/whole", "fsdp")
    out["whole"] = recorder.metrics, recorder.ids, tiny.weights(module), head(module)
    enter(rank)
    with pytest.raises(BrokenOffError):
        saved(f"{folder}/broken", "model parallel", Break(2))
    enter(rank)
    last = f"{folder}/broken/checkpoints/last.ckpt"
    module, recorder = saved(f"{folder}/broken", "model parallel", ckpt_path=last, weights_only=False)
    out["again"] = recorder.metrics, recorder.ids, tiny.weights(module), head(module)
    enter(rank)
    out["watched"] = watched(2, "fsdp", Path(folder) / "watched")
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Any]]:
    return on_two_ranks(job, folder)


KEYS = (
    "loss",
    "optim/grad_norm",
    "critic/grad_norm",
    "reward",
    "policy/entropy",
    "optim/empty_steps",
    "optim/steps",
    "optim/lr",
)


def agree(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for a, b in zip(found, expected, strict=True):
        for key in KEYS:
            assert a.get(key) == pytest.approx(b.get(key), abs=1e-4), key


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_without_work_neither_hang_nor_change_a_number(ranks: Any, strategy: str) -> None:
    module, single = unequal(1, "auto")
    for rank in ranks:
        metrics, _, weights = rank["unequal", strategy]
        agree(metrics, single.metrics)
        torch.testing.assert_close(weights, tiny.weights(module), atol=1e-4, rtol=0)
    assert [m["optim/empty_steps"] for m in single.metrics] == [0, 2, 2, 2], (
        "no rank had anything in the second rollout"
    )
    first, second = (rank["unequal", strategy][1] for rank in ranks)
    assert first != second
    assert 0 in first
    assert 0 in second


def test_a_shared_trunk_that_broke_off_goes_on_to_the_bit_under_lightnings_own_strategy(ranks: Any) -> None:
    for rank in ranks:
        metrics, ids, weights, value_head = rank["whole"]
        (again,), (again_ids,), again_weights, again_head = rank["again"]
        assert again == metrics[2]
        assert again_ids == ids[2]
        assert torch.equal(again_weights, weights)
        assert torch.equal(again_head, value_head)
        assert value_head.abs().max() > 0


def test_monitors_decide_alike_on_all_ranks_and_as_in_one_process(ranks: Any, folder: Path, tmp_path: Path) -> None:
    expected = watched(1, "auto", tmp_path)
    first, second = (rank["watched"] for rank in ranks)
    for found in (first, second):
        assert found["targets"] == expected["targets"] == [1], "from before the first real sign, in rollout 2"
        assert found["stop"] == expected["stop"]
        assert found["stop"][0] == 5
        assert "all 1 rollbacks are spent" in found["stop"][1]
        assert found["clipped"] == expected["clipped"] >= 1
        assert found["steps"] == [1, 2, 3, 2, 3, 4, 5]
        agree(found["metrics"], expected["metrics"])
        torch.testing.assert_close(found["weights"], expected["weights"], atol=1e-4, rtol=0)
        torch.testing.assert_close(found["head"], expected["head"], atol=1e-4, rtol=1e-4)
    assert [a + b for a, b in zip(first["ids"], second["ids"], strict=True)] == expected["ids"]
    written, alone = told(folder / "watched"), told(tmp_path)
    assert written == alone
    assert sum(line[0] == "rollback" for line in written) == 1
    assert sum(line[0] == "clipped_step" for line in written) >= first["clipped"]
    names = [sorted(p.name for p in (where / flight.FOLDER).iterdir()) for where in (folder / "watched", tmp_path)]
    assert names[0] == names[1]
    assert any(name.startswith("learning_rate_too_high-") for name in names[0])
    recorded = flight.read_step(flight.step_file(folder / "watched" / flight.FOLDER, 5))
    assert recorded.tensors["lengths"].tolist() == [len(ids) for ids in first["ids"][-1]], "rank 0's part, once"


def told(folder: Path) -> list[tuple[Any, ...]]:
    """What was written down, without the numbers."""
    lines = read_journal(folder / "findings.jsonl")
    keys = ("event", "step", "kind", "diagnosis", "action", "target", "severity")
    return [tuple(str(line[key]) for key in keys if key in line) for line in lines]
