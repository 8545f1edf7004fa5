"""A recipe laid over any base is the recipe alone; what is set beside it or after it holds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import yaml

from lit_grpo.cli.config_files import read_layers
from lit_grpo.cli.main import main
from lit_grpo.cli.recipe_reset import reset_options
from lit_grpo.objectives import RECIPES, ObjectiveConfig
from lit_grpo.objectives.registry import AGGREGATIONS, CHOICES, CUSTOM, RATIOS, known_overrides, settings
from tests.paths import ROOT


def some_value(annotation: str) -> Any:
    """Something that the type takes."""
    if annotation.startswith("Literal"):
        return annotation.split('"')[1]
    return {"float": 0.125, "int": 3, "bool": True}[annotation]


EVERYTHING: dict[str, Any] = {
    "recipe": "vapo",
    "ratio": RATIOS[-1],
    **{key: list(known)[-1] for key, (_, known) in CHOICES.items()},
    **{setting.name: some_value(setting.annotation) for group in settings().values() for setting in group.values()},
    **dict.fromkeys(CUSTOM, "math.pi"),
}


@pytest.fixture(scope="module")
def parser() -> jsonargparse.ArgumentParser:
    """The parser of the objective alone: that of a command takes seconds to build."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False, default_env=True, env_prefix="LIT_GRPO_FIT_")
    parser.add_argument("--config", action="config")
    parser.add_argument("--model.objective", type=ObjectiveConfig, default=ObjectiveConfig())
    return parser


@pytest.fixture
def parse(parser: jsonargparse.ArgumentParser, tmp_path: Path) -> Any:
    """From layers (a dictionary: a file with this objective) to the settings of the objective that are not null."""

    def run(*layers: dict[str, Any] | str) -> dict[str, Any]:
        argv: list[str] = []
        for number, layer in enumerate(layers):
            if isinstance(layer, str):
                argv.append(layer)
            else:
                path = tmp_path / f"{number}.yaml"
                path.write_text(yaml.safe_dump({"model": {"objective": layer}}))
                argv += ["--config", str(path)]
        parsed = parser.parse_args([*argv, *reset_options("fit", argv, read_layers(argv, "fit"))])
        made: ObjectiveConfig = parser.instantiate(parsed).model.objective
        return {key: value for key, value in asdict(made).items() if value is not None}

    return run


def test_without_layers_nothing_is_reset() -> None:
    assert reset_options("fit", [], []) == []


def test_the_base_sets_everything(parse: Any) -> None:
    assert set(EVERYTHING) == known_overrides() | {"recipe"}
    assert parse(EVERYTHING) == EVERYTHING


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_over_a_base_with_every_override_is_the_recipe_alone(name: str, parse: Any) -> None:
    assert parse(EVERYTHING, {"recipe": name}) == {"recipe": name}


def test_the_recipe_of_an_option_or_of_the_environment(parse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(EVERYTHING, "--model.objective.recipe=dapo") == {"recipe": "dapo"}
    assert parse("--model.objective.recipe=dapo", EVERYTHING) == {"recipe": "dapo"}, "options are above all files"
    monkeypatch.setenv("LIT_GRPO_FIT__MODEL__OBJECTIVE__CLIP_LOW", "0.1")
    assert parse({"recipe": "dapo"}) == {"recipe": "dapo"}, "the environment is below the files"
    assert parse({"clip_high": 0.3}) == {"recipe": "grpo", "clip_low": 0.1, "clip_high": 0.3}


def test_what_stands_beside_the_recipe_or_after_it_holds(parse: Any) -> None:
    base = {"recipe": "grpo", "clip_low": 0.1, "kl_coef": 0.1}
    own = {"recipe": "dapo", "clip_high": 0.3}
    assert parse(base, own) == own
    assert parse(base, own, {"clip_low": 0.15}) == own | {"clip_low": 0.15}
    assert parse(base, {"clip_high": 0.3}) == base | {"clip_high": 0.3}, "no recipe, no reset"
    assert parse(base, "--model.objective.clip_low=0.2", {"recipe": "dapo"}) == {"recipe": "dapo", "clip_low": 0.2}
    assert parse(base, "--model.objective.clip_high=0.3", "--model.objective.recipe=dapo") == own
    assert parse(base, own, {"recipe": "gspo", "kl_coef": 0.2}) == {"recipe": "gspo", "kl_coef": 0.2}


def test_the_command_prints_the_pure_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("model: {objective: {clip_high: 0.5, kl_coef: 0.1, aggregation: " + list(AGGREGATIONS)[-1] + "}}\n")
    files = [ROOT / "configs/quickstart.yaml", base, ROOT / "configs/recipes/dapo.yaml"]
    argv = [word for file in files for word in ("--config", str(file))]
    assert main(["fit", *argv, "--print_config"]) == 0
    objective = yaml.safe_load(capsys.readouterr().out)["model"]["objective"]
    assert {key: value for key, value in objective.items() if value is not None} == {"recipe": "dapo"}
