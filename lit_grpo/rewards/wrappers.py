"""Rewards made of other rewards: around one of them, or one for each source of a mixture."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from lit_grpo.errors import UserError, nearest
from lit_grpo.rewards.base import Reward
from lit_grpo.types import RewardInput, Score


class WrappingReward(Reward):
    """Base class of rewards that change the value of another one, which is logged as ``reward/<name>/inner``.

    A subclass gives ``change``.

    Args:
        reward: the wrapped reward; its weight and name are not used.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: the wrapped reward does not say whether an answer is right.
    """

    def __init__(self, reward: Reward, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        if reward.correct_threshold is None:
            raise UserError(
                f"{type(reward).__name__} does not say whether an answer is right",
                where=f"{type(self).__name__}.reward",
                remedy="wrap one that does, for instance class_path: lit_grpo.rewards.MathReward",
            )
        self.reward = reward
        # By identity of the inner reward, so that the same source always gets the same object.
        self._by_inner: dict[int, WrappingReward] = {}
        self.needs_answer, self.extracts_answer = reward.needs_answer, reward.extracts_answer
        self.needs_tokens = self.needs_tokens or reward.needs_tokens

    def for_source(self, source: str) -> Reward:
        """Return this reward around what the wrapped one has for the source; the same object for the same source."""
        inner = self.reward.for_source(source)
        if inner is self.reward:
            return self
        if id(inner) not in self._by_inner:
            # A shallow copy differs in the wrapped reward alone, and keeps this one's arguments, weight and name.
            twin = copy.copy(self)
            twin.reward = inner
            twin.needs_answer, twin.extracts_answer = inner.needs_answer, inner.extracts_answer
            self._by_inner[id(inner)] = twin
        return self._by_inner[id(inner)]

    def change(self, item: RewardInput, score: Score) -> float:
        """Compute the new value of a completion from the wrapped reward's score."""
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


@dataclass
class SourceReward:
    """The reward for the prompts of some sources.

    Attributes:
        sources: names of the sources, as in ``init_args.name`` of a source or the name of an evaluation set's
            benchmark.
        reward: the reward that scores their completions; its weight and name are not used.
    """

    sources: list[str]
    reward: Reward


class RewardBySource(Reward):
    """Reward that scores each completion by the reward of its prompt's source: one verdict in a mixture of tasks.

    A source that is not named is refused when the data is loaded, before any model is. What the rewards log besides
    their value is logged under this one's name.

    Args:
        rewards: the rewards, each with the sources whose prompts it scores.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: no reward, a source that is named twice, a weight of an inner reward, or inner rewards that do not
            agree on what is right.
    """

    def __init__(self, rewards: list[SourceReward], weight: float = 1.0, name: str | None = "by_source") -> None:
        super().__init__(weight, name)
        where = f"{type(self).__name__}.rewards"
        if not rewards:
            raise UserError("no reward is given", where=where, remedy="- {sources: [NAME], reward: {class_path: ...}}")
        self._by_source: dict[str, Reward] = {}
        for given in rewards:
            for source in given.sources:
                if source in self._by_source:
                    raise UserError(f"two rewards are given for the source {source!r}", where=where, remedy="keep one")
                self._by_source[source] = given.reward
        self._rewards = tuple(given.reward for given in rewards)
        for reward in self._rewards:
            if reward.weight != 1.0:
                raise UserError(
                    f"the weight of {reward.name!r} is not used here, and it is {reward.weight:g}",
                    where=where,
                    remedy="weigh the whole: init_args.weight of RewardBySource",
                )
        first, *others = self._rewards
        for other in others:
            if other.correct_threshold != first.correct_threshold:
                raise UserError(
                    f"{first.name!r} holds {_threshold(first)} for right, {other.name!r} {_threshold(other)}: one pass "
                    "rate over both would mean nothing",
                    where=where,
                    remedy="set their correct_threshold alike, or give them to runs of their own",
                )
        self.correct_threshold = first.correct_threshold
        self.range = min(r.range[0] for r in self._rewards), max(r.range[1] for r in self._rewards)
        self.needs_answer = any(r.needs_answer for r in self._rewards)
        self.extracts_answer = any(r.extracts_answer for r in self._rewards)
        self.needs_tokens = any(r.needs_tokens for r in self._rewards)

    def for_source(self, source: str) -> Reward:
        if source not in self._by_source:
            near = nearest(source, self._by_source)
            raise UserError(
                f"no reward is given for prompts of the source {source!r}" + (f", but for {near!r}" if near else ""),
                where=f"{type(self).__name__}.rewards",
                remedy=f"add - {{sources: [{source}], reward: {{class_path: ...}}}}, or name it where it belongs",
            )
        return self._by_source[source].for_source(source)

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        scores: dict[int, Score] = {}
        for reward, indices in self._split(batch):
            for i, score in zip(indices, reward.score([batch[i] for i in indices]), strict=True):
                scores[i] = score if isinstance(score, Score) else Score(float(score))
        return [scores[i] for i in range(len(batch))]

    def final_answers(self, batch: Sequence[RewardInput]) -> list[str | None] | None:
        by_index: dict[int, str | None] = {}
        for reward, indices in self._split(batch):
            answers = reward.final_answers([batch[i] for i in indices])
            if answers is not None:
                by_index |= dict(zip(indices, answers, strict=True))
        return [by_index.get(i) for i in range(len(batch))] if by_index else None

    def _split(self, batch: Sequence[RewardInput]) -> list[tuple[Reward, list[int]]]:
        """Return each reward with the indices of the batch that it scores."""
        # By identity: rewards that are equal but for their object may have worker processes of their own.
        split: dict[int, tuple[Reward, list[int]]] = {}
        for i, item in enumerate(batch):
            reward = self.for_source(item.prompt.source)
            split.setdefault(id(reward), (reward, []))[1].append(i)
        return list(split.values())

    def start(self) -> None:
        for reward in self._rewards:
            reward.start()

    def close(self) -> None:
        for reward in self._rewards:
            reward.close()


def _threshold(reward: Reward) -> str:
    return "nothing" if reward.correct_threshold is None else f"{reward.correct_threshold:g}"
