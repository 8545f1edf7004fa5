"""docs/data.md: every YAML in it is accepted, and every source, template and setting is in it."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

import lit_grpo.data
from lit_grpo.data import NAMED_TEMPLATES, CleanConfig, PromptSource, TableSource
from lit_grpo.datamodule import RolloutDataModule
from lit_grpo.rollout.curriculum import CurriculumConfig
from tests.paths import ROOT

TEXT = (ROOT / "docs/data.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
BASE = {
    "prompts": {"class_path": "lit_grpo.data.AdditionPrompts"},
    "rewards": [{"class_path": "lit_grpo.rewards.ExactMatch"}],
}


@pytest.fixture(scope="module")
def parser():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RolloutDataModule, "data")
    return parser


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_yaml_is_accepted(parser, number):
    settings = yaml.safe_load(BLOCKS[number])
    data = parser.instantiate_classes(parser.parse_object({"data": {**BASE, **settings["data"]}})).data
    assert isinstance(data.prompts, PromptSource)
    for key in settings["data"]:
        assert hasattr(data, key)


def test_the_rows_of_each_layout_are_read_as_it_says(tmp_path):
    layouts = re.findall(r"^\*\*[\w-]+\*\* \(`(\w+)`\).*?```json\n(.*?)```", TEXT, re.DOTALL | re.MULTILINE)
    golds = {"trl": "23453", "verl": "23456", "openrlhf": "23456", "gsm8k": ["1000", *"3456"],
             "open_instruct": "23456", "prime": "23456", "choices": "ABCAB"}  # fmt: skip
    assert [name for name, _ in layouts] == list(golds)
    for name, rows in layouts:
        (tmp_path / "five.jsonl").write_text(rows)
        source = lit_grpo.data.JsonlPrompts(str(tmp_path / "five.jsonl"))
        assert [row.answer for row in source.rows()] == list(golds[name])
        (line,) = source.columns_taken()
        assert line.startswith(f"five.jsonl ({name}): ")
        if name == "verl":
            assert line.replace("five.jsonl", "train.parquet") in TEXT


def test_nothing_is_left_out():
    assert len(BLOCKS) >= 8
    for name in lit_grpo.data.__all__:
        kind = getattr(lit_grpo.data, name)
        if isinstance(kind, type) and issubclass(kind, PromptSource) and kind not in (PromptSource, TableSource):
            assert f"`{name}`" in TEXT or name in ("FileSource", "BenchmarkPrompts"), name
    for word in [*NAMED_TEMPLATES, *(f.name for f in fields(CleanConfig)), *(f.name for f in fields(CurriculumConfig))]:
        assert f"`{word}`" in TEXT or f"{word}:" in TEXT, word


def test_the_command_lines_are_accepted():
    from lit_grpo.commands.filter.options import Options

    lines = re.findall(r"^lit-grpo filter (.*?)(?:\s+#.*)?$", TEXT, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        given = dict(re.findall(r"--([\w-]+) (\S+)", line))
        bounds = {key: float(given[f"keep-{key}"]) for key in ("above", "below") if f"keep-{key}" in given}
        above, below = bounds.get("above"), bounds.get("below")
        Options(Path(given["output"]), int(given["samples"]), above=above, below=below).check()
