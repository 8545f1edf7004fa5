"""The claims: what a source says, which runs are to show it, and the test that decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from scripts.study_cases import measures as m
from scripts.study_cases.results import PartResult, above, below

Runs = Mapping[str, Sequence[m.Run]]
"""The runs of each arm, one a seed, in the order of the seeds."""
Test = Callable[[Runs], list[PartResult]]
ENTROPY, LENGTH, NORM = "policy/entropy", "completions/length", "optim/grad_norm"
DELTA = ("policy/delta_prob_positive", "policy/delta_prob_negative")
CURVES = ("reward", ENTROPY, LENGTH)
LANDSCAPE, GTPO = "landscape study", "GTPO (2508.03772)"


@dataclass(frozen=True)
class Claim:
    """Something that a source says.

    Attributes:
        name: of the claim, as on the command line.
        source: the paper, with figure or equation.
        statement: what it says.
        arms: runs that show it, ``task/overlay`` of configs/study; none where it is calculated exactly.
        test: measures and judges them; None where it is calculated, or cannot be tested.
        curves: metrics that are drawn.
        seeds: of each arm.
        untestable: why it cannot be tested here; empty where it can.
        note: what explains the result, where it can be calculated.
    """

    name: str
    source: str
    statement: str
    arms: tuple[str, ...] = ()
    test: Test | None = field(default=None, compare=False)
    curves: tuple[str, ...] = CURVES
    seeds: tuple[int, ...] = (0, 1, 2)
    untestable: str = ""
    note: str = ""

    @property
    def exact(self) -> bool:
        """Whether it is calculated and nothing is trained for it."""
        return not self.arms and not self.untestable


@dataclass(frozen=True)
class Part:
    """One inequality: a measure of an arm, less that of another with the same seed, above or below a bound."""

    says: str
    arm: str
    measure: m.Measure
    beside: str = ""
    bound: float = 0.0
    upwards: bool = True

    def judge(self, runs: Runs) -> PartResult:
        """Measure all seeds."""
        values = [self.measure(run) for run in runs[self.arm]]
        if self.beside:
            others = [self.measure(run) for run in runs[self.beside]]
            values = [a - b for a, b in zip(values, others, strict=True)]
        return (above if self.upwards else below)(self.says, values, self.bound)


def _up(says: str, arm: str, measure: m.Measure, beside: str = "", bound: float = 0.0) -> Part:
    return Part(says, arm, measure, beside, bound)


def _down(says: str, arm: str, measure: m.Measure, beside: str = "", bound: float = 0.0) -> Part:
    return Part(says, arm, measure, beside, bound, upwards=False)


def _claim(name: str, source: str, statement: str, *parts: Part, curves: tuple[str, ...] = CURVES) -> Claim:
    arms = dict.fromkeys(arm for part in parts for arm in (part.arm, part.beside) if arm)
    return Claim(name, source, statement, tuple(arms), lambda runs: [part.judge(runs) for part in parts], curves)


def _exact(name: str, source: str, statement: str, note: str = "") -> Claim:
    return Claim(name, source, statement, note=note)


def _untestable(name: str, source: str, statement: str, why: str) -> Claim:
    return Claim(name, source, statement, untestable=why)


# Claims on stability are tried at the rate at which something collapses, all others at that at which GRPO learns.
GRPO, PL, NL, CL = (f"two_form_fast/{name}" for name in ("grpo", "pl", "nl", "cl"))
TNPL, TNNL, TNCL = (f"two_form_fast/{name}" for name in ("tnpl", "tnnl", "tncl"))
OFF_PL, OFF_NL, OFF_CL = (f"two_form_fast/off_{name}_clip" for name in ("pl", "nl", "cl"))
BARE_GRPO, BARE_PL, BARE_NL, BARE_CL = (f"two_form_fast/off_{name}_plain" for name in ("grpo", "pl", "nl", "cl"))
LEARNS, SLOW_PL, SLOW_NL, SLOW_CL = (f"two_form/{name}" for name in ("grpo", "pl", "nl", "cl"))
OFF_LEARNS = "two_form/off_grpo_clip"
END, LOST = m.end("reward"), m.collapse
T, OFF, G = "two_form/", "two_form_off/", "tags/"


def _lead(key: str) -> m.Measure:
    """Rollouts from the doubling of delta pi to that of another metric."""
    return lambda run: m.doubled(key)(run) - m.doubled(*DELTA)(run)


def _lead_of_loss(run: m.Run) -> float:
    """Rollouts from the doubling of delta pi to the collapse."""
    return m.collapse(run) - m.doubled(*DELTA)(run)


EXACT_CLAIMS = (
    _exact(
        "eq11_pl_is_critical",
        f"{LANDSCAPE}, Eq. 8 and 11",
        "S_PL, one completion with probability 1, is critical for L_PL.",
    ),
    _exact(
        "eq11_nl_is_critical",
        f"{LANDSCAPE}, Eq. 9 and 11, App. K",
        "S_NL, the uniform policy, is critical for L_NL where all "
        "completions have one length; over a few drawn completions it is not, so the point is not stable.",
    ),
    _exact(
        "eq11_nl_only_uniform",
        f"{LANDSCAPE}, Eq. 10 and 11",
        "The uniform policy is what descent of L_NL leads to: other policies "
        "(one length, all completions wrong) are not critical.",
        "With one length and one sign the expected gradient is that of the sum of all probabilities, a "
        "constant: every policy is critical, and the uniform one is in no way singled out.",
    ),
    _exact(
        "eq8_pl_shortens",
        f"{LANDSCAPE}, section 4",
        "Descent of the sequence-mean L_PL shortens completions. With all "
        "completions correct its expected gradient is that of -E[1/|a|], which we check against the recipe.",
    ),
    _exact(
        "eq9_nl_lengthens",
        f"{LANDSCAPE}, section 4",
        "Descent of the sequence-mean L_NL lengthens completions: with all "
        "completions wrong its expected gradient is that of E[1/|a|].",
    ),
    _exact(
        "eq13_14_least_loss",
        f"{LANDSCAPE}, Eq. 13 and 14",
        "Under token normalisation the loss of a completion is least at the limit T for PL, and at one token for NL.",
    ),
    _exact(
        "eq13_14_length_pressure",
        f"{LANDSCAPE}, Eq. 13 and 14",
        "So token-normalised PL lengthens completions, and NL shortens "
        "them: along a descent in expectation, all completions of one sign.",
        "Divided by a constant, the expected gradient over completions of one sign is that of the sum of "
        "their probabilities. Where all have the sign it is zero, and with it any pressure on the length; "
        "what the value of the loss is at another length does not enter.",
    ),
    _exact(
        "eq10_one_token_expected",
        f"{LANDSCAPE}, Eq. 10",
        "With completions of one token, L_PL in expectation is minimised by a "
        "distribution on a single token, and L_NL by the uniform one.",
        "The expected gradient of L_PL is that of -log of the probability of all correct tokens together, and "
        "says nothing of how it is shared out among them; that of L_NL is that of +log of the probability of "
        "the wrong ones, which it takes away.",
    ),
    _exact(
        "c_pl_sampled", f"{LANDSCAPE}, section 4, C_PL", "On a few drawn completions L_PL leads to the least entropy."
    ),
    _exact(
        "c_nl_sampled",
        f"{LANDSCAPE}, section 4, C_NL",
        "On a few drawn completions L_NL leads to the greatest entropy (one token, all completions wrong).",
        "With one sign the expected gradient is zero, and each drawn token is pushed by the same amount, up "
        "or down: for small steps both signs are the same random walk, which ends at a single token.",
    ),
    _exact(
        "b_star_least_variance",
        "REINFORCE to SAPO, 3.1",
        "b* = E[r |s|^2] / E[|s|^2] is the baseline of least variance, and the recipe's estimate finds it.",
    ),
    _exact("baseline_no_bias", "REINFORCE to SAPO, 3", "A constant baseline does not change the expected gradient."),
    _exact(
        "group_mean_shrinks",
        "RLOO, Dr. GRPO",
        "The mean of a group of G, own reward included, shrinks the expected gradient by "
        "(G - 1)/G and changes nothing else of it.",
    ),
    _exact("conflicts_grow_with_g_exact", f"{GTPO}, Fig. 5b", "The share of tokens in conflict grows with the group."),
    _exact(
        "conflict_correction_exact",
        f"{GTPO}, Eq. 6 and 8",
        "GRPO pushes an opening tag that all completions share down where "
        "correct ones are longer; the conflict correction does not.",
    ),
)

TRAINED_CLAIMS = (
    _claim(
        "pl_loses_entropy_and_length",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "On-policy PL collapses: entropy and length fall.",
        _down("change of the entropy", PL, m.change(ENTROPY)),
        _down("change of the length", PL, m.change(LENGTH)),
        _down("final reward, less GRPO's", PL, END, GRPO),
    ),
    _claim(
        "nl_explodes_entropy_and_length",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "On-policy NL collapses: entropy and length explode.",
        _up("highest entropy, less that at the start", NL, m.rise(ENTROPY)),
        _up("change of the length", NL, m.change(LENGTH)),
        _down("final reward, less GRPO's", NL, END, GRPO),
    ),
    _claim(
        "cl_delays",
        f"{LANDSCAPE}, Fig. 4 a, b",
        "CL collapses later than PL and than NL.",
        _up("collapse, rollouts after PL's", CL, LOST, PL),
        _up("collapse, rollouts after NL's", CL, LOST, NL),
    ),
    _claim(
        "advantages_prevent",
        f"{LANDSCAPE}, Fig. 4 a, b",
        "GRPO's advantages prevent the collapse of CL.",
        _up("final reward, less CL's", GRPO, END, CL),
        _up("collapse, rollouts after CL's", GRPO, LOST, CL),
    ),
    _claim(
        "clipping_stabilises",
        f"{LANDSCAPE}, Fig. 3",
        "With four updates, importance sampling and clip, NL and PL are more stable than on-policy.",
        _up("final reward of NL, less that on-policy", OFF_NL, END, NL),
        _up("final reward of PL, less that on-policy", OFF_PL, END, PL),
    ),
    _claim(
        "no_clip_hastens",
        f"{LANDSCAPE}, Fig. 7",
        "With four updates and neither of them, NL and PL collapse sooner than on-policy.",
        _down("collapse of NL, rollouts after that on-policy", BARE_NL, LOST, NL),
        _down("collapse of PL, rollouts after that on-policy", BARE_PL, LOST, PL),
    ),
    _claim(
        "advantages_delay_off_policy",
        f"{LANDSCAPE}, Fig. 4 c, d",
        "Off-policy without clip, GRPO collapses later than CL.",
        _up("collapse, rollouts after CL's", BARE_GRPO, LOST, BARE_CL),
        _up("final reward, less CL's", BARE_GRPO, END, BARE_CL),
    ),
    _claim(
        "clip_stabilises_cl",
        f"{LANDSCAPE}, Fig. 4 e",
        "Off-policy with clip, CL is stable.",
        _up("final reward, less that without clip", OFF_CL, END, BARE_CL),
        _up("collapse, rollouts after that without clip", OFF_CL, LOST, BARE_CL),
    ),
    _claim(
        "token_normalisation_delays",
        f"{LANDSCAPE}, Fig. 5",
        "Token normalisation delays the collapse of PL, NL and CL.",
        _up("collapse of TNPL, rollouts after PL's", TNPL, LOST, PL),
        _up("collapse of TNNL, rollouts after NL's", TNNL, LOST, NL),
        _up("collapse of TNCL, rollouts after CL's", TNCL, LOST, CL),
    ),
    _claim(
        "token_normalisation_turns_length",
        f"{LANDSCAPE}, Eq. 13, 14, Fig. 17",
        "Under token normalisation PL lengthens and NL shortens.",
        _up("change of the length under TNPL, less that under PL", TNPL, m.change(LENGTH), PL),
        _down("change of the length under TNNL, less that under NL", TNNL, m.change(LENGTH), NL),
    ),
    _claim(
        "gradient_norm_at_collapse",
        f"{LANDSCAPE}, Fig. 11",
        "The gradient norm of PL and NL is higher than GRPO's.",
        _up("highest norm of NL, less GRPO's", NL, m.most(NORM), GRPO),
        _up("highest norm of PL, less GRPO's", PL, m.most(NORM), GRPO),
        curves=("reward", NORM, ENTROPY),
    ),
    _claim(
        "clip_lowers_gradient_norm",
        f"{LANDSCAPE}, Fig. 12",
        "Off-policy with clip, the gradient norm is lower than on-policy.",
        _down("highest norm of NL, less that on-policy", OFF_NL, m.most(NORM), NL),
        _down("highest norm of PL, less that on-policy", OFF_PL, m.most(NORM), PL),
        curves=("reward", NORM, ENTROPY),
    ),
    _claim(
        "delta_pi_without_clip",
        f"{LANDSCAPE}, Fig. 13",
        "Without clip the policy moves further from the old one.",
        _up("mean |delta pi| of NL, less that with clip", BARE_NL, m.average(*DELTA), OFF_NL),
        _up("mean |delta pi| of PL, less that with clip", BARE_PL, m.average(*DELTA), OFF_PL),
        curves=("reward", DELTA[0], DELTA[1]),
    ),
    _claim(
        "delta_pi_before_norm",
        f"{LANDSCAPE}, App. D, Fig. 12 and 13",
        "Off-policy without clip, delta pi rises before the gradient norm does, and both before the reward is lost.",
        _up("rollout at which NL's norm has doubled, less that of |delta pi|", BARE_NL, _lead(NORM)),
        _up("rollout of NL's collapse, less that at which |delta pi| has doubled", BARE_NL, _lead_of_loss),
        curves=("reward", NORM, DELTA[1]),
    ),
    _claim(
        "pl_at_half_the_rate",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "As pl_loses_entropy_and_length, at the rate at which GRPO learns, over 120 rollouts.",
        _down("change of the entropy", SLOW_PL, m.change(ENTROPY)),
        _down("change of the length", SLOW_PL, m.change(LENGTH)),
        _down("final reward, less GRPO's", SLOW_PL, END, LEARNS),
    ),
    _claim(
        "nl_at_half_the_rate",
        f"{LANDSCAPE}, Fig. 2, 9, 10",
        "As nl_explodes_entropy_and_length, at the rate at which GRPO learns, over 120 rollouts.",
        _up("highest entropy, less that at the start", SLOW_NL, m.rise(ENTROPY)),
        _up("change of the length", SLOW_NL, m.change(LENGTH)),
        _down("final reward, less GRPO's", SLOW_NL, END, LEARNS),
    ),
    _claim(
        "advantages_at_half_the_rate",
        f"{LANDSCAPE}, Fig. 4 a, b",
        "As advantages_prevent, at the rate at which GRPO learns, over 120 rollouts.",
        _up("final reward, less CL's", LEARNS, END, SLOW_CL),
        _up("collapse, rollouts after CL's", LEARNS, LOST, SLOW_CL),
    ),
    _claim(
        "clip_against_none",
        f"{LANDSCAPE}, Fig. 3 and 7",
        "With four updates at a third of the rate, NL and PL with importance sampling and clip are more stable than "
        "with neither.",
        _up("final reward of NL, less that with neither", OFF + "nl_clip", END, OFF + "nl_plain"),
        _up("final reward of PL, less that with neither", OFF + "pl_clip", END, OFF + "pl_plain"),
    ),
    _claim(
        "clip_stabilises_cl_slow",
        f"{LANDSCAPE}, Fig. 4 e",
        "As clip_stabilises_cl, at a third of the rate.",
        _up("final reward, less that without clip", OFF + "cl_clip", END, OFF + "cl_plain"),
        _up("collapse, rollouts after that without clip", OFF + "cl_clip", LOST, OFF + "cl_plain"),
    ),
    _claim(
        "advantages_delay_off_policy_slow",
        f"{LANDSCAPE}, Fig. 4 c, d",
        "As advantages_delay_off_policy, at a third of the rate.",
        _up("collapse, rollouts after CL's", OFF + "grpo_plain", LOST, OFF + "cl_plain"),
        _up("final reward, less CL's", OFF + "grpo_plain", END, OFF + "cl_plain"),
    ),
    _claim(
        "clip_lowers_gradient_norm_slow",
        f"{LANDSCAPE}, Fig. 12",
        "With four updates at a third of the rate, the gradient norm with clip is lower than with neither clip nor "
        "importance sampling.",
        _down("highest norm of NL, less that with neither", OFF + "nl_clip", m.most(NORM), OFF + "nl_plain"),
        _down("highest norm of PL, less that with neither", OFF + "pl_clip", m.most(NORM), OFF + "pl_plain"),
        curves=("reward", NORM, ENTROPY),
    ),
    _claim(
        "delta_pi_without_clip_slow",
        f"{LANDSCAPE}, Fig. 13",
        "As delta_pi_without_clip, at a third of the rate.",
        _up("mean |delta pi| of NL, less that with clip", OFF + "nl_plain", m.average(*DELTA), OFF + "nl_clip"),
        _up("mean |delta pi| of PL, less that with clip", OFF + "pl_plain", m.average(*DELTA), OFF + "pl_clip"),
        curves=("reward", DELTA[0], DELTA[1]),
    ),
    _claim(
        "delta_pi_before_norm_slow",
        f"{LANDSCAPE}, App. D, Fig. 12 and 13",
        "As delta_pi_before_norm, at a third of the rate.",
        _up("rollout at which NL's norm has doubled, less that of |delta pi|", OFF + "nl_plain", _lead(NORM)),
        _up("rollout of NL's collapse, less that at which |delta pi| has doubled", OFF + "nl_plain", _lead_of_loss),
        curves=("reward", NORM, DELTA[1]),
    ),
    _claim(
        "noise_25",
        f"{LANDSCAPE}, Fig. 6 a",
        "With 25 % of the labels flipped on-policy GRPO is unstable; off-policy with clip it is stable.",
        _down("final reward on-policy, less that without noise", T + "grpo_noise", END, LEARNS),
        _up("final reward off-policy with clip, less that on-policy", T + "off_grpo_noise", END, T + "grpo_noise"),
    ),
    _claim(
        "entropy_reward_collapses",
        f"{LANDSCAPE}, Fig. 6 b (RENT)",
        "A reward of low entropy alone collapses.",
        _down("change of the entropy", T + "rent", m.change(ENTROPY)),
        _down("final reward, less GRPO's", T + "rent", END, LEARNS),
    ),
    _claim(
        "clip_higher_keeps_entropy",
        "DAPO (2503.14476), Fig. 2",
        "A higher upper bound keeps the entropy up.",
        _up("final entropy, less that with equal bounds", T + "off_grpo_clip_higher", m.end(ENTROPY), OFF_LEARNS),
    ),
    _claim(
        "dynamic_sampling_fewer_steps",
        "DAPO (2503.14476), Fig. 6",
        "Dynamic sampling reaches a reward in fewer steps.",
        _down("rollouts to a reward of 0.8, less GRPO's", T + "grpo_dynamic", m.reached(0.8), LEARNS),
        curves=("reward", "sampling/reward", ENTROPY),
    ),
    _claim(
        "dr_grpo_length",
        "Dr. GRPO (2503.20783), Fig. 5",
        "Without 1/|a| wrong completions do not grow.",
        _down(
            "final length of wrong completions, less GRPO's",
            T + "dr_grpo",
            m.end("completions/incorrect_length"),
            LEARNS,
        ),
        curves=("reward", "completions/incorrect_length", LENGTH),
    ),
    _claim(
        "w_reinforce_diversity",
        "Zhu et al. (2506.01347)",
        "W-REINFORCE keeps more diversity than positives alone.",
        _up(
            "different completions of a group, share, less PSR's",
            T + "w_reinforce",
            m.end("groups/distinct_frac"),
            T + "psr",
        ),
        _down(
            "groups without a right completion (1 - pass@8), less PSR's",
            T + "w_reinforce",
            m.end("groups/all_wrong_frac"),
            T + "psr",
        ),
        curves=("reward", "groups/distinct_frac", "groups/all_wrong_frac"),
    ),
    _claim(
        "slow_moments",
        f"{GTPO}, Fig. 6",
        "GRPO with Adam's betas at 0.999999 is more stable than with the usual ones.",
        _up("final reward, less that with 0.9 and 0.999", T + "grpo_slow_moments", END, LEARNS),
    ),
    _claim(
        "critic_below_zero",
        f"{LANDSCAPE}, Fig. 8",
        "PPO's critic values wrong answers below zero, right ones above.",
        _down("lowest mean value of wrong completions", T + "ppo", m.least("critic/value_incorrect")),
        _up("final value of right completions", T + "ppo", m.end("critic/value_correct")),
        curves=("reward", "critic/value_correct", "critic/value_incorrect"),
    ),
    _claim(
        "gspo_many_updates",
        "GSPO (2507.18071), Fig. 1",
        "With four updates GSPO ends above GRPO.",
        _up("final reward, less GRPO's", T + "off_gspo", END, OFF_LEARNS),
    ),
    _claim(
        "gmpo_many_updates",
        "GMPO (2507.20673), Fig. 1",
        "With four updates GMPO ends above GRPO.",
        _up("final reward, less GRPO's", T + "off_gmpo", END, OFF_LEARNS),
    ),
    _claim(
        "cispo_many_updates",
        "CISPO (2506.13585), Fig. 2",
        "With four updates CISPO ends above GRPO.",
        _up("final reward, less GRPO's", T + "off_cispo", END, OFF_LEARNS),
    ),
    _claim(
        "sapo_many_updates",
        "SAPO (2511.20347)",
        "With four updates SAPO ends above GRPO.",
        _up("final reward, less GRPO's", T + "off_sapo", END, OFF_LEARNS),
    ),
    _claim(
        "lite_ppo_batch_std",
        "LitePPO (2508.08221)",
        "Deviation over the batch and means over tokens end above GRPO.",
        _up("final reward, less GRPO's", T + "lite_ppo", END, LEARNS),
    ),
    _claim(
        "conflicts_grow_with_g",
        f"{GTPO}, Fig. 5 b",
        "The share of tokens in conflict grows with G in training.",
        _up(
            "mean share with G = 8, less that with G = 4",
            G + "conflict_only",
            m.average("policy/conflict_frac"),
            G + "conflict_g4",
        ),
        _up(
            "mean share with G = 16, less that with G = 8",
            G + "conflict_g16",
            m.average("policy/conflict_frac"),
            G + "conflict_only",
        ),
        curves=("reward/accuracy", "reward/format", "policy/conflict_frac"),
    ),
    _claim(
        "correction_protects_format",
        f"{GTPO}, Fig. 3",
        "The conflict correction alone keeps the form better than GRPO.",
        _up("mean share of complete forms, less GRPO's", G + "conflict_only", m.average("reward/format"), G + "grpo"),
        curves=("reward/accuracy", "reward/format", ENTROPY),
    ),
)

OPEN_CLAIMS = (
    _untestable(
        "tis_quantised_sampler",
        "TIS (Yao et al.)",
        "Truncated importance sampling repairs a quantised sampler.",
        "sampler and learner are one float32 model on a CPU; a quantised sampler needs vLLM on a GPU",
    ),
    _untestable(
        "vapo_value_pretraining",
        "VAPO (2504.05118)",
        "Value pretraining and a length-adaptive lambda prevent VAPO's collapse.",
        "completions have at most 24 tokens, for which lambda is nearly 1 whatever its rule",
    ),
    _untestable(
        "kl_late_entropy_in_time",
        f"{GTPO}, Fig. 1",
        "KL moves after the format has collapsed, entropy before.",
        "no run here lost the format under GRPO, which it has to do for an order in time",
    ),
)

CLAIMS = (*EXACT_CLAIMS, *TRAINED_CLAIMS, *OPEN_CLAIMS)


def find(name: str) -> Claim:
    """Return the claim of this name.

    Raises:
        KeyError: there is none.
    """
    return {claim.name: claim for claim in CLAIMS}[name]
