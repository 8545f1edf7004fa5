"""Every link of the documents inside the repository leads somewhere: the file is there, and the heading in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import pages
from tests.paths import ROOT

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)|<(?:img|a)\b[^>]*?(?:src|href)=\"([^\"]+)\"")
CHECKED = [*pages(), "CHANGELOG.md"]


def prose(text: str) -> str:
    """Leave out code, in which brackets are no links."""
    text = re.sub(r"^( *)(`{3,}|~{3,}).*?^\1\2[ ]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text)


def anchor(heading: str) -> str:
    """Return the name that GitHub and the site give to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip())
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text.lower()))


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^( *)(`{3,}|~{3,}).*?^\1\2[ ]*$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {anchor(heading) for heading in re.findall(r"^#+ +(.+?) *#*$", text, flags=re.MULTILINE)} | set(
        re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text)
    )


def broken(page: Path, text: str) -> list[str]:
    """List the links in a text that lead nowhere, as seen from a page."""
    wrong = []
    for found in LINK.finditer(prose(text)):
        target = found[1] or found[2]
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists():
            wrong.append(f"{target}: no such file")
        elif ROOT not in path.resolve().parents:
            wrong.append(f"{target}: outside of the repository")
        elif heading and heading not in anchors(path):
            wrong.append(f"{target}: no such heading")
    return wrong


@pytest.mark.parametrize("page", CHECKED)
def test_every_link_leads_somewhere(page: str):
    path = ROOT / page
    assert broken(path, path.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_noticed():
    page = ROOT / "docs" / "index.md"
    text = "[a](tutorial.md) [b](nothing.md) [c](tutorial.md#nowhere) [d](#e) `[f](g.md)` [h](https://x.y) ![i](j.png)"
    assert [line.partition(":")[0] for line in broken(page, text)] == [
        "nothing.md",
        "tutorial.md#nowhere",
        "#e",
        "j.png",
    ]
    assert broken(page, "[`a`](rewards.md#rewardbysource)\n```\n[x](y.md)\n```\n") == []


def test_every_picture_is_shown_somewhere_and_small():
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in CHECKED)
    for picture in sorted((ROOT / "docs").rglob("*.png")):
        assert picture.name in text, f"no page shows {picture.name}"
        assert picture.stat().st_size <= 150_000, f"{picture.name} is large"
