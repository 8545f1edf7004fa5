"""Some completions of every tenth rollout, whole groups side by side, in the folder of the run and in its trackers."""

from __future__ import annotations

import html
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from lit_grpo.run.folder import RunRecord, run_folder
from lit_grpo.utils.bounds import Bound, check_arguments
from lit_grpo.utils.files import write_atomically

log = logging.getLogger(__name__)

FILE_NAME = "completions.jsonl"
TABLE_NAME = "completions.json"
KEY = "completions"
"""Name of the table in trackers."""
COLUMNS = ("rollout", "prompt", "answer", "completion", "reward", "correct", "tokens", "truncated", "rewards")
MOST_ROLLOUTS = 32
"""Rollouts in the table of a tracker that takes it as a whole, spread evenly; the file has all."""
MOST_SAMPLES = 8
"""Completions of a group that are kept at most."""
_SHOWN = 600
"""Characters of a text in a table that is shown as text."""


class CompletionTable(Callback):
    """Callback that keeps some completions of the first, every n-th and the last rollout.

    They are whole groups in ``<run folder>/completions.jsonl``, one JSON object a completion, with reward, verdict and
    length. Trackers get them as well: MLflow and Weights & Biases as a table, TensorBoard as text under the number of
    the rollout. A tracker that fails is warned of once, and never ends a run.

    With several processes rank 0's part of a rollout is recorded.

    Args:
        every: rollouts from one record to the next; 0 records nothing.
        groups: first groups of the rollout that are recorded, with at most eight completions each.
    """

    def __init__(self, every: Annotated[int, Bound(least=0)] = 10, groups: Annotated[int, Bound(least=1)] = 2) -> None:
        check_arguments(CompletionTable.__init__, {"every": every, "groups": groups}, "completions")
        self.every, self.groups = every, groups
        self._path: Path | None = None
        self._rows: dict[int, list[dict[str, Any]]] = {}
        """Recorded rows by rollout, in order."""
        self._failed: set[str] = set()
        """Trackers that have refused once."""

    # Hooks.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.every and not getattr(trainer, "fast_dev_run", False):
            folder = run_folder(trainer)
            if trainer.is_global_zero:
                self._path = folder / FILE_NAME
                self._rows = _by_rollout(read_rows(self._path))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rollout = trainer.fit_loop.epoch_loop._batches_that_stepped
        due = rollout == 1 or rollout % max(1, self.every) == 0 or trainer.is_last_batch or trainer.should_stop
        if self._path is None or not due or not hasattr(batch, "completions"):
            return
        try:
            self._record(trainer, rollout, list(_rows_of(batch, rollout, self.groups)))
        # A run is not lost for want of a record.
        except OSError as error:
            log.warning("Completions cannot be written to %s: %s", self._path, error)
            self._path = None

    # Recording.

    def _record(self, trainer: Trainer, rollout: int, rows: list[dict[str, Any]]) -> None:
        assert self._path is not None
        # A run that went back makes later rollouts anew.
        again = [earlier for earlier in self._rows if earlier >= rollout]
        for earlier in again:
            del self._rows[earlier]
        self._rows[rollout] = rows
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if again:
            kept = [json.dumps(row, ensure_ascii=False) + "\n" for old in self._rows.values() for row in old]
            write_atomically(self._path, "".join(kept))
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        for logger in trainer.loggers:
            self._send(logger, rollout, rows)

    def _send(self, logger: Any, rollout: int, rows: Sequence[dict[str, Any]]) -> None:
        name = type(logger).__name__
        if name in self._failed:
            return
        try:
            if isinstance(logger, RunRecord):
                self._send_table(logger)
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(KEY, _markdown(rows), rollout)
            elif isinstance(logger, WandbLogger):
                logger.log_table(KEY, columns=list(COLUMNS), data=_cells(rows), step=rollout)
            elif isinstance(logger, MLFlowLogger) and logger.run_id is not None:
                # Its client shows a bar for the table that it downloads to add to.
                os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
                data = dict(zip(COLUMNS, map(list, zip(*_cells(rows), strict=True)), strict=True))
                logger.experiment.log_table(logger.run_id, data, TABLE_NAME)
        # Whatever a tracker's client raises: its table is missing, and the run goes on.
        except Exception as error:
            self._failed.add(name)
            log.warning(
                "%s takes no completions (%s: %s); they are in %s", name, type(error).__name__, error, self._path
            )

    def _send_table(self, logger: Any) -> None:
        """Give our own logger the table as MLflow's own ``log_table`` would write it, whole each time."""
        assert self._path is not None
        rollouts = list(self._rows)
        stride = -(-len(rollouts) // MOST_ROLLOUTS)
        chosen = dict.fromkeys([*rollouts[::stride], rollouts[-1]])
        rows = [row for rollout in chosen for row in self._rows[rollout]]
        logger.log_text(json.dumps({"columns": list(COLUMNS), "data": _cells(rows)}, ensure_ascii=False), TABLE_NAME)
        # MLflow's page looks for tables under this tag.
        logger.set_tags({"mlflow.loggedArtifacts": json.dumps([{"path": TABLE_NAME, "type": "table"}])})


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the recorded completions of a run; lines that cannot be read are left out, and a missing file has none."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("rollout"), int):
            rows.append(row)
    return rows


def _by_rollout(rows: Sequence[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["rollout"], []).append(row)
    return found


def _rows_of(batch: Any, rollout: int, groups: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of the first groups of a :class:`lit_grpo.types.Rollout`."""
    size = batch.group_size
    for g, prompt in enumerate(batch.prompts[:groups]):
        for i in range(g * size, g * size + min(size, MOST_SAMPLES)):
            said = batch.correct is not None and (batch.judged is None or bool(batch.judged[i]))
            yield {
                "rollout": rollout,
                "id": prompt.id,
                "prompt": prompt.question,
                "answer": prompt.answer_column,
                "completion": batch.texts[i],
                "reward": _number(batch.reward[i]),
                "correct": bool(batch.correct[i]) if said else None,
                "tokens": len(batch.completions[i].token_ids),
                "truncated": bool(batch.completions[i].truncated),
                "rewards": {name: _number(values[i]) for name, values in batch.rewards.items()},
            }


def _number(value: Any) -> float | None:
    # NaN stands for a reward that was not given, and is no JSON.
    return None if math.isnan(float(value)) else float(value)


def _cells(rows: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Return the rows of a table whose columns have one type each."""
    table = []
    for row in rows:
        values = {name: row.get(name) for name in COLUMNS}
        answer = values["answer"]
        values["answer"] = " or ".join(map(str, answer)) if isinstance(answer, list) else str(answer or "")
        values["correct"] = {True: "yes", False: "no", None: ""}[values["correct"]]
        values["rewards"] = json.dumps(values["rewards"])
        table.append(list(values.values()))
    return table


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table in Markdown, in which the texts cannot be taken for marks."""
    shown = ("prompt", "completion", "reward", "correct", "tokens")
    lines = ["| " + " | ".join(shown) + " |", "|" + " --- |" * len(shown)]
    for cells in _cells(rows):
        by_name = dict(zip(COLUMNS, cells, strict=True))
        texts = [html.escape(str(by_name[name])[:_SHOWN]).replace("|", "&#124;") for name in shown]
        lines.append("| " + " | ".join(text.replace("\n", "<br>") for text in texts) + " |")
    return "\n".join(lines)
