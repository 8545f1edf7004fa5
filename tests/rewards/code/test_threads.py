"""Threads in the sandbox: those that programs need start, and no number of them holds up the machine."""

import ctypes
import platform

import pytest

from lit_grpo.rewards import CodeReward
from lit_grpo.rewards.isolation import sandbox
from lit_grpo.rewards.isolation.confined_call import ConfinedCallError, call_confined
from lit_grpo.rewards.isolation.sandbox import Limits
from lit_grpo.rewards.isolation.threads import MAX_THREADS
from tests.rewards.code.test_reward import item

MISSING = sandbox.check()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no sandbox here: {MISSING}")

JOINED = """
import threading
def f():
    seen = []
    threads = [threading.Thread(target=seen.append, args=(1,)) for _ in range(20)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return len(seen)
"""
ONE_BY_ONE = """
import threading
def f():
    for _ in range(500):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
    return 20
"""
WITHOUT_END = """
import threading
def f():
    threading.stack_size(32768)
    over, count = threading.Event(), 0
    for _ in range(100_000):
        try:
            threading.Thread(target=over.wait, daemon=True).start()
            count += 1
        except RuntimeError:
            break
    return count
"""
# Threads that the C library knows nothing of, on one stack: memory does not bound them. Code and stack are kept: a
# thread that has not run yet when its code is given back ends the process.
ON_ONE_STACK = """
import ctypes, mmap
kept = []
def f():
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # clone(edi, rsi); in the new thread pause() for ever, in this one return.
    code.write(bytes.fromhex("b8380000000f0585c07509b8220000000f05ebf7c3"))
    start = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_void_p)(
        ctypes.addressof(ctypes.c_char.from_buffer(code)))
    stack, count = ctypes.create_string_buffer(65536), 0
    kept.extend((code, stack))
    while count < 6000 and start(0x10F00, ctypes.addressof(stack) + 60000) >= 0:
        count += 1
    return count
"""
DEEP = """
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(64 * 1024 * 1024)
def main():
    def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
    print(depth(20000))
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""


@pytest.fixture(scope="module")
def reward():
    reward = CodeReward(limit=20.0, memory=256, workers=1)
    yield reward
    reward.close()


@pytest.mark.parametrize("program", [JOINED, ONE_BY_ONE])
def test_threads_that_a_program_needs_start(reward, program):
    (score,) = reward.score([item(program, tests=["assert f() == 20"])])
    assert score.value == 1.0


def test_a_script_may_run_in_a_thread_with_a_larger_stack(reward):
    (score,) = reward.score([item(DEEP, cases=[{"input": "", "output": "20000"}])])
    assert score.value == 1.0


@pytest.mark.parametrize("program", [WITHOUT_END, ON_ONE_STACK])
def test_no_more_than_a_few_are_alive(reward, program):
    if program is ON_ONE_STACK and platform.machine() != "x86_64":
        pytest.skip("machine code for x86-64")
    tests = [f"n = f(); assert {MAX_THREADS // 2} < n < {MAX_THREADS}, n", "assert f() == 0"]
    # The second one finds all taken.
    (score,) = reward.score([item(program, tests=tests)])
    assert score.details == {"tests_passed": 1.0}, score


def test_a_scorer_starts_none():
    def call() -> float:
        # By the C library, which tells why; Python would load a module that is not there.
        libc = ctypes.CDLL(None, use_errno=True)
        thread, start = ctypes.c_ulong(), ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
        return float(libc.pthread_create(ctypes.byref(thread), None, start, None))

    assert call_confined(call, Limits(4 << 30, 20)) != 0.0
    with pytest.raises(ConfinedCallError, match="RuntimeError"):
        call_confined(lambda: __import__("threading").Thread(target=int).start(), Limits(4 << 30, 20))
