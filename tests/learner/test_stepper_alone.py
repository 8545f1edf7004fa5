"""Optimizer steps and forward passes without a LightningModule and without a Trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lit_grpo.errors import StopRun
from lit_grpo.learner import batch as batches
from lit_grpo.learner.batch import make_experience
from lit_grpo.learner.engine_agreement import GuardConfig
from lit_grpo.learner.forward import ForwardResults, ForwardRunner
from lit_grpo.learner.metric_sums import StepMetrics
from lit_grpo.learner.optimizer_step import OptimizerBundle, OptimizerStepper, StepCounters, make_steps
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import OptimizerConfig, PolicyConfig
from lit_grpo.policy.forward.batching import Layout
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.policy.model.load import load_model
from lit_grpo.policy.optimizer.build import make_optimizer
from tests import tiny
from tests.learner.helpers import fit, rollout, vector

CONFIG = PolicyConfig(tiny=tiny.TINY)
RATE = OptimizerConfig(lr=1e-2)


def stepper(**changes: Any) -> OptimizerStepper:
    layout = Layout(CONFIG.pack, CONFIG.share_prompts)
    policy = Policy(load_model(CONFIG), CONFIG.logits_chunk)
    forward = ForwardRunner(
        policy=policy,
        micro_batches=partial(batches.micro_batches, layout=layout, tokens=4096, size=8),
        inputs=partial(batches.policy_input, layout=layout, device="cpu"),
    )
    optimizer, scheduler = make_optimizer(policy.model, RATE, 1)
    settings: dict[str, Any] = {
        "forward": forward,
        "bundles": [OptimizerBundle("optim/", optimizer, scheduler, 1.0)],
        "counters": StepCounters(),
        "guards": GuardConfig(),
        "zero_advantage_samples": 8,
    }
    return OptimizerStepper(**(settings | changes))


def weights(given: OptimizerStepper) -> torch.Tensor:
    return vector(given.forward.policy)


def take(given: OptimizerStepper, batch: Any) -> dict[str, float]:
    """One rollout, one update; its metrics."""
    objective, experience, metrics = ObjectiveConfig().resolve(), make_experience(batch, "cpu"), StepMetrics()
    advantages, state = objective.advantages(experience, objective.new_state())
    rows = [torch.arange(len(batch.completions))]
    for step in make_steps(rows, objective, state, experience, advantages, ForwardResults(), warmup=False):
        given.step(batch, step, metrics)
    return metrics.compute()


def test_a_step_is_that_of_the_module():
    alone = stepper()
    metrics = take(alone, rollout())
    module, watch = fit(batches=[rollout()], optimizer=RATE)
    assert torch.equal(weights(alone), vector(module.policy))
    assert metrics["loss"] == watch.metrics[0]["loss"]
    assert metrics["optim/grad_norm"] == watch.metrics[0]["optim/grad_norm"]
    assert alone.counters == StepCounters(optimizer_steps=1)


def test_a_veto_leaves_the_weights_alone_and_a_row_of_them_ends_the_run():
    asked: list[dict[str, float]] = []

    def veto(logged: dict[str, float]) -> str:
        asked.append(logged)
        return "no"

    given = stepper(veto=veto, max_skipped_steps=2)
    before = weights(given)
    with pytest.warns(UserWarning, match="was skipped"):
        take(given, rollout())
    assert torch.equal(weights(given), before)
    assert given.counters == StepCounters(skipped_steps=1, skipped_in_a_row=1)
    assert set(asked[0]) == {"loss", "optim/grad_norm"}
    with pytest.raises(StopRun, match="2 optimizer steps in a row were skipped: no"):
        take(given, rollout())


def test_a_limit_clips_the_gradient_of_one_step_and_takes_it():
    asked: list[dict[str, float]] = []

    def limit(logged: dict[str, float]) -> dict[str, float]:
        asked.append(logged)
        return {"optim/grad_norm": 0.01}

    class Norms(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            gradients = [p.grad.flatten() for group in self.param_groups for p in group["params"] if p.grad is not None]
            seen.append(float(torch.cat(gradients).norm()))
            super().step(closure)

    seen: list[float] = []
    given = stepper(limit=limit)
    optimizer = Norms(given.forward.policy.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    given = stepper(limit=limit, forward=given.forward, bundles=[OptimizerBundle("optim/", optimizer, schedule, 1.0)])
    before = weights(given)
    metrics = take(given, rollout())
    assert seen == [pytest.approx(0.01, rel=1e-4)]
    assert float((weights(given) - before).norm()) == pytest.approx(0.01, rel=1e-3)
    assert metrics["optim/grad_norm"] == asked[0]["optim/grad_norm"] > 0.01, "the norm that is logged is the true one"
    assert given.counters == StepCounters(optimizer_steps=1, clipped_steps=1)


def test_a_limit_above_the_usual_clipping_changes_nothing():
    plain, limited = stepper(), stepper(limit=lambda _: {"optim/grad_norm": 1e9, "critic/grad_norm": 1e-9})
    take(plain, rollout())
    take(limited, rollout())
    assert torch.equal(weights(plain), weights(limited))


def test_a_step_that_is_not_finite_is_left_out_and_asks_for_no_limit():
    given = stepper(limit=lambda _: pytest.fail("asked"), backward=lambda loss: (loss * float("nan")).backward())
    before = weights(given)
    with pytest.warns(UserWarning, match="not finite"):
        take(given, rollout())
    assert torch.equal(weights(given), before)
    assert given.counters == StepCounters(skipped_steps=1, skipped_in_a_row=1)


def test_a_step_without_anything_to_learn_is_empty():
    given = stepper()
    before = weights(given)
    metrics = take(given, rollout(rewards=[1.0] * 8))
    assert torch.equal(weights(given), before)
    assert given.counters == StepCounters(empty_steps=1)
    assert metrics["loss"] == 0.0


def test_the_forward_before_an_update_makes_a_new_experience():
    forward = stepper().forward
    batch = rollout()
    experience = make_experience(batch, "cpu")
    results = forward.old_forward(batch, experience, frozenset({"old_logprobs", "entropy"}))
    added = results.added_to(experience)
    assert experience.old_logprobs is None
    assert added.old_logprobs is not None
    assert added.entropy is not None
    assert added.values is None
    with pytest.raises(ValueError, match="no pass computes nonsense"):
        forward.old_forward(batch, experience, frozenset({"nonsense"}))
    with pytest.raises(RuntimeError, match="none was made"):
        forward.old_forward(batch, experience, frozenset({"ref_logprobs"}))


def test_the_name_of_a_metric_moves_no_rounding():
    # The seed of stochastic rounding is drawn from this name: a run goes on to the same bits under other metric keys.
    policy, critic = (
        stepper().bundles[0],
        OptimizerBundle("critic/", *make_optimizer(torch.nn.Linear(1, 1), RATE, 1), 1.0),
    )
    assert (policy.seed_name, critic.seed_name) == ("", "critic/")
