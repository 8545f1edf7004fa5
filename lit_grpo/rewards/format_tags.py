"""The format reward: whether a completion has the tags that it was asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.types import RewardInput, Score


class FormatReward(Reward):
    """Reward of ``full`` if all tags are there, ``partial`` if some are, else 0: 10, 1 and 0 as in GTPO (2508.03772).

    All are there if each ``<tag>...</tag>`` occurs exactly once, in the given order, one after the other, with
    something inside and nothing but space outside. Some are there if any opening or closing tag is. That is the form
    alone; whether the answer is right is another reward's affair (GTPO: 10 for a right one).

    Args:
        tags: names of the tags, in order.
        full: value of the whole format.
        partial: value where any tag occurs.
        opened: True if the prompt already ends in the first opening tag, so that the completion begins inside it.
        strict: True if text outside the tags breaks the format.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: no tag, a tag twice, or one that is no name.
    """

    correct_threshold = None

    def __init__(
        self,
        tags: Sequence[str] = ("think", "answer"),
        full: float = 10.0,
        partial: float = 1.0,
        opened: bool = False,
        strict: bool = True,
        weight: float = 1.0,
        name: str | None = "format",
    ) -> None:
        super().__init__(weight, name)
        if not tags or len(set(tags)) != len(tags) or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
            raise UserError(
                f"tags are {list(tags)}", where="FormatReward.tags", remedy="name each once, as in [think, answer]"
            )
        # With `opened` the prompt holds the first opening tag, so the completion must not have it again.
        self._marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")][int(opened) :]
        self._full, self._partial, self._opened, self._strict = full, partial, opened, strict
        self.range = (min(0.0, full, partial), max(0.0, full, partial))

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [Score(self._value(item.text)) for item in batch]

    def _value(self, text: str) -> float:
        if self._is_complete(text):
            return self._full
        return self._partial if any(mark in text for mark in self._marks) else 0.0

    def _is_complete(self, text: str) -> bool:
        if any(text.count(mark) != 1 for mark in self._marks):
            return False
        pieces, inside = [], self._opened
        for mark in self._marks:
            before, mark_found, text = text.partition(mark)
            if not mark_found:
                # Every mark is there once, so one that does not follow the last stands before it: out of order.
                return False
            pieces.append((before, inside))
            inside = not inside
        pieces.append((text, False))
        return all(bool(piece.strip()) if within else not (self._strict and piece.strip()) for piece, within in pieces)
