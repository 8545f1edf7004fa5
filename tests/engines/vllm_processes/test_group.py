"""Who is started when: one engine measures the card alone, and the others take what it has found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.engines.vllm_processes import group as module
from lit_grpo.engines.vllm_processes.group import EngineGroup


class StandIn:
    """A process that answers at once, and notes what all of them were told and read."""

    seen: list[tuple[Any, ...]]
    measures: int | None

    def __init__(self, *args: Any) -> None:
        self.answers: list[tuple[Any, ...]] = []

    def start(self) -> None:
        self.answers.clear()

    def stop(self) -> None:
        pass

    def send(self, message: tuple[Any, ...]) -> None:
        if message[0] == "prepare":
            self.answers.append(("prepared",))
        elif message[0] == "build":
            told = message[2].get("kv_cache_memory_bytes")
            self.seen.append(("build", told))
            facts = {"max_model_len": 64, "vocab_size": 9, "cache_bytes": None if told else self.measures}
            self.answers.append(("ready", facts))

    def receive(self, seconds: float | None = None) -> tuple[Any, ...]:
        answer = self.answers.pop(0)
        if answer[0] == "ready":
            self.seen.append(("ready",))
        return answer


def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: bool, measures: int | None, **options: Any) -> Any:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "EngineProcess", StandIn)
    monkeypatch.setattr(StandIn, "seen", [], raising=False)
    monkeypatch.setattr(StandIn, "measures", measures, raising=False)
    (tmp_path / "scratch").mkdir()
    build = ("folder", options, None)
    group = EngineGroup(3, build, tmp_path / "scratch", take=lambda i, m: None, lost=lambda i: None)
    group.start()
    group.close()
    assert not (tmp_path / "scratch").exists()
    return group


def test_one_measures_the_card_alone_and_the_others_take_its_size_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    group = started(tmp_path, monkeypatch, True, 700)
    assert StandIn.seen == [("build", None), ("ready",), ("build", 700), ("build", 700), ("ready",), ("ready",)]
    StandIn.seen.clear()
    group.closed = False
    group._start([1])
    assert StandIn.seen == [("build", 700), ("ready",)], "also one that is started again beside the learner"


def test_where_nothing_is_found_each_measures_in_its_turn(tmp_path: Path, monkeypatch: Any) -> None:
    started(tmp_path, monkeypatch, True, None)
    assert StandIn.seen == [("build", None), ("ready",)] * 3


@pytest.mark.parametrize(("card", "size"), [(True, 500), (False, 500)])
def test_a_given_size_is_taken_by_all_at_once(tmp_path: Path, monkeypatch: Any, card: bool, size: int) -> None:
    started(tmp_path, monkeypatch, card, None, kv_cache_memory_bytes=size)
    assert StandIn.seen == [("build", size)] * 3 + [("ready",)] * 3
