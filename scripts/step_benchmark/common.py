"""The work, the clock and the talk with the benchmark, which both contestants share. Needs torch alone.

A contestant is a process of its own. It reads a :class:`Work` from the file named on its command line, takes one step
on samples that are given to it (which also warms it up), and then as many measured steps as it is told to by a line on
its standard input. Between steps it waits for the next line and takes no CPU time.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MARK = "@step "
"""First characters of a line that is meant for the benchmark; other lines are the library's own talk."""
PHASES = ("generate", "reward", "sync", "other passes", "forward", "backward", "optimizer")


@dataclass
class Work:
    """The steps that are to be taken, the same for every contestant."""

    model: str
    """Folder of the model."""
    questions: list[str]
    """Questions of every step; the model's chat template is put around each."""
    answers: list[str]
    group_size: int
    max_new_tokens: int
    exact_length: bool
    """Whether every completion has ``max_new_tokens`` tokens; else it ends where the model ends it."""
    rewards: str
    """``half``: reward 1 for half of each group, chosen by its ids; ``answer``: where the last number is the answer."""
    dtype: str
    engine: str
    micro_batch: int
    """Completions of a micro-batch, where the contestant counts completions."""
    threads: int
    lr: float
    replay: list[list[list[int]]]
    """Ids of the completions of each prompt for the first step."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of this contestant alone."""
    seed: int = 0
    devices: int = 1
    learner_only: bool = False
    """Whether every step is on the given completions."""

    @classmethod
    def read(cls, path: str) -> Work:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def reward(self, question: str, group: Sequence[Sequence[int]], texts: Sequence[str]) -> list[float]:
        """Compute the reward of each completion of a group."""
        if self.rewards == "half":
            order = sorted(range(len(group)), key=lambda i: (sum(group[i]) * 7919 % 10007, i))
            return [float(order.index(i) < len(order) // 2) for i in range(len(group))]
        answer = self.answers[self.questions.index(question)].replace(",", "")
        found = [re.findall(r"-?\d[\d,]*(?:\.\d+)?", text) for text in texts]
        return [float(bool(n) and n[-1].replace(",", "").rstrip(".") == answer) for n in found]


Mark = tuple[Any, float]
"""A point in time of the wall clock (on CUDA an event in the stream of work) and of the CPU's clock."""


class Clock:
    """Wall and CPU seconds of named phases of a step.

    On CUDA a phase lasts from when the GPU comes to its beginning until it comes to its end. Nothing waits for the GPU
    within a step, so that the clock does not slow down who works ahead of it.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, Mark, Mark]] = []
        self.extra: list[tuple[str, float, float]] = []
        self.engine_gib = 0.0
        """Taken on a GPU while the engine was made."""
        self.begin()

    def begin(self) -> None:
        import torch

        self.spans, self.extra = [], []
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.started = now()

    def read(self) -> dict[str, Any]:
        """Give the times of the step so far, all GPU work included."""
        wall, cpu = (b - a for a, b in zip(self.started, now(), strict=True))
        phases: dict[str, list[float]] = {}
        spent = [(name, passed(a[0], b[0]), b[1] - a[1]) for name, a, b in self.spans]
        for name, of_wall, of_cpu in spent + self.extra:
            sums = phases.setdefault(name, [0.0, 0.0])
            sums[0] += of_wall
            sums[1] += of_cpu
        return {"wall": wall, "cpu": cpu, "phases": phases, "peak_gib": peak_gib(), "engine_gib": self.engine_gib}

    def makes_engine(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``inner``, and count what it leaves on the GPU as the engine's."""

        def outer(*args: Any, **kwargs: Any) -> Any:
            import torch

            before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
            made = inner(*args, **kwargs)
            if torch.cuda.is_available():
                self.engine_gib += (torch.cuda.memory_allocated() - before) / 2**30
            return made

        return outer

    def add(self, phase: str, wall: float, cpu: float) -> None:
        """Add seconds that were measured elsewhere."""
        self.extra.append((phase, wall, cpu))

    def ends(self, phase: str, begun: Mark) -> None:
        self.spans.append((phase, begun, mark()))

    def timed(self, inner: Callable[..., Any], phase: str | Callable[[], str | None]) -> Callable[..., Any]:
        """Wrap ``inner`` so that its calls count as ``phase``; not at all where that is None."""

        def outer(*args: Any, **kwargs: Any) -> Any:
            name = phase if isinstance(phase, str) else phase()
            if name is None:
                return inner(*args, **kwargs)
            begun = mark()
            try:
                return inner(*args, **kwargs)
            finally:
                self.ends(name, begun)

        return outer

    def wrap(self, owner: Any, method: str, phase: str | Callable[[], str | None]) -> None:
        setattr(owner, method, self.timed(getattr(owner, method), phase))


def mark() -> Mark:
    import torch

    if not torch.cuda.is_available():
        return time.perf_counter(), time.process_time()
    event: Any = torch.cuda.Event(enable_timing=True)
    event.record()
    return event, time.process_time()


def passed(begun: Any, ended: Any) -> float:
    """Give the seconds between two marks, after the GPU has come to both."""
    return ended - begun if isinstance(begun, float) else begun.elapsed_time(ended) / 1000


def now() -> tuple[float, float]:
    """Read wall and CPU clock, all GPU work so far included."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def peak_gib() -> float:
    """Give the most memory that tensors took on a GPU, or the process in main memory."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def by_gradient() -> str:
    """A pass through the policy is the loss's forward pass where it needs a gradient."""
    import torch

    return "forward" if torch.is_grad_enabled() else "other passes"


def is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


class Talk:
    """The talk with the benchmark over standard input and output."""

    def __init__(self) -> None:
        self.left = 0

    def say(self, **what: Any) -> None:
        if is_main():
            print(MARK + json.dumps(what), flush=True)

    def wait(self) -> bool:
        """Wait until the benchmark wants a step; False if it wants no more."""
        while self.left == 0:
            line = sys.stdin.readline() if is_main() else ""
            self.left = _to_all(int(line.strip() or 0) if line else -1)
        self.left -= 1 if self.left > 0 else 0
        return self.left >= 0


def _to_all(number: int) -> int:
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return number
    box = [number]
    torch.distributed.broadcast_object_list(box, 0)
    return box[0]
