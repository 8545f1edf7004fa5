"""KL to a reference: frozen at the policy before training, or refreshed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import OptimizerConfig, ReferenceConfig
from tests import tiny
from tests.learner.helpers import fit, rollout, vector

KL = ObjectiveConfig(kl_coef=0.1)


def initial_weights() -> torch.Tensor:
    module = tiny.module()
    module.configure_model()
    return tiny.weights(module)


def test_a_frozen_reference_is_the_policy_before_training():
    module, watch = fit(3, objective=KL)
    assert watch.metrics[0]["policy/kl_ref_k3"] == 0.0
    assert 0 < watch.metrics[1]["policy/kl_ref_k3"] < watch.metrics[2]["policy/kl_ref_k3"]
    reference = module.reference_policy
    assert module.reference is None
    assert torch.equal(vector(reference), initial_weights())
    assert not torch.equal(watch.policy[-1], initial_weights())
    assert not any("reference" in name for name in module.state_dict()), "checkpoints must not grow"


def test_no_reference_is_made_for_an_objective_without_kl():
    module, _ = fit(1, reference=ReferenceConfig(refresh_every=1))
    assert module.reference is None
    assert module.reference_policy is None


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_kl_pulls_the_policy_back(where):
    """Without any reward the policy moves to the reference, if it has moved away."""
    rates = OptimizerConfig(lr=3e-3)
    free, free_watch = fit(2, optimizer=rates, updates_per_rollout=2)
    held, _ = fit(2, optimizer=rates, updates_per_rollout=2, objective=ObjectiveConfig(kl_coef=5.0, kl_placement=where))
    start = initial_weights()
    assert (tiny.weights(held) - start).norm() != (tiny.weights(free) - start).norm()
    assert "policy/kl_ref_k3" not in free_watch.metrics[-1]
    batch = rollout(seed=0)
    rows = torch.arange(8)
    with torch.no_grad():
        base = held.reference_policy(held.policy_inputs(batch, rows), 1.0, "none").logprobs
        gaps = [
            float((m.policy(m.policy_inputs(batch, rows), 1.0, "none").logprobs - base).square().sum())
            for m in (free, held)
        ]
    assert gaps[1] < gaps[0]


class Keep(tiny.pl.Callback):
    """The reference during each rollout."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.policy: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        self.seen.append(vector(pl_module.reference_policy))
        self.policy.append(tiny.weights(pl_module))


def run(path: Any, rollouts: int, refresh: int | None, resume: bool = False) -> tuple[Any, Any, Any]:
    recorder, keep = tiny.Recorder(), Keep()
    module = tiny.module(objective=KL, reference=ReferenceConfig(refresh_every=refresh))
    checkpoint = RolloutCheckpoint(dirpath=str(path))
    trainer = tiny.trainer(callbacks=[recorder, keep, checkpoint], enable_checkpointing=True)
    trainer.fit(module, datamodule=tiny.data(rollouts=rollouts), ckpt_path=path / "last.ckpt" if resume else None)
    return module, recorder, keep


@pytest.mark.parametrize("refresh", [2, None])
def test_resume_keeps_the_reference_to_the_bit(tmp_path, refresh):
    straight, expected, kept = run(tmp_path / "straight", 4, refresh)
    start = initial_weights()
    if refresh is None:
        assert all(torch.equal(seen, start) for seen in kept.seen)
    else:
        assert [torch.equal(seen, start) for seen in kept.seen] == [True, True, False, False]
        assert torch.equal(kept.seen[3], kept.policy[2]), "after rollouts 0 and 1 the reference became the policy"
        assert expected.metrics[2]["policy/kl_ref_k3"] == 0.0 < expected.metrics[3]["policy/kl_ref_k3"]
    run(tmp_path / "cut", 3, refresh)
    resumed, found, kept_again = run(tmp_path / "cut", 4, refresh, resume=True)
    assert torch.equal(kept_again.seen[0], kept.seen[3])
    assert found.metrics == expected.metrics[3:]
    assert torch.equal(tiny.weights(resumed), tiny.weights(straight))


def test_a_reference_cannot_be_refreshed_every_0_rollouts():
    with pytest.raises(UserError, match="refresh_every is 0"):
        tiny.module(reference=ReferenceConfig(refresh_every=0))
