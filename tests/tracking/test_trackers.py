"""Whatever tracker a run has, it gets the same: parameters, completions, environment, and one number for a rollout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.errors import UserError
from lit_grpo.tracking import CompletionTable, RunLogger, RunSummary, read_metrics
from lit_grpo.tracking.completions import read_rows
from lit_grpo.tracking.environment import environment_tags, git_tags
from lit_grpo.tracking.registry import check_run, register
from scripts.screenshots import wandb_contents
from tests.tiny import data, module
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HELD_OUT = {"val": {"sums": {"prompts": [{"question": "1+1=", "answer": "2"}]}}}


def fit(folder: Path, logger: Any, *, rollouts: int = 2, ckpt_path: str | None = None, **changes: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=logger, default_root_dir=folder, enable_progress_bar=False,
        enable_model_summary=False, val_check_interval=1, num_sanity_val_steps=0,
        callbacks=[RolloutCheckpoint(every_n_rollouts=1), RunSummary()],
    )  # fmt: skip
    trainer.fit(module(), data(rollouts=rollouts, **(HELD_OUT | changes)), ckpt_path=ckpt_path)
    return trainer


def run_of(uri: str, experiment: str) -> tuple[Any, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    newest = client.search_runs([found.experiment_id], order_by=["attributes.start_time DESC"])[0]
    return client, client.get_run(newest.info.run_id)


def test_mlflow_has_the_whole_run(tmp_path, mlflow_runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(tmp_path, RunLogger(checkpoints="best", tracking_uri=f"sqlite:///{mlflow_runs}/mlflow.db"))
    client, run = run_of(f"sqlite:///{mlflow_runs}/mlflow.db", "lit-grpo")
    assert run.data.params["model.optimizer.lr"] == "0.01"
    assert run.data.params["data.group_size"] == "4"
    assert run.data.params["data.sampling.max_new_tokens"] == "5"
    main = sorted(key for key in run.data.metrics if key.startswith("1 main/"))
    assert main == ["1 main/1 reward", "1 main/2 reward held out", "1 main/3 length", "1 main/4 entropy"]
    assert sorted(run.data.metrics)[: len(main)] == main, "they come first"
    for key in ("reward", "val/reward", "1 main/1 reward"):
        assert [point.step for point in client.get_metric_history(run.info.run_id, key)] == [1, 2], key
    assert {"env.torch", "env.host", "mlflow.user", "mlflow.source.name"} <= run.data.tags.keys()
    inputs = {one.dataset.name: one.tags[0].value for one in run.inputs.dataset_inputs}
    assert inputs == {"train": "training", "val/sums": "validation"}
    (model,) = run.inputs.model_inputs
    assert client.get_logged_model(model.model_id).params["dtype"] == "float32"
    artifacts = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"checkpoints", "completions.json", "curves.png"} <= artifacts
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "completions.json")).read_text())
    assert table["columns"][:4] == ["rollout", "prompt", "answer", "completion"]
    assert {row[0] for row in table["data"]} == {1, 2}
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "completions.json", "type": "table"}]


def test_system_metrics_are_logged_where_psutil_is(tmp_path):
    pytest.importorskip("psutil", reason="psutil is an extra of MLflow's system metrics")
    fit(tmp_path, CSVLogger(tmp_path))
    records = read_metrics(tmp_path / "lightning_logs" / "version_0")
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["system/process_memory_megabytes"] > 50 for record in records)


def test_lightnings_mlflow_logger_gets_parameters_completions_and_environment(tmp_path, mlflow_runs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{mlflow_runs}/mlflow.db"
    fit(tmp_path, MLFlowLogger("theirs", tracking_uri=uri, artifact_location=(tmp_path / "a").as_uri()))
    client, run = run_of(uri, "theirs")
    assert run.data.params["model.optimizer.lr"] == "0.01"
    assert "env.torch" in run.data.tags
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "completions.json")).read_text())
    assert len(table["data"]) == 2 * 2 * 4
    assert [point.step for point in client.get_metric_history(run.info.run_id, "reward")] == [1, 2]


def test_tensorboard_gets_scalars_parameters_and_completions(tmp_path):
    pytest.importorskip("tensorboard", reason="part of the extra `trackers`")
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fit(tmp_path, TensorBoardLogger(tmp_path))
    folder = tmp_path / "lightning_logs" / "version_0"
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2]
    assert [event.step for event in events.Tensors("completions/text_summary")] == [1, 2]
    assert yaml.safe_load((folder / "hparams.yaml").read_text())["model.optimizer.lr"] == 0.01


def test_wandb_gets_configuration_and_completions(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="part of the extra `trackers`")
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    trainer = fit(tmp_path, logger)
    assert logger.experiment.config["model"]["optimizer"]["lr"] == 0.01
    logger.experiment.finish()
    assert len(list(tmp_path.rglob("completions_*.table.json"))) == 2
    # What its server would show, from the file that would be sent there.
    # Its process writes that file, and may do so after `finish`.
    wait_until(lambda: wandb_contents(tmp_path)["rollouts"] == 2, "both rollouts in the file")
    contents = wandb_contents(tmp_path)
    assert {"reward", "val/reward", "completions/length", "policy/entropy"} <= set(contents["keys"])
    assert {"model", "data"} <= set(contents["configuration"])
    assert contents["tables"] == 2
    assert Path(str(trainer.log_dir)) is not None
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "metrics.jsonl").exists()


def test_a_tracker_that_refuses_never_ends_a_run(tmp_path, caplog, monkeypatch):
    def refuse(self: Any, params: Any, *args: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(CSVLogger, "log_hyperparams", refuse)
    trainer = fit(tmp_path, CSVLogger(tmp_path))
    assert trainer.lightning_module.policy_version == 2
    assert "CSVLogger takes no parameters: ConnectionError" in caplog.text


def test_a_run_from_anothers_checkpoint_is_its_child(tmp_path, mlflow_runs):
    uri = f"sqlite:///{mlflow_runs}/mlflow.db"
    fit(tmp_path, RunLogger(root=str(mlflow_runs), run_name="first"))
    parent = run_of(uri, "lit-grpo")[1]
    checkpoint = mlflow_runs / "first" / "checkpoints" / "last.ckpt"
    fit(tmp_path, RunLogger(root=str(mlflow_runs), run_name="second"), rollouts=3, ckpt_path=str(checkpoint))
    child = run_of(uri, "lit-grpo")[1]
    assert child.data.tags["mlflow.runName"] == "second"
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    # The run itself, by its name or without one, is no other.
    fit(tmp_path, RunLogger(root=str(mlflow_runs)), rollouts=4, ckpt_path=str(checkpoint))
    assert [record["step"] for record in read_metrics(mlflow_runs / "first")] == [1, 2, 3, 4]


def test_completions_follow_a_run_that_goes_back(tmp_path):
    table = CompletionTable(every=1, groups=1)
    rows = {"prompts": [SimpleNamespace(id="p", question="q|<b>", answer_column="a")], "group_size": 1, "judged": None,
            "correct": None, "texts": ["t"], "reward": [float("nan")], "rewards": {},
            "completions": [SimpleNamespace(token_ids=(1,), truncated=False)]}  # fmt: skip
    loop = SimpleNamespace(_batches_that_stepped=0)
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=loop), is_last_batch=False, should_stop=False, loggers=[]
    )
    table._path = tmp_path / "completions.jsonl"
    for rollout in (1, 2, 3, 2):
        loop._batches_that_stepped = rollout
        table.on_train_batch_end(trainer, None, None, SimpleNamespace(**rows), 0)  # type: ignore[arg-type]
    found = read_rows(tmp_path / "completions.jsonl")
    assert [row["rollout"] for row in found] == [1, 2]
    assert found[0]["reward"] is None, "a completion that no reward scored"


@pytest.mark.parametrize(("name", "value"), [("every", -1), ("groups", 0)])
def test_numbers_of_the_table_have_bounds(name, value):
    with pytest.raises(UserError, match=name):
        CompletionTable(**{name: value})


def test_the_state_of_the_code_is_noted(tmp_path):
    def git(*arguments: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *names, *arguments], check=True, capture_output=True)

    assert git_tags(tmp_path) == {}
    git("init", "-b", "trunk")
    (tmp_path / "code.py").write_text("a = 1")
    git("add", "-A")
    git("commit", "-m", "first")
    git("remote", "add", "origin", "https://user:password@example.org/code.git")
    (tmp_path / "code.py").write_text("a = 2")
    tags = git_tags(tmp_path)
    assert len(tags["mlflow.source.git.commit"]) == 40
    assert tags["mlflow.source.git.branch"] == "trunk"
    assert tags["mlflow.source.git.repoURL"] == "https://example.org/code.git"
    assert tags["git.changed_files"] == "1"
    assert environment_tags()["env.python"].startswith("3.")


def test_a_model_becomes_the_next_version_of_its_name(tmp_path, mlflow_runs):
    fit(tmp_path, RunLogger(root=str(mlflow_runs), run_name="mine"))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    address, run_id = check_run(mlflow_runs / "mine")
    assert [register(tmp_path / "hf", "small", address, run_id) for _ in range(2)] == [1, 2]
    client, _ = run_of(address, "lit-grpo")
    version = client.get_model_version("small", "2")
    assert version.run_id == run_id
    assert (Path(version.source.removeprefix("file://")) / "config.json").exists()
    with pytest.raises(UserError, match="no folder of a run"):
        check_run(tmp_path / "hf")
