"""The format reward: whether a completion has the tags that it was asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.types import RewardInput, Score

Rule = Literal["paper", "released", "ordered", "strict"]
"""What the whole format is; see :class:`FormatReward`."""


class FormatReward(Reward):
    """Reward of ``full`` for the whole format, ``partial`` for a part of it, else 0.

    The rules, from the laxest to the strictest:

    - ``paper``: 10, 1 and 0 as in GTPO (2508.03772, appendix "Reward Settings"): ``full`` if every opening and closing
      tag occurs in the text, ``partial`` if only some do. Their order, their number and the text around them do not
      count.
    - ``released``: as the code that GTPO's authors published grades (``reward_math.py``): ``full`` if each
      ``<tag>...</tag>`` is there, in any order, and that of the last tag ends the text (a line feed may follow). Else
      ``partial`` if one of these pairs is there, one and a half times as much if a tag of another pair is there too; an
      opening or closing tag alone is worth 0.
    - ``ordered``: each pair exactly once, in the given order, one after the other, with something inside; ``partial``
      as with ``paper``.
    - ``strict``: ``ordered``, and nothing but space outside the pairs.

    That is the form alone; whether the answer is right is another reward's affair. Where a right answer in a broken
    format should earn nothing, as in GTPO's released code, see :class:`lit_grpo.rewards.GatedReward`.

    Args:
        tags: names of the tags, in order.
        full: value of the whole format.
        partial: value of a part of it.
        opened: True if the prompt already ends in the first opening tag, so that the completion begins inside it.
        rule: what the whole format is.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: no tag, a tag twice, or one that is no name; an unknown rule.
    """

    correct_threshold = None

    def __init__(
        self,
        tags: Sequence[str] = ("think", "answer"),
        full: float = 10.0,
        partial: float = 1.0,
        opened: bool = False,
        rule: Rule = "paper",
        weight: float = 1.0,
        name: str | None = "format",
    ) -> None:
        super().__init__(weight, name)
        if not tags or len(set(tags)) != len(tags) or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
            raise UserError(
                f"tags are {list(tags)}", where="FormatReward.tags", remedy="name each once, as in [think, answer]"
            )
        if rule not in get_args(Rule):
            raise UserError(
                f"rule is {rule!r}", where="FormatReward.rule", remedy=f"it is one of {', '.join(get_args(Rule))}"
            )
        self._tags = list(tags)
        # With `opened` the prompt holds the first opening tag, so the completion must not have it again.
        self._marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")][int(opened) :]
        self._full, self._partial, self._opened, self._rule = full, partial, opened, rule
        values = (0.0, full, partial, 1.5 * partial if rule == "released" else 0.0)
        self.range = min(values), max(values)

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [Score(self._value(item.text)) for item in batch]

    def _value(self, text: str) -> float:
        if self._rule == "released":
            return self._released_value(text)
        whole = all(mark in text for mark in self._marks)
        if whole and (self._rule == "paper" or self._is_in_order(text)):
            return self._full
        return self._partial if whole or any(mark in text for mark in self._marks) else 0.0

    def _released_value(self, text: str) -> float:
        if self._opened:
            text = f"<{self._tags[0]}>{text}"
        *others, last = self._tags
        complete = [tag for tag in others if self._has_pair(text, tag)]
        # As `$` of a regular expression, which one line feed may follow.
        end = text.removesuffix("\n")
        # From the first opening tag to the end of the text, whatever lies between: so the released pattern has it.
        opening = text.find(f"<{last}>")
        if end.endswith(f"</{last}>") and 0 <= opening <= len(end) - len(f"<{last}></{last}>"):
            complete.append(last)
        if len(complete) == len(self._tags):
            return self._full
        if not complete:
            return 0.0
        rest = [tag for tag in self._tags if tag not in complete]
        return self._partial * (1.5 if any(f"<{tag}>" in text or f"</{tag}>" in text for tag in rest) else 1.0)

    @staticmethod
    def _has_pair(text: str, tag: str) -> bool:
        opening = text.find(f"<{tag}>")
        return opening >= 0 and text.find(f"</{tag}>", opening) >= 0

    def _is_in_order(self, text: str) -> bool:
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
        strict = self._rule == "strict"
        return all(bool(piece.strip()) if within else not (strict and piece.strip()) for piece, within in pieces)
