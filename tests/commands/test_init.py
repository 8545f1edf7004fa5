"""`lit-grpo init`: what it writes passes its own test and trains, and nothing is overwritten."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_grpo.cli.main import BAD_INPUT, DONE, main
from tests.paths import ROOT
from tests.waiting import PATIENCE

FIVE = ["README.md", "config.yaml", "data.jsonl", "reward.py", "test_reward.py"]


@pytest.fixture
def project(tmp_path, monkeypatch, capsys) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my sums"]) == DONE
    assert sorted(path.name for path in (tmp_path / "my sums").iterdir()) == FIVE
    return tmp_path / "my sums"


def in_project(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=PATIENCE
    )  # fmt: skip


@pytest.mark.slow
def test_its_test_passes_and_notices_a_reward_that_is_wrong(project):
    passed = in_project(project, "pytest", "-q", "-p", "no:cacheprovider")
    assert passed.returncode == 0, passed.stdout
    assert "3 passed" in passed.stdout
    reward = project / "reward.py"
    reward.write_text(reward.read_text().replace("else 0.0", "else 0.5"))
    assert in_project(project, "pytest", "-q", "-p", "no:cacheprovider").returncode == 1


@pytest.mark.slow
def test_it_trains_at_once(project, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = in_project(project, "lit_grpo", "fit", "--config", "config.yaml", "--data.rollouts", "2")
    assert done.returncode == 0, done.stderr
    (metrics,) = project.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [row["reward/right_sum"] for row in rows if "reward/right_sum" in row]
    assert len(rewards) == 2
    assert all(0 <= value <= 1 for value in rewards)


def test_it_says_what_to_type_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["init", "my sums"])
    said = [line.partition("#")[0].strip() for line in capsys.readouterr().out.splitlines()]
    assert "cd 'my sums'" in said
    assert "lit-grpo fit --config config.yaml" in said


def test_an_empty_folder_and_this_one_are_filled(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "."]) == DONE
    assert sorted(path.name for path in tmp_path.iterdir()) == FIVE
    assert "cd " not in capsys.readouterr().out
    assert (tmp_path / "README.md").read_text().startswith(f"# {tmp_path.name}\n")


def test_a_folder_that_is_not_empty_stays_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "thesis.tex").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, words in (("sums", "is not empty"), ("file", "no folder"), ("file/below", "cannot be written")):
        assert main(["init", name]) == BAD_INPUT
        assert words in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "sums").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_real_model_is_named_in_the_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / 'a "model": #1'
    folder.mkdir()
    for given, named in ((folder.name, str(folder)), ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct")):
        name = "local" if given == folder.name else "hub"
        assert main(["init", name, "--model", given]) == DONE
        config = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        assert config["model"]["policy"] == {"path": named}
        first = json.loads((tmp_path / name / "data.jsonl").read_text().splitlines()[0])
        assert first["question"].startswith("What is 0 + 0?")


def test_a_model_folder_that_is_missing_is_told_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for given in ("./nowhere", "/no/where", "a/b/c", " "):
        assert main(["init", "sums", "--model", given]) == BAD_INPUT
        assert "--model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", [None, "models/any"])
def test_the_command_line_accepts_what_is_written(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "sums", *([] if model is None else ["--model", model])]) == DONE
    monkeypatch.chdir(tmp_path / "sums")
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        raise SystemExit(main(["fit", "--config", "config.yaml", "--print_config=skip_null"]))
    assert not done.value.code
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["data"]["rewards"][0]["init_args"]["function"] == "reward.right_sum"


def test_python_m_answers_as_the_command_does():
    for words in (["--help"], ["--version"], ["init", "--help"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "lit_grpo", *words],
            capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT,
        )  # fmt: skip
        assert done.returncode == 0
        assert "lit-grpo" in done.stdout
        # The start is quick because of this, whatever else the machine does.
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert not loaded & {"torch", "lightning", "jsonargparse", "transformers", "mlflow", "yaml"}
