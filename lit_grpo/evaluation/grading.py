"""Grades of a scored batch: which completions are right, and which give the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_grpo.evaluation.sets import LOGPROB, TOTAL, EvaluationPart
from lit_grpo.rewards.base import Reward, primary_reward
from lit_grpo.rewards.combine import final_answers
from lit_grpo.types import RewardInput, Rollout


@dataclass
class Graded:
    """Grades of a scored batch, kept in ``Rollout.evaluation``."""

    part: EvaluationPart
    """The pass over an evaluation set that the batch is part of."""
    correct: Tensor | None
    """``Rollout.correct``: [N] bool; None where no reward says what is right.
    ``Rollout.judged`` says where it holds."""
    answers: list[str | None] | None
    """Normal form of each final answer, None where there is none; None altogether where no reward gives one."""
    seeds: list[int]
    """Seed that each completion was sampled with."""


def grade(rollout: Rollout, rewards: Sequence[Reward], part: EvaluationPart, seeds: list[int]) -> Graded:
    """Grade a scored rollout: its verdicts, and the final answers that the reward behind them found."""
    reward = primary_reward(rewards)
    if reward is None:
        return Graded(part, None, None, seeds)
    size = rollout.group_size
    items = [
        RewardInput(rollout.prompts[i // size], completion, text)
        for i, (completion, text) in enumerate(zip(rollout.completions, rollout.texts, strict=True))
    ]
    return Graded(part, rollout.correct, final_answers(reward, items), seeds)


def answer_classes(correct: Tensor, answers: Sequence[str | None], group_size: int) -> Tensor:
    """Number the distinct answers of each prompt, [prompts, group_size] int64; -1 where a completion has none.

    Right answers all equal the gold and so each other, however they are written: class 0. Wrong ones are equal where
    their normal forms are.
    """
    rows = []
    for start in range(0, len(answers), group_size):
        seen: dict[str, int] = {}
        row = []
        for i in range(start, start + group_size):
            answer = answers[i]
            if correct[i]:
                row.append(0)
            else:
                row.append(-1 if answer is None else seen.setdefault(answer, len(seen) + 1))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64).view(-1, group_size)


def selector_scores(rollout: Rollout, selector: str) -> Tensor:
    """Return the scores that best-of-k chooses by, [prompts, group_size] float64; NaN where log-probs are not known."""
    if selector == TOTAL:
        values = rollout.reward.double()
    elif selector == LOGPROB:
        means = [sum(c.logprobs) / len(c.logprobs) if c.logprobs else float("nan") for c in rollout.completions]
        values = torch.tensor(means, dtype=torch.float64)
    else:
        values = rollout.rewards[selector].double()
    return values.view(-1, rollout.group_size)
