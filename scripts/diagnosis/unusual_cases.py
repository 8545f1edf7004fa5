"""Runs that neither benchmark has: healthy ones that look unusual, and sick ones of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lit_grpo.data import CountdownPrompts, MixedPrompts
from lit_grpo.policy import CriticConfig, OptimizerConfig
from lit_grpo.rewards import LengthReward
from scripts.diagnosis.sabotage import PaidForm, Sabotage
from scripts.diagnosis.settings.char_tags import RunningSums
from scripts.diagnosis.unusual_sabotage import (
    AddedReward,
    ChangedEachRollout,
    ChangedReward,
    Named,
    NoEnd,
    NoGradients,
    OtherSampling,
    Staged,
    StaleLayer,
    Together,
    distance,
    growing_bonus,
    of_text,
    rate_times,
    share_of,
    swapped,
)

Make = Callable[[], Sabotage]
TWO, FOUR = ({"updates_per_rollout": n, "minibatch_prompts": 8} for n in (2, 4))


COUNTS = frozenset({"truncation", "no_signal", "none_right", "solved", "small_batch", "no_answer"})
"""Diagnoses that state an exact count, and so are true wherever they are made."""


@dataclass(frozen=True)
class Unusual:
    """Kind of run.

    Attributes:
        name: of the kind.
        what: what is unusual or wrong, in a few words.
        task: ``tags``, ``countdown``, ``sums`` (two forms of two-digit addition) or ``digits`` (quickstart).
        true: names of diagnoses that are true of the run: of a sick one any of them is right, of a healthy one they are
            no false alarms.
        sick: whether something is wrong.
        make: makes what is done from outside.
        objective: recipe and overrides.
        optimizer: changes of the optimizer's settings.
        module: further arguments of the module.
        data: arguments of the data module in the place of the task's.
        lora: rank of adapters; 0: none.
        rollouts: length of the run.
    """

    name: str
    what: str
    task: str = "tags"
    true: frozenset[str] = frozenset()
    sick: bool = False
    make: Make = Sabotage
    objective: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], dict[str, Any]] = dict
    lora: int = 0
    rollouts: int = 60


def countdown(numbers: int | list[int], n: int = 400, skip: int = 64) -> CountdownPrompts:
    form = "{numbers}{target}:"
    return CountdownPrompts(n=n, skip=skip, numbers=numbers, largest=20, targets=[1, 60], template=form)


class EasyThenHard(CountdownPrompts):
    """Problems of two numbers, then as many of three."""

    def rows(self) -> Any:
        easy, hard = countdown(2, skip=0).rows(), countdown(3, skip=0).rows()
        return [replace(row, id=f"{level}/{row.id}") for level, rows in ((2, easy), (3, hard)) for row in rows]


def two_sources() -> MixedPrompts:
    easy, hard = Named(countdown(2), "easy"), Named(countdown(4), "hard")
    return MixedPrompts([easy, hard], [1.0, 1.0])


def signed(item: Any, value: float) -> float:
    return 2 * value - 1


CRITIC = {"critic": CriticConfig(optimizer=OptimizerConfig(lr=3e-4, warmup_steps=10))}


def _healthy(name: str, what: str, true: str = "", **changes: Any) -> Unusual:
    return Unusual(name, what, true=frozenset(true.split()), **changes)


def _sick(name: str, what: str, true: str, **changes: Any) -> Unusual:
    return Unusual(name, what, true=frozenset(true.split()), sick=True, **changes)


HEALTHY = (
    _healthy(
        "scale_100",
        "rewards of 0 and 100",
        task="countdown",
        make=lambda: ChangedReward(lambda item, value: 100 * value, threshold=100.0, values=(0.0, 100.0)),
    ),
    _healthy(
        "ppo_minus_one",
        "a critic, and rewards of -1 and 1",
        task="sums",
        objective={"recipe": "ppo"},
        module=CRITIC,
        make=lambda: ChangedReward(signed, values=(-1.0, 1.0)),
    ),
    _healthy(
        "ppo_20",
        "a critic, and rewards of 0 and 20",
        task="sums",
        objective={"recipe": "ppo"},
        module=CRITIC,
        make=lambda: ChangedReward(lambda item, value: 20 * value, threshold=20.0, values=(0.0, 20.0)),
    ),
    _healthy(
        "ppo_solved",
        "a critic on prompts of which 99 % are solved",
        "solved",
        task="sums",
        objective={"recipe": "ppo"},
        module=CRITIC,
        make=lambda: ChangedReward(lambda item, value: float(of_text(item, "almost") < 0.993)),
    ),
    _healthy(
        "shaped",
        "a continuous reward, and nothing says what is right",
        task="sums",
        make=lambda: ChangedReward(distance, threshold=None),
    ),
    _healthy(
        "never_full",
        "a continuous reward that never gives full marks",
        task="sums",
        make=lambda: ChangedReward(lambda item, value: 0.9 * distance(item, value)),
    ),
    _healthy(
        "three_rewards",
        "right answer, form, and a little for brevity",
        make=lambda: AddedReward(lambda text, tokens: 1 - tokens / 40, 0.1, "brevity"),
    ),
    _healthy(
        "harder_at_once",
        "a curriculum: three numbers in the place of two from rollout 30 on",
        "rewards_changed",
        task="countdown",
        make=lambda: Staged(lambda rollout: float(rollout >= 30)),
        data=lambda: {"prompts": EasyThenHard()},
    ),
    _healthy(
        "harder_slowly",
        "a curriculum: from two to three numbers between rollouts 20 and 50",
        "reward_falls",
        task="countdown",
        make=lambda: Staged(lambda rollout: min(1.0, max(0.0, (rollout - 20) / 30))),
        data=lambda: {"prompts": EasyThenHard()},
    ),
    _healthy(
        "groups_of_two", "64 prompts, two answers each", data=lambda: {"group_size": 2, "prompts_per_rollout": 64}
    ),
    _healthy(
        "one_prompt",
        "one prompt a rollout, 32 answers",
        "small_batch",
        task="sums",
        optimizer={"lr": 1e-4},
        data=lambda: {"group_size": 32, "prompts_per_rollout": 1},
    ),
    _healthy(
        "brief",
        "a small pay for brevity, which shortens answers",
        task="sums",
        data=lambda: {"more_rewards": [LengthReward(24, weight=0.3)]},
    ),
    _healthy("kl", "a KL term with a reference", objective={"kl_coef": 0.04}),
    _healthy("lora_2", "adapters of rank 2", lora=2, optimizer={"lr": 3e-3}),
    _healthy(
        "two_sources",
        "two sources, one easy and one far too hard",
        "no_signal source_without_signal",
        task="countdown",
        data=lambda: {"prompts": two_sources()},
    ),
    _healthy("sgd", "SGD in the place of AdamW", optimizer={"type": "torch.optim.SGD", "lr": 0.03, "warmup_steps": 0}),
    _healthy(
        "cosine",
        "a warm-up of 20, and a rate that falls to 0",
        optimizer={"warmup_steps": 20, "schedule": "cosine"},
        rollouts=80,
    ),
    _healthy("cool", "sampling at 0.7 on both sides", data=lambda: {"temperature": 0.7}),
    _healthy("label_noise", "labels that the objective flips on purpose", objective={"label_noise": 0.1}),
    _healthy("long_limit", "a length limit of twice what is needed", task="sums", data=lambda: {"max_new_tokens": 48}),
    _healthy("tiny_held_out", "eight held-out questions", data=lambda: {"held_out": 8}),
    _healthy(
        "raft_warmup",
        "positives only, clean, with a warm-up of 40",
        objective={"recipe": "raft"},
        optimizer={"lr": 2e-4, "warmup_steps": 40},
    ),
    _healthy("gmpo", "recipe gmpo, two updates", objective={"recipe": "gmpo"}, module=TWO),
    _healthy("sapo", "recipe sapo, two updates", objective={"recipe": "sapo"}, module=TWO),
    _healthy("gtpo", "recipe gtpo", objective={"recipe": "gtpo"}),
    _healthy("reinforce_pp", "recipe reinforce_pp", objective={"recipe": "reinforce_pp"}),
    _healthy("olmo3", "recipe olmo3", objective={"recipe": "olmo3"}),
    _healthy("dcpo", "recipe dcpo, two updates", objective={"recipe": "dcpo"}, module=TWO),
    _healthy(
        "dr_grpo_sums",
        "recipe dr_grpo at twice the rate",
        task="sums",
        objective={"recipe": "dr_grpo"},
        optimizer={"lr": 6e-4},
    ),
    _healthy(
        "vapo",
        "recipe vapo, critic warm-up of 5",
        objective={"recipe": "vapo"},
        task="sums",
        module={"critic": CriticConfig(optimizer=OptimizerConfig(lr=3e-4), warmup_rollouts=5)},
    ),
    _healthy(
        "solved_soon", "a task that is solved by rollout 20, and then stays so", rollouts=110, optimizer={"lr": 6e-4}
    ),
    _healthy(
        "digits_two_updates",
        "random weights, two updates",
        task="digits",
        module={"updates_per_rollout": 2},
        rollouts=100,
        objective={"entropy_coef": 0.03},
    ),
)

SICK = (
    _sick("rate_tiny", "a rate of 1e-10", "policy_still", optimizer={"lr": 1e-10}),
    _sick("frozen", "no gradient reaches the weights", "policy_still gradient_vanished", make=NoGradients),
    _sick("eps", "an epsilon of 1e4 in Adam", "policy_still", optimizer={"eps": 1e4}),
    _sick("clip_tiny", "gradients clipped to 1e-12", "policy_still", module={"max_grad_norm": 1e-12}),
    _sick("beta", "a KL coefficient of 100", "no_progress turning_back", objective={"kl_coef": 100.0}, rollouts=110),
    _sick("decay", "a weight decay that eats the weights", "reward_falls", optimizer={"weight_decay": 30.0}),
    _sick(
        "verifier_0",
        "a verifier that returns 0 from rollout 25 on",
        "rewards_changed",
        make=lambda: ChangedReward(lambda item, value: 0.0, 25),
    ),
    _sick(
        "verifier_1",
        "a verifier that returns 1 from rollout 25 on",
        "rewards_changed",
        task="countdown",
        make=lambda: ChangedReward(lambda item, value: 1.0, 25),
    ),
    _sick(
        "verifier_part",
        "a verifier that fails on 40 % of the prompts from rollout 25 on",
        "rewards_changed",
        make=lambda: ChangedReward(lambda item, value: value * (share_of(item, "part") > 0.4), 25),
    ),
    _sick(
        "verifier_half",
        "a verifier that knows half of the prompts only",
        "no_signal",
        make=lambda: ChangedReward(lambda item, value: value * (share_of(item, "half") > 0.5)),
    ),
    _sick(
        "shuffled_labels",
        "answers of other prompts",
        "no_progress no_signal",
        task="sums",
        data=lambda: {"wrong_answers": True},
        rollouts=110,
    ),
    _sick(
        "broken_source",
        "two sources, and the verifier of one returns 0",
        "source_without_signal",
        task="countdown",
        make=lambda: ChangedReward(lambda item, value: value * (item.prompt.source != "b")),
        data=lambda: {"prompts": MixedPrompts([Named(countdown(2), "a"), Named(countdown(3), "b")], [1.0, 1.0])},
    ),
    _sick(
        "paid_repetition",
        "a reward for each 1 in the answer",
        "repetition length_explosion reward_hacking",
        make=lambda: ChangedReward(lambda item, value: value + 0.2 * item.text.count("1")),
    ),
    _sick(
        "paid_verbosity",
        "a second reward for verbosity",
        "length_explosion reward_hacking truncation",
        task="sums",
        make=lambda: AddedReward(lambda text, tokens: tokens / 24, 3.0, "style"),
    ),
    _sick(
        "hacked_rare",
        "a form that pays three times and costs answers",
        "reward_hacking",
        make=lambda: PaidForm(r"<a>\d</a>$", 3.0),
    ),
    _sick(
        "overfit",
        "16 prompts again and again, and held-out ones",
        "overfitting reward_hacking",
        rollouts=100,
        optimizer={"lr": 1e-3},
        data=lambda: {"prompts": RunningSums(16, skip=64)},
    ),
    _sick(
        "top_p",
        "the engine samples at top_p 0.7",
        "stale_or_mismatched_sampler",
        make=lambda: OtherSampling(sampling=lambda s: replace(s, top_p=0.7)),
    ),
    _sick(
        "top_k",
        "the engine samples at top_k 2",
        "stale_or_mismatched_sampler",
        make=lambda: OtherSampling(sampling=lambda s: replace(s, top_k=2)),
    ),
    _sick(
        "cut_prompts",
        "the engine sees prompts without their beginning",
        "stale_or_mismatched_sampler",
        make=lambda: OtherSampling(request=lambda r: replace(r, token_ids=r.token_ids[2:])),
    ),
    _sick("no_end", "the engine does not know the end token", "truncation", make=NoEnd),
    _sick(
        "swapped",
        "the engine returns the completions of other prompts",
        "stale_or_mismatched_sampler",
        make=lambda: OtherSampling(completions=swapped),
    ),
    _sick("stale_layer", "one of two layers is not synchronised", "stale_or_mismatched_sampler", make=StaleLayer),
    _sick(
        "bonus_grows",
        "an entropy bonus that grows",
        "entropy_explosion",
        task="countdown",
        objective={"entropy_coef": 0.001},
        make=lambda: ChangedEachRollout(growing_bonus(0.02)),
        rollouts=80,
    ),
    _sick(
        "critic_rate",
        "a critic at a rate of 1",
        "critic_failure",
        task="sums",
        objective={"recipe": "ppo"},
        module={"critic": CriticConfig(optimizer=OptimizerConfig(lr=1.0))},
    ),
    _sick(
        "rate_spike",
        "forty times the rate in rollouts 30 to 32",
        "learning_rate_too_high",
        make=lambda: ChangedEachRollout(rate_times(40.0, range(30, 33)), 30),
    ),
    _sick(
        "advantages_100",
        "SGD, and rewards 100 times as large without a clip",
        "learning_rate_too_high",
        objective={"recipe": "dr_grpo"},
        optimizer={"type": "torch.optim.SGD", "lr": 30.0, "warmup_steps": 0},
        module={"max_grad_norm": None},
        make=lambda: ChangedReward(lambda item, value: 100 * value, threshold=100.0, values=(0.0, 100.0)),
    ),
    _sick(
        "two_faults",
        "ten times the rate and a verifier that dies at 40",
        "learning_rate_too_high rewards_changed",
        optimizer={"lr": 3e-3},
        make=lambda: Together(ChangedReward(lambda item, value: 0.0, 40)),
    ),
)
CASES = {case.name: case for case in (*HEALTHY, *SICK)}
