"""The curves of one run or of several: which charts there are, what is in them, and how good a run was."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lit_grpo.report.plot import STYLES, Chart, Series, draw_lines
from lit_grpo.report.run import Run
from lit_grpo.tracking.charts import PANELS, Mark, lines_of, short

HELD_OUT = "val/reward"
WINDOW = 10
"""Rollouts at most over which a reward is averaged; a tenth of a shorter run."""


@dataclass(frozen=True)
class Score:
    """One number that says how good a run was."""

    name: str
    value: str
    error: str
    """Standard error; empty where it is not known."""
    more: str
    """Words below the number."""


def held_out_errors(run: Run) -> list[float]:
    """Return the standard error of the held-out reward at every step; NaN where it is not known.

    The held-out reward is the mean over the evaluation sets, whose errors are independent.
    """
    pattern = re.compile(r"val/(.+)/reward/se")
    sets = [key for key in run.metrics if pattern.fullmatch(key) and not key.endswith("/change/reward/se")]
    errors = []
    for i in range(len(run.steps)):
        squares = [run.metrics[key][i] ** 2 for key in sets]
        # A set without an error leaves that of the mean unknown.
        errors.append(math.sqrt(sum(squares)) / len(squares) if squares else math.nan)
    return errors


def scores(run: Run) -> list[Score]:
    """Say how good the run was: training reward at the end and at its best, held-out reward with its error."""
    found = []
    size = window(len(run.steps))
    training = [(s, v) for s, v in zip(run.steps, run.values("reward"), strict=True) if math.isfinite(v)]
    if training:
        values = [value for _, value in training]
        means = [sum(values[i - size + 1 : i + 1]) / size for i in range(size - 1, len(values))] or values
        over = f"mean of {size} rollouts" if size > 1 else "of one rollout"
        first = short(means[0])
        found.append(Score("final reward", short(means[-1]), "", f"{over}, {first} at the beginning"))
        best = max(range(len(means)), key=lambda i: means[i])
        until = training[min(best + size - 1, len(training) - 1)][0]
        found.append(Score("best reward", short(means[best]), "", f"{over} up to step {until}"))
    held = [
        (step, value, error)
        for step, value, error in zip(run.steps, run.values(HELD_OUT), held_out_errors(run), strict=True)
        if math.isfinite(value)
    ]
    if held:
        step, value, error = held[-1]
        base = f"at step {step}" + (f", {short(held[0][1])} at step {held[0][0]}" if len(held) > 1 else "")
        known, why_not = _error(error)
        found.append(Score("held-out reward", short(value), known, base + why_not))
        step, value, error = max(held, key=lambda row: row[1])
        known, why_not = _error(error)
        if len(held) > 1:
            found.append(Score("best held-out reward", short(value), known, f"at step {step}{why_not}"))
    return found


def _error(error: float) -> tuple[str, str]:
    """Return a standard error as text, and where there is none to show the words that say why."""
    if not math.isfinite(error):
        return "", ", error unknown"
    # "0 ± 0" would promise a value without any doubt, and says only that nothing scattered.
    return (short(error), "") if error > 0 else ("", ", the same for every question")


def window(steps: int) -> int:
    """Return the number of rollouts over which a value of a run of ``steps`` is averaged."""
    return max(1, min(WINDOW, steps // 10))


def draw_curves(run: Run, marks: Sequence[Mark]) -> tuple[list[Chart], list[str]]:
    """Lay out the charts of what was logged, and list the titles of what was not (or was 0 throughout)."""
    charts, left_out = [], []
    for panel in PANELS:
        lines = [(key, label) for key, label in lines_of(run, panel) if run.has(key)]
        all_zero = all(not value for key, _ in lines for value in run.values(key) if math.isfinite(value))
        # A reward of 0 throughout is news, any other metric of 0 is not.
        if not lines or (all_zero and panel.name != "reward"):
            # A reward of one term is the reward itself, and has no chart of terms.
            if panel.name != "reward_terms" or not run.has("reward"):
                left_out.append(panel.title)
            continue
        series = []
        for style, (key, label) in enumerate(lines):
            errors = held_out_errors(run) if key == HELD_OUT else ()
            series.append(Series(label, run.steps, run.values(key), errors, style))
            series += [
                Series(label, steps, old[key], (), style, abandoned=True) for steps, old in run.abandoned if key in old
            ]
        chart = draw_lines(
            panel.name, panel.title, series, marks, log=panel.log, level=panel.level, level_name=panel.level_name,
            steps=run.steps,
        )  # fmt: skip
        if chart is not None:
            charts.append(chart)
    if run.has("val/pass@1"):
        right = [Series("held out", run.steps, run.values("val/pass@1"), (), 1)]
        charts[1:1] = [
            chart for chart in [draw_lines("pass", "share right, held out", right, marks, steps=run.steps)] if chart
        ]
    return charts, left_out


def draw_overlay(runs: Sequence[Run]) -> list[Chart]:
    """Lay out the main curve of every chart for several runs at once, one line a run."""
    found = []
    steps = [step for run in runs for step in run.steps]
    wanted = [(panel.name, panel.title, panel.lines[0][0], panel.log) for panel in PANELS]
    wanted[1:1] = [
        ("held_out", "reward, held out", HELD_OUT, False),
        ("pass", "share right, held out", "val/pass@1", False),
    ]
    for name, title, key, log in wanted:
        series = [
            Series(run.name, run.steps, run.values(key), held_out_errors(run) if key == HELD_OUT else (), i % STYLES)
            for i, run in enumerate(runs)
            if run.has(key)
        ]
        if not any(value for one in series for value in one.values if math.isfinite(value)) and name != "reward":
            continue
        label = f"{title} ({name_of_line})" if (name_of_line := _line_name(name)) else title
        if (chart := draw_lines(name, label, series, log=log, steps=steps)) is not None:
            found.append(chart)
    return found


def _line_name(panel_name: str) -> str:
    """Return the name of a chart's main curve, where the chart has several."""
    lines = next((panel.lines for panel in PANELS if panel.name == panel_name), ())
    return lines[0][1] if len(lines) > 1 else ""
