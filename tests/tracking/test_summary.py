"""The end of a run as a person sees it."""

import signal
from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml

from lit_grpo.callbacks import RolloutCheckpoint, request_stop
from lit_grpo.errors import StopRun
from lit_grpo.tracking import RunLogger, RunSummary
from lit_grpo.tracking.charts import History, draw_overview
from lit_grpo.tracking.save_config import SaveRunConfig
from tests import tiny
from tests.tracking.stand_in import StandIn, StandInData, StandInLoader, make_trainer


class RaisesAt(pl.Callback):
    def __init__(self, batch, error):
        self.batch, self.error = batch, error

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch:
            raise self.error


@pytest.fixture
def logger(tmp_path, monkeypatch):
    """A run whose server cannot be reached: nothing to wait for, and that is shown too."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.chdir(tmp_path)
    return RunLogger(root="runs", run_name="the-run", tracking_uri="http://127.0.0.1:9", patience=1)


def fit(logger, rollouts, *callbacks):
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        make_trainer(logger, [RunSummary(), *callbacks, RolloutCheckpoint()]).fit(StandIn(), StandInLoader(rollouts))
    finally:
        signal.signal(signal.SIGINT, interrupt)


def test_a_finished_run(logger, capsys, caplog):
    fit(logger, 12)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "final reward 0.650 over the last 10 steps"  # mean of 0.2 ... 1.1
    text = "\n".join(lines)
    assert "Run the-run finished after 12 rollouts" in text
    assert "folder:      runs/the-run" in text
    assert "curves:      runs/the-run/curves.png" in text
    assert "checkpoint:  runs/the-run/checkpoints/rollout-000012.ckpt (after rollout 12)" in text
    assert "MLflow:      http://127.0.0.1:9/#/runs" in text
    # 12 steps, the parameters, their whole text and the curves; the final status comes later, and is not said again.
    assert "15 records could not be sent to http://127.0.0.1:9" in text
    assert "all are in" in text
    assert not any("records could not be sent" in message for message in caplog.messages)
    assert [line.strip() for line in lines if line.startswith("  reward ")] == [
        "reward 1: 0+0= -> answer 1",
        "reward 0: 0+0= -> answer 0",
        "reward 0: 1+1= -> answer 2",
    ]
    assert (logger.run_dir / "curves.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (StopRun("too many skipped steps"), "stopped: too many skipped steps"),
        (RuntimeError("boom"), "failed: RuntimeError"),
    ],
)
def test_a_run_that_was_broken_off_says_how_to_go_on(logger, capsys, error, how):
    (logger.run_dir / "config.yaml").write_text("")
    with pytest.raises((type(error), SystemExit)):
        fit(logger, 12, RaisesAt(3, error))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "final reward 0.150 over the last 4 steps"
    assert f"Run the-run {how} after 4 rollouts" in lines
    assert "  checkpoint:  runs/the-run/checkpoints/rollout-000004.ckpt (after rollout 4)" in lines
    command = "lit-grpo fit --config runs/the-run/config.yaml --ckpt_path runs/the-run/checkpoints/last.ckpt"
    assert f"  go on:       {command}" in lines


def test_a_run_interrupted_before_its_first_rollout_says_that_nothing_was_saved(logger, capsys):
    class Interrupts(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(logger, 2, Interrupts())
    captured = capsys.readouterr()
    assert "lit-grpo: interrupted before the first rollout ended; nothing was saved" in captured.err
    assert "interrupted after" not in captured.out


def test_a_run_stopped_by_a_monitor_names_it(logger, capsys):
    class Monitor(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                request_stop(trainer, "entropy fell below 0.1", "EntropyMonitor")

    fit(logger, 12, Monitor())
    out = capsys.readouterr().out
    assert "Run the-run stopped by EntropyMonitor: entropy fell below 0.1 after 2 rollouts" in out
    assert out.endswith("final reward 0.050 over the last 2 steps\n")


def test_nothing_is_said_of_a_run_that_never_began(logger, capsys):
    class Breaks(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError):
        fit(logger, 12, Breaks())
    out = capsys.readouterr().out
    assert out.startswith("\nRun the-run\n  devices:     CPU")
    assert " after " not in out
    assert "reward" not in out


def test_a_resumed_run_shows_the_whole_history(tmp_path, capsys):
    def run(rollouts, ckpt_path=None):
        checkpoint = RolloutCheckpoint(dirpath=str(tmp_path / "checkpoints"))
        trainer = make_trainer(False, [RunSummary(), checkpoint], default_root_dir=str(tmp_path))
        trainer.fit(StandIn(), datamodule=StandInData(rollouts), ckpt_path=ckpt_path)
        return capsys.readouterr().out

    run(6)
    out = run(8, str(tmp_path / "checkpoints" / "last.ckpt"))
    assert "goes on after rollout 6" in out
    assert "after 8 rollouts" in out
    assert out.endswith("final reward 0.350 over the last 8 steps\n")


def test_the_overview_takes_gaps_missing_metrics_and_one_step():
    nan = float("nan")
    one = draw_overview(History([1], {"reward": [0.5]}), "one")
    metrics = {"reward": [nan] * 20 + [1.0] * 20, "policy/entropy": [float("inf")] * 40}
    gaps = draw_overview(History(list(range(40)), metrics), "gaps")
    assert all(png[:4] == b"\x89PNG" and len(png) > 5000 for png in (one, gaps))
    assert one != gaps


def test_what_no_reward_scored_is_no_part_of_it():
    nan, summary = float("nan"), RunSummary()
    summary.load_state_dict({"steps": [1, 2, 3], "metrics": defaultdict(list, reward=[1.0, nan, 0.5])})
    summary.on_train_batch_start(None, None, tiny.rollout([nan, 1.0, nan, 0.0], [1] * 4, 4), 0)  # type: ignore[arg-type]
    assert summary.final_reward() == (0.75, 2)
    assert [row.reward for row in summary.samples()] == [1.0, 0.0]


class FakeParser:
    def __init__(self, text):
        self.text = text

    def dump(self, config, skip_unset, skip_validation):
        return self.text


class FakeConfig(dict):
    def as_dict(self):
        return dict(self)


def test_the_configuration_is_kept_and_an_earlier_one_too(logger):
    class Objective:
        def describe(self):
            return {"recipe": "dapo", "clip_high": 0.28}

    def run(text, learning_rate):
        module = StandIn()
        object.__setattr__(module, "objective", Objective())
        parser: Any = FakeParser(text)
        saver = SaveRunConfig(parser, FakeConfig(model={"optimizer": {"lr": learning_rate}}))
        make_trainer(logger, [saver]).fit(module, StandInLoader(1))

    run("lr: 1\n", 1)
    run("lr: 1\n", 1)
    run("lr: 2\n", 2)
    folder = logger.run_dir
    assert sorted(path.name for path in folder.glob("config*")) == ["config-1.yaml", "config.yaml"]
    assert (folder / "config-1.yaml").read_text() == "lr: 1\n"
    assert (folder / "config.yaml").read_text() == "lr: 2\n"
    assert yaml.safe_load((folder / "objective.json").read_text()) == {"recipe": "dapo", "clip_high": 0.28}
    params = yaml.safe_load((folder / "params.json").read_text())
    assert params["model.optimizer.lr"] == "2"
    assert params["objective.clip_high"] == "0.28"
