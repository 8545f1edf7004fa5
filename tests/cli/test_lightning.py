"""Every line of docs/lightning.md is run, in Python and, where it is refused, from the command line too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks as stock
from lightning.pytorch import loggers
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.cli.main import main
from lit_grpo.errors import UserError
from lit_grpo.run.folder import run_folder
from lit_grpo.tracking import RunLogger, RunSummary, read_metrics
from tests.cli.lightning_rows import (
    ALL,
    CALLBACKS,
    CLI_ONLY,
    FLAGS,
    HELD_OUT,
    LOGGERS,
    OPTIONAL_LOGGERS,
    ROLLOUTS,
    Fit,
    Row,
    with_tables,
)
from tests.cli.test_fit import CONFIG
from tests.paths import ROOT
from tests.tiny import Recorder, data, module

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

QUIET: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
                         "enable_progress_bar": False, "enable_model_summary": False,
                         "num_sanity_val_steps": 0}  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch, mlflow_runs):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(CONFIG)
    return tmp_path


def fit(folder: Path, row: Row, capsys: Any) -> Fit:
    capsys.readouterr()
    recorder = Recorder()
    settings = QUIET | row.python()
    settings["callbacks"] = [*settings.get("callbacks", []), recorder]
    if settings.get("logger") is True:
        # Lightning's choice depends on what is installed; the rows read tables.
        settings["logger"] = loggers.CSVLogger(folder)
    trainer = pl.Trainer(**{key: value for key, value in settings.items() if value is not None or key not in QUIET})
    model = module()
    trainer.fit(model, data(rollouts=ROLLOUTS, prompts_per_rollout=2, **row.data))
    captured = capsys.readouterr()
    return Fit(trainer, model, recorder, folder, captured.out + captured.err)


def name_of(row: Row) -> str:
    return row.typed.partition(":")[0] + ("" if ":" not in row.typed else "=" + row.typed.partition(": ")[2])


def screen(text: str) -> str:
    """The text of an error screen without its line breaks."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("row", [row for row in [*FLAGS, *CALLBACKS, *LOGGERS] if not row.refused], ids=name_of)
def test_what_works_does_what_the_page_says(place, capsys, row, caplog):
    caplog.set_level("INFO")
    done = fit(place, row, capsys)
    done.out += caplog.text
    assert row.check is not None
    assert row.check(done)


@pytest.mark.parametrize(("package", "row"), OPTIONAL_LOGGERS, ids=lambda one: getattr(one, "typed", ""))
def test_trackers_that_are_extras(place, capsys, package, row):
    tracker = pytest.importorskip(package, reason="part of the extra `trackers`")
    assert row.check(fit(place, row, capsys))
    if package == "wandb":
        # Its run is one of the process, and would take what later tests log.
        tracker.finish()


@pytest.mark.parametrize("row", [row for row in [*FLAGS, *CALLBACKS] if row.refused], ids=name_of)
def test_what_is_refused_says_what_to_type_in_python_as_on_the_command_line(place, capsys, row):
    with pytest.raises(UserError) as caught:
        fit(place, row, capsys)
    assert caught.value.remedy == row.happens
    assert main(["fit", "--config", "a.yaml", *row.cli]) == 2
    shown = screen(capsys.readouterr().err)
    assert screen(row.happens) in shown
    option = row.cli[0].partition("=")[0].rstrip("+")
    assert option.removeprefix("--") in shown, "the option that was given is named"
    assert not list(place.glob("runs/*/")), "nothing was begun"


@pytest.mark.parametrize("row", CLI_ONLY, ids=name_of)
def test_what_only_the_command_line_can_refuse(place, capsys, row):
    assert main(["fit", "--config", "a.yaml", *row.cli]) == 2
    shown = screen(capsys.readouterr().err.replace("`", ""))
    for word in screen(row.happens.replace("`", "")).split(", ")[0].split():
        assert word in shown


def test_the_page_has_these_very_lines():
    page = (ROOT / "docs" / "lightning.md").read_text()
    assert with_tables(page) == page, "python -m tests.cli.lightning_rows writes it"
    assert all(f"| `{row.typed}` |" in page for row in ALL)


def test_lightnings_complaints_name_the_option_that_was_given(place, capsys):
    assert main(["fit", "--config", "a.yaml", "--trainer.strategy", "nonsense", "--trainer.logger", "false"]) == 2
    shown = capsys.readouterr().err
    assert "--trainer.strategy nonsense" in shown
    assert "--trainer.logger" not in shown


# Checkpoints by a word.


def trainer_of(folder: Path, **changes: Any) -> pl.Trainer:
    settings = QUIET | {"default_root_dir": folder, "callbacks": [RolloutCheckpoint(every_n_rollouts=1)],
                        "enable_checkpointing": True} | changes  # fmt: skip
    return pl.Trainer(**settings)


@pytest.mark.parametrize("logger", [False, "named", "csv"])
def test_last_goes_on_in_python(tmp_path, logger):
    def make() -> Any:
        named = RunLogger(root=str(tmp_path / "runs"), run_name="mine", tracking_uri="none")
        return {"named": named, "csv": loggers.CSVLogger(tmp_path)}.get(logger, False)

    trainer_of(tmp_path, logger=make()).fit(module(), data(rollouts=1))
    again, model = trainer_of(tmp_path, logger=make()), module()
    again.fit(model, data(rollouts=3), ckpt_path="last")
    assert model.policy_version == 3
    assert again.global_step == 3
    if logger != "csv":
        (folder,) = (tmp_path / "runs").iterdir()
        assert [record["step"] for record in read_metrics(folder)] == [1, 2, 3]


def test_a_checkpoint_that_is_not_there_is_told_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_grpo.learner.models.load_model", None)
    (tmp_path / "rollout-000004.ckpt").touch()
    with pytest.raises(UserError, match="there is no checkpoint") as caught:
        trainer_of(tmp_path).fit(module(), data(rollouts=1), ckpt_path=tmp_path / "rollout-00004.ckpt")
    assert caught.value.remedy == f"did you mean {tmp_path / 'rollout-000004.ckpt'}?"


def test_last_without_any_begins_anew_and_says_so(tmp_path):
    model = module()
    with pytest.warns(UserWarning, match="the run begins anew"):
        trainer_of(tmp_path).fit(model, data(rollouts=1), ckpt_path="last")
    assert model.policy_version == 1


def ended_before_its_first_checkpoint(runs: Path, name: str) -> Path:
    """The folder of a run that was interrupted before anything was saved."""
    logger = RunLogger(root=str(runs), run_name=name, tracking_uri="none")
    logger.log_metrics({"reward": 9.0}, 1)
    logger.finalize("failed")
    (runs / name / "checkpoints").mkdir()
    return runs / name


def test_last_of_a_run_without_a_checkpoint_begins_anew_in_its_folder(place, capsys):
    folder = ended_before_its_first_checkpoint(place / "runs", "mine")
    run = ["fit", "--config", "a.yaml", "--trainer.logger.run_name", "mine", "--ckpt_path", "last"]
    assert main([*run, "--data.rollouts", "1"]) == 0
    assert "the run runs/mine was ended before its first checkpoint, and begins anew there" in screen(
        capsys.readouterr().err
    )
    assert [path.name for path in (place / "runs").iterdir() if path.is_dir() and path.name != "artifacts"] == ["mine"]
    (record,) = read_metrics(folder)
    assert record["step"] == 1
    assert record["reward"] != 9.0
    # Without the word a second run of the name gets a folder of its own, as ever.
    assert main([*run[:-2], "--data.rollouts", "1"]) == 0
    assert (place / "runs" / "mine-2").is_dir()


def test_last_of_a_run_without_a_checkpoint_in_python(tmp_path):
    folder = ended_before_its_first_checkpoint(tmp_path / "runs", "mine")
    logger = RunLogger(root=str(tmp_path / "runs"), run_name="mine", tracking_uri="none")
    with pytest.warns(UserWarning, match="ended before its first checkpoint"):
        trainer_of(tmp_path, logger=logger).fit(module(), data(rollouts=1), ckpt_path="last")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
    assert (folder / "checkpoints" / "last.ckpt").exists()


def test_last_says_that_the_newest_run_has_no_checkpoint(place, capsys):
    assert main(["fit", "--config", "a.yaml", "--trainer.logger.run_name", "old", "--data.rollouts", "1"]) == 0
    ended_before_its_first_checkpoint(place / "runs", "new")
    capsys.readouterr()
    assert main(["fit", "--config", "a.yaml", "--data.rollouts", "2", "--ckpt_path", "last"]) == 0
    shown = screen(capsys.readouterr().err)
    assert "ckpt_path: last is runs/old/checkpoints/last.ckpt; the newest run, runs/new, has no checkpoint" in shown


def test_best_is_the_best_evaluation_and_without_one_is_refused(tmp_path):
    with pytest.raises(UserError, match="no best checkpoint"):
        trainer_of(tmp_path).validate(module(), data(**HELD_OUT), ckpt_path="best")
    trainer_of(tmp_path, val_check_interval=1).fit(module(), data(rollouts=2, **HELD_OUT))
    best = next((tmp_path / "runs").glob("*/checkpoints/best.ckpt")).resolve()
    model = module()
    trainer_of(tmp_path).validate(model, data(**HELD_OUT), ckpt_path="best")
    assert model.policy_version == int(best.stem.rpartition("-")[2])


def test_last_and_best_on_the_command_line(place, capsys):
    run = ["fit", "--config", "a.yaml", "--trainer.logger.run_name", "mine", "--data.val_prompts", "AdditionPrompts"]
    assert main([*run, "--data.rollouts", "1", "--ckpt_path", "last"]) == 0
    assert "begins anew" in capsys.readouterr().err
    assert main([*run, "--data.rollouts", "2", "--ckpt_path", "last"]) == 0
    assert "ckpt_path: last is runs/mine/checkpoints/last.ckpt" in capsys.readouterr().err
    assert [record["step"] for record in read_metrics(place / "runs" / "mine")] == [1, 2]
    assert not (place / "runs" / "mine-2").exists()
    assert main(["validate", "--config", "runs/mine/config.yaml", "--ckpt_path", "best"]) == 0


# Watching keys.


@pytest.mark.parametrize("callback", [
    lambda: stock.EarlyStopping("val_reward"), lambda: stock.ModelCheckpoint(monitor="rewrd"),
])  # fmt: skip
def test_a_key_that_nothing_logs_ends_the_run_after_the_first_rollout(tmp_path, callback):
    trainer = trainer_of(tmp_path, callbacks=[callback()], enable_checkpointing=True)
    with pytest.raises(UserError, match="which nothing logs") as caught:
        trainer.fit(module(), data(rollouts=3))
    assert "reward" in (caught.value.remedy or "")
    assert trainer.lightning_module.policy_version == 1


def test_a_held_out_key_without_an_evaluation_is_refused_at_once(tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[stock.EarlyStopping("val/reward")])
    with pytest.raises(UserError, match="nothing is evaluated"):
        trainer.fit(module(), data(rollouts=3))
    assert trainer.lightning_module.policy_version == 0


def test_a_run_that_a_stock_callback_stops_says_so(tmp_path, capsys):
    stopping = stock.EarlyStopping("reward", mode="max", stopping_threshold=-1.0)
    trainer = trainer_of(tmp_path, callbacks=[stopping, RunSummary()])
    trainer.fit(module(), data(rollouts=3))
    assert "stopped early by EarlyStopping (Stopping threshold reached" in capsys.readouterr().out
    assert trainer.lightning_module.policy_version == 1


# What else a person of Lightning tries.


def test_tuners_and_own_loaders_are_refused(tmp_path):
    for method in ("lr_find", "scale_batch_size"):
        tuner = Tuner(pl.Trainer(**QUIET, default_root_dir=tmp_path))
        with pytest.raises(UserError, match="Finder"):
            getattr(tuner, method)(module(), datamodule=data())
    with pytest.raises(UserError, match="learns from rollouts"):
        pl.Trainer(**QUIET, default_root_dir=tmp_path).fit(module(), DataLoader([1, 2]))  # type: ignore[arg-type]


def test_a_run_without_a_step_advances_lightnings_step(tmp_path):
    class Uniform(stock.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            batch.reward.fill_(1.0)

    saver = stock.ModelCheckpoint(tmp_path / "mine", every_n_train_steps=1, save_top_k=-1)
    trainer = trainer_of(tmp_path, callbacks=[Uniform(), saver], max_steps=2)
    trainer.fit(module(), data(rollouts=5))
    assert trainer.lightning_module.optimizer_steps == 0
    assert trainer.global_step == 2
    assert len(list((tmp_path / "mine").glob("*.ckpt"))) == 2


def test_the_folder_is_the_runs_own_whatever_the_logger(tmp_path):
    """Two Trainers that ask at the same time get two folders, and neither is the folder they are in."""
    folders = []
    for logger in (False, False, loggers.CSVLogger(tmp_path), loggers.CSVLogger(tmp_path)):
        trainer, model = trainer_of(tmp_path, logger=logger), module()
        model.trainer = trainer
        folders.append(run_folder(trainer))
    assert len(set(folders)) == 4
    assert tmp_path not in folders
    assert [folder.parent.name for folder in folders] == ["runs", "runs", "lightning_logs", "lightning_logs"]


def test_completions_are_recorded_by_default(tmp_path):
    trainer_of(tmp_path, logger=loggers.CSVLogger(tmp_path)).fit(module(), data(rollouts=2))
    (path,) = tmp_path.rglob("completions.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["rollout"] for row in rows} == {1, 2}
    assert len(rows) == 2 * 2 * 4, "two whole groups of four, twice"
    (parameters,) = tmp_path.rglob("hparams.yaml")
    assert "objective" in parameters.read_text()
    assert "group_size: 4" in parameters.read_text()


class Kept(stock.Callback):
    """Keeps what callbacks the last run from the command line had."""

    names: tuple[str, ...] = ()

    def setup(self, trainer, pl_module, stage):
        Kept.names = tuple(type(one).__name__ for one in trainer.callbacks)


@pytest.mark.parametrize(("arguments", "there", "missing"), [
    ([], {"HealthMonitor", "CompletionTable", "FlightRecorder", "RolloutCheckpoint", "RunSummary"}, set()),
    (["--monitors", "false"], {"CompletionTable", "FlightRecorder"}, {"HealthMonitor"}),
    (["--completions.every", "0"], {"HealthMonitor"}, {"FlightRecorder"}),
    (["--trainer.callbacks+=EntropyMonitor"], {"EntropyMonitor"}, {"HealthMonitor"}),
])  # fmt: skip
def test_what_is_always_there_and_how_it_is_switched_off(place, arguments, there, missing):
    callbacks = ["--trainer.callbacks", "tests.cli.test_lightning.Kept"]
    run = ["fit", "--config", "a.yaml", *callbacks, *arguments, "--trainer.logger", "false", "--data.rollouts", "1"]
    assert main(run) == 0
    assert there <= set(Kept.names)
    assert not missing & set(Kept.names)
    (folder,) = (path for path in (place / "runs").iterdir() if path.is_dir())
    assert (folder / "completions.jsonl").exists() == ("--completions.every" not in arguments)
