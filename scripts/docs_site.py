"""Hooks of the documents' site (mkdocs.yml)."""

from __future__ import annotations

import html
import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")
FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<kind>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave of a link to a file of the clone that is no document its text; the site has no page for it."""
    return OUTSIDE.sub(r"\1", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Turn the formulas of a page into MathML, which every browser of today shows by itself.

    Raises:
        ValueError: a formula holds a command that is not known.
    """
    return FORMULA.sub(lambda found: to_mathml(found["tex"], found["kind"] == "["), content)


def to_mathml(tex: str, alone: bool) -> str:
    """Convert LaTeX, as it stands in HTML, to MathML; ``alone`` is what stands in a line of its own."""
    from latex2mathml.converter import convert

    text = html.unescape(tex).strip()
    made = convert(text, display="block" if alone else "inline")
    # It writes names of functions as operators, which browsers put spaces around.
    made = re.sub(r"<mo>([A-Za-z]+)</mo>", r"<mi>\1</mi>", made)
    # What it does not know, it writes down as it was.
    if left := re.search(r"\\[A-Za-z]+", made):
        raise ValueError(f"{left[0]} is unknown in the formula {text}")
    return made.replace("<math ", f'<math aria-label="{html.escape(text, quote=True)}" ', 1)
