"""Countdown problems, generated so that each has a solution: an expression of given numbers that equals a target."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.errors import UserError

TEMPLATE = (
    "Using each of the numbers {numbers} exactly once, together with the operations +, -, *, / and parentheses, write "
    "an expression equal to {target}."
)
_SLOTS = ("{numbers}", "{target}")
_MAX_DRAWS = 10_000
"""Draws in a row without a new problem after which it is assumed that there are no more."""


class CountdownPrompts(PromptSource):
    """Problems such as "with 73, 64 and 92 make 45", for :class:`lit_grpo.rewards.CountdownReward`.

    A problem is drawn with its solution: numbers are joined two by two by a drawn operation until one value is left,
    and the draw is taken if that value is a whole number in range. So every problem can be solved with each number used
    once. Row columns: ``nums`` (shuffled), ``target``, ``level`` (how many numbers), ``solution``.

    Args:
        n: number of problems, all different.
        numbers: number of numbers in each problem, or ``[fewest, most]``, all equally often: the level of difficulty.
            From 2 to 8.
        largest: numbers are from 1 to this.
        targets: ``[least, greatest]`` target; a target is never one of the numbers.
        template: the question, with ``{numbers}`` and ``{target}``.
        seed: seed of the draw.
        skip: number of problems to leave out, the first that are drawn: with equal ``seed``, ``n: 100`` and
            ``n: 100, skip: 100`` are disjoint.
        name: name of the source; the ids are ``name/number of the problem``.

    Raises:
        UserError: an argument out of range, or fewer such problems than are wanted.
    """

    def __init__(
        self,
        n: int = 1000,
        numbers: int | list[int] = 3,
        largest: int = 99,
        # A list and not a tuple, because --print_config shows the default as YAML; it is never changed.
        targets: list[int] = [10, 100],  # noqa: B006
        template: str = TEMPLATE,
        seed: int = 0,
        skip: int = 0,
        name: str = "countdown",
    ) -> None:
        fewest, most = (numbers, numbers) if isinstance(numbers, int) else _pair(numbers, "numbers")
        least, greatest = _pair(targets, "targets")
        if not 2 <= fewest <= most <= 8:
            raise _error("numbers", f"{numbers} is no range of 2 to 8 numbers", "give a number, or [fewest, most]")
        if largest < 2:
            raise _error("largest", f"largest is {largest}", "give 2 or more")
        if not 0 <= least <= greatest:
            raise _error("targets", f"{list(targets)} is no range from 0 on", "give [least, greatest]")
        if n < 1 or skip < 0:
            raise _error("n", f"n is {n} and skip {skip}", "draw at least 1 problem, skip none or more")
        if missing := [slot for slot in _SLOTS if slot not in template]:
            raise _error("template", f"{template!r} has no {' and no '.join(missing)}", f"write {' and '.join(_SLOTS)}")
        self.n, self.largest, self.template, self.seed, self.skip, self.name = n, largest, template, seed, skip, name
        self._levels, self._targets = range(fewest, most + 1), range(least, greatest + 1)
        self._rows: list[Row] | None = None

    def rows(self) -> Sequence[Row]:
        """Return all problems; levels take turns."""
        if self._rows is None:
            self._rows = self._draw()
        return self._rows

    def _draw(self) -> list[Row]:
        draw = random.Random(self.seed)
        seen: set[tuple[tuple[int, ...], int]] = set()
        rows: list[Row] = []
        # The skipped problems are drawn too, so that those behind them are the same whatever is skipped.
        for number in range(self.skip + self.n):
            level = self._levels[number % len(self._levels)]
            # Drawn until it fits: solving for a target would have to search all expressions.
            for _ in range(_MAX_DRAWS):
                numbers = [draw.randint(1, self.largest) for _ in range(level)]
                value, solution = _join(draw, numbers)
                target = int(value)
                # Sorted, since numbers in another order make the same problem.
                problem = (tuple(sorted(numbers)), target)
                if value == target and target in self._targets and target not in numbers and problem not in seen:
                    break
            else:
                raise _error("n", f"there are no more than about {len(rows)} such problems", "lower n, raise largest")
            seen.add(problem)
            draw.shuffle(numbers)
            rows.append(self._row(number, numbers, target, solution))
        return rows[self.skip :]

    def _row(self, number: int, numbers: list[int], target: int, solution: str) -> Row:
        question = self.template.replace("{numbers}", str(numbers)).replace("{target}", str(target))
        extra = {"nums": numbers, "target": target, "level": len(numbers), "solution": solution}
        identity = f"{self.name}/{number}"
        return Row(identity, question, str(target), extra, where=identity)


def _join(draw: random.Random, numbers: Sequence[int]) -> tuple[Fraction, str]:
    """Draw an expression that uses each number once; return its value and its text."""
    # Fractions, so that 1 / 49 * 49 is exactly 1, which it is not in floating point.
    terms = [(Fraction(number), str(number)) for number in numbers]
    while len(terms) > 1:
        (a, left), (b, right) = (terms.pop(draw.randrange(len(terms))) for _ in range(2))
        sign = draw.choice("+-*/" if b else "+-*")
        value = a + b if sign == "+" else a - b if sign == "-" else a * b if sign == "*" else a / b
        terms.append((value, f"({left} {sign} {right})"))
    value, solution = terms[0]
    return value, solution.removeprefix("(").removesuffix(")")


def _pair(given: Sequence[int], key: str) -> tuple[int, int]:
    if len(given) != 2:
        raise _error(key, f"{list(given)} is no range", "give [least, greatest]")
    return given[0], given[1]


def _error(key: str, what: str, remedy: str) -> UserError:
    return UserError(what, where=f"CountdownPrompts.{key}", remedy=remedy)
