"""The multiple-choice reward: the letter of the right option."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.math.answer import Extract, check_extract, final_answer, gold_answer
from lit_grpo.rewards.math.text import clean
from lit_grpo.types import RewardInput, Score


class ChoiceReward(Reward):
    r"""Reward of 1 if the final answer is the letter of the gold answer, alone or with its option's text, else 0.

    ``C``, ``(C)``, ``\boxed{C}``, ``<answer>C</answer>``, ``**C.** Paris`` and "The answer is (C) Paris" all say C;
    "B or C" and "not C" say nothing. Case counts only where a letter stands bare, since "a" is a word.

    Args:
        letters: letters of the options.
        extract: form in which an answer counts: ``auto``, ``boxed`` or ``tag``, as in
            :class:`lit_grpo.rewards.MathReward`.
        answer_tag: name of the tag around an answer.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: ``letters`` are no distinct capitals, or ``extract`` or ``answer_tag`` is none.
        ValueError: from ``score``, if a gold answer is none of the letters.
    """

    needs_answer = True
    extracts_answer = True
    range = (0.0, 1.0)

    def __init__(
        self,
        letters: str = "ABCDEFGHIJ",
        extract: Literal["auto", "boxed", "tag"] = "auto",
        answer_tag: str = "answer",
        weight: float = 1.0,
        name: str | None = "choice",
    ) -> None:
        super().__init__(weight, name)
        if not re.fullmatch("[A-Z]+", letters) or len(set(letters)) != len(letters):
            raise UserError(f"letters are {letters!r}", where="ChoiceReward.letters", remedy="as in ABCD")
        check_extract(extract, answer_tag, "ChoiceReward", ("auto", "boxed", "tag"))
        self._extract: Extract = extract
        self._answer_tag = answer_tag
        both = letters + letters.lower()
        self._letters = letters
        self._alone = re.compile(rf"\(([{both}])\)|([{letters}])\)?")
        self._with_text = re.compile(rf"(?:\(([{both}])\)|([{letters}])\s*[.:)])\s*(\S.*)", re.DOTALL)
        # "(B) Paris or (C)" names two options, and so none.
        self._another = re.compile(rf"\(([{letters}])\)|\b(?:or|and)\s+\(?[{letters}]\)?(?![a-zA-Z])")

    def row_problem(self, answer: str | None, extra: Mapping[str, Any]) -> str | None:
        if self.letter(gold_answer(answer or "")) is None:
            return f"the gold answer {str(answer)[:80]!r} is none of {self._letters}"
        return None

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: RewardInput) -> Score:
        gold = self.letter(gold_answer(item.prompt.answer or ""))
        if gold is None:
            raise ValueError(self.row_problem(item.prompt.answer, item.prompt.extra))
        letter = self._letter(item)
        return Score(float(letter == gold), no_answer=letter is None)

    def final_answers(self, batch: Sequence[RewardInput]) -> list[str | None]:
        return [self._letter(item) for item in batch]

    def _letter(self, item: RewardInput) -> str | None:
        answer = final_answer(item.text, "option", item.completion.truncated, self._extract, self._answer_tag)
        return self.letter(answer) if answer else None

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
