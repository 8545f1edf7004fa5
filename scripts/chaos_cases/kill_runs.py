"""Runs for scripts/chaos.py kills: forked from one process that has imported everything, killed where they are told."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml

from lit_grpo.callbacks import FlightRecorder  # noqa: F401 - imported once, before runs are forked
from lit_grpo.callbacks.monitors.monitor import Monitor
from lit_grpo.rewards import Reward
from lit_grpo.types import Score
from lit_grpo.utils.ports import free_port

LIMIT = 300.0
"""Seconds after which a run that has not ended is a hang."""
PROBE_FILE = "probe.jsonl"
FIRST_SAVED = 3
"""Rollouts of the first checkpoint."""
HERE = "scripts.chaos_cases.kill_runs"


class Even(Reward):
    """Reward of 1 where the ids sum to an even number: true of half of a random model's, so groups have spread."""

    def score(self, batch: Any) -> list[Score]:
        return [Score(float(sum(item.completion.token_ids) % 2 == 0)) for item in batch]


class Probe(pl.Callback):
    """Writes a digest of what each rollout was sampled as, the numbers of the engine included."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        digest = hashlib.sha256()
        for completion in batch.completions:
            digest.update(repr((completion.token_ids, completion.logprobs, completion.policy_version)).encode())
        digest.update(repr([prompt.id for prompt in batch.prompts]).encode())
        line = {"rollout": pl_module.policy_version, "digest": digest.hexdigest()}
        with Path(f"{PROBE_FILE}.{trainer.global_rank}").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class Kick(pl.Callback):
    """Breaks the run at one rollout while the learning rate is still what it was: a remedy that lowers it ends that."""

    survives_rollback = True

    def __init__(self, at: int = 7, lr: float = 1e-3) -> None:
        self.at, self.lr = at, lr

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        group = trainer.optimizers[0].param_groups[0]
        if batch_idx == self.at and abs(group["lr"] - self.lr) < 1e-12:
            group["lr"] = 20.0


class Alarm(Monitor):
    """Critical when a step moves the weights too far."""

    keys = ("optim/update_to_weight_ratio",)

    def check(self, step: int, metrics: Mapping[str, float]) -> Any:
        ratio = metrics.get("optim/update_to_weight_ratio", 0.0)
        if ratio > 0.5:
            yield self.finding("gradient_spikes", "critical", "kicked", ("optim/update_to_weight_ratio", 1, ratio, 0.5))


# ------------------------------------------------------------------------------------------------------ where to kill

Point = tuple[str, int]
"""Name of a point and which passing of it kills; ``("time", milliseconds)`` is a moment after the rollout that follows
the first checkpoint."""


def arm(point: Point) -> None:
    """Let this process kill itself at a point."""
    name, count = point
    if name == "time":
        _at_moment(count)
        return
    before, _, where = name.partition(":")
    left = [count]

    def passing() -> bool:
        left[0] -= 1
        return left[0] == 0

    owner, attribute, how = TARGETS[where]
    original = getattr(owner(), attribute)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hit = passing()
        if hit and before == "before":
            die()
        if hit and before == "half":
            how(original, *args, **kwargs)
            die()
        result = original(*args, **kwargs)
        if hit:
            die()
        return result

    setattr(owner(), attribute, wrapped)


def die() -> None:
    """End this process as a power cut would."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _at_moment(milliseconds: int) -> None:
    original = Probe.on_train_batch_end
    begun = threading.Event()

    def wait() -> None:
        begun.wait()
        time.sleep(milliseconds / 1000)
        die()

    def counting(self: Any, trainer: Any, pl_module: Any, *args: Any) -> None:
        original(self, trainer, pl_module, *args)
        if pl_module.policy_version > FIRST_SAVED:
            begun.set()

    threading.Thread(target=wait, daemon=True).start()
    Probe.on_train_batch_end = counting  # type: ignore[method-assign]


def _half_checkpoint(
    original: Callable[..., Any], self: Any, content: Any, path: Any, *args: Any, **kwargs: Any
) -> None:
    original(self, content, path, *args, **kwargs)
    os.truncate(path, Path(path).stat().st_size // 2)


def _half_line(original: Callable[..., Any], self: Any, record: Any) -> None:
    original(self, record)
    os.truncate(self.path, self.path.stat().st_size - 40)


def _nothing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    return


def _module(path: str) -> Callable[[], Any]:
    import importlib

    def find() -> Any:
        name, _, attribute = path.partition(":")
        found: Any = importlib.import_module(name)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
        return found

    return find


TARGETS: dict[str, tuple[Callable[[], Any], str, Callable[..., Any]]] = {
    "write": (_module("lit_grpo.distributed.checkpoint:AnyCheckpointIO"), "save_checkpoint", _half_checkpoint),
    "seal": (_module("lit_grpo.callbacks.checkpoint_files"), "seal", _nothing),
    "move": (_module("lit_grpo.callbacks.checkpoint_files"), "move_into_place", _nothing),
    "link": (_module("lit_grpo.callbacks.rollout_checkpoint"), "link_atomically", _nothing),
    "remove": (_module("lit_grpo.callbacks.rollout_checkpoint"), "remove", _nothing),
    "ring_remove": (_module("lit_grpo.callbacks.rollback"), "remove", _nothing),
    "restore": (_module("lit_grpo.callbacks.health_monitor"), "restore", _nothing),
    "journal": (_module("lit_grpo.callbacks.diagnosis.actions:Journal"), "write", _nothing),
    "generate": (_module("lit_grpo.rollout.generator:RolloutGenerator"), "build_rollout", _nothing),
    "score": (_module(f"{HERE}:Even"), "score", _nothing),
    "sync": (_module("lit_grpo.rollout.generator:RolloutGenerator"), "sync", _nothing),
    "step": (_module("torch.optim:AdamW"), "step", _nothing),
    "log": (_module("lit_grpo.tracking.mlflow_logger:RunLogger"), "log_metrics", _nothing),
    "line": (_module("lit_grpo.tracking.spool:Spool"), "append", _half_line),
    "validate": (_module("lit_grpo.module:LitGRPO"), "validation_step", _nothing),
    "evaluated": (_module("lit_grpo.module:LitGRPO"), "on_validation_epoch_end", _nothing),
    "rollout_end": (_module("lit_grpo.callbacks.rollout_checkpoint:RolloutCheckpoint"), "save", _nothing),
    "train_end": (_module("lit_grpo.callbacks.health_monitor:HealthMonitor"), "on_train_end", _nothing),
    "sent": (_module("lit_grpo.tracking.mlflow_target:MlflowTarget"), "metrics", _nothing),
}


# ----------------------------------------------------------------------------------------------------------- one run


def serve(config: Path, cases: Callable[[Callable[..., list[int]]], None]) -> None:
    """Read a configuration once, and let ``cases`` fork runs of it: reading takes longer than training.

    Args:
        config: the configuration file.
        cases: is called with a function ``run(folder, point=None, ranks=1, **changes)``, which runs the command line in
            forked processes, one a rank, and returns their exit codes, -9 where killed. With several ranks the first
            kills itself and the others are killed then. ``changes`` are ``ckpt_path`` and ``run_dir``.
    """
    from lit_grpo.cli.lightning_cli import TrainingCLI
    from lit_grpo.cli.main import main

    server = os.getpid()
    # Called as soon as the configuration is read, before anything that depends on it is made.
    goes_on = TrainingCLI._parse_ckpt_path

    def fork_here(cli: Any) -> None:
        def run(folder: Path, point: Point | None = None, ranks: int = 1, **changes: str) -> list[int]:
            port, processes = free_port() if ranks > 1 else 0, []
            for rank in range(ranks):
                pid = os.fork()
                if pid == 0:
                    _enter(folder, rank, ranks, port)
                    if point is not None and rank == 0:
                        arm(point)
                    settings = cli.config["fit"]
                    if "ckpt_path" in changes:
                        settings["ckpt_path"] = changes["ckpt_path"]
                    if "run_dir" in changes:
                        settings["trainer"]["logger"]["init_args"]["run_dir"] = changes["run_dir"]
                    raise _Forked
                processes.append(pid)
            return _wait(processes)

        try:
            cases(run)
        except _Forked:
            goes_on(cli)
            return
        raise SystemExit(0)

    TrainingCLI._parse_ckpt_path = fork_here  # type: ignore[method-assign]
    code = 1
    try:
        code = main(["fit", "--config", str(config)])
        if os.getpid() != server:
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join(30)
    except BaseException:
        traceback.print_exc()
        if os.getpid() == server:
            raise
    finally:
        TrainingCLI._parse_ckpt_path = goes_on  # type: ignore[method-assign]
        if os.getpid() != server:
            sys.stdout.flush()
            os._exit(code)


class _Forked(BaseException):
    """Leaves the loop over cases, in a process that is a run."""


def _enter(folder: Path, rank: int, ranks: int, port: int) -> None:
    # A group of its own, so that what it starts can be found.
    os.setpgid(0, 0)
    os.chdir(folder)
    out = os.open(f"log.{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    for name in ("MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    if ranks > 1:
        _be_rank(rank, ranks, port)
    _leave_out_pages()


def _wait(processes: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    end = time.monotonic() + LIMIT
    while len(codes) < len(processes):
        for pid in processes:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        dead = any(code != 0 for code in codes.values())
        if len(codes) < len(processes) and (dead or time.monotonic() > end):
            for pid in processes:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.02)
    return [codes[pid] for pid in processes]


def _be_rank(rank: int, ranks: int, port: int) -> None:
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0",
                      WORLD_SIZE=str(ranks))  # fmt: skip
    # Imported before there were ranks.
    rank_zero_only.rank = rank


def _leave_out_pages() -> None:
    """Write no report and no curves, which take longer than the run."""
    from lit_grpo.cli.lightning_cli import TrainingCLI
    from lit_grpo.evaluation.writer import EvaluationWriter

    TrainingCLI._result_writers = lambda self: [EvaluationWriter()]  # type: ignore[method-assign]


def import_everything(store: Path) -> None:
    """Import what runs need, and make an MLflow store that they get a copy of."""
    import mlflow
    from mlflow.tracking import MlflowClient

    import lit_grpo.cli.training
    import lit_grpo.commands.check.command
    import lit_grpo.engines.transformers.engine
    import lit_grpo.module
    import lit_grpo.tracking  # noqa: F401

    with contextlib.suppress(ImportError):
        import peft  # noqa: F401
    torch.set_num_threads(1)
    if not store.exists():
        store.parent.mkdir(parents=True, exist_ok=True)
        # In a process of its own: an open store must not be forked.
        pid = os.fork()
        if pid == 0:
            try:
                with Path(os.devnull).open("w") as null:
                    os.dup2(null.fileno(), 2)
                    MlflowClient(f"sqlite:///{store}.part").search_experiments()
                Path(f"{store}.part").replace(store)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    del mlflow


def prepare(folder: Path, config: Mapping[str, Any], store: Path) -> None:
    """Make the folder of a run anew: its configuration and an empty MLflow store."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "runs").mkdir(parents=True)
    (folder / "c.yaml").write_text(yaml.safe_dump(dict(config)))
    shutil.copy(store, folder / "runs" / "mlflow.db")
