#!/usr/bin/env python
"""Record the unusual runs and read what the monitors say of them.

    python scripts/unusual_runs.py --record runs/unusual --only kl sgd
    python scripts/unusual_runs.py --replay runs/unusual            # one line a run
    python scripts/unusual_runs.py --replay runs/unusual --words    # and every word that is said

A trace has the form of the second benchmark's (``recording.py``). No monitor takes part in a run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.diagnosis.recording import LEFT_OUT, columns_of, facts_of, read_trace  # noqa: E402
from scripts.diagnosis.unusual_cases import CASES, COUNTS, Unusual  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, metavar="DIR", help="train, and write traces here")
    parser.add_argument("--replay", type=Path, metavar="DIR", help="train nothing: read what is said of recorded runs")
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), metavar="CASE")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=Path, default=ROOT / "models")
    parser.add_argument("--words", action="store_true", help="write the words of every diagnosis")
    args = parser.parse_args(argv)
    names = args.only or list(CASES)
    if args.replay:
        for path in sorted(args.replay.glob("*.json.gz")):
            trace = read_trace(path)
            if trace["name"] in names:
                print(line(trace, said(trace), words=args.words))
        return 0
    if args.record is None:
        raise SystemExit("give --record DIR to record runs, or --replay DIR to read of recorded ones")
    failed = 0
    for name in names:
        path = args.record / f"{name}_seed{args.seed}.json.gz"
        if not path.exists():
            started = time.monotonic()
            status = record(CASES[name], args.models, path, args.seed)
            print(f"{time.monotonic() - started:6.0f} s {name}: {status}", file=sys.stderr, flush=True)
            failed += status == "error"
    return 1 if failed else 0


def said(trace: Mapping[str, Any]) -> list[Any]:
    """Return the diagnoses that all monitors, as they are now, make of a recorded run."""
    from scripts.diagnosis.second_scoring import said_of

    return said_of(trace["facts"]["objective"], trace["metrics"])


def line(trace: Mapping[str, Any], diagnoses: list[Any], *, words: bool) -> str:
    """Write what is said of a run in a line, and in words."""
    case = CASES[trace["name"]]
    marks = {"critical": "!", "warning": "", "info": "i"}
    known = case.true | COUNTS
    told = [
        f"{d.name}{marks[d.severity]}@{d.step}{'' if d.name in known or d.severity == 'info' else '?'}"
        for d in diagnoses
    ]
    right = trace["correct"]
    ends = f"right {sum(right[:5]) / 5:.2f} -> {sum(right[-5:]) / 5:.2f}"
    out = f"{'SICK' if case.sick else 'well'} {case.name} ({case.what}; {ends}): {', '.join(told) or '-'}"
    if words:
        for d in diagnoses:
            kinds = ", ".join(f"{f.kind}({f.severity[0]})" for f in d.findings)
            out += f"\n    {d.step} [{kinds}] {d.explanation}\n        -> {'; '.join(d.remedies[:3])}"
    return out


def build(case: Unusual, models: Path, seed: int) -> tuple[Any, Any, Any, Any]:
    """Make sabotage, module, data, and the function that says what share of a rollout is right."""
    from dataclasses import replace

    from lit_grpo import LitGRPO
    from lit_grpo.data import AdditionPrompts, TwoFormAddition
    from lit_grpo.data.sources.two_form_addition import ANSWER, MAX_NEW_TOKENS
    from lit_grpo.engines import EngineConfig
    from lit_grpo.evaluation.sets import EvaluationSet
    from lit_grpo.objectives import ObjectiveConfig
    from lit_grpo.policy import LoraConfig, OptimizerConfig, PolicyConfig, TinyModel
    from lit_grpo.rewards import ExactMatch
    from lit_grpo.types import Sampling
    from scripts.diagnosis.settings import SETTINGS
    from scripts.diagnosis.settings.char_tags import RunningSums
    from scripts.diagnosis.training import NO_GUARDS, SabotagedData, correct_share
    from scripts.diagnosis.unusual_sabotage import WrongAnswers

    sabotage, data = case.make(), case.data()
    held_out = None
    if case.task in ("tags", "countdown"):
        setting = SETTINGS[f"char_{case.task}"]
        setting.prepare(models)
        policy, prompts, rewards = setting.policy(models), setting.source(), setting.rewards()
        limit, held_out, correct, lr = (
            setting.max_new_tokens,
            setting.source(held_out=True),
            setting.correct_share,
            3e-4,
        )
    elif case.task == "sums":
        policy = PolicyConfig(path=str(models / "two_form_addition"), share_prompts=False)
        prompts, rewards = TwoFormAddition(), [ExactMatch(pattern=ANSWER)]
        limit, correct, lr = MAX_NEW_TOKENS, correct_share, 3e-4
    else:
        policy = PolicyConfig(tiny=TinyModel(alphabet="0123456789+=", layers=2, width=128, heads=4))
        prompts, rewards, limit, lr = AdditionPrompts(digits=1), [ExactMatch()], 3, 7e-4

        def correct(batch: Any) -> float:
            return float(batch.correct.float().mean())

    prompts = data.pop("prompts", prompts)
    if data.pop("wrong_answers", False):
        prompts = WrongAnswers(prompts)
    if questions := data.pop("held_out", 0):
        held_out = RunningSums(questions)
    rewards = [*rewards, *data.pop("more_rewards", [])]
    limit = data.pop("max_new_tokens", limit)
    if case.lora:
        policy = replace(policy, lora=LoraConfig(rank=case.lora, alpha=2.0 * case.lora))
    module = LitGRPO(
        policy=policy,
        objective=ObjectiveConfig(**({"recipe": "grpo"} | case.objective)),
        optimizer=OptimizerConfig(**({"lr": lr, "warmup_steps": 10} | case.optimizer)),
        guards=NO_GUARDS,
        max_skipped_steps=10_000,
        micro_batch_tokens=16384,
        **case.module,
    )
    val = {"held_out": EvaluationSet(prompts=held_out, samples=1, sampling=Sampling(max_new_tokens=limit))}
    made = SabotagedData(
        sabotage,
        prompts=prompts,
        rewards=sabotage.rewards(rewards, seed),
        rollouts=case.rollouts,
        sampling=Sampling(max_new_tokens=limit, temperature=data.pop("temperature", 1.0)),
        engine=EngineConfig(name="transformers", batch_size=512),
        val={} if held_out is None else val,
        **({"group_size": 8, "prompts_per_rollout": 16} | data),
    )
    return sabotage, module, made, correct


def record(case: Unusual, models: Path, path: Path, seed: int) -> str:
    """Train one run, write its trace, and return how it ended: ``done``, ``stopped`` or ``error``."""
    import lightning.pytorch as pl
    import torch

    from lit_grpo.errors import StopRun
    from lit_grpo.tracking import RunLogger

    torch.set_num_threads(1)
    steps: list[dict[str, float]] = []
    right: list[float] = []

    class Columns(pl.Callback):
        """Callback that keeps what a monitor could see, and the true share of right answers."""

        fresh = False

        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.fresh = True

        def on_train_batch_end(
            self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            seen = dict(pl_module.step_metrics)
            if self.fresh:
                seen |= {key: value for key, value in trainer.callback_metrics.items() if key.startswith("val/")}
                self.fresh = False
            steps.append({key: float(value) for key, value in seen.items() if not key.startswith(LEFT_OUT)})
            right.append(correct(batch))

    written: dict[str, Any] = {"status": "done", "reason": ""}
    try:
        pl.seed_everything(seed, verbose=False)
        sabotage, module, data, correct = build(case, models, seed)
        written["facts"] = facts_of(module, data, case.rollouts)
        evaluation: dict[str, Any] = {"limit_val_batches": 0}
        if data.val:
            evaluation = {"val_check_interval": 10, "check_val_every_n_epoch": None}
        with tempfile.TemporaryDirectory() as root:
            trainer = pl.Trainer(
                max_epochs=1,
                accelerator="cpu",
                callbacks=[*sabotage.callbacks(seed), Columns()],
                default_root_dir=root,
                logger=RunLogger(run_dir=root, tracking_uri="none"),
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                **evaluation,
            )
            with sabotage.around_fit():
                trainer.fit(module, datamodule=data)
    except StopRun as stop:
        written |= {"status": "stopped", "reason": str(stop)}
    # A run that fails must not end the others.
    except Exception as error:
        written |= {"status": "error", "reason": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    if steps and "facts" in written:
        trace = {"name": case.name, "seed": seed, "sick": case.sick, **written, "steps": len(steps)}
        trace |= {"correct": [round(value, 4) for value in right], "metrics": columns_of(steps)}
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a time, so that equal traces are equal files.
        path.write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0))
    return str(written["status"])


if __name__ == "__main__":
    raise SystemExit(main())
