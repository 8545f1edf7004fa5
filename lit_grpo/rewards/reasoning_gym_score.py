"""Scoring for :class:`lit_grpo.rewards.ReasoningGymReward`, which runs in worker processes.

Several tasks hand what the model wrote to ``eval`` or to SymPy's parser, which evaluates too. So every answer is scored
in a confined process that is forked for it alone, without the environment, and there their ``eval`` is one that takes
literals and arithmetic only.

It is a module of its own, because a worker imports all of the module that holds its function.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

# At the top, because a confined process can no longer read them.
from lit_grpo.rewards.isolation.confined_call import call_confined
from lit_grpo.rewards.isolation.expressions import evaluate
from lit_grpo.rewards.isolation.sandbox import Limits

_MEMORY = 3 * 1024**3
_SCORERS: dict[str, Callable[[str, dict[str, Any]], float]] = {}


class Job(TypedDict):
    """One answer with its problem, as a worker gets it."""

    task: str
    entry: dict[str, Any]
    """The problem as the task made it."""
    answer: str
    seconds: float
    """CPU time for the score."""
    partly: bool
    """True to score without the layers of the sandbox that this machine lacks."""


def warm_up() -> None:
    """Import reasoning-gym before the first time limit begins to run."""
    import sympy.simplify  # noqa: F401


def score_entry(job: Job) -> float:
    """Score an answer with its task's own function, in a confined process.

    Raises:
        ConfinedCallError: the function failed, or its process died.
    """
    # Made here, where no model's text has been seen yet: it may read files, and later answers find it ready.
    scorer = _scorer(job["task"])

    def score() -> float:
        _take_eval_away()
        return float(scorer(job["answer"], job["entry"]))

    limits = Limits(_MEMORY, int(job["seconds"]) + 1)
    return call_confined(score, limits, _readable(), job["partly"])


def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    if task not in _SCORERS:
        _SCORERS[task] = reasoning_gym.get_score_answer_fn(task)
    return _SCORERS[task]


def _take_eval_away() -> None:
    # Only in the modules that are known to evaluate what they are given: Python's own, such as namedtuple, need theirs.
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reasoning_gym" or name == "sympy.parsing.sympy_parser":
            module.__dict__["eval"] = evaluate


def _readable() -> list[str]:
    """Return the folders of installed packages, from which some tasks import only when they score."""
    import reasoning_gym

    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(reasoning_gym.__file__).parent)}
    return sorted(folders)
