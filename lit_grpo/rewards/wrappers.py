"""Rewards around another reward."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.types import RewardInput, Score


class WrappingReward(Reward):
    """Base of rewards that change what another one says. The other's value is logged as ``reward/<name>/inner``.

    Args:
        reward: the other; its weight and name are not used.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: the other reward does not say whether an answer is right.
    """

    def __init__(self, reward: Reward, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        if reward.correct_at is None:
            raise UserError(
                f"{type(reward).__name__} does not say whether an answer is right",
                where=f"{type(self).__name__}.reward",
                remedy="wrap one that does, for instance class_path: lit_grpo.rewards.MathReward",
            )
        self.reward, self.made_of = reward, (reward,)
        self._around: dict[int, WrappingReward] = {}
        self.needs_answer, self.finds_answer = reward.needs_answer, reward.finds_answer
        self.needs_tokens = self.needs_tokens or reward.needs_tokens

    def for_source(self, source: str) -> Reward:
        """Around what the other has for the source."""
        inner = self.reward.for_source(source)
        if inner is self.reward:
            return self
        if id(inner) not in self._around:
            twin = copy.copy(self)
            twin.reward, twin.made_of = inner, (inner,)
            twin.needs_answer, twin.finds_answer = inner.needs_answer, inner.finds_answer
            self._around[id(inner)] = twin
        return self._around[id(inner)]

    def change(self, item: RewardInput, score: Score) -> float:
        """The new value."""
        raise NotImplementedError

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        scores = []
        for item, given in zip(batch, self.reward.score(batch), strict=True):
            score = given if isinstance(given, Score) else Score(float(given))
            details = {**(score.details or {}), "inner": score.value}
            scores.append(score._replace(value=self.change(item, score), details=details))
        return scores

    def final_answers(self, batch: Sequence[RewardInput]) -> Sequence[str | None] | None:
        return self.reward.final_answers(batch)

    def start(self) -> None:
        self.reward.start()

    def close(self) -> None:
        self.reward.close()
