"""The list of bad releases: it is read right, and nothing that is installed or pinned here is on it."""

from __future__ import annotations

import pytest

from scripts.audit_dependencies import bad_releases, main


@pytest.mark.parametrize(
    ("package", "release"),
    [("lightning", "2.6.2"), ("lightning", "2.6.3"), ("torch", "2.5.1"), ("PyYAML", "5.3"), ("Jinja2", "3.1.5"),
     ("vllm", "0.11.0")],
)  # fmt: skip
def test_bad_releases(package, release):
    assert list(bad_releases(package, release))


@pytest.mark.parametrize(
    ("package", "release"), [("lightning", "2.6.6"), ("torch", "2.13.0"), ("unknown", "1"), ("vllm", "0.11.1")]
)
def test_others(package, release):
    assert not list(bad_releases(package, release))


def test_what_is_installed_and_pinned(capsys):
    assert main([]) == 0, capsys.readouterr().out


def test_a_bad_pin_is_found(tmp_path, capsys):
    (tmp_path / "c.txt").write_text("# pins\ntorch==2.5.0  # old\nnumpy>=1\n")
    assert main(["--constraints", str(tmp_path / "c.txt")]) == 1
    assert "CVE-2025-32434" in capsys.readouterr().out
