"""scripts/benchmark_engines.py: what it asks for, and how it says what it found; vLLM is needed for the rest."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import benchmark_engines
from tests.paths import ROOT


def arguments(folder: Path, **changes: Any) -> argparse.Namespace:
    given = {"model": str(folder), "data": None, "key": "question", "prompts": 6, "samples": 3, "prompt_tokens": 11}
    return argparse.Namespace(**given | changes)


def test_prompts_are_the_same_random_tokens_every_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 200}))
    requests, ends = benchmark_engines.make_requests(arguments(tmp_path))
    assert (requests, ends) == benchmark_engines.make_requests(arguments(tmp_path))
    assert ends == (), "every completion has its full length"
    assert [len(request.token_ids) for request in requests] == [11] * 6
    assert all(0 <= token < 200 for request in requests for token in request.token_ids)
    assert len({seed for request in requests for seed in request.seeds}) == 18
    assert len({request.token_ids for request in requests}) == 6


def test_the_table_has_every_row_and_its_rate_beside_the_first(capsys: Any) -> None:
    benchmark_engines.table(
        [
            {"processes": 1, "async": "on", "tokens/s": 20000.0},
            {"processes": 2, "async": "on", "tokens/s": 44000.0},
            {"processes": 4, "async": "on", "error": "no memory"},
        ]
    )
    shown = capsys.readouterr().out
    assert "| 1 | on | 20,000 | 1.00 |" in shown
    assert "| 2 | on | 44,000 | 2.20 |" in shown
    assert "4 processes, async on failed:\nno memory" in shown


@pytest.mark.slow
def test_a_setting_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 200}))
    command = [sys.executable, "scripts/benchmark_engines.py", str(tmp_path), "--processes", "1", "2", "--async", "on"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.count(" failed:\n") == 2, "that folder holds no model"


@pytest.mark.vllm
def test_completions_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    from tests.engines.vllm.vllm_fixtures import make_model

    make_model(True, 0).save_pretrained(tmp_path)
    command = [sys.executable, "scripts/benchmark_engines.py", str(tmp_path), "--processes", "2", "--same"]
    command += ["--prompts", "6", "--samples", "4", "--prompt-tokens", "40", "--tokens", "32", "--cache-gib", "0.1"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "completions 24  same 24" in run.stdout, run.stdout
