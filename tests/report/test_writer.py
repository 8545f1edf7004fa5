"""The report at the end of a fit: always there, never in the way."""

import logging

import pytest

from lit_grpo.callbacks import FlightRecorder, RolloutCheckpoint, request_stop
from lit_grpo.errors import StopRun
from lit_grpo.report import ReportWriter, page
from lit_grpo.report.run import read_folder
from lit_grpo.tracking import RunLogger, RunSummary
from tests.tracking.stand_in import StandIn, StandInLoader, make_trainer
from tests.tracking.test_summary import RaisesAt


@pytest.fixture
def logger(tmp_path, monkeypatch):
    """A run whose server cannot be reached: nothing to wait for."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_grpo.tracking.charts.PANELS", ())
    return RunLogger(root="runs", run_name="the-run", tracking_uri="http://127.0.0.1:9", patience=0.1)


def fit(logger, *callbacks, rollouts=3):
    made = [FlightRecorder(), ReportWriter(), RunSummary(), *callbacks, RolloutCheckpoint()]
    make_trainer(logger, made).fit(StandIn(), StandInLoader(rollouts))


def test_a_fit_ends_with_a_report_in_its_folder_and_in_mlflow(logger, capsys, monkeypatch):
    sent = []
    monkeypatch.setattr(RunLogger, "log_artifact", lambda self, path, folder=None: sent.append(path.name))
    fit(logger)
    html = (logger.run_dir / "report.html").read_text()
    assert "Finished after 3 rollouts." in html
    assert "answer 1" in html, "completions of the flight recorder"
    assert "report.html" in sent
    assert "report:      runs/the-run/report.html" in capsys.readouterr().out


class Stops(RaisesAt):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch:
            request_stop(trainer, "C_NL: all is lost", "HealthMonitor")


def test_a_run_that_was_stopped_says_why(logger):
    fit(logger, Stops(1, None))
    assert (
        "Stopped by HealthMonitor after 2 rollouts: C_NL: all is lost." in (logger.run_dir / "report.html").read_text()
    )


def test_a_run_that_broke_off_says_why(logger):
    with pytest.raises(ZeroDivisionError):
        fit(logger, RaisesAt(2, ZeroDivisionError("boom <b>")))
    html = (logger.run_dir / "report.html").read_text()
    assert "Broke off after 2 rollouts: ZeroDivisionError: boom &lt;b&gt;." in html
    # Read again later, the flight recorder's dump tells the same.
    assert [d["explanation"] for d in read_folder(logger.run_dir).dumps] == ["ZeroDivisionError: boom <b>"]


def test_a_run_that_a_guard_stopped_is_not_called_broken(logger):
    with pytest.raises(StopRun):
        fit(logger, RaisesAt(2, StopRun("engine and learner disagree")))
    html = (logger.run_dir / "report.html").read_text()
    assert "Stopped after 2 rollouts: engine and learner disagree." in html
    assert "✖ stopped" in html


def test_a_report_that_fails_is_said_and_no_more(logger, monkeypatch, caplog, capsys):
    monkeypatch.setattr(page, "draw_panels", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        fit(logger)
    said = [m for m in caplog.messages if "report could not be written" in m]
    assert len(said) == 1
    assert "ZeroDivisionError" in said[0]
    assert "lit-grpo report runs/the-run" in said[0]
    assert "finished after 3 rollouts" in capsys.readouterr().out


def test_nothing_is_written_of_a_run_that_trained_on_nothing(logger, caplog):
    class Breaks(StandInLoader):
        def before_yield(self, index):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(logger, [ReportWriter(), RunSummary()]).fit(StandIn(), Breaks(3))
    assert not (logger.run_dir / "report.html").exists()
    assert not [m for m in caplog.messages if "could not be written" in m]
