"""Text stays text, in every key that takes it, wherever it is given."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import typing

import pytest
import yaml
from jsonargparse import ArgumentParser

from lit_grpo.cli.config_files import read_layers
from lit_grpo.cli.errors.class_paths import MODULES
from lit_grpo.cli.lightning_cli import TrainingCLI
from lit_grpo.cli.text_values import TextParser, takes_text
from tests.paths import ROOT

TEXTS = [
    r"####\s*(.+)",
    "# Role",
    "#7",
    "null",
    "Null",
    "~",
    "1",
    "1.5",
    "1e3",
    "true",
    "[a]",
    "{a: 1}",
    "[a-z]+",
    "a: b",
    "-",
]
"""Quoted text that a second reading as YAML makes something else of; some of it null."""  # fmt: skip
NULLS = {"null", "Null", "~"}


class ParseOnly(TrainingCLI):
    """The command line of a run, which builds and runs nothing."""

    def _parse_ckpt_path(self):
        pass

    def _set_seed(self):
        pass

    def before_instantiate_classes(self):
        pass

    def instantiate_classes(self):
        pass

    def _run_subcommand(self, subcommand):
        pass


def parse(*argv):
    cli = ParseOnly("fit", list(argv), read_layers(argv, "fit"))
    return cli.config["fit"], cli._subcommand_parsers["fit"]


@pytest.fixture(scope="module")
def hints():
    """The type of every key of `fit`."""
    _, parser = parse()
    return {a.dest: a._typehint for a in parser._actions if hasattr(a, "_typehint")}


@pytest.fixture(scope="module")
def text_keys(hints):
    """All keys of `fit` that take text, except seed_everything's kind of words: from the types alone."""
    found = [key for key, hint in hints.items() if takes_text(hint) and not key.endswith(".help")]
    # A reference to a class, a device, a strategy: text of its own kind, which Lightning's own types describe.
    own = [key for key in found if key.partition(".")[0] in ("model", "data", "checkpoint")]
    assert {"data.format.system_prompt", "model.policy.path", "model.optimizer.scheduler", "checkpoint.dirpath"} <= set(
        own
    )
    return own


def nested(keys, text):
    tree: dict = {}
    for key in keys:
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = text
    return tree


@pytest.mark.parametrize("text", TEXTS)
def test_a_quoted_text_of_a_file_is_that_text_in_every_key(text, text_keys, tmp_path):
    file = tmp_path / "c.yaml"
    # JSON, since it quotes all text.
    file.write_text(json.dumps(nested(text_keys, text)))
    config, parser = parse("--config", str(file))
    assert {key: config[key] for key in text_keys} == dict.fromkeys(text_keys, text)
    # What --print_config writes, and config.yaml of a run, is read back as the same.
    again = tmp_path / "again.yaml"
    again.write_text(parser.dump(config, skip_unset=False))
    config, _ = parse("--config", str(again))
    assert {key: config[key] for key in text_keys} == dict.fromkeys(text_keys, text)


@pytest.mark.parametrize("text", TEXTS)
def test_what_is_typed_is_that_text_or_null(text, text_keys, hints, monkeypatch):
    optional = [key for key in text_keys if type(None) in typing.get_args(hints[key])]
    if text == "[a]":
        # And these a list.
        text_keys = [key for key in text_keys if "list" not in str(hints[key])]
    if text in ("{a: 1}", "a: b"):
        # These take a mapping too, and what is typed is read once.
        text_keys = [key for key in text_keys if "custom" not in key]
    config, _ = parse(*(f"--{key}={text}" for key in text_keys))
    expected = {key: None if text in NULLS and key in optional else text for key in text_keys}
    # A bare dash is standard input for a key that takes a path; no key here does.
    assert {key: config[key] for key in text_keys} == expected
    for key in text_keys:
        monkeypatch.setenv("LIT_GRPO_FIT__" + key.replace(".", "__").upper(), text)
    config, _ = parse()
    assert {key: config[key] for key in text_keys} == expected


@pytest.mark.parametrize("text", sorted(NULLS))
def test_a_null_that_is_typed_in_quotes_is_text(text, text_keys):
    config, _ = parse(*(f"--{key}='{text}'" for key in text_keys))
    assert {key: config[key] for key in text_keys} == dict.fromkeys(text_keys, text)


def classes():
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            cls = getattr(importlib.import_module(module), name)
            plain = inspect.isclass(cls) and not inspect.isabstract(cls) and not dataclasses.is_dataclass(cls)
            if plain and "__init__" in vars(cls):
                yield cls


def text_arguments(cls):
    hints = typing.get_type_hints(cls.__init__)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    found = [p.name for p in parameters if takes_text(hints.get(p.name))]
    required = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return found if set(required) <= set(found) else []


def test_a_class_named_in_the_configuration_gets_the_text():
    seen = 0
    for cls in classes():
        arguments = text_arguments(cls)
        if not arguments:
            continue
        seen += len(arguments)
        path = f"{cls.__module__}.{cls.__qualname__}"
        for text in TEXTS:
            parser = TextParser(exit_on_error=False)
            parser.add_argument("--x", type=cls)
            given = parser.parse_object({"x": {"class_path": path, "init_args": dict.fromkeys(arguments, text)}})
            assert {n: given.x.init_args[n] for n in arguments} == dict.fromkeys(arguments, text), cls
            written = yaml.safe_load(parser.dump(given))
            assert {n: written["x"]["init_args"].get(n, text) for n in arguments} == dict.fromkeys(arguments, text), cls
            # A path may be a list, too, and what is typed is read once.
            if text not in {*NULLS, "[a]"}:
                typed = parser.parse_args([f"--x={path}", *(f"--x.{n}={text}" for n in arguments)])
                assert {n: typed.x.init_args[n] for n in arguments} == dict.fromkeys(arguments, text), cls
    assert seen > 30


def test_numbers_in_quotes_stay_text_below_any(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {policy: {model_args: {revision: '1', token: '#x', other: 1, none: null, text: 'null'}}}")
    config, _ = parse(
        "--config", str(file), "--model.policy.model_args.typed", "2", "--model.policy.model_args.word='null'"
    )
    assert config.model.policy.model_args == {
        "revision": "1", "token": "#x", "other": 1, "none": None, "text": "null", "typed": 2, "word": "null",
    }  # fmt: skip


def test_a_comment_is_no_null_for_other_types(tmp_path):
    from lit_grpo.errors import UserError

    file = tmp_path / "c.yaml"
    for key in ("advantage", "clip_high", "overlong_max", "whiten"):
        file.write_text(f"model: {{objective: {{{key}: '# off'}}}}")
        with pytest.raises(UserError, match=key):
            parse("--config", str(file))


def test_other_parsers_of_jsonargparse_act_as_before():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--x", type=str | None)
    assert parser.parse_args(["--x", "#7"]).x is None


def test_a_class_that_is_typed_by_its_path_alone_can_be_written_down(capsys):
    from lit_grpo.cli.main import main

    option = ["--data.val_prompts.class_path", "lit_grpo.data.AdditionPrompts"]
    assert main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), *option, "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["data"]["val_prompts"]["class_path"] == "lit_grpo.data.AdditionPrompts"


def test_a_held_out_set_can_be_typed_key_by_key(capsys):
    from lit_grpo.cli.main import main

    options = ["--data.val.mine.path", "rows.jsonl", "--data.val.mine.sampling.temperature=0.5", "--data.val.b.limit=3"]
    assert main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), *options, "--print_config"]) == 0
    sets = yaml.safe_load(capsys.readouterr().out)["data"]["val"]
    assert sorted(sets) == ["b", "mine"]
    assert (sets["mine"]["path"], sets["mine"]["sampling"]["temperature"]) == ("rows.jsonl", 0.5)
    assert sets["b"]["limit"] == 3


PROMPTS = ["--config", str(ROOT / "configs/quickstart.yaml")]


@pytest.mark.parametrize("words", [
    ["--data.prompts.init_args", "{digits: 2, n: 7}"],
    ["--data.prompts.init_args={digits: 2, n: 7}"],
    ["--data.prompts.init_args", "{digits: 1, n: 7}", "--data.prompts.init_args.digits", "2"],
    ["--data.prompts.digits", "2", "--data.prompts.init_args", "{n: 7}"],
])  # fmt: skip
def test_all_arguments_of_a_class_can_be_typed_at_once(words):
    found = parse(*PROMPTS, *words)[0].data.prompts
    assert found.class_path == "lit_grpo.data.AdditionPrompts"
    assert (found.init_args.digits, found.init_args.n) == (2, 7)


def test_arguments_typed_at_once_are_those_of_another_class():
    words = ["--data.prompts.class_path", "lit_grpo.data.JsonlPrompts", "--data.prompts.init_args", "{path: '007'}"]
    found = parse(*PROMPTS, *words)[0].data.prompts
    assert found.class_path == "lit_grpo.data.JsonlPrompts"
    assert str(found.init_args.path) == "007"
    assert "digits" not in found.init_args
