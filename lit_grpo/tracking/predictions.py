"""The output of ``lit-grpo predict``: every completion, one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_grpo.run.folder import run_folder, shown


class PredictionWriter(Callback):
    """Callback that writes ``predictions.jsonl`` in the run folder as completions come.

    Rank r > 0 writes ``predictions.r.jsonl``.

    Attributes:
        path: path of this rank's file, once prediction has begun.
    """

    path: Path | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank = trainer.global_rank
        self.path = run_folder(trainer) / (f"predictions.{rank}.jsonl" if rank else "predictions.jsonl")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Begun anew here, because every batch is appended.
        self.path.write_text("", encoding="utf-8")

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in outputs)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.path is not None and trainer.is_global_zero:
            print(f"completions: {shown(self.path)}")
