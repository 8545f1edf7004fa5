"""The table of an evaluation's results that is printed in the terminal."""

from __future__ import annotations

import math

from lit_grpo.evaluation.evaluator import EvaluationResult


def table(result: EvaluationResult) -> str:
    """Format results, one row for each set: shares in percent with their standard errors, lengths in tokens."""
    columns: dict[str, dict[str, str]] = {}
    for name, metrics in result.sets.items():
        for title, value in _cells(metrics).items():
            columns.setdefault(title, {})[name] = value
    rows = [["set", *columns]]
    rows += [[name, *(columns[title].get(name, "-") for title in columns)] for name in result.sets]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    shown = ("greedy", "pass@", "maj@", "best@")
    errors = [
        error
        for metrics in result.sets.values()
        for key, error in metrics.items()
        if key.endswith("/se") and key.startswith(shown)
    ]
    note = "" if all(map(_scatters, errors)) else "; none where all prompts came out alike or there is only one"
    return "\n".join([*lines, f"percent, with the standard error over prompts{note}"])


def _cells(metrics: dict[str, float]) -> dict[str, str]:
    # The number of samples stands in no key of its own, only in the name of avg@n.
    samples = max((int(key[4:]) for key in metrics if key.startswith("avg@") and "/" not in key), default=1)
    cells = {"prompts": f"{metrics['prompts']:.0f}", "samples": str(samples)} if "prompts" in metrics else {}
    for key in ("greedy", "pass@1"):
        if key in metrics:
            cells[key] = _share(metrics, key)
    ks = [int(key[5:]) for key in metrics if key.startswith("pass@") and "/" not in key and key != "pass@1"]
    if ks:
        last = max(ks)
        names = [f"pass@{last}", f"maj@{last}"]
        names += [key for key in metrics if key.startswith(f"best@{last}/") and not key.endswith("/se")]
        cells |= {key: _share(metrics, key) for key in names if key in metrics}
    for key in ("truncated_frac", "no_answer_frac"):
        if key in metrics:
            cells[key.replace("_", " ")] = f"{100 * metrics[key]:.1f}"
    if "reward" in metrics:
        cells["reward"] = f"{metrics['reward']:.3f}"
    if "length" in metrics:
        cells["length"] = f"{metrics['length']:.1f}"
    return cells


def _share(metrics: dict[str, float], key: str) -> str:
    text, error = f"{100 * metrics[key]:.1f}", metrics.get(f"{key}/se", math.nan)
    if not _scatters(error):
        return text
    # An error that would be rounded to nothing keeps its first digit.
    return f"{text} ± {100 * error:{'.1f' if 100 * error >= 0.05 else '.1g'}}"


def _scatters(error: float) -> bool:
    """Tell whether there is a standard error to show: one of 0 would promise a value without any doubt."""
    return math.isfinite(error) and error > 0
