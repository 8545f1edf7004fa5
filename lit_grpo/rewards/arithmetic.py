"""Exact value of a written arithmetic expression, without eval, and bounded in length, depth and size of numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

# What is read was written by a model: without these bounds 9^9^9 or a thousand brackets would hold up or end the run.
_MAX_LENGTH = 1_000
_MAX_DEPTH = 50
_MAX_BITS = 4_096
"""Size in bits up to which the numerator and denominator of an intermediate value are computed."""

_TOKEN = re.compile(
    r"\s*(?:(\d+(?:\.\d+)?)|(\\frac)(?![a-zA-Z])|(\\(?:times|cdot|ast)(?![a-zA-Z])|[*×·⋅])|(\\div(?![a-zA-Z])|[/÷∕])"
    r"|([+])|([-−–])|(\^)|([(\[{])|([)\]}]))"
)
_KINDS = ("number", "frac", "times", "over", "plus", "minus", "power", "open", "close")
_PARTNER = {"(": ")", "[": "]", "{": "}"}


class Expression(NamedTuple):
    """Value of a written expression, and the numbers that it uses."""

    value: Fraction
    numbers: tuple[str, ...]
    """Every number as it was written, from left to right, exponents included."""


def evaluate(text: str, *, powers: bool = True) -> Expression | None:
    r"""Compute the value of an expression of ``+ - * / ^``, ``\frac`` and brackets over written numbers.

    None for everything else: names, juxtaposition (``2(3)``), a division by zero, a power whose exponent is no integer,
    or anything too long, too deep or too large.

    Args:
        text: the expression as written by a person or in LaTeX.
        powers: take ``^`` for a power; otherwise it is an error.
    """
    if len(text) > _MAX_LENGTH:
        return None
    tokens: list[tuple[str, str]] = []
    position, text = 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.lastindex is None:
            return None
        tokens.append((_KINDS[match.lastindex - 1], match[match.lastindex]))
        position = match.end()
    parser = _Parser(tokens, powers)
    try:
        value = parser.sum(0)
        if parser.at < len(tokens):
            return None
    except _NoExpressionError:
        return None
    return Expression(value, tuple(word for kind, word in tokens if kind == "number"))


class _NoExpressionError(Exception):
    pass


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]], powers: bool) -> None:
        self.tokens, self.powers, self.at = tokens, powers, 0

    def _kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else "end"

    def _take(self) -> str:
        self.at += 1
        return self.tokens[self.at - 1][1]

    def sum(self, depth: int) -> Fraction:
        if depth > _MAX_DEPTH:
            raise _NoExpressionError
        sign = 1
        if self._kind() in ("plus", "minus"):
            sign = -1 if self._kind() == "minus" else 1
            self._take()
        value = sign * self._product(depth)
        while (kind := self._kind()) in ("plus", "minus"):
            self._take()
            term = self._product(depth)
            value = _bounded(value + term if kind == "plus" else value - term)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._power(depth)
        while (kind := self._kind()) in ("times", "over"):
            self._take()
            factor = self._power(depth)
            if kind == "over" and not factor:
                raise _NoExpressionError
            value = _bounded(value * factor if kind == "times" else value / factor)
        return value

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        if self._kind() != "power" or not self.powers:
            return base
        self._take()
        exponent = self._atom(depth)
        # A tower such as 2^3^2 is refused rather than read from one side. 0 to a power of 0 or less has no value.
        if self._kind() == "power" or exponent.denominator != 1 or (not base and exponent <= 0):
            raise _NoExpressionError
        # Bounded before it is computed: of 9^99999999 the result itself would be too late to look at.
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * size > _MAX_BITS:
            raise _NoExpressionError
        return base ** int(exponent)

    def _atom(self, depth: int) -> Fraction:
        kind = self._kind()
        if kind == "number":
            return _bounded(Fraction(self._take()))
        if kind == "frac":
            self._take()
            above, below = self._group(depth, "{"), self._group(depth, "{")
            if not below:
                raise _NoExpressionError
            return _bounded(above / below)
        if kind == "open":
            return self._group(depth, None)
        raise _NoExpressionError

    def _group(self, depth: int, bracket: str | None) -> Fraction:
        if self._kind() != "open":
            raise _NoExpressionError
        opening = self._take()
        if bracket not in (None, opening):
            raise _NoExpressionError
        value = self.sum(depth + 1)
        if self._kind() != "close" or self._take() != _PARTNER[opening]:
            raise _NoExpressionError
        return value


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise _NoExpressionError
    return value
