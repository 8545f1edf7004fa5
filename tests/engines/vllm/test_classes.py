"""Changes of classes stay with the instances that were made meanwhile; vLLM's own kind of change, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lit_grpo.engines.vllm.classes import classes_left_alone


class Compiled:
    """What vLLM adds to the bases of a class."""

    def only_here(self) -> str:
        return "added"


class Base(nn.Module):
    """Below nn.Module, as transformers' classes are."""

    limit = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Model(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Base()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Takes instances of this class alone.
        return super().forward(self.inner(x))


def decorate(cls: Any) -> None:
    """As ``vllm.compilation.decorators`` does."""
    old = cls.__init__

    def made(self: Any) -> None:
        old(self)
        self.do_not_compile = True

    def called(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert self.do_not_compile
        return self.forward(x) * 10

    cls.__bases__ = (*cls.__bases__, Compiled)
    cls.__init__, cls.__call__, cls.ignore = made, called, False


def test_a_change_stays_with_the_instances_that_were_made_meanwhile():
    learner, x = Model(), torch.zeros(1)
    before = dict(vars(Model))
    with classes_left_alone() as changes:
        decorate(Model)
        Base.limit = 4
        theirs: Any = Model()
        assert theirs(x).item() == 20
    assert dict(vars(Model)) == before
    assert Model.__bases__ == (Base,)
    assert Base.limit == 3
    assert Model.__call__ is nn.Module.__call__
    assert not hasattr(learner, "only_here")
    changes.adopt(theirs)
    assert theirs(x).item() == 20
    assert theirs.only_here() == "added"
    assert theirs.ignore is False
    assert theirs.inner.limit == 4
    assert isinstance(theirs, Model)
    assert type(theirs).__name__ == "Model"
    # The learner's model, and one that is made later.
    for mine in (learner, Model()):
        assert type(mine) is Model
        assert mine(x).item() == 2
        assert not hasattr(mine, "do_not_compile")


def test_a_second_engine_finds_the_class_as_the_first_did():
    for _ in range(2):
        with classes_left_alone() as changes:
            decorate(Model)
            theirs: Any = Model()
        changes.adopt(theirs)
        assert theirs(torch.zeros(1)).item() == 20
    assert Model.__bases__ == (Base,)


def start_that_fails() -> None:
    with classes_left_alone():
        decorate(Model)
        raise ValueError("does not start")


def test_an_engine_that_does_not_start_leaves_no_change():
    with pytest.raises(ValueError, match="does not start"):
        start_that_fails()
    assert Model()(torch.zeros(1)).item() == 2


def test_what_was_taken_away_is_put_back():
    with classes_left_alone():
        del Base.limit
    assert Base.limit == 3
