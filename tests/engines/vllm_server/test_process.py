"""A server process ends when it should, with everything it started, and only then. No vLLM: any command will do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.engines import EngineError, ServerConfig
from lit_grpo.engines.vllm import installed
from lit_grpo.engines.vllm_processes.process import EngineProcess
from lit_grpo.engines.vllm_server.process import ServerProcess, _as_options, server_of_rank
from lit_grpo.engines.vllm_server.process_log import ProcessLog
from lit_grpo.engines.vllm_server.scratch import make_scratch_folder
from lit_grpo.engines.vllm_server.weights import read_weights, write_weights
from lit_grpo.errors import UserError
from tests.paths import ROOT
from tests.waiting import PATIENCE, wait_until

SERVER = """
import os, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stubborn])  # as vLLM's engine process
print(os.getpid(), child.pid, file=open(sys.argv[1] + ".tmp", "w"), flush=True)
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(600)
"""


def make(tmp_path: Path) -> ServerProcess:
    """A process that writes its id and its child's into ``tmp_path/pids`` when it is ready."""
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    process = ServerProcess(tmp_path, port=0, engine_args={}, env={"LIT_GRPO_TEST": "1"}, scratch=scratch)
    process._command = [sys.executable, "-c", SERVER, str(tmp_path / "pids")]
    return process


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    process = make(tmp_path)
    yield process
    process.close()
    process.log.unlink(missing_ok=True)


def test_no_process_that_is_started_takes_itself_for_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are those that torchrun of torch 2.13 sets; the last but one would have it wait for a store."""
    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    launcher = [
        *(
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "NODE_RANK",
        ),
        *("RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
        "WORLD_SIZE",
    ]
    for name in launcher:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LOCAL_FOLDER", "/x")
    server, log = make(tmp_path), ProcessLog()
    for env in (server._env, EngineProcess({}, tmp_path, log)._env):
        assert not set(launcher) & set(env)
        assert env["LOCAL_FOLDER"] == "/x"
    server.close()
    log.close()


def pids(tmp_path: Path) -> list[int]:
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(ids: list[int]) -> None:
    wait_until(lambda: not any(alive(pid) for pid in ids), f"the processes {ids} end")


def start(process: ServerProcess, tmp_path: Path) -> list[int]:
    (tmp_path / "pids").unlink(missing_ok=True)
    process.start(PATIENCE, (tmp_path / "pids").exists)
    ids = pids(tmp_path)
    assert all(alive(pid) for pid in ids)
    return ids


def test_stop_ends_everything_and_keeps_the_weights(process: ServerProcess, tmp_path: Path) -> None:
    first = start(process, tmp_path)
    process.stop()
    wait_until_gone(first)
    assert process.scratch.is_dir(), "for the next start"
    second = start(process, tmp_path)
    assert process.running
    process.close()
    wait_until_gone(second)
    assert not process.scratch.exists()
    assert not process.log.exists()
    process.close()


@pytest.mark.parametrize("victim", [0, 1], ids=["server", "supervisor"])
def test_a_killed_server_leaves_nothing_behind(process: ServerProcess, tmp_path: Path, victim: int) -> None:
    ids = start(process, tmp_path)
    os.kill([ids[0], process._process.pid][victim], signal.SIGKILL)
    wait_until(lambda: not process.running, "the end is noticed")
    if victim == 0:
        wait_until_gone(ids)  # the supervisor sees to it
    start(process, tmp_path)
    wait_until_gone(ids)


@pytest.mark.slow
@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a fork that stays"])
def test_the_server_ends_when_its_owner_is_killed(tmp_path: Path, forks: bool) -> None:
    """Also where a process that the owner has forked, as a reward's pool does, outlives it."""
    code = f"""
import os, pathlib, time
from lit_grpo.engines.vllm import installed
from tests.engines.vllm_server.test_process import make, start
installed.find_spec = lambda name: object()  # as if vLLM were there
path = pathlib.Path({str(tmp_path)!r})
process = make(path)
start(process, path)
child = os.fork() if {forks} else 0
if child or not {forks}:
    print(process.log, child, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert owner.stdout is not None
    log, child = owner.stdout.readline().split()
    ids = pids(tmp_path)
    try:
        assert all(alive(pid) for pid in ids)
        assert Path(log).is_file()
        owner.kill()
        owner.wait()
        wait_until_gone(ids)
        wait_until(lambda: not (tmp_path / "scratch").exists(), "weights in shared memory are removed")
        wait_until(lambda: not Path(log).exists(), "the log is removed")
        assert not forks or alive(int(child))
    finally:
        owner.kill()
        if forks:
            os.kill(int(child), signal.SIGKILL)
        owner.communicate()


def test_a_forked_process_ends_nothing_of_its_parents(process: ServerProcess, tmp_path: Path) -> None:
    process.scratch = make_scratch_folder(str(tmp_path), 0)
    ids = start(process, tmp_path)
    child = os.fork()
    if child == 0:
        try:
            started = process.running
            process.close()
        finally:
            os._exit(1 if started else 0)
    assert os.waitpid(child, 0)[1] == 0, "it is none of the child's"
    assert process.running
    assert all(map(alive, ids))
    assert process.log.exists()
    assert process.scratch.is_dir()


def test_a_server_that_does_not_start_says_why(process: ServerProcess) -> None:
    process._command = [sys.executable, "-c", "print('no such option: --nonsense'); raise SystemExit(2)"]
    with pytest.raises(EngineError, match=r"ended before it was ready(.|\n)*no such option: --nonsense"):
        process.start(PATIENCE, lambda: False)
    process._command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(EngineError, match="not ready after 1 s"):
        process.start(1, lambda: False)
    assert not process.running
    process.close()
    assert "nonsense" in process.log.read_text(), "the message names the log"
    with pytest.raises(EngineError, match="the engine is closed"):
        process.start(1, lambda: True)
    assert not process.running


def test_a_log_that_is_gone_is_an_empty_one(tmp_path: Path) -> None:
    """A run that is given up while its engine starts has removed it before the start finds that it failed."""
    log = ProcessLog(tmp_path)
    log.close()
    assert "The end of the log of the engine processes" in log.tail()


def test_the_error_that_a_server_died_of_is_told_before_the_end_of_its_log(process: ServerProcess) -> None:
    """As vLLM logs it: the engine's error, then those of the process that answers, which know only that it is gone."""
    process.log.write_text("(EngineCore pid=1) ERROR 12-01 02:31:33 [core.py:1512] ValueError: of an earlier start\n")
    lines = ["(Worker pid=7) ERROR 12-01 02:31:33 [multiproc_executor.py:1063] RuntimeError: no heads of 8"]
    lines += ["(APIServer pid=1) ERROR 12-01 02:31:33 [core.py:54]   File x"] * 30
    lines += ["(APIServer pid=1) ERROR 12-01 02:31:33 [core.py:54] vllm.EngineDeadError: See above"]
    process._command = [sys.executable, "-c", f"print({chr(10).join(lines)!r})"]
    with pytest.raises(EngineError, match=r"Its first error: RuntimeError: no heads of 8\n(.|\n)*EngineDeadError"):
        process.start(PATIENCE, lambda: False)


def test_each_training_process_has_a_server_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ServerConfig(port=8000, env={"CUDA_VISIBLE_DEVICES": "{rank}"})
    second = server_of_rank(own, 1, 2)
    assert (second.port, second.env) == (8001, {"CUDA_VISIBLE_DEVICES": "1"})
    assert server_of_rank(ServerConfig(), 1, 2).port == 0
    assert server_of_rank(ServerConfig(url="http://h:800{rank}"), 1, 2).url == "http://h:8001"
    assert server_of_rank(ServerConfig(url="http://h:8000"), 0, 1).url == "http://h:8000"
    with pytest.raises(UserError, match=r"2 processes train(.|\n)*put \{rank\}"):
        server_of_rank(ServerConfig(url="http://h:8000"), 1, 2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    process = make(tmp_path)
    assert "RANK" not in process._env
    assert process._env["LIT_GRPO_TEST"] == "1"
    process.close()


def test_options_are_vllms_command_line() -> None:
    args = {"max_model_len": 5, "enforce_eager": True, "async_scheduling": False, "left_out": None, "json": {"a": [1]}}
    expected = ["--max-model-len", "5", "--enforce-eager", "--no-async-scheduling", "--json", '{"a": [1]}']
    assert _as_options(args) == expected


def test_weights_come_back_as_they_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_scratch_folder(str(tmp_path / "new"), 0) / "weights"
    shared = torch.randn(4, 3)
    sent = {"a": shared, "b": torch.randn(3, 4).T, "tied": shared, "count": torch.tensor([3])}
    monkeypatch.setattr("lit_grpo.engines.vllm_server.weights._FILE_BYTES", 60)
    for dtype in (torch.float32, torch.bfloat16):  # the second replaces the first
        write_weights(folder, iter(sent.items()), dtype)
        assert len(list(folder.glob("*.safetensors"))) > 1
        read = dict(read_weights(folder))
        assert read.keys() == sent.keys()
        for name, tensor in sent.items():
            assert torch.equal(read[name], tensor.to(dtype) if tensor.is_floating_point() else tensor)
    with pytest.raises(FileNotFoundError, match="same folder"):
        list(read_weights(tmp_path / "elsewhere"))
