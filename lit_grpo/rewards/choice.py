"""The multiple-choice reward: the letter of the right option."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.math.answer import final_answer, gold_answer
from lit_grpo.rewards.math.text import clean
from lit_grpo.types import RewardInput, Score


class ChoiceReward(Reward):
    r"""Reward of 1 if the final answer is the letter of the gold answer, alone or with its option's text, else 0.

    ``C``, ``(C)``, ``\boxed{C}``, ``**C.** Paris`` and "The answer is (C) Paris" all say C; "B or C" and "not C" say
    nothing. Case counts only where a letter stands bare, since "a" is a word.

    Args:
        letters: letters of the options.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: ``letters`` are no distinct capitals.
        ValueError: from ``score``, if a gold answer is none of the letters.
    """

    needs_answer = True
    extracts_answer = True
    range = (0.0, 1.0)

    def __init__(self, letters: str = "ABCDEFGHIJ", weight: float = 1.0, name: str | None = "choice") -> None:
        super().__init__(weight, name)
        if not re.fullmatch("[A-Z]+", letters) or len(set(letters)) != len(letters):
            raise UserError(f"letters are {letters!r}", where="ChoiceReward.letters", remedy="as in ABCD")
        both = letters + letters.lower()
        self._letters = letters
        self._alone = re.compile(rf"\(([{both}])\)|([{letters}])\)?")
        self._with_text = re.compile(rf"(?:\(([{both}])\)|([{letters}])\s*[.:)])\s*(\S.*)", re.DOTALL)
        # "(B) Paris or (C)" names two options, and so none.
        self._another = re.compile(rf"\(([{letters}])\)|\b(?:or|and)\s+\(?[{letters}]\)?(?![a-zA-Z])")

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: RewardInput) -> Score:
        gold = self.letter(gold_answer(item.prompt.answer or ""))
        if gold is None:
            raise ValueError(f"the gold answer {str(item.prompt.answer)[:80]!r} is none of {self._letters}")
        answer = final_answer(item.text, "option", item.completion.truncated)
        letter = self.letter(answer) if answer else None
        return Score(float(letter == gold), no_answer=letter is None)

    def final_answers(self, batch: Sequence[RewardInput]) -> list[str | None]:
        answers = [final_answer(item.text, "option", item.completion.truncated) for item in batch]
        return [self.letter(answer) if answer else None for answer in answers]

    def letter(self, text: str) -> str | None:
        """Return the one option that an answer names, or None."""
        if len(text) > 2_000:
            return None
        cleaned = clean(text)
        # Cleaning takes away brackets around the whole, and with them what tells (a) from a.
        match = self._alone.fullmatch(text.strip().strip("*$. ")) or self._alone.fullmatch(cleaned)
        if match is None and (match := self._with_text.fullmatch(cleaned)) and self._another.search(match[3]):
            return None
        return (match[1] or match[2]).upper() if match else None
