"""Comparison of two mathematical answers: by their written form where that decides, else by math-verify and SymPy.

:func:`grade_quickly` needs neither and runs anywhere. :func:`grade` may take for ever, or all memory, on hostile input:
it belongs in a worker of :class:`lit_grpo.rewards.isolation.pool.WorkerPool`. Rules that depend on taste are listed in
:class:`lit_grpo.rewards.math.verify.MathReward`.
"""

from __future__ import annotations

import itertools
import math
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lit_grpo.rewards.arithmetic import evaluate
from lit_grpo.rewards.math.answer import Kind, is_prose
from lit_grpo.rewards.math.text import (
    LONGEST,
    Unit,
    as_option,
    as_option_with_value,
    as_words,
    clean,
    is_wrapped,
    parse_number,
    same_number,
    split_top,
    split_unit,
)

Symbolic = Callable[[str, str], bool]

# Lists are compared item by item, in any order and within each other: without bounds a hostile answer could go on.
_MAX_ITEMS = 60
_MAX_DEPTH = 8
# Of one worker, which is replaced after 2,000 answers.
_MAX_CPU_SECONDS = 100_000


class _UndecidedError(Exception):
    """Signal that the written form does not decide."""


def grade_quickly(gold: str, answer: str) -> bool | None:
    """Return the verdict on two raw answers, or None where SymPy has to decide."""

    # An exception and not a value, because the question may come up deep inside a list of intervals.
    def give_up(gold: str, answer: str) -> bool:
        raise _UndecidedError

    try:
        return _grade(gold, answer, give_up)
    except _UndecidedError:
        return None


def grade(pair: tuple[str, str]) -> bool:
    """Return the verdict on a pair of gold and answer; on hostile input it may never return."""
    from lit_grpo.rewards.math.symbolic import symbolically_equal

    return _grade(*pair, symbolically_equal)


def warm_up() -> None:
    """Load SymPy and the LaTeX grammar, so that the first answer takes no longer than the others."""
    grade((r"\frac{x^2}{2}+\sqrt{3}", r"\sqrt{3}+\frac{2 x^2}{4}"))
    grade((r"2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}"))


def start_worker() -> None:
    """Confine a new worker; called by the pool before its first item.

    SymPy is not known to run what it reads, which is no reason to let it. Where a layer of the sandbox is missing, the
    worker does without.
    """
    import resource

    from lit_grpo.rewards.isolation.sandbox import Limits, confine

    # Only what the pool does not bound itself: its workers have their limit of memory, and are killed at that of time.
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(__file__).parents[3])}
    limits = Limits(memory=resource.getrlimit(resource.RLIMIT_AS)[0], cpu=_MAX_CPU_SECONDS)
    confine(limits, partly=True, readable=sorted(folders))


def kind_of(gold: str) -> Kind:
    """Decide how prose around an answer to this gold is to be read."""
    cleaned = clean(gold)
    if as_option(cleaned):
        return "option"
    if parse_number(split_unit(cleaned)[0]):
        return "number"
    return "words" if as_words(cleaned) is not None or is_prose(gold) else "other"


def normal_form(answer: str) -> str:
    """Return one text for an answer that is written in different ways, for counting votes, not for grading.

    A number is its exact value without unit or percent sign, a lone option its letter; of anything else spacing,
    wrappers and Unicode variants are made alike.
    """
    if len(answer) > LONGEST:
        return answer.strip()
    cleaned = clean(answer)
    if option := as_option(cleaned):
        return option
    number = parse_number(split_unit(cleaned)[0])
    return str(number.value) if number is not None else _squeeze(cleaned)


def _grade(gold: str, answer: str, symbolic: Symbolic) -> bool:
    if max(len(gold), len(answer)) > LONGEST:
        return bool(gold.strip()) and gold.strip() == answer.strip()
    return _agree(clean(gold), clean(answer), symbolic, 0)


def _agree(gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool:
    gold, answer = gold.strip(), answer.strip()
    if not gold or not answer or depth > _MAX_DEPTH:
        return False
    if _squeeze(gold) == _squeeze(answer):
        return True
    option = as_option(gold)
    # A lone letter as gold is an option, and would be a variable to SymPy.
    if option:
        return as_option_with_value(answer) == option
    by_words = _agree_in_words(gold, answer)
    if by_words is not None:
        return by_words
    bare = _LEAD.sub("", answer)
    if bare != answer and as_words(gold) is None:
        return _agree(gold, bare, symbolic, depth + 1)
    by_value = _agree_by_value(gold, answer)
    if by_value is not None:
        return by_value
    if r"\pm" in gold + answer or r"\mp" in gold + answer:
        return _agree_unordered(_both_signs(gold), _both_signs(answer), symbolic, depth)
    g, a = _parts(gold), _parts(answer)
    if g.kind == a.kind == "one":
        return _agree_singly(gold, answer, symbolic, depth)
    if r"\ldots" in gold + answer:
        # A sequence that goes on: its terms and their order are all that there is.
        return g.kind == a.kind and [*map(_squeeze, g.items)] == [*map(_squeeze, a.items)]
    if "tuple" in (g.kind, a.kind):
        return _agree_as_tuples(g, a, gold, answer, symbolic, depth)
    if "one" in (g.kind, a.kind) and _ORDER.search(gold if g.kind == "one" else answer) and r"\cup" in gold + answer:
        # |x| > 2 against a union of two intervals is one set, which only SymPy sees.
        return symbolic(gold, answer)
    return _agree_unordered(g.items, a.items, symbolic, depth)


def _squeeze(text: str) -> str:
    # Space between two digits stays: 4 2 is not 42.
    return re.sub(r"\s+(?!\d)|(?<!\d)\s+", "", text)


_LEAD = re.compile(r"(?:[A-Za-z]+ ){1,6}(?:is|are|equals)\s*:? (?=\S)")
"""Pattern of words in a box before the answer, as in "The answer is 17"."""


def _agree_in_words(gold: str, answer: str) -> bool | None:
    said, wanted = as_words(answer), as_words(gold)
    if wanted is not None:
        if said == wanted:
            return True
        # A short word may be a product: xy is yx.
        product = said is not None and len(wanted) <= 3 and sorted(wanted) == sorted(said)
        return None if product else False
    return False if said is not None and len(said) > 3 else None


def _agree_by_value(gold: str, answer: str) -> bool | None:
    # Sums, products and quotients of whole numbers are computed here, where one of the two is no plain number: SymPy
    # takes 20 ms for it.
    if "." in gold + answer or (parse_number(gold) and parse_number(answer)):
        return None
    g = evaluate(gold)
    a = evaluate(answer) if g is not None else None
    return None if g is None or a is None else g.value == a.value


# Lists, sets, tuples, intervals


class _Parts(NamedTuple):
    kind: str
    """``one``, ``many`` (list, set or union, in any order) or ``tuple`` (interval, point or vector, in order)."""
    items: list[str]
    brackets: str = ""
    """Opening and closing bracket of a tuple; empty for everything else."""


_CONJUNCTION = re.compile(r"\s*[,;]?(?:\s+(?:and|or)\s+|\s*[和或]\s*|\s*\\l?or(?![a-zA-Z])\s*)|\s*\\cup(?![a-zA-Z])\s*")


def _parts(text: str) -> _Parts:
    if is_wrapped(text, r"\{", r"\}"):
        inside = text[2:-2]
        if not _builder(inside):
            return _Parts("many", _items(inside))
    if text.startswith(r"\langle") and text.endswith(r"\rangle") and text.count(r"\rangle") == 1:
        return _Parts("tuple", _items(text[7:-7]), "()")
    if text[:1] in {"(", "["} and _closes_at_end(text):
        items = _items(text[1:-1])
        if len(items) > 1:
            return _Parts("tuple", items, text[0] + text[-1])
    items = _items(text)
    return _Parts("many", items) if len(items) > 1 else _Parts("one", [text])


def _items(text: str) -> list[str]:
    items = [item.strip() for item in split_top(_CONJUNCTION.sub(",", text), ",;")]
    return list(dict.fromkeys(item for item in items if item)) if len(items) > _MAX_ITEMS else [i for i in items if i]


def _closes_at_end(text: str) -> bool:
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False


def _builder(inside: str) -> str | None:
    """Return the condition of a set in builder notation: ``x < 3`` of ``x | x < 3``."""
    for bar in (r"\mid", r"\vert", "|", ":"):
        head, found, condition = inside.partition(bar)
        if found and re.fullmatch(r"\s*[a-zA-Z](?:\s*\\in\s*\\mathbb\{?R\}?)?\s*", head):
            return condition.strip()
    return None


def _agree_as_tuples(g: _Parts, a: _Parts, gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool:
    if len(g.items) != len(a.items):
        # An interval may stand against an inequality, or a point against a column vector.
        return "one" in (g.kind, a.kind) and _agree_singly(gold, answer, symbolic, depth)
    if g.kind == a.kind and g.brackets != a.brackets and len(g.items) == 2:
        # (2,5) is not [2,5).
        return False
    if "tuple" in (g.kind, a.kind) and is_wrapped(gold if a.kind == "tuple" else answer, r"\{", r"\}"):
        # A set has no order, a tuple has.
        return False
    return all(_agree(x, y, symbolic, depth + 1) for x, y in zip(g.items, a.items, strict=True))


def _agree_unordered(gold: list[str], answer: list[str], symbolic: Symbolic, depth: int) -> bool:
    gold, answer = _distinct(gold), _distinct(answer)
    if len(gold) != len(answer) or len(gold) > _MAX_ITEMS:
        return False
    names = [_name_of(item) for item in gold]
    if len(gold) > 1 and len({*names} - {None}) == len(gold) and not any(map(_name_of, answer)):
        # x = 1, y = 2 against 1, 2: without names the order has to tell the values apart.
        return all(_agree(x, y, symbolic, depth + 1) for x, y in zip(gold, answer, strict=True))
    left = list(answer)
    for item in gold:
        partner = next((other for other in left if _agree(item, other, symbolic, depth + 1)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _distinct(items: list[str]) -> list[str]:
    return list({_squeeze(item): item for item in items}.values())


def _both_signs(text: str) -> list[str]:
    both: list[str] = []
    for item in _parts(text).items:
        if r"\pm" not in item and r"\mp" not in item:
            both.append(item)
            continue
        for plus, minus in (("+", "-"), ("-", "+")):
            signed = re.sub(r"\\pm(?![a-zA-Z])", plus, re.sub(r"\\mp(?![a-zA-Z])", minus, item))
            both.append(re.sub(r"(^|[=({])\s*\+", r"\1", signed).strip())
    return both


# Single values


def _agree_singly(gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool:
    with_units = _agree_with_units(gold, answer, symbolic, depth)
    if with_units is not None:
        return with_units
    for rule in (_agree_in_base, _agree_as_ratios):
        verdict = rule(gold, answer)
        if verdict is not None:
            return verdict
    if r"\ldots" in gold + answer or re.search(r"\\forall|\\exists", gold + answer):
        # A statement or a sequence is equal in writing or not at all.
        return False
    matrices = _rows(gold), _rows(answer)
    if matrices != (None, None):
        return _agree_as_matrices(gold, answer, *matrices, symbolic, depth)
    bare_gold, bare_answer = _without_membership(gold), _without_membership(answer)
    if (bare_gold, bare_answer) != (gold, answer):
        return _agree(bare_gold, bare_answer, symbolic, depth + 1)
    by_range = _agree_as_ranges(gold, answer, symbolic, depth)
    if by_range is not None:
        return by_range
    if len(split_top(gold, "=")) > 1 or len(split_top(answer, "=")) > 1:
        return _agree_as_equations(gold, answer, symbolic, depth)
    return symbolic(gold, answer)


def _agree_with_units(gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool | None:
    (g, g_unit), (a, a_unit) = split_unit(gold), split_unit(answer)
    g_number, a_number = parse_number(g), parse_number(a)
    degrees, radians = Unit("angle"), (None, Unit("radian"))
    if g_unit == degrees and a_unit in radians and r"\pi" in a:
        return _agree(rf"\frac{{({g}) \pi}}{{180}}", a, symbolic, depth + 1)
    if a_unit == degrees and g_unit in radians and r"\pi" in g:
        return _agree(g, rf"\frac{{({a}) \pi}}{{180}}", symbolic, depth + 1)
    if g_unit and a_unit and g_unit.dimension and a_unit.dimension and g_unit != a_unit:
        if g_unit.dimension != a_unit.dimension or not (g_number and a_number):
            return False
        return g_number.value * g_unit.factor == a_number.value * a_unit.factor
    if g_number and a_number:
        return same_number(g_number, a_number)
    if g_unit or a_unit:
        return _agree(g, a, symbolic, depth + 1)
    return None


_BASED = re.compile(r"([0-9A-Z]+)\s*_\s*(?:\{\s*\(?([a-z]+|\d+)\)?\s*\}|(\d+))")
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"}


def _agree_in_base(gold: str, answer: str) -> bool | None:
    g, a = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if g is None:
        return None if a is None else False
    if a is None:
        # The base may be left out, not changed.
        return _squeeze(answer) == g[1]
    base_of = lambda m: _BASES.get(m[2] or m[3], m[2] or m[3])  # noqa: E731
    return g[1].lstrip("0") == a[1].lstrip("0") and base_of(g) == base_of(a)


_RATIO = re.compile(r"[^=<>()]+(?::[^=<>()]+)+")
_CLOCK = re.compile(r"0?(\d{1,2}:[0-5]\d)\s*([ap])?\.?\s*m?\.?", re.IGNORECASE)


def _agree_as_ratios(gold: str, answer: str) -> bool | None:
    if not (_RATIO.fullmatch(gold) and _RATIO.fullmatch(answer)):
        return None
    g_clock, a_clock = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(answer)
    if g_clock and a_clock and g_clock[1] == a_clock[1]:
        return None in (g_clock[2], a_clock[2]) or g_clock[2].lower() == a_clock[2].lower()
    if re.search(r":0\d", gold + answer) or (g_clock and a_clock and _is_time(g_clock[1])):
        return False
    g = [parse_number(part) for part in gold.split(":")]
    a = [parse_number(part) for part in answer.split(":")]
    if len(g) != len(a) or None in g or None in a:
        return None if len(g) == len(a) == 2 else False
    g_values, a_values = [n.value for n in g if n], [n.value for n in a if n]
    if not all(g_values) or not all(a_values):
        return g_values == a_values
    return all(x * a_values[0] == y * g_values[0] for x, y in zip(g_values, a_values, strict=True))


def _is_time(gold: str) -> bool:
    """Say whether a gold such as ``9:15`` is a time rather than a ratio."""
    # A ratio would be written in lowest terms, as 3:5.
    hours, minutes = map(int, gold.split(":"))
    return math.gcd(hours, minutes) > 1


_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)


def _rows(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text)
    if match is None or r"\begin" in match[2]:
        return None
    return [[cell.strip() for cell in split_top(row, "&")] for row in match[2].split(r"\\") if row.strip()]


def _agree_as_matrices(
    gold: str, answer: str, g: list[list[str]] | None, a: list[list[str]] | None, symbolic: Symbolic, depth: int
) -> bool:
    if g is None or a is None:
        vector = _parts(answer if a is None else gold)
        column = [cell for row in (g or a or []) for cell in row]
        if vector.kind == "tuple" and 1 in (len(g or a or []), max(len(r) for r in (g or a or [[]]))):
            pair = (column, vector.items) if a is None else (vector.items, column)
            g, a = [pair[0]], [pair[1]]
        else:
            return symbolic(gold, answer)
    if [*map(len, g)] != [*map(len, a)]:
        return False
    # The vector is as precise as its most precise entry: 0.29 beside 0.196 is 0.290.
    numbers = [parse_number(cell) for row in g for cell in row]
    rounded = [n for n in numbers if n and n.decimals is not None]
    places = max((n.decimals or 0 for n in rounded if n.digits >= 3), default=None)
    for g_cell, a_cell in zip(itertools.chain(*g), itertools.chain(*a), strict=True):
        g_number, a_number = parse_number(g_cell), parse_number(a_cell)
        if g_number and a_number:
            if not same_number(g_number, a_number, places):
                return False
        elif not _agree(g_cell, a_cell, symbolic, depth + 1):
            return False
    return True


_NAME = re.compile(
    r"(?:[a-zA-Z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|rho|sigma))"
    r"(?:_\{?\w+\}?)?'?(?:\s*\([a-zA-Z, ]+\))?"
)
_NAMES = re.compile(rf"\(\s*{_NAME.pattern}(?:\s*,\s*{_NAME.pattern})*\s*\)")
_MEMBERSHIP = re.compile(rf"{_NAME.pattern}\s*\\in(?![a-zA-Z])")


def _without_membership(text: str) -> str:
    r"""Return the set behind its name: ``[1,2]`` of ``x \in [1,2]``, ``x < 3`` of ``\{x | x < 3\}``."""
    match = _MEMBERSHIP.match(text)
    if match and text[match.end() :].strip():
        return text[match.end() :].strip()
    if is_wrapped(text, r"\{", r"\}") and (condition := _builder(text[2:-2])):
        return condition
    return text


_ORDER = re.compile(r"\\leq|\\geq|<|>")


class _Range(NamedTuple):
    name: str | None
    brackets: str
    ends: tuple[str, str]


def _as_range(text: str) -> _Range | None:
    """Read an interval, or an inequality that says the same; None for anything else."""
    parts = _parts(text)
    if parts.kind == "tuple" and len(parts.items) == 2:
        return _Range(None, parts.brackets, (parts.items[0], parts.items[1]))
    signs = _ORDER.findall(text)
    terms = [term.strip() for term in _ORDER.split(text)]
    if len(signs) not in (1, 2) or not all(terms) or len({sign in {"<", r"\leq"} for sign in signs}) > 1:
        return None
    if signs[0] in {">", r"\geq"}:
        terms.reverse()
        signs.reverse()
    strict = [sign in {"<", ">"} for sign in signs]
    if len(terms) == 3 and _NAME.fullmatch(terms[1]):
        return _Range(terms[1], ("(" if strict[0] else "[") + (")" if strict[1] else "]"), (terms[0], terms[2]))
    if len(terms) == 2 and _NAME.fullmatch(terms[0]):
        return _Range(terms[0], "(" + (")" if strict[0] else "]"), (r"-\infty", terms[1]))
    if len(terms) == 2 and _NAME.fullmatch(terms[1]):
        return _Range(terms[1], ("(" if strict[0] else "[") + ")", (terms[0], r"\infty"))
    return None


def _agree_as_ranges(gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool | None:
    g, a = _as_range(gold), _as_range(answer)
    if g is None or a is None:
        return None
    if g.name and a.name and g.name != a.name:
        return None
    return g.brackets == a.brackets and all(
        _agree(x, y, symbolic, depth + 1) for x, y in zip(g.ends, a.ends, strict=True)
    )


def _name_of(text: str) -> str | None:
    """Return the name that an assignment gives to its value: x for ``x = 5``, f(x) for ``f(x) = x + 1``."""
    sides = split_top(text, "=")
    name = sides[0].strip()
    named = _NAME.fullmatch(name) or _NAMES.fullmatch(name) or as_words(name)
    return _squeeze(name) if len(sides) > 1 and named else None


def _agree_as_equations(gold: str, answer: str, symbolic: Symbolic, depth: int) -> bool:
    g, a = split_top(gold, "="), split_top(answer, "=")
    g_name, a_name = _name_of(gold), _name_of(answer)
    if len(g) > 1 and len(a) > 1:
        if g_name is not None and g_name == a_name:
            return _agree(g[-1], a[-1], symbolic, depth + 1)
        return symbolic(gold, answer)
    if len(g) > 1:
        return g_name is not None and _agree(g[-1], answer, symbolic, depth + 1)
    # x = 5 and 2 + 3 = 5 say 5; x^2 - 5 = 0 does not say 0.
    if a_name is None and re.search(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])", "".join(a[:-1])):
        return False
    return _agree(gold, a[-1], symbolic, depth + 1)
