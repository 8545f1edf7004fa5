"""The results of an evaluation as a table of text."""

from __future__ import annotations

from lit_grpo.evaluation.evaluator import EvaluationResult


def table(result: EvaluationResult) -> str:
    """One row a set: shares in percent with their standard errors, lengths in tokens."""
    columns: dict[str, dict[str, str]] = {}
    for name, found in result.sets.items():
        for title, value in _cells(found).items():
            columns.setdefault(title, {})[name] = value
    rows = [["set", *columns]]
    rows += [[name, *(columns[title].get(name, "-") for title in columns)] for name in result.sets]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "percent, with the standard error over prompts"])


def _cells(found: dict[str, float]) -> dict[str, str]:
    samples = max((int(key[4:]) for key in found if key.startswith("avg@") and "/" not in key), default=1)
    cells = {"prompts": f"{found['prompts']:.0f}", "samples": str(samples)} if "prompts" in found else {}
    for key in ("greedy", "pass@1"):
        if key in found:
            cells[key] = _share(found, key)
    ks = [int(key[5:]) for key in found if key.startswith("pass@") and "/" not in key and key != "pass@1"]
    if ks:
        last = max(ks)
        names = [f"pass@{last}", f"maj@{last}"]
        names += [key for key in found if key.startswith(f"best@{last}/") and not key.endswith("/se")]
        cells |= {key: _share(found, key) for key in names if key in found}
    for key in ("truncated", "no_answer"):
        if key in found:
            cells[key.replace("_", " ")] = f"{100 * found[key]:.1f}"
    if "reward" in found:
        cells["reward"] = f"{found['reward']:.3f}"
    if "length" in found:
        cells["length"] = f"{found['length']:.1f}"
    return cells


def _share(found: dict[str, float], key: str) -> str:
    error = found.get(f"{key}/se")
    return f"{100 * found[key]:.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
