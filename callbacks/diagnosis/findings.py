"""The record that a monitor raises when it sees something, with its numbers. It survives JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from lit_grpo.callbacks.diagnosis.kinds import DiagnosisKind, FindingKind, finding_kind, is_declared

Severity = Literal["info", "warning", "critical"]
"""``info``: worth knowing. ``warning``: the run loses something. ``critical``: what comes after is not worth having."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""All severities, from mild to grave."""


class Evidence(NamedTuple):
    """A number that was compared with a bound."""

    metric: str
    """Logged key (docs/metrics.md), or what was computed from it."""
    window: int
    """Number of rollouts that the value is made from."""
    value: float
    """The number, in the metric's unit, or as a multiple of something where the threshold is one."""
    threshold: float
    """The bound that it was compared with, in the unit of ``value``."""
    before: float | None = None
    """Earlier value that the bound was made from; None where the bound is a number of its own."""


@dataclass(frozen=True)
class Finding:
    """A fault that a monitor noticed, with the numbers that show it.

    Attributes:
        monitor: name of the class that raised it.
        kind: name of its :class:`lit_grpo.callbacks.FindingKind`.
        step: rollouts trained on when it was raised.
        onset: rollouts trained on when the fault began; never after ``step``.
        severity: how grave it is.
        evidence: the numbers behind it.
        explanation: what was seen, in one sentence.
        remedies: what to do, best first.
        about: its kind: the diagnosis that it speaks for, with title and likely cause, and its place in the order of
            decision. It travels with the finding, so whoever reads one needs no table of kinds. Left out: the kind that
            is declared under this name.
    """

    monitor: str
    kind: str
    step: int
    onset: int
    severity: Severity
    evidence: tuple[Evidence, ...]
    explanation: str
    remedies: tuple[str, ...] = ()
    about: FindingKind = field(default=FindingKind(""), compare=False)

    def __post_init__(self) -> None:
        if not self.about.name:
            object.__setattr__(self, "about", finding_kind(self.kind))
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity is {self.severity!r}, must be one of {', '.join(SEVERITIES)}")
        if self.onset > self.step:
            raise ValueError(f"onset {self.onset} lies after the step {self.step} at which it was seen")

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain types, with numbers that JSON cannot hold (NaN, infinities) as strings."""
        return {
            "monitor": self.monitor,
            "kind": self.kind,
            "step": self.step,
            "onset": self.onset,
            "severity": self.severity,
            "evidence": [{key: _plain(value) for key, value in e._asdict().items()} for e in self.evidence],
            "explanation": self.explanation,
            "remedies": list(self.remedies),
            "about": {
                "diagnosis": self.about.diagnosis.name,
                "title": self.about.title,
                "likely_cause": self.about.likely_cause,
                "rank": self.about.rank,
            },
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Finding:
        """Make a finding from what :meth:`to_dict` returned."""
        evidence = tuple(
            Evidence(
                e["metric"],
                int(e["window"]),
                float(e["value"]),
                float(e["threshold"]),
                None if e.get("before") is None else float(e["before"]),
            )
            for e in value["evidence"]
        )
        return cls(
            monitor=value["monitor"],
            kind=value["kind"],
            step=int(value["step"]),
            onset=int(value["onset"]),
            severity=value["severity"],
            evidence=evidence,
            explanation=value["explanation"],
            remedies=tuple(value["remedies"]),
            about=_kind(value["kind"], value.get("about")),
        )

    def to_json(self) -> str:
        """Return the finding as one line of JSON."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Finding:
        """Make a finding from what :meth:`to_json` returned."""
        return cls.from_dict(json.loads(text))


def worst(severities: list[Severity]) -> Severity:
    """Return the gravest of some severities; ``info`` if there are none."""
    return max(severities, key=SEVERITIES.index, default="info")


def _kind(name: str, about: dict[str, Any] | None) -> FindingKind:
    """Return the kind of a finding that was written down; the declared one, which knows more, if there is one."""
    if about is None:
        return finding_kind(name)
    if is_declared(name):
        # One kind may be said in other words where it is graver or milder.
        return replace(finding_kind(name), title=about["title"], likely_cause=about["likely_cause"])
    diagnosis = DiagnosisKind(about["diagnosis"], about["title"], about["likely_cause"])
    return FindingKind(name, diagnosis, about["rank"])


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
