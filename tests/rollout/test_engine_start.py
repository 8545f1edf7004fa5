"""The start of an engine: begun beside the learner's own, built when prompts are known, finished or given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_grpo.engines.config import EngineConfig
from lit_grpo.rollout import engine_start
from lit_grpo.rollout.engine_start import EngineStarter

CPU = torch.device("cpu")


class Start:
    """Notes what happens to it."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def begin(self, config: Any, context: Any) -> Start:
        self.notes.append(str(context))
        return self

    def build(self, context: Any) -> None:
        self.notes.append(f"build {context}")

    def close(self) -> None:
        self.notes.append("close")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """What every engine's start is here."""
    made = Start()
    monkeypatch.setattr(engine_start, "begins_early", lambda config: True)
    monkeypatch.setattr(engine_start, "begin_engine", made.begin)
    monkeypatch.setattr(engine_start, "make_engine", lambda config, context, begun: (context, begun))
    return made


def begun(starter: EngineStarter) -> None:
    starter.begin(lambda: "outline", lambda policy: f"for {policy}")  # type: ignore[arg-type,return-value]


def test_an_engine_is_begun_for_an_outline_and_finished_for_the_policy(start: Start) -> None:
    starter = EngineStarter(EngineConfig())
    begun(starter)
    starter.build(lambda policy: f"with prompts for {policy}")  # type: ignore[arg-type,return-value]
    assert start.notes == ["for outline", "build with prompts for outline"]
    assert starter.seconds is None
    assert starter.finish("for the policy", CPU) == ("for the policy", start)  # type: ignore[arg-type]
    assert starter.seconds is not None
    assert starter.seconds.taken >= starter.seconds.waited
    starter.give_up()
    assert "close" not in start.notes, "what was finished belongs to who has the engine"


def test_what_was_begun_is_given_up_once(start: Start) -> None:
    starter = EngineStarter(EngineConfig())
    begun(starter)
    starter.give_up()
    starter.give_up()
    assert start.notes == ["for outline", "close"]
    assert starter.finish("again", CPU) == ("again", None)  # type: ignore[arg-type]


def test_an_engine_that_is_built_at_once_has_nothing_to_begin() -> None:
    starter = EngineStarter(EngineConfig(name="transformers"))
    starter.begin(lambda: pytest.fail("made an outline"), lambda policy: pytest.fail("made a context"))
    starter.build(lambda policy: pytest.fail("built"))
    assert starter.begun is None
