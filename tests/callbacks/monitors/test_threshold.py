"""A rule speaks when its bound has been left for as long as it says, against each of its references, also from YAML."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from lit_grpo.callbacks import Finding, HealthMonitor, Monitor, Rule, ThresholdMonitor, merge
from lit_grpo.callbacks.monitors import threshold
from lit_grpo.errors import UserError
from tests.callbacks.synthetic import replay
from tests.tracking.stand_in import StandIn, StandInLoader, make_trainer


def values(key: str, *numbers: float) -> list[dict[str, float]]:
    return [{key: number} for number in numbers]


def said(rule: Rule, run: list[dict[str, float]]) -> list[Finding]:
    return replay(ThresholdMonitor([rule]), run)


def test_the_examples_in_the_docstrings_are_true():
    tried = doctest.testmod(threshold)
    assert (tried.attempted, tried.failed) == (2, 0)


def test_it_speaks_after_its_patience_and_of_when_it_began():
    run = values("reward", 0.5, 0.0, 0.5, 0.0, 0.05, 0.02, 0.01)
    (found,) = said(Rule("reward", below=0.1, for_rollouts=3), run)
    assert (found.step, found.onset, found.severity, found.kind) == (6, 4, "warning", "reward_below")
    assert found.explanation == "reward is below 0.1 for 3 rollouts: 0.02"
    assert tuple(found.evidence[0]) == ("reward", 3, 0.02, 0.1, None)
    assert said(Rule("reward", above=0.5), run) == [], "the bound itself is inside"
    assert said(Rule("completions/length", below=0.1), run) == []


@pytest.mark.parametrize(
    ("statistic", "shown"), [("last", 8.0), ("mean", pytest.approx(20 / 3)), ("median", 7.0)], ids=str
)
def test_what_is_shown(statistic, shown):
    (found,) = said(Rule("x", above=4, for_rollouts=3, statistic=statistic), values("x", 1, 5, 7, 8))
    assert found.evidence[0].value == shown


def test_a_multiple_of_what_is_usual():
    rule = Rule("x", above=2, of="usual", reference_rollouts=4, for_rollouts=2, after=4)
    found = said(rule, values("x", 1, 2, 3, 4, 4.9, 6.0, 6.0))
    assert found == [], "the reference moves along"
    (one,) = said(rule, values("x", 1, 2, 3, 4, 5.5, 9.0, 9.0, 9.0))
    assert (one.step, one.onset, one.evidence[0].threshold, one.evidence[0].before) == (6, 5, 5.0, 2.5)
    assert said(rule, values("x", 1, 9, 9)) == [], "not enough values to speak"


def test_a_multiple_of_the_beginning_is_known_at_the_end_of_a_long_run_and_after_a_checkpoint(tmp_path):
    rules = [Rule("x", above=3, of="early", reference_rollouts=4, for_rollouts=2)]
    run = values("x", 1, 2, 3, 4, *[6.0] * 300, 7.6, 7.7)
    whole, before, after = (ThresholdMonitor(rules) for _ in range(3))
    (found,) = replay(whole, run)
    assert (found.step, found.onset, found.evidence[0].threshold, found.evidence[0].before) == (306, 305, 7.5, 2.5)
    assert replay(before, run[:-1]) == []
    torch.save(before.state_dict(), tmp_path / "state.pt")
    after.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert after.observe(306, run[-1]) == [found]
    assert after.state_dict() == whole.state_dict()
    assert said(rules[0], values("x", 1, 9, 9)) == [], "the beginning is not over"


def test_a_multiple_of_another_metric():
    rule = Rule("completions/incorrect_length", above=2, of="completions/correct_length", for_rollouts=2)
    pairs = ((10.0, 15.0), (10.0, 21.0), (10.0, 25.0))
    run = [{"completions/correct_length": right, "completions/incorrect_length": wrong} for right, wrong in pairs]
    (found,) = said(rule, run)
    assert (found.step, found.evidence[0].threshold, found.evidence[0].before) == (3, 20.0, 10.0)
    assert said(rule, values("completions/incorrect_length", 50, 50, 50)) == []


def test_it_is_a_diagnosis_of_its_own_name_and_description():
    (found,) = said(Rule("reward/format", below=0.5, name="format_gone", text="no format"), [{"reward/format": 0.0}])
    diagnosis = merge([found])
    assert diagnosis is not None
    assert diagnosis.name == "format_gone"
    assert diagnosis.explanation == "no format, began at step 1; reward/format 0 (bound 0.5)"
    rule = Rule("optim/grad_norm", above=3, name="gradient_spikes", severity="critical")
    diagnosis = merge([*said(rule, [{"optim/grad_norm": 4.0}]), found])
    assert diagnosis is not None
    assert diagnosis.name == "learning_rate_too_high", "it joins the findings of a monitor that has this kind"
    assert "halve the learning rate" in diagnosis.remedies


def test_a_kind_that_nobody_declared_is_named_and_described_by_itself():
    class Bare(Monitor):
        keys = ("x",)

        def check(self, step: int, metrics: Any) -> Any:
            yield self.finding("bare_trouble", "warning", "x is there", ("x", 1, 1.0, 0.0))

    diagnosis = merge(Bare().observe(1, {"x": 1.0}))
    assert diagnosis is not None
    assert (diagnosis.name, diagnosis.explanation) == ("bare_trouble", "x is there, began at step 1; x 1 (bound 0)")


def test_from_yaml_alone_and_inside_a_health_monitor(tmp_path):
    rule = "{key: my/metric, above: 3, for_rollouts: 2, severity: critical, text: 'too much: {value:.1f}'}"
    (tmp_path / "one.yaml").write_text(
        f"""
monitor:
  class_path: lit_grpo.callbacks.ThresholdMonitor
  init_args: {{rules: [{rule}], actions: {{my_metric_above: log}}}}
health:
  class_path: lit_grpo.callbacks.HealthMonitor
  init_args:
    monitors: [{{class_path: lit_grpo.callbacks.ThresholdMonitor, init_args: {{rules: [{rule}]}}}}]
    actions: {{my_metric_above: stop}}
    remedies: {{my_metric_above: {{lr_scale: 0.3}}}}
"""
    )
    parser = ArgumentParser()
    parser.add_argument("--monitor", type=Monitor)
    parser.add_argument("--health", type=HealthMonitor)
    made = parser.instantiate(parser.parse_path(tmp_path / "one.yaml"))
    found = [f for step in (1, 2) for f in made.monitor.observe(step, {"my/metric": 4.0})]
    assert [(f.step, f.severity, f.explanation) for f in found] == [(2, "critical", "too much: 4.0")]
    assert made.health.observe(1, {"my/metric": 4.0}) == ([], None)
    _, diagnosis = made.health.observe(2, {"my/metric": 4.0})
    assert diagnosis is not None
    assert diagnosis.name == "my_metric_above"
    assert made.health.actions["my_metric_above"] == "stop"
    assert made.health.remedies["my_metric_above"].lr_scale == 0.3


def test_a_trainer_can_have_several(tmp_path):
    several = [ThresholdMonitor([Rule("reward", above=bound, name=f"above_{bound}")]) for bound in (-1, 5)]
    make_trainer(False, several, default_root_dir=str(tmp_path)).fit(StandIn(), StandInLoader(3))
    assert [[f.kind for f in monitor.active()] for monitor in several] == [["above_-1"], []]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({}, "needs one bound"),
        ({"above": 1, "below": 0}, "needs one bound"),
        ({"above": 1, "for_rollouts": 0}, "at least 1"),
        ({"above": 1, "severity": "fatal"}, "fatal"),
        ({"above": 1, "statistic": "mode"}, "mode"),
        ({"above": 1, "text": "{valeu}"}, "valeu"),
        ({"above": 1, "text": "{value"}, "text"),
    ],
)
def test_a_wrong_rule_is_refused_by_the_name_of_its_key(wrong, what):
    with pytest.raises(UserError, match=what) as error:
        Rule("reward", **wrong)
    assert "reward" in str(error.value)


def test_a_multiple_of_the_best():
    rule = Rule("x", below=0.5, of="best", reference_rollouts=2, for_rollouts=2)
    (found,) = said(rule, values("x", 1, 5, 3, 4, 1.9, 1.8))
    assert (found.step, found.evidence[0].threshold, found.evidence[0].before) == (6, 2.0, 4.0)
    (found,) = said(Rule("x", above=2, of="best", reference_rollouts=2), values("x", 5, 1, 3, 4, 4.1))
    assert found.evidence[0].before == 2.0, "the smallest, for a bound above"


def test_a_change_can_be_asked_to_be_beyond_chance():
    jumps = [1.0, 3.0] * 20
    assert said(Rule("x", above=1.4, of="usual", for_rollouts=1), values("x", *jumps))
    assert said(Rule("x", above=1.4, of="usual", for_rollouts=1, errors="auto"), values("x", *jumps)) == []
    assert said(Rule("x", above=1.4, of="usual", for_rollouts=1, errors="auto"), values("x", *jumps, 30.0))
    assert said(Rule("x", above=1.4, of="usual", errors="auto"), values("x", 1, 3)) == [], "the noise is not known"


def test_an_average():
    rule = Rule("x", below=-0.1, for_rollouts=3, statistic="mean", on_average=True)
    (found,) = said(rule, values("x", 1, 0.1, -0.3, -0.2, -0.2))
    assert (found.step, found.onset, found.evidence[0].value) == (4, 2, pytest.approx(-0.4 / 3))


def test_a_slope():
    rule = Rule("x", below=-0.5, for_rollouts=4, statistic="slope", text="{value:.2f} a rollout")
    (found,) = said(rule, values("x", 5, 5, 5, 4.5, 4, 3, 2))
    assert (found.step, found.onset, found.explanation) == (6, 3, "-0.65 a rollout")
    noisy = [float(i % 2) * 4 - 0.3 * i for i in range(12)]
    sloped = Rule("x", below=-0.1, for_rollouts=12, statistic="slope", errors=3.0)
    assert said(sloped, values("x", *noisy)) == []
    assert said(sloped, values("x", *[-0.3 * i for i in range(12)]))


def test_it_becomes_critical_when_it_lasts():
    rule = Rule("x", above=1, critical_for=3)
    found = said(rule, values("x", 2, 2, 2, 2))
    assert [(f.step, f.severity, f.onset) for f in found] == [(1, "warning", 1), (3, "critical", 1)]


def test_a_finding_carries_its_diagnosis_wherever_it_is_read():
    about: dict[str, Any] = {"name": "style_gone", "title": "no style", "likely_cause": "nobody pays for it"}
    rule = Rule("reward/style", below=0.5, name="style", diagnosis=about, rank=3)  # type: ignore[arg-type]
    (found,) = said(rule, values("reward/style", 0.1))
    plain = found.to_dict()
    assert plain["about"] == {
        "diagnosis": "style_gone",
        "title": "no style",
        "likely_cause": "nobody pays for it",
        "rank": 3,
    }
    # A reader that has never seen the rule.
    plain["kind"] = "style_of_another_process"
    diagnosis = merge([Finding.from_dict(plain)])
    assert diagnosis is not None
    assert diagnosis.name == "style_gone"
    assert diagnosis.explanation.startswith("no style, began at step 1")
    assert "nobody pays for it" in diagnosis.explanation


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"errors": "some"}, "some"),
        ({"errors": 3.0}, "has none"),
        ({"statistic": "slope"}, "3 or more"),
        ({"statistic": "slope", "for_rollouts": 5, "of": "usual"}, "no reference"),
    ],
)
def test_errors_and_slopes_that_cannot_be_are_refused(wrong, what):
    with pytest.raises(UserError, match=what):
        Rule("reward", above=1.0, **wrong)
