"""What a Lightning user types, what happens, and a check that it does: the table of docs/lightning.md and its test."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import callbacks as stock
from lightning.pytorch import loggers
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lit_grpo.trainer.refused import REFUSED_ARGUMENTS, REFUSED_CALLBACKS
from tests.tiny import Recorder

ROLLOUTS = 2


@dataclass
class Fit:
    """What a fit of :data:`ROLLOUTS` tiny rollouts has left, for the checks."""

    trainer: Any
    module: Any
    recorder: Recorder
    folder: Path
    out: str = ""

    @property
    def rollouts(self) -> int:
        return int(self.module.policy_version)

    def callback(self, cls: type) -> Any:
        return next(one for one in self.trainer.callbacks if isinstance(one, cls))

    def files(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.folder.rglob(pattern))


Check = Callable[[Fit], bool]


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        typed: what is typed, as YAML below ``trainer:`` or in Python.
        happens: what happens, in words; of a refusal: what to type instead.
        python: keyword arguments of ``pl.Trainer``, made anew for each fit.
        cli: the same on the command line.
        check: looks at what the fit has left; None for a refusal.
        data: changes of the data module.
        group: part of the page.
    """

    typed: str
    happens: str
    python: Callable[[], dict[str, Any]]
    cli: tuple[str, ...] = ()
    check: Check | None = None
    data: dict[str, Any] = field(default_factory=dict)
    group: Literal["flag", "callback", "logger"] = "flag"

    @property
    def refused(self) -> bool:
        return self.check is None


def works(typed: str, happens: str, check: Check, data: dict[str, Any] | None = None, **trainer: Any) -> Row:
    return Row(typed, happens, lambda: trainer, check=check, data=data or {})


def calls(
    typed: str, happens: str, make: Callable[[], Any], check: Check, data: dict[str, Any] | None = None, **trainer: Any
) -> Row:
    python = lambda: {"callbacks": [make()], **trainer}  # noqa: E731
    return Row(typed, happens, python, check=check, data=data or {}, group="callback")


HELD_OUT = {"val": {"more": {"prompts": [{"question": "1+1=", "answer": "2"}, {"question": "1+2=", "answer": "3"}]}}}
EVERY = {"val_check_interval": 1}


def all_rollouts(fit: Fit) -> bool:
    return fit.rollouts == ROLLOUTS


def logged(fit: Fit, key: str) -> bool:
    return key in fit.trainer.callback_metrics


def written(fit: Fit) -> list[Path]:
    """Files that the fit has left; a store of MLflow and a configuration were there before."""
    there = [path for path in fit.folder.rglob("*") if path.is_file()]
    return [path for path in there if path.name not in ("a.yaml", "mlflow.db")]


def csv_rows(fit: Fit) -> list[dict[str, str]]:
    (path,) = fit.folder.rglob("metrics.csv")
    with path.open() as file:
        return list(csv.DictReader(file))


def steps_of(fit: Fit, key: str) -> list[int]:
    return [int(row["step"]) for row in csv_rows(fit) if row.get(key)]


def saved_at(fit: Fit, pattern: str) -> list[int]:
    """Rollouts trained on in each checkpoint of Lightning's that was saved."""
    found = [torch.load(path, weights_only=True) for path in fit.folder.rglob(pattern)]
    return sorted(one["lit_grpo"]["policy_version"] for one in found)


def same_prompts(fit: Fit) -> bool:
    return len(fit.recorder.prompts) == 2 and len({tuple(sorted(ids)) for ids in fit.recorder.prompts}) == 1


def refused_flag(name: str, value: Any, **more: Any) -> Row:
    refused = next(one for one in REFUSED_ARGUMENTS if one.name == name)
    shown = str(value).lower() if isinstance(value, bool) else value
    typed = f"{name}: {shown}"
    return Row(typed, refused.remedy(value), lambda: {name: value, **more}, (f"--trainer.{name}", str(shown)))


def refused_callback(name: str, base: str, make: Callable[[], Any], *arguments: str) -> Row:
    cli = (f"--trainer.callbacks+={name}", *arguments)
    return Row(name, REFUSED_CALLBACKS[base][1], lambda: {"callbacks": [make()]}, cli, group="callback")


FLAGS = [
    works("fast_dev_run: true", "one rollout; nothing is written", lambda f: f.rollouts == 1 and not written(f),
          fast_dev_run=True),
    works("fast_dev_run: 2", "two rollouts; nothing is written", lambda f: f.rollouts == 2 and not written(f),
          fast_dev_run=2),
    works("limit_train_batches: 1", "so many rollouts, or that share of `data.rollouts`; the schedule of the learning "
          "rate is still that of `data.rollouts`", lambda f: f.rollouts == 1, limit_train_batches=1),
    works("limit_val_batches: 1", "so many batches of `prompts_per_rollout` questions of each set",
          lambda f: f.trainer.num_val_batches == [1] and logged(f, "val/reward"),
          HELD_OUT, limit_val_batches=1),
    works("limit_test_batches, limit_predict_batches", "as in Lightning, for `lit-grpo test` and `predict`",
          all_rollouts, limit_test_batches=1, limit_predict_batches=1),
    works("overfit_batches: 1, max_epochs: 2", "every epoch is made of the prompts of the first so many rollouts, with "
          "new completions", same_prompts, overfit_batches=1, max_epochs=2),
    works("max_epochs: 2", "an epoch is `data.rollouts` rollouts; the second goes on with new prompts",
          lambda f: f.rollouts == 2 * ROLLOUTS and not same_prompts(f), max_epochs=2),
    works("max_steps: 1", "a step is a rollout, as `trainer.global_step` is; `data.rollouts` also plans the schedule",
          lambda f: f.rollouts == 1 and f.trainer.global_step == 1, max_steps=1),
    works("min_epochs, min_steps", "as in Lightning; a monitor that stops the run wins only without them",
          all_rollouts, min_epochs=1, min_steps=1),
    works("max_time: 00:12:00:00", "ends after the rollout under way, saved",
          lambda f: f.rollouts == 1, max_time=timedelta(milliseconds=1)),
    works("log_every_n_steps: 2", "thins the loggers to rollouts 2, 4, ...; the record in the run's folder, its curves "
          "and the report have every rollout", lambda f: steps_of(f, "reward") == [2],
          log_every_n_steps=2, logger=True),
    works("log_every_n_steps: 50", "Lightning's default in Python, made for short batches: every rollout is logged",
          lambda f: steps_of(f, "reward") == [1, 2], logger=True),
    works("num_sanity_val_steps: 1", "samples and scores a few held-out questions first; the default is 0",
          all_rollouts, HELD_OUT, num_sanity_val_steps=1),
    works("num_sanity_val_steps: -1", "evaluates `data.val` before the first rollout too, logged as step 0",
          lambda f: steps_of(f, "val/reward") == [0, 1, 2], HELD_OUT, num_sanity_val_steps=-1, val_check_interval=1,
          logger=True),
    works("val_check_interval: 1", "evaluates `data.val` after every so many rollouts",
          lambda f: f.module.evaluation is not None, HELD_OUT, val_check_interval=1),
    works("check_val_every_n_epoch: null", "with it `val_check_interval` counts across epochs",
          lambda f: f.module.evaluation is not None, HELD_OUT, val_check_interval=2, check_val_every_n_epoch=None),
    works("enable_progress_bar: false", "no progress, neither drawn nor as lines", all_rollouts,
          enable_progress_bar=False),
    works("enable_model_summary: true", "Lightning's summary of the module", lambda f: "Params" in f.out,
          enable_model_summary=True),
    works("enable_checkpointing: false", "no checkpoints, nothing to resume", lambda f: not f.files("*.ckpt"),
          enable_checkpointing=False),
    works("default_root_dir: out", "runs are in `out/runs`; without it in `runs` of the current folder",
          lambda f: f.trainer.log_dir.startswith(str(f.folder / "out" / "runs")),
          default_root_dir="out", enable_checkpointing=True),
    works("logger: false", "the run has its folder all the same, without MLflow; in Python as soon as a callback "
          "writes something", lambda f: not written(f), logger=False),
    works("profiler: simple", "Lightning's table of hooks; `optimizer_step` is each step of each optimizer",
          lambda f: "optimizer_step" in f.out, profiler="simple"),
    works("detect_anomaly: true", "torch's anomaly mode", all_rollouts, detect_anomaly=True),
    works("deterministic: true, benchmark: false", "torch's switches", all_rollouts, deterministic=True,
          benchmark=False),
    works("inference_mode: false", "evaluation under `no_grad`", all_rollouts, HELD_OUT, inference_mode=False),
    works("sync_batchnorm: true", "nothing to do: language models have no batch norm", all_rollouts,
          sync_batchnorm=True),
    works("use_distributed_sampler: true", "nothing to do: the loaders share prompts out over ranks themselves",
          all_rollouts, use_distributed_sampler=True),
    works("precision: bf16-mixed", "bfloat16 passes over float32 weights; the engine has `data.engine` settings of its "
          "own. Under `strategy: fsdp` see [distributed](distributed.md)", all_rollouts, precision="bf16-mixed"),
    works("precision: 32-true", "the default", all_rollouts, precision="32-true"),
    works("strategy: auto, ddp, fsdp; devices; accelerator; num_nodes", "as in Lightning, `fsdp` being FSDP2; see "
          "[distributed](distributed.md)", all_rollouts, strategy="ddp", devices=1),
    works("plugins: [...]", "as in Lightning; one that stores checkpoints takes the place of ours", all_rollouts,
          plugins=[TorchCheckpointIO()]),
    works("enable_autolog_hparams: false", "the configuration still goes to every logger", all_rollouts,
          enable_autolog_hparams=False),
    refused_flag("gradient_clip_val", 1.0),
    refused_flag("gradient_clip_algorithm", "value"),
    refused_flag("accumulate_grad_batches", 2),
    refused_flag("reload_dataloaders_every_n_epochs", 1),
    refused_flag("precision", "bf16-true"),
    refused_flag("precision", "64-true"),
    refused_flag("precision", "16-true"),
    refused_flag("barebones", True, logger=None, enable_checkpointing=None, enable_progress_bar=None,
                 enable_model_summary=None, num_sanity_val_steps=None),
    refused_flag("strategy", "ddp_spawn", devices=2),
]  # fmt: skip

# Of these Lightning's own Trainer knows another answer in Python before there is a module: (typed, what it says).
CLI_ONLY = [
    refused_flag("strategy", "deepspeed"),
    refused_flag("strategy", "ddp_notebook"),
    refused_flag("precision", "16-mixed"),
    refused_flag("precision", "transformer-engine"),
    Row("--optimizer SGD", "`--model.optimizer.type torch.optim.SGD`", dict, ("--optimizer", "SGD")),
    Row("--lr_scheduler StepLR", "`--model.optimizer.schedule`, or `--model.optimizer.scheduler` for a class of torch",
        dict, ("--lr_scheduler", "StepLR")),
]  # fmt: skip

CALLBACKS = [
    calls("EarlyStopping(monitor: reward)", "asked after every rollout that logs the key, also within the one epoch; "
          "`patience` counts rollouts, and the end of the run names it",
          lambda: stock.EarlyStopping("reward", mode="max", patience=1, min_delta=10),
          lambda f: f.rollouts == 2 and f.callback(stock.EarlyStopping).wait_count == 1),
    calls("EarlyStopping(monitor: val/reward)", "asked after every evaluation",
          lambda: stock.EarlyStopping("val/reward", mode="max", patience=5, min_delta=10),
          lambda f: f.callback(stock.EarlyStopping).wait_count == ROLLOUTS - 1, HELD_OUT, **EVERY),
    calls("ModelCheckpoint(monitor: reward)", "compared after every rollout, in its own folder beside "
          "`RolloutCheckpoint`'s",
          lambda: stock.ModelCheckpoint("mine", monitor="reward", mode="max", save_top_k=-1),
          lambda f: saved_at(f, "mine/*.ckpt") == [1, 2], enable_checkpointing=True),
    calls("ModelCheckpoint(monitor: val/reward)", "compared after every evaluation",
          lambda: stock.ModelCheckpoint("mine", monitor="val/reward", mode="max", save_top_k=-1),
          lambda f: saved_at(f, "mine/*.ckpt") == [1, 2], HELD_OUT, enable_checkpointing=True, **EVERY),
    calls("ModelCheckpoint(every_n_train_steps: 2)", "counts rollouts, also those without anything to learn from",
          lambda: stock.ModelCheckpoint("mine", every_n_train_steps=2, save_top_k=-1),
          lambda f: saved_at(f, "mine/*.ckpt") == [2], enable_checkpointing=True),
    calls("ModelCheckpoint(train_time_interval: ...)", "saved after the first rollout that ends behind it",
          lambda: stock.ModelCheckpoint("mine", train_time_interval=timedelta(seconds=0), save_top_k=-1),
          lambda f: saved_at(f, "mine/*.ckpt") == [1, 2], enable_checkpointing=True),
    calls("LearningRateMonitor", "`lr-AdamW/pg1` and `/pg2` under the number of the rollout; `optim/lr` is there "
          "already", stock.LearningRateMonitor, lambda f: steps_of(f, "lr-AdamW/pg1") == [1, 2], logger=True),
    calls("DeviceStatsMonitor", "as in Lightning; `system/...` is there already", stock.DeviceStatsMonitor,
          lambda f: bool(csv_rows(f)), logger=True),
    calls("RichProgressBar, TQDMProgressBar", "takes the place of the bar", stock.RichProgressBar, all_rollouts,
          enable_progress_bar=True),
    calls("RichModelSummary, ModelSummary", "as in Lightning", stock.RichModelSummary, all_rollouts,
          enable_model_summary=True),
    calls("Timer(duration: ...)", "ends after the rollout under way", lambda: stock.Timer(timedelta(milliseconds=1)),
          lambda f: f.rollouts == 1),
    calls("EMAWeightAveraging, WeightAveraging", "averages after every rollout, and the averaged weights are the "
          "module's at the end; the engine samples from those that are trained", stock.EMAWeightAveraging,
          all_rollouts),
    calls("OnExceptionCheckpoint", "as in Lightning; `RolloutCheckpoint` saves on Ctrl-C, SIGTERM and stops already",
          lambda: stock.OnExceptionCheckpoint("mine"), all_rollouts, enable_checkpointing=True),
    calls("SpikeDetection", "sees the mean loss of the rollout, which says little here: a `GradientNormMonitor` clips "
          "spikes",
          # Without an absolute bound it depends on the draw whether the second loss is a spike, which ends the run.
          lambda: SpikeDetection(warmup=1, atol=1e6, exclude_batches_path="spikes/skipped.json"), all_rollouts),
    calls("ThroughputMonitor(batch_size_fn: ...)", "as in Lightning; `time/tokens_per_second` is there already",
          lambda: stock.ThroughputMonitor(batch_size_fn=lambda batch: len(batch.completions)), all_rollouts,
          logger=True, log_every_n_steps=1),
    calls("LambdaCallback, a Callback of yours", "all hooks are called; `outputs` holds the mean `loss`, and "
          "`pl_module.step_metrics` everything that the rollout logged",
          lambda: stock.LambdaCallback(on_train_batch_end=_keep_loss), lambda f: math.isfinite(_losses[-1])),
    refused_callback("LearningRateFinder", "LearningRateFinder", stock.LearningRateFinder),
    refused_callback("BatchSizeFinder", "BatchSizeFinder", stock.BatchSizeFinder),
    refused_callback("GradientAccumulationScheduler", "GradientAccumulationScheduler",
                     lambda: stock.GradientAccumulationScheduler({0: 2}),
                     "--trainer.callbacks.scheduling={0: 2}"),
    refused_callback("StochasticWeightAveraging", "StochasticWeightAveraging",
                     lambda: stock.StochasticWeightAveraging(1e-3), "--trainer.callbacks.swa_lrs=1e-3"),
    refused_callback("BackboneFinetuning", "BaseFinetuning", stock.BackboneFinetuning),
    refused_callback("ModelPruning", "ModelPruning", lambda: stock.ModelPruning("l1_unstructured", amount=0.1),
                     "--trainer.callbacks.pruning_fn=l1_unstructured", "--trainer.callbacks.amount=0.1"),
]  # fmt: skip

_losses: list[float] = []


def _keep_loss(trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
    _losses.append(float(outputs["loss"]))


def tracker(typed: str, happens: str, make: Callable[[], Any], pattern: str) -> Row:
    """A logger whose run has the record of any run, and files of its own that fit a pattern."""
    return Row(typed, happens, lambda: {"logger": make()}, check=lambda f: bool(f.files(pattern)), group="logger")


LOGGERS = [
    tracker("RunLogger (the default)", "MLflow, from a thread that never holds the run up: "
            "[tracking](tracking.md)", lambda: _run_logger(), "mlflow.db"),
    tracker("CSVLogger", "`metrics.csv`, `hparams.yaml`; the run's folder is `version_N`, which is claimed before "
            "anything is written", lambda: loggers.CSVLogger("."), "metrics.csv"),
    tracker("MLFlowLogger", "parameters by dotted names, environment, completions as a table; the run's folder is "
            "`runs/NAME`", lambda: loggers.MLFlowLogger("x", tracking_uri="sqlite:///m.db"), "m.db"),
    tracker("several, as a list", "each gets everything; the first that numbers its runs, else `runs/NAME`, is the "
            "run's folder", lambda: [loggers.CSVLogger("a"), loggers.CSVLogger("b")], "metrics.csv"),
]  # fmt: skip
OPTIONAL_LOGGERS = [
    ("tensorboard", tracker("TensorBoardLogger", "scalars, parameters (HParams), completions as text; the run's folder "
                            "is `version_N`", lambda: loggers.TensorBoardLogger("."), "events.out.*")),
    ("wandb", tracker("WandbLogger", "scalars, configuration, completions as a table; the run's folder is "
                      "`runs/NAME`", lambda: loggers.WandbLogger(offline=True), "run-*.wandb")),
]  # fmt: skip


def _run_logger() -> Any:
    from lit_grpo.tracking import RunLogger

    return RunLogger()


ALL = [*FLAGS, *CLI_ONLY, *CALLBACKS, *LOGGERS, *(row for _, row in OPTIONAL_LOGGERS)]


def table(rows: list[Row]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| You type | What happens |", "| --- | --- |"]
    for row in rows:
        happens = f"**refused**: {row.happens}" if row.refused else row.happens
        lines.append(f"| `{row.typed}` | {happens.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


TABLES = {
    "flags": [*FLAGS, *CLI_ONLY],
    "callbacks": CALLBACKS,
    "loggers": [*LOGGERS, *(row for _, row in OPTIONAL_LOGGERS)],
}
"""The tables of docs/lightning.md by the name in its marks."""


def with_tables(page: str) -> str:
    """The page with the tables between its marks made anew."""
    for name, rows in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", f"\n<!-- end: {name} -->"
        head, _, rest = page.partition(begin)
        page = head + begin + table(rows) + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    from tests.paths import ROOT

    path = ROOT / "docs" / "lightning.md"
    path.write_text(with_tables(path.read_text()))
