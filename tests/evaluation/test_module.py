"""A LightningModule that learns in its own way has its held-out sets measured too."""

from __future__ import annotations

import runpy
from typing import Any

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
