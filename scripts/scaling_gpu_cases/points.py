"""What is measured: shapes of models, points (one run of `lit-grpo fit` each), and the series that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Layout = Literal["colocated", "split"]
SERIES = ("weak", "layouts", "strong", "processes")
"""All series, in the order of their worth where the time is short."""


@dataclass(frozen=True)
class Shape:
    """A Qwen2-shaped model, and the work of a step on one card."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    """Whether the head is the embedding."""
    prompts: int
    """Prompts of a card."""
    group_size: int
    completion: int
    """Tokens of a completion, at most; weights are random, so hardly any ends before."""
    prompt: int
    """Tokens of a prompt, of each the same."""
    micro_batch_tokens: int
    strong: bool = True
    """Whether the work of one card is also spread over all."""

    @property
    def parameters(self) -> int:
        """Number of weights, biases and norms left out."""
        size = self.hidden // self.heads
        attention = 2 * self.hidden * size * (self.heads + self.kv_heads)
        body = self.layers * (attention + 3 * self.hidden * self.intermediate)
        return body + (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def block_parameters(self) -> int:
        """Number of weights in the blocks, which a learner gathers one after another."""
        return self.parameters - (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values of one token, in bfloat16."""
        return self.layers * 2 * self.kv_heads * (self.hidden // self.heads) * 2


SHAPES = {
    "qwen2-1.5b": Shape(28, 1536, 8960, 12, 2, 151936, True, 64, 8, 256, 111, 16384),
    "qwen2-7b": Shape(28, 3584, 18944, 28, 4, 152064, False, 16, 8, 256, 111, 16384, strong=False),
    # vLLM on a CPU knows heads from 32 on.
    "tiny": Shape(2, 64, 128, 2, 1, 512, True, 4, 4, 8, 6, 4096),
}
GIB = 2**30
_LEARNER_BYTES = 16
"""Of a parameter in float32 with its gradient and Adam's moments."""
_SPARE_GIB = 12
"""Assumed for activations, gathered blocks, logits and what CUDA itself takes of each process."""


@dataclass(frozen=True)
class Point:
    """One run: so many cards, so much work, engines so laid out."""

    shape: str
    cards: int
    prompts: int
    """Of a step, over all cards."""
    layout: Layout = "colocated"
    """``colocated``: each card learns and samples; ``split``: one half of them learns, the other samples."""
    staleness: int = 0
    processes: int = 1
    """Engine processes of a rank."""
    steps: int = 5
    """Steps that are measured."""
    warmup: int = 2
    """Steps before them: the first compiles."""

    @property
    def name(self) -> str:
        """Return the key of the point among the results."""
        engines = f"{self.layout}, {self.processes} engines a rank, staleness {self.staleness}"
        return f"{self.shape}, {self.cards} cards, {self.prompts} prompts, {engines}, {self.steps} steps"

    @property
    def ranks(self) -> int:
        """Number of processes that learn."""
        return self.cards // 2 if self.layout == "split" else self.cards

    def need_gib(self) -> float:
        """Estimate what the fullest card must hold, in GiB."""
        shape = SHAPES[self.shape]
        learner = _LEARNER_BYTES * shape.parameters / self.ranks
        engine = engine_bytes(shape, self)
        held = max(learner, engine) if self.layout == "split" else learner + engine
        return held / GIB + _SPARE_GIB


def cache_bytes(shape: Shape, point: Point) -> int:
    """Return the bytes of keys and values that all engines of a rank have: every sample at once, and a quarter more."""
    tokens = point.prompts // point.ranks * (shape.prompt + shape.group_size * shape.completion)
    return max(GIB, int(1.25 * tokens * shape.cache_bytes))


def engine_bytes(shape: Shape, point: Point) -> int:
    """Return what the engines of a rank hold: weights in bfloat16 each, and all keys and values."""
    return 2 * shape.parameters * point.processes + cache_bytes(shape, point)


def plan(
    shapes: Sequence[str], cards: Sequence[int], series: Sequence[str], processes: int, steps: int, on_cards: bool
) -> list[tuple[str, Point]]:
    """Return (series, point) of all that is to be measured, the most telling first; a point may be in several series.

    Args:
        shapes: names of shapes; `layouts` and `processes` take the first of them alone.
        cards: numbers of cards.
        series: of :data:`SERIES`.
        processes: engine processes of a rank, where nothing else is asked.
        steps: measured steps of a point; where rewards are compared, four times as many.
        on_cards: False on a CPU, where ranks stand for cards, engines are in the ranks' own processes, and no rank can
            do without one.
    """
    counts, found = sorted(set(cards)), list[tuple[str, Point]]()
    # The ends say most, and the fewest cards are what all others are compared with.
    order = list(dict.fromkeys([counts[0], counts[-1], *counts]))
    most = counts[-1]

    def point(shape: str, count: int, prompts: int, **changes: Any) -> Point:
        settings: dict[str, Any] = {"processes": processes if on_cards else 1, "steps": steps}
        return Point(shape, count, prompts, **(settings | changes))

    for name in (one for one in SERIES if one in series):
        for shape in shapes if name in ("weak", "strong") else shapes[:1]:
            work = SHAPES[shape].prompts
            if name == "weak":
                found += [(name, point(shape, count, work * count)) for count in order]
            elif name == "strong" and SHAPES[shape].strong:
                found += [(name, point(shape, count, work)) for count in order if work % count == 0]
            elif name == "layouts":
                long = {"steps": 4 * steps}
                found += [(name, point(shape, most, work * most, staleness=old, **long)) for old in (0, 1)]
                if on_cards and most % 2 == 0:
                    found.append((name, point(shape, most, work * most, layout="split", staleness=1, **long)))
            elif name == "processes" and on_cards:
                found += [(name, point(shape, most, work * most, processes=number)) for number in (1, 2, 3)]
    return found
