"""The documents build into a site without a network, and name keys that there are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.report.browser import MISSING, browser

KEY = re.compile(r"(?<![\w.])((?:model|data)\.(?!jsonl|md\b)\w+(?:\.\w+)*)")
FOREIGN = re.compile(r"^\| [^|]* \|", re.MULTILINE)
"""First cell of a row: the name that another program has."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "latex2mathml"):
        pytest.importorskip(package, reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    # A proxy that nobody listens at: whoever asks for the network fails.
    away = {**os.environ, "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=away | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(site: Path):
    pages = list(site.rglob("index.html"))
    assert len(pages) > 25
    for page in pages:
        loaded = re.findall(r"<(?:script|img)[^>]* src=\"?([^\"> ]+)|<link[^>]* href=\"?([^\"> ]+)", page.read_text())
        for address in (a or b for a, b in loaded):
            assert not address.startswith(("http", "//")), f"{page} loads {address}"


def test_every_document_is_in_the_navigation(site: Path):
    text = (ROOT / "mkdocs.yml").read_text()
    for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/api/*.md")]:
        assert f": {path.relative_to(ROOT / 'docs')}\n" in text, f"{path.name} is in no menu"


def test_the_reference_shows_what_is_documented(site: Path):
    assert "clip_high" in (site / "api/objectives/index.html").read_text()
    assert "prompts_per_rollout" in (site / "api/modules/index.html").read_text()


def test_the_formulas_are_typeset(site: Path):
    page = (site / "objectives/index.html").read_text()
    assert page.count("<math ") > 60
    for page_file in site.rglob("index.html"):
        # Neither dollars around LaTeX nor what would be a script's to typeset.
        shown = re.sub(r"<math .*?</math>|<(code|pre|script)\b.*?</\1>", "", page_file.read_text(), flags=re.DOTALL)
        assert "arithmatex" not in shown, page_file
        assert not re.search(r"\$[^$<]*\\", shown), page_file


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_browser_shows_the_formulas(site: Path, tmp_path: Path):
    with browser(tmp_path / "profile") as session:
        session.open(site / "objectives/index.html")
        sizes = session.run(
            "return [...document.querySelectorAll('math')].map(m => m.getBoundingClientRect())"
            ".map(r => [r.width, r.height])"
        )
        assert len(sizes) > 60
        assert all(width > 3 and height > 5 for width, height in sizes)
        # A fraction is higher than a letter: it is drawn, and not written in a line.
        heights = session.run(
            "return ['mfrac', 'mi'].map(name => document.querySelector('td ' + name).getBoundingClientRect().height)"
        )
        assert heights[0] > 1.5 * heights[1]


@pytest.mark.parametrize("name", ["migrating", "tutorial", "collapse", "embedding"])
def test_the_keys_that_a_page_names_are_keys(name: str):
    from lit_grpo.cli.errors.schema import read_schema

    leaves = read_schema("fit").leaves()
    known = {".".join(key.split(".")[:n]) for key in leaves for n in range(1, key.count(".") + 2)}
    named = KEY.findall(FOREIGN.sub("|", (ROOT / f"docs/{name}.md").read_text()))
    assert named
    assert [key for key in named if key not in known] == []
