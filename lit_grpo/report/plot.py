"""Charts as SVG: the geometry of curves and bars, which ``chart.html.jinja`` draws and ``script.js.jinja`` zooms.

A chart is drawn in a square of 1000 by 1000 units that is stretched to its place, so that the points of a path are also
the data that a person reads off: the script turns units into values again by the range of the axes, and the page holds
every number once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lit_grpo.tracking.charts import Mark, short

UNITS = 1000.0
STYLES = 5
"""Number of colours and dash patterns that the style sheet knows."""
BUCKETS = 200
"""A longer curve is thinned to this many pieces, each with its first, lowest, highest and last point."""
FEW = 25
"""A curve with fewer points than this shows each of them as a dot."""


@dataclass(frozen=True)
class Series:
    """One curve before it is drawn."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    """One value a step; NaN where it was not logged."""
    errors: Sequence[float] = ()
    """Standard error of each value, drawn as a band; empty where it is not known."""
    style: int = 0
    """Number of its colour and dashes."""
    abandoned: bool = False
    """True for what a rollback or a resume left behind: drawn thin, with a cross at its end."""


@dataclass(frozen=True)
class Line:
    """One curve as an SVG path."""

    label: str
    style: int
    path: str
    dots: str
    """Path of a dot on each point; empty where there are many."""
    band: str
    """Path of the area of one standard error around the curve; empty without errors."""
    cross: str
    """Path of the cross at the end of an abandoned curve, else empty."""
    title: str
    """What it shows, in words and numbers."""


@dataclass(frozen=True)
class Bar:
    """One rectangle of a bar chart, in units from the upper left."""

    x: float
    y: float
    width: float
    height: float
    style: int
    title: str


@dataclass(frozen=True)
class Chart:
    """A chart ready to be drawn."""

    name: str
    title: str
    alt: str
    """What the chart shows in words and numbers, for those who do not see it."""
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    """Lowest and highest value of the axis; their decimal logarithms if ``log``."""
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    """Place in units, and text, of each tick."""
    lines: list[Line]
    bars: list[Bar]
    names: list[tuple[str, int]]
    """Name and style of everything that the legend lists."""
    marks: list[tuple[float, str, bool]]
    """Place in units, label, and whether the line is solid."""
    level: tuple[float, str] | None = None
    log: bool = False
    x_name: str = "rollouts trained on"


def draw_lines(
    name: str,
    title: str,
    series: Sequence[Series],
    marks: Sequence[Mark] = (),
    *,
    log: bool = False,
    level: float | None = None,
    level_name: str = "",
    steps: Sequence[int] = (),
) -> Chart | None:
    """Lay out curves in one chart; None if no curve has a finite value.

    Args:
        name: word that tells the chart from the others of the page.
        title: heading of the chart.
        series: curves, in the order in which they are named.
        marks: steps to mark with an upright line.
        log: whether the axis may be logarithmic; it is where the values span more than a factor of 30.
        level: value to draw a line across at, if the values come near it.
        level_name: label of that line.
        steps: steps that the axis has to hold, so that the charts of a run have the same one.
    """
    points = [_finite(one) for one in series]
    values = [value for some in points for _, value, _ in some]
    if not values:
        return None
    positive = [value for value in values if value > 0]
    log = bool(log and positive and max(positive) > 30 * min(positive))
    if log:
        points = [[p for p in some if p[1] > 0] for some in points]
    edges = positive if log else [v + sign * e for some in points for _, v, e in some for sign in (-1, 1)]
    if level is not None and max(values) > 0.8 * level:
        edges = [*edges, level]
    else:
        level = None
    y_range = _padded([math.log10(v) for v in edges] if log else edges)
    within = [*steps, *(step for some in points for step, _, _ in some)]
    x_range = (
        (float(min(within)), float(max(within))) if max(within) > min(within) else (within[0] - 0.5, within[0] + 0.5)
    )

    def place(step: float, value: float) -> tuple[float, float]:
        value = math.log10(value) if log else value
        return _units(step, x_range), UNITS - _units(value, y_range)

    lines = [_line(one, some, place) for one, some in zip(series, points, strict=True) if some]
    inside = [mark for mark in marks if x_range[0] <= mark.step <= x_range[1]]
    described = "; ".join([*(line.title for line in lines), *(f"{m.label} at step {m.step}" for m in inside)])
    return Chart(
        name=name,
        title=title,
        alt=f"{title}: {described}",
        x_range=x_range,
        y_range=y_range,
        x_ticks=[(_units(t, x_range), f"{t:,.0f}") for t in ticks(*x_range, 5) if t == int(t)],
        y_ticks=[
            (UNITS - _units(t, y_range), short(10**t) if log else short(t))
            for t in (_decades(*y_range) if log else ticks(*y_range, 6))
        ],
        lines=lines,
        bars=[],
        names=[(line.label, line.style) for line in lines if not line.cross],
        marks=[(_units(mark.step, x_range), f"{mark.label} {mark.step}", mark.solid) for mark in inside],
        level=None if level is None else (place(x_range[0], level)[1], level_name),
        log=log,
    )


def draw_stack(
    name: str, title: str, steps: Sequence[int], parts: Sequence[tuple[str, Sequence[float]]], marks: Sequence[Mark]
) -> Chart:
    """Lay out bars over the steps, in each of them the parts one upon the other.

    Args:
        name: word that tells the chart from the others of the page.
        title: heading of the chart.
        steps: number of each rollout.
        parts: name and values by step of each part, from the bottom up.
        marks: steps to mark with an upright line.
    """
    # At most 40 bars, each the mean of several rollouts where there are more.
    width = max(1, math.ceil(len(steps) / 40))
    starts = range(0, len(steps), width)
    x_range = (float(steps[0]), float(steps[-1] + 1))
    means = [[_mean(values[start : start + width]) for start in starts] for _, values in parts]
    y_range = (0.0, max([sum(column) for column in zip(*means, strict=True)] + [1e-6]) * 1.1)
    bars = []
    for i, start in enumerate(starts):
        left, right = _units(steps[start], x_range), _units(min(steps[start] + width, x_range[1]), x_range)
        base = 0.0
        for p, (label, _) in enumerate(parts):
            value = means[p][i]
            top = base + value
            bars.append(
                Bar(left, UNITS - _units(top, y_range), 0.9 * (right - left), _units(value, y_range), p % STYLES,
                    f"step {steps[start]}: {label} {short(value)} s")
            )  # fmt: skip
            base = top
    return Chart(
        name, title, f"{title}, by part; the table has the numbers", x_range, y_range,
        [(_units(t, x_range), f"{t:,.0f}") for t in ticks(*x_range, 5) if t == int(t)],
        [(UNITS - _units(t, y_range), short(t)) for t in ticks(*y_range, 6)], [], bars,
        [(label, p % STYLES) for p, (label, _) in enumerate(parts)],
        [(_units(m.step, x_range), f"{m.label} {m.step}", m.solid) for m in marks if x_range[0] <= m.step < x_range[1]],
    )  # fmt: skip


def draw_histogram(name: str, title: str, groups: Sequence[tuple[str, Sequence[float]]]) -> Chart:
    """Lay out the shares of values of several groups, side by side in the same bins.

    Args:
        name: word that tells the chart from the others of the page.
        title: heading of the chart.
        groups: name and finite values, at least one, of each group.
    """
    distinct = sorted({value for _, values in groups for value in values})
    # Rewards of a verifier take few values, and each gets a bar of its own; a continuous reward is put into bins.
    if len(distinct) <= 8:
        labels = [short(value) for value in distinct]
        counts = [[list(values).count(value) for value in distinct] for _, values in groups]
    else:
        low, step = distinct[0], (distinct[-1] - distinct[0]) / 8
        labels = [f"from {short(low + step * b)}" for b in range(8)]
        counts = [[0] * 8 for _ in groups]
        for row, (_, values) in zip(counts, groups, strict=True):
            for value in values:
                row[min(7, int((value - low) / step))] += 1
    bars = []
    cell = UNITS / len(labels)
    slot = 0.8 * cell / len(groups)
    for g, ((label, values), row) in enumerate(zip(groups, counts, strict=True)):
        for b, count in enumerate(row):
            height = UNITS * count / max(1, len(values))
            words = f"{label}: {count} of {len(values)} at {labels[b]}"
            bars.append(Bar(cell * (b + 0.1) + slot * g, UNITS - height, 0.92 * slot, height, g % STYLES, words))
    described = "; ".join(
        f"{label}: " + ", ".join(f"{count} at {text}" for count, text in zip(row, labels, strict=True) if count)
        for (label, _), row in zip(groups, counts, strict=True)
    )
    return Chart(
        name, title, f"{title}. {described}", (0.0, float(len(labels))), (0.0, 1.0),
        [(cell * (b + 0.5), text) for b, text in enumerate(labels)],
        [(UNITS * (1 - share), f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)], [], bars,
        [(label, g % STYLES) for g, (label, _) in enumerate(groups)], [], x_name="reward",
    )  # fmt: skip


def thin(values: Sequence[float], buckets: int = BUCKETS) -> list[int]:
    """Choose the indices of a curve to draw: all of a short one, and no extreme of a long one is lost.

    Of each of ``buckets`` pieces of equal length the first, the lowest, the highest and the last point stay.
    """
    if len(values) <= 4 * buckets:
        return list(range(len(values)))
    chosen: set[int] = set()
    for b in range(buckets):
        piece = range(len(values) * b // buckets, len(values) * (b + 1) // buckets)
        chosen |= {piece[0], piece[-1], min(piece, key=lambda i: values[i]), max(piece, key=lambda i: values[i])}
    return sorted(chosen)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round numbers from ``low`` to ``high``."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    # Multiples of the step, lest a sum of steps drifts off the round number.
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    stride = max(1, math.ceil((high - low) / 5))
    return [float(d) for d in range(math.ceil(low), math.floor(high) + 1, stride)]


def _finite(series: Series) -> list[tuple[int, float, float]]:
    """Return (step, value, standard error or 0) of every finite value."""
    errors = series.errors or [math.nan] * len(series.values)
    rows = zip(series.steps, series.values, errors, strict=False)
    return [(step, v, e if math.isfinite(e) else 0.0) for step, v, e in rows if math.isfinite(v)]


def _line(series: Series, points, place) -> Line:  # type: ignore[no-untyped-def]
    kept = [points[i] for i in thin([value for _, value, _ in points])]
    drawn = [place(step, value) for step, value, _ in kept]
    band = ""
    if any(error for _, _, error in kept):
        # On a logarithmic axis what reaches below 0 ends at the value.
        low = [place(s, v - e if v - e > 0 or v <= 0 else v) for s, v, e in kept]
        high = [place(s, v + e) for s, v, e in kept]
        band = _path([*high, *reversed(low)]) + "Z"
    first, last = points[0], points[-1]
    lowest, highest = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    name = f"left behind: {series.label}" if series.abandoned else series.label
    title = (
        f"{name} {short(first[1])} at step {first[0]}, {short(last[1])} at step {last[0]}, "
        f"lowest {short(lowest[1])} at {lowest[0]}, highest {short(highest[1])} at {highest[0]}"
    )
    x, y = drawn[-1]
    return Line(
        label=name,
        style=series.style % STYLES,
        path=_path(drawn),
        dots="".join(f"M{_number(x)},{_number(y)}h0" for x, y in drawn) if len(points) < FEW else "",
        band=band,
        cross=f"M{_number(x - 9)},{_number(y - 18)}l18,36m0,-36l-18,36" if series.abandoned else "",
        title=title,
    )


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _number(value: float) -> str:
    # Six digits: a spike a million times the rest would still leave it readable.
    return f"{value:.6g}"


def _units(value: float, extent: tuple[float, float]) -> float:
    return UNITS * (value - extent[0]) / (extent[1] - extent[0])


def _padded(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    # A flat curve lies in the middle of an axis as high as its value.
    margin = 0.05 * (high - low) if high > low else 0.5 * abs(low) or 0.5
    return low - margin, high + margin


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else 0.0
