"""Train one run of the benchmark and keep what its callbacks could see."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lit_grpo import LitGRPO, RolloutDataModule
from lit_grpo.callbacks import HealthMonitor
from lit_grpo.callbacks.diagnosis.actions import FINDINGS_FILE, read_journal
from lit_grpo.data import TwoFormAddition
from lit_grpo.data.sources.two_form_addition import ANSWER, MAX_NEW_TOKENS
from lit_grpo.engines import EngineConfig
from lit_grpo.errors import StopRun
from lit_grpo.learner.engine_agreement import GuardConfig
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import OptimizerConfig, PolicyConfig
from lit_grpo.rewards import ExactMatch
from lit_grpo.rollout.generator import RolloutGenerator
from lit_grpo.tracking import RunLogger
from lit_grpo.types import Rollout, Sampling
from scripts.diagnosis.cases import Case, Job, find
from scripts.diagnosis.sabotage import Sabotage

PROMPTS, GROUP_SIZE = 16, 8
NO_GUARDS = GuardConfig(max_engine_gap=None, max_ratio_gap=None, max_truncated=None)
"""No guards: the module's own would stop a run whose engine and learner disagree at its first rollout. Here the
monitors are to find that."""


class SabotagedData(RolloutDataModule):
    """Data module that wraps its engine in the sabotage as soon as that is made."""

    def __init__(self, sabotage: Sabotage, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._sabotage = sabotage

    @property
    def producer(self) -> RolloutGenerator:
        fresh = self._producer is None
        producer = super().producer
        if fresh:
            producer.engine = self._sabotage.engine(producer.engine)
        return producer


class Trace(pl.Callback):
    """Callback that keeps each step's metrics, and the share of really right answers, which no monitor sees."""

    def __init__(self, keep_rollouts: bool = False) -> None:
        self.steps: list[dict[str, float]] = []
        self.correct: list[float] = []
        self.rollouts: list[Rollout] | None = [] if keep_rollouts else None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Rollout, batch_idx: int) -> None:
        self.steps.append({key: float(value) for key, value in pl_module.step_metrics.items()})
        self.correct.append(correct_share(batch))
        if self.rollouts is not None:
            self.rollouts.append(batch)


def correct_share(batch: Rollout) -> float:
    """Compute the share of completions with the right answer, whatever the rewards say."""
    found = [re.search(ANSWER, text) for text in batch.texts]
    answers = [batch.prompts[i // batch.group_size].answer for i in range(len(found))]
    return sum(m is not None and m[1] == a for m, a in zip(found, answers, strict=True)) / max(1, len(found))


def build(case: Case, sabotage: Sabotage, base: Path, seed: int, rollouts: int) -> tuple[LitGRPO, SabotagedData]:
    """Make the module and the data of a run."""
    module = LitGRPO(
        policy=PolicyConfig(path=str(base), share_prompts=False),
        objective=ObjectiveConfig(recipe=case.recipe, **case.objective),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=case.lr, warmup_steps=case.warmup_steps),
        micro_batch_size=PROMPTS * GROUP_SIZE,
        guards=NO_GUARDS,
        **case.module,
    )
    data = SabotagedData(
        sabotage,
        prompts=TwoFormAddition(),
        rewards=sabotage.rewards([ExactMatch(pattern=ANSWER)], seed),
        group_size=GROUP_SIZE,
        prompts_per_rollout=PROMPTS,
        rollouts=rollouts,
        sampling=Sampling(max_new_tokens=MAX_NEW_TOKENS),
        engine=EngineConfig(name="transformers", batch_size=512),
    )
    return module, data


def train(
    job: Job,
    models: Path,
    folder: Path,
    *,
    rollouts: int | None = None,
    callbacks: Sequence[pl.Callback] | None = None,
    keep_rollouts: bool = False,
) -> dict[str, Any]:
    """Train a run and return its trace, what the monitors wrote down, and how it ended. Never raises.

    Args:
        job: which run.
        models: folder with the warm-started models.
        folder: the run's folder.
        rollouts: length; the case's own if None.
        callbacks: watch in place of a HealthMonitor.
        keep_rollouts: whether the rollouts themselves are returned too.
    """
    case, cpu = find(job.name), time.process_time()
    trace = Trace(keep_rollouts)
    out: dict[str, Any] = {"status": "done", "reason": ""}
    try:
        pl.seed_everything(job.seed, verbose=False)
        sabotage = case.make()
        module, data = build(case, sabotage, models / case.model, job.seed, rollouts or case.length(job.part))
        watching = [health_monitor(job.part)] if callbacks is None else callbacks
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[*sabotage.callbacks(job.seed), *watching, trace],
            default_root_dir=folder,
            logger=RunLogger(run_dir=str(folder), tracking_uri="none"),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        with sabotage.around_fit():
            trainer.fit(module, datamodule=data)
    except StopRun as stop:
        out |= {"status": "stopped", "reason": str(stop)}
    # A run that fails must not end the others.
    except Exception as error:
        out |= {"status": "error", "reason": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    journal = folder / FINDINGS_FILE
    out["events"] = read_journal(journal) if journal.exists() else []
    out |= {"steps": trace.steps, "correct": trace.correct, "rollouts": trace.rollouts}
    return out | {"cpu_seconds": round(time.process_time() - cpu, 1)}


def health_monitor(part: str) -> HealthMonitor:
    """Make all monitors with their defaults.

    They only log, so that their view of the whole run is seen, unless rollbacks are what is tried.
    """
    if part == "rollback":
        return HealthMonitor(actions={"critical": "rollback"})
    return HealthMonitor(actions={"critical": "log"})
