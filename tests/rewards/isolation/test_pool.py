"""The worker pool: whatever an item does, it costs its limit at most, and only itself."""

import asyncio
import concurrent.futures
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_grpo.rewards.isolation import fork_server
from lit_grpo.rewards.isolation.pool import Outcome, PoolError, WorkerPool
from tests.rewards.isolation import pool_functions as work
from tests.rewards.isolation import slow_import as slow
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(work.behave, limit=2.0, workers=2) as made:
        yield made


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until_gone(*pids: int) -> None:
    wait_until(lambda: not any(is_alive(pid) for pid in pids), f"the processes {pids} end")


def test_results_keep_the_order_of_the_items():
    with WorkerPool(work.double, limit=20, workers=3) as pool:
        assert [o.value for o in pool.map(range(300))] == [2 * x for x in range(300)]
        assert pool.map([]) == []


def test_a_sleeping_item_costs_its_limit_and_no_more(pool):
    pool.map(["good"])
    outcomes = pool.map(["sleep", "good"])
    assert [o.status for o in outcomes] == ["timeout", "ok"]
    assert 2.0 <= outcomes[0].seconds < PATIENCE  # it sleeps 600 seconds


def test_an_operation_that_holds_the_interpreter_is_killed(pool):
    assert [o.status for o in pool.map(["spin", "good", "good"])] == ["timeout", "ok", "ok"]


@pytest.mark.parametrize(
    ("what", "status", "error"),
    [
        ("exit", "crash", "died"),
        ("segfault", "crash", "died"),
        ("quit", "error", "SystemExit"),
        ("raise", "error", "ValueError at"),
        ("endless repr", "error", "ValueError at"),
        ("object", "error", "TypeError at"),
        ("long", "error", "bytes"),
        ("memory", "error", "MemoryError"),
        ("recurse", "error", "RecursionError"),
        ("print", "ok", ""),
    ],
)
def test_a_bad_item_is_an_error_for_itself_alone(pool, capfd, what, status, error):
    outcomes = pool.map(["good", what, "good", "good"])
    assert [o.status for o in outcomes] == ["ok", status, "ok", "ok"]
    assert error in outcomes[1].error
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_thousand_good_items_at_once_have_no_false_timeout():
    # Together they need several times the limit: only a clock that starts with the work lets all of them pass.
    with WorkerPool(work.pid_and_hang, limit=1.0, workers=2) as pool:
        outcomes = pool.map([0.005] * 1000)
    assert {o.status for o in outcomes} == {"ok"}
    assert len({o.value for o in outcomes}) == 2


@pytest.mark.slow
def test_killed_workers_are_gone_and_replaced():
    with WorkerPool(work.pid_and_hang, limit=2.0, workers=1) as pool:
        first = pool.map([0.0])[0].value
        assert pool.map([0.0])[0].value == first
        assert pool.map([600.0])[0].status == "timeout"
        second = pool.map([0.0])[0].value
        assert second != first
        wait_until_gone(first)
    wait_until_gone(second)


@pytest.mark.slow
def test_what_a_worker_started_is_killed_with_it(tmp_path):
    with WorkerPool(work.start_a_child, limit=1.0, workers=1) as pool:
        assert pool.map([str(tmp_path / "pid")])[0].status == "timeout"
    child = int((tmp_path / "pid").read_text())
    wait_until_gone(child)


@pytest.mark.slow
def test_several_threads_share_a_pool(pool):
    def ask(_: int) -> list[str]:
        return [o.status for o in pool.map(["good", "sleep", "good"])]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(4))) == [["ok", "timeout", "ok"]] * 4


def test_an_asyncio_task_is_not_held_up(pool):
    async def main() -> tuple[list[Outcome], Outcome, int]:
        loop, ticks = asyncio.get_running_loop(), 0
        scored = loop.run_in_executor(None, pool.map, ["sleep", "good"])
        single = asyncio.wrap_future(pool.submit(["good"])[0])
        while not scored.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return await scored, await single, ticks

    outcomes, single, ticks = asyncio.run(main())
    assert [o.status for o in outcomes] == ["timeout", "ok"]
    assert single.status == "ok"
    assert ticks > 10


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.slow
def test_a_copy_in_another_process_has_its_own_workers(pool, method):
    pool.map(["good"])
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    # Daemonic processes (data loaders) may not have children in multiprocessing's eyes; a pool must work there.
    process = context.Process(target=work.statuses, args=(pool, queue), daemon=True)
    process.start()
    assert queue.get(timeout=PATIENCE) == ["timeout", "ok"]
    process.join(PATIENCE)
    assert [o.status for o in pool.map(["good"] * 4)] == ["ok"] * 4


ORPHANS = """
import sys, threading
sys.path[:0] = {path!r}
from tests.rewards.isolation import pool_functions as work
from lit_grpo.rewards.isolation.pool import WorkerPool
pool = WorkerPool(work.pid_and_hang, limit=100, workers=2)
pids = [o.value for o in pool.map([0.2, 0.2])]
pool.submit([60.0])
print(*set(pids), flush=True)
threading.Event().wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_no_worker_outlives_a_parent_that_is_killed():
    script = ORPHANS.format(path=sys.path)  # at top level, without a __main__ guard
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert pids
    assert all(is_alive(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait(PATIENCE)
    parent.stdout.close()
    wait_until_gone(*pids)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_helper_process_may_be_killed_too(pool):
    pool.map(["good"])
    os.kill(pool._fork_server.pid, signal.SIGKILL)
    wait_until(lambda: pool._fork_server.poll() is not None, "the helper ends")
    assert pool.map(["good"] * 3)[-1].status == "ok"


def test_the_helper_process_is_silent_where_the_program_ended_while_it_started():
    """Ctrl-C at the start of a run: a traceback of it would be the last thing on the screen."""
    ours, its = socket.socketpair()
    with ours, its:
        command = [sys.executable, "-P", fork_server.__file__, str(its.fileno()), str(os.getpid())]
        helper = subprocess.Popen(command, pass_fds=[its.fileno()], stderr=subprocess.PIPE, text=True)
        its.close()
        ours.close()
        _, complaint = helper.communicate(timeout=PATIENCE)
    assert (helper.returncode, complaint) == (0, "")


def test_close_ends_open_items_and_a_later_item_starts_anew(pool):
    pool.map(["good"])
    opened = pool.submit(["sleep"] * 5)
    pool.close()
    pool.close()
    assert {future.result(timeout=PATIENCE).status for future in opened} <= {"crash", "timeout"}
    assert pool.map(["good"])[0].status == "ok"


def test_no_worker_starts_before_the_first_item():
    before = threading.active_count()
    with WorkerPool(work.double, limit=1.0) as pool:
        assert pool._fork_server is None
        assert threading.active_count() == before


def test_workers_import_neither_torch_nor_transformers():
    with WorkerPool(work.heavy_modules, limit=60.0, workers=1) as pool:
        outcome = pool.map([0])[0]
    assert (outcome.status, outcome.value) == ("ok", [])


def test_a_function_that_cannot_be_imported_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="top of a module"):
        WorkerPool(lambda x: x, limit=1.0)
    with pytest.raises(ValueError, match="positive"):
        WorkerPool(work.double, limit=0.0)
    (tmp_path / "broken_module.py").write_text("def f(x): return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import broken_module

    (tmp_path / "broken_module.py").write_text("raise RuntimeError('cannot be loaded today')\n")
    with WorkerPool(broken_module.f, limit=1.0) as pool, pytest.raises(PoolError, match="cannot be loaded today"):
        pool.map([1, 2])


def test_a_pool_can_be_pickled():
    with WorkerPool(work.double, limit=5.0, workers=1) as pool:
        pool.map([1])
        with pickle.loads(pickle.dumps(pool)) as copy:
            assert copy.map([4])[0].value == 8


def test_a_pool_that_is_still_starting_closes_at_once():
    for pause in (0.0, 0.02, 0.2):
        pool = WorkerPool(slow.nothing, limit=5.0, workers=1)
        pool.start()
        time.sleep(pause)
        pool.close()  # the import of its module takes 600 seconds


def test_a_pool_that_was_started_early_has_its_helper_ready():
    with WorkerPool(work.double, limit=30.0, workers=1) as pool:
        pool.start()
        wait_until(lambda: pool._fork_server is not None, "the helper is ready")
        assert [o.value for o in pool.map([1, 2])] == [2, 4]
