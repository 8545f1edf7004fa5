"""Two-digit addition with a short and a long form of answer: a small task on which lengths can rise and fall."""

from __future__ import annotations

from dataclasses import replace

from lit_grpo.data.sources.addition import AdditionPrompts
from lit_grpo.data.sources.base import Row

ALPHABET = "0123456789+=:c"
"""All characters of questions and answers, for the character tokenizer."""
ANSWER = r":(\d+)$"
"""Pattern of the answer in a completion of either form, for :class:`lit_grpo.rewards.ExactMatch`."""
MAX_NEW_TOKENS = 24
"""Length limit of a completion: about twice the long form, so that lengths have room to grow."""


class TwoFormAddition(AdditionPrompts):
    """Sums of two numbers from 10 to 99, such as ``27+15=``, with a short and a long form of answer.

    An answer ends in a colon and the sum. It may be given at once, ``:42``, or after the sum of the units and what they
    carry, ``7+5=12c1:42``. Row columns ``short`` and ``long`` hold both, for supervised training. With the end token
    the short form has 4 or 5 tokens and the long one 11 to 13, so a policy that mixes them can move either way: the
    short form is quick, the long form easier to get right.

    Args:
        n: number of problems to draw, all different. Left out: all 8,100.
        seed: seed of the draw.
        skip: number of problems to leave out, the first that are drawn: with equal ``seed``, ``n: 100`` and
            ``n: 100, skip: 100`` are disjoint.
        name: name of the source; the ids are ``name/27+15``.

    Raises:
        UserError: an argument out of range.
    """

    def __init__(self, n: int | None = None, seed: int = 0, skip: int = 0, name: str = "two_form_addition") -> None:
        super().__init__(digits=2, n=n, seed=seed, skip=skip, name=name)

    def _row(self, numbers: tuple[int, ...]) -> Row:
        row = super()._row(numbers)
        a, b = numbers
        return replace(row, extra={**row.extra, "short": short_form(a, b), "long": long_form(a, b)})


def short_form(a: int, b: int) -> str:
    """Write the short answer: ``:42`` for 27 and 15."""
    return f":{a + b}"


def long_form(a: int, b: int) -> str:
    """Write the long answer, ``7+5=12c1:42`` for 27 and 15: units, their sum, what is carried, and the sum."""
    units = a % 10 + b % 10
    return f"{a % 10}+{b % 10}={units}c{units // 10}:{a + b}"
