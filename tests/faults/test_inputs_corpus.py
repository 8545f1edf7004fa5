"""A share of the malformed inputs, and the judge of how they end. The whole: ``python scripts/chaos.py inputs``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from scripts.chaos_cases.input_cases import Case
from scripts.chaos_cases.inputs import all_cases, judge
from tests.paths import ROOT

SHARE = 40
"""Every such input of the corpus is run here."""


def test_the_corpus_is_large_and_no_input_is_there_twice():
    cases = all_cases()
    assert len(cases) >= 350
    names = [(case.group, case.name) for case in cases]
    assert len(set(names)) == len(names)
    assert {case.group for case in cases} >= {
        "yaml",
        "command line",
        "data",
        "reward",
        "model",
        "score",
        "numbers",
        "words",
    }


@pytest.mark.slow
def test_every_malformed_input_of_the_share_ends_in_one_screen(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "scripts/chaos.py", "inputs", "--every", str(SHARE), "--output", str(tmp_path / "o.jsonl")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    outcomes = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert len(outcomes) == len(all_cases()[::SHARE])
    assert [o for o in outcomes if not o["held"]] == []
    assert done.returncode == 0


SCREEN = "lit-grpo fit: error\n\n  rollouts is 0\n  where:  c.yaml:1\n"


@pytest.mark.parametrize(
    ("code", "output", "hung", "verdict"),
    [
        (2, SCREEN, False, "screen"),
        (2, "Traceback (most recent call last)\n" + SCREEN, False, "traceback"),
        (1, SCREEN, False, "exit 1"),
        (0, "done", False, "accepted"),
        (2, "something else", False, "no screen"),
        (2, SCREEN + "x\n" * 60, False, "long"),
        (2, SCREEN.replace("rollouts", "group_size"), False, "other fault"),
        (-9, SCREEN, True, "hang"),
    ],
)
def test_how_an_end_is_judged(code, output, hung, verdict):
    assert judge(Case("g", "n", (), mentions="rollouts"), code, output, hung) == verdict
