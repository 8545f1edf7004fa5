"""Several updates per rollout: what a run says of clip and importance sampling, and what it trains."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from lit_grpo.learner import run_checks
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import OptimizerConfig
from tests import tiny
from tests.learner.helpers import fit, rollout


@pytest.mark.parametrize("recipe", ["grpo", "psr", "nsr", "raft_pp", "rent", "nl"])
def test_a_recipe_without_importance_sampling_trains_off_policy_and_says_so(recipe: Any) -> None:
    """The landscape paper's Fig. 4 (c, d), 6b and 7, which used to be refused."""
    objective = ObjectiveConfig(recipe=recipe, ratio="self")
    with pytest.warns(UserWarning, match="is that of on-policy data, though the data are off-policy") as said:
        module, _ = fit(1, objective=objective, updates_per_rollout=4, minibatch_prompts=1)
    assert len([w for w in said if "off-policy" in str(w.message)]) == 1
    assert module.objective.name == f"{recipe}+no_importance_sampling"
    assert module.optimizer_steps == 4


def test_its_updates_are_those_of_the_on_policy_loss() -> None:
    """Against plain gradient descent on -(1/N) sum A (1/n) sum log pi, with the old advantages."""
    batch, steps = rollout(), 3
    sgd = OptimizerConfig(type="torch.optim.SGD", lr=0.05)
    objective = ObjectiveConfig(recipe="grpo", ratio="self")
    module, _ = fit(batches=[batch], objective=objective, optimizer=sgd, updates_per_rollout=steps, max_grad_norm=None)
    other: Any = tiny.module()
    other.configure_model()
    model: Any = other.policy.model
    rewards = batch.reward.double().view(2, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    for _ in range(steps):
        loss = torch.zeros((), dtype=torch.float64)
        for i, completion in enumerate(batch.completions):
            prompt, answer = batch.prompts[i // 4].token_ids, completion.token_ids
            logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].double()
            chosen = logits.log_softmax(1)[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None])
            loss = loss - advantages[i] * chosen.mean() / 8
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.05 * weight.grad
    torch.testing.assert_close(tiny.weights(module), tiny.weights(other), atol=1e-5, rtol=1e-4)


def test_a_trust_region_that_cannot_act_is_said_and_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(run_checks, "rank_zero_info", said.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings(
            "ignore", ".*(val_dataloader|num_workers|first completions were cut|log-probabilities of their sampler).*"
        )
        fit(1, objective=ObjectiveConfig(recipe="gspo"))
    (line,) = said
    assert line.startswith("gspo: with one update per rollout every ratio is 1, so the trust region 'clip' never acts")
    said.clear()
    fit(1, objective=ObjectiveConfig(recipe="gspo"), updates_per_rollout=2)
    fit(1, objective=ObjectiveConfig(recipe="grpo"))
    assert said == []
