"""The callback that gives what libraries say its file in the folder of the run."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_grpo.run.folder import run_folder
from lit_grpo.terminal.library_output import LOG_FILE, current_output


class LogFile(Callback):
    """Callback that opens ``log.txt`` in the folder of the run, on rank r above 0 ``log.r.txt``.

    In a program that has not asked for it (:func:`lit_grpo.terminal.library_output.library_output_to_file`) it does
    nothing.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # On all ranks, each of which must ask for the folder.
        folder, output = run_folder(trainer), current_output()
        if output is not None and not getattr(trainer, "fast_dev_run", False):
            rank = f".{trainer.global_rank}" if trainer.global_rank else ""
            output.open((folder / LOG_FILE).with_suffix(f"{rank}.txt"))
