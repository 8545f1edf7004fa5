"""From several findings to one diagnosis, whose name is chosen by what has to be ruled out first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.callbacks.diagnosis.findings import Evidence, Finding, Severity, worst
from lit_grpo.callbacks.diagnosis.kinds import CAUSES, SYMPTOMS


@dataclass(frozen=True)
class Diagnosis:
    """The one explanation of all findings that hold at one time.

    Attributes:
        name: name of its :class:`lit_grpo.callbacks.DiagnosisKind`.
        step: rollouts trained on when it was made.
        onset: rollouts trained on when the earliest of the findings that gave it its name began.
        severity: severity of the gravest finding.
        findings: all findings that were merged; those that gave the name come first.
        explanation: what is wrong, since when, by which numbers, and the likely cause.
        remedies: what to do, best first.
    """

    name: str
    step: int
    onset: int
    severity: Severity
    findings: tuple[Finding, ...]
    explanation: str
    remedies: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain types, for JSON."""
        return {
            "diagnosis": self.name,
            "step": self.step,
            "onset": self.onset,
            "severity": self.severity,
            "explanation": self.explanation,
            "remedies": list(self.remedies),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Diagnosis:
        """Make a diagnosis from what :meth:`to_dict` returned."""
        return cls(
            name=value["diagnosis"],
            step=int(value["step"]),
            onset=int(value["onset"]),
            severity=value["severity"],
            findings=tuple(Finding.from_dict(f) for f in value["findings"]),
            explanation=value["explanation"],
            remedies=tuple(value["remedies"]),
        )

    def to_json(self) -> str:
        """Return the diagnosis as one line of JSON."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)


def merge(findings: Sequence[Finding]) -> Diagnosis | None:
    """Make one diagnosis of all findings that hold at one time; without findings return None.

    Among the gravest findings the one that comes first in the order of decision
    (:attr:`lit_grpo.callbacks.FindingKind.rank`) gives the name. If that is a symptom, the first cause that holds at
    the same time, and had begun when the symptom was raised, gives the name instead, even where it is only a warning.
    Title and likely cause are those of the finding that gives the name.
    The severity stays that of the gravest finding, and all findings are evidence.
    """
    if not findings:
        return None
    # By rank and not by onset: broken plumbing makes every other signal unreliable, even one that was seen earlier.
    severity = worst([finding.severity for finding in findings])
    ranked = sorted(findings, key=lambda f: f.about.rank)
    named = next(f for f in ranked if f.severity == severity)
    naming = _cause_of(named, ranked) or named
    about = naming.about
    own = [f for f in ranked if f.about.diagnosis.name == about.diagnosis.name]
    # What gave the name gives the words too, so its numbers come first.
    own = [naming, *(f for f in own if f is not naming)]
    ordered = (*own, *(f for f in ranked if f.about.diagnosis.name != about.diagnosis.name))
    onset = min(f.onset for f in own)
    step = max(f.step for f in findings)
    numbers = numbers_of(ordered, step)
    explanation = f"{about.title or naming.explanation}, began at step {onset}"
    explanation += f"; {', '.join(numbers)}" if numbers else ""
    explanation += f"; likely cause: {about.likely_cause}" if about.likely_cause else ""
    return Diagnosis(
        name=about.diagnosis.name,
        step=step,
        onset=onset,
        severity=severity,
        findings=ordered,
        explanation=explanation,
        remedies=tuple(dict.fromkeys(remedy for f in ordered for remedy in f.remedies)),
    )


def numbers_of(findings: Sequence[Finding], step: int) -> list[str]:
    """Write the evidence of some findings, at most five numbers, for a reader at a step."""
    # A number that was seen earlier must not be read as one of now.
    numbers = (_as_text(one) + (f" at step {f.step}" if f.step != step else "") for f in findings for one in f.evidence)
    return list(dict.fromkeys(numbers))[:5]


def _cause_of(symptom: Finding, ranked: Sequence[Finding]) -> Finding | None:
    """Return the cause that explains a symptom, although it is milder itself; None where there is none.

    A reward that is gone, repetition, truncation and a lost signal follow from something: of the causes that are seen
    at the same time, and had begun when the symptom was raised, the first in the order of decision explains it.
    """
    if symptom.about.rank < SYMPTOMS:
        return None
    causes = (f for f in ranked if CAUSES <= f.about.rank < SYMPTOMS and f.severity != "info")
    return next((cause for cause in causes if cause.onset <= symptom.step), None)


def _as_text(evidence: Evidence) -> str:
    if evidence.before is not None:
        return f"{evidence.metric} {evidence.before:.3g} → {evidence.value:.3g}"
    return f"{evidence.metric} {evidence.value:.3g} (bound {evidence.threshold:.3g})"
