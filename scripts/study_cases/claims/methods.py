"""Claims of the papers behind single methods."""

from __future__ import annotations

from scripts.study_cases import measures as m
from scripts.study_cases.claims.claim import END, ENTROPY, LENGTH, Claim, down, trained, up
from scripts.study_cases.claims.remarks import both, clipped, fall_of, values_of

LEARNS, FOUR = "two_form/grpo", "two_form/off_grpo_clip"
QUARTER = "two_form_quarter/grpo"
FEW_BITS = "two_form_quantised/"
GREEDY = m.last("val/pass@1")
TOO_FAST = fall_of(
    {"of GRPO": (FOUR,)},
    "four updates at the rate of one are too many for the baseline; the claim's twin has a quarter.",
)
FAR = clipped({"GRPO": QUARTER}, "at this rate the policy stays near the old one, where all these bounds are alike.")


def many_updates(method: str, says: str, source: str) -> tuple[Claim, Claim]:
    """Return the claim that a method ends above GRPO under four updates, at the rate of one and at a quarter of it."""
    statement = f"With four updates {says} ends above GRPO."
    fast, slow = f"two_form/off_{method}", f"two_form_quarter/{method}"
    name = f"{method}_many_updates"
    return (
        trained(name, source, statement, up("final reward, less GRPO's", fast, END, FOUR), remark=TOO_FAST),
        trained(
            f"{name}_quarter",
            source,
            f"As {name}, with a quarter of the rate for each update.",
            up("final reward, less GRPO's", slow, END, QUARTER),
            remark=FAR,
        ),
    )


METHOD_CLAIMS = (
    trained(
        "clip_higher_keeps_entropy",
        "DAPO (2503.14476), Fig. 2",
        "A higher upper bound keeps the entropy up.",
        up("final entropy, less that with equal bounds", "two_form/off_grpo_clip_higher", m.end(ENTROPY), FOUR),
        remark=TOO_FAST,
    ),
    trained(
        "clip_higher_keeps_entropy_quarter",
        "DAPO (2503.14476), Fig. 2",
        "As clip_higher_keeps_entropy, with a quarter of the rate for each update.",
        up("final entropy, less that with equal bounds", "two_form_quarter/grpo_clip_higher", m.end(ENTROPY), QUARTER),
        remark=FAR,
    ),
    trained(
        "dynamic_sampling_fewer_steps",
        "DAPO (2503.14476), Fig. 6",
        "Dynamic sampling reaches a reward in fewer steps.",
        down("rollouts to a reward of 0.8, less GRPO's", "two_form/grpo_dynamic", m.reached(0.8), LEARNS),
        curves=("reward", "sampling/reward", ENTROPY),
    ),
    trained(
        "dr_grpo_length",
        "Dr. GRPO (2503.20783), Fig. 5",
        "Without 1/|a| wrong completions do not grow.",
        down(
            "final length of wrong completions, less GRPO's",
            "two_form/dr_grpo",
            m.end("completions/incorrect_length"),
            LEARNS,
        ),
        curves=("reward", "completions/incorrect_length", LENGTH),
    ),
    trained(
        "w_reinforce_diversity",
        "Zhu et al. (2506.01347)",
        "W-REINFORCE keeps more diversity than positives alone.",
        up(
            "different completions of a group, share, less PSR's",
            "two_form/w_reinforce",
            m.end("groups/distinct_frac"),
            "two_form/psr",
        ),
        down(
            "groups without a right completion (1 - pass@8), less PSR's",
            "two_form/w_reinforce",
            m.end("groups/all_wrong_frac"),
            "two_form/psr",
        ),
        curves=("reward", "groups/distinct_frac", "groups/all_wrong_frac"),
        remark=values_of(
            "two_form/psr",
            m.end("groups/all_wrong_frac"),
            "PSR ends with ",
            " of the groups without a right completion, which leaves diversity nothing to add at k = 8; "
            "countdown_w_reinforce has more room.",
        ),
    ),
    trained(
        "critic_pretraining",
        "VAPO (2504.05118), Table 1",
        "Without value pretraining VAPO ends lower.",
        up("final reward, less that without pretraining", "two_form/vapo", END, "two_form/vapo_no_pretraining"),
        curves=("reward", "critic/value_correct", "critic/value_incorrect"),
        remark=fall_of(
            {"without pretraining": ("two_form/vapo_no_pretraining",), "with it": ("two_form/vapo",)},
            "nothing collapses here; pretraining is 20 rollouts, before 60 of the policy in both.",
        ),
    ),
    trained(
        "length_adaptive_lambda",
        "VAPO (2504.05118), Table 1",
        "A lambda that grows with the length, 1 - 1/(alpha n), ends above one of 0.95 for all. Alpha is 1 here and "
        "not 0.05, since completions have at most 24 tokens: lambda is from 0.75 at 4 tokens to 0.96 at 24.",
        up("final reward, less that with 0.95", "two_form/vapo", END, "two_form/vapo_fixed_lambda"),
    ),
    trained(
        "tis_quantised_sampler",
        "TIS (Yao et al.)",
        "A sampler with few bits costs reward, and truncated importance sampling repairs it: a sampler whose weights "
        "are rounded to 4 bits, greedy answers of the learner's own weights to held-out questions.",
        down(
            "pass@1 without correction, less that of an exact sampler", FEW_BITS + "bits_4", GREEDY, FEW_BITS + "grpo"
        ),
        up("pass@1 with correction, less that without", FEW_BITS + "bits_4_tis", GREEDY, FEW_BITS + "bits_4"),
        curves=("reward", "val/pass@1", "sampler_mismatch/logprob_abs_diff"),
        remark=values_of(
            FEW_BITS + "bits_4",
            m.average("sampler_mismatch/prob_abs_diff_max"),
            "The greatest difference of a token's probability in a rollout is ",
            "; the source has 0.4 with bfloat16 and 1.0 with int8.",
        ),
    ),
    trained(
        "tis_sampler_of_3_bits",
        "TIS (Yao et al.)",
        "As tis_quantised_sampler, with 3 bits.",
        down(
            "pass@1 without correction, less that of an exact sampler", FEW_BITS + "bits_3", GREEDY, FEW_BITS + "grpo"
        ),
        up("pass@1 with correction, less that without", FEW_BITS + "bits_3_tis", GREEDY, FEW_BITS + "bits_3"),
        curves=("reward", "val/pass@1", "sampler_mismatch/logprob_abs_diff"),
        remark=both(
            values_of(
                FEW_BITS + "bits_3",
                m.average("sampler_mismatch/logprob_abs_diff"),
                "Sampler and learner differ by ",
                " nats a token,",
            ),
            values_of(FEW_BITS + "bits_3", m.start("reward"), "and the sampler begins with a reward of ", ","),
            values_of(FEW_BITS + "grpo", m.start("reward"), "the learner with ", "."),
        ),
    ),
    *many_updates("gspo", "GSPO", "GSPO (2507.18071), Fig. 1"),
    *many_updates("gmpo", "GMPO", "GMPO (2507.20673), Fig. 1"),
    *many_updates("cispo", "CISPO", "CISPO (2506.13585), Fig. 2"),
    *many_updates("sapo", "SAPO", "SAPO (2511.20347)"),
    trained(
        "lite_ppo_batch_std",
        "LitePPO (2508.08221)",
        "Deviation over the batch and means over tokens end above GRPO.",
        up("final reward, less GRPO's", "two_form/lite_ppo", END, LEARNS),
    ),
)
