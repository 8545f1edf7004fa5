"""The library against GRPO in one file: five steps on the same samples, the same losses and the same weights."""

from __future__ import annotations

import copy
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import OptimizerConfig, PolicyConfig
from lit_grpo.types import Completion, Prompt, Rollout
from tests import tiny
from tests.paths import ROOT

STEPS, GROUPS, GROUP_SIZE = 5, 3, 4
LR = 1e-3


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    path = ROOT / "docs/reference_grpo.py"
    spec = importlib.util.spec_from_file_location("reference_grpo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def make_rollouts() -> list[Rollout]:
    """Random ids, prompts and completions of many lengths, and rewards in which one group of three is uniform."""
    generator = torch.Generator().manual_seed(4)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 12, (count,), generator=generator).tolist())

    rollouts = []
    for step in range(STEPS):
        lengths = torch.randint(1, 7, (GROUPS * GROUP_SIZE,), generator=generator).tolist()
        rewards = torch.randint(0, 2, (GROUPS * GROUP_SIZE,), generator=generator).float()
        rewards[:2] = torch.tensor([0.0, 1.0])
        rewards[GROUP_SIZE : 2 * GROUP_SIZE] = float(step % 2)
        completions = [
            Completion(i // GROUP_SIZE, i % GROUP_SIZE, ids(n), (float("nan"),) * n, "stop", step)
            for i, n in enumerate(lengths)
        ]
        prompts = [Prompt(f"p{g}", "", ids(2 + g), None) for g in range(GROUPS)]
        texts = [""] * len(completions)
        rollouts.append(
            Rollout(step, prompts, completions, texts, {"r": rewards}, rewards, GROUP_SIZE, correct=rewards > 0)
        )
    return rollouts


class Given:
    """A sized loader of given rollouts."""

    def __init__(self, rollouts: list[Rollout]) -> None:
        self.rollouts = rollouts

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Any:
        return iter(self.rollouts)


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_five_steps_of_the_library_are_those_of_the_single_file(reference, kl_coef, updates):
    rollouts = make_rollouts()
    # Small micro-batches and shared prompts on our side: neither may show.
    module = tiny.module(
        policy=PolicyConfig(tiny=tiny.TINY, share_prompts=True),
        objective=ObjectiveConfig(recipe="grpo", kl_coef=kl_coef or None),
        optimizer=OptimizerConfig(lr=LR, betas=(0.9, 0.999)),
        micro_batch_size=5,
        updates_per_rollout=updates,
    )
    module.configure_model()
    assert module.policy is not None
    model = copy.deepcopy(module.policy.model)
    frozen = copy.deepcopy(model) if kl_coef else None
    start = flat(model)
    recorder = tiny.Recorder()
    tiny.trainer(callbacks=[recorder]).fit(module, Given(rollouts))

    settings = reference.Settings(group_size=GROUP_SIZE, updates=updates, kl_coef=kl_coef, lr=LR)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    losses = []
    for rollout in rollouts:
        samples = [
            reference.Sample(list(rollout.prompts[c.request].token_ids), list(c.token_ids), float(reward))
            for c, reward in zip(rollout.completions, rollout.reward, strict=True)
        ]
        losses.append(reference.train_on(model, optimizer, samples, settings, frozen))

    assert module.optimizer_steps == STEPS * updates
    ours = [m["loss"] for m in recorder.metrics]
    # Adam divides by the root of the second moment, so rounding of tiny gradients shows up to a share of lr.
    assert ours == pytest.approx([steps[-1] for steps in losses], abs=2e-5)
    assert module.policy is not None
    weights = flat(module.policy.model)
    assert (flat(model) - start).abs().max() > STEPS * LR / 2, "the weights moved far more than the tolerance"
    torch.testing.assert_close(weights, flat(model), rtol=1e-4, atol=LR / 50)


def flat(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
