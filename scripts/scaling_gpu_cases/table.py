"""The page of a measurement: a table for each series in Markdown, what is aimed at beside it, and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.scaling_gpu_cases.measure import Record, efficiency, reward_after
from scripts.scaling_gpu_cases.points import SERIES, Point
from scripts.scaling_gpu_cases.results import Results

TITLES = {
    "weak": "Weak scaling: the same work on every card",
    "strong": "Strong scaling: the work of one card, spread over all",
    "layouts": "All cards colocated beside half of them as engines",
    "processes": "Engine processes of a rank",
}
WEAK_GOALS = {4: 0.85, 8: 0.75}
"""Cards -> share of perfect weak scaling that the whole step is to reach."""
SYNC_GOAL = 0.05
MFU_GOAL = ("qwen2-7b", 0.45)
_HEAD = (
    *("", "cards", "prompts", "step, s", "tokens/s", "generate", "reward", "sync", "update", "idle"),
    *("sync share", "learner GiB", "card GiB", "TFLOP/s a card", "MFU", "efficiency"),
)
Planned = Sequence[tuple[str, Point]]


def page(results: Results, planned: Planned) -> str:
    """Return all tables, and what is aimed at, in Markdown."""
    machine = results.machine
    counted = "" if machine["on_cards"] else "ranks on one "
    code = f", lit-grpo of commit {machine['code']}" if machine.get("code") else ""
    peak = f", of {machine['peak_tflops']:g} TFLOP/s a card" if machine.get("peak_tflops") else ""
    parts = [
        f"# {machine['cards']} {counted or 'x '}{machine['card']}",
        f"{machine['software']}{code}; engine: {machine['engine']}. Seconds are medians of rank 0; tokens/s and step "
        f"go by the clock from one rollout to the next; MFU is that of the whole training step{peak}. Efficiency: "
        "tokens a second and card over those of the fewest cards.",
    ]
    for series in SERIES:
        points = [point for name, point in planned if name == series]
        if points:
            parts += [f"## {TITLES[series]}", table(results, series, points)]
    # They are those of cards: CPU ranks share cores.
    if machine["on_cards"] and (aims := goals(results, planned)):
        parts += ["## Aims", "\n".join(f"- {line}" for line in aims)]
    return "\n\n".join(parts) + "\n"


def table(results: Results, series: str, points: Sequence[Point]) -> str:
    """Return one series as a table; points that could not be run stand below it with the reason."""
    extra = ("reward, first", "last", "after equal time") if series == "layouts" else ()
    head = (*_HEAD, *extra)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    notes = []
    ordered = sorted(points, key=lambda p: (p.shape, p.cards, p.layout, p.staleness, p.processes))
    for point in ordered:
        record = results.good(point)
        if record is None:
            failure = results.records.get(point.name, {}).get("failure")
            notes.append(f"- {point.name}: {failure or 'not run yet'}")
            continue
        base = base_of(results, point, points)
        cells = [row_title(point, series), *_cells(record), "–" if base is None else f"{efficiency(record, base):.0%}"]
        if extra:
            shortest = min(r["elapsed"][-1] for r in map(results.good, points) if r and r["shape"] == point.shape)
            after = reward_after(record, shortest)
            cells += [f"{record['rewards'][0]:.3f}", f"{record['rewards'][-1]:.3f}"]
            cells.append("–" if after is None else f"{after:.3f} ({shortest:.0f} s)")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + ("\n\n" + "\n".join(notes) if notes else "")


def row_title(point: Point, series: str) -> str:
    """Return what tells a row from the others of its series."""
    if series == "layouts":
        halves = f"{point.ranks} learn, {point.cards - point.ranks} sample"
        return f"{point.shape}, {halves if point.layout == 'split' else 'all do both'}, staleness {point.staleness}"
    return f"{point.shape}, {point.processes} processes" if series == "processes" else point.shape


def base_of(results: Results, point: Point, points: Sequence[Point]) -> Record | None:
    """Return what a point is compared with: of its shape the first row, which has the fewest cards."""
    same = [p for p in points if p.shape == point.shape and results.good(p) is not None]
    first = min(same, key=lambda p: (p.cards, p.layout, p.staleness, p.processes), default=None)
    return None if first is None else results.good(first)


def _cells(record: Record) -> list[str]:
    def number(key: str, form: str) -> str:
        return format(record[key], form) if record.get(key) is not None else "–"

    return [
        str(record["cards"]),
        str(record["prompts"]),
        number("step", ".2f"),
        number("tokens_per_second", ",.0f"),
        *(number(phase, ".2f") for phase in ("generate", "reward", "sync", "update", "learner_idle")),
        number("sync_share", ".1%"),
        number("peak_gib", ".1f"),
        number("card_gib", ".1f"),
        number("tflops", ".3g"),
        number("mfu", ".1%"),
    ]


def goals(results: Results, planned: Planned) -> list[str]:
    """Say of everything that was aimed at whether it was reached; what was not measured is left out."""
    lines = []
    weak = [point for name, point in planned if name == "weak"]
    for point in weak:
        record, base = results.good(point), base_of(results, point, weak)
        if record is None or base is None:
            continue
        if point.cards in WEAK_GOALS and base["cards"] < point.cards:
            aim, found = WEAK_GOALS[point.cards], efficiency(record, base)
            words = f"weak scaling of {point.shape} from {base['cards']} to {point.cards} cards"
            lines.append(f"{words} {found:.0%}, at least {aim:.0%}: {_verdict(found >= aim)}")
        share = record["sync_share"]
        words = f"sync of {point.shape} on {point.cards} cards {share:.1%} of the step"
        lines.append(f"{words}, at most {SYNC_GOAL:.0%}: {_verdict(share <= SYNC_GOAL)}")
        if point.shape == MFU_GOAL[0] and "mfu" in record:
            words = f"MFU of {point.shape} on {point.cards} cards {record['mfu']:.1%}"
            lines.append(f"{words}, at least {MFU_GOAL[1]:.0%}: {_verdict(record['mfu'] >= MFU_GOAL[1])}")
    return list(dict.fromkeys(lines))


def _verdict(reached: bool) -> str:
    return "reached" if reached else "not reached"


def plot(results: Results, planned: Planned, path: Path) -> bool:
    """Draw efficiency and the phases of a step against cards; return whether there was anything to draw."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = {
        (series, shape): found
        for series in ("weak", "strong")
        for shape in dict.fromkeys(point.shape for _, point in planned)
        if (found := _line(results, planned, series, shape))
    }
    if not lines:
        return False
    figure, panels = plt.subplots(1, 1 + len(lines), figsize=(3.6 * (1 + len(lines)), 3.2), squeeze=False)
    first, *rest = panels[0]
    for (series, shape), records in lines.items():
        cards = [record["cards"] for record in records]
        shares = [100 * efficiency(record, records[0]) for record in records]
        first.plot(cards, shares, "o-" if series == "weak" else "s--", label=f"{shape}, {series}")
    first.set(xlabel="cards", ylabel="efficiency, %", ylim=(0, 110), xscale="log", title="of perfect scaling")
    counts = sorted({record["cards"] for records in lines.values() for record in records})
    first.set_xticks(counts, [str(count) for count in counts])
    first.minorticks_off()
    first.grid(alpha=0.3)
    first.legend(fontsize=7)
    for panel, ((series, shape), records) in zip(rest, lines.items(), strict=True):
        _phases(panel, records)
        panel.set_title(f"{shape}, {series}")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return True


def _line(results: Results, planned: Planned, series: str, shape: str) -> list[Record]:
    points = sorted({p for name, p in planned if name == series and p.shape == shape}, key=lambda p: p.cards)
    return [record for record in map(results.good, points) if record is not None]


def _phases(panel: Any, records: Sequence[Record]) -> None:
    names = ("generate", "reward", "sync", "update")
    below = [0.0] * len(records)
    places = range(len(records))
    for name in names:
        heights = [record.get(name, 0.0) for record in records]
        panel.bar(places, heights, bottom=below, label=name)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    rest = [max(0.0, record["step"] - sum_) for record, sum_ in zip(records, below, strict=True)]
    panel.bar(places, rest, bottom=below, label="rest", color="lightgrey")
    panel.set_xticks(list(places), [str(record["cards"]) for record in records])
    panel.set(xlabel="cards", ylabel="seconds a step")
    panel.legend(fontsize=7)
