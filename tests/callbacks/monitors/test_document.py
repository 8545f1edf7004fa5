"""docs/monitors.md names every monitor, finding, diagnosis and action, and what it shows works."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, get_args

import pytest
import yaml

from lit_grpo.callbacks import HealthMonitor, Rule, ThresholdMonitor, merge, monitors
from lit_grpo.callbacks.diagnosis.actions import Action
from lit_grpo.callbacks.diagnosis.remedies import Remedy
from lit_grpo.callbacks.monitors.rules import RULES
from lit_grpo.objectives import ObjectiveConfig
from scripts import false_alarms, rules_table
from tests.paths import ROOT

TEXT = (ROOT / "docs/monitors.md").read_text(encoding="utf-8")
KINDS = sorted(
    (
        *(kind for name in monitors.__all__ for kind in getattr(monitors, name).findings),
        *{rule.name: rule.kind for rule in RULES}.values(),
    ),
    key=lambda kind: kind.rank,
)


def test_everything_is_named():
    for name in (*monitors.__all__, *get_args(Action)):
        assert f"`{name}`" in TEXT, name
    for kind in KINDS:
        assert f"`{kind.name}`" in TEXT
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{kind.diagnosis.name}` |"))
        assert kind.diagnosis.title in row
        assert kind.diagnosis.likely_cause in row
        assert f"`{kind.name}`" in row


def test_diagnoses_stand_in_the_order_of_decision():
    shown = re.findall(r"^\| `(\w+)` \| ", TEXT, re.MULTILINE)
    order = list(dict.fromkeys(kind.diagnosis.name for kind in KINDS))
    assert [name for name in shown if name in order] == order


def test_the_keys_that_monitors_read_are_logged_keys():
    logged = (ROOT / "docs/metrics.md").read_text() + (ROOT / "docs/objectives.md").read_text()
    shorts = {name.split("/")[-1] for name in re.findall(r"`([\w/*<>]+)`", logged)}
    for name in monitors.__all__:
        for key in getattr(monitors, name).keys:
            assert key.split("/")[-1] in shorts, f"{name} reads {key}, which no document knows"


def test_the_yaml_example_can_be_built():
    found = re.search(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert found
    arguments: dict[str, Any] = yaml.safe_load(found.group(1))["trainer"]["callbacks"][0]["init_args"]
    watcher = HealthMonitor(**arguments)
    assert watcher.actions["critical"] == "rollback"
    assert watcher.remedies["C_NL"] == Remedy(0.25, adds="both_signs")
    for remedy in watcher.remedies.values():
        ObjectiveConfig(**remedy.objective).resolve()


def test_the_monitor_of_your_own_works():
    codes = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    space: dict[str, Any] = {}
    exec(compile(codes[-1], "docs/monitors.md", "exec"), space)
    monitor = space["BrevityMonitor"]()
    found = [f for step in range(1, 12) for f in monitor.observe(step, {"completions/length": 3.0})]
    assert found[0].kind == "too_brief"
    assert found[0].remedies == ("look at the shortest answers",)
    watcher = HealthMonitor([monitor], actions={"brevity": "adjust"})
    diagnosis = merge(found)
    assert diagnosis is not None
    assert diagnosis.name == "brevity"
    assert diagnosis.explanation.startswith("answers of a few tokens, began at step 1")
    assert diagnosis.explanation.endswith("likely cause: the reward pays for them")
    assert watcher.remedies["brevity"] == Remedy(0.3)


def test_the_rules_of_your_own_work():
    example = next(text for text in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL) if "ThresholdMonitor" in text)
    monitor = ThresholdMonitor(**yaml.safe_load(example)["init_args"])
    run = [{"reward": 0.05, "optim/grad_norm": 1.0 if step < 25 else 30.0} for step in range(1, 30)]
    found = [f for step, metrics in enumerate(run, 1) for f in monitor.observe(step, metrics)]
    assert [(f.step, f.kind, f.severity) for f in found] == [(20, "reward_below", "warning"), (29, "steep", "critical")]
    assert found[0].explanation == "the reward stays below 0.1"
    for field in dataclasses.fields(Rule):
        assert f"`{field.name}`" in TEXT


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_that_train_are_watched(path):
    trainer = yaml.safe_load(path.read_text()).get("trainer", {})
    watching = [c for c in trainer.get("callbacks", []) if c["class_path"] == "lit_grpo.callbacks.HealthMonitor"]
    if path.stem.startswith("eval"):
        assert not watching
        return
    watcher = HealthMonitor(**watching[0].get("init_args", {}))
    assert {type(monitor).__name__ for monitor in watcher.monitors} == set(monitors.__all__)
    only_told = {"quickstart", "gsm8k_smollm2_cpu", "gsm8k_qwen", "countdown"}
    assert watcher.actions["critical"] == ("log" if path.stem in only_told else "stop")
    assert len(watching) == 1


def test_the_table_of_rules_is_up_to_date():
    assert rules_table.main(["--check"]) == 0, "run scripts/rules_table.py"
    for rule in RULES:
        assert rule.healthy, rule.name
        assert rule.source, rule.name
        assert rule.remedies, rule.name


def test_the_table_of_false_alarms_names_every_finding():
    shown = TEXT[TEXT.index(false_alarms.MARKS[0]) : TEXT.index(false_alarms.MARKS[1])]
    for kind in KINDS:
        assert f"`{kind.name}`" in shown
