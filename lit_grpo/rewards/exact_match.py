"""Exact match: 1 where the answer is the gold answer, character for character."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.types import RewardInput, Score


class ExactMatch(Reward):
    """1 if the completion (or what ``extract`` finds in it) equals the gold answer, else 0. Outer space is ignored.

    Args:
        extract: regular expression, dots match newlines; its last match is the answer: its first group, or the whole
            match if it has none. No match scores 0. Left out, the whole completion is the answer.
        ignore_case: compare after Unicode case folding.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: ``extract`` is not a regular expression.
    """

    needs_answer = True
    range = (0.0, 1.0)

    def __init__(
        self, extract: str | None = None, ignore_case: bool = False, weight: float = 1.0, name: str | None = None
    ) -> None:
        super().__init__(weight, name)
        try:
            self._extract = re.compile(extract, re.DOTALL) if extract else None
        except re.error as error:
            raise UserError(
                f"{extract!r} is not a regular expression: {error}",
                where="ExactMatch.extract",
                remedy="in YAML, write it in single quotes so that backslashes stay",
            ) from error
        self._ignore_case = ignore_case
        self.finds_answer = self._extract is not None

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        answers = [self._answer(x.text) for x in batch]
        return [
            Score(float(self._normalise(answer) == self._normalise(x.prompt.answer)), no_answer=answer is None)
            for answer, x in zip(answers, batch, strict=True)
        ]

    def final_answers(self, batch: Sequence[RewardInput]) -> list[str | None]:
        found = [self._answer(x.text) for x in batch]
        return [None if answer is None else str(self._normalise(answer)) for answer in found]

    def _answer(self, text: str) -> str | None:
        if self._extract is None:
            return text
        matches = list(self._extract.finditer(text))
        if not matches:
            return None
        # The last match counts, as with every other reward: a withdrawn first guess is not the answer.
        return matches[-1][1] if self._extract.groups else matches[-1][0]

    def _normalise(self, text: str | None) -> str | object:
        if text is None:
            return object()  # a missing answer equals nothing, another missing one included
        text = text.strip()
        return text.casefold() if self._ignore_case else text
