"""The benchmark of starts: who takes turns, what each phase took, and a start that comes to nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts import benchmark_start as script
from tests.paths import ROOT

SAYS = """
import sys, time
for line in ("lit: importing Lightning and the model", "nothing", "data: prompts are made with plain text",
             "rollout 1/1  reward 0"):
    if line.startswith("rollout"):
        time.sleep(1)
    print(line, flush=True)
time.sleep(60)
"""


def test_engines_of_both_checkouts_take_turns(tmp_path: Path) -> None:
    found = script.contestants(["transformers", "vllm:2"], tmp_path / "before")
    assert [(one.name, one.checkout.name) for one in found] == [
        ("transformers", ROOT.name),
        ("transformers in before", "before"),
        ("vllm:2", ROOT.name),
        ("vllm:2 in before", "before"),
    ]
    assert found[2].options == ("--data.engine.name=vllm", "--data.engine.processes=2")
    assert script.contestants([], None) == [("as configured", ROOT, ())]


def test_a_start_ends_with_the_first_rollout(tmp_path: Path) -> None:
    reached = script.start([sys.executable, "-c", SAYS], dict(os.environ), str(tmp_path))
    assert list(reached) == ["configuration read", "prompts read", "first rollout"]
    # One second, but for what a busy machine needs to read a line; not the minute that comes behind.
    assert 0.1 < reached["first rollout"] - reached["prompts read"] < 60


def test_a_start_that_comes_to_nothing_says_why(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such model\n\nthe run ended before its first rollout"):
        script.start([sys.executable, "-c", "print('no such model')"], dict(os.environ), str(tmp_path))


def test_phases_take_what_has_passed_since_the_one_before() -> None:
    """In the order of each start: what goes on beside something else ends before or after it."""
    starts = [
        {"imports": 2.0, "engine ready": 9.0, "first rollout": 10.0},
        {"imports": 3.0, "engine ready": 9.0, "first rollout": 14.0},
        {"imports": 2.5, "first rollout": 12.0},
    ]
    assert script.table("vllm", starts).splitlines() == [
        "| vllm, 3 starts | takes, s | lowest-highest | ends after, s |",
        "|---|---|---|---|",
        "| imports | 2.5 | 2.0-3.0 | 2.5 |",
        "| engine ready | 6.5 | 6.0-7.0 | 9.0 |",
        "| first rollout | 5.0 | 1.0-9.5 | 12.0 |",
    ]


def test_every_phase_is_said_by_the_program() -> None:
    sources = [*(ROOT / "lit_grpo").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    missing = [line for line in script.PHASES.values() if line not in text and line != "rollout 1/"]
    assert missing == []
