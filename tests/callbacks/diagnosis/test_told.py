"""What a person is told of a diagnosis: all of it once, and of one that holds on what is new."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lit_grpo.callbacks import Finding, merge
from lit_grpo.callbacks.diagnosis.actions import Action, Journal, act
from lit_grpo.callbacks.diagnosis.findings import Evidence, Severity


def found(kind: str, severity: Severity, step: int) -> Finding:
    return Finding(
        "Monitor", kind, step, 8, severity, (Evidence(kind, 1, 1.0, 0.5),), f"it is {kind}", (f"mend {kind}",)
    )


def told(caplog: pytest.LogCaptureFixture, new: list[Finding], before: list[Finding], action: Action = "log") -> str:
    trainer = cast(Any, SimpleNamespace(is_global_zero=True, loggers=[], should_stop=False))
    diagnosis = merge([*before, *new])
    assert diagnosis is not None
    caplog.clear()
    with caplog.at_level(logging.INFO):
        act(trainer, Journal(None), new, diagnosis, action, "Monitor")
    return caplog.messages[0]


def test_a_diagnosis_that_holds_on_is_told_by_what_is_new(caplog: pytest.LogCaptureFixture) -> None:
    first, second = found("all_wrong", "warning", 10), found("zero_gradient", "warning", 14)
    assert first.about.diagnosis == second.about.diagnosis
    whole = told(caplog, [first], [])
    title = first.about.title
    assert whole.startswith(f"warning at step 10: {title}, began at step 8; all_wrong 1 (bound 0.5)")
    assert "Remedy: " in whole
    assert told(caplog, [second], [first]) == (
        f"warning at step 14: {title}, as since step 8; new: zero_gradient 1 (bound 0.5)."
    )


def test_what_is_graver_or_another_diagnosis_is_told_whole(caplog: pytest.LogCaptureFixture) -> None:
    first = found("all_wrong", "warning", 10)
    assert "Remedy: " in told(caplog, [found("zero_gradient", "critical", 14)], [first])
    assert "Remedy: " in told(caplog, [found("repetition", "critical", 14)], [first])
    # A milder one of the same name that comes with the first alarm is part of it.
    assert "Remedy: " in told(caplog, [first, found("zero_gradient", "info", 10)], [])
