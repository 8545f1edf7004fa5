"""Planted secrets: none of them is in anything that a run writes or prints, and the run can be gone on with."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.paths import ROOT

pytestmark = pytest.mark.slow
PLANTED = [f"PLANTED{n}" for n in range(1, 12)]

CONFIG = """
model:
  policy:
    tiny: {{alphabet: '0123456789+=', width: 16, heads: 2, layers: 1, max_position: 24}}
    model_args: {{token: PLANTED1}}
  optimizer: {{lr: 1.0e-3}}
data:
  prompts: {{class_path: lit_grpo.data.AdditionPrompts, init_args: {{digits: 1}}}}
  rewards:
    - {{class_path: lit_grpo.rewards.AdditionReward}}
    - class_path: lit_grpo.rewards.FunctionReward
      init_args: {{function: planted_reward.score, arguments: {{api_key: PLANTED2, url: 'http://me:PLANTED3@127.0.0.1:1/x'}}, correct_threshold: null}}
  group_size: 2
  prompts_per_rollout: 2
  rollouts: 1
  sampling: {{max_new_tokens: 4}}
  engine:
    args: {{api_key: PLANTED4, hf_token: PLANTED5, nested: {{password: PLANTED6}}}}
    server: {{url: 'http://user:PLANTED7@127.0.0.1:1', env: {{HF_TOKEN: PLANTED8, ANYTHING: PLANTED9}}}}
trainer:
  accelerator: cpu
  logger:
    init_args: {{root: '{root}', run_name: r, tracking_uri: 'http://mlflow:PLANTED10@127.0.0.1:1', tags: {{token: PLANTED11}}, patience: 1}}
checkpoint: {{every_n_rollouts: 1}}
"""  # noqa: E501


def command(folder: Path, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", "lit_grpo.cli.main", *argv], cwd=folder, env=variables, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "planted_reward.py").write_text(
        "def score(text: str, api_key: str = '', url: str = '') -> float:\n"
        "    assert api_key == 'PLANTED2', api_key\n    return 0.0\n"
    )
    (folder / "c.yaml").write_text(CONFIG.format(root=folder / "runs"))
    return folder, command(folder, "fit", "--config", "c.yaml")


def test_no_secret_is_written_or_printed(finished):
    folder, done = finished
    assert done.returncode == 0, done.stderr
    assert not [p for p in PLANTED if p in done.stdout + done.stderr]
    files = [f for f in (folder / "runs").rglob("*") if f.is_file()]
    names = {f.name for f in files}
    assert {"config.yaml", "params.json", "run.json", "report.html", "last.ckpt"} <= names
    leaks = {(f.name, p) for f in files for p in PLANTED if p.encode() in f.read_bytes()}
    assert not leaks


def test_the_rest_of_the_configuration_is_there(finished):
    folder, _ = finished
    config = yaml.safe_load((folder / "runs/r/config.yaml").read_text())
    assert config["data"]["engine"]["args"]["api_key"] == "**masked**"
    assert config["data"]["engine"]["server"]["url"] == "http://**masked**@127.0.0.1:1"
    assert config["data"]["rewards"][1]["init_args"]["arguments"]["url"] == "http://**masked**@127.0.0.1:1/x"


@pytest.mark.parametrize("name", ["config.yaml", "params.json", "run.json"])
def test_others_on_the_machine_cannot_read_it(finished, name):
    folder, _ = finished
    assert stat.S_IMODE((folder / "runs/r" / name).stat().st_mode) == 0o600


def test_going_on_needs_the_secrets_again(finished):
    folder, _ = finished
    ckpt = ["--ckpt_path", "runs/r/checkpoints/last.ckpt", "--data.rollouts", "2"]
    without = command(folder, "fit", "--config", "runs/r/config.yaml", *ckpt)
    assert without.returncode == 2
    assert "was masked" in without.stderr
    assert "secrets.yaml" in without.stderr
    # A file of one's own behind that of the run; what stands under env comes from the environment by its name.
    own = yaml.safe_load((folder / "c.yaml").read_text())
    engine = {"args": own["data"]["engine"]["args"], "server": {"url": own["data"]["engine"]["server"]["url"]}}
    secrets = {
        "model": {"policy": {"model_args": own["model"]["policy"]["model_args"]}},
        "data": {"rewards": own["data"]["rewards"], "engine": engine},
        "trainer": {"logger": own["trainer"]["logger"]},
    }
    (folder / "secrets.yaml").write_text(yaml.safe_dump(secrets))
    done = command(
        folder, "fit", "--config", "runs/r/config.yaml", "--config", "secrets.yaml", *ckpt,
        HF_TOKEN="PLANTED8", ANYTHING="PLANTED9",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not [p for p in PLANTED if p in done.stdout + done.stderr]


def test_an_error_screen_quotes_no_secret(finished):
    folder, _ = finished
    text = CONFIG.format(root=folder / "runs").replace("api_key: PLANTED4", "api_key: PLANTED4, api_key: PLANTED4")
    (folder / "bad.yaml").write_text(text)
    for argv in (
        ["--config", "bad.yaml"],
        ["--config", "c.yaml", "--data.engine.args.api_kee.x", "1", "--data.engine.server.token", "PLANTED1"],
        ["--config", "c.yaml", "--trainer.logger.tracking_uri", "file://me:PLANTED2@x"],
        ["--config", "c.yaml", "--model.policy.dtype", "http://me:PLANTED3@x"],
    ):
        # With the traceback, in which the screen is too.
        done = command(folder, "fit", *argv, LIT_GRPO_DEBUG="1")
        assert done.returncode == 2
        assert not [p for p in PLANTED if p in done.stdout + done.stderr], done.stderr
