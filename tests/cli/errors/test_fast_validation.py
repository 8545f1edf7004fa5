"""Misspelt keys and choices are answered before Lightning is imported, and as the parser would answer them."""

import os
import subprocess
import sys
import types
import typing
from pathlib import Path

import pytest
import yaml

from lit_grpo.cli.config_files import read_layers
from lit_grpo.cli.errors import fast_validation, schema
from lit_grpo.cli.errors.error_messages import Explainer
from lit_grpo.cli.errors.fast_validation import validate_fast
from lit_grpo.cli.lightning_cli import TrainingCLI  # before a test captures what its log handler would keep
from lit_grpo.cli.main import main
from lit_grpo.errors import UserError
from tests.paths import ROOT

GOOD = """\
model:
  policy: {tiny: {}}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts}
  rewards:
    - {class_path: lit_grpo.rewards.ExactMatch}
"""


def with_model(text):
    return GOOD.replace("data:\n", f"  {text}\ndata:\n")


# (file, options, what is on the screen)
WRONG = {
    "key": (with_model("micro_batch_tokns: 5"), [], "did you mean `model.micro_batch_tokens`?"),
    "key at the top": ("modle: {}\n" + GOOD, [], "did you mean `model`?"),
    "key of the trainer": ("trainer: {max_epoch: 3}\n" + GOOD, [], "did you mean `trainer.max_epochs`?"),
    "option": (GOOD, ["--model.micro_batch_tokns", "5"], "did you mean --model.micro_batch_tokens?"),
    "option at the top": (GOOD, ["--modle.policy.path=5"], "did you mean --model.policy.path?"),
    "option shortened": (GOOD, ["--model.policy.tin", "{}"], "did you mean --model.policy.tiny?"),
    "shortened, with a sign": (GOOD, ["--trainer.max_step=3"], "did you mean --trainer.max_steps?"),
    "shortened at the top": (GOOD, ["--con", "a.yaml"], "did you mean --config?"),
    "bare dashes": (GOOD, ["--", "--data.rollouts", "3"], "`--` is not expected here"),
    "choice": (with_model("objective: {recipe: dappo}"), [], "did you mean 'dapo'"),
    "choice on the command line": (GOOD, ["--data.engine.name=vlm"], "did you mean 'vllm'"),
    "choice of an optional part": (with_model("critic: {backbone: sharedd}"), [], "did you mean 'shared'?"),
    "its choice as an option": (GOOD, ["--model.critic.backbone", "sharedd"], "--model.critic.backbone sharedd"),
    "argument of an optional part": (with_model("critic: {backbon: shared}"), [], "did you mean `backbone`?"),
    "its argument as an option": (GOOD, ["--model.critic.backbon=shared"], "did you mean `backbone`?"),
    "part of a part": (with_model("critic: {optimizer: {lrr: 3}}"), [], "did you mean `lr`?"),
    "choice in a part of a part": (with_model("critic: {optimizer: {schedule: cosin}}"), [], "'cosine'?"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_screen_is_the_parsers(case, monkeypatch, tmp_path, capsys):
    text, options, expected = WRONG[case]
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(text)
    words = ["fit", "--config", "a.yaml", *options]
    assert main(words) == 2
    at_once = capsys.readouterr().err
    assert expected in at_once
    monkeypatch.setattr("lit_grpo.cli.training.validate_fast", lambda *_: None)
    assert main(words) == 2
    assert capsys.readouterr().err == at_once


def test_nothing_heavy_is_imported_for_it(tmp_path):
    cases = [(text, options) for text, options, _ in WRONG.values()]
    code = (
        "import sys, pathlib\n"
        "from lit_grpo.cli.main import main\n"
        f"for text, options in {cases!r}:\n"
        "    pathlib.Path('a.yaml').write_text(text)\n"
        "    for command in ('fit', 'check', 'filter'):\n"
        "        own = ['--output', 'x.jsonl'] if command == 'filter' else []\n"
        "        assert main([command, *own, '--config', 'a.yaml', *options]) == 2\n"
        "heavy = {'torch', 'lightning', 'transformers', 'jsonargparse'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class _ParsedError(Exception):
    pass


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_keys_and_choices_are_those_of_the_parser(command):
    class Stopped(TrainingCLI):
        def parse_arguments(self, parser, args):
            raise _ParsedError(self._explainer().keys, self._subcommand_parsers[command])

    with pytest.raises(_ParsedError) as stopped:
        Stopped(command, [], [])
    keys, parser = stopped.value.args
    leaves = schema.read_schema(command).leaves()
    options = [option for option in parser._option_string_actions if len(option) > 3]
    assert "--model.policy" in options
    validate_fast(command, [f"{option}=null" for option in options], [])
    explainer = Explainer(command, [], [], leaves)
    for short in {option[:-1] for option in options} - set(options):
        assert parser._get_option_tuples(short) == [], short
        # Below a key that may hold a class, only the parser knows.
        below = any(short.startswith(f"--{key}.") for key in leaves)
        assert fast_validation._is_option(short, explainer, leaves) == below, short
    groups = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    assert set(leaves) == set(keys) - groups
    hints = {action.dest: getattr(action, "_typehint", None) for action in parser._actions}
    choices = {key: words for key in leaves if not key.startswith("trainer.") and (words := literals(hints.get(key)))}
    assert {key: set(one.choices) for key, one in leaves.items() if one.choices} == choices


def literals(hint):
    """The words of a Literal, alone or beside None."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    words = typing.get_args(kinds[0]) if len(kinds) == 1 and typing.get_origin(kinds[0]) is typing.Literal else ()
    return set(words) if all(isinstance(word, str) for word in words) else set()


def parts(fields):
    for one in fields.values():
        if one.optional is not None:
            yield one.optional
            yield from parts(one.optional.fields)


def test_optional_parts_have_the_fields_of_their_classes():
    import dataclasses
    import importlib

    found = {part.class_path: set(part.fields) for part in parts(schema.read_schema("fit").leaves())}
    assert "lit_grpo.policy.CriticConfig" in found
    for path, names in found.items():
        module, _, name = path.rpartition(".")
        assert names == {f.name for f in dataclasses.fields(getattr(importlib.import_module(module), name))}, path


FINE = {
    "group": ["--model={policy: {tiny: {}}}", "--data.engine", "{name: transformers}", "--trainer", "trainer.yaml"],
    "value with dashes": ["--model.policy.path", "-- a b", "--data.sampling.temperature", "-1"],
    "list": ["--trainer.callbacks+=lit_grpo.callbacks.EntropyMonitor", "--data.rewards+=lit_grpo.rewards.ExactMatch"],
    "class": ["--data.prompts=lit_grpo.data.AdditionPrompts", "--data.prompts.init_args.digits=2"],
    "null": ["--model.objective.advantage=null", "--model.critic=null"],
    "part": ["--model.critic={backbone: shared}", "--model.critic.optimizer.lr=1e-3", "--model.critic.backbone=shared"],
    "help": [
        "--print_config",
        "--help",
        "-h",
        "--trainer.logger.help=lit_grpo.tracking.RunLogger",
        "--data.rewards.help",
    ],
    "not known here": ["--model.critic.class_path=mine.Critic", "--model.critic.init_args.kind=x"],
    "number": ["--model.optimizer.lr", "fast"],
}


SHORTENED = {
    "--model.policy.compil": "--model.policy.compile",
    "--model.p.compile": "--model.policy.compile",
    "--model.opt.lr": "--model.optimizer.lr",
    "--data.samp": "--data.sampling",
    "--trainer.callback+": "--trainer.callbacks",
    "--trainer.lo": "--trainer.log_every_n_steps or --trainer.logger",
    "--mod": "--model",
    "--ckpt": "--ckpt_path",
    "--hel": "--help",
    "--print_conf": "--print_config",
    "-config": "--config",
    "-model.policy.compile": "--model.policy.compile",
}


@pytest.mark.parametrize(("given", "meant"), SHORTENED.items())
def test_a_shortened_option_is_not_taken_for_the_whole(given, meant):
    for words in ([given, "true"], [f"{given}=true"]):
        with pytest.raises(UserError) as error:
            validate_fast("fit", words, [])
        assert error.value.what == f"there is no option {given}"
        assert error.value.remedy == f"did you mean {meant}?"


OWN = {
    "check": (["--prompt", "3"], "--prompts"),
    "filter": (["--keep-abov", "0", "--output", "x.jsonl"], "--keep-above"),
    "filter, needed": (["--outpu", "x.jsonl"], "--output"),
    "score": (["--input", "x.jsonl", "--conf", "a.yaml"], "--config"),
    "score, needed": (["--inp", "x.jsonl"], "--input"),
    "export, needed": (["--checkpoin=x", "--output", "y"], "--checkpoint"),
    "report": (["runs/x", "--tracking", "y"], "--tracking-uri"),
}


@pytest.mark.parametrize("case", OWN)
def test_options_of_a_commands_own(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(GOOD)
    command, (words, meant) = case.partition(",")[0], OWN[case]
    first = ["--config", "a.yaml"] if command in ("check", "filter") else []
    assert main([command, *first, *words]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


ENVIRONMENT = {
    "LIT_GRPO_FIT__DATA__ROLLOUT": "did you mean LIT_GRPO_FIT__DATA__ROLLOUTS?",
    "LIT_GRPO_FIT_DATA__ROLLOUTS": "did you mean LIT_GRPO_FIT__DATA__ROLLOUTS?",
    "LIT_GRPO_FIT__MODEL__CRITIC__TRUNK": "LIT_GRPO_FIT__MODEL__CRITIC sets the whole of `model.critic`, as in YAML",
}


@pytest.mark.parametrize(("name", "remedy"), ENVIRONMENT.items())
def test_a_variable_of_no_key_is_not_overlooked(name, remedy, monkeypatch):
    monkeypatch.setenv("LIT_GRPO_FIT__DATA__ROLLOUTS", "3")
    monkeypatch.setenv("LIT_GRPO_DEBUG", "1")
    validate_fast("fit", [], [])
    monkeypatch.setenv(name, "3")
    with pytest.raises(UserError, match=f"no key is set by {name}") as error:
        validate_fast("fit", [], [])
    assert error.value.remedy == remedy
    validate_fast("test", [], [])


@pytest.mark.parametrize("options", FINE.values(), ids=FINE.keys())
def test_what_may_be_right_is_left_to_the_parser(options, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(GOOD)
    words = ["--config", str(file), *options]
    validate_fast("fit", words, read_layers(words, "fit"))


@pytest.mark.parametrize("words", [["--config", "{}"], ["--config={}"], ["-c", "{}"], ["-c={}"], ["-c{}"]])
def test_every_way_to_name_a_file(words, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("modle: {}")
    words = [word.format(file) for word in words]
    with pytest.raises(UserError, match="no key `modle`"):
        validate_fast("fit", words, read_layers(words, "fit"))


def test_every_configuration_of_ours_is_accepted():
    files = sorted((ROOT / "configs").rglob("*.yaml"))
    assert len(files) > 30
    for file in files:
        command = "test" if "eval" in file.stem else "fit"
        words = ["--config", str(file)]
        validate_fast(command, words, read_layers(words, command))


def test_the_last_choice_counts(tmp_path):
    for name, recipe in (("a", "dappo"), ("b", "dapo")):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"model": {"objective": {"recipe": recipe}}}))
    words = [word for name in "ab" for word in ("--config", str(tmp_path / f"{name}.yaml"))]
    validate_fast("fit", words, read_layers(words, "fit"))
    with pytest.raises(UserError, match="cannot be 'dappo'"):
        validate_fast("fit", [*words, *words[:2]], read_layers([*words, *words[:2]], "fit"))


def test_sources_that_cannot_be_read_are_left_to_the_parser(monkeypatch):
    monkeypatch.setitem(schema.CLASSES, "model", ("lit_grpo.modul", "LitGRPO"))
    with pytest.raises(schema.NotReadableError):
        schema.read_schema("fit")
    validate_fast("fit", ["--modle=1"], [])
    assert fast_validation.read_schema is schema.read_schema
