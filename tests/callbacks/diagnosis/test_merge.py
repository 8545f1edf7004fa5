"""One diagnosis of all that holds: the gravest finding names it, unless a cause that came first explains it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from lit_grpo.callbacks import Finding, merge
from lit_grpo.callbacks.diagnosis.findings import Evidence, Severity
from lit_grpo.callbacks.diagnosis.kinds import CAUSES, SYMPTOMS, finding_kind


def found(kind: str, severity: Severity, step: int = 30, onset: int = 20) -> Finding:
    return Finding("Monitor", kind, step, onset, severity, (Evidence(kind, 1, 1.0, 0.5),), kind, (f"mend {kind}",))


def named(*findings: Finding) -> tuple[str, str]:
    """Name and severity of the diagnosis, which does not depend on the order of the monitors."""
    made = [merge(order) for order in itertools.permutations(findings)]
    (name,) = {(d.name, d.severity) for d in made if d is not None}
    return name


@pytest.mark.parametrize("symptom", ["unstable", "all_wrong", "repetition", "gradient_spikes", "truncated"])
@pytest.mark.parametrize(
    ("cause", "name"),
    [
        ("step_too_large", "learning_rate_too_high"),
        ("entropy_paid", "entropy_explosion"),
        ("entropy_punished", "entropy_collapse"),
        ("never_ended", "truncation"),
        ("c_nl", "C_NL"),
    ],
)
def test_a_cause_that_is_a_warning_names_a_critical_symptom(symptom, cause, name):
    assert named(found(symptom, "critical"), found(cause, "warning")) == (name, "critical")


def test_without_a_cause_a_symptom_has_its_own_name():
    assert named(found("repetition", "critical")) == ("repetition", "critical")
    assert named(found("repetition", "critical"), found("all_wrong", "warning")) == ("repetition", "critical")


def test_a_cause_that_began_after_the_symptom_was_raised_does_not_explain_it():
    symptom = found("repetition", "critical", step=30, onset=25)
    later = found("step_too_large", "warning", step=40, onset=31)
    earlier = found("step_too_large", "warning", step=40, onset=30)
    assert named(symptom, later) == ("repetition", "critical")
    assert named(symptom, earlier) == ("learning_rate_too_high", "critical")


def test_information_explains_nothing():
    assert named(found("repetition", "critical"), found("entropy_low", "info")) == ("repetition", "critical")


def test_what_is_no_cause_does_not_take_over():
    """A warning of plumbing, of the reward or of the critic says nothing of the size of a step or of an objective."""
    for kind in ("sampler_mismatch", "reward_failures", "value_unexplained"):
        assert finding_kind(kind).rank < CAUSES
        assert named(found("repetition", "critical"), found(kind, "warning")) == ("repetition", "critical")
    assert finding_kind("step_growing").rank >= SYMPTOMS
    assert named(found("repetition", "critical"), found("step_growing", "warning")) == ("repetition", "critical")


def test_a_critical_cause_keeps_its_name_beside_an_earlier_warning():
    assert named(found("c_nl", "critical"), found("never_ended", "warning", onset=1)) == ("C_NL", "critical")
    assert named(found("sampler_mismatch", "critical"), found("c_pl", "warning")) == (
        "stale_or_mismatched_sampler",
        "critical",
    )


def test_of_two_causes_the_first_in_the_order_of_decision_explains():
    both = found("entropy_paid", "warning"), found("step_too_large", "warning", onset=5)
    assert named(found("unstable", "critical"), *both) == ("entropy_explosion", "critical")
    # `unstable` speaks for the same diagnosis as a step that is too large, so nothing is changed by that cause.
    assert named(found("unstable", "critical"), both[1]) == ("learning_rate_too_high", "critical")


def test_the_cause_comes_first_and_its_onset_is_that_of_the_diagnosis():
    diagnosis = merge([found("repetition", "critical", onset=28), found("entropy_paid", "warning", onset=7)])
    assert diagnosis is not None
    assert diagnosis.onset == 7
    assert [f.kind for f in diagnosis.findings] == ["entropy_paid", "repetition"]
    assert diagnosis.remedies == ("mend entropy_paid", "mend repetition")
    assert diagnosis.explanation.startswith("entropy is paid for, began at step 7; entropy_paid 1 (bound 0.5)")


def test_a_number_of_an_earlier_step_says_so():
    """Else one that is long over is read as one of now."""
    early = replace(found("truncated", "warning", step=1, onset=1), evidence=(Evidence("cut", 1, 0.823, 0.3),))
    late = replace(found("all_wrong", "warning", step=29, onset=20), evidence=(Evidence("wrong", 1, 0.8, 0.5),))
    diagnosis = merge([early, late])
    assert diagnosis is not None
    assert diagnosis.step == 29
    assert "cut 0.823 (bound 0.3) at step 1" in diagnosis.explanation
    assert "wrong 0.8 (bound 0.5)" in diagnosis.explanation
    assert "at step 29" not in diagnosis.explanation
