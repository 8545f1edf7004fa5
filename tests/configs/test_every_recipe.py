"""Every recipe file trains, as it would from the command line: quickstart, recipe on top, only smaller."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_grpo.cli.main import main
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.rewards.base import Reward
from lit_grpo.types import RewardInput, Score
from tests import tiny
from tests.paths import ROOT

FILES = sorted((ROOT / "configs/recipes").glob("*.yaml"))
ROLLOUTS = 3
SMALLER = f"""\
model:
  policy: {{tiny: {{layers: 1, width: 32, heads: 2}}}}
data:
  prompts: {{class_path: lit_grpo.data.AdditionPrompts, init_args: {{digits: 1, n: 12}}}}
  rewards:
    - {{class_path: tests.configs.test_every_recipe.Digits}}
  prompts_per_rollout: 4
  group_size: 6
  sampling: {{max_new_tokens: 10}}
  rollouts: {ROLLOUTS}
trainer:
  accelerator: cpu
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  callbacks:
    - {{class_path: tests.configs.test_every_recipe.Look}}
"""

WITH = {
    "sft": "data: {group_size: 1}\n",
    # Without experts RSPO is GMPO, and with one update its router factor is 1.
    "rspo": "model: {policy: {tiny: {experts: 4}}, updates_per_rollout: 2}\n",
    # No token of an untrained model has a probability above one half, and Lopti's second pass would stay empty.
    "lopti": "data: {sampling: {temperature: 0.2}}\n",
    # The warm-up that it brings is longer than this run.
    "vapo": "model: {critic: {warmup_rollouts: 0}}\n",
}
"""What a method needs to be more than its simpler relative."""


class Digits(Reward):
    """1 where the completion begins with one of the low ids: about half of an untrained model's."""

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [Score(float(item.completion.token_ids[0] < 7)) for item in batch]


class Look(tiny.Recorder):
    """A recorder that a test can find: the command line makes it."""

    last: Look
    module: Any
    before: Any

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        Look.last, self.module, self.before = self, pl_module, tiny.weights(pl_module)


@pytest.fixture
def smaller(tmp_path: Path) -> str:
    path = tmp_path / "smaller.yaml"
    path.write_text(SMALLER)
    return str(path)


def test_every_recipe_has_a_file_and_every_file_is_a_recipe():
    from lit_grpo.objectives.recipes import RECIPES

    assert {path.stem for path in FILES} == set(RECIPES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.slow
def test_the_recipe_trains(path: Path, smaller: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    extra = tmp_path / "extra.yaml"
    extra.write_text(WITH.get(path.stem, "{}\n"))
    layers = [ROOT / "configs/quickstart.yaml", path, smaller, extra]
    assert main(["fit", *(word for layer in layers for word in ("--config", str(layer)))]) == 0
    run = Look.last
    recipe: Any = path.stem
    assert run.module.objective.name == recipe, "the quickstart's entropy bonus would make it another method"
    own = ObjectiveConfig(recipe=recipe).resolve().for_run(10, run.module.updates_per_rollout)
    assert run.module.objective == own
    assert len(run.metrics) == ROLLOUTS
    if own.demonstrations:
        assert not any("reward" in m for m in run.metrics), "nothing is judged"
    else:
        assert any(m["groups/zero_std_frac"] < 1 for m in run.metrics), "the test's reward has spread"
    for metrics in run.metrics:
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert "loss" in metrics
        assert metrics["optim/grad_norm"] > 0
    steps = ROLLOUTS * own.passes * run.module.updates_per_rollout
    assert (run.module.optimizer_steps, run.module.skipped_steps, run.module.empty_steps) == (steps, 0, 0)
    change = (tiny.weights(run.module) - run.before).abs().max()
    assert 1e-5 < change < 0.1
    if own.dynamic_sampling:
        assert all(m["groups/zero_std_frac"] == 0 for m in run.metrics)
    if own.regularizers.kl_loss:
        assert run.metrics[-1]["loss/kl_ref"] > 0, "the policy has left the reference"
    if own.advantage.critic:
        assert run.module.critic_steps == steps
    if own.initial_entropy_prompts:
        assert 2.0 < run.module.objective_state.initial_entropy < math.log(14), "nearly uniform over 14 ids"
    if recipe == "rspo":
        assert run.module.policy.routes


def test_recipe_files_hold_nothing_but_the_recipe():
    """A recipe's numbers are in the code, so that the name alone is the method."""
    for path in FILES:
        model = yaml.safe_load(path.read_text())["model"]
        assert model.pop("objective") == {"recipe": path.stem}
        assert not model
