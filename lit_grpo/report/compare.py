"""Several runs in one page: how each ended, where their settings differ, and their curves upon each other."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.report.curves import Score, draw_overlay, scores
from lit_grpo.report.plot import STYLES
from lit_grpo.report.render import render
from lit_grpo.report.run import Run, held_at_the_end, how_it_ended
from lit_grpo.run.changes import flat
from lit_grpo.run.folder import REPORT_FILE
from lit_grpo.utils.files import write_atomically

MOST_DIFFERENCES = 60
"""Settings that the table of differences shows at most."""
SCORES = ("final reward", "best reward", "held-out reward", "best held-out reward")


@dataclass(frozen=True)
class Row:
    """One run in the table of a comparison."""

    name: str
    style: int
    """Number of its colour and dashes in the curves."""
    link: str
    """Address of its own report, seen from the page; empty if there is none."""
    ended: str
    held: str
    """Diagnoses that held at the end, else "-"."""
    scores: list[Score | None]
    """One for each of :data:`SCORES`; None where it was not measured."""


def write_comparison(runs: Sequence[Run], folder: Path) -> Path:
    """Write ``report.html`` on several runs into ``folder`` and return its path.

    Args:
        runs: at least two runs; those of one name are told apart by a number.
        folder: folder of the page, created if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT_FILE
    write_atomically(path, make_comparison(runs, folder))
    return path


def make_comparison(runs: Sequence[Run], folder: Path) -> str:
    """Return the page of several runs, with links as seen from ``folder``."""
    _name_apart(runs)
    found = differences([run.settings() for run in runs])
    return render(
        "compare.html.jinja",
        rows=[_row(run, i % STYLES, folder) for i, run in enumerate(runs)],
        score_names=SCORES,
        differences=found[:MOST_DIFFERENCES],
        more=max(0, len(found) - MOST_DIFFERENCES),
        unknown=[run.name for run in runs if not run.settings()],
        curves=draw_overlay(runs),
        styles=STYLES,
        modes=[],
    )


def differences(settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """List the dotted names of the settings that are not the same everywhere, with the value of each run as text.

    A setting that a run does not have is "-"; those that all have come first.
    """
    every = [{key: value for part, one in run.items() for key, value in flat(one, part).items()} for run in settings]
    keys = sorted({key for one in every for key in one})
    rows = [(key, [_shown(one[key]) if key in one else "-" for one in every]) for key in keys]
    found = [(key, values) for key, values in rows if len(set(values)) > 1]
    return sorted(found, key=lambda row: any(row[0] not in one for one in every))


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:200] + "…"


def _name_apart(runs: Sequence[Run]) -> None:
    names = [run.name for run in runs]
    for i, run in enumerate(runs):
        if names.count(names[i]) > 1:
            run.name = f"{names[i]} ({1 + names[:i].count(names[i])})"


def _row(run: Run, style: int, folder: Path) -> Row:
    own = {score.name: score for score in scores(run)}
    report = Path(run.source) / REPORT_FILE
    return Row(
        name=run.name,
        style=style,
        link=_address(report, folder) if report.is_file() else "",
        ended=how_it_ended(run).text,
        held=", ".join(held_at_the_end(run)) or "-",
        scores=[own.get(name) for name in SCORES],
    )


def _address(path: Path, folder: Path) -> str:
    from urllib.parse import quote

    # "./" keeps a folder whose name holds a colon from being read as a scheme.
    return "./" + quote(Path(os.path.relpath(path, folder)).as_posix())
