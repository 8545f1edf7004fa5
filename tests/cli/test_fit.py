"""Whole runs from the command line, in one process: layers, defaults, exit codes, resume, export."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml

from lit_grpo.callbacks import RolloutCheckpoint, request_stop
from lit_grpo.cli.main import main
from lit_grpo.errors import StopRun
from lit_grpo.rewards import Reward
from lit_grpo.tracking import read_metrics

pytestmark = pytest.mark.slow

CONFIG = """\
model:
  policy:
    tiny: {layers: 1, width: 16, heads: 2}
  optimizer: {lr: 1.0e-3}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts}
  rewards:
    - {class_path: tests.cli.test_fit.Even}
  group_size: 4
  prompts_per_rollout: 4
  rollouts: 3
  sampling: {max_new_tokens: 2}
"""
HERE = "tests.cli.test_fit"


class Even(Reward):
    """Rewards about every second answer of an untrained model, so that there is something to learn at every step."""

    def score(self, batch):
        return [float(sum(item.completion.token_ids) % 2 == 0) for item in batch]

    def final_answers(self, batch):
        return [item.text for item in batch]


class Breaks(pl.Callback):
    """Ends a run after its second rollout, in the way it is told."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx != 1:
            return
        if self.how == "monitor":
            request_stop(trainer, "entropy fell", "Breaks")
        elif self.how == "StopRun":
            raise StopRun("too many skipped steps")
        elif self.how == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.how == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        elif self.how == "Ctrl-C twice":
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        elif self.how == "error":
            raise ZeroDivisionError("boom")


class Seen(pl.Callback):
    """Lets a test look at what a run was made of."""

    trainer: Any

    def setup(self, trainer, pl_module, stage):
        Seen.trainer = trainer


@pytest.fixture
def place(tmp_path, monkeypatch, mlflow_runs):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(CONFIG)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)  # Lightning leaves Ctrl-C ignored after an interrupt


def run_folder(place) -> Path:
    (folder,) = (path for path in (place / "runs").iterdir() if (path / "run.json").exists())
    return folder


def mlflow_run(place):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{place}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("lit-grpo")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def test_a_run_leaves_everything_behind(place, capsys):
    (place / "b.yaml").write_text("data: {rollouts: 5}\ntrainer: {callbacks: [{class_path: " + HERE + ".Seen}]}\n")
    arguments = ["--config", "a.yaml", "--config", "b.yaml", "--data.rollouts=4", "--checkpoint.every_n_rollouts=2"]
    assert main(["fit", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("final reward ")
    assert out.splitlines()[-1].endswith(" over the last 4 steps")
    assert "rollout 4/4  reward" in out  # not a terminal: lines instead of a bar

    folder = run_folder(place)
    names = {path.name for path in folder.iterdir()}
    expected = {
        "checkpoints",
        "completions.json",
        "completions.jsonl",
        "config.yaml",
        "curves.png",
        "findings.jsonl",
        "flight",
        "log.txt",
        "metrics.jsonl",
        "objective.json",
        "params.json",
        "report",
        "report.html",
        "run.json",
    }
    assert names == expected
    checkpoints = ["last.ckpt", "rollout-000002.ckpt", "rollout-000004.ckpt"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == checkpoints
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["rollouts"] == 4  # the command line wins over the files
    assert config["data"]["group_size"] == 4  # layers are merged
    assert config["seed_everything"] == 0
    assert yaml.safe_load((folder / "objective.json").read_text())["recipe"] == "grpo"
    records = read_metrics(folder)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert {
        "reward",
        "policy/entropy",
        "completions/length",
        "optim/grad_norm",
        "time/generate",
        "rollout/policy_version",
    } <= records[0].keys()

    client, run = mlflow_run(place)
    assert run.info.status == "FINISHED"
    assert run.data.params["model.optimizer.lr"] == "0.001"
    assert run.data.params["objective.advantage"] == "group_std"
    assert {a.path for a in client.list_artifacts(run.info.run_id)} >= {
        "config.yaml",
        "curves.png",
        "objective.json",
        "report.html",
    }
    assert len(client.get_metric_history(run.info.run_id, "reward")) == 4

    # The list of callbacks in the file has not thrown out ours.
    kinds = [type(callback).__name__ for callback in Seen.trainer.callbacks]
    expected = {"Seen", "RolloutCheckpoint", "ReportWriter", "RunSummary", "SaveRunConfig", "RunProgress"}
    assert expected <= set(kinds)
    assert kinds.count("RolloutCheckpoint") == 1


@pytest.mark.parametrize(
    ("how", "code", "status", "title"),
    [
        ("monitor", 3, "KILLED", "stopped by Breaks: entropy fell"),
        ("StopRun", 3, "KILLED", "stopped: too many skipped steps"),
        ("SIGTERM", 143, "KILLED", "ended by SIGTERM"),
        ("Ctrl-C", 130, "KILLED", "interrupted"),
        ("Ctrl-C twice", 130, "KILLED", "interrupted"),
        ("error", None, "FAILED", "failed: ZeroDivisionError"),
    ],
)
def test_how_a_run_ends_and_goes_on(place, capsys, how, code, status, title):
    callback = f"{{class_path: {HERE}.Breaks, init_args: {{how: {how}}}}}"
    (place / "b.yaml").write_text(f"trainer: {{callbacks: [{callback}]}}\n")
    arguments = ["fit", "--config", "a.yaml", "--config", "b.yaml"]
    if code is None:
        with pytest.raises(ZeroDivisionError):  # our bug, or the user's: the traceback is wanted
            main(arguments)
    else:
        assert main(arguments) == code
    captured = capsys.readouterr()
    assert f"{title} after 2 rollouts" in captured.out
    assert captured.out.splitlines()[-1].endswith(" over the last 2 steps")
    assert "Traceback" not in captured.err
    folder = run_folder(place)
    assert (folder / "checkpoints" / "last.ckpt").resolve().name == "rollout-000002.ckpt"
    client, run = mlflow_run(place)
    assert run.info.status == status

    if how in ("StopRun", "SIGTERM", "Ctrl-C twice"):
        return  # the rest would be the same
    # The command that the summary gives.
    config = yaml.safe_load((folder / "config.yaml").read_text())
    del config["trainer"]["callbacks"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    name = f"runs/{folder.name}"
    command = ["fit", "--config", f"{name}/config.yaml", "--ckpt_path", f"{name}/checkpoints/last.ckpt"]
    assert " ".join(command) in captured.out
    assert main(command) == 0
    assert [record["step"] for record in read_metrics(run_folder(place))] == [1, 2, 3]
    client, again = mlflow_run(place)  # one run, the same
    assert (again.info.run_id, again.info.status) == (run.info.run_id, "FINISHED")
    assert len(client.get_metric_history(run.info.run_id, "reward")) == 3


def test_what_is_given_wins_over_the_checkpoint(place):
    """Lightning's own resume silently takes the checkpoint's arguments."""
    quiet = ["--trainer.logger", "false", "--checkpoint.dirpath", "c"]
    assert main(["fit", "--config", "a.yaml", *quiet, "--data.rollouts=1"]) == 0
    words = ["--ckpt_path", "c/last.ckpt", "--model.max_grad_norm=0.5", f"--trainer.callbacks+={HERE}.Seen"]
    words += ["--checkpoint.accept_changes", "model.max_grad_norm"]
    assert main(["fit", "--config", "a.yaml", *quiet, *words]) == 0
    assert Seen.trainer.lightning_module.max_grad_norm == 0.5
    assert Seen.trainer.lightning_module.policy_version == 3


def test_an_own_checkpoint_callback_takes_the_place_of_ours(place):
    (place / "b.yaml").write_text(
        "trainer:\n  logger: false\n  callbacks:\n"
        f"    - {{class_path: {HERE}.Seen}}\n"
        "    - {class_path: lit_grpo.callbacks.RolloutCheckpoint, init_args: {dirpath: mine, every_n_rollouts: 1}}\n"
    )
    assert main(["fit", "--config", "a.yaml", "--config", "b.yaml", "--data.rollouts=1"]) == 0
    (saver,) = (c for c in Seen.trainer.callbacks if isinstance(c, RolloutCheckpoint))
    assert saver.last_path == place / "mine" / "rollout-000001.ckpt"
    arguments = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", f"--trainer.callbacks+={HERE}.Seen"]
    assert main(["fit", "--config", "a.yaml", "--data.rollouts=1", *arguments]) == 0
    assert not Seen.trainer.checkpoint_callbacks


def test_environment_lies_below_files_and_files_below_the_command_line(place, monkeypatch, capsys):
    monkeypatch.setenv("LIT_GRPO_FIT__DATA__GROUP_SIZE", "9")
    monkeypatch.setenv("LIT_GRPO_FIT__DATA__ROLLOUTS", "8")
    monkeypatch.setenv("LIT_GRPO_FIT__MODEL__OPTIMIZER__LR", "0.5")
    assert main(["fit", "--config", "a.yaml", "--data.rollouts=7", "--print_config"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["data"]["group_size"], shown["data"]["rollouts"]) == (4, 7)
    assert shown["model"]["optimizer"]["lr"] == 0.001
    (place / "c.yaml").write_text(CONFIG.replace("  optimizer: {lr: 1.0e-3}\n", ""))
    assert main(["fit", "--config", "c.yaml", "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["optimizer"]["lr"] == 0.5


def test_validate_reads_a_checkpoint(place):
    assert main(["fit", "--config", "a.yaml", "--data.rollouts=1", "--trainer.logger.run_name=one"]) == 0
    (place / "v.yaml").write_text("data: {val_prompts: {class_path: lit_grpo.data.AdditionPrompts}}\n")
    arguments = ["--config", "a.yaml", "--config", "v.yaml", "--ckpt_path", "runs/one/checkpoints/last.ckpt"]
    assert main(["validate", *arguments, "--trainer.logger.run_name=two"]) == 0
    assert (place / "runs" / "two" / "config-validate.yaml").exists()
    assert not (place / "runs" / "two" / "checkpoints").exists()
    assert any("val" in key for key in read_metrics(place / "runs" / "two")[0])


def test_export_gives_the_trained_policy(place, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["fit", "--config", "a.yaml", "--trainer.logger.run_name=r", f"--trainer.callbacks+={HERE}.Seen"]) == 0
    policy = Seen.trainer.lightning_module.policy.model
    capsys.readouterr()
    assert main(["export", "--checkpoint", "runs/r", "--output", "out/model"]) == 0
    assert capsys.readouterr().out.startswith("out/model: Qwen2ForCausalLM, 0.00")
    model = AutoModelForCausalLM.from_pretrained("out/model", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained("out/model")
    ids = tokenizer("3+4=", return_tensors="pt").input_ids
    assert torch.equal(ids, Seen.trainer.lightning_module.tokenizer("3+4=", return_tensors="pt").input_ids)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, policy.eval()(ids).logits)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert [path.name for path in (place / "out").iterdir()] == ["model"]

    assert main(["export", "--checkpoint", "runs/r", "--output", "out/model", "--force", "--dtype", "bfloat16"]) == 0
    half = AutoModelForCausalLM.from_pretrained("out/model", dtype="auto")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.lm_head.weight, policy.lm_head.weight.bfloat16())


@pytest.mark.parametrize("command", ["validate", "test"])
def test_evaluation_commands_print_a_table_and_leave_every_completion(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    key = {"validate": "val", "test": "test"}[command]
    source = "class_path: lit_grpo.data.AdditionPrompts, init_args"
    layer = f"data:\n  {key}_prompts: {{{source}: {{n: 10}}}}\n"
    layer += f"  {key}: {{few: {{prompts: {{{source}: {{}}}}, limit: 3, samples: 4, greedy: true}}}}\n"
    Path("base.yaml").write_text(CONFIG)
    Path("layer.yaml").write_text(layer)
    assert main([command, "--config", "base.yaml", "--config", "layer.yaml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.startswith("set"))
    assert {"prompts", "greedy", "pass@1", "pass@4", "maj@4", "best@4/logprob", "length"} <= set(head.split())
    (folder,) = Path("runs").glob("*/evaluation")
    folder /= key
    assert [line.split()[:3] for line in lines if line.startswith(("addition ", "few "))] == [
        ["addition", "10", "1"],
        ["few", "3", "4"],
    ]
    results = json.loads((folder / "results.json").read_text())
    assert results["seed"] == 0
    assert set(results["sets"]) == {"addition", "few"}
    assert [part["greedy"] for part in results["sets"]["few"]["sampled"]] == [False, True]
    records = [json.loads(line) for line in (folder / "few.jsonl").read_text().splitlines()]
    assert len(records) == 3 * 4 + 3
    assert len({record["seed"] for record in records if not record["greedy"]}) == 12
    found = results["sets"]["few"]["metrics"]
    sampled = [record["correct"] for record in records if not record["greedy"]]
    assert found["pass@1"] == pytest.approx(sum(sampled) / 12)
    logged = read_metrics(folder.parent.parent)[-1]
    assert logged[f"{key}/few/pass@4"] == pytest.approx(found["pass@4"])
    both = [results["sets"][name]["metrics"]["reward"] for name in ("addition", "few")]
    assert logged[f"{key}/reward"] == pytest.approx(sum(both) / 2)
    assert list(Path("runs/artifacts").rglob("few.jsonl")), "in MLflow too"


def test_predict_writes_every_completion(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(CONFIG)
    given = ["--data.test_prompts", "lit_grpo.data.AdditionPrompts", "--data.test_prompts.n", "10"]
    assert main(["predict", "--config", "base.yaml", *given, "--data.eval_group_size", "2"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1].removeprefix("completions: "))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 20
    assert len({record["id"] for record in records}) == 10
    assert {"id", "question", "answer", "completion", "correct", "reward", "rewards", "finish_reason", "seed"} <= set(
        records[0]
    )
