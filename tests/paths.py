"""Folders that tests read from."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout."""
SHARED = ROOT.parent / "shared"
"""Shared data beside the checkout; tests that need it skip where it is absent."""
