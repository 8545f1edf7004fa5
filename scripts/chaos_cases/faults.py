"""Engines, ranks, trackers, clocks and signals that fail: what was promised, what is seen, how long it takes."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from scripts.chaos_cases import rank_faults, tracking_kills
from scripts.chaos_cases.forked_runs import Run, preload, start

GROUPS = ("tracking", "kills", "ranks", "engine")


@dataclass(frozen=True)
class Row:
    """One fault.

    Attributes:
        fault: what was broken.
        promised: what is to happen.
        seen: what happened.
        seconds: how long the run took, or the end of it after the fault.
        lost: what is gone for good.
        holds: whether the promise was kept.
    """

    fault: str
    promised: str
    seen: str
    seconds: float
    lost: str
    holds: bool


class Place:
    """Makes a folder with a configuration and an MLflow store for each case."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = tracking_kills.make_store(root)
        self._number = 0

    def folder(self) -> Path:
        self._number += 1
        return tracking_kills.make_folder(self.root / f"case-{self._number:02d}", self.store)


def run_to_end(argv: list[str], folder: Path, prepare: Callable[[], None] = lambda: None, limit: float = 150.0) -> Run:
    """Run the program to its end, at most so many seconds."""
    run = start(argv, folder, prepare)
    run.wait(limit)
    return run


def tracking(place: Place) -> Iterator[Row]:
    """Faults of the store, the clock, the disk of the metrics, and of two runs in one place."""
    fit = ["fit", "--config", "a.yaml"]
    yield _outage(place.folder(), fit)
    for name, until in (("4 s after the end began", 4.0), ("never", 1e9)):
        yield _refused_at_the_end(place.folder(), fit, name, until)
    yield _named(place.folder(), fit)
    yield _two_in_one_folder(place.folder(), fit)
    yield _left_alone(place.folder(), fit)
    for name, offset in (("set back by an hour in mid-run", -3600.0), ("before 1970 from then on", -1e10)):
        folder = place.folder()
        run = run_to_end(fit, folder, partial(_shift_clock, offset))
        yield _complete(f"clock {name}", folder, run)
    folder = place.folder()
    run = run_to_end(fit, folder, _fill_disk)
    ((_, status, steps, _),) = tracking_kills.history(folder / "runs" / "mlflow.db")
    said = run.text.count("metrics.jsonl cannot be written")
    yield Row(
        "no room for metrics.jsonl from step 6 on",
        "said once; training and MLflow go on",
        f"exit {run.code}, said {said} times, MLflow {status} with {len(steps)} steps",
        time.monotonic() - run.started,
        "7 lines of the file",
        run.code == 0 and said == 1 and len(steps) == tracking_kills.ROLLOUTS,
    )


def _complete(fault: str, folder: Path, run: Run, promised: str = "12 steps once in file and MLflow") -> Row:
    """Judge a run whose record is to be complete."""
    seconds = time.monotonic() - run.started
    runs = tracking_kills.history(folder / "runs" / "mlflow.db")
    steps = runs[-1][2] if runs else {}
    in_file = [len(rows) for path in folder.glob("runs/*/metrics.jsonl")
               for rows in tracking_kills.rows_by_step(path.parent).values()]  # fmt: skip
    once = list(steps.values()) == in_file == [1] * tracking_kills.ROLLOUTS and not runs[-1][3]
    statuses = [status for _, status, _, _ in runs]
    return Row(
        fault,
        promised,
        f"exit {run.code}, {len(in_file)} steps in the file, {len(steps)} in MLflow, {', '.join(statuses)}",
        seconds,
        "nothing" if once else "steps",
        run.code == 0 and once and statuses == ["FINISHED"],
    )


def _outage(folder: Path, fit: list[str]) -> Row:
    def plant() -> None:
        from scripts.chaos_cases.forked_runs import kill_self_at

        _refuse(4, 1e9)
        import lit_grpo.tracking.spool as spool

        kill_self_at(spool.Spool, "append", 9)

    run_to_end(fit, folder, plant)
    run = run_to_end(tracking_kills.go_on(folder, fit), folder)
    return _complete("store unreachable from step 4, SIGKILL at 9, resumed", folder, run)


def _refuse(step: int, seconds: float, from_end: bool = False) -> None:
    """Let the store refuse the connection from a step on, or from the end on, for so many seconds."""
    from lit_grpo.tracking.mlflow_logger import RunLogger
    from lit_grpo.tracking.mlflow_target import MlflowTarget

    send, finalize, state = MlflowTarget.metrics, RunLogger.flush, {"until": 0.0}

    def metrics(self: Any, records: Any) -> None:
        if any(record["step"] >= step for record in records) and not (
            state["until"] and time.monotonic() > state["until"]
        ):
            if not from_end and not state["until"]:
                state["until"] = time.monotonic() + seconds
            raise ConnectionRefusedError("[Errno 111] Connection refused")
        send(self, records)

    def flush(self: Any, timeout: float | None = None) -> bool:
        # The summary's, with which the end of a run begins.
        state["until"] = state["until"] or time.monotonic() + seconds
        return bool(finalize(self, timeout))

    MlflowTarget.metrics = metrics  # type: ignore[method-assign]
    if from_end:
        RunLogger.flush = flush  # type: ignore[method-assign]


def _refused_at_the_end(folder: Path, fit: list[str], name: str, until: float) -> Row:
    words = [*fit, "--trainer.logger.patience", "15"]
    run = run_to_end(words, folder, partial(_refuse, 4, until, from_end=True))
    if until < 1000:
        return _complete(f"connection refused from step 4, back {name}; patience 15", folder, run)
    seconds = time.monotonic() - run.started
    said = "could not be sent" in run.text
    again = run_to_end([*tracking_kills.go_on(folder, fit), "--data.rollouts", "13"], folder)
    ((_, status, steps, _),) = tracking_kills.history(folder / "runs" / "mlflow.db")
    return Row(
        f"connection refused from step 4, back {name}; patience 15",
        "the run waits 15 s once, says what is missing; a later run sends it",
        f"exit {run.code}, {'said' if said else 'not said'}; after going on {len(steps)} of 13 steps, {status}",
        seconds,
        "nothing" if len(steps) == 13 else "steps",
        run.code == 0 and said and len(steps) == 13 and again.code == 0,
    )


def _named(folder: Path, fit: list[str]) -> Row:
    run = start([*fit, "--trainer.logger.run_name", "mine", "--data.rollouts", "12"], folder)
    rank_faults.wait_for_steps(folder, 4, [run])
    run.kill(signal.SIGINT)
    first = run.wait(60)
    line = next((line for line in run.text.splitlines() if "go on:" in line), "")
    words = line.partition("lit-grpo ")[2].split()
    again = run_to_end(words, folder)
    folders = sorted(path.parent.name for path in folder.glob("runs/*/run.json"))
    row = _complete(
        "named run, Ctrl-C, then the printed `go on:` command", folder, again, "the same folder and MLflow run"
    )
    return replace(
        row,
        seen=f"exit {first}, then {row.seen}, folders {', '.join(folders)}",
        holds=row.holds and folders == ["mine"] and first == 130,
    )


def _two_in_one_folder(folder: Path, fit: list[str]) -> Row:
    words = [*fit, "--trainer.logger.run_dir", "runs/mine", "--data.rollouts", "60"]
    first = start(words, folder)
    rank_faults.wait_for_steps(folder, 2, [first])
    began = time.monotonic()
    second = run_to_end(words, folder)
    seconds = time.monotonic() - began
    first.kill()
    named = f"process {first.pid} on {socket.gethostname()}" in second.text
    return Row(
        "a second run in the folder of one that is going on",
        "refused, exit 2, the first is named",
        f"exit {second.code}, {'named' if named else 'not named'}",
        seconds,
        "nothing",
        second.code == 2 and named,
    )


def _left_alone(folder: Path, fit: list[str]) -> Row:
    first = start(fit, folder)
    rank_faults.wait_for_steps(folder, 2, [first])
    first.kill()
    run = run_to_end([*fit, "--trainer.logger.run_name", "other"], folder)
    statuses = [status for _, status, _, _ in tracking_kills.history(folder / "runs" / "mlflow.db")]
    return Row(
        "SIGKILL before any checkpoint, another run begun",
        "the dead one is closed as FAILED",
        f"exit {run.code}, {', '.join(statuses)}",
        time.monotonic() - run.started,
        "nothing",
        statuses == ["FAILED", "FINISHED"],
    )


def _shift_clock(offset: float) -> None:
    now, began = time.time, time.monotonic()

    def shifted() -> float:
        return now() + (offset if time.monotonic() - began > 2.0 else 0.0)

    time.time = shifted


def _fill_disk() -> None:
    from lit_grpo.tracking.spool import Spool

    append = Spool.append

    def full(self: Any, record: Any) -> int:
        if record["step"] >= 6:
            raise OSError(28, "No space left on device")
        return append(self, record)

    Spool.append = full  # type: ignore[method-assign]


def kills(place: Place, number: int, seed: int) -> Iterator[Row]:
    """Runs killed with SIGKILL at random and chosen moments, once to three times, and resumed."""
    began = time.monotonic()
    for name, count in tracking_kills.measure(place.root / "kills", number, seed).items():
        if not count.kills:
            continue
        for note in count.notes:
            print(f"  {note}")
        yield Row(
            f"{count.kills} x SIGKILL, {name}",
            "each step once in file and MLflow; nothing left RUNNING",
            f"{count.runs} runs, {count.resumed} resumes from a checkpoint: {count.gaps} with gaps, {count.duplicates} "
            f"with duplicates, {count.file_faults} with faults of the file, {count.left_running} left RUNNING",
            time.monotonic() - began,
            "nothing" if not count.bad else "see above",
            not count.bad,
        )


def ranks(place: Place) -> Iterator[Row]:
    """Two ranks that were started each on its own, as torchrun does."""
    for number, (name, signals) in enumerate(rank_faults.SIGNALLED.items()):
        outcome = rank_faults.strike(place.root / f"ranks-{number}", signals)
        yield Row(
            name,
            "both save the same rollout and end, exit 143",
            f"exit {outcome.codes}, saved after {outcome.saved} of {outcome.steps} rollouts",
            outcome.seconds,
            "nothing" if outcome.saved == outcome.steps else "rollouts",
            outcome.codes == [143, 143] and outcome.saved == outcome.steps,
        )
    for number, (name, (rank, signal_number)) in enumerate(rank_faults.LOST.items()):
        outcome = rank_faults.strike(place.root / f"lost-{number}", [(rank, signal_number, 0.0)])
        one = len(outcome.messages) == 1 and f"rank {rank} " in outcome.messages[0]
        yield Row(
            name,
            "all end within 60 s, one message names it",
            f"exit {outcome.codes}, {len(outcome.messages)} message{'s' * (len(outcome.messages) != 1)}",
            outcome.seconds,
            f"{outcome.steps - outcome.saved} rollouts since the checkpoint",
            None not in outcome.codes and one,
        )


ENGINE: dict[str, Callable[[Any], dict[str, Any]]] = {
    "log-probabilities all NaN": lambda c: {"logprobs": (float("nan"),) * len(c.token_ids)},
    "log-probabilities all -inf": lambda c: {"logprobs": (float("-inf"),) * len(c.token_ids)},
    "half of the log-probabilities -inf": lambda c: {
        "logprobs": tuple(float("-inf") if i % 2 else p for i, p in enumerate(c.logprobs))
    }
    if len(c.token_ids) > 1
    else {"logprobs": (float("-inf"),)},
    "no log-probabilities": lambda c: {"logprobs": ()},
    "one log-probability too many": lambda c: {"logprobs": (*c.logprobs, -1.0)},
    "an id out of the vocabulary": lambda c: {"token_ids": (10**6, *c.token_ids[1:])},
}  # fmt: skip


def engine(place: Place) -> Iterator[Row]:
    """Values from the engine that cannot be, and weights that a step ruins."""
    fit = ["fit", "--config", "a.yaml"]
    for name, change in ENGINE.items():
        folder = place.folder()
        run = run_to_end(fit, folder, partial(_spoil, change))
        steps = rank_faults.steps_of(folder)
        yield Row(
            f"engine: {name} from rollout 4 on",
            "the run ends before it learns from it, one screen",
            f"exit {run.code} after {steps} rollouts, traceback: {'yes' if 'Traceback' in run.text else 'no'}",
            time.monotonic() - run.started,
            f"{steps - rank_faults.saved_of(folder)} rollouts since the checkpoint",
            run.code == 1 and steps == 4 and "Traceback" not in run.text and "the rollout engine failed" in run.text,
        )
    for action, code, done in (("log", 3, 4), ("rollback", 0, 12)):
        folder = place.folder()
        text = (folder / "a.yaml").read_text()
        actions = f"{{actions: {{critical: {action}}}, checkpoint_every: 1, monitors: [" + (
            "{class_path: lit_grpo.callbacks.monitors.GradientNormMonitor}]}"
        )
        (folder / "a.yaml").write_text(text.replace("{actions: {critical: log}}", actions))
        run = run_to_end(fit, folder, _ruin)
        steps = max(
            (s for p in folder.glob("runs/*/metrics.jsonl") for s in tracking_kills.rows_by_step(p.parent)), default=0
        )
        yield Row(
            f"a step leaves NaN in the weights, `critical: {action}`",
            "the run stops at once, exit 3" if code else "the run goes back and on",
            f"exit {run.code}, {steps} rollouts, newest checkpoint finite: {_finite(folder)}",
            time.monotonic() - run.started,
            "the rollout" if code else "nothing",
            run.code == code and steps == done and _finite(folder),
        )


def _spoil(change: Callable[[Any], dict[str, Any]]) -> None:
    from lit_grpo.engines.transformers.engine import TransformersEngine

    generate, calls = TransformersEngine.generate, []

    def wrong(self: Any, requests: Any, sampling: Any) -> Any:
        calls.append(1)
        for completion in generate(self, requests, sampling):
            yield replace(completion, **change(completion)) if len(calls) > 4 else completion

    TransformersEngine.generate = wrong  # type: ignore[method-assign]


def _ruin() -> None:
    import torch

    step, calls = torch.optim.AdamW.step, []

    def ruined(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = step(self, *args, **kwargs)
        calls.append(1)
        if len(calls) == 5:
            with torch.no_grad():
                self.param_groups[-1]["params"][-1].view(-1)[-1] = float("nan")
        return out

    torch.optim.AdamW.step = ruined  # type: ignore[method-assign]


def _finite(folder: Path) -> bool:
    import torch

    paths = list(folder.glob("runs/*/checkpoints/last.ckpt"))
    if not paths:
        return False
    weights = torch.load(paths[0], weights_only=True)["state_dict"].values()
    return all(bool(weight.isfinite().all()) for weight in weights)


def main(argv: list[str]) -> int:
    """Break everything in turn, print a table, and return 1 if a promise was not kept."""
    parser = argparse.ArgumentParser(prog="chaos.py faults", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--kills", type=int, default=60, help="number of kills with SIGKILL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args(argv)
    preload()
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    place = Place(root)
    (root / "kills").mkdir()
    groups: dict[str, Callable[[], Iterator[Row]]] = {
        "tracking": lambda: tracking(place),
        "kills": lambda: kills(place, options.kills, options.seed),
        "ranks": lambda: ranks(place),
        "engine": lambda: engine(place),
    }
    rows: list[Row] = []
    print("| fault | promised | seen | seconds | lost | |\n|---|---|---|---|---|---|")
    for name in options.only:
        for row in groups[name]():
            rows.append(row)
            print(
                f"| {row.fault} | {row.promised} | {row.seen} | {row.seconds:.1f} | {row.lost} | "
                f"{'ok' if row.holds else '**no**'} |",
                flush=True,
            )
    kept = sum(row.holds for row in rows)
    print(f"\n{kept} of {len(rows)} promises kept; {root}")
    if options.json is not None:
        options.json.write_text(json.dumps([vars(row) for row in rows], indent=1))
    if kept == len(rows):
        shutil.rmtree(root)
    return 0 if kept == len(rows) else 1
