"""Work beside a thread that asks for items."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from lit_grpo.utils.threads import beside
from tests.waiting import PATIENCE, wait_until


def test_items_are_asked_for_while_the_work_is_done_and_come_in_order() -> None:
    asked: list[int] = []
    all_asked = threading.Event()

    def items() -> Iterator[int]:
        for number in range(5):
            asked.append(number)
            yield number
        all_asked.set()

    def work() -> None:
        assert all_asked.wait(PATIENCE), "nobody asks while the work goes on"

    assert list(beside(items(), work)) == [0, 1, 2, 3, 4]
    assert asked == [0, 1, 2, 3, 4]


def test_what_the_items_end_with_comes_behind_those_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    made = beside(items(), lambda: None)
    assert next(made) == 1
    with pytest.raises(ValueError, match="no more"):
        next(made)


@pytest.mark.parametrize("leaves", ["the work fails", "the caller leaves"])
def test_nobody_goes_on_asking_for_who_has_left(leaves: str) -> None:
    go_on, closed = threading.Event(), threading.Event()
    asked: list[int] = []

    def items() -> Iterator[int]:
        try:
            number = 0
            while True:
                asked.append(number)
                yield number
                number += 1
                go_on.wait(PATIENCE)
        finally:
            closed.set()

    def work() -> None:
        wait_until(lambda: bool(asked), "the first item")
        if leaves == "the work fails":
            raise KeyError("the work")

    made = beside(items(), work)
    if leaves == "the work fails":
        with pytest.raises(KeyError, match="the work"):
            next(made)
    else:
        assert next(made) == 0
        cast(Any, made).close()
    go_on.set()
    assert closed.wait(PATIENCE)
    assert asked in ([0], [0, 1])
