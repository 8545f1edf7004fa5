"""The number of engine processes is measured where it is left open, and the fastest is kept for later runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.commands.check import engines
from lit_grpo.commands.check.preflight import Preflight
from lit_grpo.engines import EngineConfig
from lit_grpo.engines.base import EngineError
from lit_grpo.engines.vllm_processes.choose import measured_key, read_measured
from lit_grpo.types import Completion, Request, Sampling
from tests import tiny

SECONDS = {1: 0.2, 2: 0.05, 3: 0.08, 4: 0.1}
"""What a generation takes with each number of processes."""
NOW = [0.0]
"""The clock that engines are measured by: what real ones take differs with what else the machine does."""
REQUESTS = [Request(i, (1, 2), (1, 2)) for i in range(3)]


class StandIn:
    """An engine whose speed depends on its number of processes."""

    def __init__(self, processes: int, seconds: float, fails: bool = False) -> None:
        self.processes, self.seconds, self.fails = processes, seconds, fails
        self.policy_version = -1
        self.generations = self.closed = 0

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        assert self.policy_version >= 0, "an engine without weights would sample nonsense"
        if self.fails:
            raise EngineError("out of memory\nat length")
        self.generations += 1
        NOW[0] += self.seconds
        for request in requests:
            for sample in range(len(request.seeds)):
                yield Completion(request.index, sample, (1,) * 50, (-1.0,) * 50, "length", self.policy_version)

    def sync(self, weights: Any, version: int) -> None:
        self.policy_version = version

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(engines, "time", SimpleNamespace(perf_counter=tick))


def tick() -> float:
    # No work at all takes no time at all; a rate needs some.
    NOW[0] += 1e-9
    return NOW[0]


def measured(first: int, seconds: dict[int, float], fails: int = 0) -> tuple[Any, list[StandIn]]:
    made: list[StandIn] = []

    def build(processes: int) -> StandIn:
        if processes not in seconds:
            raise EngineError(f"no memory for {processes}")
        made.append(StandIn(processes, seconds[processes], processes == fails))
        return made[-1]

    present = build(first)
    present.policy_version = 0
    result = engines.measure(present, build, lambda engine: engine.sync((), 0), REQUESTS, Sampling())
    return result, made


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_the_fastest_is_found_and_every_engine_is_asked_twice_and_closed(first: int) -> None:
    result, made = measured(first, SECONDS)
    assert (result.status, result.values["processes"]) == ("pass", 2)
    assert sorted(result.values["tokens_per_second"]) == [1, 2, 3, 4]
    assert result.values["tokens_per_second"][2] == pytest.approx(300 / 0.05)
    assert [engine.processes for engine in made] == [first, *(n for n in (1, 2, 3, 4) if n != first)]
    assert all(engine.generations == 2 and engine.closed for engine in made)
    assert "6 samples at once" in result.found


def test_a_little_more_speed_is_not_worth_the_memory() -> None:
    assert measured(1, {1: 0.1, 2: 0.099, 4: 0.098})[0].values["processes"] == 1


def test_a_number_that_does_not_start_or_sample_is_left_out_and_said() -> None:
    result, made = measured(1, {1: 0.1, 2: 0.02}, fails=2)
    assert result.values["processes"] == 1
    assert "2: out of memory" in result.found
    assert "4: no memory for 4" in result.found
    assert "at length" not in result.found
    assert all(engine.closed for engine in made)


def test_where_nothing_can_be_measured_the_table_says_so() -> None:
    result, _ = measured(1, {1: 0.1}, fails=1)
    assert result.status == "warn"
    assert "processes: 1" in result.remedy


def test_only_vllm_with_auto_on_a_card_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert engines.left_open(EngineConfig(name="vllm", processes="auto"))
    assert not engines.left_open(EngineConfig(name="vllm", processes=2))
    assert not engines.left_open(EngineConfig(name="transformers", processes="auto"))
    assert not engines.left_open(EngineConfig(name="vllm", processes="auto", custom_engine="my.Engine"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not engines.left_open(EngineConfig(name="vllm", processes="auto"))


@pytest.mark.parametrize("step", [True, False])
def test_the_preflight_measures_last_and_keeps_it(step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def make(config: EngineConfig, context: Any) -> StandIn:
        assert context.max_model_len > 2
        built.append(config.processes)  # type: ignore[arg-type]
        return StandIn(config.processes, SECONDS[config.processes])  # type: ignore[arg-type, index]

    monkeypatch.setattr(engines, "left_open", lambda config: True)
    monkeypatch.setattr("lit_grpo.commands.check.preflight.make_engine", make)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card 1")
    preflight = Preflight(2, step=step)
    module = tiny.module()
    tiny.trainer(callbacks=[preflight], limit_train_batches=1).fit(module, datamodule=tiny.data(rollouts=1))
    assert preflight.results[-1].name == "engine processes"
    assert built == [2, 3, 4]
    assert module.policy is not None
    kept = read_measured(measured_key(module.policy.model.config, "Card 1"))
    assert kept == preflight.results[-1].values["processes"]
