"""Who is started when: one engine measures the card alone, and the others take what it has found."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.engines import EngineError
from lit_grpo.engines.vllm_processes import group as module
from lit_grpo.engines.vllm_processes import reserve
from lit_grpo.engines.vllm_processes.group import EngineGroup
from lit_grpo.engines.vllm_processes.process import Gone


class StandIn:
    """A process that answers at once, and notes what all of them were told and read."""

    seen: list[tuple[Any, ...]]
    measures: int | None
    patience: float
    running = False

    def __init__(self, *args: Any) -> None:
        self.answers: list[tuple[Any, ...]] = []

    def start(self) -> None:
        self.answers.clear()

    def stop(self, kill: bool = False) -> None:
        pass

    def close(self) -> None:
        self.stop()

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
    monkeypatch.setattr(reserve, "EngineProcess", StandIn)
    monkeypatch.setattr(StandIn, "seen", [], raising=False)
    monkeypatch.setattr(StandIn, "measures", measures, raising=False)
    (tmp_path / "scratch").mkdir()
    build = ("folder", options, None)
    group = EngineGroup(
        3,
        build,
        tmp_path / "scratch",
        progress_seconds=300.0,
    )
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


# -------------------------------------------------------------------------------------------------- hanging


class Talking(StandIn):
    """A process at the end of a pipe, which is what it is until it is started again."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.connection, self.theirs = Pipe()
        self.stopped: list[bool] = []

    def receive(self, seconds: float | None = None) -> tuple[Any, ...]:
        return tuple(self.connection.recv())

    def stop(self, kill: bool = False) -> None:
        self.stopped.append(kill)


def listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool) -> tuple[EngineGroup, list[int]]:
    """Two processes that are busy or not until they are lost, and the list of those that are."""
    monkeypatch.setattr(reserve, "EngineProcess", Talking)
    lost: list[int] = []
    group = EngineGroup(
        2,
        ("folder", {}, None),
        tmp_path,
        progress_seconds=1.0,
    )
    group.connect(take=lambda i, m: None, lost=lost.append, busy=lambda i: busy and i not in lost)
    return group, lost


def test_a_process_that_takes_steps_does_not_hang_however_long_nothing_ends(tmp_path: Path, monkeypatch: Any) -> None:
    group, lost = listening(tmp_path, monkeypatch, True)
    speaker, over = group._processes[0], threading.Event()

    def speak() -> None:
        while not over.wait(0.05):
            speaker.theirs.send(("step",))  # type: ignore[attr-defined]

    thread = threading.Thread(target=speak)
    thread.start()
    try:
        for _ in range(400):
            group.receive()
            if lost:
                break
        assert lost == [1], "the silent one, although the other one speaks all the time"
        assert group._processes[1].stopped == [True]  # type: ignore[attr-defined]
        for _ in range(60):
            group.receive()
        assert 0 not in lost
    finally:
        over.set()
        thread.join()


def test_a_process_without_work_may_be_silent(tmp_path: Path, monkeypatch: Any) -> None:
    group, lost = listening(tmp_path, monkeypatch, False)
    for _ in range(40):
        group.receive()
    assert not lost


def test_a_caller_that_comes_late_has_not_waited(tmp_path: Path, monkeypatch: Any) -> None:
    """Rewards may take longer than a process may be silent."""
    group, lost = listening(tmp_path, monkeypatch, True)
    now = [0.0]
    # An hour passes between two looks, and nothing is waited for.
    monkeypatch.setattr(module, "wait", lambda connections, seconds: now.__setitem__(0, now[0] + 3600) or [])
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    for _ in range(15):
        group.receive()
    assert not lost
    for _ in range(10):
        group.receive()
    assert lost == [0, 1]


# -------------------------------------------------------------------------------------------------- deaths in a sync


def one_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineGroup:
    """Two processes, of which the second has died, and once more is too often."""
    group, _ = listening(tmp_path, monkeypatch, False)
    monkeypatch.setattr(group, "_deaths", module.RESTARTS)
    sent: list[Any] = []

    def dead(message: Any) -> None:
        raise Gone("it has died")

    group._processes[0].send = sent.append  # type: ignore[method-assign,assignment]
    group._processes[0].sent = sent  # type: ignore[attr-defined]
    group._processes[1].send = dead  # type: ignore[method-assign]
    return group


def test_what_was_asked_is_answered_before_a_death_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the answer of this sync would be taken for that of the next one, before its weights are there."""
    group = one_dead(tmp_path, monkeypatch)
    group._processes[0].theirs.send(("synced",))  # type: ignore[attr-defined]
    with pytest.raises(EngineError):
        group._load([0, 1], ("sync", 3, []))
    assert not group._processes[0].connection.poll(), "nothing is left to be taken for another answer"


def test_whoever_waits_for_blocks_hears_of_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = one_dead(tmp_path, monkeypatch)
    group._processes[0].theirs.send(("synced",))  # type: ignore[attr-defined]
    with pytest.raises(EngineError):
        group._load_blocks([0, 1], iter([("a", torch.ones(3))]), 3)
    kinds = [message[0] for message in group._processes[0].sent]  # type: ignore[attr-defined]
    assert kinds == ["sync", "break"]
    assert not group._processes[0].connection.poll()


def test_the_death_of_the_one_that_gives_its_weights_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted for both, two of them would already be too often."""
    group, lost = listening(tmp_path, monkeypatch, False)
    started: list[int] = []
    monkeypatch.setattr(group, "_start", started.extend)
    monkeypatch.setattr(group, "_weight_files", False)
    group._holds_weights[:] = [False, True]

    def dead(message: Any) -> None:
        raise Gone("it has died")

    group._processes[0].send = lambda message: None  # type: ignore[method-assign]
    group._processes[1].send = dead  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="all processes of vLLM died"):
        group.mend(3)
    assert lost == [1]
    assert group._deaths == 1
    # Started for the weights that it did not get, ended, and started once more to find that nobody has them.
    assert started == [0, 0]


class Twin:
    """A process that gives its weights as :mod:`lit_grpo.engines.vllm_processes.worker` does: two blocks."""

    def __init__(self) -> None:
        self.said, self.left = list[tuple[Any, ...]](), 0

    def send(self, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind == "give":
            self.said += [("buffer", "handle"), ("block", [1])]
            self.left = 2
        elif not self.left:
            self.said.append(("failed", EngineError(f"{kind} came")))
        else:
            self.left = self.left - 1 if kind == "taken" else 0
            self.said.append(("block", [2]) if self.left else ("end",))

    def receive(self, seconds: float | None = None) -> tuple[Any, ...]:
        return self.said.pop(0)

    def stop(self, kill: bool = False) -> None:
        raise AssertionError("nobody ends the one that has the weights")

    def close(self) -> None:
        pass


class Taker:
    """A process that takes a twin's weights, and meets something when a message of a kind comes."""

    def __init__(self, kind: str, error: Exception | None) -> None:
        self.kind, self.error, self.said, self.took = kind, error, list[tuple[Any, ...]](), list[str]()

    def send(self, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind == self.kind:
            self.kind = "nothing more"
            if self.error is None:
                raise Gone
            self.said.append(("failed", self.error))
            return
        self.took.append(kind)
        self.said += {"block": [("taken",)], "end": [("synced",)]}.get(kind, [])

    def receive(self, seconds: float | None = None) -> tuple[Any, ...]:
        return self.said.pop(0)

    def stop(self, kill: bool = False) -> None:
        self.said.clear()
        self.took.clear()

    def close(self) -> None:
        pass


NO_MEMORY = EngineError("no memory", transient=True)


# To the first two messages it answers nothing.
@pytest.mark.parametrize(
    ("kind", "error"),
    [*((kind, None) for kind in ("take", "buffer", "block", "end")), ("block", NO_MEMORY), ("end", NO_MEMORY)],
)
def test_whoever_takes_weights_may_fail_anywhere_and_the_next_attempt_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, error: Exception | None
) -> None:
    group, lost = listening(tmp_path, monkeypatch, False)
    taker, twin = Taker(kind, error), Twin()
    group._processes[:] = [taker, twin]  # type: ignore[list-item]
    monkeypatch.setattr(group, "_start", lambda which: None)
    monkeypatch.setattr(group, "_weight_files", False)
    group._holds_weights[:] = [False, True]
    if error is not None:
        with pytest.raises(EngineError, match="no memory"):
            group.mend(3)
        assert not lost
    group.mend(3)
    assert group.whole
    assert taker.took == ["take", "buffer", "block", "block", "end"]
    assert not twin.said, "nothing is left to be taken for another answer"
    assert lost == ([0] if error is None else [])
