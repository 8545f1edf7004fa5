"""`lit-grpo schema`: the shipped configurations are valid by it, and what the parser refuses is not."""

from __future__ import annotations

import copy
import json

import jsonschema
import pytest
import yaml

from lit_grpo.cli.main import BAD_INPUT, DONE, main
from tests.paths import ROOT


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    path = tmp_path_factory.mktemp("schema") / "schema.json"
    assert main(["schema", "--output", str(path)]) == DONE
    made = json.loads(path.read_text())
    jsonschema.Draft202012Validator.check_schema(made)
    return made


@pytest.fixture(scope="module")
def validator(schema):
    return jsonschema.Draft202012Validator(schema)


QUICKSTART = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_configuration_is_valid(path, validator):
    assert [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))] == []


def test_the_configuration_that_init_writes_is_valid_and_names_it(validator, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, more in (("tiny", []), ("real", ["--model", "a/b"])):
        assert main(["init", name, *more]) == DONE
        text = (tmp_path / name / "config.yaml").read_text()
        assert text.startswith("# yaml-language-server: $schema=schema.json\n")
        assert [error.message for error in validator.iter_errors(yaml.safe_load(text))] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("modle", {}),
        ("model.optimiser", {}),
        ("model.optimizer.learning_rate", 1.0),
        ("model.policy.tiny.widht", 3),
        ("model.objective.recipe", "grop"),
        ("model.optimizer.lr", "fast"),
        ("model.optimizer.lr", 0.0),
        ("data.group_size", 0),
        ("data.sampling.max_new_tokens", 0),
        ("data.prompts.init_args.digit", 1),
        ("data.rewards", [{"class_path": "lit_grpo.rewards.ExactMatch", "init_args": {"wieght": 1.0}}]),
        ("data.rewards", [{"class_path": "ExactMatch", "init_args": {"wieght": 1.0}}]),
        ("trainer.callback", []),
        ("trainer.callbacks", [{"class_path": "lit_grpo.callbacks.HealthMonitor", "init_args": {"action": {}}}]),
    ],
)
def test_what_the_parser_refuses_is_not_valid(key, value, validator):
    config = copy.deepcopy(QUICKSTART)
    assert validator.is_valid(config)
    *above, last = key.split(".")
    node = config
    for name in above:
        node = node.setdefault(name, {})
    node[last] = value
    assert not validator.is_valid(config)


def test_classes_of_ones_own_are_valid(validator):
    config = copy.deepcopy(QUICKSTART)
    config["data"]["rewards"].append({"class_path": "my_package.Brevity", "init_args": {"anything": 1}})
    assert validator.is_valid(config)


def test_keys_are_described_and_choices_listed(schema):
    data = schema["properties"]["data"]["properties"]
    assert "description" in data["group_size"]
    assert schema["properties"]["model"]["properties"]["optimizer"]["properties"]["lr"]["exclusiveMinimum"] == 0
    assert "grpo" in json.dumps(schema["properties"]["model"]["properties"]["objective"]["properties"]["recipe"])


def test_a_place_that_cannot_be_written_is_told(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(["schema", "--output", str(tmp_path / "file" / "schema.json")]) == BAD_INPUT
    assert "--output" in capsys.readouterr().err
