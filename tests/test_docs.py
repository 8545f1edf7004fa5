"""What the README and the documents say is so: they are run, not read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_grpo.objectives import ObjectiveConfig
from tests import tiny
from tests.paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_embedding_example_runs_and_is_short(capsys):
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found
    code = found.group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    exec(compile(code, "README.md", "exec"), {})
    assert 0.0 <= float(capsys.readouterr().out.splitlines()[-1]) <= 1.0


def test_every_config_is_in_the_readme_and_every_path_in_the_readme_exists():
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        assert f"configs/{path.name}" in README
    for target in re.findall(r"\]\(([^)#*]+)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), f"README links to {target}"
    for target in re.findall(r"\b((?:scripts|configs|docs)/[\w./-]+\w)", README):
        assert (ROOT / target).exists(), f"README names {target}"


def configs() -> list[Path]:
    return sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", configs(), ids=lambda path: path.stem)
def test_every_config_is_accepted_by_the_command_line(path, capsys, monkeypatch):
    from lit_grpo.cli.main import main

    monkeypatch.chdir(ROOT)
    code: Any
    try:
        code = main(["fit", "--config", str(path), "--print_config=skip_null"])
    except SystemExit as done:
        code = done.code
    printed = yaml.safe_load(capsys.readouterr().out)
    assert not code
    given = yaml.safe_load(path.read_text())["data"]
    assert printed["data"]["rollouts"] == given.get("rollouts", 100)


def test_every_logged_key_is_documented():
    documented = (ROOT / "docs/metrics.md").read_text() + (ROOT / "docs/objectives.md").read_text()
    names = set(re.findall(r"`([\w/*<>]+)`", documented))
    names |= {"reward/even_reward", "reward_errors/timeout_frac/even_reward", "sampler_mismatch/logprob_abs_diff_max"}
    names |= {"sampler_mismatch/learner_perplexity", "sampler_mismatch/sampler_perplexity"}
    module = tiny.module(objective=ObjectiveConfig(entropy_coef=0.01))
    tiny.trainer().fit(module, datamodule=tiny.data(rollouts=1))
    shorts = {name.split("/")[-1] for name in names if "/" in name} | {name for name in names if "/" not in name}
    for key in module.step_metrics:
        if key.startswith("loss/"):
            continue
        assert key in names or key.split("/")[-1] in shorts, f"{key} is logged and not documented"
