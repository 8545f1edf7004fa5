"""The written form of mathematical answers: cleaning, numbers, units, and items of lists, intervals and matrices.

Standard library only and linear in the length of the text: most answers are decided here, without SymPy.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 20_000
"""Length in characters above which an answer is compared as it stands."""

_SIGNS = {
    **dict.fromkeys("−–—‐‑‒﹣－", "-"), **dict.fromkeys("×✕", r"\times "), **dict.fromkeys("·⋅∙•", r"\cdot "),
    "÷": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "⩽": r"\leq ",
    "⩾": r"\geq ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ",
    "°": r"^\circ ", "º": r"^\circ ", "…": r"\ldots ", "⋯": r"\cdots ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "∀": r"\forall ",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ",
    "φ": r"\phi ", "ω": r"\omega ", "ρ": r"\rho ", "σ": r"\sigma ", "、": ",", "⟨": r"\langle ", "⟩": r"\rangle ",
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""), "“": "", "”": "",
}  # fmt: skip
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_SCRIPTS = re.compile(f"([{''.join(_RAISED)}]+)|([{''.join(_LOWERED)}]+)")

_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox|hbox|operatorname|emph)\*?"
    r"\s*\{([^{}]*)\}"
)
_FUNCTION = r"\\(?:sin|cos|tan|cot|sec|csc|ln)(?![a-zA-Z])"
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|bf|rm|it)(?![a-zA-Z])\.?", ""),
        (r"\\!|\\label\{[^{}]*\}", ""),
        # Before spaces are made alike: between digits a thin space or {,} groups thousands, see _join_thousands.
        (r"(?<=\d)(?:\{,\}|(?<!\\)\\[,;: ]|~|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))", "\ue000"),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|[\u00a0\u2009\u202f]|\\hspace\{[^{}]*\}", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"(\\frac\{[^{}]*\})\s*(\d)(?![\d{}])", r"\1{\2}"),
        (r"\\(?:leqslant|le)(?![a-zA-Z])|<=", r"\\leq "),
        (r"\\(?:geqslant|ge)(?![a-zA-Z])|>=", r"\\geq "),
        (r"\\ne(?![a-zA-Z])|!=", r"\\neq "),
        (r"\\lt(?![a-zA-Z])|&lt;", "<"),
        (r"\\gt(?![a-zA-Z])|&gt;", ">"),
        (r"\\(?:varnothing|empty)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\(?:dots|cdots|dotsc|dotsb)(?![a-zA-Z])|\.\.\.", r"\\ldots "),
        (r"\\(?:lbrace)(?![a-zA-Z])", r"\\{"),
        (r"\\(?:rbrace)(?![a-zA-Z])", r"\\}"),
        (r"\\\$|\\text\s*\{\s*\\?\$\s*\}|(?<=\d)\s*\\?(?:dollars?|USD)\b", ""),
        (r"[$€£¥]", ""),
        (r"\\%|\s*(?:percent(?:age)?|pct)\b", "%"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|(?<=\d)\s*\\?degrees?\b", r"^\\circ "),
        (r"(?<![\\a-zA-Z])(pi|theta|alpha|beta|infty)(?![a-zA-Z])", r"\\\1 "),
        (r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"(?<![\\a-zA-Z])(sin|cos|tan|sec|csc|cot|log|ln|exp|arcsin|arccos|arctan)(?![a-zA-Z])", r"\\\1 "),
        # sin t cos t is a product; the parser would take the cosine into the sine.
        (rf"({_FUNCTION}(?:\s*\^\s*\{{?-?\d+\}}?)?)\s*(\d*\s*(?:[a-zA-Z]|\\(?:theta|alpha|beta|phi|pi|omega)))"
         rf"\s*(?={_FUNCTION}|$|[-+=,)}}])", r"\1(\2) "),
        (r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\a-zA-Z])sqrt\s*(\d+)", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"(?<=[\w)}])\s*\*\*\s*(?=[\w({-])", "^"),
        (r"\*", r" \\cdot "),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\^\s*(-\d+|\d\d+)", r"^{\1}"),
    )
)  # fmt: skip


def clean(text: str) -> str:
    """Bring what is written in many ways into one: spacing, wrappers, Unicode, brackets that change nothing."""
    if len(text) > LONGEST:
        return text.strip()
    text = text.strip()
    if not text.isascii():
        text = _to_ascii(text)
    text = _strip_outer(text.strip("*`"))
    # Wrappers may be nested, and each round takes away the innermost ones. Bounded, so that a hostile text ends.
    for _ in range(4):
        text, count = _WRAPPER.subn(r" \1 ", text)
        if not count:
            break
    for pattern, new in _RULES:
        text = pattern.sub(new, text)
    text = re.sub(r"\s+", " ", _strip_outer(text)).strip()
    return _join_thousands(text.removeprefix("+").strip())


def _to_ascii(text: str) -> str:
    def script(match: re.Match[str]) -> str:
        raised, lowered = match[1], match[2]
        if raised:
            return "^{" + "".join(_RAISED[c] for c in raised) + "}"
        return "_{" + "".join(_LOWERED[c] for c in lowered) + "}"

    return "".join(map(_sign, _SCRIPTS.sub(script, text)))


def _sign(char: str) -> str:
    if char.isascii() or char == "√":
        return char
    if char in _SIGNS:
        return _SIGNS[char]
    digit = unicodedata.decimal(char, None)
    if digit is not None:
        return str(digit)
    if unicodedata.category(char) == "No" and "\u2044" in (plain := unicodedata.normalize("NFKC", char)):
        top, bottom = plain.split("\u2044")
        return rf"\frac{{{top}}}{{{bottom}}}"
    # The full-width forms of ASCII, in the same order.
    if "\uff01" <= char <= "\uff5e":
        return chr(ord(char) - 0xFEE0)
    return char


_END_MARKS = re.compile(r"(?<!\\)[.,;:。，；！\s]+$")
_CLOSING = {"{": "}", "(": ")", "[": "]"}


def _strip_outer(text: str) -> str:
    """Take away formula marks, full stops and brackets around the whole."""
    while True:
        before = text
        text = _END_MARKS.sub("", text.strip())
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            inner = text[len(opening) : -len(closing)]
            if (
                len(text) > 2 * len(opening)
                and text.startswith(opening)
                and text.endswith(closing)
                and opening not in inner
            ):
                text = inner
        text = _strip_brackets(text)
        if text == before:
            return text


def _strip_brackets(text: str) -> str:
    r"""Take away brackets that change nothing: ``{{{1}}}`` and ``((1))`` are 1; ``(1,2)`` and ``\{1\}`` stay."""
    if text[:1] not in {"{", "("}:
        return text
    # All partners in one pass, so that a thousand nested brackets take no longer than any other text.
    match: dict[int, int] = {}
    stack: list[int] = []
    # Opening brackets with a comma directly inside, which make a tuple of what they hold.
    commas: set[int] = set()
    for i, char in enumerate(text):
        if char in "{([":
            stack.append(i)
        elif char in "})]":
            if not stack:
                return text
            start = stack.pop()
            if _CLOSING[text[start]] == char:
                match[start] = i
        elif char == "," and stack:
            commas.add(stack[-1])
    begin, end = 0, len(text)
    while begin < end and text[begin] in "{(" and match.get(begin) == end - 1:
        if text[end - 2 : end - 1] == "\\" or (text[begin] == "(" and begin in commas):
            break
        begin, end = begin + 1, end - 1
        while begin < end and text[begin] == " ":
            begin += 1
        while begin < end and text[end - 1] == " ":
            end -= 1
    return text[begin:end]


_GROUPED = re.compile(
    r"(?<![\d.,\ue000(\[])(?<!\\\{)\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?![\d,)\]]|\\\}| \d)"
    r"|(?<![\d.\ue000])\d{1,3}(?:\ue000\d{3})+(?![\d\ue000])"
)


def _join_thousands(text: str) -> str:
    """Join groups of three digits: 1,000,000 and 1 000 000 are one number."""
    # Within brackets, as in (100,200), a comma separates. \ue000 stands for a thin space or {,} between digits.
    text = _GROUPED.sub(lambda m: re.sub(r"[,\ue000 ]", "", m[0]), text)
    return text.replace("\ue000", " ")


# Numbers


@dataclass(frozen=True)
class Number:
    """A number with the precision it was written in."""

    value: Fraction
    decimals: int | None = None
    """Number of decimal places; None for an integer or a fraction, which are exact."""
    digits: int = 0
    """Number of significant digits of a decimal."""
    percent: bool = False


_DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
_PLAIN = re.compile(rf"-?\s*{_DECIMAL}")
_SCIENTIFIC = re.compile(
    rf"(-?\s*{_DECIMAL})\s*(?:(?:\\times|\\cdot|x|\*)\s*10\s*\^\s*(?:\{{\s*(-?\d+)\s*\}}|(-?\d+))|[eE]([+-]?\d+))"
)
_POWER_OF_TEN = re.compile(r"(-?)10\s*\^\s*(?:\{\s*(-?\d+)\s*\}|(-?\d+))")
_FRACTION = re.compile(
    rf"(-?)\s*(?:\\frac\s*\{{\s*(-?\s*{_DECIMAL})\s*\}}\s*\{{\s*(-?\s*{_DECIMAL})\s*\}}|({_DECIMAL})\s*/\s*(-?{_DECIMAL}))"
)
_MIXED = re.compile(r"(-?)\s*(\d+)\s*(?:\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(?<=\s)(\d+)\s*/\s*(\d+))")
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")
# Below the 4,300 digits that int() takes; and 10^999999999 would fill the memory.
_MAX_NUMBER_LENGTH = 4_000
_MAX_EXPONENT = 4_000


def parse_number(text: str) -> Number | None:
    """Read a cleaned text as a number: integer, decimal, fraction, mixed, scientific or repeating, maybe with %."""
    text = text.strip()
    percent = text.endswith("%")
    text = text.removesuffix("%").rstrip()
    if not text or len(text) > _MAX_NUMBER_LENGTH or not (text[0].isdigit() or text[0] in "-.\\"):
        return None
    number = _parse(text)
    if number is None or not percent:
        return number
    return Number(number.value, number.decimals, number.digits, percent=True)


def _parse(text: str) -> Number | None:
    if _PLAIN.fullmatch(text):
        return _decimal(text)
    if match := _FRACTION.fullmatch(text):
        top, bottom = _decimal(match[2] or match[4]).value, _decimal(match[3] or match[5]).value
        return Number((-1 if match[1] else 1) * top / bottom) if bottom else None
    if match := _MIXED.fullmatch(text):
        bottom = Fraction(match[4] or match[6])
        if not bottom:
            return None
        return Number((-1 if match[1] else 1) * (int(match[2]) + Fraction(match[3] or match[5]) / bottom))
    if match := _SCIENTIFIC.fullmatch(text):
        exponent = int(match[2] or match[3] or match[4])
        if abs(exponent) > _MAX_EXPONENT:
            return None
        base = _decimal(match[1])
        value, places = base.value * Fraction(10) ** exponent, None
        if base.decimals is not None:
            places = max(0, base.decimals - exponent) or None
        return Number(value, places, base.digits)
    if match := _POWER_OF_TEN.fullmatch(text):
        exponent = int(match[2] or match[3])
        return Number((-1 if match[1] else 1) * Fraction(10) ** exponent) if abs(exponent) <= _MAX_EXPONENT else None
    if match := _REPEATING.fullmatch(text):
        fixed, cycle = match[3], match[4]
        value = Fraction(int(match[2] + fixed or "0"), 10 ** len(fixed))
        value += Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
        return Number(-value if match[1] else value)
    return None


def _decimal(text: str) -> Number:
    text = text.replace(" ", "")
    _, point, fraction = text.partition(".")
    value = Fraction(text.rstrip(".") if text.rstrip("-.") else "0")
    if not point or not fraction:
        return Number(value)
    return Number(value, len(fraction), len(text.replace(".", "").lstrip("-0")))


def same_number(gold: Number, answer: Number, places: int | None = None) -> bool:
    """Say whether two written numbers agree.

    Exact numbers must be equal. A decimal of at least six significant digits also agrees with a number that it rounds
    or truncates. A gold decimal of at least three is taken as rounded: an exact answer, or one with three more places,
    needs to agree to its last place. A percentage agrees with its plain figure and with its value.

    Args:
        gold: the gold number.
        answer: the other number.
        places: decimal places of the vector or matrix that the gold stands in, instead of its own.
    """
    if gold.percent != answer.percent:
        plain = lambda n: Number(n.value, n.decimals, n.digits)  # noqa: E731
        if same_number(plain(gold), plain(answer)):
            return True
        part, whole = (gold, answer) if gold.percent else (answer, gold)
        hundredth = Number(part.value / 100, None if part.decimals is None else part.decimals + 2, part.digits)
        return same_number(hundredth, plain(whole)) if gold.percent else same_number(plain(whole), hundredth)
    if gold.value == answer.value:
        return True
    if gold.decimals is None and answer.decimals is None:
        return False
    gap = abs(gold.value - answer.value)
    if gap * 10**9 < abs(gold.value):
        # The last digits of binary floating point may differ.
        return True
    coarse = min((n for n in (gold, answer) if n.decimals is not None), key=lambda n: n.decimals or 0)
    if coarse.digits >= 6 and gap < Fraction(1, 10 ** (coarse.decimals or 0)):
        return True
    places = gold.decimals if places is None else places
    if places is None or gold.decimals is None or (gold.digits < 3 and places == gold.decimals):
        return False
    finer = answer.decimals is None or answer.decimals >= places + 3
    integer = answer.decimals is None and answer.value.denominator == 1
    return finer and not integer and 2 * gap * 10**places <= 1


# Units

_UNITS: dict[str, tuple[str, Fraction]] = {}
for _dimension, _table in {
    "length": "mm=1/1000 millimeter=1/1000 millimetre=1/1000 cm=1/100 centimeter=1/100 centimetre=1/100 dm=1/10 m=1 "
    "meter=1 metre=1 km=1000 kilometer=1000 kilometre=1000 in=127/5000 inch=127/5000 inche=127/5000 ft=381/1250 "
    "foot=381/1250 feet=381/1250 yd=1143/1250 yard=1143/1250 mi=201168/125 mile=201168/125",
    "mass": "mg=1/1000 g=1 gram=1 kg=1000 kilogram=1000 lb=45359237/100000 pound=45359237/100000 oz=45359237/1600000 "
    "ounce=45359237/1600000 ton=1000000",
    "time": "ms=1/1000 s=1 sec=1 second=1 min=60 minute=60 h=3600 hr=3600 hour=3600 day=86400 week=604800 "
    "month=2629746 year=31556952 yr=31556952",
    "volume": "ml=1/1000 milliliter=1/1000 l=1 liter=1 litre=1 gallon=473176473/125000000",
    "money": "cent=1/100 ¢=1/100",
    "angle": "°=1",
    "radian": "rad=1 radian=1",
}.items():  # fmt: skip
    for _entry in _table.split():
        _word, _, _factor = _entry.partition("=")
        _UNITS[_word] = (_dimension, Fraction(_factor))

_QUANTITY = re.compile(
    r"(.*?[\d}%])\s*((?:square|cubic|sq\.?|cu\.?)\s*)?([^\W\d_][^\d_^{}\\=<>()+*,]*?)\.?\s*(?:\^\s*\{?\s*([23])\s*\}?)?"
)


@dataclass(frozen=True)
class Unit:
    """A unit behind a number; ``dimension`` is empty for a word that is no known unit."""

    dimension: str
    factor: Fraction = Fraction(1)


def split_unit(text: str) -> tuple[str, Unit | None]:
    """Split ``5 cm^2`` into ``5`` and square centimetre, where something that ends like a number stands before it."""
    if text.endswith(r"^\circ"):
        return text.removesuffix(r"^\circ").rstrip(), Unit("angle")
    # Only of short texts, since the pattern tries every place at which a unit could begin.
    match = _QUANTITY.fullmatch(text) if len(text) < 200 else None
    if match is None:
        return text, None
    number, area, word, power = match[1], match[2] or "", match[3].strip(), match[4]
    if len(word) == 1 and word.isascii() and not text[: match.start(3)].endswith(" "):
        # 5m is five times m, 5 m are five metres.
        return text, None
    exponent = int(power or (2 if area.startswith("s") else 3 if area else 1))
    units = [_unit_of(part) for part in re.split(r"\s*/\s*|\s+per\s+", word)]
    if None in units:
        unknown = (len(word) > 2 and "/" not in word) or not word.isascii()
        return (number, Unit("")) if unknown else (text, None)
    dimensions, factor = [unit[0] for unit in units if unit], Fraction(1)
    for i, (_, one) in enumerate(unit for unit in units if unit):
        factor = factor / one if i else factor * one
    dimension = "/".join(dimensions)
    return number, Unit(f"{dimension}^{exponent}" if exponent > 1 else dimension, factor**exponent)


def _unit_of(word: str) -> tuple[str, Fraction] | None:
    for key in (word, word.lower(), word.lower().removesuffix("s")):
        if key in _UNITS:
            return _UNITS[key]
    return None


# Structure


def split_top(text: str, separators: str) -> list[str]:
    r"""Split at separators that stand in no bracket. ``\{`` counts as a bracket too."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth = max(0, depth - 1)
        elif char in separators and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def is_wrapped(text: str, opening: str, closing: str) -> bool:
    """Say whether the opening bracket is closed at the very end of the text."""
    if not (text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing)):
        return False
    depth = 0
    for i, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return i == len(text) - 1
    return False


_WORDS = re.compile(r"[A-Za-z][A-Za-z'\-]*(?: [A-Za-z'\-]+)*")


def as_words(text: str) -> str | None:
    """Return prose or a name in lower case; None for anything that could be a formula."""
    words = re.sub(r"\s+", " ", text).strip()
    return words.casefold() if _WORDS.fullmatch(words) and any(len(w) > 1 for w in words.split()) else None


_OPTION = re.compile(r"\(?([A-J])\)?")
_OPTION_WITH_VALUE = re.compile(r"\(([A-J])\)\s*\S.*|([A-J])\s*[:.)]\s*\S.*", re.DOTALL)


def as_option(text: str) -> str | None:
    """Return the letter of a multiple-choice answer that stands alone, or None."""
    match = _OPTION.fullmatch(text)
    return match[1] if match else None


def as_option_with_value(text: str) -> str | None:
    """Return the letter of ``C``, ``(C) 12`` or ``C: 12``, or None."""
    match = _OPTION_WITH_VALUE.fullmatch(text)
    return (match[1] or match[2]) if match else as_option(text)
