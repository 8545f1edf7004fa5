"""Parts that ask which completions are correct go by the verdict, whatever the total reward is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_grpo.errors import UserError
from lit_grpo.objectives import RECIPES, Objective, StepPlan
from lit_grpo.objectives.diagnostics import value_signs
from lit_grpo.objectives.filters import Filters
from lit_grpo.objectives.tensors import Groups
from lit_grpo.types import Experience

# Two groups of four: 10 for the form, which all have but one, and 10 for a right answer. The second group is all wrong.
CORRECT = [True, False, True, False, False, False, False, False]
REWARDS = [20.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 0.0]
LENGTHS = [2, 3, 1, 2, 3, 3, 2, 1]


def experience(**changes: Any) -> Experience:
    correct = torch.tensor(CORRECT)
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    exp = Experience(
        lengths=torch.tensor(LENGTHS),
        group_ids=torch.arange(8) // 4,
        rewards=rewards,
        truncated=torch.zeros(8, dtype=torch.bool),
        width=3,
        correct=correct,
        flipped_rewards=rewards + torch.where(correct, -10.0, 10.0).double(),
        token_ids=torch.arange(24).view(8, 3),
        old_logprobs=torch.full((8, 3), -1.0, dtype=torch.float64),
        values=torch.arange(24, dtype=torch.float64).view(8, 3),
        ref_logprobs=torch.full((8, 3), -1.0, dtype=torch.float64),
        prompt_ids=["a"] * 4 + ["b"] * 4,
    )
    return replace(exp, **changes)


def plan_of(made: Objective, exp: Experience) -> tuple[StepPlan, Tensor]:
    advantages, state = made.advantages(exp, made.new_state())
    return made.plan(exp, advantages, state), advantages


def pushes(made: Objective, plan: StepPlan) -> Tensor:
    """dL/d(log-probability) of every token."""
    logprobs = torch.full((8, 3), -1.0, dtype=torch.float64, requires_grad=True)
    out = made.loss(logprobs, plan, entropy=torch.zeros(8, 3), values=torch.zeros(8, 3, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    return gradient


@pytest.mark.parametrize(("recipe", "kept"), [("psr", CORRECT), ("nsr", [not c for c in CORRECT])])
def test_only_correct_or_only_incorrect_completions_are_kept(recipe: str, kept: list[bool]) -> None:
    made = Objective.from_recipe(recipe, entropy_coef=0.0)
    plan, advantages = plan_of(made, experience())
    assert plan.kept.tolist() == kept
    assert advantages[:, 0].tolist() == [1.0 if c else -1.0 for c in CORRECT]
    moved = pushes(made, plan).abs().sum(1) > 0
    assert moved.tolist() == kept


def test_the_likelihood_term_raises_correct_completions_and_no_other() -> None:
    made = Objective.from_recipe("vapo", nll_coef=0.1)
    plan, _ = plan_of(made, experience())
    without = Objective.from_recipe("vapo", nll_coef=0.0)
    term = pushes(made, plan) - pushes(without, plan_of(without, experience())[0])
    # mu over the 3 tokens of the two correct completions.
    expected = torch.zeros(8, 3, dtype=torch.float64)
    expected[0, :2] = expected[2, :1] = -0.1 / 3
    torch.testing.assert_close(term, expected)


def test_four_wrong_answers_in_the_right_form_have_no_likelihood_term() -> None:
    exp = experience(rewards=torch.full((8,), 10.0, dtype=torch.float64), correct=torch.zeros(8, dtype=torch.bool))
    plan, _ = plan_of(Objective.from_recipe("vapo"), exp)
    assert plan.nll_weight == 0.0
    assert not plan.correct.any()  # type: ignore[union-attr]


def test_values_are_told_apart_by_the_verdict_and_only_where_there_is_one() -> None:
    made = Objective.from_recipe("ppo")
    plan, _ = plan_of(made, experience())
    sums = made.loss(torch.full((8, 3), -1.0), plan, values=torch.zeros(8, 3)).metrics
    right = [3 * i + t for i in range(8) for t in range(LENGTHS[i]) if CORRECT[i]]
    wrong = [3 * i + t for i in range(8) for t in range(LENGTHS[i]) if not CORRECT[i]]
    for name, values in (("correct", right), ("incorrect", wrong)):
        total, count = sums[f"critic/value_{name}"]
        assert (float(total), float(count)) == (sum(values), len(values))
        # The rewards of the run, as far as it has seen them, are 0 to 20, and a value may leave them by a twentieth.
        total, count = sums[f"critic/value_outside_{name}_frac"]
        assert (float(total), float(count)) == (sum(v > 21 for v in values), len(values))
    plan, _ = plan_of(made, experience(correct=None))
    assert plan.correct is None
    sums = made.loss(torch.full((8, 3), -1.0), plan, values=torch.zeros(8, 3)).metrics
    assert {k for k in sums if "correct" in k} == set()
    assert "critic/value_outside_frac" in sums


def test_values_just_outside_the_range_of_the_rewards_are_not_outside() -> None:
    values = torch.tensor([[-0.11, -0.09, 0.0, 1.0, 2.0, 2.09, 2.11]])
    sums = value_signs(values, torch.zeros_like(values), None, torch.ones_like(values, dtype=torch.bool), (0.0, 2.0))
    assert tuple(map(float, sums["critic/value_outside_frac"])) == (2, 7)


def test_uniform_groups_are_told_by_reward_or_by_verdict() -> None:
    groups, none = Groups.of(torch.arange(12) // 4), torch.zeros(12, dtype=torch.bool)
    # All right, one without its format bonus; all wrong, rewards differ; mixed, and the totals happen to be equal.
    base = torch.tensor([1.1, 1.1, 1.0, 1.1, 0.1, 0.0, 0.1, 0.1, 1.0, 1.0, 1.0, 1.0])
    correct = torch.tensor([True] * 4 + [False] * 4 + [True, False, True, False])
    by_reward, by_verdict = Filters(drop_zero_variance=True), Filters(drop_zero_variance=True, uniform_by="correct")
    assert by_reward(base, None, none, groups)[0].tolist() == [True] * 8 + [False] * 4
    assert by_verdict(base, correct, none, groups)[0].tolist() == [False] * 8 + [True] * 4


def test_recipes_tell_uniform_groups_as_their_sources_do() -> None:
    found = {name: r.objective.filters.uniform_by for name, r in RECIPES.items() if r.objective.filters.zero_variance}
    assert found == {"dapo": "correct", "reinforce_rej": "correct", "olmo3": "reward"}
    assert Objective.from_recipe("dapo", uniform_by="reward").name == "dapo+uniform_by=reward"


@pytest.mark.parametrize(
    ("recipe", "changes", "keys"),
    [
        ("grpo", {}, ()), ("ppo", {}, ()), ("olmo3", {}, ()), ("sft", {}, ()), ("gtpo", {}, ()), ("rent", {}, ()),
        ("psr", {}, ("advantage", "keep_sign")), ("imle", {}, ("advantage",)), ("raft", {}, ("advantage",)),
        ("vapo", {}, ("nll_coef",)), ("vapo", {"nll_coef": 0.0}, ()), ("dapo", {}, ("uniform_by",)),
        ("dapo", {"uniform_by": "reward"}, ()), ("grpo", {"label_noise": 0.1}, ("label_noise",)),
        ("reinforce_rej", {}, ("advantage", "uniform_by")),
    ],
)  # fmt: skip
def test_an_objective_names_the_settings_that_ask_for_the_verdict(
    recipe: str, changes: dict[str, object], keys: tuple[str, ...]
) -> None:
    made = Objective.from_recipe(recipe, **changes)
    assert sorted(made.uses_correct) == sorted(keys)


@pytest.mark.parametrize(
    ("recipe", "changes", "key"),
    [
        ("dapo", {"advantage": "sign"}, "overlong_penalty"),
        ("rent", {"advantage": "sign"}, "entropy_reward"),
        ("raft_pp", {"kl_placement": "reward"}, "kl_placement"),
        ("grpo", {"uniform_by": "correct"}, "uniform_by"),
    ],
)
def test_what_a_sign_or_a_filter_that_is_off_cannot_follow_is_refused(
    recipe: str, changes: dict[str, object], key: str
) -> None:
    with pytest.raises(UserError) as error:
        Objective.from_recipe(recipe, **changes)
    assert error.value.where == f"model.objective.{key}"


def test_label_noise_turns_the_verdict_and_what_its_reward_adds_and_nothing_else() -> None:
    made = Objective.from_recipe("grpo", label_noise=0.5)
    exp = experience()
    _, state = made.advantages(exp, made.new_state())
    flips = made.shaping.flips(exp, 0).tolist()
    assert True in flips
    assert False in flips
    base, _ = made.rewards(exp, state)
    expected = [r + (-10 if c else 10) if f else r for r, c, f in zip(REWARDS, CORRECT, flips, strict=True)]
    assert base.tolist() == expected
    correct = made.correct(exp, state)
    assert correct is not None
    assert correct.tolist() == [c != f for c, f in zip(CORRECT, flips, strict=True)]


def noisy(prompts: list[str], keys: Tensor | None) -> Experience:
    n = 2 * len(prompts)
    rewards = (torch.arange(n) % 3 == 0).double()
    return Experience(
        lengths=torch.ones(n, dtype=torch.int64),
        group_ids=torch.arange(n) // 2,
        rewards=rewards,
        truncated=torch.zeros(n, dtype=torch.bool),
        width=1,
        correct=rewards > 0,
        flipped_rewards=1 - rewards,
        sample_keys=keys,
        old_logprobs=torch.full((n, 1), -1.0, dtype=torch.float64),
        prompt_ids=[name for name in prompts for _ in range(2)],
    )


@pytest.mark.parametrize("keys", [None, torch.arange(400) * 7])
def test_a_prompt_twice_in_a_rollout_has_the_same_flips_in_every_minibatch(keys: Tensor | None) -> None:
    """Sign and filter agree: what NL keeps is pushed down, also where the prompt's other group is in another step."""
    made = Objective.from_recipe("nl", label_noise=0.3)
    exp = noisy(["same"] * 200, keys)
    advantages, state = made.advantages(exp, made.new_state())
    flips = made.shaping.flips(exp, 0)
    kept = 0
    groups = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    for rows in (2 * groups[:, None] + torch.arange(2)).flatten().split(50):
        part = exp.select(rows)
        assert torch.equal(made.shaping.flips(part, 0), flips[rows])
        plan = made.plan(part, advantages[rows], state)
        assert torch.equal(plan.kept, advantages[rows][:, 0] < 0)
        kept += int(plan.kept.sum())
    assert exp.correct is not None
    assert kept == int(exp.correct.eq(flips).sum())
    # The two groups of one prompt are drawn apart.
    assert not torch.equal(flips[0::4], flips[2::4])
    assert 0.2 < flips.double().mean() < 0.4
