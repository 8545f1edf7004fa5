"""The reward of the addition task: an exact integer at the end of the text."""

from __future__ import annotations

from collections.abc import Sequence

from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.math.answer import last_tag
from lit_grpo.types import RewardInput, Score


class AdditionReward(Reward):
    """Reward of 1 if the text ends in the integer that is the gold answer, else 0.

    ``7``, ``3+4=7`` and ``It is 7.`` all say 7. Where there is a complete ``<answer>...</answer>``, what the last one
    holds is the text. Numbers are compared as integers of any length, so ``07`` is 7.

    Args:
        weight: factor in the total reward.
        name: key under which the reward is logged.
    """

    needs_answer = True
    range = (0.0, 1.0)

    def __init__(self, weight: float = 1.0, name: str | None = "addition") -> None:
        super().__init__(weight, name)

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [Score(_agree(x.text, x.prompt.answer)) for x in batch]

    def final_answers(self, batch: Sequence[RewardInput]) -> list[str | None]:
        return [_answer(x.text) for x in batch]


def _agree(text: str, gold: str | None) -> float:
    answer = _answer(text)
    return float(answer is not None and answer == final_integer(gold or ""))


def _answer(text: str) -> str | None:
    tagged, _ = last_tag(text, "answer")
    return final_integer(text if tagged is None else tagged)


def final_integer(text: str) -> str | None:
    """Return the integer that ends a text, in its shortest form; None if the text ends in anything else.

    Only ASCII digits count; one full stop may follow. The tail of a decimal (``1.5``), of a grouped number (``1,500``)
    or of a word (``x2``) is no integer.
    """
    # The result stays a string, because int() refuses more than 4,300 digits.
    text = text.rstrip().removesuffix(".").rstrip()
    head = text.rstrip("0123456789")
    digits = text[len(head) :]
    if not digits or head[-1:].isalnum() or head[-1:] in {"_", ".", ","}:
        return None
    # "5-2" ends in 2, "= -2" and "=-2" in -2: a minus stuck to an operand is an operator.
    negative = head[-1:] in {"-", "−"} and not (head[-2:-1].isalnum() or head[-2:-1] in {")", "]"})
    digits = digits.lstrip("0") or "0"
    return f"-{digits}" if negative and digits != "0" else digits
