"""Each sabotage really does what it says: one cheap look at what comes out of the wrapped part."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.data.sources.two_form_addition import ANSWER
from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.learner.batch import make_experience
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.policy.forward.batching import pad_rows
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.policy.model.load import load_model
from lit_grpo.rewards import ExactMatch
from lit_grpo.types import Completion, Prompt, Request, RewardInput, Sampling
from scripts.diagnosis import sabotage as sab
from tests import tiny

PROMPT = Prompt("p", "27+15=", (1, 2), "42")


def item(text: str, sample: int = 0) -> RewardInput:
    return RewardInput(PROMPT, Completion(0, sample, tuple(range(len(text))), (0.0,) * len(text), "stop", 3), text)


def scores(sabotage: sab.Sabotage, texts: list[str]) -> list[list[Any]]:
    rewards = sabotage.rewards([ExactMatch(pattern=ANSWER)], seed=0)
    batch = [item(text, sample) for sample, text in enumerate(texts)]
    return [[score[0] if isinstance(score, tuple) else score for score in reward.score(batch)] for reward in rewards]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(load_model(PolicyConfig(tiny=TinyModel(width=32, heads=2))))


def engine(policy: Policy) -> TransformersEngine:
    return TransformersEngine(policy.model, [12])


def sample(engine: Any, temperature: float = 1.0) -> list[Completion]:
    requests = [Request(0, (1, 2, 3), tuple(range(20)))]
    return sorted(engine.generate(requests, Sampling(temperature, 6)), key=lambda c: c.sample)


def test_a_quarter_of_the_labels_is_flipped():
    (noisy,) = scores(sab.RewardNoise(0.25), [":42"] * 400)
    assert 0.2 < 1 - sum(noisy) / 400 < 0.3
    (noisy,) = scores(sab.RewardNoise(0.25), [":41"] * 400)
    assert 0.2 < sum(noisy) / 400 < 0.3


def test_coins_do_not_know_what_is_right():
    (right,), (wrong,) = (scores(sab.RewardNoise(1.0, coin=True), [text] * 400) for text in (":42", ":41"))
    assert right == wrong
    assert 0.4 < sum(right) / 400 < 0.6


def test_the_hackable_format_pays_for_wrong_short_answers():
    exact, form = scores(sab.HackableFormat(1.0), [":41", "7+5=12c1:42"])
    assert exact == [0.0, 1.0]
    assert form == [1.0, 0.0]


def test_length_is_paid():
    ((short, long),) = scores(sab.PaidLength(0.25), [":41", ":41" * 4])
    assert long - short == pytest.approx(0.25 * 9)


def test_stale_weights_lag_and_say_that_they_do_not(policy):
    stale = sab.StaleWeights(2).engine(engine(policy))
    for version in (0, 1):
        with torch.no_grad():
            for weight in policy.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(version)))
        stale.sync(policy.named_weights(), version)
        fresh = engine(policy)
        fresh.sync(policy.named_weights(), version)
        assert stale.policy_version == version
        same = [c.logprobs for c in sample(stale)] == [c.logprobs for c in sample(fresh)]
        assert same == (version == 0)


def test_the_engine_is_hotter_than_asked(policy):
    hot = sab.OneSidedTemperature(1.5).engine(engine(policy))
    assert sample(hot) == sample(engine(policy), 1.5) != sample(engine(policy))


def test_eos_has_no_loss_but_truncated_completions_keep_their_end():
    rollout = tiny.rollout([1.0, 0.0], [3, 5], 2)
    second = rollout.completions[1]
    rollout.completions[1] = Completion(0, 1, second.token_ids, second.logprobs, "length", 0)
    experience = sab.DroppedEos().change(rollout, make_experience(rollout, "cpu"))
    assert experience.lengths.tolist() == [2, 5]


def test_groups_are_mixed_and_the_module_is_as_before_afterwards():
    from lit_grpo import module

    rollout = tiny.rollout([1.0, 0.0] * 8, [3] * 16, 4)
    before = module.make_experience
    with sab.ShuffledGroups().around_fit():
        changed = module.make_experience(rollout, "cpu").group_ids.tolist()
    plain = make_experience(rollout, "cpu").group_ids.tolist()
    assert changed != plain
    assert sorted(changed) == sorted(plain)
    assert module.make_experience is before


def test_logprobs_are_those_of_the_next_position(policy):
    batch = pad_rows([(1, 2)], [(3, 4, 5)], width=3)
    right = policy(batch).logprobs
    states = policy.model(input_ids=batch.input_ids).logits.log_softmax(-1).detach()
    holder = SimpleNamespace(policy=SimpleNamespace(forward=policy.forward))
    (callback,) = sab.ShiftedLogprobs().callbacks(0)
    callback.on_train_start(None, holder)  # type: ignore[arg-type]
    shifted = holder.policy.forward(batch).logprobs.detach()
    assert not torch.allclose(shifted, right)
    # Position 2 holds token 3 itself, and is asked for the probability of token 3.
    assert float(shifted[0, 0]) == pytest.approx(float(states[0, 2, 3]), abs=1e-5)


def test_values_are_noise():
    batch = pad_rows([(1, 2)] * 4, [(3, 4, 5)] * 3 + [(3,)], width=3)
    holder = SimpleNamespace(critic=SimpleNamespace(forward=lambda b: b.scatter(torch.full((len(b.target),), 0.5))))
    (callback,) = sab.BadValues(3.0).callbacks(0)
    callback.on_train_start(None, holder)  # type: ignore[arg-type]
    values = holder.critic.forward(batch)
    assert float(values[:3].std()) > 1
    assert values[3, 1:].tolist() == [0.0, 0.0]


def test_the_gradient_is_nan_for_its_rollouts_alone(policy):
    (callback,) = sab.InjectedNan(start=1, count=1).callbacks(0)
    module: Any = SimpleNamespace(policy=policy)
    callback.on_train_start(None, module)  # type: ignore[arg-type]
    seen = []
    for index in range(3):
        rollout = tiny.rollout([1.0, 0.0], [3, 5], 2, index=index)
        callback.on_train_batch_start(None, module, rollout, index)  # type: ignore[arg-type]
        policy.zero_grad()
        policy(pad_rows([(1, 2)], [(3, 4)], width=2)).logprobs.sum().backward()
        gradient = next(policy.parameters()).grad
        assert gradient is not None
        seen.append(math.isnan(float(gradient.sum())))
    assert seen == [False, True, False]
