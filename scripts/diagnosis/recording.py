"""Record the second benchmark: each run in a process of its own, its metrics written while it goes on.

A trace is a gzipped JSON file. ``metrics`` has a column by key: a list with a number or null for each rollout, or one
number where all are equal. Keys under ``val/`` stand at the rollout after the evaluation, where monitors first see
them. No monitor takes part in a run, so none can leave out a step of it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.diagnosis.second_cases import CASES, HALF_NAMES, HALVES, SecondJob, second_plan
from scripts.diagnosis.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("time/", "memory/")
"""Beginnings of keys that say nothing of the run itself."""
WRITE_EVERY = 10
USABLE = 40
"""Rollouts from which on a trace that was cut is kept as it is."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.replay:
        from scripts.diagnosis.second_scoring import replay, report, summary

        runs = [replay(path) for path in sorted(args.replay.glob("*.json.gz"))]
        for half in dict.fromkeys(run["half"] for run in runs):
            of_half = [run for run in runs if run["half"] == half]
            print(f"\n## {half}\n\n{report(of_half)}\n\n{json.dumps(summary(of_half))}")
        return 0
    if args.record is None:
        raise SystemExit("give --record DIR to record runs, or --replay DIR to judge recorded ones")
    if args.job:
        name, seed = args.job
        job = SecondJob(name, int(seed), HALVES[CASES[name].setting][int(seed)])
        return 0 if record(job, args.models, args.record, args.rollouts, rollback=args.rollback) != "error" else 1
    jobs = second_plan(args.setting, args.seeds, args.only)
    if args.rollback:
        todo = [job for job in jobs if not rollback_path(args.record, job).exists()]
    else:
        todo = [job for job in jobs if not is_recorded(trace_path(args.record, job))]
    print(f"{len(todo)} of {len(jobs)} runs to do", file=sys.stderr, flush=True)
    for name in dict.fromkeys(CASES[job.name].setting for job in todo):
        SETTINGS[name].prepare(args.models)
    return side_by_side(todo, args)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", nargs="+", default=list(SETTINGS), choices=tuple(SETTINGS))
    parser.add_argument("--seeds", nargs="+", default=["tuning", "heldout"], choices=HALF_NAMES)
    parser.add_argument("--only", nargs="+", metavar="KIND")
    parser.add_argument("--jobs", type=int, help="runs side by side; left out: as many as the setting allows")
    parser.add_argument("--record", type=Path, metavar="DIR", help="where traces are put")
    parser.add_argument("--replay", type=Path, metavar="DIR", help="train nothing: run the monitors over recorded runs")
    parser.add_argument(
        "--models", type=Path, default=ROOT / "models", help="folder of the models that runs begin from"
    )
    parser.add_argument("--rollouts", type=int, help="in place of each setting's own length")
    parser.add_argument("--rollback", action="store_true", help="let a HealthMonitor return to checkpoints")
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds from the start of one run to the next")
    parser.add_argument("--job", nargs=2, metavar=("CASE", "SEED"), help="record this one run in this process")
    return parser.parse_args(argv)


def side_by_side(todo: Sequence[SecondJob], args: argparse.Namespace) -> int:
    """Run jobs as processes, at most ``--jobs`` at once; 1 if any of them failed, else 0."""
    jobs = args.jobs or min((SETTINGS[CASES[job.name].setting].jobs for job in todo), default=1)
    waiting, failed = list(todo), 0
    running: dict[subprocess.Popen[bytes], SecondJob] = {}
    began = time.monotonic()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    args.record.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                job = waiting.pop(0)
                command = [sys.executable, str(ROOT / "scripts/diagnosis_benchmark.py"), "--bench", "2"]
                command += ["--job", job.name, str(job.seed), "--record", str(args.record)]
                command += ["--models", str(args.models)]
                command += ["--rollouts", str(args.rollouts)] if args.rollouts else []
                command += ["--rollback"] if args.rollback else []
                kind = "rollback.log" if args.rollback else "log"
                with (args.record / f"{job.name}_seed{job.seed}.{kind}").open("w") as log:
                    running[subprocess.Popen(command, env=environment, stdout=log, stderr=log)] = job
                time.sleep(args.stagger)
            time.sleep(0.2)
            for process in [process for process in running if process.poll() is not None]:
                job = running.pop(process)
                failed += process.returncode != 0
                said = "done" if process.returncode == 0 else f"failed ({process.returncode})"
                print(f"{time.monotonic() - began:6.0f} s {job.name} {job.seed}: {said}", file=sys.stderr, flush=True)
    finally:
        for process in running:
            process.kill()
    return 1 if failed else 0


# ------------------------------------------------------------------------------------------------------- one run


def record(job: SecondJob, models: Path, folder: Path, rollouts: int | None = None, *, rollback: bool = False) -> str:
    """Train one run, write its trace, and return how it ended: ``done``, ``stopped`` or ``error``.

    With ``rollback`` a HealthMonitor takes part and may return to checkpoints. In the place of a trace the true share
    of right answers of every rollout in the order of training is written, with the monitor's journal and its judgement.
    """
    import lightning.pytorch as pl
    import torch

    from lit_grpo.callbacks import HealthMonitor
    from lit_grpo.callbacks.diagnosis.actions import FINDINGS_FILE, read_journal
    from lit_grpo.errors import StopRun
    from lit_grpo.tracking import RunLogger

    case, setting = CASES[job.name], SETTINGS[CASES[job.name].setting]
    setting.prepare(models)
    torch.set_num_threads(1)
    sabotage = case.make()
    length = rollouts or setting.rollouts
    written: dict[str, Any] = {"status": "running", "reason": "", "facts": {}}
    path = trace_path(folder, job)

    class Columns(pl.Callback):
        """Callback that keeps what a monitor could see of each rollout, and the true share of right answers."""

        def __init__(self) -> None:
            self.steps: list[dict[str, float]] = []
            self.correct: list[float] = []
            self.fresh = False

        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.fresh = True

        def on_train_batch_end(
            self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            seen = dict(pl_module.step_metrics)
            if self.fresh:
                seen |= {key: value for key, value in trainer.callback_metrics.items() if key.startswith("val/")}
                self.fresh = False
            self.steps.append({key: float(value) for key, value in seen.items() if not key.startswith(LEFT_OUT)})
            self.correct.append(setting.correct_share(batch))
            if len(self.steps) % WRITE_EVERY == 0:
                if not rollback:
                    write_trace(path, job, sabotage.start, self.steps, self.correct, written)
                print(f"{len(self.steps)} rollouts, right {self.correct[-1]:.2f}", flush=True)

    columns = Columns()
    # One to go back to beside the first: else four runs of Qwen with its optimizer's moments fill a disk of 64 GiB.
    watching = [HealthMonitor(actions={"critical": "rollback"}, checkpoints=1)] if rollback else []
    events: list[dict[str, Any]] = []
    try:
        pl.seed_everything(job.seed, verbose=False)
        module, data = setting.build(case, sabotage, models, job.seed, length)
        written["facts"] = facts_of(module, data, length)
        evaluation: dict[str, Any] = {"limit_val_batches": 0}
        if setting.evaluate_every and length >= setting.evaluate_every:
            evaluation = {"val_check_interval": setting.evaluate_every, "check_val_every_n_epoch": None}
        with tempfile.TemporaryDirectory() as root:
            trainer = pl.Trainer(
                max_epochs=1,
                callbacks=[*sabotage.callbacks(job.seed), *watching, columns],
                default_root_dir=root,
                logger=RunLogger(run_dir=root, tracking_uri="none"),
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                num_sanity_val_steps=0,
                **evaluation,
                **setting.trainer(),
            )
            try:
                with sabotage.around_fit():
                    trainer.fit(module, datamodule=data)
            finally:
                journal = Path(root) / FINDINGS_FILE
                events = read_journal(journal) if journal.exists() else []
        written["status"] = "done"
    except StopRun as stop:
        written |= {"status": "stopped", "reason": str(stop)}
    # A run that fails must leave behind what was seen of it.
    except Exception as error:
        written |= {"status": "error", "reason": f"{type(error).__name__}: {error}"}
        traceback.print_exc()
    if columns.steps and rollback:
        write_rollback(rollback_path(folder, job), job, columns.correct, events, written)
    elif columns.steps:
        write_trace(path, job, sabotage.start, columns.steps, columns.correct, written)
    return str(written["status"])


def facts_of(module: Any, data: Any, rollouts: int) -> dict[str, Any]:
    """Collect what monitors may ask of the module, and the shape of the rollouts."""
    hparams = json.loads(json.dumps(dict(module.hparams), default=str))
    objective = {key: value for key, value in hparams["objective"].items() if value is not None}
    names = ("updates_per_rollout", "minibatch_prompts", "max_staleness", "max_grad_norm", "zero_advantage_samples")
    return {
        "objective": objective,
        "optimizer": {key: hparams["optimizer"][key] for key in ("lr", "warmup_steps", "weight_decay")},
        "critic": hparams["critic"] is not None,
        "lora": hparams["policy"]["lora"] is not None,
        **{name: hparams[name] for name in names},
        "prompts_per_rollout": data.prompts_per_rollout,
        "group_size": data.group_size,
        "max_new_tokens": data.sampling.max_new_tokens,
        "rewards": {reward.name: reward.weight for reward in data.rewards},
        "rollouts": rollouts,
    }


# ------------------------------------------------------------------------------------------------------- traces


def trace_path(folder: Path, job: SecondJob) -> Path:
    return folder / f"{job.name}_seed{job.seed}.json.gz"


def write_trace(
    path: Path,
    job: SecondJob,
    start: int,
    steps: Sequence[dict[str, float]],
    correct: Sequence[float],
    more: dict[str, Any],
) -> None:
    """Write what is known so far, whole or not at all."""
    from scripts.diagnosis.scoring import onset_of, reward_fall

    case = CASES[job.name]
    fall = reward_fall(correct)
    trace = {
        "bench": 2,
        "name": job.name,
        "setting": case.setting,
        "kind": case.kind,
        "healthy": case.healthy,
        "seed": job.seed,
        "seeds": job.seeds,
        "recipe": case.recipe,
        "right": sorted(case.right),
        "start": start,
        "onset": onset_of(case, correct, start),
        "lost": None if fall is None or case.healthy else fall.lost,
        **more,
        "steps": len(steps),
        "correct": [round(value, 4) for value in correct],
        "metrics": columns_of(steps),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    # Without a time, so that equal traces are equal files.
    part.write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), mtime=0))
    part.replace(path)


def rollback_path(folder: Path, job: SecondJob) -> Path:
    return folder / f"{job.name}_seed{job.seed}.rollback.json"


def write_rollback(
    path: Path, job: SecondJob, correct: Sequence[float], events: Sequence[dict[str, Any]], more: dict[str, Any]
) -> None:
    """Write what became of a run that could go back, as one JSON object."""
    from scripts.diagnosis.scoring import judge_rollback

    fields = ("event", "diagnosis", "step", "onset", "severity", "target", "remedy", "reason")
    told = {
        "name": job.name,
        "seed": job.seed,
        "seeds": job.seeds,
        "kind": CASES[job.name].kind,
        "status": more["status"],
        "reason": more["reason"],
        **judge_rollback(correct, events),
        "correct": [round(value, 4) for value in correct],
        "events": [{key: e[key] for key in fields if key in e} for e in events if e["event"] != "finding"],
    }
    path.write_text(json.dumps(told) + "\n")


def columns_of(steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Turn one dictionary a rollout into one column a key, with five digits."""
    columns: dict[str, Any] = {}
    for key in sorted({key for step in steps for key in step}):
        column = [None if (value := step.get(key)) is None else float(f"{value:.5g}") for step in steps]
        equal = len(set(column)) == 1
        columns[key] = column[0] if equal else column
    return columns


def read_trace(path: Path) -> dict[str, Any]:
    """Read a trace, with ``metrics`` as one dictionary a rollout again, without the keys that it lacks."""
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    count = trace["steps"]
    full = {key: one if isinstance(one, list) else [one] * count for key, one in trace["metrics"].items()}
    trace["metrics"] = [{key: column[k] for key, column in full.items() if column[k] is not None} for k in range(count)]
    return trace


def is_recorded(path: Path) -> bool:
    """Tell whether a trace is there that is whole, or cut late enough to be of use."""
    if not path.exists():
        return False
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return trace["status"] in ("done", "stopped") or (trace["status"] == "running" and trace["steps"] >= USABLE)
