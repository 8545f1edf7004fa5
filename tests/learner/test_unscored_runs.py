"""Runs whose rewards leave completions out: on two ranks, cut and resumed, and as a tracker sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.rewards import Reward
from tests import tiny
from tests.ranks import enter, on_two_ranks

ROLLOUTS = 4


class Picky(Reward):
    """Reward of 1 for an even sum of the ids, and none at all where it is divisible by 3."""

    def score(self, batch: Any) -> list[Any]:
        sums = [sum(item.completion.token_ids) for item in batch]
        return [None if total % 3 == 0 else float(total % 2 == 0) for total in sums]


def train(folder: Path, *, rollouts: int = ROLLOUTS, resume: Path | None = None, **trainer: Any) -> dict[str, Any]:
    pl.seed_everything(3)
    module, watch = tiny.module(updates_per_rollout=2), tiny.Recorder()
    saver = RolloutCheckpoint(every_n_rollouts=2)
    fit = tiny.trainer(callbacks=[watch, saver], enable_checkpointing=True, default_root_dir=folder, **trainer)
    data = tiny.data(rewards=[Picky()], rollouts=rollouts)
    fit.fit(module, datamodule=data, ckpt_path=None if resume is None else str(resume))
    return {"metrics": watch.metrics, "ids": watch.ids, "weights": tiny.weights(module)}


def of_ranks(rank: int, folder: str) -> dict[str, Any]:
    enter(rank)
    return train(Path(folder) / "run", devices=2, strategy="ddp")


def unscored(metrics: list[dict[str, float]]) -> list[float]:
    return [one["completions/unscored_frac"] for one in metrics]


@pytest.mark.slow
def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone")
    assert any(0 < share < 1 for share in unscored(alone["metrics"])), "some were left out, and not all"
    for of_rank in on_two_ranks(of_ranks, tmp_path):
        torch.testing.assert_close(of_rank["weights"], alone["weights"], rtol=1e-4, atol=1e-4)
        for found, expected in zip(of_rank["metrics"], alone["metrics"], strict=True):
            for key in ("reward", "groups/zero_std_frac", "groups/all_wrong_frac", "optim/grad_norm"):
                assert found[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key


def test_a_run_that_is_cut_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    (saved,) = (tmp_path / "whole").rglob("rollout-*02.ckpt")
    rest = train(tmp_path / "rest", resume=saved)
    assert rest["ids"] == whole["ids"][2:]
    assert torch.equal(rest["weights"], whole["weights"])
    for found, expected in zip(rest["metrics"], whole["metrics"][2:], strict=True):
        assert {k: v for k, v in found.items() if k.split("/")[0] in ("reward", "groups", "policy", "optim")} == {
            k: v for k, v in expected.items() if k.split("/")[0] in ("reward", "groups", "policy", "optim")
        }
