"""Hooks of the documents' site (mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave of a link to a file of the clone that is no document its text; the site has no page for it."""
    return OUTSIDE.sub(r"\1", markdown)
