"""The reward of reasoning-gym: the score functions of its tasks, in worker processes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.isolation.pool import WorkerPool
from lit_grpo.rewards.math.answer import check_extract, last_tag
from lit_grpo.rewards.reasoning_gym_score import score_entry
from lit_grpo.types import RewardInput, Score


class ReasoningGymReward(Reward):
    """Score that a task of reasoning-gym itself gives to an answer, from 0 to 1; 1 is right.

    For prompts of :class:`lit_grpo.data.ReasoningGymPrompts`, of any task and of several in one run. Scores are
    computed in worker processes with a hard time limit: some tasks parse or run what the model wrote.

    Args:
        pattern: regular expression with one group, the answer; its last match in the completion counts. None: the
            answer is what the last complete ``answer_tag`` holds. ``(?s)^(.+)$`` is the whole completion.
        answer_tag: name of the tag around an answer.
        limit: seconds for one answer; one that takes longer is wrong and counted as
            ``reward_errors/timeout_frac/<name>``.
        workers: processes; None: one a core, at most 8.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: a broken pattern; a tag that is no name; a prompt of another source.
    """

    extracts_answer = True
    range = (0.0, 1.0)

    def __init__(
        self,
        pattern: str | None = None,
        answer_tag: str = "answer",
        limit: float = 10.0,
        workers: int | None = None,
        weight: float = 1.0,
        name: str | None = "reasoning_gym",
    ) -> None:
        super().__init__(weight, name)
        try:
            self._pattern = re.compile(pattern) if pattern is not None else None
        except re.error as error:
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
        if not limit > 0:
            raise UserError(f"limit is {limit}", where="ReasoningGymReward.limit", remedy="give a positive number")
        self._pool = WorkerPool(score_entry, limit=limit, workers=workers, memory=4 * 1024**3)

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        answers = [self._answer(item.text) for item in batch]
        # Workers get only what has an answer: every other completion is wrong without being asked about.
        with_answer = [(i, answer) for i, answer in enumerate(answers) if answer is not None]
        outcomes = self._pool.map([(*_entry(batch[i]), answer) for i, answer in with_answer])
        scores = [Score(0.0, no_answer=True)] * len(batch)
        for (i, _), outcome in zip(with_answer, outcomes, strict=True):
            # A task that fails on what the model wrote has not called it right; `failed` counts such answers.
            value = float(outcome.value) if outcome.status == "ok" else 0.0
            scores[i] = Score(value, outcome.status == "timeout", outcome.status in ("error", "crash"))
        return scores

    def _answer(self, text: str) -> str | None:
        if self._pattern is None:
            answer = last_tag(text, self._answer_tag)[0]
        else:
            matches = self._pattern.findall(text)
            answer = matches[-1] if matches else None
        return answer.strip() or None if answer is not None else None

    def close(self) -> None:
        self._pool.close()


def _entry(item: RewardInput) -> tuple[str, Any]:
    """Return the task and its entry, which the prompt's source has put into its row."""
    problem = item.prompt.extra.get("reasoning_gym")
    if not isinstance(problem, dict):
        raise UserError(
            f"the prompt {item.prompt.id!r} is no problem of reasoning-gym",
            where="ReasoningGymReward",
            remedy="use it with lit_grpo.data.ReasoningGymPrompts alone",
        )
    return problem["task"], problem["entry"]
