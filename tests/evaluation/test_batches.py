"""An evaluation asks the engine of training for as many completions at once as training does, and loads nothing."""

from __future__ import annotations

from typing import Any

import pytest

from lit_grpo.data import AdditionPrompts
from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.evaluation import EvaluationSet
from lit_grpo.rollout.generator import RolloutGenerator
from tests import tiny


@pytest.fixture
def calls(monkeypatch: Any) -> dict[str, list[Any]]:
    """Completions of each call of an engine, engines that were made, syncs, and times that memory was given back."""
    seen: dict[str, list[Any]] = {"generate": [], "engines": [], "sync": [], "sleep": []}
    for name, owner, key in (
        ("generate", TransformersEngine, "generate"),
        ("__init__", TransformersEngine, "engines"),
        ("sync", TransformersEngine, "sync"),
        ("sleep", RolloutGenerator, "sleep"),
    ):
        original = getattr(owner, name)

        def noted(self: Any, *args: Any, _original: Any = original, _key: str = key, **kwargs: Any) -> Any:
            seen[_key].append(sum(len(r.seeds) for r in args[0]) if _key == "generate" else self)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, noted)
    return seen


def sets(questions: int, **changes: Any) -> dict[str, EvaluationSet]:
    return {"held": EvaluationSet(AdditionPrompts(digits=1, n=questions), **changes)}


def validate(**changes: Any) -> dict[str, float]:
    module = tiny.module()
    tiny.trainer().validate(module, datamodule=tiny.data(**changes), verbose=False)
    assert module.evaluation is not None
    return module.evaluation.metrics()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # Training has 4 x 4 = 16 completions at once.
        ({"samples": 1}, [16, 14]),
        ({"samples": 2}, [16, 16, 16, 12]),
        ({"samples": 4}, [16] * 7 + [8]),
        # Never fewer questions than training has.
        ({"samples": 8, "limit": 5}, [32, 8]),
        ({"samples": 4, "greedy": True, "limit": 8}, [16, 16, 8]),
    ],
)
def test_questions_are_batched_as_large_as_in_training(calls, changes, expected):
    validate(val=sets(30, **changes))
    # Twice before it in the check of the first sync.
    assert calls["generate"][2:] == expected


def test_what_is_sampled_does_not_depend_on_the_batches(calls):
    one = validate(val=sets(30, samples=2))
    several = validate(val=sets(30, samples=2), prompts_per_rollout=1, group_size=2)
    assert one == pytest.approx(several, abs=1e-6)
    assert len(calls["generate"]) == 2 + 4 + 2 + 30


def test_it_shares_the_engine_and_the_weights_with_training(calls):
    trainer = tiny.trainer(val_check_interval=1, check_val_every_n_epoch=None)
    two = {"a": sets(4, samples=4, greedy=True)["held"], "b": sets(4, samples=1)["held"]}
    trainer.fit(tiny.module(), datamodule=tiny.data(rollouts=3, val=two))
    assert len(calls["engines"]) == 1
    # Twice in the check of the first sync; after that once for each version of the weights, whoever asks first.
    assert len(calls["sync"]) == 2 + 3
    # The engine keeps its memory from one set to the next.
    assert len(calls["sleep"]) == 3 + 3
