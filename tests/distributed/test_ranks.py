"""Two processes: what one rank learns of its prompts, all know."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp


def join(rank: int, port: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": "2",
    }
    torch.set_num_threads(1)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def worker(rank: int, port: int, folder: str) -> None:
    join(rank, port)
    from lit_grpo.objectives import ObjectiveConfig
    from tests import tiny

    module, recorder = tiny.module(objective=ObjectiveConfig(recipe="dcpo")), tiny.Recorder()
    trainer = tiny.trainer(devices=2, strategy="ddp", callbacks=[recorder])
    trainer.fit(module, datamodule=tiny.data(rollouts=2))
    seen = {"state": module.objective_state, "prompts": recorder.prompts, "weights": tiny.weights(module)}
    torch.save(seen, f"{folder}/{rank}.pt")


def critic_worker(rank: int, port: int, folder: str) -> None:
    """Train on this rank's group of each rollout."""
    join(rank, port)
    from tests.learner.helpers import part, rollout

    for trunk in ("separate", "shared"):
        found = train_critic(trunk, [part(rollout(seed=k), rank) for k in range(2)], devices=2, strategy="ddp")
        torch.save(found, f"{folder}/{trunk}{rank}.pt")


def train_critic(trunk: Any, batches: list[Any], **trainer: Any) -> dict[str, Any]:
    """A warm-up rollout and one of both, two updates each: weights after each, and metrics."""
    from lit_grpo.objectives import ObjectiveConfig
    from lit_grpo.policy import CriticConfig
    from tests import tiny
    from tests.learner.helpers import Given, Watch, vector

    module: Any = tiny.module(
        objective=ObjectiveConfig(recipe="ppo", gae_lambda=0.9),
        critic=CriticConfig(trunk=trunk, warmup_rollouts=1, measure_every=1),
        updates_per_rollout=2,
    )
    module.connect(tiny.context(2))
    watch = Watch()
    tiny.trainer(callbacks=[watch], **trainer).fit(module, Given(*batches))
    keys = ("value/explained_variance", "value/explained_variance_after", "value/outside", "critic/grad_norm")
    return {
        "policy": watch.policy,
        "critic": vector(module.critic or module.policy.value_head),
        "metrics": [{key: metrics[key] for key in keys} for metrics in watch.metrics],
    }


def test_a_critic_learns_the_same_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    from tests.learner.helpers import rollout

    mp.spawn(critic_worker, args=(free_port(), str(tmp_path)), nprocs=2)
    for trunk in ("separate", "shared"):
        expected = train_critic(trunk, [rollout(seed=k) for k in range(2)])
        for rank in range(2):
            found = torch.load(tmp_path / f"{trunk}{rank}.pt")
            # AdamW divides by the root of a gradient's square, and so makes rounding errors of tiny ones larger.
            torch.testing.assert_close(found["policy"], expected["policy"], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found["critic"], expected["critic"], atol=1e-4, rtol=1e-4)
            for a, b in zip(found["metrics"], expected["metrics"], strict=True):
                assert a == pytest.approx(b, abs=1e-3)
        assert torch.equal(expected["policy"][0], start()), "the warm-up leaves the policy alone"
        assert not torch.equal(expected["policy"][0], expected["policy"][1])


def start() -> torch.Tensor:
    from tests import tiny

    module = tiny.module()
    module.configure_model()
    return tiny.weights(module)


def test_the_history_of_every_prompt_is_that_of_all_ranks(tmp_path: Path) -> None:
    mp.spawn(worker, args=(free_port(), str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first["weights"], second["weights"])
    assert first["state"] == second["state"]
    visited: dict[str, Any] = {}
    for step in range(2):
        assert set(first["prompts"][step]).isdisjoint(second["prompts"][step])
        for name in {*first["prompts"][step], *second["prompts"][step]}:
            visited[name] = visited.get(name, 0) + 1
    assert {name: history[2] for name, history in first["state"]["prompts"].items()} == visited
