"""The figures of a run under way as text: some lines for a terminal of any width, one line for a pipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

SHOWN = {
    "reward": "reward",
    "loss": "loss",
    "policy/entropy": "entropy",
    "completions/length": "length",
    "time/tokens_per_second": "tok/s",
}
"""Word for each metric that is shown, by its key, in this order; ``loss`` only where nothing is rewarded."""
_LEAST_BAR, _MOST_BAR = 6, 60
_GAP = "  "


@dataclass(frozen=True)
class Progress:
    """Progress of a run at one moment."""

    phase: str = ""
    """What the run does: ``start``, ``sync``, ``generate``, ``rewards``, ``learn``, ``evaluate``, ``checkpoint``, or
    ``end``, what comes after the last rollout; empty once that is over."""
    seconds: float = 0.0
    """Seconds since the phase began."""
    done: int = 0
    """Number of rollouts trained on."""
    total: int | None = None
    """Number of rollouts of the whole run; None: not known, or nothing is trained."""
    part: tuple[int, int] | None = None
    """Number of batches evaluated and of all batches, in an evaluation."""
    metrics: Mapping[str, float | str] | None = None
    """Metrics of the last rollout, by the word that they are shown with."""
    left: float | None = None
    """Seconds that the rest of the run will take as far as its last rollouts tell; None: not known."""


def chosen(logged: Mapping[str, float], own: Mapping[str, float | str]) -> dict[str, float | str]:
    """Choose the metrics that are shown.

    Args:
        logged: all metrics of a rollout, by key; NaN: not measured.
        own: metrics that were logged for the progress bar, which are shown behind ours.
    """
    found = {
        word: float(logged[key]) for key, word in SHOWN.items() if key in logged and not math.isnan(float(logged[key]))
    }
    if "reward" in found:
        found.pop("loss", None)
    return {**found, **{key: value for key, value in own.items() if key not in SHOWN}}


def line(progress: Progress) -> str:
    """Write a rollout that has ended as one line, for logs and pipes."""
    return _GAP.join([f"rollout {_count(progress.done, progress.total)}", *_items(progress), *_left(progress)])


def display(progress: Progress, console: Console, width: int) -> Text:
    """Write the progress for a terminal; whole items only, so that a narrow one gets more lines."""
    ascii_only = console.options.ascii_only
    phase = []
    if progress.phase:
        part = f" {progress.part[0]}/{progress.part[1]}" if progress.part is not None else ""
        phase = [f"{progress.phase}{part} {duration(progress.seconds)}"]
    lines = [_head(progress, ascii_only, width)] if progress.total is not None else []
    # Two spaces would be hard to tell from one where an item holds a space itself.
    lines += [Text(text) for text in packed([*phase, *_items(progress)], width, _GAP + " ")]
    return Text("\n").join(lines)


def _head(progress: Progress, ascii_only: bool, width: int) -> Text:
    """Return rollout i of n with a bar, share and time left, as far as the width allows."""
    done, total = progress.done, max(1, progress.total or 1)
    # The one that is in hand, and not how many are finished.
    number = min(done + 1, total) if progress.phase else done
    begin = f"rollout {_count(number, total)} "
    end = f" {done / total:4.0%}" + "".join(f"{_GAP}{text}" for text in _left(progress))
    room = min(_MOST_BAR, width - len(begin) - len(end) - 1)
    if room < _LEAST_BAR:
        text = Text.assemble((begin, "bold"), end.strip())
    else:
        full = round(room * done / total)
        made, rest = ("#", "-") if ascii_only else ("━", "─")
        text = Text.assemble((begin, "bold"), (made * full, "green"), (rest * (room - full), "dim"), end)
    text.truncate(width)
    return text


def _items(progress: Progress) -> list[str]:
    items = []
    for word, value in (progress.metrics or {}).items():
        if word == "tok/s" and isinstance(value, float):
            items.append(f"{value:,.0f} tok/s")
        else:
            items.append(f"{word} {number(value)}")
    return items


def _left(progress: Progress) -> list[str]:
    return [] if progress.left is None else [f"{duration(progress.left)} left"]


def _count(number: int, total: int | None) -> str:
    return str(number) if total is None else f"{number}/{total}"


def packed(items: Sequence[str], width: int, gap: str) -> list[str]:
    """Put as many items on each line as fit."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(gap) + len(item) <= width:
            lines[-1] += gap + item
        else:
            lines.append(item)
    return lines


def number(value: float | str) -> str:
    """Write a number with the digits that are worth reading.

    >>> number(0.31249), number(23.41), number(0.0001234), number(123456.0)
    ('0.312', '23.4', '0.000123', '1.23e+05')
    """
    if not isinstance(value, float):
        return str(value)
    if value == 0 or 0.001 <= abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:.1f}" if 10 <= abs(value) < 10_000 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Write seconds as a person reads them.

    >>> duration(3.2), duration(133), duration(7384)
    ('3 s', '2:13', '2:03:04')
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
