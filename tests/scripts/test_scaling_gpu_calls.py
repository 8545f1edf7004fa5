"""Calls of the scaling script that are ended, made twice, mistyped, or go on with figures of something else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from scripts import scaling_gpu
from scripts.scaling_gpu_cases.results import Results
from tests.paths import ROOT
from tests.waiting import wait_until

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from scripts import scaling_gpu
from scripts.scaling_gpu_cases import runs
runs.command = lambda *_: [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
sys.exit(scaling_gpu.main(sys.argv[2:]))
"""
POINT = ["--shapes", "tiny", "--cards", "1", "--series", "weak", "--steps", "1"]
HERE = {"card": "x CPU", "engine": "transformers", "on_cards": False, "software": "torch 1"}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def begun(out: Path) -> tuple[subprocess.Popen[str], int]:
    """A call whose run has begun, and the process of that run."""
    command = [sys.executable, "-c", SCRIPT, str(ROOT), *POINT, "--out", str(out)]
    call = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT)
    log = out / "last_run" / "log.txt"
    wait_until(lambda: log.is_file() and log.read_text().endswith("\n"), "the run has begun", 300)
    return call, int(log.read_text())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks stand for cards")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
    ids=["SIGTERM", "SIGHUP", "Ctrl-C", "SIGKILL"],
)
def test_a_call_that_is_ended_takes_its_run_with_it(tmp_path: Path, number: int, code: int) -> None:
    call, run = begun(tmp_path / "out")
    call.send_signal(number)
    _, text = call.communicate(timeout=120)
    assert call.returncode == code
    assert "Traceback" not in text
    wait_until(lambda: not alive(run), "the end of the run")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks stand for cards")
def test_two_calls_do_not_measure_into_one_folder(tmp_path: Path, capsys: Any) -> None:
    call, run = begun(tmp_path)
    try:
        assert scaling_gpu.main([*POINT, "--out", str(tmp_path)]) == scaling_gpu.BAD_INPUT
        assert "another call measures into" in capsys.readouterr().err
        assert alive(run)
    finally:
        call.terminate()
        call.communicate()


@pytest.mark.parametrize(
    "changes",
    [{"engine": "vllm"}, {"card": "H200"}, {"software": "torch 2"}, {"peak_tflops": 1.0}, {"more": "abc"}],
    ids=lambda changes: next(iter(changes)),
)
def test_figures_of_something_else_are_not_gone_on_with(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "results.json"
    known = HERE | {"peak_tflops": None, "more": ""}
    Results(path, known).write()
    Results(path, known)
    with pytest.raises(UserError, match="has figures of ") as caught:
        Results(path, known | changes)
    assert str(*changes.values()) in str(caught.value)
    assert Results(path, known | changes, goes_on=False).machine == known, "its page can be written anywhere"


@pytest.mark.parametrize(
    "text",
    ['{"machine": ', "[]", '{"points": []}', '{"points": null}', '{"machine": null}', '{"machine": {}}',
     '{"machine": 1}', '{"points": {"a": {}}}', '{"points": {"a": 1}}'],
)  # fmt: skip
def test_a_file_that_is_none_of_results_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        Results(path, HERE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU has no engine processes to measure")
def test_a_plan_without_points_is_no_success(tmp_path: Path, capsys: Any) -> None:
    command = ["--shapes", "tiny", "--series", "processes", "--out", str(tmp_path / "out")]
    assert scaling_gpu.main(command) == scaling_gpu.BAD_INPUT
    assert "nothing to measure: processes has no point of tiny on a CPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_call_in_which_all_failed_is_no_success(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(
        scaling_gpu, "measure", lambda point, *_: scaling_gpu.recorded(point, failure="exit code 2: no")
    )
    assert scaling_gpu.main([*POINT, "--out", str(tmp_path)]) == scaling_gpu.FAILED
    assert str(tmp_path / "last_run" / "log.txt") in capsys.readouterr().err
    assert json.loads((tmp_path / "results.json").read_text())["points"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--more", "/no/such.yaml"], "--more /no/such.yaml: there is no such file"),
        (["--peak-tflops", "-1"], "--peak-tflops is a number above 0"),
        (["--budget-seconds", "nan"], "--budget-seconds is a number above 0"),
        (["--budget-seconds", "0"], "--budget-seconds is a number above 0"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(arguments: list[str], says: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        scaling_gpu.main([*POINT, "--list", *arguments])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(capsys: Any) -> None:
    assert scaling_gpu.main([*POINT, "--out", os.devnull + "/x"]) == scaling_gpu.BAD_INPUT
    assert "cannot be written to" in capsys.readouterr().err
