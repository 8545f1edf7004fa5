"""Declared ranges: read from the types, checked in one place, whichever way a value comes."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from lit_grpo.datamodule import RolloutDataModule
from lit_grpo.engines.config import EngineConfig
from lit_grpo.errors import UserError
from lit_grpo.learner.engine_agreement import GuardConfig
from lit_grpo.module import LitGRPO
from lit_grpo.objectives import registry
from lit_grpo.policy.config import CriticConfig, LoraConfig, OptimizerConfig, PolicyConfig, TinyModel
from lit_grpo.utils.bounds import Bound, check_arguments, check_fields


@dataclass
class Inner:
    share: Annotated[float, Bound(least=0, below=1)] = 0.5


@dataclass
class Outer:
    count: Annotated[int, Bound(least=1)] = 1
    rate: Annotated[float | None, Bound(above=0)] = None
    gate: Annotated[float, Bound(infinite=True)] = 0.0
    betas: Annotated[tuple[float, float], Bound(least=0, below=1)] = (0.9, 0.95)
    plain: float = 0.0
    word: str = "a"
    choice: float | Literal["auto"] | None = "auto"
    inner: Inner = field(default_factory=Inner)
    by_name: dict[str, Inner] = field(default_factory=dict)
    anything: Any = None


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"count": 0}, "count"), ({"count": None}, "count"), ({"count": 1.5}, "count"), ({"count": "2"}, "count"),
        ({"count": 10**400}, "count"), ({"count": 10**9000}, "count"), ({"rate": 0}, "rate"), ({"rate": -1}, "rate"),
        ({"rate": math.inf}, "rate"), ({"rate": math.nan}, "rate"), ({"gate": math.nan}, "gate"),
        ({"betas": (0.9, 1.0)}, "betas"), ({"betas": (-0.1, 0.5)}, "betas"), ({"plain": math.inf}, "plain"),
        ({"plain": -math.inf}, "plain"), ({"plain": None}, "plain"), ({"word": None}, "word"),
        ({"choice": math.nan}, "choice"), ({"inner": Inner(1.0)}, "inner.share"),
        ({"by_name": {"x": Inner(-1.0)}}, "by_name.x.share"), ({"inner": None}, "inner"),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused_by_its_key(values, key):
    with pytest.raises(UserError) as caught:
        check_fields(Outer(**values), "top")
    assert caught.value.where == f"top.{key}"


@pytest.mark.parametrize(
    "values",
    [{}, {"rate": 1e-30}, {"rate": None}, {"gate": math.inf}, {"betas": (0, 0.5)}, {"choice": None}, {"choice": 2},
     {"anything": None}, {"plain": 3}, {"count": 10**30}],
)  # fmt: skip
def test_what_is_in_range_passes(values):
    check_fields(Outer(**values), "top")


@pytest.mark.parametrize("name", [1, None, True, 2.5])
def test_names_that_yaml_does_not_read_as_text_are_refused(name):
    @dataclass
    class Named:
        args: dict[str, Any] = field(default_factory=dict)
        below: typing.Mapping[str, dict[str, float]] | None = None
        by_number: dict[int, float] = field(default_factory=dict)
        free: dict[Any, Any] = field(default_factory=dict)
        plain: Any = None

    typed = Named(by_number={1: 2.0}, free={name: 1}, plain={name: 1})
    check_arguments(Named, dataclasses.asdict(typed), "top")
    for values, key in (({"args": {"a": 1, name: 2}}, "args"), ({"below": {"a": {name: 2.0}}}, "below.a")):
        with pytest.raises(UserError, match=f"the name {name!r}, which is no text") as caught:
            check_arguments(Named, values, "top")
        assert caught.value.where == f"top.{key}.{name}"


def test_arguments_of_a_class_and_of_its_bases():
    class Base:
        def __init__(self, limit: float = 1.0, name: str = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    class Derived(Base):
        def __init__(self, size: int, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    for given in ({"size": None}, {"limit": math.nan}, {"limit": None}):
        with pytest.raises(UserError, match="Derived"):
            check_arguments(Derived, given, "Derived", finite=False)
    # A default of None says that null is meant, whatever the type; without a bound infinity is the class's own matter.
    check_arguments(Derived, {"size": 1, "name": None, "limit": math.inf}, "Derived", finite=False)


def test_the_remedy_of_what_may_be_null():
    with pytest.raises(UserError, match="null switches it off"):
        check_fields(Outer(rate=math.inf), "top")


def configs() -> list[tuple[type, str]]:
    """Every dataclass below the two Lightning classes, found by their types."""
    found: dict[type, str] = {}

    def walk(hint: Any, key: str) -> None:
        for inner in (hint, *typing.get_args(hint)):
            if isinstance(inner, type) and dataclasses.is_dataclass(inner) and inner not in found:
                found[inner] = key
                for name, below in typing.get_type_hints(inner, include_extras=True).items():
                    walk(below, f"{key}.{name}")
            elif inner is not hint:
                walk(inner, key)

    for cls, top in ((LitGRPO, "model"), (RolloutDataModule, "data")):
        for name, hint in typing.get_type_hints(cls.__init__, include_extras=True).items():
            walk(hint, f"{top}.{name}")
    return [(cls, key) for cls, key in found.items() if cls.__name__ != "ObjectiveConfig"]


def numbers() -> list[tuple[type, str, Any]]:
    return [
        (cls, name, hint)
        for cls, _ in configs()
        for name, hint in typing.get_type_hints(cls, include_extras=True).items()
        if {int, float}
        & {hint, *typing.get_args(hint), *(a for b in typing.get_args(hint) for a in typing.get_args(b))}
    ]


# A reward's range may lie anywhere.
UNBOUNDED = {"CriticConfig.value_low", "CriticConfig.value_high"}


@pytest.mark.parametrize(("cls", "name", "hint"), numbers(), ids=lambda x: getattr(x, "__name__", str(x)))
def test_every_number_of_the_configuration_has_a_bound(cls, name, hint):
    if f"{cls.__name__}.{name}" in UNBOUNDED or bool in typing.get_args(hint):
        return
    if "Literal" in str(hint) and "Bound" not in str(hint) and not {int, float} & set(typing.get_args(hint)):
        return
    assert any(isinstance(extra, Bound) for extra in getattr(hint, "__metadata__", ())), (
        f"{cls.__name__}.{name}: {hint}"
    )


def test_every_number_of_the_constructors_has_a_bound():
    for cls in (LitGRPO, RolloutDataModule):
        for name, hint in typing.get_type_hints(cls.__init__, include_extras=True).items():
            if {int, float} & {hint, *typing.get_args(hint)} - {bool}:
                assert hasattr(hint, "__metadata__"), f"{cls.__name__}.{name}"


# Any sign means something: an advantage, a baseline, a term that is paid or charged for.
EITHER_SIGN = {"baseline", "negative_weight", "entropy_coef"}


def test_every_number_of_an_objective_has_a_bound():
    parts = [*registry.ALWAYS.values(), *(part for _, known in registry.CHOICES.values() for part in known.values())]
    seen = set()
    for part in parts:
        for name, hint in typing.get_type_hints(type(part), include_extras=True).items():
            if registry.has_setting(part, name) and {int, float} & {hint, *typing.get_args(hint)}:
                seen.add(name)
                assert name in EITHER_SIGN or hasattr(hint, "__metadata__"), f"{type(part).__name__}.{name}"
    assert len(seen) > 35


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"max_grad_norm": -1}, "model.max_grad_norm"),
        ({"max_grad_norm": 0}, "model.max_grad_norm"),
        ({"max_grad_norm": math.nan}, "model.max_grad_norm"),
        ({"max_skipped_steps": 0}, "model.max_skipped_steps"),
        ({"max_staleness": -1}, "model.max_staleness"),
        ({"updates_per_rollout": None}, "model.updates_per_rollout"),
        ({"optimizer": OptimizerConfig(lr=math.inf)}, "model.optimizer.lr"),
        ({"optimizer": OptimizerConfig(lr=math.nan)}, "model.optimizer.lr"),
        ({"optimizer": OptimizerConfig(lr=None)}, "model.optimizer.lr"),  # type: ignore[arg-type]
        ({"optimizer": OptimizerConfig(lr="1e-6")}, "model.optimizer.lr"),  # type: ignore[arg-type]
        ({"optimizer": OptimizerConfig(lr=1e9)}, "model.optimizer.lr"),
        ({"optimizer": OptimizerConfig(betas=(0.9, 1.0))}, "model.optimizer.betas"),
        ({"optimizer": OptimizerConfig(warmup_steps=-5)}, "model.optimizer.warmup_steps"),
        ({"optimizer": OptimizerConfig(weight_decay=-1)}, "model.optimizer.weight_decay"),
        ({"critic": CriticConfig(optimizer=OptimizerConfig(eps=-1))}, "model.critic.optimizer.eps"),
        ({"policy": PolicyConfig(tiny=TinyModel(heads=0))}, "model.policy.tiny.heads"),
        ({"policy": PolicyConfig(tiny=TinyModel(layers=0))}, "model.policy.tiny.layers"),
        ({"policy": PolicyConfig(tiny=TinyModel(width=10**8, heads=4))}, "model.policy.tiny.width"),
        ({"policy": PolicyConfig(tiny=TinyModel(), lora=LoraConfig(rank=0))}, "model.policy.lora.rank"),
    ],
)  # fmt: skip
def test_the_module_refuses_it_from_python_too(arguments, where):
    with pytest.raises(UserError) as caught:
        LitGRPO(**{"policy": PolicyConfig(tiny=TinyModel()), **arguments})
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("name", "value"),
    [("rollouts", None), ("rollouts", 10**30), ("group_size", 0), ("prompts_per_rollout", -1), ("rollouts", 1.5),
     ("max_sampling_rounds", 0), ("eval_group_size", None)],
)  # fmt: skip
def test_so_does_the_data_module(name, value):
    with pytest.raises(UserError) as caught:
        RolloutDataModule(**{name: value})
    assert caught.value.where == f"data.{name}"


def test_words_that_may_stand_in_the_place_of_a_number_are_named():
    with pytest.raises(UserError, match=r"processes is 0, must be in \[1, 64\], or auto\n"):
        check_fields(EngineConfig(name="vllm", processes=0), "data.engine")
    with pytest.raises(UserError, match=r"max_ratio_gap is -1, must be above 0, or auto\n"):
        check_fields(GuardConfig(max_ratio_gap=-1), "model.guards")
    # Where no word may stand there, none is named.
    with pytest.raises(UserError, match=r"batch_size is 0, must be at least 1\n"):
        check_fields(EngineConfig(batch_size=0), "data.engine")
