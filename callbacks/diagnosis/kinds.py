"""What findings and diagnoses there are. Each monitor declares its own; every table is derived from that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from lit_grpo.callbacks.diagnosis.remedies import Remedy

LAST = 1000
"""Rank of a kind of finding that declares none: after all others in the order of decision."""


@dataclass(frozen=True)
class DiagnosisKind:
    """A name that a diagnosis can have, and what follows from it.

    Attributes:
        name: its name in ``findings.jsonl`` and in tags, and as a key of ``actions`` and ``remedies``.
        title: what is wrong, in a few words; "" takes the explanation of the finding.
        likely_cause: the likely cause, in a few words; "" where there is none.
        remedy: how the run is changed before it goes on, with the action ``adjust`` or ``rollback``.
        outlives_rollback: whether the fault would still be there after a rollback. Then a rollback that was chosen by
            severity, not by this name, is a stop.
    """

    name: str
    title: str = ""
    likely_cause: str = ""
    remedy: Remedy = field(default_factory=Remedy)
    outlives_rollback: bool = False


@dataclass(frozen=True)
class FindingKind:
    """A kind of finding that a monitor can raise.

    Attributes:
        name: :attr:`lit_grpo.callbacks.Finding.kind` of such findings.
        diagnosis: the diagnosis that it speaks for; left out, one of the same name, described by the finding itself.
        rank: its place in the order of decision. Among the gravest findings the one of the lowest rank gives the
            diagnosis its name; all that cannot be told apart otherwise keeps the order of the monitors.
        remedies: what to do, best first, where the finding does not say it itself.
        title: what is wrong in a few words, where this finding says less, or other, than the title of the diagnosis.
        likely_cause: the likely cause, where it is another than that of the diagnosis.
    """

    name: str
    diagnosis: DiagnosisKind = field(default_factory=lambda: DiagnosisKind(""))
    rank: int = LAST
    remedies: tuple[str, ...] = ()
    title: str = ""
    likely_cause: str = ""

    def __post_init__(self) -> None:
        if not self.diagnosis.name:
            object.__setattr__(self, "diagnosis", DiagnosisKind(self.name))
        # A spike of the gradient, say, speaks for updates that are too large, and is not yet one: what is written is
        # what the finding knows.
        object.__setattr__(self, "title", self.title or self.diagnosis.title)
        object.__setattr__(self, "likely_cause", self.likely_cause or self.diagnosis.likely_cause)


# The ranks, over all monitors: numbers that are none (100), then plumbing, which makes all other signals unreliable
# until it is mended (200), rewards (300), the critic (400), causes and collapses by their signature (500), single
# signals (600), and what only confirms (700). A cause stands before its signs, so updates that are too large name a
# collapse that they come with, and a spike of the gradient norm does not. A cause that is only a warning names a grave
# symptom too, if it was there first (diagnosis.py).

CAUSES, SYMPTOMS = 500, 566
"""Ranks from which on a finding is a cause, and from which on it is a symptom that a cause may explain."""

LEARNING_RATE_TOO_HIGH = DiagnosisKind(
    "learning_rate_too_high",
    "updates are too large",
    "the learning rate is too high for this batch",
    Remedy(0.1),
)
NO_SIGNAL = DiagnosisKind(
    "no_signal",
    "many groups have no gradient",
    "prompts that are too hard or too easy for so few answers, or rewards that do not tell the answers apart",
    outlives_rollback=True,
)
SOLVED = DiagnosisKind(
    "solved",
    "the prompts are solved",
    "nothing is left to learn from them, or the reward pays for any answer",
    outlives_rollback=True,
)
NONE_RIGHT = DiagnosisKind(
    "none_right",
    "most prompts get no right answer",
    "the prompts are too hard, or nothing that is answered counts as right (correct_threshold)",
    outlives_rollback=True,
)
LENGTH_EXPLOSION = DiagnosisKind(
    "length_explosion",
    "long answers are paid",
    "a part of the reward that grows with length",
)

_declared: dict[str, FindingKind] = {}


def declare(kinds: Iterable[FindingKind]) -> None:
    """Make kinds known to the diagnosis. The last declaration of a name counts."""
    for kind in kinds:
        _declared[kind.name] = kind


def is_declared(name: str) -> bool:
    """Tell whether some monitor has declared a kind of this name."""
    return name in _declared


def finding_kind(name: str) -> FindingKind:
    """Return the declared kind of this name, or else a kind that has nothing but the name."""
    return _declared.get(name) or FindingKind(name)


def in_words(name: str, title: str, likely_cause: str) -> FindingKind:
    """Return the declared kind of this name with another title and likely cause, where a finding knows more or less."""
    return replace(finding_kind(name), title=title, likely_cause=likely_cause)


def finding_kinds() -> list[FindingKind]:
    """Return all kinds that are declared, in the order of decision."""
    return sorted(_declared.values(), key=lambda kind: kind.rank)


def diagnosis_kinds() -> dict[str, DiagnosisKind]:
    """Return all diagnoses that a declared finding speaks for, by name, in the order of decision."""
    return {kind.diagnosis.name: kind.diagnosis for kind in finding_kinds()}
