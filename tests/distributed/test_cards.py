"""Ranks on cards of their own, over NCCL, take the steps of one process on one card."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import pytest
import torch

from lit_grpo.distributed.sharding import ShardingConfig
from lit_grpo.engines import EngineConfig, EngineContext, NamedWeights
from lit_grpo.policy import OptimizerConfig
from lit_grpo.types import Completion, Request, Sampling
from tests import tiny
from tests.distributed.sharded import Unequal, fit
from tests.distributed.test_sharded import KEYS, RUNS, seen
from tests.ranks import enter, on_ranks

CARDS = torch.cuda.device_count()
NAME = "frozen reference"
STRATEGIES = ("ddp", "fsdp")

pytestmark = pytest.mark.slow


class DictatedEngine:
    """Ids are drawn by the seed alone, and the policy says how likely each was.

    Where a policy draws them, another order of the sums on a card is enough for another id, once in some thousand.
    """

    def __init__(self, model: Any) -> None:
        # A copy: what it is given may be the learner's own.
        self.model, self.policy_version = copy.deepcopy(model).to("cpu"), -1

    @classmethod
    def from_context(cls, context: EngineContext) -> Self:
        return cls(context.policy.without_adapters())

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        for request in requests:
            for number, seed in enumerate(request.seeds):
                generator = torch.Generator().manual_seed(seed)
                length = int(torch.randint(1, sampling.max_new_tokens + 1, (1,), generator=generator))
                ids = torch.randint(3, 12, (length,), generator=generator).tolist()
                logits = self.model(input_ids=torch.tensor([[*request.token_ids, *ids]])).logits[0].float()
                logprobs = (logits[-length - 1 : -1] / sampling.temperature).log_softmax(-1)
                chances = logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist()
                yield Completion(request.index, number, tuple(ids), tuple(chances), "length", self.policy_version)

    def sync(self, weights: NamedWeights, version: int) -> None:
        self.model.load_state_dict({name: weight.cpu() for name, weight in weights}, strict=False)
        self.policy_version = version

    def close(self) -> None:
        self.model = None


def run(ranks: int, strategy: str, accelerator: str) -> tuple[Any, Unequal]:
    settings, data = RUNS[NAME]
    changes = {
        "micro_batch_size": 3,
        "zero_advantage_samples": None,
        # In float32, as on a CPU: in bfloat16 the order of a sum shows.
        "sharding": ShardingConfig(param_dtype="float32"),
        # Adam makes a step of a gradient that is nothing but rounding.
        "optimizer": OptimizerConfig(type="torch.optim.SGD", lr=1.0, weight_decay=0.0),
    }
    engine = EngineConfig(custom_engine=f"{__name__}.DictatedEngine")
    module = tiny.module(**(changes | settings))
    return module, fit(
        module, tiny.data(engine=engine, **data), ranks=ranks, strategy=strategy, accelerator=accelerator
    )


def job(rank: int, folder: str, count: int, accelerator: str) -> dict[str, Any]:
    out = {}
    for strategy in STRATEGIES:
        enter(rank, count)
        module, recorder = run(count, strategy, accelerator)
        out[strategy] = seen(module, recorder) | {"sharded": module.sharded}
        out[strategy]["weights"] = out[strategy]["weights"].cpu()
    return out


def gaps(found: Sequence[dict[str, float]], expected: Sequence[dict[str, float]]) -> list[str]:
    """What differs of the numbers that must not; where one does, of all numbers, which tells where it comes from."""

    def differing(keys: Iterable[str]) -> list[str]:
        return [
            f"step {step}, {key}: {one.get(key, math.nan):.8f} instead of {other[key]:.8f}"
            for step, (one, other) in enumerate(zip(found, expected, strict=True))
            for key in keys
            if key in other and one.get(key, math.nan) != pytest.approx(other[key], abs=1e-4)
        ]

    return differing(KEYS) and differing(sorted(expected[0]))


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_ranks_take_the_steps_of_one_process_or_card(tmp_path: Any, accelerator: str) -> None:
    if accelerator == "cuda" and CARDS < 2:
        pytest.skip("needs two cards")
    count = 4 if accelerator == "cuda" and CARDS >= 4 else 2
    # The card before the CPU, whose run may leave something behind in this process.
    singles = {name: run(1, "auto", name) for name in ([accelerator, "cpu"] if accelerator == "cuda" else ["cpu"])}
    module, single = singles["cpu"]
    found = {f"one {name}": gaps(recorder.metrics, single.metrics) for name, (_, recorder) in singles.items()}
    ranks = on_ranks(count, partial(job, count=count, accelerator=accelerator), tmp_path)
    for strategy in STRATEGIES:
        each = [rank[strategy] for rank in ranks]
        assert [one["sharded"] for one in each] == [strategy == "fsdp"] * count
        for step in range(len(single.metrics)):
            assert [ids for one in each for ids in one["ids"][step]] == single.ids[step], "the same completions"
        for number, one in enumerate(each):
            found[f"{strategy}, rank {number}"] = gaps(one["metrics"], single.metrics)
            away = float((one["weights"] - tiny.weights(module).cpu()).abs().max())
            found[f"{strategy}, rank {number}, weights"] = [] if away <= 1e-4 else [f"{away:.6f} away"]
    assert not any(found.values()), "\n".join(f"{who}: {what}" for who, what in found.items())
    assert sum(metrics["optim/grad_norm"] for metrics in single.metrics) > 0.1
