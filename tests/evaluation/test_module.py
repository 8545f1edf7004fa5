"""A LightningModule that learns in its own way has its held-out sets measured too."""

from __future__ import annotations

import runpy
from typing import Any

import lightning.pytorch as pl
import pytest

from lit_grpo.data import AdditionPrompts
from lit_grpo.evaluation import EvaluatedModule
from lit_grpo.evaluation.sets import EvaluationSet
from tests import tiny
from tests.paths import ROOT

REINFORCE: Any = runpy.run_path(str(ROOT / "docs/examples/own_module.py"))["Reinforce"]


class Evaluated(EvaluatedModule, REINFORCE):
    """The module of docs/examples/own_module.py, evaluated."""


def test_a_module_of_ones_own_is_evaluated():
    module: Any = Evaluated()
    data = tiny.data(val={"sums": EvaluationSet(AdditionPrompts(digits=1), samples=2)})
    (found,) = tiny.trainer().validate(module, datamodule=data, verbose=False)
    assert found["val/sums/pass@2"] >= found["val/sums/pass@1"]
    assert module.evaluation.metrics() == pytest.approx(found)
    assert len(module.best_held_out["sums"]) == 100
    records = tiny.trainer().predict(module, datamodule=data)
    assert records
    assert {"question", "completion"} <= set(records[0][0])


def test_a_test_is_logged_under_its_own_name_and_is_no_evaluation_to_compare_with():
    module: Any = Evaluated()
    sets = {"sums": EvaluationSet(AdditionPrompts(digits=1), samples=2)}
    (found,) = tiny.trainer().test(module, datamodule=tiny.data(test=sets), verbose=False)
    assert set(found) == set(module.evaluation.metrics())
    assert {"test/reward", "test/sums/pass@2"} <= set(found)
    assert not [key for key in found if not key.startswith("test/")]
    assert module.best_held_out == {}


@pytest.mark.parametrize(("steps", "counts"), [(1, False), (-1, True)])
def test_a_look_at_a_few_prompts_before_training_is_nothing_to_compare_with(steps: int, counts: bool):
    seen = list[bool]()

    class AfterTheLook(pl.Callback):
        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(bool(pl_module.best_held_out))

    data = tiny.data(rollouts=1, val={"sums": EvaluationSet(AdditionPrompts(digits=1), samples=1)})
    tiny.trainer(num_sanity_val_steps=steps, callbacks=[AfterTheLook()]).fit(Evaluated(), datamodule=data)
    assert seen == [counts]
