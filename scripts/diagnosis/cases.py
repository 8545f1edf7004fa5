"""The runs of the benchmark: what each trains, what is wrong with it, and which diagnosis is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from scripts.diagnosis import sabotage as sab

SEEDS = {"tuning": (0, 1), "heldout": (100, 101)}
"""Seeds by set. Thresholds were chosen on the runs of ``tuning`` alone."""
PARTS = ("diagnosis", "rollback")
MODELS: dict[str, dict[str, Any]] = {"two_form_addition": {"seed": 0}}
"""Arguments of scripts/warm_start_two_form_addition.py by name of the model that runs begin from."""


@dataclass(frozen=True)
class Case:
    """Kind of run, healthy or sabotaged.

    Attributes:
        name: of the kind.
        recipe: the objective's recipe.
        lr: learning rate after the warm-up.
        right: names of the diagnoses that are right; empty for a healthy run.
        onset: ``sabotage``: the run is wrong from the sabotage on. ``reward``: it is wrong when its reward begins to
            fall, see :func:`scripts.diagnosis.scoring.reward_fall`.
        make: makes the sabotage; the default does nothing, for runs whose recipe or learning rate is what is wrong.
        objective: overrides of the recipe.
        module: further arguments of the module.
        warmup_steps: steps over which the learning rate rises.
        rollouts: length of the run, see :meth:`length`.
        model: name of the warm-started model, see :data:`MODELS`.
        seeds: how many seeds of a set it is run with.
        rollback: whether it is also run with rollbacks, to see whether they save it. That makes sense for runs that
            learn at first and then collapse by themselves.
    """

    name: str
    recipe: str
    lr: float = 3e-4
    right: frozenset[str] = frozenset()
    onset: Literal["sabotage", "reward"] = "sabotage"
    make: Callable[[], sab.Sabotage] = sab.Sabotage
    objective: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    warmup_steps: int = 10
    rollouts: int = 60
    model: str = "two_form_addition"
    seeds: int = 2
    rollback: bool = False

    @property
    def healthy(self) -> bool:
        return not self.right

    def length(self, part: str) -> int:
        """Number of rollouts of a run. One with rollbacks gets 20 more, since what it learns afterwards counts."""
        return self.rollouts + (20 if part == "rollback" else 0)


def _healthy(name: str, recipe: str, lr: float = 3e-4, **changes: Any) -> Case:
    return Case(f"healthy_{name}", recipe, lr, **({"seeds": 1, "rollouts": 80} | changes))


def _wrong(name: str, right: str, recipe: str = "grpo", lr: float = 3e-4, **changes: Any) -> Case:
    return Case(name, recipe, lr, frozenset(right.split()), **changes)


TWO_UPDATES = {"updates_per_rollout": 2, "minibatch_prompts": 8}
FOUR_UPDATES = {"updates_per_rollout": 4, "minibatch_prompts": 8}

CASES: tuple[Case, ...] = (
    _healthy("grpo", "grpo", seeds=2),
    _healthy("grpo_fast", "grpo", 4e-4),
    _healthy("grpo_slow", "grpo", 1e-4),
    _healthy("grpo_two_updates", "grpo", 2e-4, module=TWO_UPDATES),
    _healthy("grpo_four_updates", "grpo", 1e-4, module=FOUR_UPDATES),
    _healthy("dr_grpo", "dr_grpo"),
    _healthy("rloo", "rloo", 1e-4),
    _healthy("dapo", "dapo", seeds=2),
    _healthy("gspo", "gspo", 2e-4, module=TWO_UPDATES),
    _healthy("cispo", "cispo", 2e-4, module=TWO_UPDATES),
    _healthy("reinforce_pp_baseline", "reinforce_pp_baseline"),
    _healthy("lite_ppo", "lite_ppo"),
    _healthy("ppo", "ppo"),
    _healthy("nl_gentle", "nl", 1e-4),
    _wrong("nl", "C_NL", "nl", 1e-3, onset="reward", warmup_steps=30, rollback=True),
    _wrong("pl", "C_PL", "pl", 1e-3, onset="reward", warmup_steps=30, objective={"set_scope": "batch"}, rollback=True),
    _wrong("cl", "C_NL C_PL", "cl", 2e-3, onset="reward", warmup_steps=30, rollback=True),
    _wrong("learning_rate", "learning_rate_too_high", lr=2e-3, onset="reward", warmup_steps=30, rollback=True),
    _wrong("reward_noise_25", "reward_noise", make=lambda: sab.RewardNoise(0.25)),
    _wrong("reward_noise_100", "reward_noise", make=lambda: sab.RewardNoise(1.0, coin=True)),
    _wrong(
        "entropy_minimised",
        "entropy_collapse C_PL",
        lr=1e-3,
        onset="reward",
        warmup_steps=20,
        objective={"entropy_coef": -20.0},
    ),
    _wrong("stale_weights", "stale_or_mismatched_sampler", make=lambda: sab.StaleWeights(40)),
    _wrong("temperature", "stale_or_mismatched_sampler", make=lambda: sab.OneSidedTemperature(1.5), rollouts=40),
    _wrong("shifted_logprobs", "stale_or_mismatched_sampler", make=sab.ShiftedLogprobs, rollouts=40),
    _wrong("dropped_eos", "plumbing_mask", make=sab.DroppedEos, rollouts=40),
    _wrong("shuffled_groups", "plumbing_groups", make=sab.ShuffledGroups, rollouts=40),
    _wrong("hacked_format", "reward_hacking", make=lambda: sab.HackableFormat(1.0), onset="reward"),
    _wrong("bad_critic", "critic_failure", "ppo", make=lambda: sab.BadValues(3.0)),
    _wrong("nan", "non_finite", make=lambda: sab.InjectedNan(start=40, count=3)),
    _wrong("paid_length", "length_explosion", make=lambda: sab.PaidLength(0.25), onset="reward", rollouts=70),
)


class Job(NamedTuple):
    """Run of the benchmark."""

    part: str
    """``diagnosis``: monitors watch and only log. ``rollback``: they may go back."""
    name: str
    """Name of the case."""
    seed: int
    seeds: str
    """Name of the set that the seed belongs to."""


def find(name: str) -> Case:
    """Find the case of this name."""
    return next(case for case in CASES if case.name == name)


def plan(which: str, only: list[str] | None = None, parts: tuple[str, ...] = PARTS) -> list[Job]:
    """List every run of a set of seeds, the longest first, so that none is left running alone."""
    jobs = [
        Job(part, case.name, seed, which)
        for case in CASES
        for part in parts
        if (part == "diagnosis" or case.rollback) and (only is None or case.name in only)
        for seed in SEEDS[which][: case.seeds]
    ]
    return sorted(jobs, key=lambda job: -find(job.name).length(job.part))
