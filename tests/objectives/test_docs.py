"""The page, the recipe files and the one-file reference say what the code does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from lit_grpo.objectives import RECIPES, Objective, ObjectiveConfig
from lit_grpo.types import Experience
from tests.paths import ROOT


def module(path: str) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # dataclasses look their module up
    spec.loader.exec_module(made)
    return made


def test_page_is_what_the_code_says() -> None:
    script = module("scripts/objectives_table.py")
    page = script.TARGET.read_text(encoding="utf-8")
    assert page == script.render(), "run python scripts/objectives_table.py"
    for name in RECIPES:
        assert f"| `{name}` |" in page


def test_every_recipe_has_its_file() -> None:
    files = {path.stem: path for path in (ROOT / "configs" / "recipes").glob("*.yaml")}
    assert set(files) == set(RECIPES)
    for name, path in files.items():
        given = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["objective"]
        assert ObjectiveConfig(**given).resolve() == Objective.from_recipe(name)


@pytest.mark.parametrize("name", RECIPES)
def test_the_head_of_a_recipe_file_says_what_the_recipe_says(name: str) -> None:
    """Formula, use, failure, source, and how the method was published: what differs from it must not be hidden."""
    lines = (ROOT / f"configs/recipes/{name}.yaml").read_text(encoding="utf-8").splitlines()
    head = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    recipe = RECIPES[name]
    assert head.startswith(f"{name}: {recipe.formula} Use: {recipe.use} Known failure: {recipe.failure} ")
    assert f"Source: {recipe.source}. " in head
    assert f"As published: {recipe.published}. This file sets the objective alone; the rest is the base's." in head


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_reference_loss_is_the_objectives(beta: float) -> None:
    reference = module("docs/reference_grpo.py")
    torch.manual_seed(0)
    lengths = torch.tensor([3, 1, 2, 4, 2, 3, 0, 1])
    mask = torch.arange(4)[None] < lengths[:, None]
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.float64)
    old = -torch.rand(8, 4, dtype=torch.float64)
    ref, new = old + 0.3 * torch.randn_like(old), (old + 0.5 * torch.randn_like(old)).requires_grad_()
    advantages = reference.group_advantages(rewards, 4)
    settings = reference.Settings(kl_coef=beta)
    loss = reference.grpo_loss(new, old, ref if beta else None, advantages, mask, settings)
    (grad,) = torch.autograd.grad(loss, new)

    made = Objective.from_recipe("grpo", kl_coef=beta)
    exp = Experience(
        lengths, torch.arange(8) // 4, rewards, torch.zeros(8).bool(), old_logprobs=old, ref_logprobs=ref
    )  # fmt: skip
    state = made.new_state()
    own, state = made.advantages(exp, state)
    torch.testing.assert_close(own[:, 0], advantages)
    out = made.loss(new, made.plan(exp, own, state))
    torch.testing.assert_close(out.loss, loss)
    torch.testing.assert_close(out.token_weights, grad)


def test_reference_is_short_and_needs_little() -> None:
    text = (ROOT / "docs" / "reference_grpo.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= {"random", "dataclasses", "torch", "transformers"}
