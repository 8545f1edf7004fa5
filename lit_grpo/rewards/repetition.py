"""The repetition penalty: a negative reward for n-grams that a completion repeats."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.types import RewardInput, Score

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+|[^\w\s]")
"""Pattern of a word, a punctuation sign, or one character of a script that puts no space between words."""


class RepetitionPenalty(Reward):
    """Minus the share of n-grams that occurred before in the same completion: 0 without repetition, towards -1.

    -(1 - distinct / all), over words and signs, letters folded to lower case; 0 for texts of fewer than n words.

    Args:
        ngram: n, the number of words and signs in a row that are compared.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: ``ngram`` is not positive.
    """

    correct_threshold = None
    range = (-1.0, 0.0)

    def __init__(self, ngram: int = 4, weight: float = 1.0, name: str | None = "repetition") -> None:
        super().__init__(weight, name)
        if ngram < 1:
            raise UserError(f"ngram is {ngram}", where="RepetitionPenalty.ngram", remedy="give 1 or more, usually 4")
        self._n = ngram

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [Score(self._value(item.text)) for item in batch]

    def _value(self, text: str) -> float:
        words = _WORD.findall(text.lower())
        grams = list(zip(*(words[i:] for i in range(self._n)), strict=False))
        return len(set(grams)) / len(grams) - 1 if grams else 0.0
