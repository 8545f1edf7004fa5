"""The charts of a run, for its summary and its report.

Lines differ by their dashes and carry a name at their end: colour alone tells nobody apart who cannot see it, or prints
in grey.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LN2 = math.log(2)
WIDTH, HEIGHT, DPI = 3.9, 2.5, 200
"""Size of a chart in inches, and dots per inch: on a phone, 360 points wide, the smallest letters are 9 points high."""

COLOURS = ("#1f4e8c", "#b3560a", "#3c7a3c", "#7a3c7a", "#555555")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
HATCHES = ("", "////", "....", "xxxx", "----")


@dataclass
class History:
    """The metrics of a run by step; steps count rollouts trained on, from 1."""

    steps: list[int]
    metrics: dict[str, list[float]]
    """Values of each metric by its key, one for each of ``steps``; NaN where it was not logged."""
    abandoned: list[tuple[list[int], dict[str, list[float]]]] = field(default_factory=list)
    """Steps and metrics that a rollback or a resume left behind, oldest first."""

    def values(self, key: str) -> list[float]:
        """Return a metric at every step; NaN where there is none."""
        return self.metrics.get(key) or [math.nan] * len(self.steps)

    def has(self, key: str) -> bool:
        """Tell whether a metric has a finite value anywhere."""
        return any(map(math.isfinite, self.metrics.get(key, ())))


class Panel(NamedTuple):
    """Description of one chart of curves."""

    name: str
    """Name of the PNG file, without its ending."""
    title: str
    lines: tuple[tuple[str, str], ...]
    """Metric key and name of each line; a key that ends in * stands for all metrics with that beginning."""
    level: float | None = None
    """Value at which a line is drawn across the chart; None: no line."""
    level_name: str = ""
    log: bool = False
    """True if the axis is logarithmic where the values span more than a factor of 30."""
    overview: bool = False
    """True if the chart is also in the picture at the end of a run."""


PANELS = (
    Panel(
        "reward",
        "reward",
        (("reward", "training"), ("val/reward", "held out"), ("sampling/reward", "all sampled")),
        overview=True,
    ),
    Panel("reward_terms", "reward, each term before its weight", (("reward/*", ""),)),
    Panel("entropy", "entropy (nats per token)", (("policy/entropy", "entropy"),), LN2, "ln 2", overview=True),
    Panel(
        "length",
        "length (tokens)",
        (
            ("completions/length", "all"),
            ("completions/correct_length", "correct"),
            ("completions/incorrect_length", "wrong"),
        ),
        overview=True,
    ),
    Panel(
        "grad_norm",
        "gradient norm before clipping",
        (("optim/grad_norm", "policy"), ("critic/grad_norm", "critic")),
        log=True,
        overview=True,
    ),
    Panel(
        "endings",
        "share of completions",
        (
            ("completions/truncated_frac", "truncated"),
            ("completions/no_answer_frac", "no answer"),
            ("completions/repetition_frac", "repeated 4-grams"),
        ),
    ),
    Panel(
        "groups",
        "share of groups",
        (
            ("groups/zero_advantage_frac", "no advantage"),
            ("groups/all_correct_frac", "all correct"),
            ("groups/all_wrong_frac", "all wrong"),
        ),
    ),
    Panel(
        "mismatch",
        "engine against learner (nats per token)",
        (("sampler_mismatch/logprob_abs_diff", "mean"), ("sampler_mismatch/logprob_abs_diff_max", "largest")),
        log=True,
    ),
    Panel(
        "clip",
        "share of tokens clipped",
        (("policy/clip_frac/low", "low"), ("policy/clip_frac/high", "high"), ("policy/clip_frac/dual", "dual")),
    ),
    Panel(
        "kl",
        "KL (nats per token)",
        (("policy/kl_ref_k3", "to the reference"), ("policy/approx_kl_k3", "to the old policy")),
        log=True,
    ),
    Panel("values", "critic's value", (("critic/value_correct", "correct"), ("critic/value_incorrect", "wrong"))),
    Panel("speed", "generated tokens per second", (("time/tokens_per_second", "tokens/s"),)),
)
OVERVIEW = tuple(panel for panel in PANELS if panel.overview)
OVERVIEW_KEYS = tuple(panel.lines[0][0] for panel in OVERVIEW)
"""The main metric of each chart in the overview."""


@dataclass(frozen=True)
class Mark:
    """A step that the charts mark with a line, dashed or solid, and its label."""

    step: int
    label: str
    solid: bool = False


@dataclass(frozen=True)
class Picture:
    """A chart as PNG bytes."""

    name: str
    alt: str
    """Text that says in words and numbers what the chart shows, for those who do not see it."""
    png: bytes
    wide: bool = False


def draw_overview(history: History, title: str) -> bytes:
    """Draw the charts of :data:`OVERVIEW` in one picture, as PNG; what was not logged leaves its chart empty."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns, rows = 2, math.ceil(len(OVERVIEW) / 2)
    # No pyplot: it keeps global state that belongs to the program we may be embedded in.
    figure = Figure(figsize=(columns * WIDTH * 1.3, rows * HEIGHT * 1.3 + 0.3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, OVERVIEW, strict=False):
        _style(axes, panel.title)
        lines = [(key, label) for key, label in panel.lines if history.has(key)]
        if lines:
            _plot(axes, history, panel, lines, ())
        else:
            axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color="0.5")
    figure.suptitle(title, fontsize=12)
    return _png(figure)


def draw_panels(history: History, marks: Sequence[Mark]) -> tuple[list[Picture], list[str]]:
    """Draw the charts of what was logged, and list the titles of what was not (or was 0 throughout)."""
    pictures, left_out = [], []
    for panel in PANELS:
        lines = [(key, label) for key, label in lines_of(history, panel) if history.has(key)]
        all_zero = all(not value for key, _ in lines for value in history.values(key) if math.isfinite(value))
        # A reward of 0 throughout is news, any other metric of 0 is not.
        if not lines or (all_zero and panel.name != "reward"):
            left_out.append(panel.title)
            continue
        pictures.append(_draw(history, panel, lines, marks))
    return pictures, left_out


def lines_of(history: History, panel: Panel) -> list[tuple[str, str]]:
    """List (metric key, name) of the lines of a chart, each key that ends in * replaced by those it stands for."""
    lines = []
    for key, label in panel.lines:
        if key.endswith("*"):
            # Every reward logs its time-outs; other keys of that beginning (reward/std) are no rewards.
            names = [
                k
                for k in history.metrics
                if k.startswith(key[:-1]) and f"reward_errors/timeout_frac/{k[len(key) - 1 :]}" in history.metrics
            ]
            # One term alone is the reward itself.
            lines += [(k, k.removeprefix(key[:-1])) for k in names] if len(names) > 1 else []
        else:
            lines.append((key, label))
    # More lines than there are kinds of dashes could not be told apart.
    return lines[: len(DASHES)]


def _axes(title: str, *, right: float = 0.97, legend: bool = False) -> tuple[Any, Any]:
    """Make a figure with one pair of axes that end at ``right``, a share of the width."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI)
    FigureCanvasAgg(figure)
    # Fixed margins: letting matplotlib find them takes three times as long as drawing.
    axes = figure.add_axes((0.13, 0.33 if legend else 0.19, right - 0.13, 0.57 if legend else 0.71))
    _style(axes, title)
    return figure, axes


def _style(axes: Any, title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def _png(figure: Any) -> bytes:
    import numpy as np
    from PIL import Image

    figure.canvas.draw()
    image = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    buffer = io.BytesIO()
    # Few colours: a palette makes the page a third of the size.
    image.quantize(64, method=Image.Quantize.FASTOCTREE).save(buffer, format="png")
    return buffer.getvalue()


def _draw(history: History, panel: Panel, lines: Sequence[tuple[str, str]], marks: Sequence[Mark]) -> Picture:
    longest = max(len(label) for _, label in lines) if len(lines) > 1 else 0
    figure, axes = _axes(panel.title, right=max(0.6, 0.95 - 0.0168 * longest))
    described = _plot(axes, history, panel, lines, marks)
    marked = "; ".join(f"{mark.label} at step {mark.step}" for mark in marks)
    alt = f"{panel.title}: {', '.join(described)}" + (f"; {marked}" if marked else "")
    return Picture(panel.name, alt, _png(figure))


def _plot(
    axes: Any, history: History, panel: Panel, lines: Sequence[tuple[str, str]], marks: Sequence[Mark]
) -> list[str]:
    """Plot (metric key, name) lines and return what each shows, in words and numbers."""
    finite = [v for key, _ in lines for v in history.values(key) if math.isfinite(v)]
    finite += [v for _, old in history.abandoned for key, _ in lines for v in old.get(key, []) if math.isfinite(v)]
    positive = [v for v in finite if v > 0]
    if panel.log and positive and max(positive) > 30 * min(positive):
        axes.set_yscale("log")
    else:
        # matplotlib's own formatter would write a common factor over the title.
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
    ends, described = [], []
    for i, (key, label) in enumerate(lines):
        # Evaluations come every so often: joined across the steps that have none.
        points = [(s, v) for s, v in zip(history.steps, history.values(key), strict=True) if math.isfinite(v)]
        x, y = [s for s, _ in points], [v for _, v in points]
        few = len(points) < 25
        axes.plot(x, y, color=COLOURS[i], linestyle=DASHES[i], linewidth=1.4, marker="o" if few else "", markersize=2.5)
        ends.append((x[-1], y[-1], label, COLOURS[i]))
        described.append(f"{label} {y[0]:.3g} at step {x[0]}, {y[-1]:.3g} at step {x[-1]}")
        for old_steps, old in history.abandoned:
            left = [(s, v) for s, v in zip(old_steps, old.get(key, []), strict=False) if math.isfinite(v)]
            if left:
                axes.plot([s for s, _ in left], [v for _, v in left], color=COLOURS[i], linestyle=DASHES[i],
                          linewidth=0.8, alpha=0.6)  # fmt: skip
                axes.plot(*left[-1], color=COLOURS[i], marker="x", markersize=5)
                described.append(f"left behind: {label} {left[-1][1]:.3g} at step {left[-1][0]}")
    # Only where the values come near the level, which would otherwise stretch the axis.
    if panel.level is not None and finite and max(finite) > 0.8 * panel.level:
        axes.axhline(panel.level, color="0.4", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate(panel.level_name, (0, panel.level), xycoords=("axes fraction", "data"), fontsize=8, va="bottom")
    all_steps = [step for steps in (history.steps, *(steps for steps, _ in history.abandoned)) for step in steps]
    if len(set(all_steps)) > 1:
        axes.set_xlim(min(all_steps), max(all_steps))
    _mark(axes, marks)
    if len(lines) > 1:
        _name_lines(axes, ends)
    axes.set_xlabel("rollouts trained on", fontsize=8.5)
    return described


def _mark(axes: Any, marks: Sequence[Mark]) -> None:
    low, high = axes.get_xlim()
    labelled: list[float] = []
    for mark in marks:
        if not low <= mark.step <= high:
            continue
        axes.axvline(mark.step, color="black", linewidth=1.1, linestyle="-" if mark.solid else (0, (4, 2)))
        position = (mark.step - low) / max(high - low, 1e-9)
        # Labels that would touch go one line down each.
        row = sum(abs(position - other) < 0.45 for other in labelled)
        labelled.append(position)
        left = position < 0.6
        axes.annotate(f"{mark.label} {mark.step}", (mark.step, 0.99 - 0.1 * row), xycoords=("data", "axes fraction"),
                      xytext=(2.5 if left else -2.5, 0), textcoords="offset points", fontsize=8, va="top",
                      ha="left" if left else "right",
                      bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6})  # fmt: skip


def _name_lines(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the name of each line at its right end, moved apart where names would overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    labels = sorted(((float(to_axes.transform((x, y))[1]), label, colour) for x, y, label, colour in ends),
                    key=lambda label: label[0])  # fmt: skip
    gap, last, heights = 0.1, -1.0, []
    for height, _, _ in labels:
        last = max(min(height, 1.0), last + gap)
        heights.append(last)
    surplus = max(0.0, heights[-1] - 1.0)
    for height, (_, label, colour) in zip(heights, labels, strict=True):
        axes.annotate(label, (1.02, height - surplus), xycoords="axes fraction", fontsize=8, color=colour, va="center",
                      annotation_clip=False)  # fmt: skip


def draw_phases(history: History, phases: Mapping[str, str], marks: Sequence[Mark]) -> Picture:
    """Draw the seconds of a rollout, stacked by phase and told apart by hatching.

    Args:
        history: metrics of the run.
        phases: metric key -> name of each phase, from the bottom up.
        marks: steps to mark.
    """
    figure, axes = _axes("seconds per rollout", legend=True)
    # At most 40 bars, each the mean of several rollouts where there are more.
    width = max(1, math.ceil(len(history.steps) / 40))
    starts = range(0, len(history.steps), width)
    bottom = [0.0] * len(starts)
    for i, (key, name) in enumerate(phases.items()):
        values = history.values(key)
        means = [_mean(values[start : start + width]) for start in starts]
        axes.bar([history.steps[s] for s in starts], means, width=width * 0.9, bottom=bottom, align="edge", label=name,
                 color=("#dfe7f2", "#8fb0d9", "#f2d9b8", "#c98a3c", "#555555")[i % 5], hatch=HATCHES[i % 5],
                 edgecolor="0.25", linewidth=0.4)  # fmt: skip
        bottom = [b + m for b, m in zip(bottom, means, strict=True)]
    _mark(axes, marks)
    axes.set_ylim(0, max([*bottom, 1e-6]) * 1.25)
    axes.set_xlabel("rollouts trained on", fontsize=8.5)
    figure.legend(fontsize=8, ncols=2, loc="lower center", frameon=False, handlelength=1.6)
    return Picture("phases", "seconds per rollout by phase; the table has the numbers", _png(figure))


def draw_histograms(rewards: Sequence[tuple[str, Sequence[float]]]) -> Picture:
    """Draw the rewards of the completions of some rollouts side by side in the same bins.

    Args:
        rewards: (name, one reward a completion) of each rollout.
    """
    figure, axes = _axes("rewards of the completions", legend=True)
    distinct = sorted({value for _, of_rollout in rewards for value in of_rollout})
    # Rewards of a verifier take few values, and each gets a bar of its own; a continuous reward is put into bins.
    if len(distinct) <= 8:
        labels = [f"{value:.3g}" for value in distinct]
        counts = [[list(of_rollout).count(value) for value in distinct] for _, of_rollout in rewards]
    else:
        low, high, bins = distinct[0], distinct[-1], 8
        step = (high - low) / bins
        labels = [f"{low + step * b:.2g}" for b in range(bins)]
        counts = [[0] * bins for _ in rewards]
        for row, (_, of_rollout) in zip(counts, rewards, strict=True):
            for v in of_rollout:
                row[min(bins - 1, int((v - low) / step))] += 1
    slot = 0.8 / len(rewards)
    for i, ((name, of_rollout), row) in enumerate(zip(rewards, counts, strict=True)):
        shares = [count / max(1, len(of_rollout)) for count in row]
        positions = [b + (i - (len(rewards) - 1) / 2) * slot for b in range(len(labels))]
        axes.bar(positions, shares, slot * 0.92, label=name, color=("#dfe7f2", "#8fb0d9", "#c98a3c")[i % 3],
                 hatch=("", "////", "....")[i % 3], edgecolor="0.25", linewidth=0.5)  # fmt: skip
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 1)
    axes.set_xlabel("reward" if len(distinct) <= 8 else "reward, from", fontsize=8.5)
    axes.set_ylabel("share of completions", fontsize=8.5)
    figure.legend(fontsize=8, ncols=2, loc="lower center", frameon=False, handlelength=1.6)
    described = "; ".join(
        f"{name}: " + ", ".join(f"{count} at {label}" for count, label in zip(row, labels, strict=True) if count)
        for (name, _), row in zip(rewards, counts, strict=True)
    )
    return Picture("reward_histogram", f"rewards of the completions. {described}", _png(figure))


def short(value: float) -> str:
    """Write a number with three digits, or in whole thousands."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else 0.0
