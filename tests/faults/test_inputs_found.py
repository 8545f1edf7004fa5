"""Inputs that once gave a traceback, hung or were taken in silence, one by one and without a run."""

from __future__ import annotations

import pytest

from lit_grpo.cli.config_files import read_layers
from lit_grpo.cli.errors.fast_validation import validate_fast
from lit_grpo.data import JsonlPrompts
from lit_grpo.data.prompt_set import prepare
from lit_grpo.data.template import PromptFormat
from lit_grpo.errors import UserError
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.rewards import ChoiceReward, CountdownReward, NumericReward
from lit_grpo.rewards.code.reward import CodeReward
from lit_grpo.run.folder import check_place
from lit_grpo.utils.imports import import_by_path

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(8)
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: &a {b: *a}", "inside its own anchor"),
        (BOMB, "aliases"),
        ("model: " + "[" * 3000, "deep"),
        ("model: " + "{a: " * 3000 + "1" + "}" * 3000, "deep"),
        ("data: {rollouts: 1:30}", "base of 60"),
        (f"data: {{rollouts: {'9' * 5000}}}", "digits"),
        ("model: " + "x" * 2_000_000, "bytes"),
        ("model: !!python/name:os.system", "tag"),
        ("model: !!python/object/apply:os.system [true]", "tag"),
        ("model: {<<: word}", "merg"),
        ("model: null", "null"),
        ("data: [1]", "list"),
        ("model: {objective: null}", "null"),
    ],
)
def test_configuration_files(text, words, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=words):
        validate_fast("fit", ["--config", str(file)], read_layers(["--config", str(file)], "fit"))


@pytest.mark.parametrize(
    "code",
    [
        "def f(",
        "raise RuntimeError('x')",
        "import sys\nsys.exit()",
        "raise SystemExit(3)",
        "1 / 0",
        "import nothing_at_all",
        "x = y",
    ],
)
def test_modules_that_fail_at_import(code, tmp_path, monkeypatch):
    name = f"module_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as caught:
        import_by_path(f"{name}.f", "FunctionReward.function")
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "row", "words"),
    [
        (NumericReward(), {"answer": "two"}, "is no number"),
        (ChoiceReward(), {"answer": "the first"}, "is none of"),
        (CountdownReward(), {"answer": "4"}, "is not there"),
        (CountdownReward(), {"answer": "4", "nums": ["1"]}, "no list of whole numbers"),
        (CountdownReward(), {"answer": "x", "nums": [1]}, "is no number"),
        (CountdownReward(), {"answer": "1/0", "nums": [1]}, "is no number"),
        (CodeReward(unprotected=True), {"answer": ""}, "no tests"),
        (CodeReward(unprotected=True), {"answer": "", "tests": ["assert ("]}, "no Python"),
        (CodeReward(unprotected=True), {"answer": "", "tests": ["a\0"]}, "no Python"),
        (CodeReward(unprotected=True), {"answer": "", "cases": [{"input": "1"}]}, "no tests"),
    ],
)
def test_rows_that_nothing_could_be_scored_on(reward, row, words, tmp_path):
    import json

    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", **row}) + "\n")
    with pytest.raises(UserError, match=words) as caught:
        prepare(
            JsonlPrompts(str(file)),
            "data.prompts",
            form=PromptFormat(),
            tokenizer=char_tokenizer("0123456789+="),
            rewards=[reward],
        )
    assert caught.value.where == f"{file}:1"


def test_a_key_twice_in_a_row(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "answer": "3"}\n')
    with pytest.raises(UserError, match="twice"):
        JsonlPrompts(str(tmp_path / "d.jsonl")).rows()


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/../../x", "/tmp/x", ".", "a\0b", "a\nb", "x" * 300, "\x1b[31m", "ä" * 150]
)
def test_run_names_that_lead_out_or_are_none(name, tmp_path):
    with pytest.raises(UserError) as caught:
        check_place(tmp_path / "runs", name)
    assert caught.value.where == "RunLogger.run_name"


@pytest.mark.parametrize("name", [None, "", "mine", "sweep/a", "2026-01-01_12", "a b", "größer", "#7"])
def test_other_run_names(name, tmp_path):
    check_place(tmp_path / "runs", name)


@pytest.mark.parametrize("root", ["file", "file/below"])
def test_roots_that_no_run_can_be_kept_in(root, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError) as caught:
        check_place(tmp_path / root, None)
    assert caught.value.where == "RunLogger.root"
