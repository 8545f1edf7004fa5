r"""The final answer of a text: where it stands and how it is cut out.

Standard library only, linear in the length of the text, never raises. Order of trust: the last complete
``<answer>...</answer>``; else the last ``\boxed``; else the last of ``#### ...`` and ``answer is ...``; else, only
where the text is not cut off, what its last sentence ends in. An answer that was mentioned on the way is not a final
answer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from lit_grpo.errors import UserError

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_END = re.compile(r"[$\n]|\\[\])]|[.,;]?(?:\s|$)")
# Between two boxes that form one answer: dollars, brackets and space around at least one joining word or sign.
_JOINT = re.compile(
    r"(?:[\s$*]|\\[()\[\]]|\\quad|\\text\{\s*(?:and|or)\s*\}|(?:and|or|maybe|perhaps|possibly|even|also|else)\b|[,;，、或和])+"
)
_JOINING = re.compile(r"and|or|[,;，、或和]")
# A base model that runs on invents the next question.
_NEXT_QUESTION = re.compile(
    r"\n[ \t]*(?:[*#]+[ \t]*)?(?:Question|Problem|Q|Exercise|Instruction|Human|User)[*]*:|<\|im_start\|>"
)
_ANCHOR = re.compile(
    r"####(?!#)"
    r"|\banswers?\b(?:[ \t]+(?:to|of|for)\b[^.\n]{0,80}?)?[*_ \t]*"
    r"(?:\b(?:is|are|was|equals|would be|should be)\b[*_ \t]*:?|[:=：])"
    r"|答案(?:是|为|為)?[:：]?",
    re.IGNORECASE,
)
_BECAUSE = re.compile(
    r",?\s+(?:because|since|as we|which|where|but)\b|(?:[.?。]|!(?!\s*(?:[\\+\-*/=^)}\]]|(?-i:[a-z]))))(?:\s|$)|\n",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?:[.!?](?=\s)|[。！？\n])")
_FINISHED = re.compile(r"[.!?。！)*]$")
_MATH = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$((?:\\.|[^$\n\\])+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(
    r"[-−–+]?[$€£¥]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s*/\s*\d+|\s+\d+\s*/\s*\d+)?\s*%?|[-−–]?\.\d+"
)
# A fraction in LaTeX is a number too; its parts are none.
_VALUE = re.compile(rf"(?:[-−–+]\s*)?(?:\d+\s*)?\\[dtc]?frac\s*\{{\s*-?\d+\s*\}}\s*\{{\s*-?\d+\s*\}}|{_NUMBER.pattern}")
_PIECE_BEFORE = re.compile(r"(?:[{^_]|\\sqrt|\\frac)\s*$")
_PIECE_AFTER = re.compile(
    r"\s*(?:\}|_|\^(?!\s*\{?\s*\\?circ)|\\(?:sqrt|frac|pi|cdot|times|binom|log|ln|sin|cos|tan|infty)(?![a-zA-Z]))"
)
_TUPLE = re.compile(r"[(\[]\s*[-+−–\w./\\{}^]{1,40}\s*(?:,\s*[-+−–\w./\\{}^]{1,40}\s*){1,20}[)\]]")
_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed|fbox)\s*\{([^{}]*)\}")
_UNIT = re.compile(r"\s*(?:\^?\\?circ|°|%|[A-Za-z]+(?:\^?\d)?)")
_NO_UNITS = frozenset({"of", "is", "as", "at", "by", "if", "it", "he", "on", "or", "so", "to", "we"})
_LEADING_WORDS = re.compile(r"^(?:[A-Za-z]+\s+)+(?=.*[\d\\=<>(\[])")
# A sentence that withdraws or only tries what it names.
_REFUSAL = re.compile(
    r"\b(?:cannot|can't|unable|neither|nor|never|try|trying|tried|suppose|assum\w+|guess\w*|maybe|perhaps|might)\b"
    r"|(?:\bnot|n't)\s+(?:[\s$\\(]*\d|right|correct|sure|it\b|the answer|work|fit|hold|know|clear|enough)",
    re.IGNORECASE,
)
_NO_PROSE = re.compile(
    r"\\(?:text|mathrm|mbox|textbf|operatorname)\s*\{[^{}]*\}|\\(?:begin|end)\s*\{[^{}]*\}(?:\s*\{[^{}]*\})?"
)
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{3,}")
_FUNCTIONS = frozenset({"sqrt", "sin", "cos", "tan", "log", "exp", "sec", "csc", "cot", "min", "max", "inf", "theta"})
_OPTION = re.compile(r"(?i:option|choice|choose|answer|is|select|pick)\s*:?\s*(?:\\text\{)?[*(]*([A-J])[)}*]*\s*$")
_LONE_OPTION = re.compile(r"^[\s*(]*([A-J])[\s).*]*$")

# These bounds keep the search linear in a completion of any length and content.
_LONGEST_CLAUSE = 2_000
_WINDOW = 50_000
"""Number of characters from the end in which "answer is" is looked for; a box counts wherever it stands."""
_MAX_NEXT_QUESTIONS = 20

Kind = Literal["number", "option", "words", "other"]
"""Kind of a gold answer, which decides how prose around an answer is read; ``words`` is a gold that is prose itself."""

Extract = Literal["auto", "boxed", "tag", "last_number"]
"""Form in which an answer counts: the first that is there of tag, box, phrase and end of the text; or one alone."""


def check_extract(extract: str, answer_tag: str, where: str, allowed: Sequence[str]) -> None:
    """Refuse settings of :func:`final_answer` that a reward cannot use.

    Args:
        extract: the form that counts.
        answer_tag: name of the tag around an answer.
        where: class name of the reward.
        allowed: forms that the reward can read.

    Raises:
        UserError: the form is none of ``allowed``, or the tag is no name.
    """
    if extract not in allowed:
        raise UserError(
            f"extract is {extract!r}", where=f"{where}.extract", remedy=f"it is one of {', '.join(allowed)}"
        )
    if not re.fullmatch(r"[\w-]+", answer_tag):
        raise UserError(
            f"answer_tag is {answer_tag!r}", where=f"{where}.answer_tag", remedy="give the bare name, as in answer"
        )


def final_answer(
    text: str, kind: Kind = "other", truncated: bool = False, extract: Extract = "auto", answer_tag: str = "answer"
) -> str | None:
    r"""Return the last final answer of a completion, or None.

    Args:
        text: the completion, of any length.
        kind: kind of the gold answer; its value is not looked at.
        truncated: True if the length limit cut the text; then only a closed tag or box or an explicit answer counts.
        extract: ``auto``: the last complete tag; else what follows the last opening tag, if the text was not cut, since
            a stop string ``</answer>`` may be left out of it; else, before a closing tag if there is one, the last box;
            else the last ``####`` or "answer is"; else the end of the last sentence. ``tag``, ``boxed``: a complete one
            of that form alone. ``last_number``: the last number of the text, without its unit; None where it is a part
            of a formula, as the 3 of ``\sqrt{3}``.
        answer_tag: name of the tag.
    """
    text = _before_next_question(text, extract, answer_tag)
    if extract in ("auto", "tag"):
        content, found = last_tag(text, answer_tag, rest=extract == "auto" and not truncated)
        if found or extract == "tag":
            return _answer_in_tag(content, kind) if content is not None else None
        if (end := text.rfind(f"</{answer_tag}>")) >= 0:
            # A prompt may end in the opening tag: then the answer stands before the closing one, and is whole.
            text, truncated = text[:end], False
    if extract == "last_number":
        return None if truncated else _last_number(text)
    boxed, found = _last_box(text)
    # A box that is not closed is no answer, and an earlier one no longer the final one.
    if found or extract == "boxed":
        return boxed
    anchored = _after_last_anchor(text, kind)
    if anchored is not None or truncated:
        return anchored
    return _end_of_last_sentence(text, kind)


def has_form(text: str, extract: Extract = "auto", answer_tag: str = "answer") -> bool:
    """Say whether a text has a tag or a box in which its answer would stand, whatever is in it."""
    tagged = extract in ("auto", "tag") and (f"<{answer_tag}>" in text or f"</{answer_tag}>" in text)
    return tagged or (extract in ("auto", "boxed") and _BOX.search(text) is not None)


def gold_answer(gold: str) -> str:
    """Return the answer within a gold, which may be a whole solution with an ``<answer>`` tag, a box or ``####``."""
    tagged, _ = last_tag(gold, "answer")
    gold = gold if tagged is None else tagged
    boxed, found = _last_box(gold)
    if found and boxed is not None:
        return boxed
    return gold.rsplit("####", 1)[-1].strip()


def is_prose(text: str) -> bool:
    """Say whether a text has words that are neither LaTeX commands nor functions nor the unit of a number."""
    bare = _NO_PROSE.sub(" ", text)
    words = [w[0] for w in _WORD.finditer(bare) if w[0].lower() not in _FUNCTIONS]
    return len(words) > 1 or (len(words) == 1 and len(bare.split()) > 2)


def _before_next_question(text: str, extract: Extract, tag: str) -> str:
    # Cut only behind an answer: before one, a line that begins with "Question:" still belongs to this solution.
    for cut in itertools.islice(_NEXT_QUESTION.finditer(text), _MAX_NEXT_QUESTIONS):
        end = cut.start()
        tagged = extract != "boxed" and text.find(f"</{tag}>", 0, end) >= 0
        boxed = extract != "tag" and _BOX.search(text, 0, end)
        # With one form alone, "answer is" may be said before the answer is given in that form.
        said = extract in ("auto", "last_number") and _ANCHOR.search(text, max(0, end - _WINDOW), end)
        if tagged or boxed or said:
            return text[:end]
    return text


def last_tag(text: str, tag: str, rest: bool = False) -> tuple[str | None, bool]:
    """Return the content of the last complete tag, and whether there is an opening tag at all.

    Without a complete one, the content is None, or with ``rest`` what follows the last opening tag.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = last = text.rfind(opening)
    if start < 0:
        return None, False
    end = len(text)
    while start >= 0:
        # Only up to the next opening tag, so that all searches together read the text once.
        close = text.find(closing, start, end)
        if close >= 0:
            return text[start + len(opening) : close], True
        start, end = text.rfind(opening, 0, start), start
    return text[last + len(opening) :] if rest else None, True


def _answer_in_tag(content: str, kind: Kind) -> str | None:
    """Return the answer that the content of a tag is or holds; None if it is empty or its box is not closed."""
    content = content.strip()
    if not content:
        return None
    boxed, found = _last_box(content)
    if found:
        return boxed
    anchored = _after_last_anchor(content, kind)
    if anchored is not None:
        return anchored
    if kind == "option":
        named = _OPTION.search(content)
        return named[1] if named else content
    if kind == "words" or not is_prose(content):
        return content
    if _MATH.match(content) or _VALUE.match(content):
        return _first_clause(content, kind)
    said = _end_of_last_sentence(content, kind, closed=True)
    return content if said is None and kind == "other" else said


def _last_number(text: str) -> str | None:
    # What stands around the last digit, so that a long text takes no longer than a short one.
    last = max(map(text.rfind, "0123456789"))
    numbers = _numbers(_MARKUP.sub(r"\1", text[max(0, last - _LONGEST_CLAUSE) : last + _LONGEST_CLAUSE]))
    return numbers[-1].text.strip() if numbers and not numbers[-1].piece else None


class _Found(NamedTuple):
    text: str
    start: int
    end: int
    piece: bool
    """True for a part of a larger expression, such as the 3 of a root or a coordinate of a point."""


def _numbers(text: str) -> list[_Found]:
    tuples = [match.span() for match in _TUPLE.finditer(text)]
    found = []
    for match in _VALUE.finditer(text):
        start, end = match.span()
        piece = bool(
            _PIECE_BEFORE.search(text, max(0, start - 8), start)
            or _PIECE_AFTER.match(text, end)
            # A number with thousands commas fills its brackets, a coordinate does not.
            or any(a < start and end < b and text[a + 1 : b - 1].strip() != match[0] for a, b in tuples)
        )
        found.append(_Found(match[0], start, end, piece))
    return found


def _last_box(text: str) -> tuple[str | None, bool]:
    """Return the content of the last box, or of several joined by "or" or a comma, and whether there is a box.

    The content is None for a box that is not closed.
    """
    starts = list(_BOX.finditer(text))
    if not starts:
        return None, False
    last = starts.pop()
    content, _ = _box_at(text, last.end())
    if content is None:
        return None, True
    contents, begin = [content], last.start()
    while starts:
        start = starts.pop()
        content, end = _box_at(text, start.end(), begin)
        between = text[end:begin] if content is not None else ""
        if content is None or not _JOINT.fullmatch(between) or not _JOINING.search(between):
            break
        contents.append(content)
        begin = start.start()
    distinct = list(dict.fromkeys(reversed(contents)))
    return ", ".join(distinct), True


def _box_at(text: str, position: int, limit: int | None = None) -> tuple[str | None, int]:
    """Return the content of the box whose argument begins at ``position``, and where it ends."""
    limit = len(text) if limit is None else limit
    if text[position : position + 1] != "{":
        # \boxed 5: up to the end of the formula or line. TeX would take one sign, a writer means the whole.
        end = _BARE_END.search(text, position, limit)
        stop = end.start() if end else limit
        return text[position:stop], stop
    depth = 0
    for match in _BRACE.finditer(text, position, limit):
        sign = match[0]
        if sign == "{":
            depth += 1
        elif sign == "}":
            depth -= 1
            if depth == 0:
                return text[position + 1 : match.start()], match.end()
    return None, limit


def _after_last_anchor(text: str, kind: Kind) -> str | None:
    text = text[-_WINDOW:]
    anchors = list(_ANCHOR.finditer(text))
    for anchor in reversed(anchors[-5:]):
        rest = text[anchor.end() : anchor.end() + _LONGEST_CLAUSE].lstrip(" \t\n*:：")
        answer = _first_clause(rest, kind)
        # Prose behind #### is a heading of level four, not an answer.
        if answer and not (anchor[0] == "####" and is_prose(rest.partition("\n")[0])):
            return answer
    return None


def _first_clause(text: str, kind: Kind) -> str | None:
    """Return the answer at the start of ``text``: a formula, a number, or the words up to the end of the clause."""
    formulas = [formula for formula in [_MATH.match(text)] if formula and kind != "words"]
    while formulas:
        following = _MATH.search(text, formulas[-1].end())
        between = text[formulas[-1].end() : following.start()] if following else ""
        if following is None or not _JOINT.fullmatch(between) or not _JOINING.search(between):
            return ", ".join(map(_content, formulas))
        formulas.append(following)
    if kind == "words" and (whole := _MATH.match(text)) and not text[whole.end() :].partition("\n")[0].strip(" .。"):
        # "but" within a formula does not end it.
        return _content(whole)
    end = _BECAUSE.search(text)
    # With its full stop, which tells the factorial in "n!." from an exclamation.
    stop = len(text) if end is None else end.end() if end[0].strip() in {*".!?。"} else end.start()
    clause = _trim(text[:stop])
    if not clause:
        return None
    if kind == "words":
        return clause
    formulas = list(_MATH.finditer(clause))
    if formulas and _VALUE.fullmatch(clause[: formulas[0].start()].strip()):
        # 20 $cm^2$ and 2 $\sqrt{3}$ are one value.
        return clause
    if formulas:
        return _content(formulas[-1])
    if _LONE_OPTION.match(clause):
        return clause
    if not is_prose(clause):
        return clause
    if kind == "number":
        tail = _MARKUP.sub(r"\1", clause.rsplit("=", 1)[-1])
        numbers = _numbers(tail)
        if numbers:
            return clause if numbers[0].piece else _joined(tail, numbers) or _with_unit(tail, numbers[0])
    # "the interval [1, 2]" is [1, 2].
    bare = _LEADING_WORDS.sub("", clause, count=1)
    return clause if is_prose(bare) else bare


def _end_of_last_sentence(text: str, kind: Kind, closed: bool = False) -> str | None:
    """Return what the last sentence ends in; ``closed`` where a tag says that the text is whole."""
    tail = text.rstrip()[-_LONGEST_CLAUSE:]
    closing = [formula for formula in _MATH.finditer(tail) if not tail[formula.end() :].strip(" .。*")]
    ends = [m.end() for m in _SENTENCE_END.finditer(tail)]
    sentence = _trim(tail[ends[-1] :] if ends else tail)
    if _REFUSAL.search(sentence):
        return None
    if closing:
        return _content(closing[-1])
    if not sentence:
        return None
    lone, option = _LONE_OPTION.match(sentence), _OPTION.search(sentence)
    if lone or (option and kind == "option"):
        return lone[1] if lone else option[1]  # type: ignore[index]
    formulas = list(_MATH.finditer(sentence))
    if formulas:
        return _content(formulas[-1])
    if not is_prose(sentence):
        return sentence
    if kind == "number":
        sentence = _MARKUP.sub(r"\1", sentence)
        numbers = _numbers(sentence)
        finished = closed or bool(_FINISHED.search(tail))
        if not numbers or not (finished or len(sentence[numbers[-1].end :].split()) <= 2):
            # The sentence breaks off behind its last number, so that number may be one on the way.
            return None
        if numbers[-1].piece:
            return None
        return _joined(sentence, numbers) or _with_unit(sentence, numbers[-1])
    said = re.split(r"\b(?:is|are|equals)\b|:", sentence)[-1].strip()
    return said if said and not is_prose(said) else None


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None)


def _joined(clause: str, numbers: list[_Found]) -> str | None:
    """Join numbers that are offered with "or" into a list; None if there are none."""
    # As a list it is wrong against a single gold: a guess among many is no answer.
    for before, after in itertools.pairwise(numbers):
        if re.fullmatch(r"[\s,$]*(?:or|或)[\s,$]*", clause[before.end : after.start]):
            return ", ".join(n.text for n in numbers)
    return None


def _with_unit(clause: str, number: _Found) -> str:
    """Return the number and the word behind it, which may be its unit."""
    unit = _UNIT.match(clause, number.end)
    if unit and unit[0].strip() in _NO_UNITS:
        unit = None
    return clause[number.start : unit.end() if unit else number.end]


def _trim(text: str) -> str:
    text = text.strip().strip("*_`").strip()
    for closing, opening in ((r"\]", r"\["), (r"\)", r"\("), ("$", "$")):
        if text.endswith(closing) and text.count(opening) < (2 if opening == closing else 1):
            text = text.removesuffix(closing).strip()
    # All brackets together, since (0, 1] is whole.
    if text.endswith("]") and sum(text.count(sign) for sign in "])") > sum(text.count(sign) for sign in "[("):
        text = text.removesuffix("]").strip()
    bare = text.rstrip(".。;；,，")
    # An exclamation mark before the full stop is a factorial.
    if bare == text:
        bare = text.rstrip(".。!！;；,，")
    return bare.strip().strip("*_`").strip()
