"""Every fit here ends with a report; its pictures are drawn in tests/report."""

import pytest


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    monkeypatch.setattr("lit_grpo.tracking.charts.PANELS", ())
