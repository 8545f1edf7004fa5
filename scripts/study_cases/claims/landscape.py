"""Claims of the landscape study, on sums with a short and a long form."""

from __future__ import annotations

from scripts.study_cases import measures as m
from scripts.study_cases.claims.claim import DELTA, END, ENTROPY, LANDSCAPE, LENGTH, LOST, NORM, down, trained, up
from scripts.study_cases.claims.remarks import both, clipped, fall_of, longer_when_right, lowest_at, values_of

# Claims on stability are tried at the rate at which something collapses, all others at that at which GRPO learns.
GRPO, PL, NL, CL = (f"two_form_fast/{name}" for name in ("grpo", "pl", "nl", "cl"))
TNPL, TNNL, TNCL = (f"two_form_fast/{name}" for name in ("tnpl", "tnnl", "tncl"))
OFF_PL, OFF_NL, OFF_CL = (f"two_form_fast/off_{name}_clip" for name in ("pl", "nl", "cl"))
BARE_GRPO, BARE_PL, BARE_NL, BARE_CL = (f"two_form_fast/off_{name}_plain" for name in ("grpo", "pl", "nl", "cl"))
LEARNS, SLOW_PL, SLOW_NL, SLOW_CL = (f"two_form/{name}" for name in ("grpo", "pl", "nl", "cl"))
SLOW_OFF_PL, SLOW_OFF_NL, SLOW_OFF_CL = (f"two_form_off/{name}_clip" for name in ("pl", "nl", "cl"))
SLOW_BARE_GRPO, SLOW_BARE_PL, SLOW_BARE_NL, SLOW_BARE_CL = (
    f"two_form_off/{name}_plain" for name in ("grpo", "pl", "nl", "cl")
)
TASK_LENGTHENS = "the task and not the loss decides the sign here, and training on right ones alone lengthens."
UNDONE = "four updates at this rate undo every form at once, and nothing is left to tell them apart."


def lead(key: str) -> m.Measure:
    """Rollouts from the doubling of delta pi to that of another metric."""
    return lambda run: m.doubled(key)(run) - m.doubled(*DELTA)(run)


def lead_of_loss(run: m.Run) -> float:
    """Rollouts from the doubling of delta pi to the collapse."""
    return m.collapse(run) - m.doubled(*DELTA)(run)


LANDSCAPE_CLAIMS = (
    trained(
        "pl_loses_entropy_and_length",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "On-policy PL collapses: entropy and length fall.",
        down("change of the entropy", PL, m.change(ENTROPY)),
        down("change of the length", PL, m.change(LENGTH)),
        down("final reward, less GRPO's", PL, END, GRPO),
        remark=both(
            longer_when_right(PL, TASK_LENGTHENS),
            fall_of({"of PL": (PL,), "of GRPO": (GRPO,)}, "at this rate GRPO collapses as well."),
        ),
    ),
    trained(
        "nl_explodes_entropy_and_length",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "On-policy NL collapses: entropy and length explode.",
        up("highest entropy, less that at the start", NL, m.rise(ENTROPY)),
        up("change of the length", NL, m.change(LENGTH)),
        down("final reward, less GRPO's", NL, END, GRPO),
        remark=values_of(
            NL, m.end(LENGTH), "NL ends at ", " tokens; the long form of an answer has 11 to 13, the limit is 24."
        ),
    ),
    trained(
        "cl_delays",
        f"{LANDSCAPE}, Fig. 4 a, b",
        "CL collapses later than PL and than NL.",
        up("collapse, rollouts after PL's", CL, LOST, PL),
        up("collapse, rollouts after NL's", CL, LOST, NL),
        remark=fall_of(
            {"of CL": (CL,), "of PL": (PL,), "of NL": (NL,)},
            "later for every seed, but by few rollouts beside the ten that a collapse is a mean of.",
        ),
    ),
    trained(
        "advantages_prevent",
        f"{LANDSCAPE}, Fig. 4 a, b",
        "GRPO's advantages prevent the collapse of CL.",
        up("final reward, less CL's", GRPO, END, CL),
        up("collapse, rollouts after CL's", GRPO, LOST, CL),
        remark=fall_of(
            {"of GRPO": (GRPO,), "of CL": (CL,)},
            "the rate is too high for GRPO as well; it loses less of its reward, and as early.",
        ),
    ),
    trained(
        "clipping_stabilises",
        f"{LANDSCAPE}, Fig. 3",
        "With four updates, importance sampling and clip, NL and PL are more stable than on-policy.",
        up("final reward of NL, less that on-policy", OFF_NL, END, NL),
        up("final reward of PL, less that on-policy", OFF_PL, END, PL),
        remark=fall_of({"with four updates": (OFF_NL, OFF_PL), "on-policy": (NL, PL)}, UNDONE),
    ),
    trained(
        "no_clip_hastens",
        f"{LANDSCAPE}, Fig. 7",
        "With four updates and neither of them, NL and PL collapse sooner than on-policy.",
        down("collapse of NL, rollouts after that on-policy", BARE_NL, LOST, NL),
        down("collapse of PL, rollouts after that on-policy", BARE_PL, LOST, PL),
        remark=fall_of(
            {"with neither": (BARE_NL, BARE_PL), "with both": (OFF_NL, OFF_PL)},
            "the four updates alone hasten it, and that clip and importance sampling are missing shows nowhere.",
        ),
        also=(OFF_NL, OFF_PL),
    ),
    trained(
        "advantages_delay_off_policy",
        f"{LANDSCAPE}, Fig. 4 c, d",
        "Off-policy without clip, GRPO collapses later than CL.",
        up("collapse, rollouts after CL's", BARE_GRPO, LOST, BARE_CL),
        up("final reward, less CL's", BARE_GRPO, END, BARE_CL),
        remark=fall_of({"of GRPO": (BARE_GRPO,), "of CL": (BARE_CL,)}, UNDONE),
    ),
    trained(
        "clip_stabilises_cl",
        f"{LANDSCAPE}, Fig. 4 e",
        "Off-policy with clip, CL is stable.",
        up("final reward, less that without clip", OFF_CL, END, BARE_CL),
        up("collapse, rollouts after that without clip", OFF_CL, LOST, BARE_CL),
        remark=fall_of({"with clip": (OFF_CL,), "without": (BARE_CL,)}, UNDONE),
    ),
    trained(
        "token_normalisation_delays",
        f"{LANDSCAPE}, Fig. 5",
        "Token normalisation delays the collapse of PL, NL and CL.",
        up("collapse of TNPL, rollouts after PL's", TNPL, LOST, PL),
        up("collapse of TNNL, rollouts after NL's", TNNL, LOST, NL),
        up("collapse of TNCL, rollouts after CL's", TNCL, LOST, CL),
        remark=fall_of(
            {"with it": (TNPL, TNNL, TNCL), "without": (PL, NL, CL)},
            "all lie within about the ten rollouts that a collapse is a mean of.",
        ),
    ),
    trained(
        "token_normalisation_turns_length",
        f"{LANDSCAPE}, Eq. 13, 14, Fig. 17",
        "Under token normalisation PL lengthens and NL shortens.",
        up("change of the length under TNPL, less that under PL", TNPL, m.change(LENGTH), PL),
        down("change of the length under TNNL, less that under NL", TNNL, m.change(LENGTH), NL),
    ),
    trained(
        "gradient_norm_at_collapse",
        f"{LANDSCAPE}, Fig. 11",
        "The gradient norm of PL and NL is higher than GRPO's.",
        up("highest norm of NL, less GRPO's", NL, m.most(NORM), GRPO),
        up("highest norm of PL, less GRPO's", PL, m.most(NORM), GRPO),
        curves=("reward", NORM, ENTROPY),
    ),
    trained(
        "clip_lowers_gradient_norm",
        f"{LANDSCAPE}, Fig. 12",
        "Off-policy with clip, the gradient norm is lower than on-policy.",
        down("highest norm of NL, less that on-policy", OFF_NL, m.most(NORM), NL),
        down("highest norm of PL, less that on-policy", OFF_PL, m.most(NORM), PL),
        curves=("reward", NORM, ENTROPY),
        remark=fall_of({"with four updates": (OFF_NL, OFF_PL), "on-policy": (NL, PL)}, UNDONE),
    ),
    trained(
        "delta_pi_without_clip",
        f"{LANDSCAPE}, Fig. 13",
        "Without clip the policy moves further from the old one.",
        up("mean |delta pi| of NL, less that with clip", BARE_NL, m.average(*DELTA), OFF_NL),
        up("mean |delta pi| of PL, less that with clip", BARE_PL, m.average(*DELTA), OFF_PL),
        curves=("reward", DELTA[0], DELTA[1]),
        remark=fall_of({"with clip": (OFF_NL, OFF_PL), "without": (BARE_NL, BARE_PL)}, UNDONE),
    ),
    trained(
        "delta_pi_before_norm",
        f"{LANDSCAPE}, App. D, Fig. 12 and 13",
        "Off-policy without clip, delta pi rises before the gradient norm does, and both before the reward is lost.",
        up("rollout at which NL's norm has doubled, less that of |delta pi|", BARE_NL, lead(NORM)),
        up("rollout of NL's collapse, less that at which |delta pi| has doubled", BARE_NL, lead_of_loss),
        curves=("reward", NORM, DELTA[1]),
        remark=fall_of(
            {"of NL": (BARE_NL,)},
            "that is within the five rollouts that a doubling is told by, so an order in time cannot be seen here.",
        ),
    ),
    trained(
        "pl_at_half_the_rate",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "As pl_loses_entropy_and_length, at the rate at which GRPO learns, over 120 rollouts.",
        down("change of the entropy", SLOW_PL, m.change(ENTROPY)),
        down("change of the length", SLOW_PL, m.change(LENGTH)),
        down("final reward, less GRPO's", SLOW_PL, END, LEARNS),
        remark=longer_when_right(SLOW_PL, TASK_LENGTHENS),
    ),
    trained(
        "nl_at_half_the_rate",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "As nl_explodes_entropy_and_length, at the rate at which GRPO learns, over 120 rollouts.",
        up("highest entropy, less that at the start", SLOW_NL, m.rise(ENTROPY)),
        up("change of the length", SLOW_NL, m.change(LENGTH)),
        down("final reward, less GRPO's", SLOW_NL, END, LEARNS),
        remark=values_of(
            SLOW_NL,
            m.change(ENTROPY),
            "The entropy changes by ",
            ": at this rate NL learns and loses again, and does not come to the explosion in this time.",
        ),
    ),
    trained(
        "advantages_at_half_the_rate",
        f"{LANDSCAPE}, Fig. 4 a, b",
        "As advantages_prevent, at the rate at which GRPO learns, over 120 rollouts.",
        up("final reward, less CL's", LEARNS, END, SLOW_CL),
        up("collapse, rollouts after CL's", LEARNS, LOST, SLOW_CL),
        remark=fall_of(
            {"of CL": (SLOW_CL,), "of GRPO": (LEARNS,)}, "there is no collapse of CL here that could be prevented."
        ),
    ),
    trained(
        "clip_against_none",
        f"{LANDSCAPE}, Fig. 3 and 7",
        "With four updates at a third of the rate, NL and PL with importance sampling and clip are more stable than "
        "with neither.",
        up("final reward of NL, less that with neither", SLOW_OFF_NL, END, SLOW_BARE_NL),
        up("final reward of PL, less that with neither", SLOW_OFF_PL, END, SLOW_BARE_PL),
        remark=fall_of(
            {
                "of PL with both": (SLOW_OFF_PL,),
                "of PL with neither": (SLOW_BARE_PL,),
                "of NL with neither": (SLOW_BARE_NL,),
            },
            "PL does not collapse here with or without clip, and has nothing to be saved from.",
        ),
    ),
    trained(
        "clip_stabilises_cl_slow",
        f"{LANDSCAPE}, Fig. 4 e",
        "As clip_stabilises_cl, at a third of the rate.",
        up("final reward, less that without clip", SLOW_OFF_CL, END, SLOW_BARE_CL),
        up("collapse, rollouts after that without clip", SLOW_OFF_CL, LOST, SLOW_BARE_CL),
        remark=fall_of(
            {"with clip": (SLOW_OFF_CL,), "without": (SLOW_BARE_CL,)},
            "without a collapse its time says nothing, and the final reward alone decides.",
        ),
    ),
    trained(
        "advantages_delay_off_policy_slow",
        f"{LANDSCAPE}, Fig. 4 c, d",
        "As advantages_delay_off_policy, at a third of the rate.",
        up("collapse, rollouts after CL's", SLOW_BARE_GRPO, LOST, SLOW_BARE_CL),
        up("final reward, less CL's", SLOW_BARE_GRPO, END, SLOW_BARE_CL),
        remark=fall_of(
            {"of GRPO": (SLOW_BARE_GRPO,), "of CL": (SLOW_BARE_CL,)},
            "CL does not collapse here, so nothing is delayed.",
        ),
    ),
    trained(
        "clip_lowers_gradient_norm_slow",
        f"{LANDSCAPE}, Fig. 12",
        "With four updates at a third of the rate, the gradient norm with clip is lower than with neither clip nor "
        "importance sampling.",
        down("highest norm of NL, less that with neither", SLOW_OFF_NL, m.most(NORM), SLOW_BARE_NL),
        down("highest norm of PL, less that with neither", SLOW_OFF_PL, m.most(NORM), SLOW_BARE_PL),
        curves=("reward", NORM, ENTROPY),
        remark=clipped({"NL": SLOW_OFF_NL, "PL": SLOW_OFF_PL}, "little for it to lower a norm by."),
    ),
    trained(
        "delta_pi_without_clip_slow",
        f"{LANDSCAPE}, Fig. 13",
        "As delta_pi_without_clip, at a third of the rate; the highest mean of five rollouts, since a policy that has "
        "collapsed moves no more.",
        up("highest |delta pi| of NL, less that with clip", SLOW_BARE_NL, m.peak(*DELTA), SLOW_OFF_NL),
        up("highest |delta pi| of PL, less that with clip", SLOW_BARE_PL, m.peak(*DELTA), SLOW_OFF_PL),
        curves=("reward", DELTA[0], DELTA[1]),
        remark=clipped({"NL": SLOW_OFF_NL, "PL": SLOW_OFF_PL}, "little for it to hold the policy back by."),
    ),
    trained(
        "delta_pi_before_norm_slow",
        f"{LANDSCAPE}, App. D, Fig. 12 and 13",
        "As delta_pi_before_norm, at a third of the rate.",
        up("rollout at which NL's norm has doubled, less that of |delta pi|", SLOW_BARE_NL, lead(NORM)),
        up("rollout of NL's collapse, less that at which |delta pi| has doubled", SLOW_BARE_NL, lead_of_loss),
        curves=("reward", NORM, DELTA[1]),
    ),
    trained(
        "noise_25",
        f"{LANDSCAPE}, Fig. 6 a",
        "With 25 % of the labels flipped on-policy GRPO is unstable; off-policy with clip it is stable.",
        down("final reward on-policy, less that without noise", "two_form/grpo_noise", END, LEARNS),
        up(
            "final reward off-policy with clip, less that on-policy",
            "two_form/off_grpo_noise",
            END,
            "two_form/grpo_noise",
        ),
        remark=fall_of(
            {
                "with four updates": ("two_form/off_grpo_noise",),
                "with four updates and no noise": ("two_form/off_grpo_clip",),
            },
            "four updates at the rate of one are too many here, noise or none; noise_25_quarter has a quarter of it.",
        ),
        also=("two_form/off_grpo_clip",),
    ),
    trained(
        "noise_25_quarter",
        f"{LANDSCAPE}, Fig. 6 a",
        "As the second part of noise_25, with a quarter of the rate for each of four updates, at rollout 60.",
        up(
            "reward off-policy with clip, less that on-policy",
            "two_form_quarter/grpo_noise",
            m.until(60, "reward"),
            "two_form/grpo_noise",
        ),
        remark=fall_of(
            {"off-policy": ("two_form_quarter/grpo_noise",), "on-policy (120 rollouts)": ("two_form/grpo_noise",)}
        ),
    ),
    trained(
        "entropy_reward_collapses",
        f"{LANDSCAPE}, Fig. 6 b (RENT)",
        "A reward of low entropy alone collapses.",
        down("change of the entropy", "two_form/rent", m.change(ENTROPY)),
        down("final reward, less GRPO's", "two_form/rent", END, LEARNS),
    ),
    trained(
        "critic_below_zero",
        f"{LANDSCAPE}, Fig. 8",
        "PPO's critic values wrong answers below zero, right ones above.",
        down("lowest mean value of wrong completions", "two_form/ppo", m.least("critic/value_incorrect")),
        up("final value of right completions", "two_form/ppo", m.end("critic/value_correct")),
        curves=("reward", "critic/value_correct", "critic/value_incorrect"),
        remark=both(
            lowest_at(
                "two_form/ppo",
                "critic/value_incorrect",
                "The head begins at zero, and the lowest five are up to rollouts",
            ),
            values_of("two_form/ppo", m.end("critic/value_incorrect"), "At the end wrong answers are valued at ", "."),
        ),
    ),
)
