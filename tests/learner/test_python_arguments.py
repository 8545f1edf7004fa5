"""What a person passes to LitGRPO and RolloutDataModule in Python: taken, or refused with what to pass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo import LitGRPO, RolloutDataModule
from lit_grpo.errors import UserError
from lit_grpo.objectives import Objective
from lit_grpo.policy import OptimizerConfig, PolicyConfig, TinyModel
from lit_grpo.policy.model.load import load_model, load_tokenizer
from lit_grpo.rewards import ExactMatch
from lit_grpo.utils.foreign_names import FOREIGN_NAMES
from tests import tiny
from tests.paths import ROOT

TINY: dict[str, Any] = {"width": 32, "layers": 2, "heads": 2}


def centered(inputs: Any) -> torch.Tensor:
    return inputs.rewards - inputs.rewards.mean()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    load_model(PolicyConfig(tiny=TinyModel(**TINY))).save_pretrained(path)
    load_tokenizer(PolicyConfig(tiny=TinyModel(**TINY))).save_pretrained(path)
    return path


def test_a_policy_may_be_a_folder_or_a_tiny_model(folder: Path):
    for given in (str(folder), folder, PolicyConfig(path=folder), {"path": folder}):  # type: ignore[arg-type]
        assert LitGRPO(given).policy_config == PolicyConfig(path=str(folder))  # type: ignore[arg-type]
    assert LitGRPO(TinyModel(**TINY)).policy_config.tiny == TinyModel(**TINY)  # type: ignore[arg-type]
    assert LitGRPO({"tiny": TINY}).policy_config.tiny == TinyModel(**TINY)  # type: ignore[arg-type]


def test_names_classes_and_functions_stand_for_settings_and_train():
    module = tiny.module(
        objective={"recipe": "grpo", "custom_advantage": centered},
        optimizer={"type": torch.optim.AdamW, "lr": 1e-2},
    )
    assert module.objective_config.custom_advantage == f"{__name__}.centered"
    tiny.trainer().fit(module, datamodule=tiny.data(rollouts=1))
    assert module.optimizer_steps == 1
    assert tiny.module(objective="dr_grpo").objective.name == "dr_grpo"
    assert tiny.module(optimizer=torch.optim.AdamW).optimizer_config.type.endswith("AdamW")


def test_the_module_is_its_model_when_it_is_called():
    module = tiny.module()
    with pytest.raises(UserError, match="made when a Trainer sets the module up"):
        module(torch.tensor([[1, 2]]))
    tiny.trainer().fit(module, datamodule=tiny.data(rollouts=1))
    assert module(torch.tensor([[1, 2]])).logits.shape == (1, 2, 14)


@pytest.mark.parametrize(
    ("arguments", "what", "remedy"),
    [
        ({"policy": None}, "no policy is given", "model folder"),
        ({"policy": {"tinny": {}}}, "PolicyConfig has no 'tinny'", "did you mean 'tiny'?"),
        ({"policy": {"tiny": {"widht": 3}}}, "TinyModel has no 'widht'", "did you mean 'width'?"),
        ({"policy": {"tiny": TinyModel}}, "tiny is the class TinyModel", "TinyModel(...)"),
        ({"policy": {"tiny": TINY, "dtype": "bf16"}}, "dtype is 'bf16'", "did you mean 'bfloat16'?"),
        ({"policy": {"tiny": TINY, "dtype": torch.bfloat16}}, "dtype is torch.bfloat16", "'bfloat16'"),
        ({"objective": "grop"}, "'grop'", "did you mean 'grpo'?"),
        ({"objective": {"recip": "grpo"}}, "ObjectiveConfig has no 'recip'", "did you mean 'recipe'?"),
        ({"objective": Objective.from_recipe("dapo")}, "'dapo' is an object", "{'recipe': 'dapo', ...}"),
        ({"objective": {"custom_objective": Objective.from_recipe("grpo")}}, "an object of", "its import path"),
        ({"objective": {"custom_advantage": lambda inputs: inputs}}, "has no import path", "at the top level"),
        ({"objective": torch.nn.MSELoss()}, "the objective is MSELoss", "'custom_advantage': my_function"),
        ({"optimizer": 1e-3}, "the optimizer is 0.001", "OptimizerConfig(lr=0.001)"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
            "SGD is made already", "OptimizerConfig(type='torch.optim.SGD', lr=...)",
        ),
        ({"optimizer": OptimizerConfig}, "optimizer is the class", "make one of it: OptimizerConfig(...)"),
        ({"critic": True}, "critic is True, and no CriticConfig", "give CriticConfig(...)"),
        ({"guards": {"max_gapp": 1}}, "GuardConfig has no 'max_gapp'", ""),
        ({"routing_replay": "rollout"}, "routing_replay is 'rollout'", "Choose one of none, old, sampler"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_taken_is_refused_with_what_to_pass(arguments: dict[str, Any], what: str, remedy: str):
    with pytest.raises(UserError) as caught:
        LitGRPO(**({"policy": {"tiny": TINY}} | arguments))
    assert what in caught.value.what
    assert remedy in str(caught.value.remedy)
    assert str(caught.value.where).startswith("model")


def test_a_loaded_model_is_refused_with_the_lines_that_give_it(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for given in (model, (model, tokenizer), {"path": model}):
        with pytest.raises(UserError, match="loaded already") as caught:
            LitGRPO(given)  # type: ignore[arg-type]
        assert f"policy={str(folder)!r} if it is as it was loaded" in str(caught.value.remedy)
        assert "model.save_pretrained('FOLDER')" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("cls", "name", "remedy"),
    [
        (LitGRPO, "lr", "give optimizer={'lr': ...}"),
        (LitGRPO, "beta", "beta is model.objective.kl_coef here: give objective={'kl_coef': ...}"),
        (LitGRPO, "num_generations", "give group_size=... of RolloutDataModule"),
        (LitGRPO, "objektive", "did you mean 'objective'?"),
        (RolloutDataModule, "temperature", "give sampling={'temperature': ...}"),
        (RolloutDataModule, "reward_funcs", "give rewards=..."),
        (RolloutDataModule, "learning_rate", "give optimizer={'lr': ...} of LitGRPO"),
        (RolloutDataModule, "promts", "did you mean 'prompts'?"),
    ],
)
def test_an_argument_by_another_name_is_told_its_own(cls: Any, name: str, remedy: str):
    with pytest.raises(UserError, match=f"has no argument '{name}'") as caught:
        cls(**{name: 1})
    # Who catches Python's own error catches this one.
    assert isinstance(caught.value, TypeError)
    assert remedy in str(caught.value.remedy)


def test_a_policy_is_asked_for():
    with pytest.raises(TypeError, match="LitGRPO needs 'policy'"):
        LitGRPO()  # type: ignore[call-arg]


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_without_a_data_module_the_remedy_is_the_call(command: str):
    trainer = tiny.trainer()
    with pytest.raises(UserError, match="there is no data module") as caught:
        getattr(trainer, command)(tiny.module())
    assert f"trainer.{command}(module, datamodule=RolloutDataModule(" in str(caught.value.remedy)


@pytest.mark.parametrize("command", ["validate", "test"])
def test_the_command_is_named_by_its_word(command: str):
    with pytest.raises(UserError, match=f"`{command}` needs questions"):
        getattr(tiny.trainer(), command)(tiny.module(), datamodule=tiny.data(rewards=[ExactMatch()]))


def test_names_of_other_libraries_are_those_of_the_page():
    page = (ROOT / "docs" / "migrating.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for name, key in FOREIGN_NAMES.items():
        group = key.rpartition(".")[0] if key.startswith("model.policy") else key
        assert any(re.search(rf"\b{name}\b", row) and (key in row or group in row) for row in rows), name
