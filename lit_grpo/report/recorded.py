"""Completions as a run or a tracker has recorded them, in rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILES = ("completions.jsonl", "completions.json")
"""One JSON object a completion, as it lies in a run folder; or a table of columns and rows, as trackers have it."""


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Read the completions recorded in a folder; lines that cannot be read are left out."""
    for name in FILES:
        path = folder / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        rows = _lines(text) if name.endswith("l") else _table(text)
        return [row for row in rows if isinstance(row.get("rollout"), int) and not isinstance(row["rollout"], bool)]
    return []


def _lines(text: str) -> Iterator[dict[str, Any]]:
    # Not splitlines: a model may write characters that end a line elsewhere, and JSON leaves them as they are.
    for line in text.split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _table(text: str) -> Iterator[dict[str, Any]]:
    try:
        table = json.loads(text)
        columns, data = table["columns"], table["data"]
        for cells in data:
            row = dict(zip(columns, cells, strict=True))
            row["correct"] = {"yes": True, "no": False}.get(str(row.get("correct")))
            yield row
    except (ValueError, KeyError, TypeError):
        return
