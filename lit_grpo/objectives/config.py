"""ObjectiveConfig: the objective as it is written in YAML."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from lit_grpo.objectives.objective import Objective

RecipeName = Literal[
    "reinforce", "reinforce_bstar", "rloo", "reinforce_pp", "reinforce_pp_baseline", "ppo", "trpo_penalty", "grpo",
    "imle", "pl", "nl", "cl", "tnpl", "tnnl", "tncl", "raft", "raft_pp", "sft", "psr", "nsr", "w_reinforce",
    "reinforce_rej", "dr_grpo", "dapo", "lite_ppo", "gspo", "gspo_token", "gmpo", "cispo", "sapo", "dcpo", "lopti",
    "advantage_reweighting", "rspo", "vapo", "gtpo", "olmo3", "rent",
]  # fmt: skip
AdvantageName = Literal[
    "raw", "group_std", "group_mean", "group_var", "rloo", "batch_std", "sign", "bstar", "batch_whiten",
    "group_mean_then_whiten", "gae", "gae_length", "sas",
]  # fmt: skip
RatioName = Literal["none", "self", "token", "sequence", "sequence_token", "sequence_product", "geometric"]
TrustRegionName = Literal["none", "clip", "cispo", "sapo", "gmpo", "rspo", "dcpo", "kl_penalty"]
SamplerName = Literal[
    "none", "tis_token", "tis_sequence", "mis_token", "mis_sequence", "geo_mask", "geo_mask_tis_token"
]
AggregationName = Literal[
    "seq_mean", "token_mean", "token_mean_group", "sum_const", "seq_sum", "per_prompt_set", "per_prompt_set_const",
    "only_token_mean", "conflict_tokens",
]  # fmt: skip


@dataclass
class ObjectiveConfig:
    """A recipe and, optionally, overrides; None is the recipe's own value. What does not apply is refused."""

    recipe: RecipeName = "grpo"
    """The method, whole."""

    # Parts
    advantage: AdvantageName | None = None
    """Advantage estimator."""
    ratio: RatioName | None = None
    """Importance ratio."""
    trust_region: TrustRegionName | None = None
    """What bounds an update."""
    sampler_correction: SamplerName | None = None
    """Weights for the mismatch between the inference engine and the learner."""
    aggregation: AggregationName | None = None
    """Weight of a token in the loss."""

    # Advantage
    baseline: float | None = None
    """Constant b of r - b (raw)."""
    std_ddof: int | None = None
    """Divisor of the variance is G - std_ddof (group_std, batch_std)."""
    std_eps: float | None = None
    """Added to the standard deviation."""
    singleton: Literal["zero", "raw"] | None = None
    """Advantage of a group of one: 0, or its reward."""
    positive_weight: float | None = None
    """Advantage of rewards above 0 (sign)."""
    negative_weight: float | None = None
    """Advantage of the others (sign)."""
    bstar_weights: Literal["given", "length", "logit", "token_level"] | None = None
    """Weights of the variance-minimising baseline."""
    whiten: bool | None = None
    """Whiten GAE advantages over the tokens of the batch."""
    whiten_ddof: int | None = None
    """Divisor of the whitening's variance is tokens - whiten_ddof."""
    gae_gamma: float | None = None
    """Discount."""
    gae_lambda: float | None = None
    """Lambda of GAE."""
    length_alpha: float | None = None
    """alpha of lambda_i = 1 - 1/(alpha n_i) (gae_length)."""
    value_low: float | None = None
    """Clamp the critic's values from below before GAE."""
    value_high: float | None = None
    """Clamp the critic's values from above before GAE."""

    # Trust region
    clip_low: float | None = None
    """Lower clip range: ratios below 1 - clip_low are stopped where A < 0 (clip, dcpo)."""
    clip_high: float | None = None
    """Upper clip range: ratios above 1 + clip_high are stopped where A > 0 (clip, dcpo)."""
    dual_clip: float | None = None
    """Absolute ratio above which tokens with A < 0 are stopped; 0 is off."""
    cispo_cap: float | None = None
    """Absolute cap of the detached ratio (cispo), not 1 + epsilon."""
    cispo_floor: float | None = None
    """Absolute floor of the detached ratio (cispo)."""
    sapo_tau_pos: float | None = None
    """Temperature of the gate where A > 0 (sapo)."""
    sapo_tau_neg: float | None = None
    """Temperature of the gate elsewhere (sapo)."""
    log_clip: float | None = None
    """Clip range of the log-ratio (gmpo, rspo)."""
    router_floor: float | None = None
    """Smallest router factor (rspo)."""
    router_stage: Literal["before_clip", "after_clip"] | None = None
    """Whether the router factor enters before the clip (rspo)."""
    trpo_beta: float | None = None
    """Coefficient of KL(old || new) (kl_penalty)."""
    trpo_target_kl: float | None = None
    """Target of the adaptive coefficient; 0 keeps it fixed (kl_penalty)."""

    # Sampler correction
    sampler_cap: float | None = None
    """Upper bound of a sampler weight."""
    sampler_floor: float | None = None
    """Lower bound of a sampler weight."""
    geo_low: float | None = None
    """Smallest geometric mean of a completion that is kept (geo_mask)."""
    geo_high: float | None = None
    """Largest geometric mean of a completion that is kept (geo_mask)."""
    sampler_denominator: Literal["all", "kept"] | None = None
    """Whether masked tokens stay in the denominators (mis_*, geo_mask)."""

    # Aggregation
    max_tokens: int | None = None
    """Constant divisor (sum_const, per_prompt_set_const); the run's generation limit if left out."""
    count_empty: bool | None = None
    """Whether completions without a token count in the number of completions."""
    pool: Literal["prompt", "batch"] | None = None
    """Sets per prompt, or one of the whole batch (per_prompt_set)."""

    # Filters
    drop_zero_variance: bool | None = None
    """Drop groups whose rewards are all equal."""
    dynamic_sampling: bool | None = None
    """The same, and sample more prompts until the batch is full."""
    mask_truncated: bool | None = None
    """Drop completions cut by the length limit."""
    keep: Literal["all", "positives", "negatives"] | None = None
    """Keep only completions with a reward above 0, or only the others."""
    filtered_denominator: Literal["kept", "all"] | None = None
    """Whether dropped completions stay in the denominators."""

    # Token weights
    top_entropy: float | None = None
    """Share of tokens with the highest entropy that keep their term; 0 is off."""
    top_entropy_denominator: Literal["all", "kept"] | None = None
    """Whether the others stay in the denominators."""
    lopti_eta: float | None = None
    """Probability that splits the two passes of Lopti; 0 is off."""
    reweight_alpha: float | None = None
    """alpha of advantage reweighting; 0 is off."""
    conflict_overlap: Literal["none", "or", "product"] | None = None
    """GTPO's conflict weights, and how overlapping masks combine."""
    entropy_gamma: float | None = None
    """gamma of GTPO's A - gamma <H>; 0 is off."""
    entropy_filter: bool | None = None
    """GTPO's filter of completions with high entropy."""
    entropy_threshold: float | None = None
    """Threshold of that filter, in nats."""
    initial_entropy: float | None = None
    """Mean entropy of the untouched model; measured over the first 100 prompts if left out."""

    # Regularisers
    kl_coef: float | None = None
    """Coefficient of the KL to the reference; 0 is off."""
    kl_in: Literal["loss", "reward"] | None = None
    """Where the KL term goes."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of a KL term in the loss."""
    entropy_coef: float | None = None
    """Coefficient of the entropy bonus; 0 is off."""
    nll_coef: float | None = None
    """Coefficient of the likelihood of correct completions; 0 is off."""
    value_coef: float | None = None
    """Coefficient of the critic's loss."""
    value_clip: float | None = None
    """Clip range of the critic's value; 0 is off."""

    # Reward shaping
    label_noise: float | None = None
    """Share of completions whose 0/1 reward is flipped."""
    label_noise_seed: int | None = None
    """Seed of the flips."""
    truncated_reward: Literal["keep", "zero"] | None = None
    """Reward of completions cut by the length limit."""
    reward_map: Literal["raw", "signed"] | None = None
    """``signed`` turns 0/1 into -1/+1."""
    entropy_reward: bool | None = None
    """Reward -<H> of the old policy instead of the given rewards."""
    invalid_entropy: float | None = None
    """<H> of completions without a parsable answer."""
    overlong_penalty: bool | None = None
    """DAPO's soft penalty on length."""
    overlong_max: int | None = None
    """Length at which the penalty is -1; the run's generation limit if left out."""
    overlong_cache: int | None = None
    """Length over which the penalty grows; a fifth of overlong_max if left out."""

    # Own parts, by import path: "my_package.my_module.name" or {class_path: ..., init_args: {...}}
    custom_advantage: str | dict[str, Any] | None = None
    """Function of AdvantageInputs that gives [N] or [N, T], or an Estimator."""
    custom_trust_region: str | dict[str, Any] | None = None
    """Function of Terms that gives F [n, T], or a TrustRegion."""
    custom_objective: str | dict[str, Any] | None = None
    """An Objective, or a function that makes one; the recipe is not used."""

    def resolve(self) -> Objective:
        """The objective.

        Raises:
            UserError: an override that does not apply, or parts that contradict each other.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "recipe"}
        return Objective.from_recipe(self.recipe, **given)
