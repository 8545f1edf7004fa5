"""Rewards, judges and scorers that hang, crash, lie, or run what the model writes.

    python scripts/chaos.py rewards                   everything, about 15 minutes on two cores
    python scripts/chaos.py rewards payloads threads  parts of it, see PARTS

One line a case, and a table at the end: cases, held, the longest time. Exit code 1 if one did not hold.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lit_grpo.rewards import CodeReward, FunctionReward, MathReward, ReasoningGymReward, RewardError, score_all
from lit_grpo.rewards.base import Reward
from lit_grpo.types import Completion, Prompt, RewardInput, Score
from scripts.chaos_cases import hangs, signals
from tests.rewards import faulty_functions, odd_results
from tests.rewards.code import code_attacks
from tests.rewards.payloads import payloads, wrapped

LIMIT = 2.0
# A loaded machine takes its time to fork and import; what hangs takes for ever.
GRACE = 30.0
END_SECONDS = 10.0


class Case(NamedTuple):
    """One attack and what came of it."""

    name: str
    held: bool
    seconds: float
    what: str = ""
    """What was seen, in a few words."""


def _item(text: str, answer: str | None = None, **extra: object) -> RewardInput:
    return RewardInput(Prompt("p", "q", (1,), answer, "s", extra), Completion(0, 0, (1,), (0.0,), "stop", 0), text)


def _score(reward: Reward, batch: Sequence[RewardInput]) -> tuple[list[Score], float]:
    began = time.monotonic()
    scores = score_all([reward], batch, "zero")[reward.name]
    return scores, time.monotonic() - began


def payloads_in_math() -> Iterator[Case]:
    """Plant code in every form of an answer of the math verifier."""
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder, "marker")
        reward = MathReward(limit=20.0)
        for payload in payloads(marker):
            batch = [_item(text, r"\frac{x^2}{2}") for text in wrapped(payload)]
            scores, seconds = _score(reward, batch)
            held = not marker.exists() and not any(score.value for score in scores)
            yield Case(f"math: {payload[:60]!r}", held, seconds)
        reward.close()


def payloads_in_tasks() -> Iterator[Case]:
    """Plant code in the answers of every task of reasoning-gym."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder, "marker")
        reward = ReasoningGymReward(limit=20.0)
        for task in sorted(set(DATASETS) - {"composite"}):
            entry = reasoning_gym.create_dataset(task, size=1, seed=5)[0]
            row = {"reasoning_gym": {"task": task, "entry": entry}}
            texts = [f"<answer>{payload}</answer>" for payload in payloads(marker)]
            scores, seconds = _score(reward, [_item(text, **row) for text in texts])
            late = sum(score.timed_out for score in scores)
            yield Case(f"reasoning-gym: {task}", not marker.exists() and not late, seconds, f"{late} late")
        reward.close()


_ONE = ("sleeps", "spins", "holds_the_lock", "deadlocks", "raises", "exits", "interrupts", "dies", "kills", "recurses")
_ASYNC = ("gives_way", "blocks", "raises_late")
_BATCH = ("batch_sleeps", "batch_blocks", "batch_dies", "batch_raises")
# These take a core or the interpreter's lock of this process for good.
_NOT_HERE = ("holds_the_lock", "spins", "dies", "kills", "batch_dies")


def functions() -> Iterator[Case]:
    """Let a user's function hang, crash and leave, in a worker and in this process, alone and among others."""
    assert all(hasattr(faulty_functions, name) for name in (*_ONE, *_ASYNC, *_BATCH))
    for name in (*_ONE, *_ASYNC, *_BATCH):
        for in_process in (False, True):
            if in_process and name in _NOT_HERE:
                continue
            reward = FunctionReward(f"{faulty_functions.__name__}.{name}", limit=LIMIT, in_process=in_process)
            scores, seconds = _score(reward, [_item("good"), _item("bad"), _item("good")])
            reward.close()
            bad, good = scores[1], (scores[0], scores[2])
            lost = bad.value == 0 and (bad.timed_out or bad.failed)
            # A batch function that hangs takes its batch with it.
            spared = all(score.value == 1 for score in good) or name in ("batch_sleeps", "batch_blocks")
            where = "in process" if in_process else "worker"
            word = "timed out" if bad.timed_out else "failed"
            yield Case(f"function {name}, {where}", lost and spared and seconds < 5 * LIMIT + GRACE, seconds, word)


def results() -> Iterator[Case]:
    """Let a user's function give what is no reward: it ends the run with a message, or is scored 0."""
    for text in odd_results.RESULTS:
        reward = FunctionReward(odd_results.gives)
        scores, seconds = _score(reward, [_item(text)])
        message = ""
        try:
            score_all([reward], [_item(text)])
        except RewardError as error:
            message = error.problem
        reward.close()
        yield Case(f"result {text}", scores[0] == Score(0.0, failed=True) and bool(message), seconds, message[:60])


def programs() -> Iterator[Case]:
    """Run programs that fool their tests, get out of the sandbox, or hold it up."""
    reward = CodeReward(limit=LIMIT, memory=256)
    for name, program in {**code_attacks.FOOLING, **code_attacks.HOLDING_UP}.items():
        scores, seconds = _score(reward, [_item(f"```python\n{program}\n```", tests=code_attacks.TESTS)])
        yield Case(f"program: {name}", scores[0].value < 1 and seconds < 3 * LIMIT + GRACE, seconds)
    with tempfile.TemporaryDirectory() as folder:
        for name, program in code_attacks.ESCAPES.items():
            victim = Path(folder, "victim")
            victim.write_text("x")
            text = "```python\n" + program.format(folder=folder) + "\ndef add(a, b): return a + b\n```"
            scores, seconds = _score(reward, [_item(text, tests=code_attacks.TESTS)])
            left = sorted(path.name for path in Path(folder).iterdir())
            # What is refused raises, and then the program has no function to be tested.
            held = left == ["victim"] and victim.read_text() == "x" and scores[0].value == 0
            yield Case(f"escape: {name}", held, seconds)
    reward.close()


def threads() -> Iterator[Case]:
    """Start threads without end, in Python and on one stack."""
    from tests.rewards.code import test_threads

    reward = CodeReward(limit=20.0, memory=256, workers=1)
    for name in ("WITHOUT_END", "ON_ONE_STACK"):
        program = getattr(test_threads, name)
        tests = [f"n = f(); assert n < {test_threads.MAX_THREADS}, n"]
        scores, seconds = _score(reward, [_item(f"```python\n{program}\n```", tests=tests)])
        yield Case(f"threads: {name.lower()}", scores[0].value == 1, seconds)
    reward.close()


def endings() -> Iterator[Case]:
    """Let a run hang in each of its parts, and send it SIGTERM or Ctrl-C: the real command, in a process of its own."""
    for what in hangs.runs("http://127.0.0.1:9/v1"):
        for ending in signals.ENDINGS:
            ended = signals.attack(what, ending)
            # Where the interpreter's lock is held nothing can be saved, and a judge that hangs in the first rollout
            # leaves nothing to save.
            saves = what not in ("reward function, holding the lock", "judge")
            held = ended.hung and ended.code is not None and ended.seconds <= END_SECONDS and ended.saved >= saves
            seen = f"exit {ended.code}, {'saved' if ended.saved else 'not saved'}"
            yield Case(f"{what}, {ending}", held, ended.seconds, seen)


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    "payloads": payloads_in_math,
    "tasks": payloads_in_tasks,
    "functions": functions,
    "results": results,
    "programs": programs,
    "threads": threads,
    "endings": endings,
}


def main(argv: Sequence[str]) -> int:
    """Attack, print a line for each case and the table, and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/chaos.py rewards", description=__doc__.partition("\n\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if left out")
    parts = parser.parse_args(argv).parts or list(PARTS)
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"there is no part {unknown[0]!r}, only {', '.join(PARTS)}")
    warnings.simplefilter("ignore")
    table: list[str] = []
    failed = 0
    for part in parts:
        cases = []
        for case in PARTS[part]():
            print(
                f"{'held' if case.held else 'NOT HELD':<9} {case.seconds:6.1f} s  {case.name}  {case.what}", flush=True
            )
            cases.append(case)
        held = sum(case.held for case in cases)
        failed += len(cases) - held
        longest = max((case.seconds for case in cases), default=0.0)
        table.append(f"| {part} | {held} of {len(cases)} | {longest:.1f} |")
    print("\n| part | held | longest, s |\n|---|---|---|\n" + "\n".join(table))
    print(f"threads left of calls that were given up: {threading.active_count() - 1}")
    return 1 if failed else 0
