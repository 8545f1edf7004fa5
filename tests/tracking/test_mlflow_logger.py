"""The logger against a real SQLite store, a real server that is killed, and servers that misbehave."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
import requests.adapters
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_grpo.errors import StopRun, UserError
from lit_grpo.tracking import RunLogger, read_metrics
from lit_grpo.tracking.mlflow_target import MAIN_CURVES, MlflowTarget
from tests.tracking.stand_in import StandIn, StandInLoader, make_trainer
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def root(mlflow_runs):
    return mlflow_runs


@pytest.fixture
def asking(monkeypatch):
    """The threads that have sent a request to a server."""
    threads, send = set(), requests.adapters.HTTPAdapter.send

    def watched(self, *args, **kwargs):
        threads.add(threading.current_thread())
        return send(self, *args, **kwargs)

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", watched)
    return threads


def folder(logger) -> Path:
    assert logger.run_dir is not None
    return logger.run_dir


def stored_run(logger):
    from mlflow.tracking import MlflowClient

    logger.flush(PATIENCE)
    client = MlflowClient(logger.tracking_uri)
    return client, client.get_run(logger.run_id)


def test_a_fit_ends_up_on_disk_and_in_mlflow(root):
    logger = RunLogger(root=str(root), experiment="exp", run_name="first", tags={"who": "me"})
    make_trainer(logger).fit(StandIn(), StandInLoader(5))

    assert logger.run_dir == root / "first"
    records = read_metrics(folder(logger))
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert [round(record["reward"], 6) for record in records] == [0, 0.1, 0.2, 0.3, 0.4]
    assert all(record["wall_time"] > 1.7e9 for record in records)

    client, run = stored_run(logger)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.tags["who"] == "me"
    assert [m.value for m in client.get_metric_history(run.info.run_id, "reward")] == pytest.approx(
        [0, 0.1, 0.2, 0.3, 0.4]
    )
    assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(root / "artifacts")
    assert logger.unsent == 0
    assert logger.delivery_report() is None

    # A long parameter is cut where it can be seen, and whole in the artifact.
    assert run.data.params["policy.path"] == "somewhere"
    assert run.data.params["note"].endswith("(cut; whole in params.json)")
    whole = client.download_artifacts(run.info.run_id, "params.json")
    assert json.loads(Path(whole).read_text())["note"] == "x" * 400


def test_a_resumed_run_goes_on_in_the_same_folder_and_mlflow_run(root):
    first = RunLogger(root=str(root), experiment="exp")
    first.log_hyperparams({"lr": 1, "same": 2})
    first.log_metrics({"reward": 0.1}, step=0)
    first.finalize("failed")

    second = RunLogger(root=str(root), experiment="exp", run_dir=str(first.run_dir))
    second.log_hyperparams({"lr": 3, "same": 2, "new": 4})
    second.log_metrics({"reward": 0.2}, step=1)
    second.finalize("success")

    assert second.run_id == first.run_id
    assert [r["reward"] for r in read_metrics(folder(first))] == [0.1, 0.2]
    client, run = stored_run(second)
    assert run.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "reward")] == [0, 1]
    assert (run.data.params["lr"], run.data.params["new"]) == ("1", "4")
    assert run.data.tags["params.changed_on_resume"] == "lr"
    assert second.unsent == 0


def test_a_run_that_is_gone_from_mlflow_becomes_a_new_one(root):
    first = RunLogger(root=str(root))
    first.log_metrics({"reward": 0.1}, step=0)
    first.finalize("success")
    stored_run(first)[0].delete_run(first.run_id)

    second = RunLogger(root=str(root), run_dir=str(first.run_dir))
    second.log_metrics({"reward": 0.2}, step=1)
    second.finalize("success")
    assert second.run_id != first.run_id
    assert stored_run(second)[1].data.metrics == {"reward": 0.2, MAIN_CURVES["reward"]: 0.2}


def test_what_an_earlier_life_could_not_send_is_sent_after_a_resume(root):
    first = RunLogger(root=str(root), patience=1)
    first.log_metrics({"reward": 0.1}, step=0)
    assert first.flush(PATIENCE)
    hidden = root / "hidden.db"
    (root / "mlflow.db").rename(hidden)
    first.log_metrics({"reward": 0.2}, step=1)
    # With the tables gone the store answers with an error.
    target = first._open()[2]
    assert isinstance(target, MlflowTarget)
    target._client = None
    (root / "mlflow.db").mkdir()
    first.finalize("success")
    assert first.unsent >= 1

    (root / "mlflow.db").rmdir()
    hidden.rename(root / "mlflow.db")
    second = RunLogger(root=str(root), run_dir=str(first.run_dir))
    second.log_metrics({"reward": 0.3}, step=2)
    second.finalize("success")
    client, run = stored_run(second)
    assert [m.step for m in client.get_metric_history(run.info.run_id, "reward")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StopRun("entropy"), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
        (SIGTERMException(), "KILLED"),
        (RuntimeError("boom"), "FAILED"),
    ],
)
def test_how_the_run_ended(root, error, status):
    class Breaks(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            raise error

    logger = RunLogger(root=str(root))
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises((type(error), SystemExit)):
            make_trainer(logger, [Breaks()]).fit(StandIn(), StandInLoader(2))
    finally:
        signal.signal(signal.SIGINT, interrupt)  # Lightning leaves it ignored
    assert stored_run(logger)[1].info.status == status


def test_a_stop_that_was_announced_ends_as_killed_with_its_reason(root):
    logger = RunLogger(root=str(root))
    logger.log_metrics({"reward": 0.0}, step=0)
    logger.mark_stopped("entropy collapse")
    logger.mark_stopped("a later reason")
    logger.finalize("success")
    run = stored_run(logger)[1]
    assert run.info.status == "KILLED"
    assert run.data.tags["stop.reason"] == "entropy collapse"


def test_metrics_mlflow_cannot_take_are_kept_on_disk(root):
    logger = RunLogger(root=str(root))
    logger.log_metrics({"clip/frac@high": 1.0, "nan": float("nan"), "inf": float("inf")}, step=0)
    logger.finalize("success")
    assert logger.unsent == 0
    assert set(stored_run(logger)[1].data.metrics) == {"clip/frac_at_high", "nan", "inf"}
    assert set(read_metrics(folder(logger))[0]) == {"step", "wall_time", "clip/frac@high", "nan", "inf"}


def test_the_address_is_read_when_the_logger_is_made(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://somewhere:5000")
    assert RunLogger(root=str(tmp_path)).tracking_uri == "http://somewhere:5000"
    assert RunLogger(root=str(tmp_path)).artifact_location is None
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    logger = RunLogger(root=str(tmp_path))
    assert logger.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert logger.artifact_location == (tmp_path / "artifacts").as_uri()
    with pytest.raises(UserError, match="plain files"):
        RunLogger(tracking_uri="file:./mlruns")


def test_nothing_is_made_before_something_is_logged(tmp_path):
    logger = RunLogger(root=str(tmp_path / "runs"))
    _ = logger.experiment  # Lightning touches it before any data is read
    logger.finalize("failed")
    assert not (tmp_path / "runs").exists()


def test_two_runs_of_one_name_get_two_folders(tmp_path):
    loggers = [RunLogger(root=str(tmp_path), run_name="same") for _ in range(3)]
    assert [folder(logger).name for logger in loggers] == ["same", "same-2", "same-3"]


def test_a_disk_that_is_full_stops_nothing(root, monkeypatch, caplog):
    from lit_grpo.tracking.spool import Spool

    def full(self, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spool, "append", full)
    logger = RunLogger(root=str(root))
    for step in range(3):
        logger.log_metrics({"reward": step}, step=step)
    logger.finalize("success")
    assert sum("cannot be written" in message for message in caplog.messages) == 1
    assert stored_run(logger)[1].data.metrics == {"reward": 2.0, MAIN_CURVES["reward"]: 2.0}


@pytest.mark.slow
def test_a_server_that_never_answers_delays_only_the_end(tmp_path, monkeypatch, caplog, asking):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, says nothing
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        logger = RunLogger(root=str(tmp_path), tracking_uri=uri, patience=3)
        for step in range(12):
            logger.log_metrics({"reward": step}, step=step)
        logger.finalize("success")
    assert asking
    assert threading.main_thread() not in asking, "the run never waits for an answer"
    assert len(read_metrics(folder(logger))) == 12
    assert f"13 records could not be sent to {uri}" in caplog.text  # twelve lines and the final status
    assert f"all are in {logger.spool_path}" in caplog.text


@pytest.mark.slow
def test_a_server_killed_in_mid_run_costs_no_step_and_no_record(root, caplog, asking):
    """The stock logger loses 495 seconds and the run here."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = f"sqlite:///{root}/mlflow.db"
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        store,
        "--port",
        str(port),
        "--workers",
        "1",
        "--artifacts-destination",
        f"{root}/served-artifacts",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        uri = f"http://127.0.0.1:{port}"
        wait_until(lambda: answers(server, f"{uri}/health"), "MLflow's server answers")
        logger = RunLogger(root=str(root), tracking_uri=uri, patience=3)
        killed = threading.Event()

        class KillsServer(Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                if batch_idx == 3:
                    assert logger.flush(PATIENCE)
                    os.killpg(server.pid, signal.SIGKILL)
                    server.wait()
                    killed.set()

        make_trainer(logger, [KillsServer()]).fit(StandIn(), StandInLoader(8))
        assert killed.is_set()
        assert threading.main_thread() not in asking, "the run never waits for an answer"
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
    assert [record["step"] for record in read_metrics(folder(logger))] == list(range(8))
    assert f"could not be sent to {uri}" in caplog.text
    assert logger.unsent == 6  # steps 3 to 7 and the status
    from mlflow.tracking import MlflowClient

    assert [m.step for m in MlflowClient(store).get_metric_history(str(logger.run_id), "reward")] == [0, 1, 2]


def answers(server, url):
    assert server.poll() is None, "the server ended by itself"
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE):
            return True
    except OSError:
        return False


def test_the_command_that_shows_a_store_survives_a_space(tmp_path):
    logger = RunLogger(root=str(tmp_path / "my runs"))
    command = logger.view_command()
    assert command is not None
    assert shlex.split(command) == ["mlflow", "ui", "--backend-store-uri", logger.tracking_uri]
