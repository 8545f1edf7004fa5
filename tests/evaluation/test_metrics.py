"""The torchmetrics: the estimators' means, and the same numbers whatever ranks hold which prompts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.evaluation import AvgAtK, BestOfK, MajAtK, PassAtK, PromptMean
from lit_grpo.evaluation.estimators import best_of_k, pass_at_k, standard_error
from tests.evaluation.votes import maj_at_k
from tests.ranks import WORLD, on_two_ranks

PROMPTS, SAMPLES, KS = 7, 6, [1, 2, 6]


def made() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    classes = torch.randint(-1, 4, (PROMPTS, SAMPLES), generator=generator)
    correct = classes == torch.arange(PROMPTS)[:, None] % 3
    scores = torch.rand(PROMPTS, SAMPLES, generator=generator)
    return {"classes": classes, "correct": correct, "scores": scores}


def all_metrics(rows: list[int]) -> dict[str, float]:
    """What all metrics say after these prompts, in updates of two."""
    data = made()
    metrics: list[Any] = [PassAtK(KS), MajAtK(KS), AvgAtK(SAMPLES), BestOfK(KS, "logprob"), PromptMean(["length"])]
    for start in range(0, len(rows), 2):
        part = rows[start : start + 2]
        names = [f"p{i}" for i in part]
        correct, classes, scores = (data[key][part] for key in ("correct", "classes", "scores"))
        metrics[0].update(correct, names)
        metrics[1].update(correct, classes, names)
        metrics[2].update(correct, names)
        metrics[3].update(correct, scores, names)
        metrics[4].update(scores.mean(1, keepdim=True), names)
    return {key: float(value) for metric in metrics for key, value in metric.compute().items()}


def test_metrics_are_the_means_of_the_estimators() -> None:
    data, got = made(), all_metrics(list(range(PROMPTS)))
    for k in KS:
        passed = [pass_at_k(SAMPLES, int(c), k) for c in data["correct"].sum(1)]
        voted = [
            maj_at_k([None if a < 0 else a for a in row], i % 3, k) for i, row in enumerate(data["classes"].tolist())
        ]
        best = [best_of_k(s, c, [k])[0] for s, c in zip(data["scores"].tolist(), data["correct"].tolist(), strict=True)]
        for name, values in ((f"pass@{k}", passed), (f"maj@{k}", voted), (f"best@{k}/logprob", best)):
            assert got[name] == pytest.approx(sum(values) / PROMPTS)
            assert got[f"{name}/se"] == pytest.approx(standard_error(values))
    assert got["avg@6"] == pytest.approx(got["pass@1"])
    assert got["avg@6"] == pytest.approx(float(data["correct"].double().mean()))


def test_a_prompt_that_comes_twice_counts_once() -> None:
    assert all_metrics([*range(PROMPTS), 0, 3]) == all_metrics(list(range(PROMPTS)))


def test_unknown_values_are_left_out_of_their_mean() -> None:
    metric = PromptMean(["a", "b"])
    metric.update(torch.tensor([[1.0, math.nan], [3.0, 5.0]]), ["x", "y"])
    got = metric.compute()
    assert (float(got["a"]), float(got["b"])) == (2.0, 5.0)
    assert float(got["a/se"]) == pytest.approx(1.0)
    assert math.isnan(float(got["b/se"]))
    metric.reset()
    assert math.isnan(float(metric.compute()["a"]))


def test_wrong_use_is_refused() -> None:
    with pytest.raises(UserError, match="k is"):
        PassAtK([0, 1])
    with pytest.raises(ValueError, match="expected 4"):
        AvgAtK(4).update(torch.ones(1, 3), ["x"])
    with pytest.raises(UserError, match="k = 9"):
        PassAtK([9]).update(torch.ones(1, 3), ["x"])


SHARDS = {
    "uneven": ([0, 2, 4, 6, 5], [1, 3]),
    "padded": ([0, 2, 4, 6], [1, 3, 5, 0]),  # as Lightning's distributed sampler makes them
    "empty": (list(range(PROMPTS)), []),
}


def job(rank: int, folder: str) -> dict[str, dict[str, float]]:
    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORLD)
    return {name: all_metrics(shards[rank]) for name, shards in SHARDS.items()}


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one(tmp_path: Path) -> None:
    whole = all_metrics(list(range(PROMPTS)))
    for rank in on_two_ranks(job, tmp_path):
        for name, got in rank.items():
            assert got == whole, name
