"""Settings of the data module that no training can be done with are refused, each under its key."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lit_grpo.errors import UserError
from lit_grpo.rewards import ExactMatch
from lit_grpo.rollout import setting_checks as checks
from lit_grpo.types import Sampling


@pytest.mark.parametrize(
    ("check", "where"),
    [
        (lambda: checks.check_training_sampling(Sampling(temperature=0.0)), "data.sampling.temperature"),
        (lambda: checks.check_training_sampling(Sampling(top_k=5)), "data.sampling"),
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
    checks.check_engine_sleep(0, 1)
    checks.check_engine_sleep(1, 0)
    checks.check_prompts_per_rollout(8, 4)


def test_a_stage_without_questions_names_the_set_to_add() -> None:
    assert checks.no_training_prompts().where == "data.prompts"
    assert "`test: {gsm8k" in str(checks.no_evaluation_set("test", "predict").remedy)
