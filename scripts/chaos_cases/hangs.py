"""Parts of a run that hang from its third rollout on, in Python or with the interpreter's lock held."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.rewards import Reward
from lit_grpo.types import Completion, Request, RewardInput, Sampling

HANGING = Path("hanging")
"""File in the folder of the run that is made when something begins to hang."""


def hang(holding_the_lock: bool = False) -> None:
    """Hang for good: asleep, or in one C call that never gives back the interpreter's lock."""
    HANGING.touch()
    if holding_the_lock:
        pow(3, 3**20)
    while True:
        time.sleep(600)


def function(item: RewardInput) -> float:
    """Reward half of all completions, until it hangs."""
    if item.completion.policy_version >= 2:
        hang()
    return float(sum(item.completion.token_ids) % 2 == 0)


def holds_the_lock(item: RewardInput) -> float:
    """Do as :func:`function`, but hang with the interpreter's lock."""
    if item.completion.policy_version >= 2:
        hang(holding_the_lock=True)
    return float(sum(item.completion.token_ids) % 2 == 0)


class HangingReward(Reward):
    """Reward class that says that it bounds its own work, and hangs."""

    score_limit = None

    def score(self, batch: Sequence[RewardInput]) -> list[float]:
        return [function(item) for item in batch]


class HangingClose(Reward):
    """Reward whose workers cannot be ended."""

    def score(self, batch: Sequence[RewardInput]) -> list[float]:
        if batch[0].completion.policy_version >= 2:
            HANGING.touch()
            time.sleep(600)
        return [float(sum(item.completion.token_ids) % 2 == 0) for item in batch]

    def close(self) -> None:
        time.sleep(600)


class HangingEngine(TransformersEngine):
    """Engine that does not come back from its third rollout."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        if self.policy_version >= 2:
            hang()
        yield from super().generate(requests, sampling)


class HangingCallback(Callback):
    """Callback that hangs after the second rollout."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            hang()


def config(data: Mapping[str, Any], callbacks: Sequence[str] = ()) -> dict[str, Any]:
    """Return the configuration of a run of six rollouts of a tiny model."""
    return {
        "model": {"policy": {"tiny": {"layers": 1, "width": 16, "heads": 2}}},
        "data": {
            "prompts": {"class_path": "lit_grpo.data.AdditionPrompts"},
            "group_size": 4,
            "prompts_per_rollout": 2,
            "rollouts": 6,
            "sampling": {"max_new_tokens": 2},
            **data,
        },
        "checkpoint": {"dirpath": "checkpoints"},
        "trainer": {"logger": False, "callbacks": [{"class_path": path} for path in callbacks]},
    }


HERE = __name__
FUNCTION = "lit_grpo.rewards.FunctionReward"


def _function(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": FUNCTION, "init_args": {"function": f"{HERE}.{name}", **arguments}}


IN_PROCESS = {"in_process": True, "limit": None}
FINE: dict[str, Any] = {"class_path": "tests.cli.test_fit.Even"}


def runs(judge_url: str) -> dict[str, dict[str, Any]]:
    """Return the configuration of each run that hangs, by what hangs; the judge's server never answers."""
    judge = {
        "class_path": "lit_grpo.rewards.JudgeReward",
        "init_args": {"url": judge_url, "model": "m", "limit": 1e6, "retries": 0},
    }
    engine = {"rewards": [FINE], "engine": {"custom_engine": f"{HERE}.HangingEngine"}}
    return {
        "reward function, in process": config({"rewards": [_function("function", **IN_PROCESS)]}),
        "reward function, in a worker without a limit": config({"rewards": [_function("function", limit=None)]}),
        "reward function, holding the lock": config({"rewards": [_function("holds_the_lock", **IN_PROCESS)]}),
        "reward class": config({"rewards": [{"class_path": f"{HERE}.HangingReward"}]}),
        "reward that does not close": config({"rewards": [{"class_path": f"{HERE}.HangingClose"}]}),
        "judge": config({"rewards": [judge]}),
        "engine": config(engine),
        "callback": config({"rewards": [FINE]}, [f"{HERE}.HangingCallback"]),
    }
