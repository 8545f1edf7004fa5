"""What the collapse detector can find, in words: diagnoses, causes and remedies."""

from __future__ import annotations

from lit_grpo.callbacks.diagnosis.kinds import LEARNING_RATE_TOO_HIGH, DiagnosisKind, FindingKind
from lit_grpo.callbacks.diagnosis.remedies import Remedy
from lit_grpo.callbacks.monitors.entropy_monitor import ENTROPY_COLLAPSE, ENTROPY_EXPLOSION
from lit_grpo.callbacks.monitors.reward_monitor import REWARD_FALLS

REMEDIES_PL = (
    "return to the last checkpoint before the onset: the state does not recover on its own",
    "add negatives (recipe grpo, or cl)",
    "clip, with several minibatches a rollout",
    "use a token or constant normaliser",
)
REMEDIES_NL = (
    "return to the last checkpoint before the onset and halve the learning rate",
    "lower the weight of negatives (recipe w_reinforce)",
    "clip the ratio (recipe grpo), with a dual clip of 3",
)

REMEDIES_RATE = ("return to the last checkpoint before the onset and lower the learning rate", "lengthen the warm-up")
REMEDIES_BOTH_WAYS = (
    "return to the last checkpoint before the onset and lower the learning rate",
    "read the completions: which of them are paid?",
    "clip, with several minibatches a rollout",
)
REMEDIES_OTHER = (
    "pay for right answers (entropy_reward: false)",
    "let the rewards outweigh what else shapes the advantages",
)

# What is lacking is added to the objective, which keeps its filters, corrections and clips.
ADD_THE_OTHER_SIGN = Remedy(0.5, adds="both_signs")
PAY_FOR_THE_REWARD = Remedy(0.5, adds="pay_for_reward")
COLLAPSES = (
    ("C_PL", "C_PL collapse", "an objective that only reinforces what is correct, without clipping or negatives"),
    ("C_NL", "C_NL collapse", "an objective that only pushes down what is wrong, without clipping"),
    (
        "TN_PL",
        "C_PL collapse under token normalisation",
        "a positives-only objective whose loss has a token normaliser",
    ),
    (
        "TN_NL",
        "C_NL collapse under token normalisation",
        "a negatives-only objective whose loss has a token normaliser",
    ),
    (
        "advantage_inverted",
        "the advantages do not follow the rewards",
        "the objective pays for something else (entropy_reward) more than for the reward, or a sign or critic is wrong",
    ),
)
COLLAPSE_KINDS = {
    name: DiagnosisKind(name, title, cause, PAY_FOR_THE_REWARD if name == "advantage_inverted" else ADD_THE_OTHER_SIGN)
    for name, title, cause in COLLAPSES
}
WORSE = "the policy has become worse: a term of the objective, weight decay, or small steps that err one way"
"""Likely cause of a reward that falls under small steps, on held-out prompts too."""
BY_SIGN = "an objective that learns from signs without a baseline, so that nothing slows it where prompts are solved"
"""Likely cause of a collapse of an objective that pushes both ways by sign alone."""

FINDINGS: tuple[FindingKind, ...] = (
    *(FindingKind(name.lower(), COLLAPSE_KINDS[name], rank) for rank, (name, _, _) in enumerate(COLLAPSES, 510)),
    FindingKind(
        "unstable",
        LEARNING_RATE_TOO_HIGH,
        566,
        REMEDIES_RATE,
        title="the reward has fallen, and nothing but the size of the updates is seen to explain it",
    ),
    FindingKind(
        "reward_lost",
        REWARD_FALLS,
        589,
        (
            "look at the data: do harder prompts begin here?",
            "evaluate on held-out prompts: has the policy become worse?",
            "return to the last checkpoint before the onset and lower the learning rate",
        ),
        title="the reward has fallen, and large updates are hardly why",
        likely_cause="prompts that become harder, rewards that are given otherwise, or a term of the objective or "
        "weight decay that pulls elsewhere",
    ),
    # The same shapes under an objective that has a baseline and pushes both ways: they are what a collapse looks
    # like and not why it came, so a cause that is seen as well gives the name.
    FindingKind(
        "minimal_entropy",
        ENTROPY_COLLAPSE,
        567,
        REMEDIES_BOTH_WAYS,
        title="entropy, length and diversity have fallen together",
        likely_cause="updates that are too large, or a reward that can be had by one short answer",
    ),
    FindingKind(
        "maximal_entropy",
        ENTROPY_EXPLOSION,
        569,
        REMEDIES_BOTH_WAYS,
        title="entropy has exploded, and lengths with it",
        likely_cause="updates that are too large, or a term that pays for entropy",
    ),
)
