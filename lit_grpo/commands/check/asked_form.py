"""The form of an answer that the prompts of a run ask for, told from their text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_TAG = re.compile(r"<([A-Za-z][\w-]*)>")
_ANSWER_TAGS = ("answer", "final_answer", "final-answer", "solution", "result")
_REASONING_TAGS = ("think", "thinking", "thought", "thoughts", "reasoning", "rationale", "analysis", "scratchpad")
_BOX = re.compile(r"\\boxed(?![a-zA-Z])")
# Four hashes are also a heading; only in front of a place for an answer, or behind "after", are they a form.
_HASHES = re.compile(
    r"(?:after|with|by|behind|following|use|using)\s+[\"'`“]?####(?!#)"
    r"|####[ \t]*(?:[<{\[\"'`”“…_]|\.\.\.|-?\d|(?:your|the|final|answer|number|result)\b)",
    re.IGNORECASE,
)
_PHRASE = re.compile(
    r"(?P<words>(?:the )?(?:final )?answer(?: is:?|:))\s*\\?[(\[]?\s*"
    r"(?:[$<{\[][^\n]{0,40}?(?:answer|number|result|x|n)\b|\$?answer\b|\.\.\.|…|_{2,}|[\"'`”]|x\b)",
    re.IGNORECASE,
)


def asked_forms(rendered: Sequence[str]) -> tuple[str, ...]:
    r"""Return the ways to write an answer, with ``{answer}`` in its place, that the prompts ask for.

    Several ways are one form in other layouts, of which a reward needs to read one. None where most of the prompts name
    no form, or not the same one: a single question may speak of ``\boxed`` for a reason of its own.

    Args:
        rendered: prompts as the model reads them, system prompt and template included.
    """
    counts = Counter(map(_forms_in, rendered))
    if not counts:
        return ()
    forms, count = counts.most_common(1)[0]
    return forms if 2 * count > len(rendered) else ()


def _forms_in(text: str) -> tuple[str, ...]:
    names = list(dict.fromkeys(_TAG.findall(text)))
    reasoning = [name for name in names if name in _REASONING_TAGS]
    tag = next((name for name in reversed(names) if name in _ANSWER_TAGS), None)
    box, phrase = _BOX.search(text), _PHRASE.search(text)
    if tag is not None:
        answer = r"\boxed{{answer}}" if box else "{answer}"
        inline, lines = f"<{tag}>{answer}</{tag}>", f"<{tag}>\n{answer}\n</{tag}>"
    elif box:
        inline = lines = r"\boxed{{answer}}"
    elif _HASHES.search(text):
        inline = lines = "#### {answer}"
    elif phrase:
        inline = lines = f"{phrase['words']} {{answer}}"
    else:
        return ()
    # Between the tags for reasoning stands the answer once more, since a small tokenizer may know no other text.
    thoughts = [f"<{name}>{{answer}}</{name}>" for name in reasoning]
    forms = ["".join([*thoughts, inline]), "\n".join([*thoughts, lines])]
    opened = next((name for name in names if text.rstrip().endswith(f"<{name}>")), None)
    if opened is not None:
        # The completion begins inside the tag that ends the prompt.
        forms = [form.partition(f"<{opened}>")[2].lstrip("\n") or form for form in forms]
    return tuple(dict.fromkeys(forms))
