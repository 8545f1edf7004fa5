"""From several alarms to one diagnosis: a name out of a closed list, chosen by what has to be ruled out first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from lit_grpo.callbacks.diagnosis.findings import Evidence, Finding, Severity, worst

DiagnosisName = Literal[
    "non_finite",
    "stale_or_mismatched_sampler",
    "plumbing_mask",
    "plumbing_groups",
    "plumbing_ratio",
    "verifier_failure",
    "reward_noise",
    "critic_failure",
    "learning_rate_too_high",
    "C_PL",
    "C_NL",
    "TN_PL",
    "TN_NL",
    "advantage_inverted",
    "reward_hacking",
    "entropy_explosion",
    "entropy_collapse",
    "length_explosion",
    "length_collapse",
    "no_signal",
    "repetition",
    "truncation",
    "conflict",
    "slow_down",
    "kl_drift",
    "other",
]
"""Numbers that are no numbers, then plumbing (all other signals are unreliable until that is mended), then causes and
collapses by their signature, then single signals, then what only confirms. ``NAMED_BY`` has the order of decision."""

ORDER: tuple[DiagnosisName, ...] = get_args(DiagnosisName)


class Description(NamedTuple):
    """What is said of a diagnosis."""

    title: str
    likely_cause: str


DESCRIPTIONS: dict[DiagnosisName, Description] = {
    "non_finite": Description("NaN or infinity", "a step that overflowed, or weights that are no longer finite"),
    "stale_or_mismatched_sampler": Description(
        "engine and learner disagree",
        "the engine holds old weights, another template, temperature or number format, or log-probabilities are "
        "shifted by a token",
    ),
    "plumbing_mask": Description(
        "generated tokens are missing from the loss",
        "a mask made from token ids instead of lengths, so that the end token counts as padding",
    ),
    "plumbing_groups": Description(
        "groups mix prompts", "group ids were shuffled or completions were reordered without them"
    ),
    "plumbing_ratio": Description(
        "the policy differs from itself before the first update",
        "dropout, temperature or kernels differ between passes",
    ),
    "verifier_failure": Description("rewards time out or fail", "the verifier hangs, crashes or is overloaded"),
    "reward_noise": Description(
        "rewards contradict themselves", "a random or broken verifier: equal completions are judged differently"
    ),
    "critic_failure": Description(
        "the critic's values are wrong", "an unbounded value head, too few critic updates, or no warm-up"
    ),
    "learning_rate_too_high": Description("updates are too large", "the learning rate is too high for this batch"),
    "C_PL": Description(
        "C_PL collapse", "an objective that only reinforces what is correct, without clipping or negatives"
    ),
    "C_NL": Description("C_NL collapse", "an objective that only pushes down what is wrong, without clipping"),
    "TN_PL": Description(
        "C_PL collapse under token normalisation", "a positives-only objective whose loss has a token normaliser"
    ),
    "TN_NL": Description(
        "C_NL collapse under token normalisation", "a negatives-only objective whose loss has a token normaliser"
    ),
    "advantage_inverted": Description(
        "the advantages do not follow the rewards",
        "the objective pays for something else, such as being certain (entropy_reward), more than for the reward",
    ),
    "reward_hacking": Description(
        "the reward rises without the thing it stands for", "one reward term can be had without solving the task"
    ),
    "entropy_explosion": Description("entropy explosion", "negatives that are pushed down without bound"),
    "entropy_collapse": Description("entropy collapse", "entropy is minimised, or exploration is punished"),
    "length_explosion": Description(
        "length explosion", "long answers are paid, or wrong long ones are punished too little (1/length in the loss)"
    ),
    "length_collapse": Description("length collapse", "short answers are paid, or the limit punishes long ones"),
    "no_signal": Description("hardly any group has a gradient", "the prompts are solved or far too hard"),
    "repetition": Description("completions repeat themselves", "the policy has degenerated"),
    "truncation": Description("completions hit the length limit", "the limit is too low, or the policy cannot end"),
    "conflict": Description(
        "right and wrong completions fight over the same tokens", "the prefix they share is pushed down"
    ),
    "slow_down": Description("the run became slow", "memory is short, the engine is starved, or completions grew"),
    "kl_drift": Description("far from the reference", "the policy has moved; a late sign"),
    "other": Description("an alarm of a monitor of your own", "see its explanation"),
}

NAMED_BY: dict[str, DiagnosisName] = {
    "non_finite": "non_finite",
    "sampler_mismatch": "stale_or_mismatched_sampler",
    "impossible_tokens": "stale_or_mismatched_sampler",
    "tokens_missing": "plumbing_mask",
    "groups_mixed": "plumbing_groups",
    "first_update_ratio": "plumbing_ratio",
    "first_update_clip": "plumbing_ratio",
    "reward_failures": "verifier_failure",
    "reward_noise": "reward_noise",
    "reward_inverted": "reward_noise",
    "values_contradict": "critic_failure",
    "value_sign": "critic_failure",
    "value_out_of_range": "critic_failure",
    "value_unexplained": "critic_failure",
    "updates_too_large": "learning_rate_too_high",
    "c_pl": "C_PL",
    "c_nl": "C_NL",
    "tn_pl": "TN_PL",
    "tn_nl": "TN_NL",
    "advantage_inverted": "advantage_inverted",
    "reward_terms_diverge": "reward_hacking",
    "held_out_falls": "reward_hacking",
    "entropy_low": "entropy_collapse",
    "entropy_high": "entropy_explosion",
    "unstable": "learning_rate_too_high",
    "gradient_spikes": "learning_rate_too_high",
    "policy_change": "learning_rate_too_high",
    "length_growing": "length_explosion",
    "length_falling": "length_collapse",
    "all_wrong": "no_signal",
    "zero_gradient": "no_signal",
    "repetition": "repetition",
    "truncated": "truncation",
    "length_gap": "length_explosion",
    "format_lost": "reward_hacking",
    "gradient_vanished": "no_signal",
    "prefix_pushed_down": "conflict",
    "conflicts": "conflict",
    "entropy_rising": "entropy_explosion",
    "small_batch": "no_signal",
    "clipping": "learning_rate_too_high",
    "slow": "slow_down",
    "memory": "slow_down",
    "kl_late": "kl_drift",
}
"""Which diagnosis the kind of a finding speaks for, in the order of decision: the first gives the name. So updates that
are too large are the cause of a collapse they come with, and a spike of the gradient norm is only its sign."""

PRECEDENCE = {kind: place for place, kind in enumerate(NAMED_BY)}


@dataclass(frozen=True)
class Diagnosis:
    """What several findings of one time amount to.

    Attributes:
        name: out of the closed list.
        step: rollouts trained on when it was made.
        onset: rollouts trained on when the first of its own evidence began.
        severity: of the gravest finding.
        findings: all that were merged; those that gave the name come first.
        explanation: what it is, since when, by which numbers, and the likely cause.
        remedies: what to do, best first.
    """

    name: DiagnosisName
    step: int
    onset: int
    severity: Severity
    findings: tuple[Finding, ...]
    explanation: str
    remedies: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain types."""
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
        """What :meth:`to_dict` gave."""
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
        """One line."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)


def name_of(finding: Finding) -> DiagnosisName:
    """The diagnosis that one finding speaks for."""
    return NAMED_BY.get(finding.kind, "other")


def merge(findings: Sequence[Finding]) -> Diagnosis | None:
    """One diagnosis of all findings that hold at one time; None of none.

    Among the gravest findings the one that comes first in the order of decision gives the name. The others are
    evidence.
    """
    if not findings:
        return None
    severity = worst([finding.severity for finding in findings])
    ranked = sorted(findings, key=lambda f: PRECEDENCE.get(f.kind, len(PRECEDENCE)))
    name = name_of(next(f for f in ranked if f.severity == severity))
    own = [f for f in ranked if name_of(f) == name]
    ordered = (*own, *(f for f in ranked if name_of(f) != name))
    onset = min(f.onset for f in own)
    numbers = list(dict.fromkeys(text for f in ordered for text in map(_shown, f.evidence)))[:5]
    description = DESCRIPTIONS[name]
    explanation = f"{description.title}, began at step {onset}"
    explanation += f"; {', '.join(numbers)}" if numbers else ""
    explanation += f"; likely cause: {description.likely_cause}"
    if name == "other":
        explanation += f" ({own[0].explanation})"
    return Diagnosis(
        name=name,
        step=max(f.step for f in findings),
        onset=onset,
        severity=severity,
        findings=ordered,
        explanation=explanation,
        remedies=tuple(dict.fromkeys(remedy for f in ordered for remedy in f.remedies)),
    )


def _shown(evidence: Evidence) -> str:
    if evidence.before is not None:
        return f"{evidence.metric} {evidence.before:.3g} → {evidence.value:.3g}"
    return f"{evidence.metric} {evidence.value:.3g} (bound {evidence.threshold:.3g})"
