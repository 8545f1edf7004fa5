"""Another reward for each source of a mixture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.errors import UserError, nearest
from lit_grpo.rewards.base import Reward
from lit_grpo.types import RewardInput, Score


@dataclass
class SourceReward:
    """What judges the prompts of some sources.

    Attributes:
        sources: their names, as in ``init_args.name`` of a source or the name of an evaluation set's benchmark.
        reward: its weight and name are not used.
    """

    sources: list[str]
    reward: Reward


class RewardBySource(Reward):
    """Judges each completion by the reward of its prompt's source: one verdict in a mixture of different tasks.

    A source that is not named is refused when the data is loaded, before any model is. What the rewards log besides
    their value is logged under this one's name.

    Args:
        rewards: each with its sources.
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
        self._of: dict[str, Reward] = {}
        for one in rewards:
            for source in one.sources:
                if source in self._of:
                    raise UserError(f"two rewards are given for the source {source!r}", where=where, remedy="keep one")
                self._of[source] = one.reward
        self.made_of = tuple(one.reward for one in rewards)
        for reward in self.made_of:
            if reward.weight != 1.0:
                raise UserError(
                    f"the weight of {reward.name!r} is not used here, and it is {reward.weight:g}",
                    where=where,
                    remedy="weigh the whole: init_args.weight of RewardBySource",
                )
        first, *others = self.made_of
        for other in others:
            if other.correct_at != first.correct_at:
                raise UserError(
                    f"{first.name!r} holds {_from(first)} for right, {other.name!r} {_from(other)}: one pass rate over "
                    "both would mean nothing",
                    where=where,
                    remedy="set their correct_at alike, or give them to runs of their own",
                )
        self.correct_at = first.correct_at
        self.range = min(r.range[0] for r in self.made_of), max(r.range[1] for r in self.made_of)
        self.needs_answer = any(r.needs_answer for r in self.made_of)
        self.finds_answer = any(r.finds_answer for r in self.made_of)
        self.needs_tokens = any(r.needs_tokens for r in self.made_of)

    def for_source(self, source: str) -> Reward:
        if source not in self._of:
            near = nearest(source, self._of)
            raise UserError(
                f"no reward is given for prompts of the source {source!r}" + (f", but for {near!r}" if near else ""),
                where=f"{type(self).__name__}.rewards",
                remedy=f"add - {{sources: [{source}], reward: {{class_path: ...}}}}, or name it where it belongs",
            )
        return self._of[source].for_source(source)

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        found: dict[int, Score] = {}
        for reward, places in self._parts(batch):
            scores = reward.score([batch[i] for i in places])
            for i, score in zip(places, scores, strict=True):
                found[i] = score if isinstance(score, Score) else Score(float(score))
        return [found[i] for i in range(len(batch))]

    def final_answers(self, batch: Sequence[RewardInput]) -> list[str | None] | None:
        found: dict[int, str | None] = {}
        for reward, places in self._parts(batch):
            answers = reward.final_answers([batch[i] for i in places])
            if answers is not None:
                found |= dict(zip(places, answers, strict=True))
        return [found.get(i) for i in range(len(batch))] if found else None

    def _parts(self, batch: Sequence[RewardInput]) -> list[tuple[Reward, list[int]]]:
        """(reward, places of the batch that it judges)."""
        parts: dict[int, tuple[Reward, list[int]]] = {}
        for i, item in enumerate(batch):
            reward = self.for_source(item.prompt.source)
            parts.setdefault(id(reward), (reward, []))[1].append(i)
        return list(parts.values())

    def start(self) -> None:
        for reward in self.made_of:
            reward.start()

    def close(self) -> None:
        for reward in self.made_of:
            reward.close()


def _from(reward: Reward) -> Any:
    return "nothing" if reward.correct_at is None else f"{reward.correct_at:g}"
