"""Alarms as data: a bound on any logged metric, how long it must be left, and what is said then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from lit_grpo.callbacks.diagnosis.findings import SEVERITIES, Finding, Severity
from lit_grpo.callbacks.diagnosis.kinds import LAST, DiagnosisKind, FindingKind, declare, finding_kind, is_declared
from lit_grpo.callbacks.monitors import statistics
from lit_grpo.callbacks.monitors.history import History
from lit_grpo.callbacks.monitors.monitor import Monitor
from lit_grpo.errors import UserError

STATISTICS = {"last": lambda values: values[-1], "mean": fmean, "median": median, "slope": statistics.slope}


REFERENCES_WITH_ERRORS = ("usual", "best")
"""References that are made from the rule's own metric, so that the error of a change is known."""


class Crossing(NamedTuple):
    """A bound that has been left."""

    value: float
    """The rule's statistic of the values beyond the bound."""
    bound: float
    """The bound itself, in the unit of the metric."""
    reference: float | None
    """What the bound is a multiple of; None for a bound that is a number of its own."""
    onset: int
    """Step since which every value has been beyond the bound."""


@dataclass(frozen=True)
class Rule:
    """An alarm on a metric that is above, or below, a bound for some rollouts in a row.

    Attributes:
        key: logged metric (docs/metrics.md).
        above: the bound, for an alarm on large values. Exactly one of ``above`` and ``below`` must be given.
        below: the bound, for an alarm on small values.
        of: what the bound is a multiple of. None: nothing, it is the number itself. ``early``: the median of the run's
            first ``reference_rollouts`` values. ``usual``: the median of the ``reference_rollouts`` values, or as many
            as there are, ahead of the last ``for_rollouts``. ``best``: the best mean of ``reference_rollouts`` in a row
            ahead of the last ``for_rollouts``, the largest for ``below`` and the smallest for ``above``. Anything
            else is the key of another metric, whose newest value is taken. A reference that is unknown or 0 is no
            alarm.
        reference_rollouts: values that ``early`` and ``usual`` are made from.
        for_rollouts: values in a row that must be beyond the bound.
        after: values that must be known before there is an alarm.
        errors: standard errors by which the values must lie beyond the reference as well (of ``usual`` and ``best``),
            or the slope beyond 0. ``auto``: as many as chance passes once in 10,000 rollouts, or in 100,000 for a
            critical rule. 0: none are asked for.
        severity: ``info``, ``warning`` or ``critical``.
        critical_for: values in a row beyond the bound from which on the finding is critical. 0: never.
        name: the kind of the finding, and of the diagnosis where no monitor declares that kind, so a key of
            ``actions``. Left out: ``<key>_above`` or ``<key>_below``, with ``_`` for ``/``.
        text: one sentence for people, in which ``{value}``, ``{bound}``, ``{reference}``, ``{key}`` and ``{rollouts}``
            are filled in, with a format if wanted (``{value:.0%}``).
        remedies: what to do, best first. Left out: what the declared kind says.
        statistic: which number of the last ``for_rollouts`` values is shown: ``last``, ``mean`` or ``median``. With
            ``slope`` it is also what is compared: the least-squares slope a rollout over them.
        on_average: whether the statistic, ``mean`` or ``median``, is compared, and not each of the values.
        diagnosis: the diagnosis that the finding speaks for, with title, likely cause and remedy. Left out: that of the
            kind that is declared under ``name``, else one of that name, described by the text.
        rank: place in the order of decision (:attr:`lit_grpo.callbacks.FindingKind.rank`) where ``diagnosis`` is given.
        healthy: the healthy range, for people.
        source: where the bound comes from.

    Raises:
        UserError: the rule has no bound or two, or a value that cannot be.
    """

    key: str
    above: float | None = None
    below: float | None = None
    of: str | None = None
    reference_rollouts: int = 20
    for_rollouts: int = 1
    after: int = 0
    errors: float | Literal["auto"] = 0.0
    severity: Severity = "warning"
    critical_for: int = 0
    name: str = ""
    text: str = ""
    remedies: tuple[str, ...] = ()
    statistic: Literal["last", "mean", "median", "slope"] = "last"
    on_average: bool = False
    diagnosis: DiagnosisKind | None = None
    rank: int = LAST
    healthy: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        where = f"ThresholdMonitor.rules, {self.key}"
        if (self.above is None) == (self.below is None):
            raise UserError("a rule needs one bound", where=where, remedy="give either above or below")
        if self.for_rollouts < 1 or self.reference_rollouts < 1:
            raise UserError("for_rollouts and reference_rollouts must be at least 1", where=where)
        for given, known in ((self.severity, SEVERITIES), (self.statistic, tuple(STATISTICS))):
            if given not in known:
                raise UserError(f"{given!r} is unknown", where=where, remedy=f"choose one of {', '.join(known)}")
        if isinstance(self.errors, str) and self.errors != "auto":
            raise UserError(f"errors is {self.errors!r}", where=where, remedy="give a number, or auto")
        if self.errors and self.of not in REFERENCES_WITH_ERRORS and self.statistic != "slope":
            raise UserError(
                "errors are those of a change, and this rule has none",
                where=where,
                remedy="give of: usual or of: best, or statistic: slope",
            )
        if self.statistic == "slope" and (self.of is not None or self.for_rollouts < 3):
            raise UserError("a slope needs for_rollouts of 3 or more, and no reference", where=where)
        if isinstance(self.diagnosis, dict):
            object.__setattr__(self, "diagnosis", DiagnosisKind(**self.diagnosis))
        side = "above" if self.above is not None else "below"
        if not self.name:
            object.__setattr__(self, "name", f"{self.key}_{side}".replace("/", "_"))
        if not self.text:
            object.__setattr__(
                self, "text", f"{{key}} is {side} {{bound:.3g}} for {{rollouts}} rollouts: {{value:.3g}}"
            )
        try:
            self.explanation(Crossing(0.0, 0.0, 0.0, 0))
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"text cannot be filled in ({error!r})",
                where=where,
                remedy="use {value}, {bound}, {reference}, {key} and {rollouts}; write {{ for a brace",
            ) from None

    def watch(self, history: History) -> None:
        """Let the history remember what the rule reads."""
        history.watch(self.key, early=self.reference_rollouts if self.of == "early" else 0)
        if self.of is not None and self.of not in ("early", *REFERENCES_WITH_ERRORS):
            history.watch(self.of)

    def crossing(self, history: History) -> Crossing | None:
        """Return the crossing if the bound has been left for long enough, else None."""
        if history.count(self.key) < max(self.for_rollouts, self.after):
            return None
        reference = self._reference(history)
        if self.of is not None and not reference:
            return None
        limit = self.above if self.above is not None else self.below
        assert limit is not None
        bound = limit if reference is None else limit * reference

        def beyond(value: float) -> bool:
            return value > bound if self.above is not None else value < bound

        values = history.window(self.key, self.for_rollouts)
        if self.statistic == "slope":
            slope = statistics.slope(values)
            first = history.steps[self.key][-self.for_rollouts]
            return Crossing(slope, bound, None, first) if beyond(slope) and self._is_sure(history, slope) else None
        compared = [STATISTICS[self.statistic](values)] if self.on_average else values
        if not all(map(beyond, compared)) or not self._is_sure(history, reference):
            return None
        first = history.steps[self.key][-self.for_rollouts]
        onset = first if self.on_average else history.began(self.key, beyond, history.steps[self.key][-1])
        return Crossing(STATISTICS[self.statistic](values), bound, reference, onset)

    def explanation(self, crossing: Crossing) -> str:
        """Fill the numbers into the text."""
        reference = 0.0 if crossing.reference is None else crossing.reference
        return self.text.format(
            key=self.key, value=crossing.value, bound=crossing.bound, reference=reference, rollouts=self.for_rollouts
        )

    @property
    def kind(self) -> FindingKind:
        """The kind of its findings."""
        if self.diagnosis is not None:
            return FindingKind(self.name, self.diagnosis, self.rank, self.remedies)
        return finding_kind(self.name)

    def _is_sure(self, history: History, reference: float | None) -> bool:
        """Tell whether the change is beyond chance."""
        if not self.errors or reference is None:
            return True
        run_length = statistics.RUN_LENGTH_CRITICAL if self.severity == "critical" else statistics.RUN_LENGTH
        needed = history.bound(self.key, 1 + (self.of == "best") * history.count(self.key), run_length)
        values = history.window(self.key, self.for_rollouts)
        if self.statistic == "slope":
            errors = abs(statistics.slope_errors(values, statistics.noise(history.values[self.key])))
        else:
            size = min(self.reference_rollouts, history.count(self.key) - self.for_rollouts)
            noise = statistics.noise(history.values[self.key])
            apart = abs(fmean(values) - reference)
            # A median has 1.25 times the error of a mean.
            error = noise * (1 / len(values) + 1.25**2 / max(1, size)) ** 0.5
            errors = apart / error if error > 0 else float("inf")
        return errors > (needed if self.errors == "auto" else float(self.errors))

    def _reference(self, history: History) -> float | None:
        if self.of is None:
            return None
        if self.of == "early":
            early = history.early[self.key]
            return median(early) if len(early) >= self.reference_rollouts else None
        if self.of == "usual":
            return history.median(self.key, self.reference_rollouts, back=self.for_rollouts)
        if self.of == "best":
            before = history.values[self.key][: -self.for_rollouts]
            return statistics.best_mean(before, self.reference_rollouts, largest=self.below is not None)
        return history.last(self.of)


class ThresholdMonitor(Monitor):
    """Monitor that raises a finding for each rule whose bound has been left: an alarm on any metric that is logged.

    In YAML, alone or in the ``monitors`` of a :class:`lit_grpo.callbacks.HealthMonitor`::

        class_path: lit_grpo.callbacks.ThresholdMonitor
        init_args:
          rules:
            - {key: reward, below: 0.1, for_rollouts: 20, severity: warning, text: the reward stays below 0.1}
            - {key: grad_norm, above: 20, of: early, for_rollouts: 5, severity: critical}
          actions: {grad_norm_above: stop}

    In Python, and replayed without Lightning:

    >>> monitor = ThresholdMonitor([Rule("reward", below=0.1, for_rollouts=3, text="the reward is lost: {value:.2f}")])
    >>> for step, reward in enumerate([0.5, 0.08, 0.05, 0.02, 0.01], start=1):
    ...     for finding in monitor.observe(step, {"reward": reward}):
    ...         print(finding.step, finding.onset, finding.severity, finding.kind, finding.explanation)
    4 2 warning reward_below the reward is lost: 0.02

    Monitors that need more than bounds inherit from it and decide in :meth:`check` which rules hold.

    Args:
        rules: bounds to watch; left out, those that come with lit-grpo (:mod:`lit_grpo.callbacks.monitors.rules`).
        actions: see :class:`Monitor`.
    """

    def __init__(self, rules: Sequence[Rule] | None = None, actions: dict[str, str] | None = None) -> None:
        if rules is None:
            # It needs this module for its rules.
            from lit_grpo.callbacks.monitors.rules import RULES

            rules = [*RULES]
        # A rule is a mapping where it comes from a configuration that was not parsed by type.
        self.rules = [rule if isinstance(rule, Rule) else Rule(**rule) for rule in rules]
        # Before the actions are checked, which may name these kinds.
        declare(rule.kind for rule in self.rules if not is_declared(rule.name))
        super().__init__(actions)
        for rule in self.rules:
            rule.watch(self.history)

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints, which Lightning wants to be another for each callback of a trainer."""
        if type(self) is not ThresholdMonitor:
            return super().state_key
        return f"{super().state_key}[{', '.join(rule.name for rule in self.rules)}]"

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        for rule in self.rules:
            yield from self.apply(rule)

    def apply(self, rule: Rule, severity: Severity | None = None) -> list[Finding]:
        """Return the findings of one rule, which are one or none.

        Args:
            rule: rule whose bound is looked at.
            severity: severity of the finding in place of the rule's own; None: the rule's.
        """
        crossing = rule.crossing(self.history)
        if crossing is None:
            return []
        lasts = rule.critical_for > 0 and len(self.history.steps_since(rule.key, crossing.onset)) >= rule.critical_for
        evidence: Any = (rule.key, rule.for_rollouts, crossing.value, crossing.bound, crossing.reference)
        return [
            self.finding(
                rule.name,
                severity or ("critical" if lasts else rule.severity),
                rule.explanation(crossing),
                evidence,
                onset=crossing.onset,
                remedies=rule.remedies or None,
                about=rule.kind,
            )
        ]
