"""The callback that writes an evaluation: every completion as JSON lines, the results as JSON, and a table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_grpo.evaluation.evaluator import EvaluationResult
from lit_grpo.evaluation.table import table
from lit_grpo.run.folder import run_folder, run_logger, shown
from lit_grpo.run.steps import counts_as_evaluation


class EvaluationWriter(Callback):
    """Callback that writes every completion and the results of ``test``, ``validate`` and evaluations during ``fit``.

    Into ``evaluation/<stage>/`` of the run folder, during a fit ``evaluation/val_<rollouts>/``: ``<set>.jsonl``, one
    object a completion (rank r: ``<set>.r.jsonl``), and ``results.json``. The folder goes to MLflow as an artifact.
    ``test`` and ``validate`` also print a table. In a fit without a :class:`lit_grpo.tracking.RunLogger` nothing is
    written.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        """Folder of the evaluation under way or of the last one."""
        self._started_files: set[str] = set()

    # Lightning has the same hooks twice, for validation and for test.

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, pl_module, "val")

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, pl_module, "test")

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._append(trainer, outputs)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._append(trainer, outputs)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer, pl_module)

    def _start(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self.folder, self._started_files = None, set()
        fitting = trainer.state.fn == "fit"
        if not counts_as_evaluation(trainer) or (fitting and run_logger(trainer) is None):
            return
        # Evaluations during a fit each get a folder of their own, or the next would overwrite the last.
        name = f"val_{int(getattr(module, 'policy_version', 0)):06d}" if fitting else stage
        self.folder = run_folder(trainer) / "evaluation" / name
        self.folder.mkdir(parents=True, exist_ok=True)

    def _append(self, trainer: Trainer, outputs: Any) -> None:
        """Append records to the file of their set; the first of an evaluation begins the file anew."""
        if self.folder is None or not isinstance(outputs, dict):
            return
        records = outputs["records"]
        # A file for each rank, since several processes that append to one would mix their lines.
        rank = f".{trainer.global_rank}" if trainer.global_rank else ""
        for name in dict.fromkeys(record["set"] or "completions" for record in records):
            lines = [
                json.dumps(record, ensure_ascii=False) + "\n"
                for record in records
                if (record["set"] or "completions") == name
            ]
            path = self.folder / f"{name}{rank}.jsonl"
            with path.open("a" if name in self._started_files else "w", encoding="utf-8") as file:
                file.writelines(lines)
            self._started_files.add(name)

    def _end(self, trainer: Trainer, module: LightningModule) -> None:
        result: EvaluationResult | None = getattr(module, "evaluation", None)
        if self.folder is None or result is None or not trainer.is_global_zero:
            return
        path = self.folder / "results.json"
        path.write_text(json.dumps(self._content(trainer, module, result), indent=1) + "\n", encoding="utf-8")
        logger = run_logger(trainer)
        if logger is not None:
            logger.log_artifact(self.folder, f"evaluation/{self.folder.name}")
        if trainer.state.fn != "fit":
            bar = trainer.progress_bar_callback
            # Otherwise the bar, which ends later, draws itself once more below the table.
            if bar is not None:
                bar.teardown(trainer, module, result.stage)
            print(
                f"\n{table(result)}\n\nresults: {shown(path)}\ncompletions: {shown(self.folder)}/<set>.jsonl",
                flush=True,
            )

    def _content(self, trainer: Trainer, module: LightningModule, result: EvaluationResult) -> dict[str, Any]:
        from lit_grpo.utils.random import run_seed

        data: Any = getattr(trainer, "datamodule", None)
        policy: Any = getattr(module, "policy_config", None)
        engine = getattr(data, "engine_config", None)
        return {
            "stage": result.stage,
            "policy": getattr(policy, "path", None),
            "checkpoint": None if trainer.ckpt_path is None else str(trainer.ckpt_path),
            "rollouts_trained": getattr(module, "policy_version", None),
            "seed": run_seed(),
            "engine": getattr(engine, "name", None),
            "sets": {
                name: {
                    "metrics": metrics,
                    "sampled": [
                        {"samples": part.samples, "greedy": part.sampling.temperature <= 0, **asdict(part.sampling)}
                        for part in result.parts[name]
                    ],
                }
                for name, metrics in result.sets.items()
            },
        }
