"""One call in a confined process: its number comes back, and whatever else it does stays there."""

import math
import os
import signal
import time
from pathlib import Path

import pytest

from lit_grpo.rewards.isolation import sandbox
from lit_grpo.rewards.isolation.confined_call import ConfinedCallError, call_confined
from lit_grpo.rewards.isolation.sandbox import Limits

MISSING = sandbox.check()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no sandbox here: {MISSING}")
LIMITS = Limits(memory=4 << 30, cpu=20)
changed: list[int] = []


def test_the_number_comes_back_and_changes_stay_behind():
    def call() -> float:
        changed.append(1)
        return 0.25

    assert call_confined(call, LIMITS) == 0.25
    assert math.isnan(call_confined(lambda: math.nan, LIMITS))
    assert not changed


def write_too_much() -> float:
    os.write(3, b"v" * 5000)
    os._exit(0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: os._exit(0), "ended without an answer"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended without an answer"),
        (lambda: exec("raise SystemExit(0)"), "SystemExit"),
        (lambda: None, "TypeError"),
        (write_too_much, "v"),
    ],
)
def test_a_call_without_a_number_is_an_error(call, words):
    with pytest.raises(ConfinedCallError, match=words):
        call_confined(call, LIMITS)


@pytest.mark.parametrize(
    "what",
    [
        lambda folder: (folder / "victim").read_text(),
        lambda folder: (folder / "new").write_text("x"),
        lambda folder: os.fork(),
        lambda folder: os.kill(os.getppid(), 0),
        lambda folder: Path("/proc/self/environ").read_bytes(),
        lambda folder: os.environ["A_SECRET"],
        lambda folder: os.write(9, b"x"),
    ],
)
def test_nothing_of_the_machine_is_reached(what, tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "x")
    (tmp_path / "victim").write_text("x")

    def call() -> float:
        what(tmp_path)
        return 1.0

    with pytest.raises(ConfinedCallError, match=r"PermissionError|KeyError|OSError"):
        call_confined(call, LIMITS)
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]


def test_a_folder_that_is_named_can_be_read(tmp_path):
    (tmp_path / "data").write_text("0.5")
    assert call_confined(lambda: float((tmp_path / "data").read_text()), LIMITS, [str(tmp_path)]) == 0.5


def children() -> set[str]:
    """Return the children of this process, those that have ended and were not waited for too."""
    return {child for tasks in Path("/proc/self/task").glob("*/children") for child in tasks.read_text().split()}


def test_no_process_is_left():
    # Other tests of this process may have left theirs.
    before = children()
    call_confined(lambda: 1.0, LIMITS)
    assert not children() - before


def test_a_call_that_burns_cpu_is_ended_by_the_kernel():
    def call() -> float:
        while True:
            time.monotonic()

    with pytest.raises(ConfinedCallError, match="ended without an answer"):
        call_confined(call, Limits(memory=4 << 30, cpu=1))
