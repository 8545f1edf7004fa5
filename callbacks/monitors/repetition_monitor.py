"""Watches whether completions repeat themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import DiagnosisKind, FindingKind
from lit_grpo.callbacks.monitors.monitor import Monitor, positive


class RepetitionMonitor(Monitor):
    """Monitor of repeated 4-grams, runs of one token, and one token that fills most of an answer.

    Findings: ``repetition``, critical when a bound is exceeded for ``patience`` rollouts. Long runs of token 0
    (``!!!!`` for many tokenizers) are what weights that are lost look like from outside.

    Args:
        repeated: largest share of 4-grams that were seen before in the same completion.
        run: largest share of a completion that may be one run of a token.
        top_token: largest share of a completion that may be one token.
        patience: rollouts in a row in which a bound must be exceeded to be critical.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (
        "completions/repetition_frac",
        "completions/longest_run_frac",
        "completions/top_token_frac",
    )
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind(
            "repetition",
            DiagnosisKind("repetition", "completions repeat themselves", "the policy has degenerated"),
            rank=630,
            remedies=(
                "return to the last checkpoint before the onset",
                "if it follows a weight sync, check that the engine got all weights",
            ),
        ),
    )

    def __init__(
        self,
        repeated: float = 0.5,
        run: float = 0.5,
        top_token: float = 0.6,
        patience: int = 3,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("RepetitionMonitor", repeated=repeated, run=run, top_token=top_token, patience=patience)
        self.bounds = {
            "completions/repetition_frac": repeated,
            "completions/longest_run_frac": run,
            "completions/top_token_frac": top_token,
        }
        self.patience = patience

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        over = [key for key, bound in self.bounds.items() if (self.history.now(key, step) or 0.0) > bound]
        if not over:
            return
        lasts = any(
            # mypy gives a lambda with a default no type.
            self.history.holds(key, self.patience, lambda value, bound=self.bounds[key]: value > bound)  # type: ignore[misc]
            for key in over
        )
        first = over[0]
        yield self.finding(
            "repetition",
            "critical" if lasts else "warning",
            "completions repeat themselves",
            *((key, self.patience if lasts else 1, self.history.last(key) or 0.0, self.bounds[key]) for key in over),
            onset=self.history.began(first, lambda value: value > self.bounds[first], step),
        )
