"""Claims of GTPO: conflicts and format on answers in tags, entropy terms where completions are uncertain enough."""

from __future__ import annotations

from scripts.study_cases import measures as m
from scripts.study_cases.claims.claim import END, ENTROPY, GTPO, Claim, down, trained, up
from scripts.study_cases.claims.remarks import both, fall_of, percent, values_of

FORMAT, CONFLICTS, KL = "reward/format", "policy/conflict_frac", "policy/kl_ref_k3"
FILTERED = "completions/entropy_filtered_frac"
FAST = "countdown_fast/"
FULL, NO_FILTER = FAST + "gtpo", FAST + "gtpo_no_filter"
THRESHOLD_105, THRESHOLD_200 = FAST + "gtpo_threshold_105", FAST + "gtpo_threshold_200"
ONLY_NEGATIVES, ON_SUMS = FAST + "gtpo_negatives", "two_form_fast/gtpo"
ON_TAGS = ("reward/accuracy", FORMAT, CONFLICTS)


def kl_claim(name: str, arm: str, beta: str) -> Claim:
    """Return the claim on the order in time of entropy, KL and collapse under a KL penalty."""
    return trained(
        name,
        f"{GTPO}, Fig. 1",
        f"Under GRPO with a KL penalty of {beta}, entropy has risen when the reward is lost, and KL has not moved yet. "
        "The reward stands for the source's format, which nothing here loses.",
        up("entropy at the loss of a fifth of the reward, less that at the best", arm, m.since_best(ENTROPY)),
        down("KL at that loss, over that at the best", arm, m.since_best(KL, ratio=True), limit=2.0),
        curves=("reward", ENTROPY, KL),
    )


GTPO_CLAIMS = (
    trained(
        "slow_moments",
        f"{GTPO}, Fig. 6",
        "GRPO with Adam's betas at 0.999999 ends lower than with the usual ones (in the source clearly so for one of "
        "two models).",
        down("final reward, less that with 0.9 and 0.999", "two_form/grpo_slow_moments", END, "two_form/grpo"),
    ),
    trained(
        "conflicts_grow_with_g",
        f"{GTPO}, Fig. 5 b",
        "The share of tokens in conflict grows with G in training.",
        up(
            "mean share with G = 8, less that with G = 4",
            "tags/conflict_only",
            m.average(CONFLICTS),
            "tags/conflict_g4",
        ),
        up(
            "mean share with G = 16, less that with G = 8",
            "tags/conflict_g16",
            m.average(CONFLICTS),
            "tags/conflict_only",
        ),
        curves=ON_TAGS,
    ),
    trained(
        "correction_protects_format",
        f"{GTPO}, Fig. 3",
        "The conflict correction alone keeps the form better than GRPO.",
        up("mean share of complete forms, less GRPO's", "tags/conflict_only", m.average(FORMAT), "tags/grpo"),
        curves=("reward/accuracy", FORMAT, ENTROPY),
        remark=both(
            values_of("tags/grpo", m.end(FORMAT), "GRPO alone ends with ", " complete forms,"),
            values_of("tags/grpo", m.start(FORMAT), "from ", ": it loses none that could be protected."),
        ),
    ),
    trained(
        "kl_slows",
        f"{GTPO}, Fig. 5 a",
        "A KL penalty of 0.04 ends with less accuracy, fewer complete forms and more entropy than none.",
        down("final accuracy, less that without", "tags/grpo_kl", m.end("reward/accuracy"), "tags/grpo"),
        down("mean share of complete forms, less that without", "tags/grpo_kl", m.average(FORMAT), "tags/grpo"),
        up("final entropy, less that without", "tags/grpo_kl", m.end(ENTROPY), "tags/grpo"),
        curves=("reward/accuracy", FORMAT, ENTROPY),
    ),
    kl_claim("kl_late_entropy_in_time", "two_form_fast/grpo_kl", "0.04"),
    kl_claim("kl_late_small_penalty", "two_form_fast/grpo_kl_small", "0.000001"),
    trained(
        "gtpo_against_grpo",
        f"{GTPO}, Fig. 2",
        "GTPO is more stable than GRPO, at the rate at which GRPO loses reward.",
        up("final reward, less GRPO's", FULL, END, FAST + "grpo"),
        remark=fall_of({"of GTPO": (FULL,), "of GRPO": (FAST + "grpo",)}),
    ),
    trained(
        "gtpo_against_grpo_on_sums",
        f"{GTPO}, Fig. 2",
        "As gtpo_against_grpo, on sums with a short and a long form.",
        up("final reward, less GRPO's", ON_SUMS, END, "two_form_fast/grpo"),
        remark=fall_of({"of GTPO": (ON_SUMS,), "of GRPO": ("two_form_fast/grpo",)}),
    ),
    trained(
        "gtpo_gamma",
        f"{GTPO}, Fig. 4 a",
        "A gamma of 0.1 ends above one of 0.001, and with more entropy.",
        up("final reward, less that with 0.001", FULL, END, FAST + "gtpo_gamma_0001"),
        up("final entropy, less that with 0.001", FULL, m.end(ENTROPY), FAST + "gtpo_gamma_0001"),
    ),
    trained(
        "gtpo_gamma_others",
        f"{GTPO}, Fig. 4 a",
        "A gamma of 0.1 ends above those of 0.01 and 0.000001.",
        up("final reward, less that with 0.01", FULL, END, FAST + "gtpo_gamma_001"),
        up("final reward, less that with 0.000001", FULL, END, FAST + "gtpo_gamma_0000001"),
    ),
    trained(
        "gtpo_filter",
        f"{GTPO}, Fig. 4 a",
        "Without the filter entropy rises and the reward is lost.",
        up("final reward, less that without", FULL, END, NO_FILTER),
        down("mean entropy, less that without", FULL, m.average(ENTROPY), NO_FILTER),
        remark=values_of(
            FULL,
            percent(FILTERED),
            "The filter takes ",
            " % of the completions. Answers in tags never reach its threshold, so the ablations are on countdown.",
        ),
    ),
    trained(
        "gtpo_filter_on_sums",
        f"{GTPO}, Fig. 4 a",
        "As gtpo_filter, on sums with a short and a long form.",
        up("final reward, less that without", ON_SUMS, END, ON_SUMS + "_no_filter"),
        down("mean entropy, less that without", ON_SUMS, m.average(ENTROPY), ON_SUMS + "_no_filter"),
        remark=values_of(ON_SUMS, percent(FILTERED), "The filter takes ", " % of the completions."),
    ),
    trained(
        "gtpo_threshold",
        f"{GTPO}, Fig. 4 b",
        "Thresholds of 0.7 (here ln 2) and 1.05 end above one of 2.0, and with less entropy.",
        up("final reward with ln 2, less that with 2.0", FULL, END, THRESHOLD_200),
        up("final reward with 1.05, less that with 2.0", THRESHOLD_105, END, THRESHOLD_200),
        down("mean entropy with ln 2, less that with 2.0", FULL, m.average(ENTROPY), THRESHOLD_200),
        down("mean entropy with 1.05, less that with 2.0", THRESHOLD_105, m.average(ENTROPY), THRESHOLD_200),
        remark=both(
            values_of(THRESHOLD_105, percent(FILTERED), "Above 1.05 are ", " % of the completions,"),
            values_of(THRESHOLD_200, percent(FILTERED), "above 2.0 ", " %."),
        ),
    ),
    trained(
        "gtpo_negatives_only",
        f"{GTPO}, Fig. 4 c",
        "A filter (0.7) on completions with a negative advantage alone ends below no filter, and with less entropy.",
        down("final reward, less that without a filter", ONLY_NEGATIVES + "_070", END, NO_FILTER),
        down("final entropy, less that without a filter", ONLY_NEGATIVES + "_070", m.end(ENTROPY), NO_FILTER),
        remark=values_of(ONLY_NEGATIVES + "_070", percent(FILTERED), "It takes ", " % of the completions."),
    ),
    trained(
        "gtpo_negatives_only_looser",
        f"{GTPO}, Fig. 4 c",
        "As gtpo_negatives_only, with thresholds of 1.05 and 2.0.",
        down("final reward with 1.05, less that without a filter", ONLY_NEGATIVES + "_105", END, NO_FILTER),
        down("final reward with 2.0, less that without a filter", ONLY_NEGATIVES + "_200", END, NO_FILTER),
    ),
    trained(
        "gtpo_terms_on_grpo",
        f"{GTPO}, Fig. 4 d",
        "Entropy filter (1.05) and regulariser (0.1) help GRPO, and GTPO with the same ends above it.",
        up("final reward of GRPO with both, less that of GRPO", FAST + "grpo_entropy_terms", END, FAST + "grpo"),
        up("final reward of GTPO, less that of GRPO with both", THRESHOLD_105, END, FAST + "grpo_entropy_terms"),
    ),
)
