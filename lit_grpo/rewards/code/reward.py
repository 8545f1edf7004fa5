"""The code reward: programs run against unit tests, in a sandbox."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.code import worker as code_worker
from lit_grpo.rewards.code.worker import Job
from lit_grpo.rewards.isolation import sandbox
from lit_grpo.rewards.isolation.pool import Outcome, WorkerPool
from lit_grpo.rewards.math.answer import last_tag
from lit_grpo.types import RewardInput, Score

_FENCE = "```"
_LANGUAGES = ("python", "py", "python3", "")
_MAX_PROGRAM_LENGTH = 200_000


class CodeReward(Reward):
    """Reward of 1 if the program in the completion passes all its tests, else 0; with ``partial``, the share passed.

    The program is the last closed Python code block (three backticks). Columns of the prompt's row hold the tests:

    - ``tests``: Python source, or a list of such. Each is one test, and passes if it raises nothing. A ``check(f)`` is
      called with ``entry_point`` (HumanEval); functions ``test_*`` and ``unittest`` cases are run.
    - ``cases``: a list of ``{"input": ..., "output": ...}``: standard input and the output wanted, line by line without
      space at line ends. Each is a run of the program, which must end with exit code 0.

    The program runs in a process of its own that never holds the tests: the tests run in another one and get plain
    values for the calls they make. Both are confined, see :mod:`lit_grpo.rewards.isolation.sandbox` and
    docs/rewards.md: no network, files, processes or signals, and limits of CPU, memory and time.

    Args:
        limit: seconds on the clock for all tests of one completion.
        memory: MiB of address space for each process.
        partial: give the share of tests passed.
        workers: programs at a time; None: one a usable core, at most 8.
        unprotected: run even where a layer of the sandbox is missing, and say so. Only for code you would run anyway.
        tests: column of the tests.
        cases: column of inputs and outputs.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: an argument is not positive, or the sandbox does not work on this machine.
        ValueError: from ``score``, if a row has no tests.
    """

    extracts_answer = True
    range = (0.0, 1.0)
    # Each answer has a limit of its own.
    score_limit = None
    by_completion = True

    def __init__(
        self,
        limit: float = 10.0,
        memory: int = 512,
        partial: bool = False,
        workers: int | None = None,
        unprotected: bool = False,
        tests: str = "tests",
        cases: str = "cases",
        weight: float = 1.0,
        name: str | None = "code",
    ) -> None:
        super().__init__(weight, name)
        for key, value in (("limit", limit), ("memory", memory), ("workers", 1 if workers is None else workers)):
            if not (value > 0 and math.isfinite(value)):
                raise UserError(f"{key} is {value}", where=f"CodeReward.{key}", remedy="give a positive number")
        # Tried now, so that a machine without the sandbox ends the run before any model is loaded.
        missing = sandbox.check()
        if missing and not unprotected:
            raise UserError(
                f"programs cannot be confined on this machine: {missing}",
                where="CodeReward",
                remedy="use Linux 5.13 or later with Landlock and seccomp (containers: Docker's default profile has "
                "both); unprotected: true runs them without what is missing",
            )
        if missing:
            warnings.warn(f"CodeReward runs programs WITHOUT a whole sandbox: {missing}", stacklevel=2)
        self._limit, self._memory, self._partial, self._partly = limit, memory * 1024**2, partial, bool(missing)
        self._tests, self._cases = tests, cases
        # The worker keeps its own time; the pool's limit is for a worker that is lost. Workers see next to none of the
        # environment, which may hold keys.
        self._pool = WorkerPool(code_worker.run, limit=limit + 5.0, workers=workers, environment=False)

    def row_problem(self, answer: str | None, extra: Mapping[str, Any]) -> str | None:
        tests, pairs = self._tests_of(extra)
        if not (tests or pairs) or not all(isinstance(t, str) and t.strip() for t in tests):
            return (
                f"there are no tests: give Python source in column {self._tests!r}, or inputs and outputs in column "
                f"{self._cases!r}"
            )
        if tests and pairs:
            return f"there are both {self._tests!r} and {self._cases!r}: leave one out"
        for test in tests:
            try:
                compile(test, "tests", "exec")
            # Null bytes and too deep nesting have errors of their own.
            except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
                return f"a test in column {self._tests!r} is no Python: {error}"
        return None

    def _tests_of(self, extra: Mapping[str, Any]) -> tuple[list[Any], list[tuple[str, str]]]:
        """Return the tests of a row as Python source, and its pairs of input and output."""
        tests, cases = extra.get(self._tests), extra.get(self._cases)
        tests = [tests] if isinstance(tests, str) else list(tests) if isinstance(tests, (list, tuple)) else []
        given = cases if isinstance(cases, (list, tuple)) else ()
        whole = [case for case in given if isinstance(case, Mapping) and {"input", "output"} <= set(case)]
        return tests, [(str(case["input"]), str(case["output"])) for case in whole]

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        programs = [program_in(item.text) for item in batch]
        # A job is made even without a program: a row with bad tests is found whatever the policy wrote.
        jobs = {i: self._job(item, programs[i] or "") for i, item in enumerate(batch)}
        futures = dict(
            zip(
                [i for i in jobs if programs[i]],
                self._pool.submit([job for i, job in jobs.items() if programs[i]]),
                strict=True,
            )
        )
        return [
            self._score(futures[i].result()) if i in futures else Score(0.0, no_answer=True) for i in range(len(batch))
        ]

    def _job(self, item: RewardInput, program: str) -> Job:
        extra = item.prompt.extra
        # A broken test is a mistake of the data, not a wrong answer: it raises here, before the program runs.
        if problem := self.row_problem(item.prompt.answer, extra):
            raise ValueError(f"row {item.prompt.id!r} has no usable tests: {problem}")
        tests, pairs = self._tests_of(extra)
        entry: Any = extra.get("entry_point")
        return {
            "source": program,
            "tests": tests,
            "entry": str(entry) if entry else None,
            "cases": pairs,
            "seconds": self._limit,
            "memory": self._memory,
            "partly": self._partly,
        }

    def _score(self, outcome: Outcome) -> Score:
        if outcome.status != "ok":
            late = outcome.status == "timeout"
            return Score(0.0, timed_out=late, failed=not late, seconds=outcome.seconds)
        result = outcome.value
        share = result["passed"] / result["total"]
        value = share if self._partial or share == 1 else 0.0
        return Score(value, timed_out=result["timed_out"], details={"tests_passed": share}, seconds=outcome.seconds)

    def start(self) -> None:
        self._pool.start()

    def close(self) -> None:
        self._pool.close()


def program_in(text: str) -> str | None:
    """Return the last closed code block that is Python or names no language; None if there is none.

    Where the last complete ``<answer>...</answer>`` holds one, the program is the last in it.
    """
    tagged, _ = last_tag(text, "answer")
    return (_last_block(tagged) if tagged is not None else None) or _last_block(text)


def _last_block(text: str) -> str | None:
    # By str.find, not by a regular expression: linear in the length of a hostile text.
    program, position = None, 0
    while (start := text.find(_FENCE, position)) >= 0:
        line_end = text.find("\n", start)
        end = text.find(f"\n{_FENCE}", line_end) if line_end >= 0 else -1
        if end < 0:
            break
        if text[start + len(_FENCE) : line_end].strip().lower() in _LANGUAGES:
            program = text[line_end + 1 : end + 1]
        position = end + 1 + len(_FENCE)
    return program if program and program.strip() and len(program) <= _MAX_PROGRAM_LENGTH else None
