"""The panels at the start and the end of a run: boxes on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lit_grpo.terminal.console import make_console
from lit_grpo.utils.text import shorten

_NARROW = 60
"""Columns below which a table of three columns would hold a word or two in each."""

Fact = tuple[str, str]
"""A name and what there is to say under it."""


@dataclass(frozen=True)
class SampleRow:
    """One completion of the last rollout."""

    prompt: str
    completion: str
    reward: float


def show(title: str, facts: Sequence[Fact], samples: Sequence[SampleRow] = (), console: Console | None = None) -> None:
    """Print a title, facts and completions to standard output: a panel on a terminal, plain lines otherwise.

    Args:
        title: the first line.
        facts: named lines, in order.
        samples: completions of the last rollout.
        console: where it is printed; None: standard output.
    """
    console = console or make_console()
    if not console.is_terminal:
        console.file.write("\n".join(_plain(title, facts, samples)) + "\n")
        console.file.flush()
        return
    narrow = console.width < _NARROW
    parts: list[RenderableType] = [_below_each_other(facts) if narrow else _side_by_side(facts)]
    if samples:
        parts.append(_listed(samples) if narrow else _table(samples))
    # In the upper edge it would be cut.
    long = len(title) > console.width - 8
    head = Text("" if long else title, style="bold")
    if long:
        parts.insert(0, Text(f"{title}\n", style="bold"))
    console.print()
    # No side borders: paths and commands can be copied as they stand.
    console.print(Panel(Group(*parts), title=head, box=_edges(console), padding=(1, 0)))


def _edges(console: Console) -> box.Box:
    return _ASCII_HORIZONTALS if console.options.ascii_only else box.HORIZONTALS


_ASCII_HORIZONTALS = box.Box(" -- \n    \n -- \n    \n -- \n -- \n    \n -- \n", ascii=True)
"""Like rich's ``HORIZONTALS``, which would become a box with sides where there are but ASCII characters."""


def _plain(title: str, facts: Sequence[Fact], samples: Sequence[SampleRow]) -> list[str]:
    lines = ["", title, *(f"  {name + ':':<12} {value}" for name, value in facts)]
    return lines + [
        f"  reward {sample.reward:.3g}: {one_line(sample.prompt, 200)} -> {one_line(sample.completion, 300)}"
        for sample in samples
    ]


def _side_by_side(facts: Sequence[Fact]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(name, Text(value))
    return grid


def _below_each_other(facts: Sequence[Fact]) -> Group:
    lines: list[RenderableType] = []
    for name, value in facts:
        lines += [Text(name, style="bold"), Padding(Text(value, overflow="fold"), (0, 0, 0, 2))]
    return Group(*lines)


def _table(samples: Sequence[SampleRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="from the last rollout", title_justify="left")
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("prompt", overflow="fold", ratio=2)
    table.add_column("completion", overflow="fold", ratio=3)
    for sample in samples:
        prompt, completion = one_line(sample.prompt, 200), one_line(sample.completion, 300)
        table.add_row(f"{sample.reward:.3g}", Text(prompt), Text(completion))
    return table


def _listed(samples: Sequence[SampleRow]) -> Group:
    lines: list[RenderableType] = [Text("\nfrom the last rollout", style="italic")]
    for sample in samples:
        lines.append(Text(f"reward {sample.reward:.3g}", style="bold"))
        text = f"{one_line(sample.prompt, 200)}\n-> {one_line(sample.completion, 300)}"
        lines.append(Padding(Text(text, overflow="fold"), (0, 0, 0, 2)))
    return Group(*lines)


def one_line(text: str, limit: int) -> str:
    """Return the text with line breaks and control characters visible, cut in the middle if it is long."""
    flat = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return shorten(flat, limit, " [...] ", keep_end=True) or "(empty)"
