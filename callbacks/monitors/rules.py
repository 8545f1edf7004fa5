"""The alarms that come with lit-grpo and are nothing but a bound on a metric.

``scripts/rules_table.py`` writes them into docs/monitors.md. What has to look at several metrics, or asks what a change
could be by chance over windows of its own, is a monitor with code.
"""

from __future__ import annotations

from lit_grpo.callbacks.diagnosis.kinds import LENGTH_EXPLOSION, DiagnosisKind, declare
from lit_grpo.callbacks.monitors.threshold import Rule

PLUMBING_MASK = DiagnosisKind(
    "plumbing_mask",
    "generated tokens are missing from the loss",
    "a mask made from token ids instead of lengths, so that the end token counts as padding",
    outlives_rollback=True,
)
PLUMBING_GROUPS = DiagnosisKind(
    "plumbing_groups",
    "groups mix prompts",
    "group ids were shuffled or completions were reordered without them",
    outlives_rollback=True,
)
REPETITION = DiagnosisKind(
    "repetition",
    "completions repeat themselves",
    "the policy has degenerated, or a reward pays for what is repeated",
)
REMEDIES_REPETITION = (
    "return to the last checkpoint before the onset",
    "if it follows a weight sync, check that the engine got all weights",
)
TURNING_BACK = DiagnosisKind(
    "turning_back",
    "updates point against the ones before",
    "the step is too long, rollouts are too old for the weights they train, or a penalty pulls the policy back",
)

RULES: tuple[Rule, ...] = (
    Rule(
        "sanity/missing_tokens_frac",
        above=0.0,
        severity="critical",
        name="tokens_missing",
        text="{value:.1%} of the generated tokens are not in the learner's mask",
        remedies=("make masks from lengths, never from token ids: the end token may equal the padding token",),
        diagnosis=PLUMBING_MASK,
        rank=220,
        healthy="0",
        source="exact",
    ),
    Rule(
        "sanity/mixed_prompts_frac",
        above=0.0,
        severity="critical",
        name="groups_mixed",
        text="{value:.1%} of the completions are in a group of another prompt",
        remedies=("keep completions, rewards and group ids in one order; shuffle whole groups only",),
        diagnosis=PLUMBING_GROUPS,
        rank=230,
        healthy="0",
        source="exact",
    ),
    *(
        Rule(
            key,
            above=bound,
            for_rollouts=3,
            critical_for=5,
            name="repetition",
            text="completions repeat themselves: {key} is {value:.2g}",
            remedies=REMEDIES_REPETITION,
            diagnosis=REPETITION,
            rank=630,
            healthy=healthy,
            source=source,
        )
        for key, bound, healthy, source in (
            ("completions/repetition_frac", 0.5, "below 0.2", "S0, appendix J: constant tokens end a C_NL collapse"),
            ("completions/longest_run_frac", 0.5, "below 0.1", "ours"),
            ("completions/top_token_frac", 0.6, "below 0.3", "ours"),
        )
    ),
    Rule(
        "groups/reward_length_corr",
        above=0.5,
        for_rollouts=5,
        statistic="mean",
        on_average=True,
        name="length_paid",
        text="among completions of one prompt that are equally right, the reward grows with length ({value:.2f})",
        remedies=(
            "take out of the reward what grows with length",
            "pay for length only up to a cap, and only where the answer is right",
        ),
        diagnosis=LENGTH_EXPLOSION,
        rank=558,
        healthy="absent, or below 0.3",
        source="ours: 1 where each token is paid alike, 0.6 to 0.9 where that pay hides what is right",
    ),
    Rule(
        "completions/empty_frac",
        above=0.5,
        for_rollouts=3,
        name="empty_completions",
        text="{value:.0%} of the completions have no token",
        remedies=("look at the prompt: does it end where an answer begins?", "check the engine for aborted requests"),
        diagnosis=DiagnosisKind(
            "empty_completions", "completions are empty", "the engine breaks off, or the policy ends at once"
        ),
        rank=606,
        healthy="0",
        source="ours",
    ),
    Rule(
        "completions/no_answer_frac",
        above=0.9,
        for_rollouts=20,
        severity="info",
        name="no_answer",
        text="{value:.0%} of the completions have no answer that can be read",
        remedies=("show the form of an answer in the prompt", "pay for the form first", "check the answer's pattern"),
        diagnosis=DiagnosisKind(
            "no_answer",
            "completions have no answer that can be read",
            "the prompt does not show the form, or the answer's pattern does not fit it",
            outlives_rollback=True,
        ),
        rank=625,
        healthy="below 0.1 after the first rollouts",
        source="ours",
    ),
    Rule(
        "optim/update_cosine",
        below=-0.15,
        for_rollouts=10,
        name="updates_turn_back",
        text="updates point against the ones before: their cosine is {value:.2g}",
        remedies=("lower the learning rate", "lower max_staleness, or correct for it (sampler_correction: tis_token)"),
        statistic="mean",
        on_average=True,
        diagnosis=TURNING_BACK,
        rank=585,
        healthy="0 to 0.8, single rollouts -0.2",
        source="ours: quickstart has 0.3 on average, and -0.17 from rollout 2 on at 40 times the rate",
    ),
)

# Known by name from the beginning, so that actions can name their diagnoses whatever monitors a run has.
declare(rule.kind for rule in RULES)
