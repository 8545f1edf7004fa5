"""The runs of the second benchmark: other models, other tasks, and the same and more that goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from scripts.diagnosis import sabotage as sab
from scripts.diagnosis.cases import FOUR_UPDATES, Case

TUNING, HELD_OUT, FRESH, UNSEEN = "tuning", "heldout", "fresh", "unseen"
HALF_NAMES = (TUNING, HELD_OUT, FRESH, UNSEEN)
HALVES: dict[str, dict[int, str]] = {
    "qwen_gsm8k": {0: TUNING, 100: HELD_OUT, 200: UNSEEN},
    "smol_sums": {100: HELD_OUT, 101: HELD_OUT},
    "char_tags": {0: TUNING, 1: TUNING, 200: FRESH, 300: UNSEEN},
    "char_countdown": {100: HELD_OUT, 101: HELD_OUT, 200: FRESH, 300: UNSEEN},
}
"""Set by setting and seed: thresholds may be chosen on ``tuning`` alone. Two tasks are held out whole; of the real
model one half of the runs is. ``fresh`` was recorded after the held-out half had been looked at, and ``unseen`` after
``fresh`` had been."""


@dataclass(frozen=True)
class SecondCase(Case):
    """Kind of run in a setting.

    Attributes:
        setting: name of the setting, see :data:`scripts.diagnosis.settings.SETTINGS`.
        kind: what is wrong, or the recipe of a healthy run.
        lora: whether adapters are trained instead of the weights.
        max_new_tokens: longest completion; 0: the setting's.
        at: seeds that it is run with.
    """

    setting: str = ""
    kind: str = ""
    lora: bool = False
    max_new_tokens: int = 0
    at: tuple[int, ...] = ()


class SecondJob(NamedTuple):
    """Run of the second benchmark."""

    name: str
    """Name of the case: setting, two underscores, kind."""
    seed: int
    seeds: str
    """Half that it belongs to."""


@dataclass(frozen=True)
class Strength:
    """How strong a setting needs it to be."""

    lr: float
    """Learning rate at which ``grpo`` learns well."""
    warmup: int = 10
    sign: float = 3.0
    """Factor on the rate for methods that go by sign alone, at which they collapse within 60 rollouts."""
    low_entropy: float = -0.5
    high_entropy: float = 0.5
    brevity: Callable[[], sab.Sabotage] = sab.Sabotage
    """Second reward that is to be hacked."""
    per_token: float = 0.1
    """Reward of one token where length is paid."""
    short: int = 8
    """Length limit that is far too short."""
    values: float = 3.0
    """Noise of a bad critic."""
    nan_at: int = 20


STRENGTH = {
    "qwen_gsm8k": Strength(
        2e-6, warmup=5, sign=2.0, brevity=lambda: sab.PaidBrevity(260, 2.0), per_token=0.01, short=48
    ),
    "smol_sums": Strength(1e-5, sign=2.0, short=2),
    "char_tags": Strength(3e-4, brevity=lambda: sab.PaidForm("<a>", 3.0), short=12),
    "char_countdown": Strength(3e-4, low_entropy=-5.0, brevity=lambda: sab.PaidForm(r"\d+$", 3.0), short=3),
}

HEALTHY: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo_slow": {"rate": 0.5},
    "grpo_four_updates": {"rate": 0.4, "module": FOUR_UPDATES},
    "dapo": {"recipe": "dapo"},
    "gspo_four_updates": {"recipe": "gspo", "rate": 0.4, "module": FOUR_UPDATES},
    "dr_grpo": {"recipe": "dr_grpo"},
    "ppo": {"recipe": "ppo"},
    "staleness": {"rate": 0.7, "module": {"max_staleness": 1}},
    "lora": {"rate": 10.0, "lora": True},
}


def _sick(s: Strength) -> dict[str, dict[str, Any]]:
    by_itself: dict[str, Any] = {"onset": "reward"}
    return {
        "rate_10": {"right": "learning_rate_too_high", "rate": 10.0, **by_itself},
        "rate_30": {"right": "learning_rate_too_high", "rate": 30.0, **by_itself},
        "nl": {"right": "C_NL", "recipe": "nl", "rate": s.sign, **by_itself},
        "pl": {"right": "C_PL", "recipe": "pl", "rate": s.sign, "objective": {"set_scope": "batch"}, **by_itself},
        "cl": {"right": "C_NL C_PL", "recipe": "cl", "rate": s.sign, **by_itself},
        "low_entropy": {"right": "entropy_collapse", "objective": {"entropy_coef": s.low_entropy}, **by_itself},
        "high_entropy": {"right": "entropy_explosion", "objective": {"entropy_coef": s.high_entropy}, **by_itself},
        "noise": {"right": "reward_noise", "make": lambda: sab.RewardNoise(0.3)},
        "coin": {"right": "reward_noise", "make": lambda: sab.RewardNoise(1.0, coin=True)},
        "hacked": {"right": "reward_hacking", "make": s.brevity, **by_itself},
        "paid_length": {"right": "length_explosion", "make": lambda: sab.PaidLength(s.per_token), **by_itself},
        "stale": {"right": "stale_or_mismatched_sampler", "make": lambda: sab.StaleWeights(40)},
        "temperature": {"right": "stale_or_mismatched_sampler", "make": lambda: sab.OneSidedTemperature(1.4)},
        "inverted": {"right": "reward_noise plumbing_sign", "make": sab.InvertedAdvantages},
        "hopeless": {"right": "no_signal", "make": lambda: sab.ConstantReward(0.0)},
        "solved": {"right": "solved", "make": lambda: sab.ConstantReward(1.0)},
        "cut_off": {"right": "truncation", "max_new_tokens": s.short},
        "bad_critic": {"right": "critic_failure", "recipe": "ppo", "make": lambda: sab.BadValues(s.values)},
        "nan": {"right": "non_finite", "make": lambda: sab.NanLogprobGradient(s.nan_at, 3)},
        "shifted": {"right": "stale_or_mismatched_sampler", "make": sab.ShiftedLogprobs},
        "dropped_eos": {"right": "plumbing_mask", "make": sab.DroppedEos},
        "shuffled": {"right": "plumbing_groups", "make": sab.ShuffledGroups},
    }


# A kind is left out where it does no harm: on tags the likeliest answer is right, so a negative entropy bonus of
# any size speeds learning up, and a form that pays no more than a right answer is given up again.
PLAN: dict[str, dict[str, str]] = {
    # Kinds by the seeds that they are run with.
    "qwen_gsm8k": {
        "0": "grpo grpo_four_updates dapo lora rate_10 nl low_entropy hacked stale cut_off high_entropy",
        "100": "grpo gspo_four_updates ppo staleness rate_30 pl low_entropy noise temperature paid_length nan inverted",
        "200": "grpo dapo rate_10 nl pl high_entropy low_entropy hacked noise stale inverted cut_off nan paid_length",
    },
    "smol_sums": {
        "100": "grpo dapo lora gspo_four_updates rate_30 pl nl noise stale high_entropy",
    },
    "char_tags": {
        "0": "grpo dapo gspo_four_updates ppo rate_10 nl temperature noise hacked stale inverted cut_off bad_critic",
        "1": "grpo_four_updates dr_grpo staleness grpo_slow rate_30 pl cl high_entropy coin paid_length hopeless"
        " dropped_eos",
        "200": "grpo dapo gspo_four_updates ppo grpo_four_updates dr_grpo staleness grpo_slow rate_10 rate_30 nl pl cl"
        " high_entropy coin noise hacked stale temperature inverted cut_off bad_critic paid_length dropped_eos",
        "300": "grpo dapo gspo_four_updates ppo grpo_four_updates dr_grpo staleness grpo_slow rate_10 rate_30 nl pl cl"
        " high_entropy coin noise hacked stale temperature inverted cut_off bad_critic paid_length dropped_eos",
    },
    "char_countdown": {
        "100": "grpo dapo gspo_four_updates ppo rate_30 pl high_entropy coin paid_length temperature solved nan"
        " shifted",
        "101": "grpo_four_updates dr_grpo staleness grpo_slow rate_10 nl low_entropy noise hacked bad_critic cut_off"
        " shuffled",
        "200": "grpo dapo gspo_four_updates ppo grpo_four_updates dr_grpo staleness grpo_slow rate_10 rate_30 nl pl"
        " high_entropy low_entropy coin noise hacked temperature cut_off bad_critic paid_length solved shuffled",
        "300": "grpo dapo gspo_four_updates ppo grpo_four_updates dr_grpo staleness grpo_slow rate_10 rate_30 nl pl"
        " high_entropy low_entropy coin noise hacked temperature cut_off bad_critic paid_length solved shuffled",
    },
}


def _cases() -> dict[str, SecondCase]:
    found: dict[str, SecondCase] = {}
    for setting, by_seed in PLAN.items():
        strength = STRENGTH[setting]
        kinds = HEALTHY | _sick(strength)
        for seed, names in by_seed.items():
            for kind in names.split():
                name = f"{setting}__{kind}"
                if name in found:
                    found[name] = replace(found[name], at=(*found[name].at, int(seed)))
                    continue
                values = {"recipe": "grpo", "warmup_steps": strength.warmup, **kinds[kind]}
                values["lr"] = strength.lr * values.pop("rate", 1.0)
                values["right"] = frozenset(values.get("right", "").split())
                found[name] = SecondCase(name=name, setting=setting, kind=kind, at=(int(seed),), **values)
    return found


CASES = _cases()


def second_plan(settings: list[str], halves: list[str], only: list[str] | None = None) -> list[SecondJob]:
    """List the runs of some settings and halves, all kinds or some."""
    return [
        SecondJob(case.name, seed, HALVES[case.setting][seed])
        for case in CASES.values()
        for seed in case.at
        if case.setting in settings and HALVES[case.setting][seed] in halves and (only is None or case.kind in only)
    ]
