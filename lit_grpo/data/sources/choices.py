"""Multiple choice: options in a column of their own are written below the question, and the gold becomes a letter."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.data.sources.golds import is_missing, parsed, plain

COLUMNS = ("choices", "options")
"""Columns of options: MMLU, ARC and OpenBookQA name them ``choices``, MMLU-Pro, MedQA and RACE ``options``."""


@dataclass(frozen=True)
class Options:
    """The options of one question, lettered from A on in their order."""

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    """Names of the options in the data: letters, or numbers in some rows of ARC."""

    def below(self, question: str) -> str:
        """Return the question with its options below, unless it lists them already."""
        if all(text in question for text in self.texts):
            return question
        lines = [f"{letter}. {text}" for letter, text in zip(string.ascii_uppercase, self.texts, strict=False)]
        return "\n".join([question.rstrip(), *lines])

    def letter(self, gold: Any) -> str | None:
        """Return the letter of the gold option; None where the gold is none of them.

        The gold may be the option's label, its text, or its number from 0 on. Of numbers written as text the label and
        the option's text come first.
        """
        gold = plain(gold)
        if isinstance(gold, (list, tuple)) and len(gold) == 1:
            gold = gold[0]
        if isinstance(gold, bool) or not isinstance(gold, (str, int, float)) or is_missing(gold):
            return None
        if isinstance(gold, str):
            wanted = gold.strip()
            bare = wanted.strip("().:")
            places = [i for i, label in enumerate(self.labels) if label == bare]
            places = places or [i for i, text in enumerate(self.texts) if text.strip() == wanted]
            if not places and wanted.isascii() and wanted.isdigit():
                places = [int(wanted)]
        else:
            places = [int(gold)] if gold == int(gold) else []
        return string.ascii_uppercase[places[0]] if places and 0 <= places[0] < len(self.texts) else None


def options_of(value: Any) -> Options | None:
    """Return the options that a column holds; None where it holds no list of two to 26 texts.

    Args:
        value: a list of texts, ``{text: [...], label: [...]}``, ``{A: ..., B: ...}``, or one of these as JSON.
    """
    value = plain(parsed(value) if isinstance(value, str) else value)
    labels: Sequence[Any] = ()
    if isinstance(value, Mapping):
        texts, labels = plain(value.get("text")), plain(value.get("label")) or ()
        if texts is None:
            texts, labels = list(value.values()), list(value)
    # Some data sets write each option as a mapping of its own.
    elif isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) and "text" in item for item in value):
        texts, labels = [item["text"] for item in value], [item.get("label") for item in value]
    else:
        texts = value
    if not isinstance(texts, (list, tuple)) or not 2 <= len(texts) <= len(string.ascii_uppercase):
        return None
    if not all(isinstance(text, (str, int, float)) and not isinstance(text, bool) for text in texts):
        return None
    letters = string.ascii_uppercase[: len(texts)]
    named = len(labels) == len(texts) and all(isinstance(label, str) for label in labels)
    return Options(tuple(str(text) for text in texts), tuple(labels) if named else tuple(letters))
