"""scripts/setup_venv in real shells; pip is a stand-in that writes down how it was called."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.waiting import PATIENCE

SCRIPT = ROOT / "scripts" / "setup_venv"
PIP = """\
import os, sys
with open(os.environ["PIP_CALLS"], "a") as file:
    print(*sys.argv[1:], file=file)
raise SystemExit(int(os.environ.get("PIP_CODE", "0")))
"""
# Names that a shell sets by itself, or that venv's own `activate` sets.
OWN = (
    "^(_|BASH_.*|FUNCNAME|PIPESTATUS|LINENO|RANDOM|SECONDS|EPOCH.*|SRANDOM|status|pipestatus|TTYIDLE|ERRNO|argv|ARGC)$"
)
ACTIVATE = {"VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "_OLD_VIRTUAL_PATH", "_OLD_VIRTUAL_PS1", "PS1", "deactivate"}
LIST = {
    "bash": "compgen -v; compgen -A function",
    "zsh": "print -l ${(k)parameters} ${(k)functions}",
}
OPTIONS = {"bash": 'echo "$-"; set +o; shopt', "zsh": "setopt"}

SHELLS = [
    "bash",
    pytest.param("zsh", marks=pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")),
]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A ready environment at LIT_GRPO_VENV, whose pip installs nothing and whose `lit-grpo` says so."""
    venv = tmp_path / "an env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=PATIENCE)
    pip = next(venv.glob("lib/python3*/site-packages")) / "pip"
    pip.mkdir()
    (pip / "__init__.py").touch()
    (pip / "__main__.py").write_text(PIP)
    program = venv / "bin" / "lit-grpo"
    program.write_text("#!/bin/sh\necho this is the one of the environment\n")
    program.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "BASH_ENV", "ENV")}
    return kept | {"LIT_GRPO_VENV": str(venv), "PIP_CALLS": str(tmp_path / "calls"), "HOME": str(tmp_path)}


def shell(name: str, lines: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    start = {"bash": ["bash", "--norc", "--noprofile"], "zsh": ["zsh", "-f"]}[name]
    return subprocess.run([*start, "-c", lines], env=environment, capture_output=True, text=True, timeout=PATIENCE)


def left_behind(name: str, extras: str, environment: dict[str, str]) -> tuple[set[str], str]:
    """(names that are new in a shell after the script was sourced in it, what the shell printed)."""
    lines = f"""
        echo @BEGIN@; {LIST[name]}; echo @END@; {OPTIONS[name]}; echo @DONE@
        . '{SCRIPT}' {extras}
        false
        echo @BEGIN@; {LIST[name]}; echo @END@; {OPTIONS[name]}; echo @DONE@
        echo still here
    """
    result = shell(name, lines, environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("still here\n")
    before, after = re.findall(r"@BEGIN@\n(.*?)@END@\n(.*?)@DONE@\n", result.stdout, re.DOTALL)
    assert before[1] == after[1]
    new = set(after[0].splitlines()) - set(before[0].splitlines())
    return {one for one in new if not re.match(OWN, one)}, result.stderr


@pytest.mark.parametrize("name", SHELLS)
def test_a_sourcing_shell_keeps_its_options_and_gets_the_environment_alone(name, environment):
    new, _ = left_behind(name, "dev", environment)
    assert "VIRTUAL_ENV" in new
    assert new <= ACTIVATE
    calls = Path(environment["PIP_CALLS"]).read_text().splitlines()
    assert calls[0].endswith(" torch")
    assert calls[1].endswith(f"-e {ROOT}[dev]")


@pytest.mark.parametrize("name", SHELLS)
def test_a_failure_leaves_nothing_behind_and_ends_no_shell(name, environment):
    new, errors = left_behind(name, "dev", environment | {"PIP_CODE": "1"})
    assert new == set()
    assert "Installing lit-grpo[dev]" in errors


@pytest.mark.parametrize("name", SHELLS)
def test_the_command_is_found_afterwards(name, environment):
    lines = f". '{SCRIPT}' || exit 9; lit-grpo; deactivate; command -v lit-grpo"
    result = shell(name, lines, environment | {"PATH": "/usr/bin:/bin"})
    assert result.stdout == "this is the one of the environment\n"
    assert result.returncode != 9


@pytest.mark.parametrize("name", SHELLS)
def test_it_works_in_a_strict_shell_from_another_folder_and_fails_there(name, environment, tmp_path):
    relative = os.path.relpath(SCRIPT, tmp_path)
    lines = f"set -eu; cd '{tmp_path}'; CDPATH=/; . {relative} ''; lit-grpo; echo $-"
    result = shell(name, lines, environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "this is the one of the environment"
    assert {"e", "u"} <= set(result.stdout.splitlines()[1])
    failed = shell(name, f"set -e; . '{SCRIPT}' lora; echo goes on", environment | {"PIP_CODE": "1"})
    assert failed.returncode == 1
    assert "goes on" not in failed.stdout


def test_nothing_is_installed_the_second_time(environment):
    for _ in range(2):
        assert shell("bash", f". '{SCRIPT}' dev", environment).returncode == 0
    assert len(Path(environment["PIP_CALLS"]).read_text().splitlines()) == 2


def test_a_python_that_is_too_old_is_named(environment, tmp_path):
    old = tmp_path / "old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1\nexit 1\n')
    old.chmod(0o755)
    missing = {"LIT_GRPO_VENV": str(tmp_path / "none"), "LIT_GRPO_PYTHON": str(old)}
    result = shell("bash", f". '{SCRIPT}'; echo $?", environment | missing)
    assert result.stdout == "1\n"
    assert "needs Python 3.11 or newer" in result.stderr


def test_executed_it_says_what_to_type_next(environment):
    result = subprocess.run([SCRIPT, "dev"], env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0
    said = [line.strip() for line in result.stdout.splitlines()[1:]]
    assert said[0].startswith(". ")
    assert said[1] == "lit-grpo --help"
    # Typed as it stands, in a shell of its own.
    typed = shell("bash", "\n".join(said), environment)
    assert typed.stdout == "this is the one of the environment\n"


def test_any_other_shell_is_told(environment):
    result = subprocess.run(
        ["dash", "-c", f". '{SCRIPT}'"], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert result.returncode == 2
    assert "bash or zsh" in result.stderr


def commands_of_the_readme() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_commands_of_the_readme_are_those_of_the_active_environment():
    from lit_grpo.cli.main import COMMANDS

    found = commands_of_the_readme()
    known = {command.name for command in COMMANDS}
    for line in found:
        assert ".venv/" not in line
        if line.startswith("lit-grpo "):
            assert line.split()[1] in known, line
    (install,) = (line for line in found if line.startswith("pip install"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    match = re.fullmatch(r"pip install -e '\.\[([\w-]+)\]' -c constraints\.txt", install)
    assert match
    assert match[1] in extras


@pytest.mark.slow
def test_the_install_of_the_readme_resolves_in_a_clone(tmp_path):
    """Without the dependencies, which would take a network: pip finds the package and its extra where it is typed."""
    (install,) = (line for line in commands_of_the_readme() if line.startswith("pip install"))
    copy = tmp_path / "clone"
    copy.mkdir()
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("lit_grpo", "callbacks"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    offline = "--dry-run --no-deps --no-build-isolation --no-index"
    line = install.replace("pip install", f"'{sys.executable}' -m pip install {offline}")
    result = subprocess.run(["bash", "-c", line], cwd=copy, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert "Would install lit-grpo" in result.stdout
