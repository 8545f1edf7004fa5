"""A sweep: Optuna tries learning rates and recipes, hopeless trials are cut, and one page compares the runs.

    pip install 'lit-grpo[sweep]' && python docs/examples/sweep_optuna.py

In MLflow every trial is a run below that of the sweep.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optuna
from mlflow import MlflowClient

from lit_grpo import LitGRPO, RolloutDataModule
from lit_grpo.data import AdditionPrompts
from lit_grpo.report import read_folder, write_comparison
from lit_grpo.rewards import ExactMatch
from lit_grpo.tracking import RunLogger


class Prune(pl.Callback):
    """Tells Optuna of every rollout's reward, and ends a trial that Optuna gives up."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial, self.pruned = trial, False

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        self.trial.report(pl_module.step_metrics["reward"], trainer.global_step)
        if self.trial.should_prune():
            self.pruned = trainer.should_stop = True
            trainer.logger.mark_stopped("Optuna pruned the trial")


def main(trials: int = 8, rollouts: int = 40, folder: str = "runs") -> optuna.Study:
    """Search for the best reward at the end of a run; returns the study."""
    store = f"sqlite:///{Path(folder).absolute()}/mlflow.db"
    Path(folder).mkdir(parents=True, exist_ok=True)
    client = MlflowClient(store)
    found = client.get_experiment_by_name("sweep")
    experiment = found.experiment_id if found else client.create_experiment("sweep")
    parent = client.create_run(experiment, run_name="sweep").info.run_id

    def objective(trial: optuna.Trial) -> float:
        pl.seed_everything(0)
        optimizer = {"lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True)}
        recipe = trial.suggest_categorical("recipe", ["grpo", "dr_grpo", "rloo"])
        module = LitGRPO(policy={"tiny": {"width": 64}}, objective=recipe, optimizer=optimizer)
        limits = {"rollouts": rollouts, "group_size": 16, "sampling": {"max_new_tokens": 3}}
        data = RolloutDataModule(AdditionPrompts(digits=1), [ExactMatch()], **limits)
        tags = {"mlflow.parentRunId": parent}
        logger = RunLogger(folder, "sweep", f"trial-{trial.number}", tracking_uri=store, tags=tags)
        prune = Prune(trial)
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        pl.Trainer(max_epochs=1, accelerator="cpu", logger=logger, callbacks=[prune], **quiet).fit(module, data)
        trial.set_user_attr("folder", str(logger.run_dir))
        if prune.pruned:
            raise optuna.TrialPruned
        return module.step_metrics["reward"]

    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=3))
    study.optimize(objective, n_trials=trials)
    for name, value in study.best_params.items():
        client.log_param(parent, name, value)
    client.log_metric(parent, "reward", study.best_value)
    client.set_terminated(parent)
    page = write_comparison([read_folder(Path(t.user_attrs["folder"])) for t in study.trials], Path(folder) / "sweep")
    print(f"best: {study.best_params}, reward {study.best_value:.2f}; all trials: {page}")
    return study


if __name__ == "__main__":
    main()
