"""A run whose folder is elsewhere begins in a folder that is closed, and any other says which option names another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.errors import UserError
from lit_grpo.tracking import RunLogger
from lit_grpo.tracking.folder_record import FolderRecord


@pytest.fixture
def nothing_is_writable(tmp_path, monkeypatch):
    """A current folder in which nothing can be made; the rights of root do not count."""
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.chdir(closed)
    real = os.access

    def allowed(path: Any, mode: int) -> bool:
        return closed not in (Path(path), *Path(path).parents) and real(path, mode)

    monkeypatch.setattr(os, "access", allowed)
    return closed


def test_a_place_that_is_named_needs_no_place_in_the_current_folder(nothing_is_writable, tmp_path):
    logger = RunLogger(tracking_uri="none")
    logger.place_below(tmp_path / "elsewhere")
    assert logger.root == tmp_path / "elsewhere" / "runs"


def test_a_closed_folder_is_refused_with_the_option_that_names_another(nothing_is_writable):
    with pytest.raises(UserError) as caught:
        RunLogger(tracking_uri="none").place_below(nothing_is_writable)
    assert caught.value.where == "trainer.default_root_dir"
    assert "--trainer.default_root_dir " in str(caught.value.remedy)
    with pytest.raises(UserError, match="nothing can be written"):
        FolderRecord(nothing_is_writable / "runs")


def test_a_run_that_keeps_nothing_needs_no_place(nothing_is_writable):
    FolderRecord(nothing_is_writable / "runs", always=False)
