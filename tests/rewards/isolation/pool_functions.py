"""What the pool tests run in workers. Imported by name there, so it must stay light."""

import ctypes
import os
import subprocess
import sys
import time
from typing import Any


def double(x: int) -> int:
    return 2 * x


def fail(x: str) -> None:
    raise ValueError(x)


def behave(what: str) -> Any:
    """Each way in which an item can go wrong, and one in which it goes right."""
    if what == "sleep":
        time.sleep(600)
    elif what == "spin":
        return 9**9**9  # one operation in C that never lets go of the interpreter
    elif what == "exit":
        os._exit(0)
    elif what == "quit":
        sys.exit(1)
    elif what == "segfault":
        ctypes.string_at(0)
    elif what == "raise":
        raise ValueError(what)
    elif what == "endless repr":
        raise ValueError(EndlessRepr())
    elif what == "object":
        return EndlessRepr()
    elif what == "long":
        return "x" * 1_000_000
    elif what == "memory":
        return len(bytearray(8 * 1024**3))
    elif what == "recurse":
        return behave(what)
    elif what == "print":
        print("this must reach nobody's standard output")
        os.write(1, b"nor this")
    return "good"


class EndlessRepr:
    def __repr__(self) -> str:
        time.sleep(600)
        return "never"

    __str__ = __repr__


def pid_and_hang(x: float) -> int:
    time.sleep(x)
    return os.getpid()


def start_a_child(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(path, "w") as file:  # noqa: PTH123 - keep imports light
        file.write(str(child.pid))
    time.sleep(600)


def statuses(pool: Any, queue: Any) -> None:
    """Runs in a spawned or forked process."""
    queue.put([o.status for o in pool.map(["sleep", "good"])])


def verify(reward: Any, queue: Any) -> None:
    """Runs in a spawned process."""
    queue.put([v.correct for v in reward.verify(["4", "4"], [r"\boxed{\sqrt{16}}", r"\boxed{9^{9^{9^9}}}"])])


def heavy_modules(_: int) -> list[str]:
    import lit_grpo.rewards.math.grade
    import lit_grpo.rewards.math.symbolic  # noqa: F401

    return [name for name in ("torch", "transformers", "lightning", "numpy", "datasets") if name in sys.modules]
