"""What a person names in a configuration is found: classes by their bare names, rewards that lie beside the file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lit_grpo.cli.main import main

CONFIG = """\
model: {policy: {tiny: {width: 16, heads: 2, layers: 1}}}
data:
  prompts: {class_path: AdditionPrompts, init_args: {digits: 1}}
  rewards:
    - {class_path: ExactMatch}
    - {class_path: FunctionReward, init_args: {function: beside_the_file.short, correct_threshold: null}}
  group_size: 2
  prompts_per_rollout: 2
  rollouts: 1
  sampling: {max_new_tokens: 2}
trainer:
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  callbacks: [{class_path: HealthMonitor, init_args: {monitors: [{class_path: EntropyMonitor}]}}]
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with a reward beside it, and another folder to type from."""
    (tmp_path / "project").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "project" / "config.yaml").write_text(CONFIG)
    (tmp_path / "project" / "beside_the_file.py").write_text("def short(text):\n    return float(len(text) < 2)\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(Path.cwd())])
    return tmp_path / "project" / "config.yaml"


def test_bare_names_and_a_reward_beside_the_configuration_train_from_another_folder(elsewhere, capsys):
    assert main(["fit", "--config", str(elsewhere)]) == 0, capsys.readouterr().err
    # The run is where the person is, not where the configuration lies.
    assert [path.name for path in elsewhere.parent.iterdir() if path.name not in ("__pycache__",)].count("runs") == 0


def test_a_name_of_another_library_is_told_its_key(elsewhere, capsys):
    assert main(["fit", "--config", str(elsewhere), "--data.num_generations", "4"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "there is no option --data.num_generations" in shown
    assert "num_generations is --data.group_size here" in shown


def test_a_misspelt_bare_name_is_told_the_class(elsewhere, capsys):
    elsewhere.write_text(CONFIG.replace("ExactMatch", "ExactMach"))
    assert main(["fit", "--config", str(elsewhere)]) == 2
    assert "did you mean lit_grpo.rewards.ExactMatch?" in " ".join(capsys.readouterr().err.split())


def test_without_any_configuration_the_screen_says_what_to_type(elsewhere, capsys):
    assert main(["fit"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "`lit-grpo fit` is given no configuration" in shown
    assert "lit-grpo fit --config FILE" in shown
    # Who has said something is answered about that.
    assert main(["fit", "--data.temperature", "1"]) == 2
    assert "there is no option --data.temperature" in capsys.readouterr().err


BROKEN = {
    "does_not_compile": ("import sys\n\nclass Mine(object)\n    pass\n", "no valid Python: expected ':'", 3),
    "fails": ("value = 1\n1 / 0\n", "fails: ZeroDivisionError: division by zero", 2),
    "needs": ("import sys\nraise ValueError('no key')\n", "fails: ValueError: no key", 2),
    "leaves": ("import sys\nsys.exit(0)\n", "SystemExit: 0", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize(
    "typed",
    [
        "--data.rewards=[{{class_path: {0}}}]",
        "--data.rewards=[{0}]",
        "--data.rewards+={0}",
        "--data.prompts={{class_path: {0}}}",
        "--data.prompts={0}",
        "--trainer.callbacks+={0}",
        "--trainer.callbacks+={{class_path: HealthMonitor, init_args: {{monitors: [{{class_path: {0}}}]}}}}",
        "--trainer.logger={0}",
        "--data.engine.custom_engine={0}",
        None,
    ],
)
def test_a_module_of_the_persons_own_that_breaks_is_named_with_its_line(
    elsewhere, tmp_path, monkeypatch, capsys, name, typed
):
    module = f"of_my_own_{name}"
    text, words, line = BROKEN[name]
    file = tmp_path / "project" / f"{module}.py"
    file.write_text(text)
    monkeypatch.delitem(sys.modules, module, raising=False)
    if typed is None:
        elsewhere.write_text(CONFIG.replace("class_path: ExactMatch", f"class_path: {module}.Mine"))
    assert main(["fit", "--config", str(elsewhere), *([typed.format(f"{module}.Mine")] if typed else [])]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert words in shown, shown
    assert f"{file}:{line}" in shown, shown


def test_a_module_that_is_not_there_is_told_so(elsewhere, capsys):
    assert main(["fit", "--config", str(elsewhere), "--data.rewards+=no_such_module.Mine"]) == 2
    assert "No module named 'no_such_module'" in capsys.readouterr().err
    # Text may be the name of a file.
    assert main(["fit", "--config", str(elsewhere), "--data.prompts=no_such_module.JSONL"]) == 2
    assert "does not say what kind of file" in " ".join(capsys.readouterr().err.split())


def test_a_class_without_a_capital_letter_is_one_where_a_class_is_named(elsewhere, tmp_path, monkeypatch, capsys):
    file = tmp_path / "project" / "of_my_own_small.py"
    file.write_text("1 / 0\n")
    monkeypatch.delitem(sys.modules, "of_my_own_small", raising=False)
    assert main(["fit", "--config", str(elsewhere), "--data.rewards=[{class_path: of_my_own_small.mine}]"]) == 2
    assert f"{file}:1" in " ".join(capsys.readouterr().err.split())
