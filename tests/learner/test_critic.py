"""The critic: values, two optimizers under one backward pass, warm-up, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, OptimizerConfig, PolicyConfig
from lit_grpo.policy.critic import make_critic
from tests import tiny
from tests.learner.helpers import fit, rollout, vector

PPO, VAPO = ObjectiveConfig(recipe="ppo"), ObjectiveConfig(recipe="vapo")


def moved_critic(share: bool, **changes: Any) -> Any:
    """A module whose critic has left its flat start."""
    policy = PolicyConfig(tiny=tiny.TINY, share_prompts=share)
    module = tiny.module(objective=PPO, policy=policy, critic=CriticConfig(**changes))
    module.configure_model()
    assert module.critic is not None
    torch.manual_seed(0)
    for parameter in module.critic.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("share", [True, False])
def test_values_are_those_of_the_state_before_each_token(share):
    batch = rollout(lengths=[3, 0, 5, 2, 4, 4, 1, 6])
    module = moved_critic(share)
    values = module.critic(module.policy_inputs(batch, torch.arange(8)))
    for i, completion in enumerate(batch.completions):
        prompt = batch.prompts[i // 4].token_ids
        for t in range(len(completion.token_ids)):
            ids = torch.tensor([[*prompt, *completion.token_ids[:t]]])
            state = module.critic.base(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
            assert float(values[i, t]) == pytest.approx(float(module.critic.head(state[None])), abs=1e-4)
        assert not values[i, len(completion.token_ids) :].any()


def test_a_bounded_critic_stays_in_the_range_of_the_reward():
    batch, rows = rollout(), torch.arange(8)
    free, bounded = moved_critic(True), moved_critic(True, bounded=True, value_low=-1.0, value_high=2.0)
    raw, values = free.critic(free.policy_inputs(batch, rows)), bounded.critic(bounded.policy_inputs(batch, rows))
    live = raw != 0
    torch.testing.assert_close(values[live], -1 + 3 * raw[live].sigmoid())
    assert make_critic(PolicyConfig(tiny=tiny.TINY), CriticConfig(bounded=True)).head.weight.abs().sum() == 0


@pytest.mark.parametrize("objective", [PPO, VAPO, ObjectiveConfig(recipe="trpo_penalty")])
def test_recipes_with_a_critic_get_one_and_train_both(objective):
    module, watch = fit(2, objective=objective, critic=CriticConfig(warmup_rollouts=0) if objective is VAPO else None)
    assert module.critic_config == CriticConfig(warmup_rollouts=0 if objective is VAPO else None)
    assert (module.optimizer_steps, module.critic_steps) == (2, 2)
    assert not torch.equal(watch.policy[0], watch.policy[1])
    assert not torch.equal(watch.critic[0], watch.critic[1])
    assert watch.metrics[0]["critic/value_correct"] == 0.0 != watch.metrics[1]["critic/value_correct"]
    assert {"critic/lr", "critic/grad_norm", "loss/value"} <= watch.metrics[1].keys()


def test_a_critic_that_nothing_uses_is_refused():
    with pytest.raises(UserError, match="uses no critic"):
        fit(1, critic=CriticConfig())


def test_the_critic_has_its_own_rate_schedule_and_clipping():
    critic = CriticConfig(optimizer=OptimizerConfig(lr=5e-3, warmup_steps=1), max_grad_norm=1e-12)
    _, watch = fit(1, objective=PPO, critic=critic, optimizer=OptimizerConfig(lr=1e-3))
    assert watch.metrics[0]["optim/lr"] == 1e-3
    assert watch.metrics[0]["critic/lr"] == 5e-3
    free, _ = fit(1, objective=PPO, optimizer=OptimizerConfig(lr=1e-3))
    held, _ = fit(1, objective=PPO, critic=critic, optimizer=OptimizerConfig(lr=1e-3))
    assert torch.equal(tiny.weights(free), tiny.weights(held)), "the critic's clipping is not the policy's"
    assert not torch.equal(vector(free.critic), vector(held.critic))


def test_warm_up_trains_the_critic_alone_on_returns():
    critic = CriticConfig(optimizer=OptimizerConfig(lr=1e-2), warmup_rollouts=6, measure_every=2)
    objective = ObjectiveConfig(recipe="ppo", gae_lambda=0.5, value_clip=0.0)
    same = [rollout(seed=0) for _ in range(7)]
    module, watch = fit(batches=same, objective=objective, critic=critic, updates_per_rollout=2)
    start = tiny.module()
    start.configure_model()
    assert all(torch.equal(w, tiny.weights(start)) for w in watch.policy[:6]), "the policy is untouched"
    assert not torch.equal(watch.policy[6], watch.policy[5])
    assert (module.optimizer_steps, module.critic_steps) == (2, 14)
    explained = [m["critic/explained_variance"] for m in watch.metrics]
    assert explained[5] > 0.25 > 0.0 == explained[0], explained
    # The same rollout again: what the critic says after one update is what it says before the next.
    after = [m.get("critic/explained_variance_after") for m in watch.metrics]
    assert after[1::2] == [None] * 3
    assert after[:6:2] == pytest.approx(explained[1:6:2])
    assert watch.metrics[4]["critic/value_correct_after"] == pytest.approx(watch.metrics[5]["critic/value_correct"])
    # Monte Carlo returns of a reward at the end are the reward, at every token and whatever the values say.
    token_mean = sum(r * n for r, n in zip([1.0, 0, 0, 1, 0, 0, 0, 1], [3, 1, 5, 2, 4, 4, 1, 6], strict=True)) / 26
    assert all(m["critic/return"] == pytest.approx(token_mean, abs=1e-5) for m in watch.metrics[:6])
    assert watch.metrics[6]["critic/return"] != pytest.approx(token_mean, abs=1e-5)


@pytest.mark.parametrize("broken", ["policy", "critic"])
def test_a_gradient_that_is_not_finite_skips_both(broken):
    class Poison(tiny.pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
            model = getattr(pl_module, broken)
            if index == 1:
                self.handle = next(model.parameters()).register_hook(lambda g: g * float("nan"))
            elif index == 2:
                self.handle.remove()

    module, watch = fit(3, objective=PPO, callbacks=[Poison()])
    assert module.skipped_steps == 1
    for weights in (watch.policy, watch.critic):
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[1], weights[2])
    assert (module.optimizer_steps, module.critic_steps) == (2, 2)


def test_resume_with_a_critic_equals_the_unbroken_run_to_the_bit(tmp_path):
    def run(folder: Any, rollouts: int, resume: bool = False) -> tuple[Any, Any, Any]:
        rates = OptimizerConfig(lr=1e-2, schedule="cosine", total_steps=8)
        module, recorder = tiny.module(objective=VAPO, critic=CriticConfig(warmup_rollouts=1), optimizer=rates), None
        recorder = tiny.Recorder()
        checkpoint = RolloutCheckpoint(dirpath=str(folder))
        trainer = tiny.trainer(callbacks=[recorder, checkpoint], enable_checkpointing=True)
        path = folder / "last.ckpt" if resume else None
        trainer.fit(module, datamodule=tiny.data(rollouts=rollouts), ckpt_path=path)
        return module, recorder, [o.state_dict()["state"] for o in trainer.optimizers]

    straight, expected, states = run(tmp_path / "a", 4)
    run(tmp_path / "b", 2)
    resumed, found, states_again = run(tmp_path / "b", 4, resume=True)
    assert found.metrics == expected.metrics[2:]
    assert torch.equal(tiny.weights(resumed), tiny.weights(straight))
    assert torch.equal(vector(resumed.critic), vector(straight.critic))
    assert len(states) == 2
    for a, b in zip(states, states_again, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(v, b[k][name]) for k, state in a.items() for name, v in state.items())
