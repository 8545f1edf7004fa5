"""Claims of the landscape study, again on countdown."""

from __future__ import annotations

from scripts.study_cases import measures as m
from scripts.study_cases.claims.claim import DELTA, END, ENTROPY, LANDSCAPE, LENGTH, LOST, NORM, down, trained, up
from scripts.study_cases.claims.landscape import lead, lead_of_loss
from scripts.study_cases.claims.remarks import both, clipped, fall_of, longer_when_right, values_of

ON, FAST, OFF = "countdown/", "countdown_fast/", "countdown_off/"
HOW_LONG = (
    "an expression of the given numbers has its length, and there is little to leave out: only its growth can be seen."
)

COUNTDOWN_CLAIMS = (
    trained(
        "countdown_pl",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "As pl_loses_entropy_and_length, on countdown.",
        down("change of the entropy", FAST + "pl", m.change(ENTROPY)),
        down("change of the length", FAST + "pl", m.change(LENGTH)),
        down("final reward, less GRPO's", FAST + "pl", END, FAST + "grpo"),
        remark=both(
            longer_when_right(FAST + "pl", HOW_LONG),
            fall_of({"of PL": (FAST + "pl",), "of GRPO": (FAST + "grpo",)}),
        ),
    ),
    trained(
        "countdown_nl",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "As nl_explodes_entropy_and_length, on countdown.",
        up("highest entropy, less that at the start", FAST + "nl", m.rise(ENTROPY)),
        up("change of the length", FAST + "nl", m.change(LENGTH)),
        down("final reward, less GRPO's", FAST + "nl", END, FAST + "grpo"),
    ),
    trained(
        "countdown_cl_delays",
        f"{LANDSCAPE}, Fig. 4 a, b",
        "As cl_delays, on countdown.",
        up("collapse, rollouts after PL's", FAST + "cl", LOST, FAST + "pl"),
        up("collapse, rollouts after NL's", FAST + "cl", LOST, FAST + "nl"),
        remark=fall_of(
            {"of CL": (FAST + "cl",), "of PL": (FAST + "pl",), "of NL": (FAST + "nl",)},
        ),
    ),
    trained(
        "countdown_advantages",
        f"{LANDSCAPE}, Fig. 4 a, b",
        "As advantages_prevent, on countdown.",
        up("final reward, less CL's", FAST + "grpo", END, FAST + "cl"),
        up("collapse, rollouts after CL's", FAST + "grpo", LOST, FAST + "cl"),
        remark=fall_of({"of GRPO": (FAST + "grpo",), "of CL": (FAST + "cl",)}),
    ),
    trained(
        "countdown_pl_at_half_the_rate",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "As pl_at_half_the_rate, on countdown.",
        down("change of the entropy", ON + "pl", m.change(ENTROPY)),
        down("change of the length", ON + "pl", m.change(LENGTH)),
        down("final reward, less GRPO's", ON + "pl", END, ON + "grpo"),
        remark=longer_when_right(ON + "pl", HOW_LONG),
    ),
    trained(
        "countdown_nl_at_half_the_rate",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "As nl_at_half_the_rate, on countdown.",
        up("highest entropy, less that at the start", ON + "nl", m.rise(ENTROPY)),
        up("change of the length", ON + "nl", m.change(LENGTH)),
        down("final reward, less GRPO's", ON + "nl", END, ON + "grpo"),
    ),
    trained(
        "countdown_advantages_at_half_the_rate",
        f"{LANDSCAPE}, Fig. 4 a, b",
        "As advantages_at_half_the_rate, on countdown.",
        up("final reward, less CL's", ON + "grpo", END, ON + "cl"),
        up("collapse, rollouts after CL's", ON + "grpo", LOST, ON + "cl"),
        remark=fall_of({"of GRPO": (ON + "grpo",), "of CL": (ON + "cl",)}),
    ),
    trained(
        "countdown_clip_against_none",
        f"{LANDSCAPE}, Fig. 3 and 7",
        "As clip_against_none, on countdown.",
        up("final reward of NL, less that with neither", OFF + "nl_clip", END, OFF + "nl_plain"),
        up("final reward of PL, less that with neither", OFF + "pl_clip", END, OFF + "pl_plain"),
        remark=fall_of(
            {
                "of NL with both": (OFF + "nl_clip",),
                "of NL with neither": (OFF + "nl_plain",),
                "of PL with both": (OFF + "pl_clip",),
                "of PL with neither": (OFF + "pl_plain",),
            },
        ),
    ),
    trained(
        "countdown_clip_stabilises_cl",
        f"{LANDSCAPE}, Fig. 4 e",
        "As clip_stabilises_cl_slow, on countdown.",
        up("final reward, less that without clip", OFF + "cl_clip", END, OFF + "cl_plain"),
        up("collapse, rollouts after that without clip", OFF + "cl_clip", LOST, OFF + "cl_plain"),
        remark=fall_of({"with clip": (OFF + "cl_clip",), "without": (OFF + "cl_plain",)}),
    ),
    trained(
        "countdown_advantages_off_policy",
        f"{LANDSCAPE}, Fig. 4 c, d",
        "As advantages_delay_off_policy_slow, on countdown.",
        up("collapse, rollouts after CL's", OFF + "grpo_plain", LOST, OFF + "cl_plain"),
        up("final reward, less CL's", OFF + "grpo_plain", END, OFF + "cl_plain"),
        remark=fall_of({"of GRPO": (OFF + "grpo_plain",), "of CL": (OFF + "cl_plain",)}),
    ),
    trained(
        "countdown_clip_helps_grpo",
        f"{LANDSCAPE}, Fig. 4 c, d",
        "Off-policy, GRPO itself ends higher with clip and importance sampling than with neither.",
        up("final reward, less that with neither", OFF + "grpo_clip", END, OFF + "grpo_plain"),
        remark=fall_of({"with both": (OFF + "grpo_clip",), "with neither": (OFF + "grpo_plain",)}),
    ),
    trained(
        "countdown_delta_pi",
        f"{LANDSCAPE}, Fig. 12 and 13",
        "As delta_pi_without_clip_slow and clip_lowers_gradient_norm_slow, on countdown.",
        up("highest |delta pi| of NL, less that with clip", OFF + "nl_plain", m.peak(*DELTA), OFF + "nl_clip"),
        up("highest |delta pi| of PL, less that with clip", OFF + "pl_plain", m.peak(*DELTA), OFF + "pl_clip"),
        down("highest norm of NL, less that with neither", OFF + "nl_clip", m.most(NORM), OFF + "nl_plain"),
        down("highest norm of PL, less that with neither", OFF + "pl_clip", m.most(NORM), OFF + "pl_plain"),
        curves=("reward", DELTA[1], NORM),
        remark=clipped({"NL": OFF + "nl_clip", "PL": OFF + "pl_clip"}, "what the clip does goes through these alone."),
    ),
    trained(
        "countdown_delta_pi_before_norm",
        f"{LANDSCAPE}, App. D, Fig. 12 and 13",
        "As delta_pi_before_norm_slow, on countdown.",
        up("rollout at which NL's norm has doubled, less that of |delta pi|", OFF + "nl_plain", lead(NORM)),
        up("rollout of NL's collapse, less that at which |delta pi| has doubled", OFF + "nl_plain", lead_of_loss),
        curves=("reward", NORM, DELTA[1]),
    ),
    trained(
        "countdown_w_reinforce",
        "Zhu et al. (2506.01347)",
        "As w_reinforce_diversity, on countdown.",
        up(
            "different completions of a group, share, less PSR's",
            ON + "w_reinforce",
            m.end("groups/distinct_frac"),
            ON + "psr",
        ),
        down(
            "groups without a right completion (1 - pass@8), less PSR's",
            ON + "w_reinforce",
            m.end("groups/all_wrong_frac"),
            ON + "psr",
        ),
        curves=("reward", "groups/distinct_frac", "groups/all_wrong_frac"),
        remark=values_of(
            ON + "psr", m.end("groups/all_wrong_frac"), "PSR ends with ", " of the groups without a right completion."
        ),
    ),
)
