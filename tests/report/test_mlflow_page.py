"""MLflow's own page in a real browser, at the address that a run names: the reward is on its first screen."""

import os
import subprocess
import sys
import urllib.request

import pytest

from lit_grpo.utils.ports import free_port
from tests.report.browser import MISSING, browser
from tests.waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.slow]


@pytest.fixture
def server(mlflow_runs):
    """An MLflow server on the store of this test."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{mlflow_runs}/mlflow.db",
               "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]  # fmt: skip
    with (mlflow_runs / "server.log").open("w") as log:
        # A group of its own, for the server starts workers that outlive it.
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, cwd=mlflow_runs)
    try:
        wait_until(lambda: answers(port), "MLflow answers")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait(PATIENCE)


def answers(port: int) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    except OSError:
        return False


def test_the_reward_is_on_the_first_screen_of_a_run(server, mlflow_runs, tmp_path):
    from mlflow import MlflowClient

    from lit_grpo.tracking.mlflow_target import MAIN_CURVES

    client = MlflowClient(tracking_uri=f"sqlite:///{mlflow_runs}/mlflow.db")
    experiment = client.create_experiment("e")
    run_id = client.create_run(experiment, run_name="the-run").info.run_id
    # Under both names, as a run sends them.
    for key in ("policy/advantage_abs", "clip/low", *MAIN_CURVES, *MAIN_CURVES.values()):
        for step in (1, 2, 3):
            client.log_metric(run_id, key, 0.1 * step, step=step)
    client.set_terminated(run_id)
    with browser(tmp_path / "profile") as session:
        session.call("POST", "/url", {"url": f"{server}/#/experiments/{experiment}/runs/{run_id}/model-metrics"})
        text = "return document.body.innerText"
        wait_until(lambda: MAIN_CURVES["reward"].partition("/")[0] in session.run(text), "the page shows the run")
        shown = session.run(text)
        assert "the-run" in shown
        assert shown.index(MAIN_CURVES["reward"].partition("/")[0]) < shown.index("clip")
        # Reward, held-out reward, length and entropy, in this order, and no other chart before them.
        titles = [name.partition("/")[2] for name in MAIN_CURVES.values()]
        assert sorted(titles, key=shown.index) == titles == sorted(titles)
        tops = session.run(
            f"return {titles!r}.map(title => [...document.querySelectorAll('*')].filter(e => e.innerText === title)"
            ".pop().getBoundingClientRect().top)"
        )
        assert max(tops) < session.run("return innerHeight"), "without scrolling"
