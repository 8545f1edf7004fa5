"""``--print_config`` shows what the recipe sets, and is the same configuration."""

import pytest
import yaml

from lit_grpo.cli.main import DONE, main
from lit_grpo.cli.printed_config import with_recipe
from lit_grpo.learner.run_checks import resolve_objective
from lit_grpo.objectives import ObjectiveConfig
from tests.paths import ROOT

CONFIG = str(ROOT / "configs/quickstart.yaml")


def printed(capsys, *arguments):
    assert main(["fit", *arguments, "--print_config"]) == DONE
    return capsys.readouterr().out


def objective_lines(text):
    lines = text.splitlines()
    begin = lines.index("  objective:")
    return lines[begin + 1 : lines.index("  optimizer:")]


def test_it_shows_the_recipe_in_the_place_of_nulls_and_loads_as_before(capsys, tmp_path):
    text = printed(capsys, "--config", CONFIG)
    lines = objective_lines(text)
    assert not any(line.endswith(": null") for line in lines)
    assert "    # clip_low: 0.2" in lines
    assert "    entropy_coef: 0.03" in lines
    (tmp_path / "printed.yaml").write_text(text)
    assert printed(capsys, "--config", str(tmp_path / "printed.yaml")) == text


@pytest.mark.parametrize("recipe", ["dapo", "gspo", "vapo", "sft"])
def test_the_values_are_those_of_the_objective(recipe):
    text = f"model:\n  objective:\n    recipe: {recipe}\n" + "".join(
        f"    {name}: null\n" for name in ObjectiveConfig.__dataclass_fields__ if name != "recipe"
    )
    shown = with_recipe(text)
    # Every comment made a setting gives the same objective.
    settings = yaml.safe_load(shown.replace("    # The recipe", "#").replace("    # ", "    "))["model"]["objective"]
    assert len(settings) > 25
    wanted = ObjectiveConfig(recipe=recipe).resolve().describe()
    assert {k: v for k, v in settings.items() if k != "recipe"} == {
        k: v for k, v in wanted.items() if k in settings and k != "recipe"
    }


def test_staleness_is_seen_in_it():
    text = "model:\n  objective:\n    recipe: grpo\n    sampler_correction: null\n  max_staleness: 2\n"
    assert "    # sampler_correction: tis_token\n" in with_recipe(text)
    assert resolve_objective(ObjectiveConfig(), 2).sampler.kind == "tis_token"


def test_another_recipe_in_what_was_printed_is_that_recipe(capsys, tmp_path):
    text = printed(capsys, "--config", CONFIG, "--model.objective.entropy_coef", "null")
    (tmp_path / "dapo.yaml").write_text(text.replace("recipe: grpo", "recipe: dapo"))
    assert "    # clip_high: 0.28" in objective_lines(printed(capsys, "--config", str(tmp_path / "dapo.yaml")))


def test_an_objective_that_cannot_be_made_is_printed_as_it_is():
    text = "model:\n  objective:\n    recipe: grpo\n    gae_lambda: 0.5\n    clip_low: null\n"
    assert with_recipe(text) == text
