"""The interface of prompt sources: lists of rows, before any template or tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_grpo.types import Message


@dataclass(frozen=True, slots=True)
class Row:
    """One question of a source."""

    id: str
    """Id, unique in the source, under which a prompt's history is kept."""
    question: str
    """Text of the question; of a chat, the text of its last user message."""
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns, which rewards see."""
    where: str = ""
    """File and line of the row, for messages about it."""
    source: str = ""
    """Name of the source; empty: the name of the source that returned the row."""
    messages: tuple[Message, ...] | None = None
    """The turns of the chat where the source has them, each with ``role`` and ``content``; None: a text."""
    other_answers: tuple[str, ...] = ()
    """Further gold answers, any of which is as right as ``answer``."""

    @property
    def golds(self) -> tuple[str, ...]:
        """All gold answers, any of which is right; empty where there is none."""
        return () if self.answer is None else (self.answer, *self.other_answers)


class PromptSource:
    """Base class of all prompt sources.

    Order and shuffling are the data module's business. A source is cheap to construct: files are read, and checked
    whole, in ``rows``. Bad input raises :class:`lit_grpo.errors.UserError` with file, line and remedy.
    """

    name: str = ""

    @property
    def weights(self) -> Mapping[str, float] | None:
        """Share of each ``Row.source`` in the prompts that are trained on; None: in proportion to its rows."""
        return None

    def rows(self) -> Sequence[Row]:
        """Return all rows, in a fixed order and with unique ids."""
        raise NotImplementedError(f"{type(self).__name__} must implement rows()")

    def columns_taken(self) -> list[str]:
        """Say in one line for each table what was taken from which column; nothing where there are no columns."""
        return []
