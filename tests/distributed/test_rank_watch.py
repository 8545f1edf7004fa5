"""The watch over ranks, three of them as threads of this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from lit_grpo.distributed import rank_callback
from lit_grpo.distributed.rank_callback import RankCallback
from lit_grpo.distributed.rank_watch import INTERVAL, Loss, RankWatch
from lit_grpo.utils.memory import MemoryShortageError
from tests.waiting import wait_until


class Ranks:
    """Three watches that know each other."""

    def __init__(self, silence: float = 60.0) -> None:
        self.losses: dict[int, list[Loss]] = {rank: [] for rank in range(3)}
        self.watches = [RankWatch(rank, silence, self.losses[rank].append) for rank in range(3)]
        self.offer: Any = None
        offered = threading.Event()

        def broadcast(value: Any) -> Any:
            if value is not None:
                self.offer = value
                offered.set()
            assert offered.wait(30)
            return self.offer

        for watch in self.watches:
            watch.start(broadcast, "127.0.0.1")

    def stop(self) -> None:
        for watch in self.watches:
            watch.stop()


@pytest.fixture
def ranks():
    made = Ranks()
    wait_until(lambda: sum(p.process is not None for p in made.watches[0]._peers) == 2, "both ranks have connected")
    yield made
    made.stop()


def test_a_run_that_ends_well_loses_nobody(ranks):
    ranks.watches[2].stop()
    ranks.watches[1].stop()
    ranks.watches[0].stop()
    assert ranks.losses == {0: [], 1: [], 2: []}


def test_rank_0_may_end_first(ranks):
    ranks.watches[0].stop()
    wait_until(lambda: not ranks.watches[1]._thread.is_alive(), "rank 1 has heard the goodbye")
    assert ranks.losses[1] == ranks.losses[2] == []


def test_a_connection_that_breaks_is_a_death_and_all_hear_of_it(ranks):
    ranks.watches[2]._peers[0].connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: ranks.losses[0] and ranks.losses[1], "the others know")
    assert str(ranks.losses[0][0]).startswith("rank 2 (process ")
    assert str(ranks.losses[0][0]).endswith("has died")
    assert (ranks.losses[1][0].process.rank, ranks.losses[1][0].told) == (2, True)


def test_what_a_rank_broke_off_with_is_told(ranks):
    ranks.watches[1].stop("ValueError: no such column")
    wait_until(lambda: ranks.losses[0] and ranks.losses[2], "the others know")
    assert "broke off: ValueError: no such column" in str(ranks.losses[0][0])
    assert ranks.losses[0][0].kind == "broke off"


def test_a_silent_rank_is_lost(monkeypatch):
    made = Ranks(silence=2 * INTERVAL)
    wait_until(lambda: sum(p.process is not None for p in made.watches[0]._peers) == 2, "both ranks have connected")
    made.watches[1]._tell = lambda word: None  # type: ignore[method-assign]
    wait_until(lambda: made.losses[0], "rank 1 is missed")
    assert (made.losses[0][0].process.rank, made.losses[0][0].kind) == (1, "silent")
    made.stop()


@pytest.mark.parametrize(
    "hello",
    [b"{}\n", b"nonsense\n", b'{"token": "guessed", "rank": 1, "pid": 1, "host": "", "began": ""}\n', b"x" * 9000],
)
def test_a_stranger_is_not_listened_to(ranks, hello):
    host, port, _, _ = ranks.offer
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(hello)
        wait_until(lambda: len(ranks.watches[0]._peers) == 3, "the stranger was let in")
        wait_until(lambda: ranks.watches[0]._peers[2].gone, "and shown out")
    assert ranks.losses == {0: [], 1: [], 2: []}


def test_a_child_that_ends_first_does_not_kill_rank_0() -> None:
    """Lightning's launcher would, where the child's exit code is above 0, as it is after SIGTERM."""
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(143)"])
    observer = _ChildProcessObserver(os.getpid(), [child], sleep_period=1)
    killed: list[int] = []
    observer._terminate_all = lambda: killed.append(1)  # type: ignore[method-assign]
    observer.start()
    rank_callback.let_children_end()
    assert child.wait() == 143
    observer.join(30)
    assert not observer.is_alive()
    assert killed == []


def test_a_child_that_dies_while_ranks_are_watched_does_not_kill_rank_0() -> None:
    """The watch names it, and ends the run with its MLflow run; Lightning's launcher would be there at once too."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    observer = _ChildProcessObserver(os.getpid(), [child], sleep_period=1)
    killed: list[int] = []
    observer._terminate_all = lambda: killed.append(1)  # type: ignore[method-assign]
    observer.start()
    callback = RankCallback()
    strategy = SimpleNamespace(broadcast=lambda value: value)
    callback._start_watch(cast(Any, SimpleNamespace(global_rank=0, num_nodes=1, strategy=strategy)), 30.0)
    child.kill()
    child.wait()
    observer.join(30)
    assert not observer.is_alive()
    assert killed == []
    assert callback._watch is not None
    callback._watch.stop()


ERRORS = [
    (ValueError("no such column\nand more"), ["broke off: ValueError: no such column. The run cannot"], ["and more"]),
    (
        MemoryShortageError("memory ran out.", where="model.micro_batch_tokens", remedy="set it to 26"),
        [
            "broke off: MemoryShortageError: memory ran out. The run cannot go on without it and ends.\n",
            "  where: model.micro_batch_tokens\n",
            "  remedy: set it to 26",
        ],
        ["ran out.."],
    ),
    (RuntimeError(""), ["broke off: RuntimeError: . The run cannot go on"], []),
]


@pytest.mark.parametrize(("error", "says", "leaves_out"), ERRORS, ids=["error", "bad input", "without a text"])
def test_rank_0_says_what_another_rank_met_and_what_to_do(
    error: Exception, says: list[str], leaves_out: list[str], ranks: Any, monkeypatch: Any, capfd: Any
) -> None:
    """Rank 1 alone may have met it: a port that is taken, memory that ran out."""
    ended: list[int] = []
    monkeypatch.setattr(rank_callback.os, "_exit", ended.append)
    monkeypatch.setattr(rank_callback, "_TOGETHER_SECONDS", 0.0)
    monkeypatch.setattr(rank_callback, "_COLLECTIVE_SECONDS", 0.0)
    first, second = RankCallback(), RankCallback()
    second._watch = ranks.watches[1]
    second.on_exception(cast(Any, None), cast(Any, None), error)
    wait_until(lambda: bool(ranks.losses[0]), "rank 0 hears of it")
    first._on_loss(ranks.losses[0][0])
    assert ended == [1]
    text = capfd.readouterr().err
    assert text.startswith("lit-grpo: rank 1 (process ")
    for words in says:
        assert words in text
    for words in leaves_out:
        assert words not in text
