"""Claims that are calculated: on losses and gradients of a policy that can be written down whole."""

from __future__ import annotations

from scripts.study_cases.claims.claim import GTPO, LANDSCAPE, calculated

EXACT_CLAIMS = (
    calculated(
        "eq11_pl_is_critical",
        f"{LANDSCAPE}, Eq. 8 and 11",
        "S_PL, one completion with probability 1, is critical for L_PL.",
    ),
    calculated(
        "eq11_nl_is_critical",
        f"{LANDSCAPE}, Eq. 9 and 11, App. K",
        "S_NL, the uniform policy, is critical for L_NL where all "
        "completions have one length; over a few drawn completions it is not, so the point is not stable.",
    ),
    calculated(
        "eq11_nl_only_uniform",
        f"{LANDSCAPE}, Eq. 10 and 11",
        "The uniform policy is what descent of L_NL leads to: other policies "
        "(one length, all completions wrong) are not critical.",
        "With one length and one sign the expected gradient is that of the sum of all probabilities, a "
        "constant: every policy is critical, and the uniform one is in no way singled out.",
    ),
    calculated(
        "eq8_pl_shortens",
        f"{LANDSCAPE}, section 4",
        "Descent of the sequence-mean L_PL shortens completions. With all "
        "completions correct its expected gradient is that of -E[1/|a|], which we check against the recipe.",
    ),
    calculated(
        "eq9_nl_lengthens",
        f"{LANDSCAPE}, section 4",
        "Descent of the sequence-mean L_NL lengthens completions: with all "
        "completions wrong its expected gradient is that of E[1/|a|].",
    ),
    calculated(
        "eq13_14_least_loss",
        f"{LANDSCAPE}, Eq. 13 and 14",
        "Under token normalisation the loss of a completion is least at the limit T for PL, and at one token for NL.",
    ),
    calculated(
        "eq13_14_length_pressure",
        f"{LANDSCAPE}, Eq. 13 and 14",
        "So token-normalised PL lengthens completions, and NL shortens "
        "them: along a descent in expectation, all completions of one sign.",
        "Divided by a constant, the expected gradient over completions of one sign is that of the sum of "
        "their probabilities. Where all have the sign it is zero, and with it any pressure on the length; "
        "what the value of the loss is at another length does not enter.",
    ),
    calculated(
        "eq10_one_token_expected",
        f"{LANDSCAPE}, Eq. 10",
        "With completions of one token, L_PL in expectation is minimised by a "
        "distribution on a single token, and L_NL by the uniform one.",
        "The expected gradient of L_PL is that of -log of the probability of all correct tokens together, and "
        "says nothing of how it is shared out among them; that of L_NL is that of +log of the probability of "
        "the wrong ones, which it takes away.",
    ),
    calculated(
        "c_pl_sampled", f"{LANDSCAPE}, section 4, C_PL", "On a few drawn completions L_PL leads to the least entropy."
    ),
    calculated(
        "c_nl_sampled",
        f"{LANDSCAPE}, section 4, C_NL",
        "On a few drawn completions L_NL leads to the greatest entropy (one token, all completions wrong).",
        "With one sign the expected gradient is zero, and each drawn token is pushed by the same amount, up "
        "or down: for small steps both signs are the same random walk, which ends at a single token.",
    ),
    calculated(
        "b_star_least_variance",
        "REINFORCE to SAPO, 3.1",
        "b* = E[r |s|^2] / E[|s|^2] is the baseline of least variance, and the recipe's estimate finds it.",
    ),
    calculated(
        "baseline_no_bias", "REINFORCE to SAPO, 3", "A constant baseline does not change the expected gradient."
    ),
    calculated(
        "group_mean_shrinks",
        "RLOO, Dr. GRPO",
        "The mean of a group of G, own reward included, shrinks the expected gradient by "
        "(G - 1)/G and changes nothing else of it.",
    ),
    calculated(
        "conflicts_grow_with_g_exact", f"{GTPO}, Fig. 5b", "The share of tokens in conflict grows with the group."
    ),
    calculated(
        "conflict_correction_exact",
        f"{GTPO}, Eq. 6 and 8",
        "GRPO pushes an opening tag that all completions share down where "
        "correct ones are longer; the conflict correction does not.",
    ),
)
