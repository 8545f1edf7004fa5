"""What looks wrong with the prompts of a run though nothing is broken: said by the run and by ``lit-grpo check``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from lit_grpo.data.chat_template import TURN_MARKS
from lit_grpo.data.template import PromptFormat
from lit_grpo.types import Prompt
from lit_grpo.utils.text import shorten

_ROLE_AT_THE_END = re.compile(r"(?:^|\n)\s*(?:assistant|response|answer|gpt|bot|solution)\s*:\s*\Z", re.IGNORECASE)
"""A question that ends as a chat in plain text does, where the model is to write."""
_WRITTEN_LIST = re.compile(r"\[\s*([\"']).*\1\s*,?\s*\]", re.DOTALL)
"""A list of texts as JSON or Python writes it."""
_OFTEN_NEEDED = (
    *("images", "image", "videos", "context", "passage", "article", "system", "system_prompt", "tools", "starter_code"),
)
"""Columns without which many a question cannot be answered."""
_LOOKED_AT = 2_000
"""Number of prompts whose text is looked at; what is wrong with a set is wrong with its first ones."""
_REPEATED = 0.5
"""Share of prompts that are the same one, with several golds, from which on something else was meant."""


class Doubt(NamedTuple):
    """One thing that looks wrong with the prompts."""

    about: Literal["columns", "template", "ends"]
    what: str
    remedy: str


def doubts_of(prompts: Sequence[Prompt], form: PromptFormat, tokenizer: Any, ends: Sequence[int]) -> list[Doubt]:
    """Return what looks wrong with the prompts, one doubt for each kind of thing.

    Args:
        prompts: encoded prompts.
        form: how they were made.
        tokenizer: the policy's tokenizer.
        ends: ids that end a completion.
    """
    found = [
        _repeated(prompts),
        *_in_the_columns(prompts[:_LOOKED_AT]),
        _ended(prompts, ends),
        *_in_the_text(prompts[:_LOOKED_AT], form, tokenizer),
    ]
    return [doubt for doubt in found if doubt is not None]


def _repeated(prompts: Sequence[Prompt]) -> Doubt | None:
    """Find one question that stands in most rows, with different golds."""
    if len(prompts) < 2:
        return None
    (most, count), *_ = Counter(prompt.token_ids for prompt in prompts).most_common(1)
    golds = {prompt.golds for prompt in prompts if prompt.token_ids == most}
    if count < max(2, _REPEATED * len(prompts)) or len(golds) < 2:
        return None
    which = "all prompts are the same" if count == len(prompts) else f"{count:,} of {len(prompts):,} are the same"
    question = next(prompt.question for prompt in prompts if prompt.token_ids == most)
    return Doubt(
        "columns",
        f"{which}, with {len(golds):,} answers: {shorten(question, 60)!r}",
        "the question stands in another column: question_column",
    )


def _in_the_columns(prompts: Sequence[Prompt]) -> list[Doubt | None]:
    """Find columns that are read otherwise than they were written."""
    written = unread = None
    for prompt in prompts:
        if written is None and any(_WRITTEN_LIST.fullmatch(gold.strip()) for gold in prompt.golds):
            written = Doubt(
                "columns",
                f"the answer of row {prompt.id!r} is a list written as text, and is compared as that text: "
                f"{shorten(str(prompt.answer), 60)!r}",
                "store several right answers as a list (JSON Lines or Parquet), unless the answer is that list",
            )
        seen = next((column for column in _OFTEN_NEEDED if _is_left_behind(prompt, column)), None)
        if unread is None and seen is not None:
            unread = Doubt(
                "columns",
                f"row {prompt.id!r} has the column {seen}, which is no part of the prompt",
                "put it into the question, unless the question needs none of it",
            )
    return [written, unread]


def _is_left_behind(prompt: Prompt, column: str) -> bool:
    value = prompt.extra.get(column)
    if not value:
        return False
    texts = [prompt.question] if prompt.messages is None else [str(m["content"]) for m in prompt.messages]
    return not (isinstance(value, str) and any(value.strip() in text for text in texts))


def _ended(prompts: Sequence[Prompt], ends: Sequence[int]) -> Doubt | None:
    """Find prompts behind which the model has nothing to say."""
    ended = [prompt.id for prompt in prompts if prompt.token_ids[-1] in ends]
    if not ended:
        return None
    return Doubt(
        "ends",
        f"{len(ended)} prompts end in an end-of-sequence token, as {ended[0]!r}",
        "switch off add_eos_token in tokenizer_config.json, or mend the template",
    )


def _in_the_text(prompts: Sequence[Prompt], form: PromptFormat, tokenizer: Any) -> list[Doubt | None]:
    """Find tokens and words in the questions that belong to a template."""
    wrapped = form.wraps(tokenizer)
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    special = {str(token) for token in getattr(tokenizer, "all_special_tokens", ()) if len(str(token)) > 1}
    role = unknown = control = None
    for prompt in prompts:
        texts = [prompt.question] if prompt.messages is None else [str(m["content"]) for m in prompt.messages]
        for text in texts:
            if role is None and wrapped and _ROLE_AT_THE_END.search(text):
                role = Doubt(
                    "template",
                    f"the question of row {prompt.id!r} ends in {text.split()[-1]!r} as a chat in plain text does, and "
                    f"{form.describe(tokenizer)} is put around it",
                    "take the roles out of the text, or set data.format.chat_template: none",
                )
            mark = next((mark for mark in TURN_MARKS if mark in text), None)
            if unknown is None and mark is not None and mark.startswith("<") and mark not in vocabulary:
                unknown = Doubt(
                    "template",
                    f"the text of row {prompt.id!r} holds {mark}, which is no token of this tokenizer",
                    "give the questions without a template, or take the model that the text was made for",
                )
            token = next((token for token in special if token in text), None) if wrapped else None
            if control is None and token is not None:
                control = Doubt(
                    "template",
                    f"the text of row {prompt.id!r} holds {token}, a special token of the tokenizer, which the model "
                    "reads as such and not as text",
                    "take it out of the text, unless that is meant",
                )
    return [role, unknown, control]


def shown_prompt(prompt: Prompt, tokenizer: Any, limit: int) -> str:
    """Show a prompt as the model reads it, special tokens included, and what answer it has.

    Args:
        prompt: an encoded prompt.
        tokenizer: the policy's tokenizer.
        limit: most characters of the prompt that are shown; the middle is left out.
    """
    text = shorten(str(tokenizer.decode(prompt.token_ids)), limit, "\n[... {omitted} characters ...]\n", keep_end=True)
    lines = "\n".join(f"  | {line}" for line in text.split("\n"))
    golds = " or ".join(repr(shorten(gold, 80)) for gold in prompt.golds[:4])
    golds += f" or {len(prompt.golds) - 4} others" if len(prompt.golds) > 4 else ""
    return f"the first prompt ({prompt.id}), as the model reads it:\n{lines}\n  its answer: {golds or 'none'}"
