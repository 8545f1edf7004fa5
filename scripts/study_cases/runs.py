"""One run of the study: `lit-grpo fit` with a task's file and an arm's, and what is kept of it."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import shutil
from pathlib import Path
from typing import Any

from scripts import side_by_side

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs/study"
KEYS = (
    "reward",
    "reward/std",
    "reward/accuracy",
    "reward/format",
    "sampling/reward",
    "policy/entropy",
    "policy/delta_prob_positive",
    "policy/delta_prob_negative",
    "policy/conflict_frac",
    "completions/length",
    "completions/correct_length",
    "completions/incorrect_length",
    "completions/repetition_frac",
    "completions/entropy_filtered_frac",
    "groups/zero_std_frac",
    "groups/distinct_frac",
    "groups/all_wrong_frac",
    "groups/all_correct_frac",
    "groups/prefix_pushed_down_frac",
    "optim/grad_norm",
    "optim/grad_norm_max",
    "policy/clip_frac/low",
    "policy/clip_frac/high",
    "policy/kl_ref_k3",
    "critic/value_correct",
    "critic/value_incorrect",
    "sampler_mismatch/logprob_abs_diff",
    "sampler_mismatch/prob_abs_diff_max",
    "val/pass@1",
)
"""Metrics that are kept of every rollout."""


def files_of(arm: str) -> tuple[Path, Path]:
    """Return the configuration files of an arm such as ``two_form/nl``: the task's, and what is laid over it."""
    task, _, name = arm.partition("/")
    return CONFIGS / f"{task}.yaml", CONFIGS / task / f"{name}.yaml"


def command_of(arm: str, seed: int | str = "SEED") -> str:
    """Return the command that makes this run by hand."""
    task, over = (path.relative_to(ROOT) for path in files_of(arm))
    return f"lit-grpo fit --config {task} --config {over} --seed_everything {seed}"


def settings_of(arm: str, rollouts: int | None = None) -> dict[str, Any]:
    """Return the whole configuration of an arm: a run with another one is another run."""
    config = side_by_side.load(*files_of(arm))
    return config if rollouts is None else side_by_side.merge(config, {"data": {"rollouts": rollouts}})


def prepare(task: str, models: Path) -> Path:
    """Return the folder of the model that runs of a task begin from; make it if it is not there."""
    if task.startswith("two_form"):
        folder = models / "two_form_addition"
        if not (folder / "config.json").exists():
            from scripts.warm_start_two_form_addition import warm_start

            warm_start(folder)
        return folder
    from scripts.diagnosis.settings import SETTINGS

    # As countdown_fast and countdown_off do, a task may begin from the model of another.
    name = f"char_{task.partition('_')[0]}"
    SETTINGS[name].prepare(models)
    return models / name


def run(
    arm: str, seed: int, rollouts: int | None, folder: Path, models: Path, tracking_uri: str = "none"
) -> dict[str, Any]:
    """Train one arm with one seed in this process.

    Args:
        arm: task and name of the overlay, ``two_form/nl``.
        seed: of the run.
        rollouts: length in place of the task's own.
        folder: where run folders are made; that of this run is written anew.
        models: folder of the warm-started models.
        tracking_uri: of an MLflow store that gets the run too; ``none``: it is in its folder alone.

    Returns:
        A record: arm, seed, settings, ``curves`` (metric: a value or None for each rollout), ``alarms`` of the monitors
        (step, diagnosis, severity), ``status`` and ``seconds``.
    """
    named = {"arm": arm, "seed": seed, "settings": settings_of(arm, rollouts)}
    return named | side_by_side.attempt(lambda: _train(arm, seed, rollouts, folder, models, tracking_uri))


def _train(arm: str, seed: int, rollouts: int | None, folder: Path, models: Path, tracking_uri: str) -> dict[str, Any]:
    import torch

    from lit_grpo.cli.main import main
    from lit_grpo.tracking import read_metrics

    torch.set_num_threads(1)
    task, over = files_of(arm)
    own = folder / f"{arm.replace('/', '-')}-seed{seed}"
    shutil.rmtree(own, ignore_errors=True)
    arguments = ["fit", "--config", str(task), "--config", str(over), "--seed_everything", str(seed)]
    arguments += ["--model.policy.path", str(prepare(task.stem, models)), "--trainer.logger.run_dir", str(own)]
    arguments += ["--trainer.logger.tracking_uri", tracking_uri]
    arguments += ["--data.rollouts", str(rollouts)] if rollouts is not None else []
    os.chdir(ROOT)
    said = io.StringIO()
    level = logging.root.manager.disable
    try:
        logging.disable(logging.WARNING)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = main(arguments)
    finally:
        logging.disable(level)
    if code not in (0, 3):
        raise RuntimeError(f"lit-grpo fit ended with {code}: {said.getvalue().strip()[-400:]}")
    steps = read_metrics(own)
    found = {key: [_short(step.get(key)) for step in steps] for key in KEYS}
    return {
        "curves": {key: column for key, column in found.items() if any(value is not None for value in column)},
        "alarms": alarms_of(settings_of(arm)["model"]["objective"], steps),
        "status": "done" if code == 0 else "stopped",
    }


def _short(value: Any) -> float | None:
    # NaN stands where a mean was over nothing.
    return None if value is None or not math.isfinite(value) else float(f"{float(value):.4g}")


def alarms_of(objective: dict[str, Any], steps: list[dict[str, Any]]) -> list[list[Any]]:
    """Show the metrics of a run to all monitors with their defaults, and return what they call a warning or worse.

    The run itself has no monitors: one that leaves out steps would change the collapse that is studied.

    Args:
        objective: the objective's configuration.
        steps: metrics of each rollout.
    """
    from scripts.diagnosis.second_scoring import said_of

    plain = [
        {key: float(value) for key, value in step.items() if isinstance(value, int | float) and key != "wall_time"}
        for step in steps
    ]
    return [[d.step, d.name, str(d.severity)] for d in said_of(objective, plain) if str(d.severity) != "info"]
