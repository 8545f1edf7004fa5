"""Engines by name and by import path: settings of another engine are warned of, one from outside trains."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import pytest

from lit_grpo.cli.main import main
from lit_grpo.engines import EngineConfig, EngineContext, NamedWeights, RolloutEngine, check_engine
from lit_grpo.engines.registry import ENGINES, engine_settings, load_engine_class, make_engine
from lit_grpo.errors import UserError
from lit_grpo.types import Completion, Request, Sampling
from tests.paths import ROOT

CONFIG = """\
model:
  policy: {tiny: {layers: 1, width: 16, heads: 2}}
  guards: {max_engine_gap: null}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts}
  rewards: [{class_path: tests.cli.test_fit.Even}]
  group_size: 4
  prompts_per_rollout: 4
  rollouts: 2
  sampling: {max_new_tokens: 2}
  engine: {custom_engine: tests.engines.test_registry.RandomEngine, init_args: {length: 2}}
"""


class RandomEngine:
    """Draws ids at random, whatever the weights are."""

    made: ClassVar[list[RandomEngine]] = []

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length
        self.policy_version = -1
        self.synced: list[int] = []
        self.sampled = 0
        self.closed = False
        self.made.append(self)

    @classmethod
    def from_context(cls, context: EngineContext, *, length: int) -> Self:
        return cls(context.policy.model.config.vocab_size, length)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        for request in requests:
            for sample, seed in enumerate(request.seeds):
                ids = tuple(random.Random(seed).choices(range(self.vocabulary), k=self.length))
                self.sampled += 1
                yield Completion(request.index, sample, ids, (-3.0,) * self.length, "length", self.policy_version)

    def sync(self, weights: NamedWeights, version: int) -> None:
        assert dict(weights)
        self.policy_version = version
        self.synced.append(version)

    def close(self) -> None:
        self.closed = True


def test_an_engine_from_outside_trains_through_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    RandomEngine.made.clear()
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert main(["fit", "--config", "run.yaml"]) == 0
    # The command line loads this file under its own name, whatever name pytest gave it.
    made = load_engine_class("tests.engines.test_registry.RandomEngine").made  # type: ignore[attr-defined]
    engine: Any
    (engine,) = made
    assert isinstance(engine, RolloutEngine)
    engine = made[0]
    assert (engine.length, engine.sampled, engine.synced, engine.closed) == (2, 2 * 4 * 4, [0, 1], True)


def test_a_setting_of_another_engine_is_warned_of_and_its_default_is_not() -> None:
    assert engine_settings(EngineConfig(max_num_seqs=8, batch_size=8)) == {"batch_size": 8}
    with pytest.warns(
        UserWarning, match="max_num_seqs has no effect: it is a setting of the engine vllm and of vllm_s"
    ):
        check_engine(EngineConfig(max_num_seqs=8))
    with pytest.warns(UserWarning, match=r"samples with tests\.engines\.test_registry\.RandomEngine"):
        check_engine(EngineConfig(custom_engine="tests.engines.test_registry.RandomEngine", batch_size=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_engine(EngineConfig(max_num_seqs=256, batch_size=8))
    with pytest.raises(UserError, match="init_args"):
        check_engine(EngineConfig(init_args={"length": 2}))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("MyEngine", "is no import path"),
        ("no_such_package.MyEngine", "cannot be imported"),
        ("tests.engines.test_registry.RandomEngin", "test_registry has no RandomEngin"),
        ("collections.OrderedDict", "no classmethod from_context"),
    ],
)
def test_a_wrong_import_path_is_named(path: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_engine(EngineConfig(custom_engine=path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys; sys.exit(0)", "importing my_engine fails: SystemExit: 0"),
        ("class Mine\n", "my_engine is no valid Python"),
        ("import no_such_package", "my_engine.Mine cannot be imported: No module named 'no_such_package'"),
    ],
)
def test_a_module_that_fails_at_its_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_engine", raising=False)
    (tmp_path / "my_engine.py").write_text(text)
    with pytest.raises(UserError, match=words):
        check_engine(EngineConfig(custom_engine="my_engine.Mine"))


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_has_its_class_and_takes_its_own_settings(name: Any) -> None:
    load_engine_class(ENGINES[name].class_path)
    assert ENGINES[name].config(**engine_settings(EngineConfig(name=name))) == ENGINES[name].config()


class Unfinished:
    """Everything of an engine but ``close``, which is not called before the run ends."""

    policy_version = -1
    generate = sync = None

    @classmethod
    def from_context(cls, context: Any, *, length: int) -> Self:
        return cls()


def test_an_engine_that_lacks_a_method_or_is_given_other_arguments_is_refused_before_it_samples() -> None:
    path, context = "tests.engines.test_registry.Unfinished", cast(EngineContext, None)
    with pytest.raises(UserError, match=r"Unfinished has no close") as error:
        make_engine(EngineConfig(custom_engine=path, init_args={"length": 2}), context)
    assert error.value.where == "data.engine.custom_engine"
    with pytest.raises(
        UserError, match="does not take these arguments: missing a required argument: 'length'"
    ) as error:
        make_engine(EngineConfig(custom_engine=path, init_args={"width": 2}), context)
    assert error.value.where == "data.engine.init_args"
