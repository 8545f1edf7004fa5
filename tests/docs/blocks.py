"""The fenced blocks of README.md, CONTRIBUTING.md and docs, and what stands above them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

_FENCE = re.compile(r"^(?P<indent>[ ]*)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)$")
_MARK = re.compile(r"^\s*<!-- not run:(?P<reason>.*?)-->\s*$")

PYTHON, YAML, JSON, TEXT = "python", "yaml", ("json", "jsonl"), "text"
SHELL, CONSOLE = "bash", "console"
"""Lines to type; and lines to type, each behind a ``$``, with what they print."""
LANGUAGES = (PYTHON, YAML, *JSON, TEXT, SHELL, CONSOLE)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Attributes:
        page: path of the page, relative to the checkout.
        line: number of the line of its opening fence.
        language: the word behind that fence; "" if there is none.
        text: what stands between the fences, without the indentation of the fence.
        mark: the reason of a ``<!-- not run: REASON -->`` on the line above; None without one.
    """

    page: str
    line: int
    language: str
    text: str
    mark: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def typed(self) -> str:
        """What a person types: the block itself, or of a console block what stands behind its prompts."""
        if self.language == SHELL:
            return self.text
        lines: list[str] = []
        for line in self.text.splitlines():
            if line.startswith("$ ") or (lines and lines[-1].endswith("\\") and line.startswith("> ")):
                lines.append(line[2:])
        return "".join(line + "\n" for line in lines)


def pages() -> list[str]:
    """List the pages, relative to the checkout."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def blocks(page: str) -> list[Block]:
    """Read the fenced blocks of a page.

    Raises:
        ValueError: a fence is not closed.
    """
    return blocks_of(page, (ROOT / page).read_text(encoding="utf-8"))


def blocks_of(page: str, text: str) -> list[Block]:
    """Find the fenced blocks in the text of a page; see :func:`blocks`."""
    found: list[Block] = []
    lines = iter(enumerate(text.splitlines(), start=1))
    above = ""
    for number, line in lines:
        opening = _FENCE.match(line)
        if not opening:
            above = line
            continue
        indent, fence = len(opening["indent"]), opening["fence"]
        inside: list[str] = []
        for _, inner in lines:
            closing = _FENCE.match(inner)
            if closing and not closing["info"].strip() and closing["fence"].startswith(fence):
                break
            inside.append(inner[min(indent, len(inner) - len(inner.lstrip(" "))) :])
        else:
            raise ValueError(f"{page}:{number}: the block is not closed")
        mark = _MARK.match(above)
        words = opening["info"].split()
        found.append(
            Block(page, number, words[0] if words else "", "".join(f"{one}\n" for one in inside),
                  mark["reason"].strip() if mark else None)
        )  # fmt: skip
        above = ""
    return found


def all_blocks() -> list[Block]:
    """Read the blocks of all pages."""
    return [block for page in pages() for block in blocks(page)]


def inline_commands(page: str) -> list[str]:
    """List the commands in the sentences of a page: code between backticks that begins with a program of ours."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    # A backtick pair may go over the end of a line.
    code = re.findall(r"(?<!`)`([^`]+)`(?!`)", text)
    return [" ".join(one.split()) for one in code if re.match(r"(lit-grpo|python) \S|(\. )?scripts/\S+", one)]


def is_below(path: Path, folder: Path) -> bool:
    """Whether a path lies in a folder or in one below it."""
    return path.resolve().is_relative_to(folder.resolve())
