"""Settings of the data module that no training can be done with are refused, each under its key."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lightning.pytorch.trainer.states import TrainerFn

from lit_grpo.errors import UserError
from lit_grpo.rewards import ExactMatch
from lit_grpo.rollout import setting_checks as checks
from lit_grpo.types import Sampling


@pytest.mark.parametrize(
    ("check", "where"),
    [
        (lambda: checks.check_training_sampling(Sampling(temperature=0.0)), "data.sampling.temperature"),
        (lambda: checks.check_training_sampling(Sampling(top_k=5)), "data.sampling"),
        (lambda: checks.check_training_sampling(Sampling(top_p=0.9)), "data.sampling"),
        (lambda: checks.check_answers_are_extracted([ExactMatch()]), "model.objective.invalid_entropy"),
        (lambda: checks.check_engine_sleep(1, 1), "data.engine.sleep"),
        (lambda: checks.check_prompts_per_rollout(6, 4), "data.prompts_per_rollout"),
    ],
)
def test_it_is_refused(check: Callable[[], None], where: str) -> None:
    with pytest.raises(UserError) as error:
        check()
    assert error.value.where == where
    assert error.value.remedy


def test_it_is_taken() -> None:
    checks.check_training_sampling(Sampling())
    # One reward that tells it is enough.
    checks.check_answers_are_extracted([ExactMatch(), ExactMatch(extract="boxed")])
    checks.check_engine_sleep(0, 1)
    checks.check_engine_sleep(1, 0)
    checks.check_prompts_per_rollout(8, 4)


def test_a_number_of_prompts_that_can_be_shared_out_is_named() -> None:
    with pytest.raises(UserError, match="6 prompts per rollout cannot be shared out over 4 processes") as error:
        checks.check_prompts_per_rollout(6, 4)
    assert error.value.remedy == "choose a multiple of 4"


def test_a_stage_without_questions_names_the_set_to_add() -> None:
    assert checks.no_training_prompts().where == "data.prompts"
    # The Trainer's own name of a stage is an enumeration, whose text is not what a person typed.
    error = checks.no_evaluation_set("test", TrainerFn.PREDICTING)
    assert error.where == "data.test"
    assert str(error).startswith("`predict` needs questions, and data.test names no set")
    assert "`test: {gsm8k" in str(error.remedy)
