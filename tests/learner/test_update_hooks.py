"""Callbacks take part in an optimizer step by methods that Lightning does not know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lit_grpo.trainer.update_hooks import UpdateHooks

METRICS = {"loss": 1.0, "optim/grad_norm": 3.0}


class Asked:
    """Callback that answers as it is told, and keeps what it was asked."""

    def __init__(self, veto: str | None = None, limits: dict[str, float] | None = None, mends: bool = False) -> None:
        self.veto, self.limits, self.mends = veto, limits, mends
        self.seen: list[Any] = []

    def veto_update(self, trainer: Any, module: Any, metrics: dict[str, float]) -> str | None:
        self.seen.append((trainer, module, metrics))
        return self.veto

    def limit_update(self, trainer: Any, module: Any, metrics: dict[str, float]) -> dict[str, float] | None:
        self.seen.append((trainer, module, metrics))
        return self.limits

    def mends_lost_weights(self, trainer: Any) -> bool:
        self.seen.append(trainer)
        return self.mends


def hooks(*callbacks: Any) -> UpdateHooks:
    return UpdateHooks(SimpleNamespace(callbacks=[object(), *callbacks]), "the module")  # type: ignore[arg-type]


def test_the_first_veto_counts_and_all_are_asked():
    callbacks = Asked(), Asked("too large"), Asked("too late")
    made = hooks(*callbacks)
    assert made.veto(METRICS) == "too large"
    assert all(one.seen == [(made.trainer, "the module", METRICS)] for one in callbacks)
    assert hooks(Asked(), Asked("")).veto(METRICS) is None


def test_of_several_limits_the_smallest_holds():
    given = (
        Asked(limits={"optim/grad_norm": 2.0}),
        Asked(limits={"optim/grad_norm": 0.5, "critic/grad_norm": 1.0}),
        Asked(),
    )
    made = hooks(*given)
    assert made.limits(METRICS) == {"optim/grad_norm": 0.5, "critic/grad_norm": 1.0}
    assert all(one.seen == [(made.trainer, "the module", METRICS)] for one in given)
    assert hooks().limits(METRICS) == {}


def test_one_that_goes_back_is_enough():
    callbacks = Asked(), Asked(mends=True)
    made = hooks(*callbacks)
    assert made.mends_lost_weights()
    assert all(one.seen == [made.trainer] for one in callbacks)
    assert not hooks(Asked()).mends_lost_weights()
