"""The curves of a run as one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

PANELS = {
    "reward": "reward",
    "entropy": "entropy (nats per token)",
    "length": "length (tokens)",
    "grad_norm": "gradient norm",
}
"""Metric key -> title of its panel."""


def draw_curves(steps: Sequence[int], metrics: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Write a PNG with one panel a metric: every rollout thin, the running mean thick.

    Args:
        steps: rollout numbers, M of them.
        metrics: M values for each key of :data:`PANELS`; a missing key leaves its panel empty, NaN leaves a gap.
        title: over the picture.
        path: the file to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # No pyplot: it keeps global state that belongs to the program we are embedded in.
    figure = Figure(figsize=(10, 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    window = max(1, len(steps) // 20)
    for axes, (key, label) in zip(figure.subplots(2, 2, sharex=True).flat, PANELS.items(), strict=True):
        values = metrics.get(key, ())
        axes.set_title(label, fontsize=11, loc="left")
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
        if not any(value == value for value in values):
            axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color="0.5")
            continue
        dense = len(steps) > 30
        axes.plot(steps, values, color="0.65" if dense else "tab:blue", linewidth=0.8 if dense else 1.5, marker=".",
                  markersize=0 if dense else 6)  # fmt: skip
        if dense:
            axes.plot(steps, _running_mean(values, window), color="tab:blue", linewidth=2)
    for axes in figure.axes[-2:]:
        axes.set_xlabel("rollout", fontsize=10)
    note = f"  (thick: mean of {window} rollouts)" if len(steps) > 30 and window > 1 else ""
    figure.suptitle(title + note, fontsize=12)
    figure.savefig(path, format="png")


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last ``window`` finite values at each place."""
    out = []
    for end in range(1, len(values) + 1):
        recent = [value for value in values[max(0, end - window) : end] if abs(value) < float("inf")]
        out.append(sum(recent) / len(recent) if recent else float("nan"))
    return out
