"""A small seeded part of scripts/fuzz_rewards.py, and proof that it finds what it looks for."""

import importlib.util
import random

import pytest

from lit_grpo.rewards import CountdownReward
from lit_grpo.rewards.isolation import sandbox
from lit_grpo.types import Score
from tests.paths import ROOT

_PATH = ROOT / "scripts/fuzz_rewards.py"
_SPEC = importlib.util.spec_from_file_location("fuzz_rewards", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
fuzz = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(fuzz)


def findings(part):
    return {key: value for key, value in part.items() if key.isupper() and value}


def test_countdown():
    part = fuzz.fuzz_countdown(400, random.Random(11))
    assert findings(part) == {}, part
    assert part["correct"] > 20


def test_verifier():
    part = fuzz.fuzz_verifier(60, random.Random(12), 2)
    assert findings(part) == {}, part


@pytest.mark.skipif(bool(sandbox.check()), reason="no sandbox here")
def test_sandbox():
    part = fuzz.fuzz_sandbox(25, random.Random(13), 2)
    assert findings(part) == {}, part


def test_a_countdown_reward_that_always_pays_is_found(monkeypatch):
    monkeypatch.setattr(CountdownReward, "score", lambda self, batch: [Score(1.0)] * len(batch))
    assert findings(fuzz.fuzz_countdown(200, random.Random(14)))["WRONG"] > 0
