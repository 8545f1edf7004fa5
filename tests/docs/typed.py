"""The commands of a page as bash understands them: typed into a folder whose programs write down how they were called.

Bash itself splits lines, fills in variables and follows ``cd``, so that nothing here reads shell by hand. Each program
that the pages name is a stand-in, which records its arguments and, where :data:`RUN` says so, runs the real one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.docs.blocks import Block
from tests.paths import ROOT

PROGRAMS = ("lit-grpo", "python", "pip", "git", "hf", "docker", "mlflow", "mkdocs", "vllm", "pytest")


@dataclass(frozen=True)
class Real:
    """Commands that are run for real.

    Attributes:
        begins: the words that they begin with.
        more: options put behind them, to make them short.
    """

    begins: str
    more: str = ""


RUN = (
    Real("lit-grpo --version"),
    Real("lit-grpo init"),
    Real("lit-grpo schema"),
    Real("lit-grpo completion"),
    Real("lit-grpo score"),
    Real("lit-grpo report"),
    # Two rollouts show that a command works. A run of minutes shows no more of that.
    Real("lit-grpo fit --config config.yaml", "--data.rollouts 2"),
    Real(
        "lit-grpo fit --config configs/quickstart.yaml --config configs/quickstart/vapo.yaml",
        "--data.rollouts 2 --model.critic.warmup_rollouts 1",
    ),
    Real("lit-grpo fit --config configs/quickstart.yaml", "--data.rollouts 2 --trainer.val_check_interval 1"),
    Real("lit-grpo fit --config runs/NAME/config.yaml"),
    # Of a random model few answers are right; of so many prompts some are.
    Real("lit-grpo check --config config.yaml", "--prompts 100 --no-step"),
    Real("scripts/quickstart", "--data.rollouts 2"),
)
"""What runs in a test, on a CPU and without a network. Every other command is only parsed."""

_RECORDER = '''\
"""Stand-in of the programs: ``recorder.py NAME ARGUMENTS``."""
import json, os, sys

words = sys.argv[1:]
with open(os.environ["TYPED_LOG"], "a") as log:
    log.write(json.dumps({"block": os.environ["TYPED_BLOCK"], "words": words, "folder": os.getcwd()}) + "\\n")
if words[:2] == ["git", "clone"]:
    # Where the clone would be, lies this folder itself.
    os.symlink(os.environ["TYPED_ROOT"], words[-1])
for rule in json.loads(os.environ["TYPED_RUN"]):
    if words[: len(rule["begins"])] == rule["begins"]:
        command = rule["program"] + words[1:] + ([] if "--print_config" in words else rule["more"])
        # What a real program calls is no command of the page.
        os.environ["PATH"] = os.environ["TYPED_PATH"]
        os.execvp(command[0], command)
if words[:2] == ["lit-grpo", "init"]:
    os.mkdir(words[2])
'''


@dataclass(frozen=True)
class Typed:
    """One call of a program, as bash made it.

    Attributes:
        block: the block that it stands in, as ``page:line``.
        words: program and arguments.
        folder: the folder in which it was called.
    """

    block: str
    words: tuple[str, ...]
    folder: Path

    @property
    def runs(self) -> bool:
        """Whether :data:`RUN` has it run for real."""
        return any(list(self.words[: len(rule.begins.split())]) == rule.begins.split() for rule in RUN)

    def __str__(self) -> str:
        return f"{self.block}: {' '.join(self.words)}"


def make_folder(folder: Path) -> None:
    """Make of an empty folder one that looks like a clone and whose programs are stand-ins.

    ``configs``, ``docs``, ``tests``, ``models`` and the Python files of ``scripts`` are the real ones.
    """
    for name in ("configs", "docs", "tests", "models", "lit_grpo", "callbacks", "pyproject.toml", "constraints.txt"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    tools = folder / ".tools"
    tools.mkdir()
    (tools / "recorder.py").write_text(_RECORDER, encoding="utf-8")
    # -S and -E: without the packages of the environment, which take time to find.
    call = f"{sys.executable} -S -E {tools}/recorder.py"
    for program in PROGRAMS:
        _write_program(tools / program, f'exec {call} {program} "$@"\n')
    (folder / "scripts").mkdir()
    for path in (ROOT / "scripts").iterdir():
        if path.is_file() and not path.suffix and os.access(path, os.X_OK):
            # Without exec, for these may be sourced.
            _write_program(folder / "scripts" / path.name, f'{call} scripts/{path.name} "$@"\n')
        else:
            (folder / "scripts" / path.name).symlink_to(path)


def _write_program(path: Path, text: str) -> None:
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(0o755)


def type_blocks(page: list[Block], folder: Path, real: bool = False, seconds: float = 600) -> list[Typed]:
    """Type the shell blocks of one page into bash, each in ``folder``, with the variables of those before it.

    Args:
        page: blocks of one page.
        folder: what :func:`make_folder` made.
        real: whether the commands of :data:`RUN` are run.
        seconds: how long the page may take.

    Raises:
        AssertionError: bash or a command failed; the message holds the end of its output.
    """
    log = folder / ".tools" / "log.jsonl"
    log.write_text("", encoding="utf-8")
    lines = ["set -euo pipefail"]
    for block in page:
        lines += [f"export TYPED_BLOCK={block}", f"cd {folder}", block.typed]
    rules = [
        {"begins": rule.begins.split(), "more": rule.more.split(), "program": _program(rule.begins.split()[0])}
        for rule in RUN
    ]
    environment = {
        **os.environ,
        "PATH": f"{folder}/.tools{os.pathsep}{os.environ['PATH']}",
        # What completion appends to is this person's own file.
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TYPED_LOG": str(log),
        "TYPED_PATH": os.environ["PATH"],
        "TYPED_ROOT": str(folder),
        "TYPED_RUN": json.dumps(rules if real else []),
    }
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    typed = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    said = f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
    assert done.returncode == 0, f"{typed[-1:] or page[:1]} ended with {done.returncode}\n{said}"
    return [Typed(one["block"], tuple(one["words"]), Path(one["folder"])) for one in typed]


def _program(name: str) -> list[str]:
    if name == "lit-grpo":
        return [sys.executable, "-m", "lit_grpo.cli.main"]
    return [str(ROOT / name)]


def ready_environment(folder: Path) -> Path:
    """Make what ``scripts/setup_venv`` would make, of the environment that runs the tests; nothing is installed."""
    venv = folder / "venv"
    (venv / "bin").mkdir(parents=True)
    state = subprocess.run(
        f"cat {ROOT}/pyproject.toml {ROOT}/constraints.txt | cksum",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (venv / ".lit-grpo-base").write_text(state, encoding="utf-8")
    _write_program(venv / "bin" / "python", f'exec {sys.executable} "$@"\n')
    _write_program(venv / "bin" / "lit-grpo", f'exec {sys.executable} -m lit_grpo.cli.main "$@"\n')
    (venv / "bin" / "activate").write_text(f'PATH="{venv}/bin:$PATH"\n', encoding="utf-8")
    assert shutil.which("bash")
    return venv
