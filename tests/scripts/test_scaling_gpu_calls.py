"""Calls of the scaling script that are ended, made twice, mistyped, or go on with figures of something else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from scripts import scaling_gpu
from scripts.scaling_gpu_cases import files
from scripts.scaling_gpu_cases.keeper import kept
from scripts.scaling_gpu_cases.points import Point
from scripts.scaling_gpu_cases.results import SETTINGS, Results
from tests.paths import ROOT
from tests.waiting import wait_until

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from scripts import scaling_gpu
from scripts.scaling_gpu_cases import runs
runs.command = lambda *_: [sys.executable, "-c", sys.argv[2]]
runs._GRACE_SECONDS = float(sys.argv[3])
sys.exit(scaling_gpu.main(sys.argv[4:]))
"""
RUN = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not os.fork():
    os.setsid()
    os.fork()
os.write(1, b"%d\\n" % os.getpid())
time.sleep(600)
"""
"""Like a run of torchrun that hangs: it hears no SIGTERM, and its ranks are in a session of their own."""
POINT = ["--shapes", "tiny", "--cards", "1", "--series", "weak", "--steps", "1"]
HERE = {
    "card": "x CPU", "cards": 2, "on_cards": False, "engine": "transformers", "launcher": "lightning", "more": "",
    "software": "torch 1", "code": "c0ffee", "peak_tflops": None,
}  # fmt: skip
FIGURES = {
    "step": 10.0, "tokens_per_second": 100.0, "rewards": [0.5], "elapsed": [0.0], "sync": 0.3, "sync_share": 0.03,
    "tflops": 400.0, "mfu": 0.4, "seconds": 90.0,
}  # fmt: skip


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def _hear_all_signals() -> None:
    # Under nohup, or behind an & of a script, what is started inherits that signals are ignored.
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def begun(
    out: Path, run: str = RUN, processes: int = 1, grace: float = 20.0, before: tuple[str, ...] = ()
) -> tuple[subprocess.Popen[str], list[int]]:
    """A call whose run has begun, and the processes of that run."""
    command = [*before, sys.executable, "-c", SCRIPT, str(ROOT), run, str(grace), *POINT, "--out", str(out)]
    call = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT, preexec_fn=_hear_all_signals
    )
    log = out / "last_run" / "log.txt"
    wait_until(lambda: log.is_file() and log.read_text().count("\n") == processes, "the run has begun", 300)
    return call, [int(word) for word in log.read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks stand for cards")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGKILL, -9)],
    ids=["SIGTERM", "SIGHUP", "Ctrl-C", "SIGKILL"],
)
def test_a_call_that_is_ended_takes_its_run_with_it(tmp_path: Path, number: int, code: int) -> None:
    call, run = begun(tmp_path / "out", STUBBORN, processes=3, grace=0.5)
    call.send_signal(number)
    _, text = call.communicate(timeout=120)
    assert call.returncode == code
    assert "Traceback" not in text
    wait_until(lambda: not any(alive(pid) for pid in run), "the end of the run and of its ranks")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks stand for cards")
def test_a_hangup_that_was_switched_off_ends_nothing(tmp_path: Path) -> None:
    call, run = begun(tmp_path / "out", before=("nohup",))
    try:
        call.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            call.wait(2.0)
        assert alive(*run)
    finally:
        call.terminate()
        call.communicate()


def test_ctrl_c_before_the_first_run_is_no_traceback(monkeypatch: Any, capsys: Any) -> None:
    def interrupted(args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(scaling_gpu, "machine", interrupted)
    assert scaling_gpu.main(POINT) == scaling_gpu.INTERRUPTED
    assert capsys.readouterr().err == "interrupted: the same command goes on\n"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks stand for cards")
def test_two_calls_do_not_measure_into_one_folder(tmp_path: Path, capsys: Any) -> None:
    """Nor does one while the run of a call that was killed still holds the cards."""
    command = [*POINT, "--out", str(tmp_path), "--table"]
    call, run = begun(tmp_path, STUBBORN, processes=3, grace=4.0)
    try:
        assert scaling_gpu.main(command) == scaling_gpu.BAD_INPUT
        assert "another call measures into" in capsys.readouterr().err
        assert all(alive(pid) for pid in run)
    finally:
        call.kill()
        call.communicate()
    assert alive(run[0])
    assert scaling_gpu.main(command) == scaling_gpu.BAD_INPUT
    wait_until(lambda: not any(alive(pid) for pid in run), "the end of the run")
    wait_until(lambda: scaling_gpu.main(command) == scaling_gpu.LEFT, "the folder is free")


def test_a_kept_command_has_its_exit_code() -> None:
    for code, seen in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137), ("", 0)):
        with kept([sys.executable, "-S", "-c", code], grace=5.0) as process:
            assert process.wait(60) == seen


@pytest.mark.skipif(sys.platform != "linux", reason="children of a command are found on Linux alone")
def test_what_a_command_leaves_ends_by_itself_where_it_can(tmp_path: Path) -> None:
    """As an engine's supervisor does, which removes the weights in shared memory after its rank."""
    left = "import pathlib, sys, time; time.sleep(0.5); pathlib.Path(sys.argv[1]).touch()"
    start = f"[sys.executable, '-S', '-c', {left!r}, sys.argv[1]], start_new_session=True"
    command = [sys.executable, "-S", "-c", f"import subprocess, sys; subprocess.Popen({start})", str(tmp_path / "done")]
    with kept(command, grace=60.0) as process:
        assert process.wait(60) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("name", SETTINGS)
def test_figures_of_something_else_are_not_gone_on_with(tmp_path: Path, name: str) -> None:
    path = tmp_path / "results.json"
    Results(path, HERE).write()
    Results(path, HERE)
    with pytest.raises(UserError, match="has figures of ") as caught:
        Results(path, HERE | {name: "other"})
    assert SETTINGS[name] in str(caught.value)
    assert "not other" in str(caught.value)
    assert Results(path, HERE | {name: "other"}, goes_on=False).machine == HERE, "its page can be written anywhere"


def test_a_commit_that_nobody_knows_differs_from_none(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Results(path, HERE).write()
    assert Results(path, HERE | {"code": ""}).machine["code"] == "c0ffee"
    Results(path, HERE | {"code": ""}, goes_on=False)
    path.unlink()
    Results(path, HERE | {"code": ""}).write()
    assert Results(path, HERE).machine["code"] == "", "what was measured before may be of another"


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not of a commit")
def test_the_commit_is_that_of_what_is_measured() -> None:
    commit = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "HEAD"], text=True).strip()
    code, _, _ = scaling_gpu._commit().partition("+")
    assert code
    subprocess.run(["git", "-C", str(ROOT), "merge-base", "--is-ancestor", code, commit], check=True)


def test_a_folder_that_is_done_refuses_other_settings(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(scaling_gpu, "measure", lambda point, *_: scaling_gpu.recorded(point, **FIGURES))
    more = tmp_path / "more.yaml"
    more.write_text("{}")
    command = [*POINT, "--engine", "transformers", "--out", str(tmp_path)]
    assert scaling_gpu.main(command) == 0
    before = (tmp_path / "results.json").read_text()
    for change in (["--engine", "vllm"], ["--launcher", "torchrun"], ["--more", str(more)]):
        assert scaling_gpu.main([*command, "--series", "weak", "layouts", *change]) == scaling_gpu.BAD_INPUT
        assert "remedy: name another folder" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == before


def test_another_peak_changes_every_mfu(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(scaling_gpu, "measure", lambda point, *_: scaling_gpu.recorded(point, **FIGURES))
    command = [*POINT, "--out", str(tmp_path)]
    assert scaling_gpu.main([*command, "--peak-tflops", "1000"]) == 0
    assert scaling_gpu.main([*command, "--peak-tflops", "800", "--table"]) == 0
    page = (tmp_path / "scaling.md").read_text()
    assert "| 50.0% |" in page
    assert "of 800 TFLOP/s a card" in page
    assert json.loads((tmp_path / "results.json").read_text())["machine"]["peak_tflops"] == 1000, "it runs nothing"
    assert scaling_gpu.main([*command, "--peak-tflops", "500"]) == 0
    known = json.loads((tmp_path / "results.json").read_text())
    assert known["machine"]["peak_tflops"] == 500
    assert [record["mfu"] for record in known["points"].values()] == [0.8]
    assert scaling_gpu.main([*command, "--table"]) == 0
    assert "of 500 TFLOP/s a card" in (tmp_path / "scaling.md").read_text()


def test_a_host_of_more_cards_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Results(path, HERE).write()
    assert Results(path, HERE | {"cards": 8}).machine["cards"] == 8
    assert Results(path, HERE | {"cards": 1}).machine["cards"] == 2


def stored(point: dict[str, Any], **machine: Any) -> str:
    return json.dumps({"machine": HERE | machine, "points": {"a": point}})


@pytest.mark.parametrize(
    "text",
    ['{"machine": ', "[]", '{"points": []}', '{"points": null}', '{"machine": null}', '{"machine": {}}',
     '{"machine": 1}', '{"points": {"a": {}}}', '{"points": {"a": 1}}', '{"machine": {"on_cards": false}}',
     json.dumps({"machine": HERE, "points": []}), json.dumps({"machine": HERE, "points": None}), stored({}),
     stored({"failure": "x", "shape": "tiny"}, on_cards=None), stored({"shape": "tiny"}),
     json.dumps({"machine": HERE, "points": {"a": 1}})],
)  # fmt: skip
@pytest.mark.parametrize("table", [[], ["--table"]], ids=["measured", "table"])
def test_a_file_that_is_none_of_results_is_named(tmp_path: Path, text: str, table: list[str], capsys: Any) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    assert scaling_gpu.main([*POINT, "--out", str(tmp_path), *table]) == scaling_gpu.BAD_INPUT
    told = capsys.readouterr().err
    assert f"{path} cannot be read: " in told
    assert "remedy: name another folder, or remove the file" in told
    assert path.read_text() == text


def test_a_folder_in_the_place_of_the_results_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.json").mkdir()
    with pytest.raises(UserError, match="cannot be read"):
        Results(tmp_path / "results.json", HERE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU has no engine processes to measure")
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["tiny", "--series", "processes"], "processes is of cards alone, and here are none"),
        (["qwen2-7b", "--series", "strong"], "strong is not measured of qwen2-7b"),
        (["tiny", "--series", "strong", "--cards", "3"], "the prompts of strong cannot be divided by --cards 3"),
    ],
)
@pytest.mark.parametrize("what", [[], ["--list"], ["--table"]], ids=["measured", "list", "table"])
def test_a_plan_without_points_is_no_success(
    tmp_path: Path, arguments: list[str], why: str, what: list[str], capsys: Any
) -> None:
    command = ["--shapes", *arguments, "--out", str(tmp_path / "out"), *what]
    assert scaling_gpu.main(command) == scaling_gpu.BAD_INPUT
    assert f"nothing to measure: {why}\n" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_call_in_which_all_failed_is_no_success(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(
        scaling_gpu, "measure", lambda point, *_: scaling_gpu.recorded(point, failure="exit code 2: no")
    )
    command, log = [*POINT, "--out", str(tmp_path)], tmp_path / "last_run" / "log.txt"
    assert scaling_gpu.main(command) == scaling_gpu.FAILED
    [name] = json.loads((tmp_path / "results.json").read_text())["points"]
    assert capsys.readouterr().err == f"1 of 1 points have failed: {name}\n", "nothing was run: there is no log"
    log.parent.mkdir()
    log.touch()
    assert scaling_gpu.main(command) == scaling_gpu.FAILED
    assert capsys.readouterr().err == f"1 of 1 points have failed: {name}; the log of the last run: {log}\n"


def test_a_point_that_failed_beside_others_is_told(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def measure(point: Point, *_: Any) -> dict[str, Any]:
        return scaling_gpu.recorded(point, **({"failure": "no"} if point.cards == 2 else FIGURES))

    monkeypatch.setattr(scaling_gpu, "measure", measure)
    assert scaling_gpu.main([*POINT, "--cards", "1", "2", "--out", str(tmp_path)]) == 0
    assert "1 of 2 points have failed: tiny, 2 cards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--more", "/no/such.yaml"], "--more /no/such.yaml: No such file or directory"),
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


def test_models_that_cannot_be_written_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(UserError, match="cannot be written to") as caught:
        files.prepare("tiny", Path(os.devnull) / "x")
    assert "--models" in str(caught.value)
    monkeypatch.setattr(files.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="ended with exit code 1"):
        files.prepare("tiny", tmp_path)
    assert not (tmp_path / "tiny" / "ready").exists()
