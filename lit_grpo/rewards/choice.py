"""The multiple-choice reward: the letter of the right option."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.math.answer import Extract, check_extract, final_answer, gold_answer, has_form
from lit_grpo.rewards.math.text import clean
from lit_grpo.types import RewardInput, Score

_LONGEST = 2_000
_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n+")
# A sentence with one of these names an option and does not choose it, or chooses more than one.
_OPEN = re.compile(
    r"\b(?:not|neither|nor|never|no|incorrect|wrong|false|except|unless|but|maybe|perhaps|might|may|could|possibly|either"
    r"|or|and|if|unsure|guess|wait|actually|anything)\b|n't\b|\?|&|/|\|",
    re.IGNORECASE,
)


class ChoiceReward(Reward):
    r"""Reward of 1 if the final answer is the letter of the gold answer, alone or with its option's text, else 0.

    ``C``, ``(C)``, ``\boxed{C}``, ``<answer>C</answer>``, ``**C.** Paris``, "The answer is (C) Paris", "Option C is
    correct." and "I choose C" all say C; "B or C", "maybe C" and "not C" say nothing. A bare small letter counts in a
    tag, a box or behind "answer", "option" or the like, since "a" is a word.

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
        self._alone = re.compile(rf"[(\[]([{both}])[)\]]|([{letters}]|[{letters.lower()}](?=\)))\)?")
        self._with_text = re.compile(rf"(?:\(([{both}])\)|([{letters}])\s*(?:[.:)]|[-–—]\s))\s*(\S.*)", re.DOTALL)
        # "(B) Paris or (C)" names two options, and so none.
        self._another = re.compile(rf"\(([{letters}])\)|\b(?:or|and)\s+\(?[{letters}]\)?(?![a-zA-Z])")

        name = rf"[*(\[]*([{both}])[)\]*]*(?!\w)"
        self._named = re.compile(
            rf"\b(?i:option|choice|letter|answer)\s*(?i:is\s*)?:?\s*{name}"
            rf"|(?<!\w)[*(\[]*([{letters}])[)\]*.]*\s+(?:is|must be|should be|has to be)\s+"
            r"(?:the\s+|indeed\s+|definitely\s+)?"
            r"(?:correct|right|best|true|final|answer)\b"
            rf"|\b(?i:choose|pick|select|go with|must be|it'?s|it is)\s+(?:the\s+)?[*(\[]*([{letters}])[)\]*]*"
            r"(?=\W*$|\s*[,;]|\s+(?:because|since|as)\b)"
        )
        # A capital that stands alone, unless it is the article or the pronoun.
        self._mentioned = re.compile(rf"(?<![\w'])([{letters}])(?![\w'])(?!(?<=A)\s+[a-z])(?!(?<=I)[\s,])")
        self._small = re.compile(rf"[({{\[*$.\s]*([{letters.lower()}])[)}}\]*$.\s]*")
        self._small_behind = re.compile(rf"\b(?i:answer|option|choice|letter)\b[^\n.]{{0,30}}\b[{letters.lower()}]\W*$")

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
        text, cut = item.text, item.completion.truncated
        answer = final_answer(text, "option", cut, self._extract, self._answer_tag)
        if answer and (letter := self.letter(answer)):
            return letter
        if cut:
            # What is cut off may be the word that takes the choice back.
            return None
        if has_form(text, self._extract, self._answer_tag):
            if not answer:
                return None
            small = self._small.fullmatch(answer)
            return small[1].upper() if small else self._chosen(answer)
        if self._extract != "auto":
            return None
        small = self._small.fullmatch(answer) if answer else None
        if small and self._small_behind.search(text[-_LONGEST:].rstrip()):
            return small[1].upper()
        return self._chosen(text)

    def _chosen(self, text: str) -> str | None:
        """Return the option that the last sentence chooses, or that the text begins with and gives reasons for."""
        text = text.strip()
        if len(text) <= _LONGEST and (match := self._with_text.fullmatch(text)):
            letter = (match[1] or match[2]).upper()
            others = {found[1] for found in self._mentioned.finditer(match[3])} - {letter}
            return letter if not others and not _OPEN.search(match[3]) else None
        sentence = next((part for part in reversed(_SENTENCES.split(text[-_LONGEST:])) if part.strip()), "")
        named = {next(filter(None, match.groups())).upper() for match in self._named.finditer(sentence)}
        others = {found[1] for found in self._mentioned.finditer(sentence)} - named
        return named.pop() if len(named) == 1 and not others and not _OPEN.search(sentence) else None

    def letter(self, text: str) -> str | None:
        """Return the one option that an answer names, or None."""
        if len(text) > _LONGEST:
            return None
        cleaned = clean(text)
        # Cleaning takes away brackets around the whole, and with them what tells (a) from a.
        match = self._alone.fullmatch(text.strip().strip("*$. ")) or self._alone.fullmatch(cleaned)
        if match is None and (match := self._with_text.fullmatch(cleaned)) and self._another.search(match[3]):
            return None
        return (match[1] or match[2]).upper() if match else None
