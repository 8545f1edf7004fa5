"""One rollout, one update: the gradient is that of the formula, however the rollout is cut up."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lit_grpo.errors import StopRun, UserError
from lit_grpo.learner.optimizer_step import count_non_finite
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import OptimizerConfig, PolicyConfig
from tests import tiny

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
LENGTHS = [3, 1, 5, 2, 4, 4, 1, 6]


class OneRollout:
    """A sized loader of given rollouts, without any engine."""

    def __init__(self, *rollouts: Any) -> None:
        self.rollouts = rollouts

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Any:
        return iter(self.rollouts)


def gradients(module: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in module.policy.parameters()])


def gradient(batch: Any, **changes: Any) -> torch.Tensor:
    """Gradient of the first optimizer step, before clipping."""
    found: list[torch.Tensor] = []
    module = tiny.module(max_grad_norm=None, **changes)

    def capture(optimizer: Any) -> None:
        found.append(gradients(module))

    module.on_before_optimizer_step = capture  # type: ignore[method-assign]
    torch.manual_seed(0)
    tiny.trainer().fit(module, OneRollout(batch))
    return found[0]


def by_hand(batch: Any) -> torch.Tensor:
    """GRPO with one update, as in the paper: sum_i A_i mean_t log pi, by single forward passes (2402.03300, eq. 3)."""
    module = tiny.module()
    module.configure_model()
    assert module.policy is not None
    model = module.policy.model
    loss = torch.zeros(())
    reward = batch.reward.double()
    for i, completion in enumerate(batch.completions):
        g = i // batch.group_size
        group = reward[g * batch.group_size : (g + 1) * batch.group_size]
        advantage = float((reward[i] - group.mean()) / (group.std() + 1e-6)) if group.std() > 0 else 0.0
        prompt = batch.prompts[g].token_ids
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logp = model(input_ids=ids, use_cache=False).logits[0].log_softmax(1)
        picked = [logp[len(prompt) - 1 + t, token] for t, token in enumerate(completion.token_ids)]
        if picked:
            loss = loss - advantage * torch.stack(picked).mean()
    counted = sum(1 for c in batch.completions if c.token_ids)
    (loss / counted).backward()
    return gradients(module)


def test_gradient_is_that_of_the_formula():
    batch = tiny.rollout(REWARDS, LENGTHS, 4)
    torch.testing.assert_close(gradient(batch), by_hand(batch), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_gradient_does_not_depend_on_the_split_into_micro_batches(size, share):
    batch = tiny.rollout(REWARDS, LENGTHS, 4)
    policy = PolicyConfig(tiny=tiny.TINY, share_prompts=share)
    expected = gradient(batch, micro_batch_size=100, objective=ObjectiveConfig(entropy_coef=0.1))
    actual = gradient(batch, micro_batch_size=size, objective=ObjectiveConfig(entropy_coef=0.1), policy=policy)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 6)), min_size=8, max_size=8),
    st.sampled_from([1, 3, 5]),
    st.sampled_from(["grpo", "dapo", "gspo", "cispo"]),
)
def test_gradient_does_not_depend_on_the_split_for_random_rollouts(rows, size, recipe):
    rewards = [r for r, _ in rows]
    batch = tiny.rollout([1.0, 0.0, *rewards[2:]], [2, 3, *(n for _, n in rows[2:])], 4)
    objective = ObjectiveConfig(recipe=recipe, overlong_penalty=False if recipe == "dapo" else None)
    expected = gradient(batch, micro_batch_size=100, objective=objective)
    torch.testing.assert_close(
        gradient(batch, micro_batch_size=size, objective=objective), expected, rtol=2e-4, atol=1e-6
    )


def test_pad_equal_to_eos_and_padding_ids_change_nothing():
    """The mask is made from lengths: a completion that holds the padding id keeps it in the loss."""
    batch = tiny.rollout(REWARDS, LENGTHS, 4)
    ends = tiny.rollout(REWARDS, LENGTHS, 4)
    for row in ends.completions:  # every completion ends in id 0, the id that pads
        object.__setattr__(row, "token_ids", (*row.token_ids[:-1], 0))
    torch.testing.assert_close(gradient(ends), by_hand(ends), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(gradient(ends), gradient(batch))


def fit(batch: Any, **changes: Any) -> tuple[Any, dict[str, float], torch.Tensor, torch.Tensor]:
    module = tiny.module(**changes)
    module.configure_model()
    before = tiny.weights(module)
    recorder = tiny.Recorder()
    tiny.trainer(callbacks=[recorder]).fit(module, OneRollout(batch))
    return module, recorder.metrics[-1], before, tiny.weights(module)


def test_nothing_left_means_no_step():
    module, metrics, before, after = fit(
        tiny.rollout([1.0] * 8, LENGTHS, 4), optimizer=OptimizerConfig(lr=0.1, weight_decay=0.1)
    )
    assert torch.equal(before, after)
    assert (module.empty_steps, module.optimizer_steps, module.policy_version) == (1, 0, 1)
    assert metrics["groups/zero_std_frac"] == 1.0
    assert metrics["groups/all_correct_frac"] == 1.0
    assert metrics["policy/entropy"] > 1.0, "what monitors watch is measured all the same"
    assert metrics["optim/grad_norm"] == metrics["loss"] == 0.0


def test_a_key_that_a_rollout_has_no_value_for_is_not_logged_with_an_old_one():
    some, none = tiny.rollout(REWARDS, LENGTHS, 4), tiny.rollout([0.0] * 8, LENGTHS, 4)
    for c in none.completions:
        object.__setattr__(c, "policy_version", 1)
    module, trainer = tiny.module(), tiny.trainer()
    trainer.fit(module, OneRollout(some, none))
    assert "completions/correct_length" not in module.step_metrics
    assert math.isnan(trainer.callback_metrics["completions/correct_length"])


@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_a_step_that_is_not_finite_changes_nothing(where):
    batch, good = tiny.rollout(REWARDS, LENGTHS, 4), tiny.rollout(REWARDS, LENGTHS, 4, seed=1)
    module = tiny.module(optimizer=OptimizerConfig(lr=0.1, warmup_steps=10))
    seen: list[Any] = []

    class Poison(tiny.pl.Callback):
        handle: Any = None

        def snapshot(self, trainer: Any) -> Any:
            optimizer = trainer.optimizers[0]
            state = [v.clone() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
            return tiny.weights(module), state, trainer.lr_scheduler_configs[0].scheduler.last_epoch

        def on_train_batch_start(self, trainer: Any, pl_module: Any, rollout: Any, index: int) -> None:
            if index == 1:
                seen.append(self.snapshot(trainer))
                if where == "gradient":
                    weight = next(pl_module.policy.parameters())
                    self.handle = weight.register_hook(lambda g: g * float("nan"))
                else:
                    rollout.reward[0] = float("inf")

        def on_train_batch_end(self, trainer: Any, pl_module: Any, out: Any, rollout: Any, index: int) -> None:
            if index == 1:
                seen.append(self.snapshot(trainer))
                if self.handle:
                    self.handle.remove()

    late = tiny.rollout(REWARDS, LENGTHS, 4, seed=2)
    for version, item in enumerate((good, batch, late)):
        for c in item.completions:
            object.__setattr__(c, "policy_version", version)
    recorder = tiny.Recorder()
    tiny.trainer(callbacks=[Poison(), recorder]).fit(module, OneRollout(good, batch, late))
    (weights_before, state_before, rate_before), (weights_after, state_after, rate_after) = seen
    assert torch.equal(weights_before, weights_after)
    assert all(torch.equal(a, b) for a, b in zip(state_before, state_after, strict=True))
    assert rate_before == rate_after
    assert module.skipped_steps == 1
    assert recorder.metrics[1]["optim/skipped_steps"] == 1.0
    assert module.optimizer_steps == 2, "the rollout after it trains again"
    assert torch.isfinite(tiny.weights(module)).all()


def test_many_skipped_steps_in_a_row_stop_the_run():
    batches = [tiny.rollout(REWARDS, LENGTHS, 4) for _ in range(5)]
    for version, item in enumerate(batches):
        item.reward[0] = float("inf")
        for c in item.completions:
            object.__setattr__(c, "policy_version", version)
    with pytest.raises(StopRun, match="3 optimizer steps in a row"):
        tiny.trainer().fit(tiny.module(max_skipped_steps=3), OneRollout(*batches))


OF_OLD_POLICY = {
    f"policy/{name}"
    for name in ("ratio_mean", "ratio_gap", "approx_kl_k1", "approx_kl_k3", "delta_prob", "delta_prob_abs")
}


def test_the_ratio_moves_with_the_updates_and_is_not_logged_where_there_is_one():
    batch = tiny.rollout(REWARDS, LENGTHS, 4)
    _, one, _, _ = fit(batch)
    assert not OF_OLD_POLICY & one.keys(), "nothing was compared with anything"
    module, many, _, _ = fit(batch, updates_per_rollout=3)
    assert module.optimizer_steps == 3
    assert many["policy/ratio_gap"] > 1e-4


def test_minibatches_use_each_group_equally_often_and_whole():
    batch = tiny.rollout(REWARDS * 2, LENGTHS * 2, 4)
    module = tiny.module(updates_per_rollout=4, minibatch_prompts=2)
    steps = [rows.tolist() for rows in module.minibatches(batch)]
    assert len(steps) == 4
    assert all(len(rows) == 8 for rows in steps)
    assert sorted(i for rows in steps for i in rows) == sorted([*range(16), *range(16)])
    assert all([i // 4 for i in rows][::4] == sorted({i // 4 for i in rows}) for rows in steps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"minibatch_prompts": 3}, "cannot be divided"),
        ({"minibatch_prompts": 2, "updates_per_rollout": 3}, "multiple of 2"),
    ],
)
def test_updates_that_do_not_fit_are_refused_before_the_model_is_made(settings, message):
    module = tiny.module(**settings)
    with pytest.raises(UserError, match=message):
        tiny.trainer().fit(module, datamodule=tiny.data())
    assert module.policy is None


def test_tensors_with_values_that_are_not_finite_are_counted_and_large_ones_are_not():
    fine = [torch.ones(3, 4), torch.zeros(0), torch.tensor([1, 2])]
    assert count_non_finite(fine) == 0
    # Their squares overflow, and they are finite.
    assert count_non_finite([*fine, torch.full((4,), 3e38), torch.full((4,), 3e38, dtype=torch.bfloat16)]) == 0
    bad = [torch.tensor([1.0, value]) for value in (math.inf, -math.inf, math.nan)]
    assert count_non_finite([*fine, *bad, torch.full((4,), 3e38)]) == 3
