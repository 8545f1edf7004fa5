"""Recipes: the named methods, each a whole composition that cannot be half set."""

from __future__ import annotations

from dataclasses import dataclass, field

from lit_grpo.objectives import advantages as adv
from lit_grpo.objectives import aggregation as agg
from lit_grpo.objectives import token_advantages as tok
from lit_grpo.objectives import trust_regions as tr
from lit_grpo.objectives.filters import Filters
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.regularizers import Regularizers
from lit_grpo.objectives.sampler_correction import TisToken
from lit_grpo.objectives.shaping import Shaping
from lit_grpo.objectives.token_weights import EntropySignal, TokenWeights


@dataclass(frozen=True)
class Recipe:
    """A method, and what to know before using it."""

    objective: Objective
    formula: str
    """The loss in one line."""
    use: str
    """When to use it."""
    failure: str
    """How it is known to fail."""
    source: str
    published: str
    """Settings beside the objective that it was published with and where that stands, and how the objective differs.
    "Second-hand" is what we have from other texts than the one named."""
    updates: int | None = None
    """Optimizer steps per rollout that it was published with; None: not one number, or not known."""
    optional: frozenset[str] = field(default_factory=frozenset)
    """Labels (:func:`checks.labels`) that may differ without the method losing its name."""
    off_policy: tr.TrustRegion | None = None
    """Trust region that comes with a ratio, for methods that have none on-policy."""


KL = frozenset({"kl"})
LANDSCAPE = (
    "128 prompts x 8, one update of 1024 completions or 4 of 32 prompts x 8 (these with clip 0.2, or without clip and "
    "importance sampling), lr 1e-6 constant, no weight decay, no KL (landscape paper, section 3 and App. L); betas "
    "0.9, 0.999 (verl's default)"
)
"""Settings that all runs of the landscape paper share."""
NSR = "1024 prompts x 8, minibatches of 256 prompts (4 updates), lr 1e-6, 3072 tokens (release, second-hand)"
CRITIC = Regularizers(kl_placement="reward", value_coef=1.0, value_clip=0.5)
SET, SET_CONST = agg.PerPromptSet(), agg.PerPromptSetConst()


def _likelihood(name: str, keep: str, aggregation: agg.Aggregation) -> Objective:
    return Objective(
        recipe=name,
        advantage=adv.Sign(),
        trust_region=tr.Clip(),
        aggregation=aggregation,
        filters=Filters(keep_sign=keep),  # type: ignore[arg-type]
    )


RECIPES: dict[str, Recipe] = {
    "reinforce": Recipe(
        Objective(
            recipe="reinforce", advantage=adv.Raw(), ratio="none", trust_region=tr.NoTrustRegion(),
            aggregation=agg.SeqSum(),
        ),
        formula="-(1/N) Σ_i (r_i - b) Σ_t lp",
        use="The unbiased policy gradient: a baseline to compare with, one update per rollout.",
        failure="High variance; the value of the loss says nothing about progress.",
        source="Williams 1992",
        published="no settings of its own",
        updates=1,
    ),
    "reinforce_bstar": Recipe(
        Objective(
            recipe="reinforce_bstar", advantage=adv.BStar(), ratio="none", trust_region=tr.NoTrustRegion(),
            aggregation=agg.SeqSum(),
        ),
        formula="-(1/N) Σ_i (r_i - Σ_j W_j r_j / Σ_j W_j) Σ_t lp, W_j = n_j or a squared score norm",
        use="Exactly on-policy training with the variance-minimising baseline (OPO).",
        failure="Wrong as soon as there is a second update; a bias of order 1/G, as for the group mean.",
        source="2505.23585",
        published="exactly one update per rollout, no KL, no entropy bonus (2505.23585, second-hand)",
        updates=1,
    ),
    "rloo": Recipe(
        Objective(
            recipe="rloo", advantage=adv.LeaveOneOut(), ratio="none", trust_region=tr.NoTrustRegion(),
            aggregation=agg.SeqSum(), regularizers=Regularizers(kl_coef=0.03, kl_placement="reward"),
        ),
        formula="-(1/N) Σ_i (r'_i - mean of the others) Σ_t lp, r' = r - β Σ_t (lp_old - lp_ref)",
        use="An unbiased group baseline without division by the standard deviation; G 2 to 8.",
        failure="With the product ratio, long completions leave the clip range at once.",
        source="2402.14740",
        published="group_size 2 to 4, kl_coef 0.03 (paper) or 0.05 (TRL, with ratio sequence_product) (second-hand)",
        optional=KL,
        off_policy=tr.Clip(),
    ),
    "reinforce_pp": Recipe(
        Objective(
            recipe="reinforce_pp", advantage=tok.BatchWhiten(), trust_region=tr.Clip(), aggregation=agg.TokenMean(),
            regularizers=Regularizers(kl_placement="reward"),
        ),
        formula="-(1/B) Σ min(ρA, clip(ρ)A), A = return-to-go whitened over the batch's tokens",
        use="One sample per prompt is enough; cheap batches without groups.",
        failure="Long completions weigh more in the statistics; easy and hard prompts share one baseline.",
        source="2501.03262",
        published="kl_coef 0.01, and 0 for verifiable rewards, which is taken here (OpenRLHF, second-hand)",
        optional=KL,
    ),
    "reinforce_pp_baseline": Recipe(
        Objective(
            recipe="reinforce_pp_baseline", advantage=tok.GroupMeanWhiten(), trust_region=tr.Clip(),
            aggregation=agg.TokenMean(), regularizers=Regularizers(kl_estimator="k2"),
        ),
        formula="-(1/B) Σ min(ρA, clip(ρ)A), A = whitened over tokens after r - μ_g",
        use="As REINFORCE++, with groups.",
        failure="One rare success in a batch gets a very large advantage.",
        source="2501.03262",
        published="kl_coef 1e-5 in the authors' script (second-hand). Here 0",
        optional=KL,
    ),
    "ppo": Recipe(
        Objective(
            recipe="ppo", advantage=tok.Gae(whiten=True), trust_region=tr.Clip(), aggregation=agg.TokenMean(),
            regularizers=CRITIC,
        ),
        formula="-(1/B) Σ min(ρA, clip(ρ)A) + ½ (1/B) Σ max((V-ret)², (V_clip-ret)²), A = GAE(1, λ) whitened",
        use="Credit for single tokens; a critic of the policy's size fits in memory.",
        failure="The critic leaves the reward range (negative on wrong answers) before the policy collapses.",
        source="1707.06347",
        published=(
            "lambda 1 (verl, OpenRLHF) or 0.95 (classic), value_clip 0.5 (verl) or 0.2 (TRL), critic lr 1e-5 at a "
            "policy lr of 1e-6 (second-hand). Here lambda 1, value_clip 0.5, and the critic has the policy's rate "
            "unless critic.optimizer is set"
        ),
        optional=KL,
    ),
    "trpo_penalty": Recipe(
        Objective(
            recipe="trpo_penalty", advantage=tok.Gae(), trust_region=tr.KlPenalty(), aggregation=agg.TokenMean(),
            regularizers=CRITIC,
        ),
        formula="(1/B) Σ [-ρA + β(ρ - 1 - log ρ)]",
        use="A smooth bound instead of a clip; set trpo_target_kl to let β adapt.",
        failure="Too small a β bounds nothing, too large a one stops learning.",
        source="1502.05477; 1707.06347 section 4",
        published="not published for language models; beta 1 is ours",
        optional=KL,
    ),
    "grpo": Recipe(
        Objective(recipe="grpo"),
        formula="-(1/N) Σ_i (1/n_i) Σ_t min(ρA, clip(ρ)A) + β KL, A = (r-μ_g)/(σ_g+ε)",
        use="The default for verifiable rewards.",
        failure="Wrong completions grow longer (1/n_i); too easy and too hard prompts weigh more (1/σ).",
        source="2402.03300",
        published=(
            "kl_coef 0.04, group_size 64, lr 1e-6, one update (2402.03300, second-hand). Here kl_coef 0, as in the "
            "landscape paper: " + LANDSCAPE
        ),
        updates=1,
        optional=KL,
    ),
    "imle": Recipe(
        Objective(
            recipe="imle", advantage=adv.Sign(), ratio="none", trust_region=tr.NoTrustRegion(),
            aggregation=agg.SeqSum(),
        ),
        formula="-(1/N) Σ_i sign(r_i) Σ_t lp",
        use="To study likelihood losses; not for training.",
        failure="Unbounded: a probability of wrong tokens near 0 gives ever larger steps.",
        source="landscape paper on GRPO variants, Eq. 4",
        published="not trained with in the source, only analysed; one update per rollout",
        updates=1,
    ),
    "pl": Recipe(
        _likelihood("pl", "positives", SET),
        formula="-(1/|A+|) Σ_{A+} (1/n_i) Σ_t min(ρ, clip(ρ)), mean over prompts with a positive",
        use="To study what positives alone do.",
        failure="On-policy: entropy and length fall together until only the answer is left, with no way back.",
        source="landscape paper, Eq. 7, 8",
        published=LANDSCAPE,
    ),
    "nl": Recipe(
        _likelihood("nl", "negatives", SET),
        formula="(1/|A-|) Σ_{A-} (1/n_i) Σ_t max(ρ, clip(ρ)), mean over prompts with a negative",
        use="To study what negatives alone do.",
        failure="Entropy, length and gradient norm explode, accuracy drops at once.",
        source="landscape paper, Eq. 9",
        published=LANDSCAPE,
    ),
    "cl": Recipe(
        _likelihood("cl", "all", SET),
        formula="(|A+| L_PL + |A-| L_NL)/|A|",
        use="GRPO with the sign as advantage: what the standard deviation is good for.",
        failure="Collapses later than PL and NL, still without a brake at solved prompts.",
        source="landscape paper, section 4.3",
        published=LANDSCAPE,
    ),
    "tnpl": Recipe(
        _likelihood("tnpl", "positives", SET_CONST),
        formula="-(1/(|A+| T)) Σ_{A+} Σ_t min(ρ, clip(ρ)), T the generation limit",
        use="PL without length preference.",
        failure="At collapse completions get long and random instead of short.",
        source="landscape paper, Eq. 12 (our reading)",
        published=LANDSCAPE,
    ),
    "tnnl": Recipe(
        _likelihood("tnnl", "negatives", SET_CONST),
        formula="(1/(|A-| T)) Σ_{A-} Σ_t max(ρ, clip(ρ))",
        use="NL without length preference.",
        failure="At collapse completions get short instead of long.",
        source="landscape paper, Eq. 12 (our reading)",
        published=LANDSCAPE,
    ),
    "tncl": Recipe(
        _likelihood("tncl", "all", SET_CONST),
        formula="-(1/(|A| T)) Σ_i sign(r_i) Σ_t min(ρ, clip(ρ)) by sign",
        use="The expected gradient of the sign itself; about as good as GRPO in the source.",
        failure="No brake at solved prompts.",
        source="landscape paper, Eq. 12",
        published=LANDSCAPE,
    ),
    "raft": Recipe(
        Objective(
            recipe="raft", advantage=adv.Sign(1.0, 0.0), ratio="none", trust_region=tr.NoTrustRegion(),
            aggregation=agg.TokenMean(),
        ),
        formula="-(1/B) Σ_{r>0} Σ_t lp",
        use="Rejection sampling and fine-tuning: the simplest thing that works.",
        failure="Entropy falls fast; nothing is learned from mistakes.",
        source="2304.06767",
        published="settings not known to us",
    ),
    "raft_pp": Recipe(
        Objective(
            recipe="raft_pp", advantage=adv.Sign(1.0, 0.0), trust_region=tr.Clip(), aggregation=agg.TokenMean(),
            regularizers=Regularizers(kl_coef=0.001, entropy_coef=0.001),
        ),
        formula="-(1/B) Σ_{r>0} Σ_t min(ρ, clip(ρ)) + .001 KL - .001 H, all tokens in B",
        use="RAFT with several updates per rollout.",
        failure="Fast at first, then low entropy stops exploration and GRPO overtakes it.",
        source="2504.11343 (released code)",
        published=(
            "group_size 4, batches of 1024 in minibatches of 256 (4 updates), lr 1e-6, 3072 tokens (released code, "
            "second-hand)"
        ),
        updates=4,
        optional=KL,
    ),
    "sft": Recipe(
        Objective(
            recipe="sft", advantage=adv.Sign(1.0, 1.0), ratio="none", trust_region=tr.NoTrustRegion(),
            aggregation=agg.TokenMean(), demonstrations=True,
        ),
        formula="-(1/B) Σ_i Σ_t lp of the data's own solutions, end of sequence included",
        use="The supervised baseline: the same data, model and optimizer; nothing is sampled, group_size 1.",
        failure="Learns one way to write each solution; raises pass@1 less and keeps less of pass@k than rewards do.",
        source="maximum likelihood; the baseline of 2402.03300",
        published=(
            "no settings of its own. As the baseline of the GTPO paper: lr 1e-6 cosine, warmup_ratio 0.005, betas "
            "0.9, 0.95, weight_decay 0.1, max_grad_norm 0.1 (2508.03772, Listing 1)"
        ),
    ),
    "psr": Recipe(
        Objective(
            recipe="psr", advantage=adv.Sign(), trust_region=tr.Clip(), aggregation=agg.TokenMean(),
            filters=Filters(keep_sign="positives"), regularizers=Regularizers(entropy_coef=0.001),
        ),
        formula="-(1/B+) Σ_{r>0} Σ_t min(ρ, clip(ρ)) - .001 H",
        use="To raise pass@1 quickly.",
        failure="pass@k at large k falls below the base model.",
        source="2506.01347",
        published=NSR,
        updates=4,
    ),
    "nsr": Recipe(
        Objective(
            recipe="nsr", advantage=adv.Sign(), trust_region=tr.Clip(), aggregation=agg.TokenMean(),
            filters=Filters(keep_sign="negatives"), regularizers=Regularizers(entropy_coef=0.001),
        ),
        formula="(1/B-) Σ_{r<=0} Σ_t max(ρ, clip(ρ)) - .001 H",
        use="To keep pass@k at large k; needs several clipped updates.",
        failure="On-policy and without clip it is NL and collapses.",
        source="2506.01347",
        published=NSR,
        updates=4,
    ),
    "w_reinforce": Recipe(
        Objective(
            recipe="w_reinforce", advantage=adv.Sign(0.1, -1.0), trust_region=tr.Clip(), aggregation=agg.TokenMean(),
            regularizers=Regularizers(entropy_coef=0.001),
        ),
        formula="-(1/B) Σ min(ρA, clip(ρ)A), A = λ+ on positives (.1), -1 on the others, - .001 H",
        use="Between NSR and PSR: diversity with some pull to right answers.",
        failure="With few mistakes left little is learned; with many, NL's instability.",
        source="2506.01347",
        published=NSR,
        updates=4,
    ),
    "reinforce_rej": Recipe(
        Objective(
            recipe="reinforce_rej", advantage=adv.Sign(), trust_region=tr.Clip(), aggregation=agg.TokenMean(),
            filters=Filters(drop_zero_variance=True, uniform_by="correct"),
            regularizers=Regularizers(kl_coef=0.001, entropy_coef=0.001),
        ),
        formula="-(1/B_kept) Σ_{mixed groups} Σ_t min(ρ r, clip(ρ) r) + .001 KL - .001 H, r = ±1",
        use="A baseline without statistics: only drop all-right and all-wrong prompts.",
        failure="The batch shrinks as prompts get solved.",
        source="2504.11343",
        published=(
            "group_size 4, batches of 1024 in minibatches of 256 (4 updates), lr 1e-6, 3072 tokens; the released code "
            "has rewards 0 and 1 and keeps dropped tokens in the denominator, its text does not (second-hand). Here "
            "as in the text: +1 and -1, kept tokens"
        ),
        updates=4,
        optional=KL,
    ),
    "dr_grpo": Recipe(
        Objective(
            recipe="dr_grpo", advantage=adv.GroupMean(), trust_region=tr.Clip(), aggregation=agg.SumConst(),
            shaping=Shaping(truncated_reward="zero"),
        ),
        formula="-(1/N) Σ_i (1/M) Σ_t min(ρA, clip(ρ)A), A = r - μ_g, M the generation limit",
        use="GRPO without its length and difficulty biases.",
        failure="Gradients shrink on nearly solved prompts; M rescales the loss against a KL term.",
        source="2503.20783",
        published=(
            "128 prompts x 8, updates of 128 completions (8 updates), M 3000 tokens, temperature 1, lr 1e-6 constant, "
            "no KL (README of sail-sg/understand-r1-zero); betas 0.9, 0.95 (second-hand). Here M is the run's limit"
        ),
        updates=8,
    ),
    "dapo": Recipe(
        Objective(
            recipe="dapo", advantage=adv.GroupStd(), trust_region=tr.Clip(0.2, 0.28), aggregation=agg.TokenMean(),
            filters=Filters(dynamic_sampling=True, uniform_by="correct"),
            shaping=Shaping(reward_map="signed", overlong_penalty=True),
        ),
        formula="-(1/B) Σ min(ρA, clip(ρ, .8, 1.28)A) over mixed groups, reward ±1 + overlong(n)",
        use="Long reasoning with entropy to keep: higher upper clip, only mixed groups, token mean.",
        failure="Sampling cost grows as prompts get solved; entropy may drift upwards.",
        source="2503.14476",
        published=(
            "512 prompts x 16, minibatches of 32 prompts (16 updates), lr 1e-6 with 10 steps of warm-up, weight_decay "
            "0.1, 20480 tokens with overlong_cache 4096, betas 0.9, 0.999 (verl's "
            "recipe/dapo/run_dapo_qwen2.5_32b.sh; L_max 16K with a cache of 4K in the tricks article); later scripts "
            "also dual_clip 10, the paper 20 rollouts of warm-up (second-hand). Groups are filtered by accuracy. Here "
            "L_max is the run's limit, the cache a fifth of it, no dual clip"
        ),
        updates=16,
    ),
    "lite_ppo": Recipe(
        Objective(
            recipe="lite_ppo", advantage=adv.BatchStd(), trust_region=tr.Clip(), aggregation=agg.TokenMean(),
        ),
        formula="-(1/B) Σ min(ρA, clip(ρ)A), A = (r-μ_g)/(σ_batch+ε)",
        use="A robust minimum: group mean, batch standard deviation, token mean.",
        failure="One easy batch shrinks σ_batch and inflates every advantage in it.",
        source="2508.08221",
        published=(
            "group_size 8, temperature 0.99, top_k 100, top_p 0.99 (second-hand). Here the full distribution is "
            "sampled, since the learner's probabilities are of that"
        ),
    ),
    "gspo": Recipe(
        Objective(recipe="gspo", ratio="sequence", trust_region=tr.Clip(3e-4, 4e-4)),
        formula="-(1/N) Σ_i min(s_i A_i, clip(s_i)A_i), s_i = exp(mean_t d)",
        use="Mixture-of-experts policies and long completions, several updates per rollout.",
        failure="10 to 15 % of tokens are clipped by design; with token-sized ε nothing is.",
        source="2507.18071",
        published="4 minibatches per rollout (second-hand)",
        updates=4,
    ),
    "gspo_token": Recipe(
        Objective(recipe="gspo_token", ratio="sequence_token", trust_region=tr.Clip(3e-4, 4e-4)),
        formula="-(1/N) Σ_i (1/n_i) Σ_t min(s_it A_it, clip(s_it)A_it), s_it = sg(s_i) π/sg(π)",
        use="GSPO where tokens have their own advantages or weights.",
        failure="As GSPO.",
        source="2507.18071 section 4.3",
        published="4 minibatches per rollout (second-hand)",
        updates=4,
    ),
    "gmpo": Recipe(
        Objective(recipe="gmpo", ratio="geometric", trust_region=tr.Gmpo()),
        formula="-(1/N) Σ_i A_i exp(mean_t y_t), y = d clipped at ±.4 on the side A pushes to",
        use="Outlier ratios: the geometric mean tames them, so the clip can be wide.",
        failure="Weights of single tokens are not possible.",
        source="2507.20673",
        published=(
            "128 prompts x 8, updates of 128 completions, one pass over them (8 updates), 3000 tokens, temperature 1, "
            "lr 1e-6 constant (released script, callsys/GMPO)"
        ),
        updates=8,
    ),
    "cispo": Recipe(
        Objective(recipe="cispo", trust_region=tr.Cispo(), aggregation=agg.TokenMean()),
        formula="-(1/B) Σ sg(min(ρ, cap)) A lp",
        use="Many updates per rollout, with rare tokens that must keep their gradient.",
        failure="The cap is absolute, not 1+ε: off by one turns it into another method.",
        source="2506.13585",
        published=(
            "16 updates per rollout (GRPO++ tricks article); the cap is not published, 5.0 is ScaleRL's (2510.13786, "
            "as in TRL)"
        ),
        updates=16,
    ),
    "sapo": Recipe(
        Objective(recipe="sapo", trust_region=tr.Sapo()),
        formula="-(1/N) Σ_i (1/n_i) Σ_t (4/τ) sigmoid(τ(ρ-1)) A, τ 1 or 1.05 by the sign of A",
        use="A smooth gate instead of a clip.",
        failure="The value of the loss is -(2/τ)A at ratio 1: not comparable to a PPO loss.",
        source="2511.20347",
        published="4 minibatches per rollout; batch and lengths not published; tau 1 and 1.05 also in TRL",
        updates=4,
    ),
    "dcpo": Recipe(
        Objective(
            recipe="dcpo", advantage=tok.SmoothAdvantage(), trust_region=tr.Dcpo(), aggregation=agg.OnlyTokenMean()
        ),
        formula="-Σ_i (1/n_i) Σ_t F, bounds of F widen for rare tokens, A smoothed over the prompt's visits",
        use="Prompts are seen several times; uniform groups still teach.",
        failure="No 1/N: the gradient grows with the batch, so compare norms with care.",
        source="2509.02333",
        published=(
            "group_size 16, 3072 tokens; clip 0.16 and 0.2 in the paper, 0.2 and 0.28 in the script (second-hand). "
            "Here the paper's"
        ),
    ),
    "lopti": Recipe(
        Objective(
            recipe="lopti", trust_region=tr.Clip(0.2, 0.24, 10.0), aggregation=agg.TokenMean(),
            token_weights=TokenWeights(lopti_eta=0.5), regularizers=Regularizers(kl_coef=0.001),
        ),
        formula="two updates: first tokens with π_old < η, then the others; each -(1/B) Σ min(ρA, clip(ρ)A) + .001 KL",
        use="Rare tokens drown the others' gradients.",
        failure="Twice the optimizer steps; the second pass works against the first.",
        source="2505.12929",
        published=(
            "64 prompts x 8, minibatches of 256 completions, temperature 0.7, lr 1e-6; eta 0.5 together with "
            "reweight_alpha 0.3, alone eta 0.4 (release, second-hand). Here eta 0.5"
        ),
        updates=2,
        optional=KL,
    ),
    "advantage_reweighting": Recipe(
        Objective(
            recipe="advantage_reweighting", trust_region=tr.Clip(0.2, 0.24, 10.0), aggregation=agg.TokenMean(),
            token_weights=TokenWeights(reweight_alpha=0.3), regularizers=Regularizers(kl_coef=0.001),
        ),
        formula="-(1/B) Σ min(ρA', clip(ρ)A') + .001 KL, A' = A(α π_old + 1 - α)",
        use="The same aim as Lopti in one pass.",
        failure="A large α silences the tokens at which reasoning forks.",
        source="2505.12929",
        published=(
            "64 prompts x 8, minibatches of 256 completions, temperature 0.7, lr 1e-6; alpha 0.3 together with "
            "lopti_eta 0.5, alone 0.2 (release, second-hand). Here alpha 0.3"
        ),
        updates=2,
        optional=KL,
    ),
    "rspo": Recipe(
        Objective(recipe="rspo", ratio="geometric", trust_region=tr.Rspo()),
        formula="GMPO with d + log γ, γ = max(exp(-mean |Δ log router|), floor)",
        use="Mixture-of-experts policies whose routing drifts between updates.",
        failure="On dense models it is GMPO; with one update γ is 1.",
        source="2510.23027",
        published="batch, updates and floor not known to us; router_floor 0.8 is ours",
    ),
    "vapo": Recipe(
        Objective(
            recipe="vapo", advantage=tok.GaeLength(), trust_region=tr.Clip(0.2, 0.28), aggregation=agg.TokenMean(),
            regularizers=Regularizers(kl_placement="reward", nll_coef=0.1, value_coef=1.0), critic_warmup_rollouts=50,
        ),
        formula="-(1/B) Σ min(ρA, clip(ρ)A) + μ NLL(positives) + critic, A = GAE(1, 1 - 1/(α n_i))",
        use="Long reasoning with a critic that was pretrained on Monte Carlo returns.",
        failure="Without value pretraining it does not get off the ground.",
        source="2504.05118",
        published=(
            "512 prompts x 16, minibatches of 512 completions (16 updates), 50 rollouts of value pretraining, lr "
            "1e-6, the critic's 2e-6 (2504.05118, second-hand). Here the pretraining is the recipe's "
            "(critic.warmup_rollouts left out: 50), and the critic has the policy's rate unless critic.optimizer is "
            "set"
        ),
        updates=16,
    ),
    "gtpo": Recipe(
        Objective(
            recipe="gtpo", ratio="self", trust_region=tr.NoTrustRegion(),
            token_weights=TokenWeights(conflict_overlap="or"),
            entropy_signal=EntropySignal(entropy_gamma=0.1, entropy_filter="all"),
        ),
        formula="-(1/N) Σ_i δ_i (A_i - γ<H>_i)/n_i Σ_t λ π/sg(π), λ 0/1/2 on conflict tokens",
        use="Small groups without KL, models whose entropy starts below ln 2.",
        failure="Uniform groups are pushed down in proportion to their entropy.",
        source="2508.03772",
        published=(
            "1 prompt x 8 or 12, one update, lr 1e-6 cosine, warmup_ratio 0.005, betas 0.999999, 0.999999, "
            "weight_decay 0.1, max_grad_norm 0.1, paged AdamW of 8 bits, LoRA of rank 128 or 64 on 4 bits, prompt and "
            "completion 5500 tokens of which 4000 prompt (Listing 1); rewards: format 10, 1 or 0, accuracy 10 (App. "
            "8.2). The released code differs in five points: docs/objectives.md"
        ),
        updates=1,
    ),
    "olmo3": Recipe(
        Objective(
            recipe="olmo3", advantage=adv.GroupMean(), trust_region=tr.Clip(0.2, 0.272), sampler=TisToken(),
            aggregation=agg.TokenMean(), filters=Filters(dynamic_sampling=True),
        ),
        formula="-(1/B) Σ min(c, 2) min(ρA, clip(ρ, .8, 1.272)A) over mixed groups, A = r - μ_g",
        use="A good start for a real run: all the small lessons in one.",
        failure="Sampling cost grows as prompts get solved.",
        source="2512.13961",
        published=(
            "64 prompts x 8 (GRPO++ tricks article), one update, 32768 tokens, lr 1e-6 (7B) or 2e-6 (32B) constant "
            "(training scripts, second-hand)"
        ),
        updates=1,
    ),
    "rent": Recipe(
        Objective(
            recipe="rent", trust_region=tr.Clip(0.2, 0.2, 3.0), aggregation=agg.TokenMean(),
            shaping=Shaping(entropy_reward=True), regularizers=Regularizers(kl_coef=0.001),
        ),
        formula="-(1/B) Σ min(ρA, clip(ρ)A) + .001 KL, reward -<H>_i, no labels",
        use="Unlabelled prompts; watch the held-out accuracy.",
        failure="Becomes certain of wrong answers; collapses on-policy.",
        source="2505.22660",
        published="group_size 5, minibatches of 256, lr 1e-6 (second-hand)",
        optional=KL,
    ),
}  # fmt: skip
