"""From rewards to metrics and losses: what is correct is what the judging reward says, never a total above 0."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.learner.batch import make_experience
from lit_grpo.learner.metric_sums import StepMetrics, add_rollout_metrics
from lit_grpo.learner.rollout_metrics import add_audit_metrics
from lit_grpo.objectives import Objective, ObjectiveConfig
from lit_grpo.rewards import FormatReward, MathReward, Reward
from lit_grpo.rollout.dynamic_sampling import join_groups, split_groups
from lit_grpo.rollout.generator import RolloutGenerator
from lit_grpo.types import Completion, Prompt, Rollout, Sampling, Score
from tests import tiny


class Engine:
    """Gives completion i the ids (i, 0, 0, ...), as long as the test says."""

    policy_version = 0

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def generate(self, requests: Any, sampling: Sampling) -> Any:
        for r in requests:
            for s in range(len(r.seeds)):
                i = r.index * len(r.seeds) + s
                ids = (i, *[0] * (self.lengths[i] - 1))
                yield Completion(r.index, s, ids, (-1.0,) * len(ids), "stop", 0)

    def sync(self, weights: Any, version: int) -> None: ...

    def close(self) -> None: ...


class Texts:
    """A tokenizer that decodes a completion to the test's text of its first id."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return self.texts[ids[0]]


class Policy:
    policy_version = 0

    def named_weights(self) -> Any:
        return iter(())


def tagged(answer: str) -> str:
    return f"<think>\nso\n</think>\n<answer>\n\\boxed{{{answer}}}\n</answer>"


def scored(texts: list[str], lengths: list[int], rewards: list[Reward], group_size: int = 4) -> Rollout:
    generator = RolloutGenerator(Engine(lengths), Policy(), Texts(texts), rewards, 0)
    prompts = [Prompt(f"p{g}", "", (1,), "7") for g in range(len(texts) // group_size)]
    try:
        return generator.produce(prompts, Sampling(), group_size, index=0)
    finally:
        generator.close()


def logged(rollout: Rollout) -> dict[str, float]:
    metrics, experience = StepMetrics(), make_experience(rollout, "cpu")
    add_rollout_metrics(metrics, rollout)
    add_audit_metrics(metrics, rollout, experience, torch.zeros(len(rollout.texts), experience.width))
    return metrics.compute()


def test_four_wrong_answers_in_the_right_form_are_all_wrong() -> None:
    """GTPO's reward: 10 for the form, 10 for the answer."""
    texts = [tagged(a) for a in ("9", "8", "9", "6")]
    rollout = scored(texts, [3, 4, 5, 8], [FormatReward(), MathReward(weight=10.0, workers=1)])
    assert rollout.reward.tolist() == [10.0] * 4
    assert rollout.correct is not None
    assert not rollout.correct.any()
    found = logged(rollout)
    assert (found["groups/all_correct_frac"], found["groups/all_wrong_frac"]) == (0.0, 1.0)
    assert "completions/correct_length" not in found
    assert found["completions/incorrect_length"] == 5.0
    assert "completions/correct_truncated_frac" not in found
    experience = make_experience(rollout, "cpu")
    vapo = Objective.from_recipe("vapo")
    experience = replace(experience, values=torch.zeros(4, 8), old_logprobs=torch.full((4, 8), -1.0))
    advantages, state = vapo.advantages(experience, vapo.new_state())
    plan = vapo.plan(experience, advantages, state)
    logprobs = torch.full((4, 8), -1.0, requires_grad=True)
    assert float(vapo.loss(logprobs, plan, values=torch.zeros(4, 8)).metrics["loss/nll"].total) == 0.0


def test_a_bonus_that_all_earn_makes_nobody_right() -> None:
    """A tenth for the form, earned by all eight; two of the first group are right."""
    texts = [tagged(a) for a in ("7", "7", "9", "9", "1", "2", "3", "4")]
    lengths = [4, 6, 10, 20, 20, 20, 25, 25]
    rollout = scored(texts, lengths, [MathReward(workers=1), FormatReward(weight=0.1)])
    found = logged(rollout)
    assert (found["groups/all_correct_frac"], found["groups/all_wrong_frac"]) == (0.0, 0.5)
    assert (found["completions/correct_length"], found["completions/incorrect_length"]) == (5.0, 20.0)
    assert found["reward"] == pytest.approx((2 * 2 + 6 * 1) / 8)
    experience = make_experience(rollout, "cpu")
    for recipe, kept in (("psr", [True, True] + [False] * 6), ("nsr", [False, False] + [True] * 6)):
        made = Objective.from_recipe(recipe)
        advantages, state = made.advantages(experience, made.new_state())
        assert made.plan(experience, advantages, state).kept.tolist() == kept


def test_groups_are_all_correct_whatever_other_rewards_their_completions_have() -> None:
    found = logged(tiny.rollout([1.5, 1.0, 0.0, 0.5], [2, 2, 2, 2], 2))
    assert (found["groups/all_correct_frac"], found["groups/all_wrong_frac"]) == (0.5, 0.5)


def test_empty_completions_count_in_the_lengths_of_their_kind() -> None:
    found = logged(tiny.rollout([1.0, 0.0, 1.0, 0.0], [4, 0, 0, 6], 2))
    assert (found["completions/correct_length"], found["completions/incorrect_length"]) == (2.0, 3.0)
    assert found["completions/length"] == 2.5


def test_without_a_verdict_what_asks_for_it_is_not_logged() -> None:
    found = logged(tiny.rollout([1.0, 0.0, 2.0, 0.0], [4, 1, 2, 6], 2, correct=None))
    assert {key for key in found if "correct" in key or "wrong" in key} == set()
    assert "groups/zero_std_frac" in found


def test_advantages_of_a_sign_are_held_to_the_verdict_and_not_to_the_total() -> None:
    # Right without the form's 10 points: the smaller reward, and rightly the larger advantage.
    rollout = tiny.rollout([1.0, 10.0], [2, 2], 2, correct=torch.tensor([True, False]))
    experience, advantages = make_experience(rollout, "cpu"), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    for by_verdict, expected in ((True, 0.0), (False, 1.0)):
        metrics = StepMetrics()
        add_audit_metrics(metrics, rollout, experience, advantages, by_verdict=by_verdict)
        assert metrics.compute()["sanity/inverted_advantage_frac"] == expected


def test_verdicts_go_with_their_groups_when_dynamic_sampling_picks_and_joins_them() -> None:
    rollout = tiny.rollout([0.0, 1.0, 1.0, 1.0, 0.0, 0.0], [1, 2, 3, 4, 5, 6], 2)
    groups = split_groups(rollout, [4, 7, 9])
    joined = join_groups([groups[2], groups[0]], rollout, {})
    assert joined.correct is not None
    assert joined.flipped_reward is not None
    assert (joined.correct.tolist(), joined.positions) == ([False, False, False, True], (9, 4))
    assert joined.flipped_reward.tolist() == [1.0, 1.0, 1.0, 0.0]
    without = replace(rollout, correct=None, flipped_reward=None)
    assert join_groups(split_groups(without, [0, 1, 2]), without, {}).correct is None


def test_flips_do_not_depend_on_the_number_of_ranks_nor_on_a_prompt_that_comes_twice() -> None:
    shaping = Objective.from_recipe("grpo", label_noise=0.4).shaping
    prompts = [Prompt("same", "", (1,)) for _ in range(20)]
    whole = replace(tiny.rollout([0.0] * 80, [1] * 80, 4), prompts=prompts)
    flips = shaping.flips(make_experience(whole, "cpu"), 3)
    for ranks in (2, 4):
        size = 20 // ranks
        parts = []
        for rank in range(ranks):
            part = tiny.rollout([0.0] * 4 * size, [1] * 4 * size, 4, positions=tuple(range(rank * size, 20)[:size]))
            parts.append(shaping.flips(make_experience(replace(part, prompts=prompts[:size]), "cpu"), 3))
        assert torch.equal(torch.cat(parts), flips)
    assert not torch.equal(flips[:4], flips[4:8]) or not torch.equal(flips[:4], flips[8:12])


class Form(Reward):
    """One half where the first id is odd; it does not say what is right."""

    correct_threshold = None
    range = (0.0, 0.5)

    def score(self, batch: Any) -> list[Score]:
        return [Score(0.5 * ((item.completion.token_ids or (0,))[0] % 2)) for item in batch]


class Endless(tiny.EvenReward):
    range = (0.0, float("inf"))


class Bounded(tiny.EvenReward):
    range = (0.0, 1.0)


@pytest.mark.parametrize(
    ("objective", "keys"),
    [
        ({"recipe": "psr"}, "advantage, keep_sign"),
        ({"recipe": "imle"}, "advantage"),
        ({"recipe": "vapo"}, "nll_coef"),
        ({"recipe": "dapo"}, "uniform_by"),
        ({"recipe": "grpo", "label_noise": 0.1}, "label_noise"),
    ],
)
def test_an_objective_that_asks_what_is_right_needs_a_reward_that_says_it(objective: Any, keys: str) -> None:
    module = tiny.module(objective=ObjectiveConfig(**objective))
    with pytest.raises(UserError) as error:
        tiny.trainer().fit(module, datamodule=tiny.data(rewards=[Form()]))
    assert f"(by {keys})" in str(error.value) or set(keys.split(", ")) <= set(
        str(error.value).replace(")", ",").split()
    )
    assert error.value.where == "data.rewards"
    assert "correct_threshold" in str(error.value)
    assert module.policy is None, "before a model is loaded"


@pytest.mark.parametrize(
    ("reward", "said"), [(Endless(), "does not state its range"), (Bounded(weight=0.0), "adds nothing to the total")]
)
def test_label_noise_needs_an_opposite_value(reward: Reward, said: str) -> None:
    module = tiny.module(objective=ObjectiveConfig(label_noise=0.25))
    with pytest.raises(UserError, match=said) as error:
        tiny.trainer().fit(module, datamodule=tiny.data(rewards=[reward, Form()]))
    assert error.value.where == "model.objective.label_noise"


def test_a_change_in_mid_run_to_an_objective_that_asks_is_refused_too() -> None:
    module = tiny.module()
    module.connect(tiny.context(3, primary_range=None))
    with pytest.raises(UserError, match="no reward says it"):
        module.change_objective({"recipe": "psr"})
    assert module.objective.recipe == "grpo"


def test_a_rollout_without_verdicts_is_refused_where_they_are_asked_for() -> None:
    module = tiny.module(objective=ObjectiveConfig(recipe="psr"))

    class Loader:
        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Any:
            yield tiny.rollout([1.0, 0.0] * 4, [2] * 8, 4, correct=None)

    with pytest.raises(RuntimeError, match=r"Rollout.correct is None"):
        tiny.trainer().fit(module, Loader())


class Seen(tiny.pl.Callback):
    def __init__(self) -> None:
        self.batches: list[Rollout] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Rollout, batch_idx: int) -> None:
        self.batches.append(batch)
        self.metrics.append(dict(pl_module.step_metrics))


def fit(objective: ObjectiveConfig, rewards: list[Reward], **changes: Any) -> Seen:
    seen = Seen()
    tiny.trainer(callbacks=[seen]).fit(
        tiny.module(objective=objective), datamodule=tiny.data(rewards=rewards, **changes)
    )
    return seen


def test_a_run_of_dapo_trains_on_groups_with_right_and_wrong_answers() -> None:
    dapo = ObjectiveConfig(recipe="dapo", overlong_penalty=False)
    for batch in fit(dapo, [Form(), tiny.EvenReward()], group_size=2).batches:
        assert batch.correct is not None
        assert (batch.correct.view(-1, 2).sum(1) == 1).all()
    by_reward = replace(dapo, uniform_by="reward")
    mixed = fit(by_reward, [Form(weight=3.0), tiny.EvenReward()], group_size=2).batches
    for batch in mixed:
        assert (batch.reward.view(-1, 2)[:, 0] != batch.reward.view(-1, 2)[:, 1]).all()
    assert any((b.correct.view(-1, 2).sum(1) != 1).any() for b in mixed)  # type: ignore[union-attr]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_run_logs_what_its_judging_reward_said(updates: int) -> None:
    module = tiny.module(
        objective=ObjectiveConfig(label_noise=0.3), updates_per_rollout=updates, minibatch_prompts=4 // updates
    )
    seen = Seen()
    data = tiny.data(rewards=[Form(weight=10.0), Bounded()])
    tiny.trainer(callbacks=[seen]).fit(module, datamodule=data)
    for batch, metrics in zip(seen.batches, seen.metrics, strict=True):
        right = [sum(c.token_ids) % 2 == 0 for c in batch.completions]
        groups = [right[i : i + 4] for i in range(0, 16, 4)]
        # As said, before label noise: what is logged of a rollout is what was sampled.
        assert metrics["groups/all_correct_frac"] == sum(all(g) for g in groups) / 4
        assert metrics["groups/all_wrong_frac"] == sum(not any(g) for g in groups) / 4
        lengths = [len(c.token_ids) for c, r in zip(batch.completions, right, strict=True) if r]
        assert metrics["completions/correct_length"] == pytest.approx(sum(lengths) / len(lengths))
