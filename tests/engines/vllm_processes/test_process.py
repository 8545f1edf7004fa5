"""Engine processes end with whoever started them, however that ends, and write to their log alone. Without vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.engines.vllm_processes.process import EngineProcess, Gone
from lit_grpo.engines.vllm_server.process_log import ProcessLog
from tests.paths import ROOT
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow

OWNER = """
import os, pathlib, signal, sys, time
# Whoever starts the tests in the background of a shell has them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from lit_grpo.engines.vllm_processes.process import EngineProcess
from lit_grpo.engines.vllm_server.process_log import ProcessLog
scratch = pathlib.Path(sys.argv[1])
scratch.mkdir()
log = ProcessLog(scratch)
if sys.argv[3] == "named":
    log.tail()
processes = [EngineProcess({}, scratch, log) for _ in range(2)]
for process in processes:
    process.start()
for process in processes:
    process.send(("sleep", 1))
    process.receive()
print(log.path, flush=True)
exec(sys.argv[2])
"""


# Its two children are there before their parent's processes are known to have ended.
POOL = """
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
pool = ProcessPoolExecutor(2, multiprocessing.get_context("fork"))
print(*{pool.submit(os.getpid).result() for _ in range(8)}, flush=True)
time.sleep(600)
"""


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(child) for child in task.read_text().split()]
    return found


def below(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have."""
    return [one for child in children(pid) for one in (child, *below(child))]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def check_answers(process: EngineProcess) -> None:
    process.send(("sleep", 1))
    kind, error = process.receive()
    assert kind == "failed"
    assert "was not built" in str(error)


def start(process: EngineProcess) -> None:
    process.start()
    check_answers(process)


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(alive, pids)), f"the end of {pids}")


def start_owner(scratch: Path, then: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(scratch), then, *(options or ("",))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True,
    )  # fmt: skip


@pytest.fixture
def log() -> Iterator[ProcessLog]:
    log = ProcessLog()
    yield log
    log.close()


@pytest.fixture
def process(tmp_path: Path, log: ProcessLog) -> Iterator[EngineProcess]:
    (tmp_path / "scratch").mkdir()
    process = EngineProcess({"LIT_GRPO_LEFT_OUT": None}, tmp_path / "scratch", log)
    yield process
    process.stop()


@pytest.mark.parametrize(
    ("way", "then"),
    [
        ("SIGKILL", "time.sleep(600)"),
        ("SIGTERM", "time.sleep(600)"),
        ("SIGINT", "time.sleep(600)"),
        ("SIGABRT", "time.sleep(600)"),
        ("exception", "raise ValueError"),
        ("exit", "os._exit(3)"),
        ("end", "pass"),
    ],
)
def test_no_process_outlives_its_owner(tmp_path: Path, way: str, then: str) -> None:
    scratch = tmp_path / "scratch"
    owner = start_owner(scratch, "sys.stdin.readline()\n" + then if way.islower() else then)
    assert owner.stdout is not None
    written = Path(owner.stdout.readline().strip())
    pids = below(owner.pid)
    assert len(pids) == 4, "a supervisor and an engine each"
    if way.isupper():
        owner.send_signal(getattr(signal, way))
    _, shown = owner.communicate("\n", timeout=PATIENCE)
    wait_until_gone(pids)
    wait_until(lambda: not scratch.exists(), "weights in shared memory are removed")
    wait_until(lambda: not written.exists(), "the log is removed")
    assert "worker" not in shown, "a person sees nothing of the processes"


def test_a_log_that_a_message_has_named_outlives_whoever_is_killed(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    owner = start_owner(scratch, "time.sleep(600)", "named")
    assert owner.stdout is not None
    written = Path(owner.stdout.readline().strip())
    owner.kill()
    owner.communicate()
    wait_until(lambda: not scratch.exists(), "weights in shared memory are removed")
    assert written.is_file()
    written.unlink()


def test_nothing_stays_of_an_owner_that_is_killed_after_its_processes(tmp_path: Path) -> None:
    """As the system kills them one after the other where memory runs out."""
    scratch = tmp_path / "scratch"
    owner = start_owner(scratch, "time.sleep(600)")
    assert owner.stdout is not None
    written = Path(owner.stdout.readline().strip())
    supervisors = children(owner.pid)
    engines = [one for supervisor in supervisors for one in children(supervisor)]
    assert len(engines) == 2
    for engine in engines:
        os.kill(engine, signal.SIGKILL)
    wait_until_gone(supervisors)
    assert scratch.is_dir(), "others could be started again with what is in it"
    owner.kill()
    owner.communicate()
    wait_until(lambda: not scratch.exists(), "weights in shared memory are removed")
    assert not written.exists()


def test_what_an_owner_has_forked_keeps_no_process_alive(tmp_path: Path) -> None:
    """A reward may have a pool of processes, which end later than the run, or never."""
    scratch = tmp_path / "scratch"
    owner = start_owner(scratch, POOL)
    assert owner.stdout is not None
    owner.stdout.readline()
    pool = {int(pid) for pid in owner.stdout.readline().split()}
    assert pool
    started = [pid for pid in below(owner.pid) if b"vllm_processes.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(started) == 4
    for pid in pool:
        # So that they do not end with their parent, however fast.
        os.kill(pid, signal.SIGSTOP)
    try:
        owner.kill()
        owner.wait()
        wait_until_gone(started)
        wait_until(lambda: not scratch.exists(), "weights in shared memory are removed")
        assert all(map(alive, pool))
    finally:
        for pid in pool:
            os.kill(pid, signal.SIGKILL)
        owner.communicate()


def test_a_forked_process_ends_nothing_of_its_parents(process: EngineProcess, log: ProcessLog) -> None:
    start(process)
    child = os.fork()
    if child == 0:
        try:
            started = process.running
            process.close()
            log.close()
        finally:
            os._exit(1 if started else 0)
    assert os.waitpid(child, 0)[1] == 0, "it is none of the child's"
    check_answers(process)
    assert log.path.exists()


@pytest.mark.parametrize("victim", ["engine", "supervisor"])
def test_the_death_of_a_process_is_noticed_and_nothing_of_it_stays(process: EngineProcess, victim: str) -> None:
    start(process)
    (supervisor,) = [pid for pid in children(os.getpid()) if pid == process._process.pid]
    (engine,) = children(supervisor)
    os.kill(engine if victim == "engine" else supervisor, signal.SIGKILL)
    with pytest.raises(Gone):
        process.receive()
    wait_until_gone([engine])
    process.stop()
    with pytest.raises(Gone):
        process.send(("work", []))
    start(process)


def test_a_process_lives_on_when_the_thread_ends_that_started_it(process: EngineProcess) -> None:
    """A signal at the parent's death is sent at the end of a thread, and a rollout thread may start one again."""
    thread = threading.Thread(target=process.start)
    thread.start()
    thread.join()
    check_answers(process)


def test_ctrl_c_in_the_terminal_does_not_reach_a_process(process: EngineProcess) -> None:
    start(process)
    (engine,) = children(process._process.pid)
    os.kill(engine, signal.SIGINT)
    check_answers(process)
    assert os.getpgid(engine) != os.getpgid(0)


def test_what_a_process_writes_is_in_the_log_and_stays_if_a_message_names_it(
    process: EngineProcess, log: ProcessLog, capfd: Any
) -> None:
    start(process)
    process.send(("no such message",))
    kind, error = process.receive()
    assert kind == "failed"
    assert "AttributeError" in str(error)
    process.stop()
    assert "AttributeError" in log.path.read_text(), "with its traceback"
    assert capfd.readouterr() == ("", "")
    assert str(log.path) in log.tail()
    log.close()
    assert log.path.is_file()
    log.path.unlink()


def test_a_log_that_no_message_names_is_removed(log: ProcessLog) -> None:
    log.close()
    assert not log.path.exists()


def test_an_answer_that_does_not_come_is_not_waited_for_without_end(process: EngineProcess) -> None:
    start(process)
    with pytest.raises(TimeoutError):
        process.receive(0.05)
