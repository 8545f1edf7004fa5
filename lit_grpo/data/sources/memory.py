"""Prompts given as Python or YAML values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lit_grpo.data.sources.table import Record, TableSource, in_memory


class InMemoryPrompts(TableSource):
    """Questions given as a list of mappings, which are checked like the rows of a file.

    Args:
        data: the rows, for instance ``[{prompt: "1+1=", answer: "2"}]``.
    """

    def __init__(self, data: list[dict[str, Any]], **columns: Any) -> None:
        super().__init__(**columns)
        self.data = data
        self.name = self.name or "memory"

    def records(self) -> Iterator[Record]:
        return in_memory(self.data, self.name)
