"""A LightningModule that is evaluated on rollouts: what ``validate``, ``test`` and ``predict`` do with them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lit_grpo.evaluation.evaluator import EvaluationResult, Evaluator, records
from lit_grpo.run.steps import counts_as_evaluation
from lit_grpo.types import Rollout


class EvaluatedModule(pl.LightningModule):
    """LightningModule that measures the evaluation sets of :class:`lit_grpo.RolloutDataModule`.

    :class:`lit_grpo.LitGRPO` is one. A module that learns in its own way derives from it to have ``pass@k`` and the
    other metrics of its ``val`` and ``test`` sets logged, the same on every rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._evaluator = Evaluator("val")
        self.best_held_out: dict[str, dict[int, float]] = {}
        """Reward of each held-out prompt in the best evaluation so far, by set."""
        self.evaluation: EvaluationResult | None = None
        """Result of the last evaluation."""

    def on_validation_epoch_start(self) -> None:
        self._evaluator = Evaluator("val", self.device, self.best_held_out)

    def on_test_epoch_start(self) -> None:
        self._evaluator = Evaluator("test", self.device)

    def validation_step(self, batch: Rollout, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return one record a completion under ``records``, as :meth:`predict_step` does."""
        return {"records": self._evaluator.update(batch)}

    test_step = validation_step

    def predict_step(self, batch: Rollout, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """Return one record a completion: prompt id, question, completion, rewards."""
        return records(batch)

    def on_validation_epoch_end(self) -> None:
        self.evaluation = self._evaluator.compute()
        # The numbers are alike on all ranks already, so that their mean over ranks changes none of them.
        self.log_dict(self.evaluation.metrics(), sync_dist=True)

        # A look at a few prompts before training says nothing of them all, and a test asks others.
        if self._evaluator.stage == "val" and counts_as_evaluation(self.trainer):
            self.best_held_out = self._evaluator.best

    on_test_epoch_end = on_validation_epoch_end
