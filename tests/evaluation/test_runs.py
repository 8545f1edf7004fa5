"""Evaluation inside Lightning: several sets, one process or two, during a fit."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch

from lit_grpo.data import AdditionPrompts
from lit_grpo.evaluation import EvaluationSet
from lit_grpo.evaluation.writer import EvaluationWriter
from lit_grpo.tracking import read_metrics
from tests import tiny
from tests.ranks import enter, on_two_ranks


class Answers(tiny.EvenReward):
    """As its base, and the text is the answer."""

    def final_answers(self, batch: Any) -> list[str | None]:
        return [item.text or None for item in batch]


def data(**changes: Any) -> Any:
    sets = {
        "seven": EvaluationSet(AdditionPrompts(digits=1, n=7), samples=4, greedy=True),
        "one": EvaluationSet(AdditionPrompts(digits=1, n=1, seed=5), samples=2),
    }
    return tiny.data(rewards=[Answers()], prompts_per_rollout=2, **({"val": sets} | changes))


def validated(**changes: Any) -> dict[str, float]:
    module, trainer = tiny.module(), tiny.trainer(**changes)
    torch.manual_seed(0)
    trainer.validate(module, datamodule=data(), verbose=False)
    assert module.evaluation is not None
    return module.evaluation.metrics()


def job(rank: int, folder: str) -> dict[str, float]:
    enter(rank)
    return validated(devices=2, strategy="ddp")


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    """Seven questions in batches of two, and a set of one that the second process has nothing of."""
    both = on_two_ranks(job, tmp_path)
    alone = validated()
    assert alone["val/seven/prompts"] == 7
    assert alone["val/one/prompts"] == 1
    assert 0 < alone["val/seven/pass@1"] < alone["val/seven/pass@4"]
    assert {"val/seven/maj@4", "val/seven/best@4/logprob", "val/seven/greedy"} < set(alone)
    assert both == [alone] * 2


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_untrained_policy_is_evaluated_as_step_0_and_changes_nothing(tmp_path: Path, staleness: int) -> None:
    def rows(name: str, steps: int) -> dict[int, dict[str, Any]]:
        trainer = tiny.trainer(
            default_root_dir=str(tmp_path / name),
            callbacks=[EvaluationWriter()],
            num_sanity_val_steps=steps,
            val_check_interval=2,
            check_val_every_n_epoch=None,
        )
        torch.manual_seed(0)
        trainer.fit(tiny.module(max_staleness=staleness), datamodule=data(rollouts=2))
        found = {row.pop("step"): row for row in read_metrics(tmp_path / name)}
        clocks = ("time/", "wall_time", "memory/", "system/")
        return {step: {k: v for k, v in row.items() if not k.startswith(clocks)} for step, row in found.items()}

    torch.manual_seed(0)
    module = tiny.module()
    tiny.trainer().validate(module, datamodule=data(), verbose=False)
    assert module.evaluation is not None
    whole, few, none = rows("whole", -1), rows("few", 1), rows("none", 0)
    assert whole.pop(0) == pytest.approx(module.evaluation.metrics(), abs=1e-6)
    written = {
        name: sorted(path.name for path in (tmp_path / name / "evaluation").iterdir()) for name in ("whole", "few")
    }
    assert written == {"whole": ["val_000000", "val_000002"], "few": ["val_000002"]}
    # The first evaluation that follows one of the same questions says how they have changed.
    assert whole[2].pop("val/seven/reward/change") == pytest.approx(
        whole[2]["val/seven/reward"] - module.evaluation.metrics()["val/seven/reward"]
    )
    for key in ("val/seven/reward/change/se", "val/one/reward/change", "val/one/reward/change/se"):
        whole[2].pop(key, None)
    assert whole == few == none


def test_held_out_sets_during_a_fit_are_logged_under_their_names() -> None:
    class Held(tiny.pl.Callback):
        def __init__(self) -> None:
            self.seen: list[dict[str, float]] = []

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")})

    held = Held()
    trainer = tiny.trainer(callbacks=[held], val_check_interval=2, check_val_every_n_epoch=None)
    trainer.fit(tiny.module(), datamodule=data(rollouts=4))
    assert len(held.seen) == 2
    first, last = held.seen
    assert first["val/reward"] == pytest.approx((first["val/seven/reward"] + first["val/one/reward"]) / 2)
    assert first["val/pass@1"] == pytest.approx((first["val/seven/pass@1"] + first["val/one/pass@1"]) / 2)
    assert first["val/seven/length"] > 0
    assert first != last, "the policy has moved"


def test_the_same_samples_again_whatever_else_is_evaluated() -> None:
    whole = validated()
    module, trainer = tiny.module(), tiny.trainer()
    torch.manual_seed(0)
    only = {"seven": EvaluationSet(AdditionPrompts(digits=1, n=7), samples=4, greedy=True)}
    trainer.validate(module, datamodule=data(val=only), verbose=False)
    assert module.evaluation is not None
    for key, value in module.evaluation.metrics().items():
        if key.startswith("val/seven/"):
            assert whole[key] == value


def test_the_change_since_the_best_evaluation_is_that_of_each_question_and_outlives_a_checkpoint(
    tmp_path: Path,
) -> None:
    class Held(tiny.pl.Callback):
        def __init__(self) -> None:
            self.now: dict[str, list[float]] = {}
            self.rewards: list[dict[str, float]] = []
            self.seen: list[dict[str, float]] = []

        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, *args: Any, **kwargs: Any
        ) -> None:
            for record in outputs["records"]:
                if record["set"] == "seven" and not record["greedy"]:
                    self.now.setdefault(record["id"], []).append(record["reward"])

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.rewards.append({prompt: mean(rewards) for prompt, rewards in self.now.items()})
            self.now = {}
            self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/seven")})

    held, module = Held(), tiny.module()
    trainer = tiny.trainer(callbacks=[held], val_check_interval=1, check_val_every_n_epoch=None)
    trainer.fit(module, datamodule=data(rollouts=4))
    assert "val/seven/reward/change" not in held.seen[0]
    assert all("val/one/reward/change" not in seen for seen in held.seen), "one question has no error"
    best = held.rewards[0]
    for seen, rewards in zip(held.seen[1:], held.rewards[1:], strict=True):
        changes = [rewards[prompt] - best[prompt] for prompt in best]
        assert len(changes) == 7
        assert seen["val/seven/reward/change"] == pytest.approx(mean(changes))
        assert seen["val/seven/reward/change/se"] == pytest.approx(stdev(changes) / 7**0.5)
        best = rewards if mean(changes) > 0 else best
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    saved = torch.load(tmp_path / "run.ckpt", weights_only=True)["lit_grpo"]["best_held_out"]
    assert sorted(saved["seven"].values()) == pytest.approx(sorted(best.values()))
    again = tiny.module()
    again.on_load_checkpoint(torch.load(tmp_path / "run.ckpt", weights_only=True))
    assert again.best_held_out == saved
