"""From the metrics of a run to its figures: step, phases, tokens a second, MFU, and shares and efficiencies."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.benchmark_step import learner_flops
from scripts.scaling_gpu_cases.points import SHAPES, Point

PHASES = ("generate", "reward", "sync", "update", "learner_idle")
"""Phases of a step that a run records as ``time/...``; with staleness the first two lie beside the third to fifth."""

Record = dict[str, Any]
"""A point with its figures, as the file of results has it."""


def figures(point: Point, rows: Sequence[Mapping[str, Any]], model: Path, peak_tflops: float | None) -> Record:
    """Return the figures of a point: medians over its measured steps.

    A step is the time from one recorded rollout to the next, all that is done between them included. MFU is that of
    the whole training step: forward, backward, the exchange of gradients, the optimizer and the pass that measures the
    step; recomputed passes do not count.

    Args:
        point: what was run.
        rows: metrics of all rollouts, those of the warm-up too.
        model: folder of the model.
        peak_tflops: of one card; None: not known.
    """
    shape = SHAPES[point.shape]
    measured = rows[point.warmup :]
    times = [float(row["wall_time"]) for row in rows[point.warmup - 1 :]]
    steps = [after - before for before, after in itertools.pairwise(times)]
    step, tokens = statistics.median(steps), statistics.median(float(row["completions/tokens"]) for row in measured)
    found: Record = {
        "step": step,
        "tokens": tokens,
        "tokens_per_second": statistics.median(
            float(row["completions/tokens"]) / spent for row, spent in zip(measured, steps, strict=True)
        ),
        "peak_gib": float(rows[-1]["memory/peak_gib"]),
        "rewards": [float(row["reward"]) for row in rows],
        "elapsed": [float(row["wall_time"]) - float(rows[0]["wall_time"]) for row in rows],
        "loss": float(rows[0]["loss"]),
        "grad_norm": float(rows[0]["optim/grad_norm"]),
    }
    for phase in PHASES:
        spent = [float(row[f"time/{phase}"]) for row in measured if f"time/{phase}" in row]
        if spent:
            found[phase] = statistics.median(spent)
    found["sync_share"] = found["sync"] / step
    work: Any = SimpleNamespace(model=str(model), group_size=shape.group_size)
    flops = learner_flops(work, {"tokens": tokens, "prompt_tokens": point.prompts * shape.prompt}, shared=True)
    found["tflops"] = flops / found["update"] / 1e12 / point.ranks
    if peak_tflops:
        found["mfu"] = found["tflops"] / peak_tflops
    return found


def efficiency(record: Record, base: Record) -> float:
    """Return the share of perfect scaling: tokens a second and card over those of the base.

    For the same work a card (weak scaling) and for the same work in all (strong scaling) it is the same quotient.
    """
    rate, of_base = (one["tokens_per_second"] / one["cards"] for one in (record, base))
    return float(rate / of_base)


def reward_after(record: Record, seconds: float) -> float | None:
    """Return the reward that a run had so many seconds after its first rollout; None before it had any."""
    had = [reward for reward, passed in zip(record["rewards"], record["elapsed"], strict=True) if passed <= seconds]
    return had[-1] if had else None


def recorded(point: Point, **found: Any) -> Record:
    """Return what the file of results holds of a point."""
    return {**asdict(point), "ranks": point.ranks, **found}
