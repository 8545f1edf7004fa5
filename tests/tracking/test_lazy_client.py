"""MLflow's client is made at its first use, and a run without a store has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lit_grpo.tracking.lazy_client import LazyClient
from lit_grpo.tracking.no_store import NoStore


def test_the_client_is_the_one_of_the_run_and_made_when_it_is_asked() -> None:
    opened: list[Any] = []

    def open_target() -> Any:
        opened.append(None)
        return SimpleNamespace(client=SimpleNamespace(log_text=lambda text: f"logged {text}"))

    client = LazyClient(open_target)
    assert not opened
    assert client.log_text("hello") == "logged hello"
    with pytest.raises(AttributeError):
        client.no_such_method  # noqa: B018


def test_without_a_store_it_says_so_and_has_nothing() -> None:
    client = LazyClient(NoStore)
    with pytest.raises(AttributeError, match=r"\(tracking_uri: none\): MLflow has no log_text"):
        client.log_text("hello")
    # Who asks first whether there is something is answered.
    assert not hasattr(client, "log_text")
