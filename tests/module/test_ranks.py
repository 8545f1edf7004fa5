"""Two processes: what one rank learns of its prompts, all know."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp


def worker(rank: int, port: int, folder: str) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": "2",
    }
    torch.set_num_threads(1)
    from lit_grpo.objectives import ObjectiveConfig
    from tests import tiny

    module, recorder = tiny.module(objective=ObjectiveConfig(recipe="dcpo")), tiny.Recorder()
    trainer = tiny.trainer(devices=2, strategy="ddp", callbacks=[recorder])
    trainer.fit(module, datamodule=tiny.data(rollouts=2))
    seen = {"state": module.objective_state, "prompts": recorder.prompts, "weights": tiny.weights(module)}
    torch.save(seen, f"{folder}/{rank}.pt")


def test_the_history_of_every_prompt_is_that_of_all_ranks(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, args=(port, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first["weights"], second["weights"])
    assert first["state"] == second["state"]
    visited: dict[str, Any] = {}
    for step in range(2):
        assert set(first["prompts"][step]).isdisjoint(second["prompts"][step])
        for name in {*first["prompts"][step], *second["prompts"][step]}:
            visited[name] = visited.get(name, 0) + 1
    assert {name: history[2] for name, history in first["state"]["prompts"].items()} == visited
