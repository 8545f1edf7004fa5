#!/usr/bin/env python3
"""Measure how the learner's step time grows with group size, lengths, vocabulary and ranks.

    python scripts/scaling.py                     # some minutes; writes docs/scaling.png and prints the tables
    python scripts/scaling.py --quick --out /tmp/scaling.png

Prompts are shared or not. One optimizer step of LitGRPO on ready rollouts of random ids, nothing is sampled: a small
Qwen2-shaped model with random weights, float32, one thread. CPU seconds of a step, median; of the slowest rank where
there are several. Exponents are the slope of a straight line through the logarithms of all points.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RESULT = "@seconds "


@dataclass(frozen=True)
class Point:
    """The size of the step that is measured."""

    group_size: int = 8
    prompt: int = 128
    completion: int = 64
    vocabulary: int = 8192
    ranks: int = 1
    share: bool = True
    prompts: int = 2
    """Prompts of a step, over all ranks."""
    width: int = 192
    layers: int = 3
    steps: int = 3


AXES: dict[str, tuple[str, list[int]]] = {
    "group_size": ("completions of a prompt", [2, 4, 8, 16, 32]),
    "prompt": ("tokens of a prompt", [32, 128, 512, 1024]),
    "completion": ("tokens of a completion", [16, 64, 256, 512]),
    "vocabulary": ("vocabulary", [1024, 8192, 32768, 131072]),
    "ranks": ("ranks (DDP), same work", [1, 2]),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "scaling.png")
    parser.add_argument("--axes", nargs="*", choices=AXES, default=list(AXES))
    parser.add_argument("--steps", type=int, default=3, help="measured ones; one more warms up")
    parser.add_argument("--quick", action="store_true", help="two small points an axis, to see whether it works")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(RESULT + json.dumps(measure(Point(**json.loads(args.point)))), flush=True)
        return 0
    base = Point(steps=args.steps)
    if args.quick:
        base = replace(base, group_size=2, prompt=8, completion=4, vocabulary=64, width=32, layers=1, steps=1)
    found: dict[str, dict[bool, list[tuple[int, float]]]] = {}
    for axis in args.axes:
        values = [getattr(base, axis), 2 * getattr(base, axis)] if args.quick else AXES[axis][1]
        found[axis] = {True: [], False: []}
        for value in values:
            for share in (True, False):
                changes: dict[str, Any] = {axis: value, "share": share}
                seconds = run(replace(base, **changes))
                found[axis][share].append((value, seconds))
        print(table(axis, found[axis]), flush=True)
    plot(found, args.out)
    print(f"{args.out} written")
    return 0


def run(point: Point) -> float:
    """Measure the CPU seconds of a step; several ranks are processes of their own."""
    if point.ranks == 1:
        return statistics.median(measure(point))
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={point.ranks}", "--standalone"]
    done = subprocess.run(
        [*launcher, str(Path(__file__).resolve()), "--point", json.dumps(asdict(point))],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{point.ranks} ranks failed:\n{done.stderr[-3000:]}")
    # Ranks share one output, where two of them can meet on a line.
    of_ranks = [json.loads(found) for found in re.findall(re.escape(RESULT) + r"(\[[^\]]*\])", done.stdout)]
    if len(of_ranks) != point.ranks:
        raise RuntimeError(f"{len(of_ranks)} of {point.ranks} ranks answered:\n{done.stdout[-3000:]}")
    return max(map(statistics.median, of_ranks))


def measure(point: Point) -> list[float]:
    """Measure the CPU seconds of each step of this process."""
    import lightning.pytorch as pl
    import torch

    from lit_grpo import LitGRPO
    from lit_grpo.policy import OptimizerConfig, PolicyConfig

    class Steps(pl.Callback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.started = time.process_time()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seconds.append(time.process_time() - self.started)

    quiet()
    torch.set_num_threads(1)
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        write_model(point, Path(folder))
        module = LitGRPO(
            policy=PolicyConfig(path=folder, share_prompts=point.share), optimizer=OptimizerConfig(lr=1e-6)
        )
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=point.ranks,
            strategy="ddp" if point.ranks > 1 else "auto",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[steps],
        )
        trainer.fit(module, Rollouts(point, trainer.global_rank))
    return steps.seconds[1:]


class Rollouts:
    """A loader of ready rollouts, each as if sampled with the weights of its turn."""

    def __init__(self, point: Point, rank: int) -> None:
        self.point, self.rank = point, rank

    def __len__(self) -> int:
        return self.point.steps + 1

    def __iter__(self) -> Any:
        import torch

        from lit_grpo.types import Completion, Prompt, Rollout

        p = self.point
        draw = torch.Generator().manual_seed(self.rank)

        def ids(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(0, p.vocabulary, (count,), generator=draw).tolist())

        count = p.prompts // p.ranks
        for k in range(len(self)):
            unknown = (float("nan"),) * p.completion
            reward = torch.tensor([float(i % 2) for _ in range(count) for i in range(p.group_size)])
            yield Rollout(
                index=k,
                prompts=[Prompt(f"{self.rank}-{k}-{g}", "", ids(p.prompt)) for g in range(count)],
                completions=[
                    Completion(g, i, ids(p.completion), unknown, "stop", k)
                    for g in range(count)
                    for i in range(p.group_size)
                ],
                texts=[""] * len(reward),
                rewards={"alternating": reward},
                reward=reward,
                correct=reward > 0,
                group_size=p.group_size,
            )


def write_model(point: Point, folder: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=point.vocabulary,
            hidden_size=point.width,
            intermediate_size=4 * point.width,
            num_hidden_layers=point.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)


def quiet() -> None:
    import transformers

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def exponent(points: list[tuple[int, float]]) -> float:
    """Fit the slope of the least-squares line through the logarithms."""
    x = [math.log(value) for value, _ in points]
    y = [math.log(seconds) for _, seconds in points]
    return statistics.linear_regression(x, y).slope


def table(axis: str, both: dict[bool, list[tuple[int, float]]]) -> str:
    shared, plain = both[True], both[False]
    lines = [f"\n| {AXES[axis][0]} | shared prompts, CPU s | each by itself, CPU s | ratio |", "|---|---|---|---|"]
    for (value, a), (_, b) in zip(shared, plain, strict=True):
        lines.append(f"| {value} | {a:.3f} | {b:.3f} | {b / a:.2f} |")
    lines.append(f"| exponent | {exponent(shared):.2f} | {exponent(plain):.2f} | |")
    return "\n".join(lines)


def plot(found: dict[str, dict[bool, list[tuple[int, float]]]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(found), figsize=(2.6 * len(found), 2.9), sharey=True, squeeze=False)
    for panel, (axis, both) in zip(axes[0], found.items(), strict=True):
        for share, colour, name in ((True, "tab:blue", "shared"), (False, "tab:orange", "each by itself")):
            x, y = zip(*both[share], strict=True)
            panel.plot(x, y, "o-", color=colour, markersize=4, label=f"{name}: {exponent(both[share]):.2f}")
        panel.set(xscale="log", yscale="log", xlabel=AXES[axis][0])
        panel.set_xticks(x, [f"{v:,}" for v in x], fontsize=7)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(title="prompts: exponent", fontsize=7, title_fontsize=7)
    axes[0][0].set_ylabel("CPU seconds a step")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    sys.exit(main())
