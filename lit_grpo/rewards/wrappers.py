"""Rewards made of other rewards: around one of them, or one for each source of a mixture."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward, answers_within, score_within
from lit_grpo.rewards.returned import SKIPPED, given_score
from lit_grpo.types import RewardInput, Score
from lit_grpo.utils.spelling import nearest


class WrappingReward(Reward):
    """Base class of rewards that change the value of another one, which is logged as ``reward/<name>/inner``.

    A subclass gives ``change``. Where the wrapped reward gives None, so does this one.

    Args:
        reward: the wrapped reward; its weight and name are not used.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: the wrapped reward does not say whether an answer is right.
    """

    # Those of the wrapped rewards are kept.
    score_limit = None

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
        self.deterministic = reward.deterministic

    def row_problem(self, answer: str | None, extra: Mapping[str, Any]) -> str | None:
        return self.reward.row_problem(answer, extra)

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
        for item, given in zip(batch, score_within(self.reward, batch), strict=True):
            score = given_score(given)
            if score.skipped:
                scores.append(score)
                continue
            details = {**(score.details or {}), "inner": score.value}
            scores.append(score._replace(value=self.change(item, score), details=details))
        return scores

    def final_answers(self, batch: Sequence[RewardInput]) -> Sequence[str | None] | None:
        return answers_within(self.reward, batch)

    def start(self) -> None:
        self.reward.start()

    def close(self) -> None:
        self.reward.close()


class GatedReward(WrappingReward):
    """Reward of the wrapped one where another one, the gate, has full marks, else ``closed``.

    With a format reward as the gate it is "accuracy only with the full format", as GTPO's released code has it; GTPO's
    paper has no such gate. The gate is part of the verdict: an answer that it shuts out counts as wrong for pass@k,
    filters by difficulty and ``lit-grpo score``, and casts no vote in maj@k. Where the verdict should stay the
    verifier's own, put the verifier before this reward in the list, with weight 0: the first that says what is right is
    asked.

    ``inner`` is logged as with every wrapper: the wrapped reward's own mean, gate or no gate; ``open`` is the share of
    completions with full marks from the gate. Where one of the two gives None, so does this reward.

    Args:
        reward: the wrapped reward; its weight and name are not used.
        gate: the reward that must have full marks, for instance a :class:`lit_grpo.rewards.FormatReward`. It adds
            nothing to the total; list it as well if it should.
        at_least: value from which on the gate is open; None: the greatest value that it can give.
        closed: value of a completion whose gate is shut.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: the wrapped reward does not say whether an answer is right, ``closed`` would be right, or the gate
            has no greatest value and ``at_least`` is left out.
    """

    score_limit = None

    def __init__(
        self,
        reward: Reward,
        gate: Reward,
        at_least: float | None = None,
        closed: float = 0.0,
        weight: float = 1.0,
        name: str | None = "gated",
    ) -> None:
        super().__init__(reward, weight, name)
        at_least = gate.range[1] if at_least is None else at_least
        if not math.isfinite(at_least):
            raise UserError(
                f"full marks of {gate.name!r} are not known",
                where="GatedReward.gate",
                remedy="say in at_least from which value on the gate is open",
            )
        if reward.correct(closed):
            raise UserError(
                f"closed is {closed:g}, which is right for {reward.name!r}",
                where="GatedReward.closed",
                remedy="give a smaller one",
            )
        self.gate, self._at_least, self._closed = gate, at_least, closed
        self.correct_threshold = reward.correct_threshold
        self.range = min(closed, reward.range[0]), max(closed, reward.range[1])
        self.needs_answer = reward.needs_answer or gate.needs_answer
        self.needs_tokens = reward.needs_tokens or gate.needs_tokens
        self.deterministic = reward.deterministic and gate.deterministic

    def for_source(self, source: str) -> Reward:
        """Return this reward around what the wrapped one has for the source; the same object for the same source."""
        own = super().for_source(source)
        # The gate has to know the source as well, though it finds its reward for it by itself.
        gate = self.gate.for_source(source)
        if own is not self:
            own.needs_answer = own.needs_answer or gate.needs_answer
        return own

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        scores = []
        for score, is_open in zip(super().score(batch), self._open(batch), strict=True):
            if score.skipped or is_open is None:
                scores.append(score if score.skipped else SKIPPED)
                continue
            details = {**(score.details or {}), "open": float(is_open)}
            scores.append(score._replace(value=score.value if is_open else self._closed, details=details))
        return scores

    def change(self, item: RewardInput, score: Score) -> float:
        return score.value

    def final_answers(self, batch: Sequence[RewardInput]) -> Sequence[str | None] | None:
        answers = answers_within(self.reward, batch)
        if answers is None:
            return None
        return [answer if is_open else None for answer, is_open in zip(answers, self._open(batch), strict=True)]

    def _open(self, batch: Sequence[RewardInput]) -> list[bool | None]:
        """Say for each completion whether its gate is open; None where the gate gave None."""
        given = [given_score(one) for one in score_within(self.gate, batch)]
        # The same allowance as in `Reward.correct`: sums of shares may miss full marks by a rounding error.
        return [None if score.skipped else score.value >= self._at_least - 1e-9 for score in given]

    def start(self) -> None:
        super().start()
        self.gate.start()

    def close(self) -> None:
        super().close()
        self.gate.close()


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

    # Those of the inner rewards are kept.
    score_limit = None

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
        self.deterministic = all(r.deterministic for r in self._rewards)

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
            for i, score in zip(indices, score_within(reward, [batch[i] for i in indices]), strict=True):
                scores[i] = given_score(score)
        return [scores[i] for i in range(len(batch))]

    def final_answers(self, batch: Sequence[RewardInput]) -> list[str | None] | None:
        by_index: dict[int, str | None] = {}
        for reward, indices in self._split(batch):
            answers = answers_within(reward, [batch[i] for i in indices])
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
