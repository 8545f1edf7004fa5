"""docs/learner.md and docs/objectives.md: every YAML in them is accepted, and is what the text says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from jsonargparse import ArgumentParser

from lit_grpo.datamodule import RolloutDataModule
from lit_grpo.module import LitGRPO
from tests.paths import ROOT

TEXTS = {name: (ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("learner", "objectives")}
BLOCKS = [
    pytest.param(block, id=f"{name}-{number}")
    for name, text in TEXTS.items()
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
]
BASE: dict[str, Any] = {
    "model": {"policy": {"tiny": {}}},
    "data": {
        "prompts": {"class_path": "lit_grpo.data.AdditionPrompts"},
        "rewards": [{"class_path": "lit_grpo.rewards.ExactMatch"}],
    },
}
OWN = "my_package.my_module."
"""What stands for a part of the reader's own, which does not exist here."""


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(LitGRPO, "model")
    parser.add_class_arguments(RolloutDataModule, "data")
    return parser


@pytest.mark.parametrize("block", BLOCKS)
def test_the_yaml_is_accepted(parser: ArgumentParser, block: str) -> None:
    given = yaml.safe_load(block)
    quantized = "quantization" in given["model"].get("policy", {})
    if OWN in block or quantized:
        # Needs the reader's package, or an extra; the keys are checked all the same.
        given["model"] = {key: value for key, value in given["model"].items() if key not in ("objective", "policy")}
    merged = {part: {**BASE[part], **given.get(part, {})} for part in BASE}
    made = parser.instantiate_classes(parser.parse_object(merged))
    for key, value in given.get("data", {}).items():
        if not isinstance(value, dict):
            assert getattr(made.data, key) == value
    updates = made.model.updates_per_rollout
    objective = made.model.objective.for_run(100, updates)
    # A comment that says under which name the run is logged is held to it.
    if found := re.search(r"Logged as (\S+)\.\n", block):
        assert objective.name == found.group(1)
        prompts = made.data.prompts_per_rollout
        assert (prompts, made.data.group_size) == (128, 8)
        assert prompts // (made.model.minibatch_prompts or prompts) == updates, "each prompt is looked at once"


def test_the_four_settings_of_the_landscape_paper_are_there() -> None:
    names = re.findall(r"^# .*Logged as (\S+)\.$", TEXTS["learner"], re.MULTILINE)
    assert names == ["nl", "nl", "nl+trust_region=none", "nl+no_importance_sampling"]


def test_the_yaml_of_the_released_gtpo_is_what_the_loops_hold() -> None:
    """The overrides that tests/objectives/test_against_loops.py compares with the released code's formula."""
    from tests.objectives.test_against_loops import RELEASED

    block = next(b.values[0] for b in BLOCKS if "winstonsmith1897/GTPO" in str(b.values[0]))
    assert yaml.safe_load(str(block))["model"]["objective"] == {"recipe": "gtpo", **RELEASED}
