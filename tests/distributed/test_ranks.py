"""Two processes: what one rank learns of its prompts, all know."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig
from tests import tiny
from tests.learner.helpers import Given, Watch, part, rollout, vector
from tests.ranks import enter, on_two_ranks

pytestmark = pytest.mark.slow

BACKBONES = ("separate", "shared")


def job(rank: int, folder: str) -> dict[str, Any]:
    """A run with a history of prompts, and a critic of each kind that learns of this rank's group of each rollout."""
    enter(rank)
    module, recorder = tiny.module(objective=ObjectiveConfig(recipe="dcpo")), tiny.Recorder()
    trainer = tiny.trainer(devices=2, strategy="ddp", callbacks=[recorder])
    trainer.fit(module, datamodule=tiny.data(rollouts=2))
    out: dict[str, Any] = {
        "history": {
            "state": module.objective_state.to_dict(),
            "prompts": recorder.prompts,
            "weights": tiny.weights(module),
        }
    }
    for backbone in BACKBONES:
        enter(rank)
        batches = [part(rollout(seed=k), rank) for k in range(2)]
        out[backbone] = train_critic(backbone, batches, devices=2, strategy="ddp")
    return out


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_two_ranks(job, tmp_path_factory.mktemp("ranks"))


def train_critic(backbone: Any, batches: list[Any], **trainer: Any) -> dict[str, Any]:
    """A warm-up rollout and one of both, two updates each: weights after each, and metrics."""
    module: Any = tiny.module(
        objective=ObjectiveConfig(recipe="ppo", gae_lambda=0.9),
        critic=CriticConfig(backbone=backbone, warmup_rollouts=1, measure_every=1),
        updates_per_rollout=2,
    )
    module.connect(tiny.context(2))
    watch = Watch()
    tiny.trainer(callbacks=[watch], **trainer).fit(module, Given(*batches))
    keys = (
        "critic/explained_variance",
        "critic/explained_variance_after",
        "critic/value_outside_frac",
        "critic/grad_norm",
    )
    return {
        "policy": watch.policy,
        "critic": vector(module.critic or module.policy.value_head),
        "metrics": [{key: metrics[key] for key in keys} for metrics in watch.metrics],
    }


def test_a_critic_learns_the_same_on_two_ranks_as_on_one(ranks: list[dict[str, Any]]) -> None:
    for backbone in BACKBONES:
        expected = train_critic(backbone, [rollout(seed=k) for k in range(2)])
        for found in (rank[backbone] for rank in ranks):
            # AdamW divides by the root of a gradient's square, and so makes rounding errors of tiny ones larger.
            torch.testing.assert_close(found["policy"], expected["policy"], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found["critic"], expected["critic"], atol=1e-4, rtol=1e-4)
            for a, b in zip(found["metrics"], expected["metrics"], strict=True):
                assert a == pytest.approx(b, abs=1e-3)
        assert torch.equal(expected["policy"][0], start()), "the warm-up leaves the policy alone"
        assert not torch.equal(expected["policy"][0], expected["policy"][1])


def start() -> torch.Tensor:
    module = tiny.module()
    module.configure_model()
    return tiny.weights(module)


def test_the_history_of_every_prompt_is_that_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["history"] for rank in ranks)
    assert torch.equal(first["weights"], second["weights"])
    assert first["state"] == second["state"]
    visited: dict[str, Any] = {}
    for step in range(2):
        assert set(first["prompts"][step]).isdisjoint(second["prompts"][step])
        for name in {*first["prompts"][step], *second["prompts"][step]}:
            visited[name] = visited.get(name, 0) + 1
    assert {name: history[2] for name, history in first["state"]["prompts"].items()} == visited
