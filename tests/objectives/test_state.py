"""Methods that remember: DCPO's history, adaptive beta, initial entropy, label noise; and what a checkpoint holds."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.objectives import RECIPES, Objective
from lit_grpo.objectives.pass_at_k import pass_at_k
from lit_grpo.objectives.state import ObjectiveState
from lit_grpo.types import Experience
from tests.objectives.random_batches import NAMES, batch, objective, step


@pytest.mark.parametrize("name", NAMES)
def test_state_survives_a_checkpoint(name: str) -> None:
    """Plain types only: torch.load(weights_only=True) reads it, and the next rollout is the same."""
    made = objective(name)
    state = made.new_state()
    first, _ = batch(1, groups=2, size=3, width=3)
    second, _ = batch(2, groups=2, size=3, width=3)
    _, state = made.advantages(first, state)
    file = io.BytesIO()
    torch.save(state.to_dict(), file)
    file.seek(0)
    restored = ObjectiveState.from_dict(torch.load(file, weights_only=True))
    assert restored == state
    (again, after_restored), (same, after) = made.advantages(second, restored), made.advantages(second, state)
    torch.testing.assert_close(again, same, rtol=0, atol=0, equal_nan=True)
    assert after_restored == after


def test_history_of_ranks_is_merged() -> None:
    made = objective("dcpo")
    exp, _ = batch(3, groups=4, size=3, width=3)
    whole = made.new_state()
    ranks = [made.new_state(), made.new_state()]
    for _ in range(2):
        _, whole = made.advantages(exp, whole)
        for rank, rows in enumerate((torch.arange(6), torch.arange(6, 12))):
            _, ranks[rank] = made.advantages(exp.select(rows), ranks[rank])
        merged = made.merge_states(ranks)
        assert merged == whole
        ranks = [merged, merged]
    assert {history.visits for history in whole.prompts.values()} == {2}


def test_dcpo_uniform_group_teaches_on_a_later_visit() -> None:
    made = objective("dcpo")
    exp, now = batch(3, groups=1, size=4, width=3)
    exp = replace(exp, lengths=torch.full((4,), 3), truncated=torch.zeros(4, dtype=torch.bool))
    logprobs = torch.full((4, 3), -1.0, dtype=torch.float64)
    exp = replace(exp, old_logprobs=logprobs, sampler_logprobs=logprobs)
    now.logprobs = torch.full((4, 3), -1.0, dtype=torch.float64)
    state = made.new_state()
    mixed = replace(exp, rewards=torch.tensor([1.0, 0, 0, 0], dtype=torch.float64))
    uniform = replace(exp, rewards=torch.ones(4, dtype=torch.float64))
    assert not made.advantages(uniform, state)[0].any()
    _, state = made.advantages(mixed, state)
    assert (made.advantages(uniform, state)[0] > 0).all()


def test_adaptive_beta() -> None:
    made = Objective.from_recipe("trpo_penalty", trpo_target_kl=0.01)
    state = made.new_state()
    exp, now = batch(3, groups=2, size=3, width=3)
    for kl, beta in ((0.016, 2.0), (0.01, 2.0), (0.006, 1.0)):
        state = made.end_of_rollout(state, approx_kl=kl)
        assert state.beta == beta
    assert made.end_of_rollout(state, approx_kl=None) == state, "no step was taken, so nothing was measured"
    advantages, state = made.advantages(exp, replace(state, beta=7.0))
    assert made.plan(exp, advantages, state).beta == 7.0
    fixed = Objective.from_recipe("trpo_penalty")
    assert fixed.new_state().beta is None
    assert fixed.end_of_rollout(fixed.new_state(), approx_kl=1.0) == fixed.new_state()
    assert fixed.plan(exp, *fixed.advantages(exp, fixed.new_state())).beta == 1.0
    assert step(fixed, exp, now)[2].metrics["loss/kl_old"].total > 0


def test_initial_entropy_is_measured_first() -> None:
    made = Objective.from_recipe("gtpo")
    assert made.initial_entropy_prompts == 100
    state = made.new_state()
    exp, _ = batch(3, groups=2, size=3, width=3)
    advantages, state = made.advantages(exp, state)
    with pytest.raises(UserError, match="untouched model"):
        made.plan(exp, advantages, state)
    plan = made.plan(exp, advantages, state.with_initial_entropy(0.3))
    assert plan.active.any()
    assert objective("gtpo").initial_entropy_prompts == 0
    always = Objective.from_recipe("gtpo", entropy_gate=float("inf"))
    assert always.initial_entropy_prompts == 0, "a filter that always acts compares with nothing"
    assert always.plan(exp, *always.advantages(exp, always.new_state())).active.any()
    assert Objective.from_recipe("grpo").initial_entropy_prompts == 0


def test_label_noise_flips_its_share_and_is_seeded() -> None:
    made = Objective.from_recipe("grpo", label_noise=0.25)
    exp, _ = batch(3, groups=200, size=4, width=1)
    flips = made.shaping.flips(exp, 0)
    assert 0.2 < flips.double().mean() < 0.3
    assert torch.equal(flips, made.shaping.flips(exp, 0))
    assert not torch.equal(flips, made.shaping.flips(exp, 1))
    other = Objective.from_recipe("grpo", label_noise=0.25, label_noise_seed=1)
    assert not torch.equal(flips, other.shaping.flips(exp, 0))
    # A step of some prompts sees the flips that the rollout's advantages were made with.
    state = made.new_state()
    _, state = made.advantages(exp, state)
    base, _ = made.rewards(exp, state)
    assert torch.equal(base, torch.where(flips, 1 - exp.rewards, exp.rewards))
    rows = torch.arange(40, 80)
    assert torch.equal(made.rewards(exp.select(rows), state)[0], base[rows])
    _, state = made.advantages(exp, state)
    assert not torch.equal(made.rewards(exp, state)[0], base)


def test_lopti_passes_share_the_tokens() -> None:
    made = Objective.from_recipe("lopti", kl_coef=0.0)
    assert made.passes == 2
    exp, now = batch(5, groups=3, size=3, width=4)
    one = step(Objective.from_recipe("lopti", kl_coef=0.0, lopti_eta=0.0), exp, now)
    low, high = (step(made, exp, now, pass_index=p) for p in (0, 1))
    torch.testing.assert_close(low[3] + high[3], one[3])
    assert not (low[3].bool() & high[3].bool()).any()
    assert Objective.from_recipe("lopti", lopti_eta=0.0).passes == 1


def test_router_drift_weakens_the_update() -> None:
    made = objective("rspo")
    exp, now = batch(5, groups=3, size=3, width=4)
    assert exp.router_logscores_old is not None
    still = replace(now, router=exp.router_logscores_old)
    gmpo = step(objective("gmpo"), exp, now)
    torch.testing.assert_close(step(made, exp, still)[3], gmpo[3])
    moved = step(made, exp, now)
    assert moved[3].abs().sum() < gmpo[3].abs().sum()
    with pytest.raises(UserError, match="router_logscores"):
        made.loss(now.logprobs, moved[1])


def test_dynamic_sampling_is_told_to_the_trainer() -> None:
    assert {n for n, r in RECIPES.items() if r.objective.dynamic_sampling} == {"dapo", "olmo3"}


def _without(exp: Experience, field: str) -> Experience:
    missing: dict[str, Any] = {field: None}
    return replace(exp, **missing)


def test_missing_inputs_are_named() -> None:
    exp, now = batch(5, groups=2, size=3, width=4)
    for recipe, changes, field in (
        ("grpo", {"sampler_correction": "tis_token"}, "sampler_logprobs"),
        ("grpo", {"kl_coef": 0.1}, "ref_logprobs"),
        ("ppo", {}, "values"),
        ("rent", {}, "entropy"),
        ("reinforce_bstar", {"optimal_baseline_weights": "given"}, "score_sqnorm"),
        ("gtpo", {"initial_entropy": 0.3}, "token_ids"),
    ):
        made = Objective.from_recipe(recipe, **changes)
        with pytest.raises(UserError, match=field.split("_")[0]):
            step(made, _without(exp, field), now)


def test_soft_overlong_does_not_rescue_a_uniform_group() -> None:
    """DAPO drops groups by correctness; different lengths do not make them mixed."""
    made = Objective.from_recipe("dapo", overlong_max=4, overlong_cache=3)
    exp, _ = batch(5, groups=1, size=3, width=4)
    exp = replace(exp, rewards=torch.zeros(3, dtype=torch.float64), lengths=torch.tensor([1, 3, 4]))
    advantages, state = made.advantages(exp, made.new_state())
    assert advantages.any()
    assert made.plan(exp, advantages, state).empty


@pytest.mark.parametrize("name", NAMES)
def test_state_is_never_changed_in_place(name: str) -> None:
    made = objective(name)
    exp, _ = batch(1, groups=2, size=3, width=3)
    _, state = made.advantages(exp, made.new_state())
    before = state.to_dict()
    _, after = made.advantages(exp, state)
    made.end_of_rollout(after, approx_kl=0.5)
    made.merge_states([state, after])
    assert state.to_dict() == before


def test_a_reward_range_of_all_ranks_is_the_widest() -> None:
    made = Objective.from_recipe("ppo")
    unknown, low, high = made.new_state(), ObjectiveState(reward_range=(-1, 0.5)), ObjectiveState(reward_range=(0, 2))
    assert made.merge_states([unknown, low, high]).reward_range == (-1, 2)
    assert made.merge_states([low, unknown]).reward_range == (-1, 0.5)
    assert made.merge_states([unknown, unknown]) == unknown


def test_another_objective_keeps_the_memory_that_both_use() -> None:
    state = ObjectiveState(beta=3.0, reward_range=(0.0, 1.0), initial_entropy=0.2)
    adaptive = Objective.from_recipe("trpo_penalty", trpo_target_kl=0.1)
    assert adaptive.adopt_state(state) == ObjectiveState(beta=3.0, reward_range=(0.0, 1.0))
    assert adaptive.adopt_state(ObjectiveState()).beta == 1.0
    assert Objective.from_recipe("grpo").adopt_state(state) == ObjectiveState()
    assert Objective.from_recipe("gtpo").adopt_state(state).initial_entropy == 0.2
    seen = ObjectiveState(first_rollout_entropy=0.4)
    assert Objective.from_recipe("grpo").adopt_state(seen) == seen, "what was seen of the run is kept for later"
    assert ObjectiveState.from_dict(seen.to_dict()) == seen


def test_pass_at_k_edges() -> None:
    assert pass_at_k(4, 0, 4) == 0
    assert pass_at_k(4, 4, 1) == 1
    with pytest.raises(UserError, match="samples"):
        pass_at_k(2, 1, 3)
