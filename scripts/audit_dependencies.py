#!/usr/bin/env python
"""Refuse releases of our dependencies that are known to be compromised or to have a hole that a run is exposed to.

    python scripts/audit_dependencies.py            the installed releases, and the pins of constraints.txt
    python scripts/audit_dependencies.py --online   pip-audit too, which asks its databases (needs a network)

The list below is short on purpose: it holds what matters to a program that loads models, data and checkpoints of
others, and it needs no network, so that CI runs it everywhere. It does not replace pip-audit, which knows the
advisories of the day; run that where there is a network.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]

# package: (bad releases, advisory, what it lets happen). Released fixes end each range.
BAD: dict[str, list[tuple[str, str, str]]] = {
    "lightning": [
        ("==2.6.2", "compromised release", "code of somebody else runs"),
        ("==2.6.3", "compromised release", "code of somebody else runs"),
    ],
    "torch": [("<2.6", "CVE-2025-32434", "torch.load(weights_only=True) runs code of a checkpoint")],
    "pyyaml": [("<5.4", "CVE-2020-14343", "a full loader runs code of a YAML file")],
    "jinja2": [("<3.1.6", "CVE-2025-27516", "a chat template leaves its sandbox")],
    "pyarrow": [(">=0.14,<14.0.1", "CVE-2023-47248", "a Parquet file runs code")],
    "aiohttp": [("<3.12.14", "CVE-2025-53643", "requests are smuggled past a proxy")],
    "pillow": [(">=11.2,<11.3", "CVE-2025-48379", "a picture overflows a buffer")],
    "vllm": [(">=0.10.2,<0.11.1", "CVE-2025-62164", "prompt embeddings crash a server or run code in it")],
}  # fmt: skip


def bad_releases(package: str, release: str) -> Iterator[str]:
    """Yield a line for each entry of the list that a release falls under."""
    for bad, advisory, what in BAD.get(re.sub(r"[-_.]+", "-", package).lower(), ()):
        if SpecifierSet(bad).contains(release, prereleases=True):
            yield f"{package} {release}: {advisory}, {what} (releases {bad})"


def installed() -> Iterator[tuple[str, str]]:
    """Yield (package, release) of those of the list that are installed here."""
    for package in BAD:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def pinned(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (package, release) of the pins of a constraints file."""
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        requirement = Requirement(text)
        for specifier in requirement.specifier:
            if specifier.operator == "==":
                yield requirement.name, specifier.version


def main(argv: list[str] | None = None) -> int:
    """Print what is bad; exit code 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--online", action="store_true", help="run pip-audit too")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    options = parser.parse_args(argv)
    releases = list(dict.fromkeys([*installed(), *pinned(options.constraints)]))
    found = [line for package, release in releases for line in bad_releases(package, release)]
    for line in found:
        print(line)
    if not found:
        print(f"{len(releases)} releases looked at, none of them known to be bad")
    code = int(bool(found))
    if options.online:
        code |= subprocess.run([sys.executable, "-m", "pip_audit", "--progress-spinner", "off"], check=False).returncode
    return code


if __name__ == "__main__":
    raise SystemExit(main())
