"""Many short runs side by side, one thread each: a run is written down when it ends, and then not run again.

Shared by the scripts that compare recipes, critics and sabotages. Nothing heavy is imported until a run begins.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

Record = dict[str, Any]
"""What is known of one run; ``status`` is ``done``, ``stopped`` or ``error``, the last two with a ``reason``."""


# --------------------------------------------------------------------------------------------------- many runs


def read(path: Path) -> Iterator[Record]:
    """Read the runs of a file that did not fail; a line cut by a crash is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.get("status") != "error":
            yield record


def run_all(
    run: Callable[..., Record],
    todo: Sequence[tuple[Any, ...]],
    jobs: int,
    out: Path,
    line: Callable[[Record], str],
    add: Record | None = None,
) -> list[Record]:
    """Do all runs and give their records in the order in which they ended.

    Args:
        run: makes the record of one run; a function of a module, since workers import it.
        todo: its arguments, once a run.
        jobs: how many at once; 1: in this process.
        out: JSON lines, each record is appended.
        line: what the screen shows of a record.
        add: put into every record.
    """
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before the workers start
    out.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    found: list[Record] = []
    with out.open("a", encoding="utf-8") as file:
        if file.tell() and not out.read_text(encoding="utf-8").endswith("\n"):
            file.write("\n")  # a line cut by a crash
        for record in _records(run, todo, jobs):
            found.append({**(add or {}), **record})
            file.write(json.dumps(found[-1]) + "\n")
            file.flush()
            past = f"{time.monotonic() - started:6.0f} s {len(found):3d}/{len(todo)}"
            print(f"{past} {line(record)}", file=sys.stderr, flush=True)
    return found


def _records(run: Callable[..., Record], todo: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[Record]:
    if jobs == 1 or not todo:
        yield from (run(*arguments) for arguments in todo)
        return
    with ProcessPoolExecutor(min(jobs, len(todo)), get_context("spawn"), _begin_worker, (os.getpid(),)) as pool:
        for future in as_completed([pool.submit(run, *arguments) for arguments in todo]):
            yield future.result()


def _begin_worker(parent: int) -> None:
    """Be quiet, and end with the parent: a worker whose parent was killed would otherwise wait for ever."""
    quiet()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def quiet() -> None:
    """Silence what the runs print: with many at once only results are shown."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def attempt(run: Callable[[], Record]) -> Record:
    """Give the record of ``run`` or of its failure, with CPU seconds: one run that fails must not end the others."""
    started = time.process_time()  # of its one thread: does not depend on what else the machine does
    try:
        record = run()
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        record = {"status": "error", "reason": reason, "trace": traceback.format_exc()}
    return {"status": "done", "reason": ""} | record | {"seconds": round(time.process_time() - started, 1)}


# ------------------------------------------------------------------------------------------------------- one run

PLAIN: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
"""Arguments of a Trainer that writes nothing."""


def load(*files: Path) -> Record:
    """Read configuration files, later ones laid over earlier ones."""
    import yaml

    config: Record = {}
    for file in files:
        layer = yaml.safe_load(file.read_text(encoding="utf-8"))
        # As on the command line, a recipe starts afresh.
        if "recipe" in layer.get("model", {}).get("objective", {}):
            config.get("model", {}).pop("objective", None)
        config = merge(config, layer)
    return config


def merge(below: Record, above: Record) -> Record:
    """Lay ``above`` over ``below``."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def build(config: Record) -> tuple[Any, Any]:
    """Make module and data of a configuration of the quickstart task, as ``lit-grpo fit`` would."""
    from lit_grpo import LitGRPO, RolloutDataModule
    from lit_grpo.data import AdditionPrompts
    from lit_grpo.engines import EngineConfig
    from lit_grpo.rewards import ExactMatch
    from lit_grpo.types import Sampling

    made = {"prompts": AdditionPrompts, "val_prompts": AdditionPrompts, "sampling": Sampling, "engine": EngineConfig}
    data = dict(config["data"])
    for key, kind in made.items():
        if key in data:
            data[key] = kind(**data[key].get("init_args", {} if "class_path" in data[key] else data[key]))
    data["rewards"] = [ExactMatch(**reward.get("init_args", {})) for reward in data["rewards"]]
    return LitGRPO(**config["model"]), RolloutDataModule(**data)


def fit(config: Record, seed: int, keys: Sequence[str]) -> tuple[Any, Any, Record]:
    """Train on one thread.

    Args:
        config: of the run.
        seed: of the run.
        keys: metrics to keep.

    Returns:
        the module, its data, and a record: ``curves``, the metrics of every rollout by key, None where it has none;
        ``status`` and ``reason`` if a guard stopped it.
    """
    import lightning.pytorch as pl
    import torch

    from lit_grpo.errors import StopRun

    torch.set_num_threads(1)
    pl.seed_everything(seed, verbose=False)
    module, data = build(config)
    curves: dict[str, list[float | None]] = {key: [] for key in keys}

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for key, values in curves.items():
                value = pl_module.step_metrics.get(key)
                values.append(None if value is None else round(float(value), 5))

    out: Record = {"curves": curves}
    try:
        pl.Trainer(max_epochs=1, limit_val_batches=0, callbacks=[Keep()], **PLAIN).fit(module, datamodule=data)
    except StopRun as stop:
        out |= {"status": "stopped", "reason": str(stop)}
    return module, data, out
