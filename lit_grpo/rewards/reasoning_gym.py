"""The reward of reasoning-gym: the score functions of its tasks, in worker processes."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.isolation import sandbox
from lit_grpo.rewards.isolation.pool import Outcome, WorkerPool
from lit_grpo.rewards.math.answer import check_extract, last_tag
from lit_grpo.rewards.reasoning_gym_score import Job, score_entry
from lit_grpo.types import RewardInput, Score


class ReasoningGymReward(Reward):
    """Score that a task of reasoning-gym itself gives to an answer, from 0 to 1; 1 is right.

    For prompts of :class:`lit_grpo.data.ReasoningGymPrompts`, of any task and of several in one run. Some tasks hand
    what the model wrote to Python's ``eval``. So each answer is scored in a process of its own that is confined as the
    programs of :class:`lit_grpo.rewards.CodeReward` are, without the environment and with a hard time limit; and what
    is evaluated there are literals and arithmetic alone (:mod:`lit_grpo.rewards.isolation.expressions`).

    Args:
        pattern: regular expression with one group, the answer; its last match in the completion counts. None: the
            answer is what the last complete ``answer_tag`` holds. ``(?s)^(.+)$`` is the whole completion.
        answer_tag: name of the tag around an answer.
        limit: seconds for one answer; one that takes longer is wrong and counted as
            ``reward_errors/timeout_frac/<name>``.
        workers: processes; None: one a core, at most 8.
        unprotected: score even where a layer of the sandbox is missing, and say so.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: a broken pattern; a tag that is no name; a prompt of another source; or the sandbox does not work on
            this machine.
    """

    extracts_answer = True
    range = (0.0, 1.0)
    # Each answer has a limit of its own.
    score_limit = None

    def __init__(
        self,
        pattern: str | None = None,
        answer_tag: str = "answer",
        limit: float = 10.0,
        workers: int | None = None,
        unprotected: bool = False,
        weight: float = 1.0,
        name: str | None = "reasoning_gym",
    ) -> None:
        super().__init__(weight, name)
        # Not `re`, which has no time limit: a pattern may backtrack for ever on what a model wrote.
        import regex

        try:
            self._pattern: Any = regex.compile(pattern) if pattern is not None else None
        except regex.error as error:
            raise UserError(
                f"the pattern {pattern!r} is broken: {error}", where="ReasoningGymReward.pattern"
            ) from error
        if self._pattern is not None and self._pattern.groups != 1:
            raise UserError(
                f"the pattern {pattern!r} has {self._pattern.groups} groups",
                where="ReasoningGymReward.pattern",
                remedy="put the answer, and nothing else, in brackets",
            )
        check_extract("tag", answer_tag, "ReasoningGymReward", ("tag",))
        self._answer_tag = answer_tag
        for key, value in (("limit", limit), ("workers", 1 if workers is None else workers)):
            if not (value > 0 and math.isfinite(value)):
                raise UserError(f"{key} is {value}", where=f"ReasoningGymReward.{key}", remedy="give a positive number")
        # Tried now, so that a machine without the sandbox ends the run before any model is loaded.
        missing = sandbox.check()
        if missing and not unprotected:
            raise UserError(
                f"what scores the answers cannot be confined on this machine: {missing}",
                where="ReasoningGymReward",
                remedy="use Linux 5.13 or later with Landlock and seccomp (containers: Docker's default profile has "
                "both); unprotected: true scores without what is missing",
            )
        if missing:
            warnings.warn(f"ReasoningGymReward scores answers WITHOUT a whole sandbox: {missing}", stacklevel=2)
        self._limit, self._partly = limit, bool(missing)
        # Workers see next to none of the environment, which may hold keys.
        self._pool = WorkerPool(score_entry, limit=limit, workers=workers, memory=4 * 1024**3, environment=False)

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        scores = [Score(0.0, no_answer=True)] * len(batch)
        answers: list[str | None] = []
        for i, item in enumerate(batch):
            began = time.perf_counter()
            try:
                answers.append(self._answer(item.text))
            except TimeoutError:
                answers.append(None)
                scores[i] = Score(0.0, timed_out=True, no_answer=True, seconds=time.perf_counter() - began)
        # Workers get only what has an answer: every other completion is wrong without being asked about.
        with_answer = [(i, answer) for i, answer in enumerate(answers) if answer is not None]
        outcomes = self._pool.map([self._job(batch[i], answer) for i, answer in with_answer])
        for (i, _), outcome in zip(with_answer, outcomes, strict=True):
            scores[i] = _score(outcome)
        return scores

    def _job(self, item: RewardInput, answer: str) -> Job:
        # The prompt's source has put the task and its entry into the row.
        problem = item.prompt.extra.get("reasoning_gym")
        if not isinstance(problem, dict) or not {"task", "entry"} <= problem.keys():
            raise UserError(
                f"the prompt {item.prompt.id!r} is no problem of reasoning-gym",
                where="ReasoningGymReward",
                remedy="use it with lit_grpo.data.ReasoningGymPrompts alone",
            )
        return Job(
            task=str(problem["task"]),
            entry=problem["entry"],
            answer=answer,
            seconds=self._limit,
            partly=self._partly,
        )

    def _answer(self, text: str) -> str | None:
        if self._pattern is None:
            answer = last_tag(text, self._answer_tag)[0]
        else:
            # With concurrent, other threads go on meanwhile.
            matches = self._pattern.findall(text, timeout=self._limit, concurrent=True)
            answer = matches[-1] if matches else None
        return answer.strip() or None if answer is not None else None

    def start(self) -> None:
        self._pool.start()

    def close(self) -> None:
        self._pool.close()


def _score(outcome: Outcome) -> Score:
    value = float(outcome.value) if outcome.status == "ok" else 0.0
    # A task that fails on what the model wrote has not called it right; `failed` counts such answers, and those whose
    # process sent what no task gives.
    failed = outcome.status in ("error", "crash") or not 0 <= value <= 1
    return Score(0.0 if failed else value, outcome.status == "timeout", failed, seconds=outcome.seconds)
