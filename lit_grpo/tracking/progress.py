"""The progress of a fit as lines, for logs and pipes."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar


class LineProgress(ProgressBar):
    """Progress "bar" that prints ``rollout 40/400  reward 0.312  entropy 1.204 ...`` every few seconds.

    Args:
        seconds: seconds between two lines at least; the first and the last rollout always get one.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._last_line = 0.0
        self._enabled = True

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        # Lightning calls this on ranks other than 0.
        self._enabled = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        is_last = trainer.is_last_batch or trainer.should_stop
        if not self._enabled or not (is_last or now - self._last_line >= self._seconds):
            return
        self._last_line = now
        metrics = self.get_metrics(trainer, pl_module)
        # v_num is Lightning's version number of the run, which says nothing of its progress.
        metrics.pop("v_num", None)
        values = "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())
        print(f"rollout {batch_idx + 1}/{self.total_train_batches}  {values}", file=sys.stdout, flush=True)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
