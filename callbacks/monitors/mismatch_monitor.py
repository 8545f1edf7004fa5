"""Watches whether engine and learner agree on what was sampled."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Evidence, Finding
from lit_grpo.callbacks.diagnosis.kinds import DiagnosisKind, FindingKind
from lit_grpo.callbacks.monitors import statistics
from lit_grpo.callbacks.monitors.monitor import Monitor, positive

REMEDIES = (
    "check that the engine got the last weights (a sync that failed or was skipped)",
    "apply temperature, top_p and top_k on both sides or on neither",
    "compare prompt ids and chat template of both sides",
    "check the number format of the engine and of the LM head",
    "correct with token weights capped at 2 (sampler_correction: tis_token)",
)
SAMPLER_MISMATCH = DiagnosisKind(
    "stale_or_mismatched_sampler",
    "engine and learner disagree",
    "the engine holds old weights, another template, temperature or number format, or tokens are taken for others: "
    "log-probabilities shifted by one, completions of other prompts",
    outlives_rollback=True,
)


CUT_FOR, LEAST_CUT = 5, 2e-3
"""Rollouts in a row, and the least share of the policy's probability, that the engine leaves out."""
DRIFT = 2.5
"""Multiple of the first rollout's mean gap that is a warning if it lasts. Healthy recorded runs have 0.8 to 1.2."""


class MismatchMonitor(Monitor):
    """Monitor of sampler against learner on the sampled tokens before any update.

    Findings: ``sampler_mismatch`` (a bound below is left; critical on-policy, where both sides should hold the same
    weights, or where the effective sample size falls below ``ess_stop``), ``impossible_tokens`` (the engine was sure of
    tokens that the learner holds for impossible: wrong template, tokenizer or weights), ``support_cut`` (a warning: the
    mean weight c = pi_old / pi_sampler is below 1 beyond chance and no weight is above it, for five rollouts. Under any
    sampler that may draw every token, whatever its temperature or age, the mean of c is 1; what it lacks is the
    probability of the tokens that are never drawn).

    Where the objective corrects for the mismatch (truncated or masked importance sampling), a difference that can be
    corrected is what it is there for: sampling in another number format is run that way. So a bound that is left is
    then a warning, and critical only where the effective sample size of the corrected weights is below ``ess_stop``.
    The same holds of rollouts that are stale. In both cases a bound must be left for ``patience`` rollouts in a row,
    unless the effective sample size is below ``ess_stop``: where a gap is meant, one rollout of it is nothing.

    Weights one or two rollouts old differ too little for absolute bounds. So the mean gap of log-probabilities is also
    compared with the first rollout's, when both sides hold the initial weights and the gap is rounding alone. A gap
    above :data:`DRIFT` times that for twice ``patience`` rollouts on-policy is a warning, and above ``growth`` times it
    is critical.

    Args:
        weight: lower and upper bound of the mean weight c = pi_old / pi_sampler. This and the next four are the healthy
            ranges of verl's guide to rollout correction.
        ess: smallest effective sample size, as a share of the tokens.
        weight_std: largest standard deviation of c.
        kl: largest size of the KL divergence in nats, by k1 and by k3.
        chi2: largest mean c^2 - 1.
        perplexity: lower and upper bound of the learner's perplexity over the sampler's.
        impossible: share of impossible tokens that is critical.
        impossible_tokens: impossible tokens in one rollout that are a warning. A rollout of 200,000 tokens has one that
            contradicts now and then, and the loss does not feel it; so the largest gap of all is no alarm either.
        growth: multiple of the first rollout's mean gap that must be exceeded for ``patience`` rollouts in a row,
            on-policy.
        least: mean gap in nats below which none is called grown.
        ess_stop: effective sample size, as a share, below which a mismatch is critical under any staleness.
        patience: rollouts in a row for which ``growth`` must be exceeded.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (
        "sampler_mismatch/logprob_abs_diff",
        "sampler_mismatch/kl_k3",
        "sampler_mismatch/weight",
    )
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind("sampler_mismatch", SAMPLER_MISMATCH, 200, REMEDIES),
        FindingKind("impossible_tokens", SAMPLER_MISMATCH, 210, REMEDIES),
        FindingKind(
            "support_cut",
            SAMPLER_MISMATCH,
            212,
            (
                "set top_p 1, top_k 0 and min_p 0 in the engine: does it read the model's generation_config?",
                *REMEDIES[1:],
            ),
            title="the engine leaves out tokens that the policy would sample",
            likely_cause="top_p, top_k, min_p or banned tokens in the engine, of which the learner does not know",
        ),
    )
    also_saved: ClassVar[tuple[str, ...]] = ("_first_gap", "_left_for", "_cut_for")

    def __init__(
        self,
        weight: tuple[float, float] = (0.5, 2.0),
        ess: float = 0.3,
        weight_std: float = 1.0,
        kl: float = 0.1,
        chi2: float = 1.0,
        perplexity: tuple[float, float] = (0.9, 1.1),
        impossible: float = 1e-3,
        impossible_tokens: int = 3,
        growth: float = 10.0,
        least: float = 5e-3,
        ess_stop: float = 0.1,
        patience: int = 3,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("MismatchMonitor", weight_std=weight_std, kl=kl, chi2=chi2, growth=growth, least=least)
        self.weight, self.ess, self.weight_std, self.kl, self.chi2 = weight, ess, weight_std, kl, chi2
        self.perplexity, self.impossible, self.impossible_tokens = perplexity, impossible, impossible_tokens
        self.growth, self.least, self.ess_stop, self.patience = growth, least, ess_stop, patience
        self._first_gap: float | None = None
        self._cut_for = 0
        """Rollouts in a row in which the sampler left out a part of the policy's probability."""
        self._left_for = 0
        """Rollouts in a row in which some bound was left."""

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        if "sampler_mismatch/logprob_abs_diff" not in metrics:
            return
        if self._first_gap is None and step == 1:
            self._first_gap = metrics["sampler_mismatch/logprob_abs_diff"]
        stale = metrics.get("rollout/staleness", 0.0) > 0
        left = self._bounds_left(metrics)
        if not stale:
            left += self._grown()
            if not left and (growing := self._growing()):
                yield self.finding(
                    "sampler_mismatch",
                    "warning",
                    "engine and learner drift apart on the sampled tokens, though the weights should be the same",
                    growing,
                    onset=self.history.began(
                        "sampler_mismatch/logprob_abs_diff", lambda value: value > growing.threshold / 2, step
                    ),
                )
        corrected = self._is_corrected(metrics)
        ess = metrics.get(f"sampler_mismatch/{'applied_ess' if corrected else 'ess'}", 1.0)
        expected, starved = stale or corrected, ess < self.ess_stop
        self._left_for = self._left_for + 1 if left else 0
        # Where a gap is meant, one rollout of it is nothing.
        if left and (starved or not expected or self._left_for >= self.patience):
            known = self.history.window("sampler_mismatch/logprob_abs_diff", self.memory)
            usual = min(known)
            onset = self.history.began(
                "sampler_mismatch/logprob_abs_diff", lambda value: value > max(3 * usual, self.least), step
            )
            names = ", ".join(e.metric.partition("/")[2] for e in left)
            yield self.finding(
                "sampler_mismatch",
                "warning" if expected and not starved else "critical",
                f"engine and learner disagree on the sampled tokens ({names})",
                *left,
                onset=onset,
                # Old weights are meant where rollouts are stale: to correct for them is then the first remedy.
                remedies=REMEDIES[-1:] + REMEDIES[:-1] if stale else None,
            )
        if not left:
            yield from self._cut(step, metrics)
        share = metrics.get("sampler_mismatch/impossible_frac", 0.0)
        tokens = metrics.get("completions/tokens", math.inf)
        if share > 0 and share * tokens >= self.impossible_tokens:
            yield self.finding(
                "impossible_tokens",
                "critical" if share > self.impossible and not stale and not self._is_corrected(metrics) else "warning",
                f"{share:.2%} of the tokens were likely for the engine and impossible for the learner",
                ("sampler_mismatch/impossible_frac", 1, share, self.impossible),
            )

    def _cut(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        """Look for probability of the policy's that the sampler never draws from."""
        key, nan = "sampler_mismatch/weight", math.nan
        mean, square = metrics.get(key, nan), metrics.get("sampler_mismatch/weight_sq", nan)
        tokens = metrics.get("completions/tokens", 0.0)
        # Where no weight is above 1 no square is above its weight; weights of old or hot samples are.
        if not square <= mean or not tokens:
            self._cut_for = 0
            return
        error = math.sqrt(max(0.0, square - mean * mean) / tokens)
        sure = statistics.bound(statistics.RUN_LENGTH_CRITICAL, 1, round(tokens)) * error
        self._cut_for = self._cut_for + 1 if 1 - mean > max(LEAST_CUT, sure) else 0
        if self._cut_for >= CUT_FOR:
            values = self.history.window(key, CUT_FOR)
            share = 1 - sum(values) / len(values)
            yield self.finding(
                "support_cut",
                "warning",
                f"{share:.1%} of the policy's probability lies on tokens that the engine never draws",
                (key, CUT_FOR, 1 - share, 1 - LEAST_CUT),
                onset=step - self._cut_for + 1,
            )

    def _bounds_left(self, metrics: Mapping[str, float]) -> list[Evidence]:
        found: list[Evidence] = []

        def outside(key: str, value: float, low: float, high: float, window: int = 1) -> None:
            if not low <= value <= high and not math.isnan(value):
                found.append(Evidence(key, window, value, low if value < low else high))

        inf, nan = math.inf, math.nan
        mean, square = metrics.get("sampler_mismatch/weight", nan), metrics.get("sampler_mismatch/weight_sq", nan)
        outside("sampler_mismatch/weight", mean, *self.weight)
        outside("sampler_mismatch/weight_std", math.sqrt(max(0.0, square - mean * mean)), -inf, self.weight_std)
        outside("sampler_mismatch/ess", metrics.get("sampler_mismatch/ess", nan), self.ess, inf)
        outside("sampler_mismatch/kl_k1", metrics.get("sampler_mismatch/kl_k1", nan), -self.kl, self.kl)
        outside("sampler_mismatch/kl_k3", metrics.get("sampler_mismatch/kl_k3", nan), -self.kl, self.kl)
        outside("sampler_mismatch/chi2_token", metrics.get("sampler_mismatch/chi2_token", nan), -inf, self.chi2)
        learner, sampler = (metrics.get(f"sampler_mismatch/{side}_perplexity", nan) for side in ("learner", "sampler"))
        outside("sampler_mismatch/perplexity_ratio", learner / sampler, *self.perplexity)
        return found

    def _is_corrected(self, metrics: Mapping[str, float]) -> bool:
        """Tell whether tokens are weighed against the mismatch, by the module or else by the numbers."""
        if self.facts.sampler_corrected is not None:
            return self.facts.sampler_corrected
        # Without a correction every weight is 1, whatever the mismatch is.
        applied, ess = (metrics.get(f"sampler_mismatch/{key}", 1.0) for key in ("applied_ess", "ess"))
        return applied < 1 and ess < 1

    def _growing(self) -> Evidence | None:
        """Return the mean gap of some rollouts if each of them is a multiple of the first rollout's, which is noise."""
        if self._first_gap is None:
            return None
        bound = max(DRIFT * self._first_gap, self.least)
        if not self.history.holds("sampler_mismatch/logprob_abs_diff", 2 * self.patience, lambda value: value > bound):
            return None
        now = self.history.mean("sampler_mismatch/logprob_abs_diff", self.patience) or 0.0
        return Evidence("sampler_mismatch/logprob_abs_diff", 2 * self.patience, now, bound, self._first_gap)

    def _grown(self) -> list[Evidence]:
        if self._first_gap is None:
            return []
        bound = max(self.growth * self._first_gap, self.least)
        if not self.history.holds("sampler_mismatch/logprob_abs_diff", self.patience, lambda value: value > bound):
            return []
        now = self.history.mean("sampler_mismatch/logprob_abs_diff", self.patience) or 0.0
        return [Evidence("sampler_mismatch/logprob_abs_diff", self.patience, now, bound, self._first_gap)]
