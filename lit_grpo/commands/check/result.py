"""The lines of the preflight's table, and how the table is shown and written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["pass", "warn", "fail"]
SIGNS: Mapping[str, str] = {"pass": "✔ pass", "warn": "▲ warn", "fail": "✖ FAIL"}
COLOURS: Mapping[str, str] = {"pass": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Result:
    """Result of one check of the preflight, a line of its table.

    Attributes:
        name: name of the check.
        status: ``fail`` where the run would be wasted, ``warn`` where a person should look first.
        found: what the check saw, with numbers.
        remedy: what to do about a warning or failure.
        values: the numbers behind ``found``, for ``--json``.

    Raises:
        ValueError: a warning or failure comes without a remedy.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status != "pass" and not self.remedy:
            raise ValueError(f"{self.name}: a {self.status} needs a remedy")


def percent(share: float) -> str:
    """Write a share in per cent, with the digits that tell it from 0 and 1."""
    return f"{share:.1%}" if 0 < share < 0.1 or 0.9 < share < 1 else f"{share:.0%}"


def show(results: Sequence[Result], count: bool = True) -> None:
    """Print the table to standard output, as wide as the terminal, and how many passed."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from lit_grpo.terminal.console import make_console

    console = make_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), expand=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold")
    for result in results:
        found = Text(result.found)
        if result.status != "pass":
            found.append(f"\n→ {result.remedy}", style="bold")
        table.add_row(Text(SIGNS[result.status], style=COLOURS[result.status]), result.name, found)
    console.print(table)
    if not count:
        return
    counts = {status: sum(r.status == status for r in results) for status in SIGNS}
    print(f"{counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed")


def write_json(results: Sequence[Result], path: Path, about: Mapping[str, Any]) -> None:
    """Write one JSON object: ``passed``, ``checks`` and the entries of ``about``."""
    checks = [
        {"name": r.name, "status": r.status, "found": r.found, "remedy": r.remedy, "values": r.values} for r in results
    ]
    content = {**about, "passed": all(r.status != "fail" for r in results), "checks": checks}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
