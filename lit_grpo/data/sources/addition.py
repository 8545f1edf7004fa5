"""Addition problems, generated: the smallest task with a verifiable answer."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from string import Formatter, ascii_lowercase

from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.errors import UserError

_MAX_LISTED = 1_000_000


class AdditionPrompts(PromptSource):
    """Sums of non-negative integers, such as ``3+4=``.

    Args:
        digits: number of digits of every operand, or ``[fewest, most]``. One digit is 0 to 9, two are 10 to 99,
            ``[1, 2]`` is 0 to 99.
        operands: number of operands of a sum, from 2 to 26.
        template: the question; the operands are ``{a}``, ``{b}``, ``{c}``, ... Left out: ``{a}+{b}=``, one letter an
            operand.
        n: number of problems to draw, all different. Left out: every one, in counting order.
        seed: seed of the draw.
        skip: number of problems to leave out, the first that are drawn: with equal ``seed``, ``n: 100`` and
            ``n: 100, skip: 100`` are disjoint.
        name: name of the source; the ids are ``name/3+4``.

    Raises:
        UserError: an argument out of range, or a template without the operands.
    """

    def __init__(
        self,
        digits: int | list[int] = 1,
        operands: int = 2,
        template: str | None = None,
        n: int | None = None,
        seed: int = 0,
        skip: int = 0,
        name: str = "addition",
    ) -> None:
        lowest, highest = (digits, digits) if isinstance(digits, int) else _pair(digits)
        if not 1 <= lowest <= highest:
            raise _error("digits", f"{digits} is no range of digits", "give a number from 1, or [fewest, most]")
        if not 2 <= operands <= len(ascii_lowercase):
            raise _error("operands", f"{operands} operands", f"give 2 to {len(ascii_lowercase)}")
        letters = ascii_lowercase[:operands]
        self.template = "+".join(f"{{{letter}}}" for letter in letters) + "=" if template is None else template
        _check_template(self.template, letters)
        self._letters = letters
        # Of one digit 0 is a number too, of several none begins with 0.
        self._first = 0 if lowest == 1 else 10 ** (lowest - 1)
        self._count = 10**highest - self._first
        self.name, self.seed, self.n, self.skip = name, seed, n, skip
        self._check_size(self._count**operands)
        self._rows: list[Row] | None = None

    def rows(self) -> Sequence[Row]:
        """Return all problems. Ids are unique: operands in another order make another problem."""
        if self._rows is None:
            self._rows = [self._row(numbers) for numbers in self._numbers()]
        return self._rows

    def _numbers(self) -> list[tuple[int, ...]]:
        operands = len(self._letters)
        if self.n is None:
            return list(itertools.product(range(self._first, self._first + self._count), repeat=operands))
        total = self._count**operands
        rng = random.Random(self.seed)
        # Problems are drawn as numbers from 0 to total - 1, since the list of all of them may not fit into memory.
        if total <= sys.maxsize:
            drawn = rng.sample(range(total), self.skip + self.n)
        else:
            # random.sample takes no range longer than sys.maxsize. Among so many, drawing one twice is rare.
            # A dict and not a set, because it keeps the order of the draw.
            distinct: dict[int, None] = {}
            while len(distinct) < self.skip + self.n:
                distinct[rng.randrange(total)] = None
            drawn = list(distinct)
        return [self._unrank(index) for index in drawn[self.skip :]]

    def _unrank(self, index: int) -> tuple[int, ...]:
        # The index is read as a number whose digits, in the base of all values of an operand, are the operands.
        numbers = []
        for _ in self._letters:
            index, offset = divmod(index, self._count)
            numbers.append(self._first + offset)
        return tuple(reversed(numbers))

    def _row(self, numbers: tuple[int, ...]) -> Row:
        question = self.template.format(**dict(zip(self._letters, map(str, numbers), strict=True)))
        identity = f"{self.name}/{'+'.join(map(str, numbers))}"
        return Row(identity, question, str(sum(numbers)), {"operands": numbers}, where=identity)

    def _check_size(self, total: int) -> None:
        if self.skip < 0 or (self.skip and self.n is None):
            raise _error("skip", f"skip is {self.skip}", "give n as well, and a number from 0")
        if self.n is None and total > _MAX_LISTED:
            raise _error("n", f"there are {total:,} problems, too many to list", "say how many to draw")
        if self.n is not None and self.n < 1:
            raise _error("n", f"n is {self.n}", "draw at least 1 problem")
        if self.n is not None and self.skip + self.n > total:
            raise _error("n", f"{self.skip + self.n} problems wanted, there are {total}", "lower n or raise digits")


def _pair(digits: Sequence[int]) -> tuple[int, int]:
    if len(digits) != 2:
        raise _error("digits", f"{list(digits)} is no range of digits", "give one number, or [fewest, most]")
    return digits[0], digits[1]


def _check_template(template: str, letters: str) -> None:
    try:
        fields = [field for _, field, _, _ in Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise _error("template", f"{template!r} is broken: {error}", "write a literal brace twice: {{ }}") from error
    if sorted(set(fields)) != list(letters):
        wanted = " ".join(f"{{{letter}}}" for letter in letters)
        raise _error("template", f"{template!r} must hold {wanted}, and no other", f"write {wanted}")


def _error(key: str, what: str, remedy: str) -> UserError:
    return UserError(what, where=f"AdditionPrompts.{key}", remedy=remedy)
