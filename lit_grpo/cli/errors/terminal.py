"""The layout of an error that a person can mend, for the terminal."""

from __future__ import annotations

import shutil
import textwrap

from lit_grpo.errors import UserError

# This mark stands in lines that quote a file, which must stay as they are and so are not wrapped.
_QUOTE_MARK = " | "


def render(error: UserError, command: str) -> str:
    """Lay the error out as a few indented lines, as wide as the terminal but between 36 and 110 columns."""
    width = max(36, min(110, shutil.get_terminal_size((100, 24)).columns))
    lines = [f"lit-grpo {command}: error", "", *_wrap(error.what, "  ", width)]
    for name, text in (("where", error.where), ("remedy", error.remedy)):
        if text:
            wrapped = _wrap(text, " " * 10, width)
            wrapped[0] = f"  {name + ':':<8}" + wrapped[0].lstrip()
            lines += wrapped
    return "\n".join(lines)


def _wrap(text: str, indent: str, width: int) -> list[str]:
    out: list[str] = []
    for line in text.splitlines() or [""]:
        if _QUOTE_MARK in line:
            out.append(indent + line)
        else:
            # Long words and hyphens are left whole, so that paths and options can be copied.
            out += textwrap.wrap(
                line, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
                break_on_hyphens=False,
            ) or [indent]  # fmt: skip
    return out
