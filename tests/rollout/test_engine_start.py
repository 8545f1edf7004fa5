"""The start of an engine: begun beside the learner's own, built when prompts are known, finished or given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lit_grpo.data import InMemoryPrompts, PromptFormat
from lit_grpo.engines import make_engine
from lit_grpo.engines.config import EngineConfig
from lit_grpo.evaluation import EvaluationSet
from lit_grpo.rollout import engine_start
from lit_grpo.rollout.engine_start import EngineStarter
from lit_grpo.types import Sampling
from lit_grpo.utils import memory
from lit_grpo.utils.memory import MemoryShortageError
from tests import tiny

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

    ready = False

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
    starter.give_up()
    assert "close" not in start.notes, "what was finished belongs to who has the engine"


def test_an_engine_is_built_once_and_waits_until_it_is_taken_over(start: Start) -> None:
    starter = EngineStarter(EngineConfig())
    ready = [starter.ready]
    begun(starter)
    starter.build(lambda policy: "before the prompts are read")  # type: ignore[arg-type,return-value]
    starter.build(lambda policy: pytest.fail("built a second time"))
    assert start.notes == ["for outline", "build before the prompts are read"]
    ready.append(starter.ready)
    start.ready = True
    ready.append(starter.ready)
    starter.finish("for the policy", CPU)  # type: ignore[arg-type]
    ready.append(starter.ready)
    assert ready == [False, False, True, False], "once it is taken over it waits no longer"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((24, None), [("begun", 4), ("built", 28), ("read", 28)]),
        ((24, 30), [("begun", 4), ("built", 34), ("read", 34)]),
        ((None, None), [("begun", 4), ("read", 8), ("built", 8)]),
        # Of one set it is not known how long its prompts may be.
        ((24, "unknown"), [("begun", 4), ("read", 8), ("built", 8)]),
        # The model has no room for prompts of the length that is allowed.
        ((61, None), [("begun", 4), ("read", 8), ("built", 8)]),
    ],
)
def test_an_engine_that_knows_the_longest_prompt_does_not_wait_for_the_prompts(
    start: Start, monkeypatch: pytest.MonkeyPatch, limits: tuple[Any, Any], expected: list[tuple[str, int]]
) -> None:
    seen: list[tuple[str, int]] = []

    def begin(config: Any, context: Any) -> Start:
        seen.append(("begun", context.max_model_len))
        return start

    monkeypatch.setattr(engine_start, "begin_engine", begin)
    monkeypatch.setattr(start, "build", lambda context: seen.append(("built", context.max_model_len)))
    sampler = EngineConfig(name="transformers")
    monkeypatch.setattr(engine_start, "make_engine", lambda config, context, begun: make_engine(sampler, context))
    of_training, of_evaluation = limits
    own = PromptFormat(max_prompt_tokens=None if of_evaluation == "unknown" else of_evaluation)
    evaluation = EvaluationSet(prompts=InMemoryPrompts([{"question": "1+1=", "answer": "2"}]),
                               format=None if of_evaluation is None else own)  # fmt: skip
    data = tiny.data(
        rollouts=1, sampling=Sampling(max_new_tokens=4), format=PromptFormat(max_prompt_tokens=of_training),
        val={"mine": evaluation},
    )  # fmt: skip
    prepare = data.prepare_train_prompts

    def read(source: Any) -> None:
        prepare(source)
        seen.append(("read", data._engine_context(cast(Any, None)).max_model_len))

    monkeypatch.setattr(data, "prepare_train_prompts", read)
    tiny.trainer().fit(tiny.module(), datamodule=data)
    assert seen == expected


def test_an_engine_that_is_built_when_it_is_needed_is_told_the_longest_prompt_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    make = engine_start.make_engine

    def noted(config: Any, context: Any, begun: Any) -> Any:
        seen.append(context.max_model_len)
        return make(config, context, begun)

    monkeypatch.setattr(engine_start, "make_engine", noted)
    data = tiny.data(rollouts=1, sampling=Sampling(max_new_tokens=4), format=PromptFormat(max_prompt_tokens=24))
    tiny.trainer().fit(tiny.module(), datamodule=data)
    assert seen == [8]


def test_what_was_begun_is_given_up_once(start: Start) -> None:
    starter = EngineStarter(EngineConfig())
    begun(starter)
    starter.give_up()
    starter.give_up()
    starter.build(lambda policy: pytest.fail("built what was given up"))
    assert start.notes == ["for outline", "close"]
    assert starter.finish("again", CPU) == ("again", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("early", "expected", "said"),
    [
        (True, (7.0, 3.0), ["the engine was ready after 7.0 s, 3.0 s of which the learner waited."]),
        (False, (3.0, 3.0), ["the engine was ready after 3.0 s, all of which the learner waited."]),
    ],
)
def test_how_long_an_engine_took_counts_from_its_begin(
    start: Start, monkeypatch: pytest.MonkeyPatch, early: bool, expected: tuple[float, float], said: list[str]
) -> None:
    clock, heard = [100.0], list[str]()
    monkeypatch.setattr(engine_start, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(engine_start, "begins_early", lambda config: early)
    monkeypatch.setattr(engine_start, "make_engine", lambda *given: clock.__setitem__(0, clock[0] + 3.0))
    monkeypatch.setattr(engine_start, "rank_zero_info", heard.append)
    starter = EngineStarter(EngineConfig())
    begun(starter)
    clock[0] += 4.0
    starter.finish("for the policy", CPU)  # type: ignore[arg-type]
    assert starter.seconds == expected
    assert heard == said
    # One that was there at once is not worth a line.
    monkeypatch.setattr(engine_start, "make_engine", lambda *given: None)
    starter.finish("for the policy", CPU)  # type: ignore[arg-type]
    assert heard == said


def test_memory_that_runs_out_is_one_screen_and_what_failed_is_not_closed_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")

    asked, screen = list[Any](), memory.out_of_memory_error

    def noted(doing: str, device: Any, *args: Any, **options: Any) -> MemoryShortageError:
        asked.append((doing, device))
        return screen(doing, device, *args, **options)

    monkeypatch.setattr(memory, "out_of_memory_error", noted)
    monkeypatch.setattr(engine_start, "make_engine", fails)
    starter = EngineStarter(EngineConfig())
    begun(starter)
    with pytest.raises(MemoryShortageError) as error:
        starter.finish("for the policy", CPU)  # type: ignore[arg-type]
    assert error.value.where == "data.engine"
    assert asked == [("starting the engine", CPU)], "the screen tells what is free on the learner's device"
    # A start that fails has closed itself.
    starter.give_up()
    assert "close" not in start.notes
    assert starter.seconds is None


def test_an_engine_that_is_built_at_once_has_nothing_to_begin() -> None:
    starter = EngineStarter(EngineConfig(name="transformers"))
    starter.begin(lambda: pytest.fail("made an outline"), lambda policy: pytest.fail("made a context"))
    starter.build(lambda policy: pytest.fail("built"))
    assert starter.begun is None
