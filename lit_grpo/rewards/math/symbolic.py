"""Comparison of answers by math-verify and SymPy, which may hang and are imported in worker processes only."""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.relational import Relational

from lit_grpo.rewards.math.text import Number, parse_number, same_number

# math-verify warns that its time limits are off, which they are on purpose.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]
_DIGITS = 40
_EXACT = Fraction(1, 10**25)
_ROUNDED = Fraction(1, 10**6)
"""Relative tolerance for expressions that hold a decimal, such as 0.333333 x, which may be rounded."""
_POINTS = (
    (Fraction(37, 100), Fraction(271, 97), Fraction(1201, 700), Fraction(53, 89)),
    (Fraction(193, 71), Fraction(19, 41), Fraction(83, 29), Fraction(307, 113)),
    (Fraction(-61, 43), Fraction(-17, 59), Fraction(-149, 67), Fraction(-71, 31)),
    (Fraction(-7, 23), Fraction(101, 47), Fraction(-211, 83), Fraction(13, 37)),
)
"""Values of the variables at which expressions are compared."""


class _UnknownError(Exception):
    """Signal that the value of an expression cannot be computed."""


def symbolically_equal(gold: str, answer: str) -> bool:
    """Say whether two cleaned LaTeX answers are equal."""
    # math-verify's own time limits are off: the pool of workers kills what takes too long.
    g, a = _parse(gold), _parse(answer)
    if g is None or a is None:
        return False
    if _is_relation(g) != _is_relation(a) and not isinstance(g, sympy.Set) and not isinstance(a, sympy.Set):
        return False
    if isinstance(g, Relational) and isinstance(a, Relational):
        if not (g.free_symbols or a.free_symbols):
            # Statements without variables are true or false, and all true ones are equal: 1 + 1 = 2 is not 2 + 3 = 5.
            equations = isinstance(g, sympy.Eq) and isinstance(a, sympy.Eq)
            return equations and symbolically_equal(gold.rpartition("=")[2], answer.rpartition("=")[2])
        verdict = _same_relation(g, a)
        if verdict is not None:
            return verdict
    elif isinstance(g, sympy.Expr) and isinstance(a, sympy.Expr):
        try:
            return _same_value(gold, answer, g, a)
        except _UnknownError:
            pass
    return bool(verify(g, a, allow_set_relation_comp=True, timeout_seconds=None))


def _parse(text: str) -> Any:
    parsed = parse(f"\\boxed{{{text}}}", _CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    return parsed[0] if parsed and not isinstance(parsed[0], str) else None


def _is_relation(value: Any) -> bool:
    return isinstance(value, Relational) or type(value).__name__ == "And"


def _same_value(gold: str, answer: str, g: sympy.Expr, a: sympy.Expr) -> bool:
    """Compare values at several points, relative to their size."""
    # Subtracting first would hide that both are tiny.
    g, a = _prepared(g), _prepared(a)
    if g == a or g.is_infinite or a.is_infinite:
        return bool(g == a)
    symbols = sorted(g.free_symbols | a.free_symbols, key=str)
    if g.is_Rational and a.is_Rational and not _is_decimal(gold) and not _is_decimal(answer):
        return False
    if not symbols and (_is_decimal(gold) or _is_decimal(answer)):
        return _same_decimal(gold, answer, g, a)
    tolerance = _ROUNDED if g.has(sympy.Float) or a.has(sympy.Float) else _EXACT
    compared = 0
    # Without variables every point gives the same two values.
    for values in _POINTS[: 1 if not symbols else None]:
        point = {symbol: sympy.Rational(values[i % 4] + i // 4) for i, symbol in enumerate(symbols)}
        x, y = _value(g, point), _value(a, point)
        # Below zero only real values count, since roots are written as if their arguments were positive.
        if values[0] < 0 and not (x.is_real and y.is_real):
            continue
        if abs(x - y) > sympy.Rational(tolerance) * max(abs(x), abs(y)):
            return False
        compared += 1
    return compared > 0


def _prepared(value: sympy.Expr) -> sympy.Expr:
    """Evaluate what is written unevaluated; i is the imaginary unit and e Euler's number."""
    # The parser gives symbols assumptions that depend on the text around them, and then x is not x.
    names = {symbol: _CONSTANTS.get(str(symbol), sympy.Symbol(str(symbol))) for symbol in value.free_symbols}
    return value.subs(names).doit()


_CONSTANTS = {"i": sympy.I, "e": sympy.E}


def _value(value: sympy.Expr, point: dict[Any, Any]) -> Any:
    number = sympy.N(value.subs(point), _DIGITS)
    parts = (number,) if number.is_Number else number.as_real_imag()
    if not all(part.is_Number and part.is_finite for part in parts):
        raise _UnknownError
    return number


def _is_decimal(text: str) -> bool:
    number = parse_number(text)
    return number is not None and number.decimals is not None


def _same_decimal(gold: str, answer: str, g: sympy.Expr, a: sympy.Expr) -> bool:
    sides: list[Number] = []
    for text, value in ((gold, g), (answer, a)):
        number = parse_number(text)
        if number is None:
            x = _value(value, {})
            if not x.is_real:
                return False
            number = Number(Fraction(str(x)))
        sides.append(number)
    return same_number(sides[0], sides[1])


def _same_relation(g: Relational, a: Relational) -> bool | None:
    """Compare relations: equations agree if their sides differ by one factor, inequalities if it is positive."""
    same_way = type(g) is type(a)
    if not same_way and type(g) is not a.reversed.func:
        return False if {type(g), type(a)} <= _ORDERS else None
    left, right = _prepared(g.lhs - g.rhs), _prepared(a.lhs - a.rhs)
    if left.free_symbols != right.free_symbols:
        return False
    symbols = sorted(left.free_symbols, key=str)
    try:
        factors = []
        for values in _POINTS:
            point = {symbol: sympy.Rational(values[i % 4] + i // 4) for i, symbol in enumerate(symbols)}
            x, y = _value(left, point), _value(right, point)
            if not (x.is_real and y.is_real) or y == 0:
                return None
            factors.append(x / y)
    except _UnknownError:
        return None
    if max(factors) - min(factors) > sympy.Rational(_EXACT) * max(map(abs, factors)):
        # y = 1/x is xy = 1 although no constant factor leads from one to the other; among lines that cannot be.
        polynomials = left.is_polynomial(*symbols) and right.is_polynomial(*symbols)
        return False if polynomials else None
    if isinstance(g, (sympy.Eq, sympy.Ne)):
        return bool(factors[0] != 0)
    return bool(factors[0] > 0) if same_way else bool(factors[0] < 0)


_ORDERS = {sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan}
