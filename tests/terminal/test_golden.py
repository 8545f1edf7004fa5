"""What a run looks like on terminals and in pipes, against files that a person has looked at.

``LIT_GRPO_WRITE_GOLDEN=1 pytest tests/terminal/test_golden.py`` writes them anew.
"""

import io
import os
import re
from pathlib import Path

import pytest
from rich.console import Console

from lit_grpo.terminal.console import make_console
from lit_grpo.terminal.figures import Progress, display, line
from lit_grpo.terminal.panels import SampleRow, show

GOLDEN = Path(__file__).parent / "golden"
METRICS = {"reward": 0.3125, "entropy": 1.2039, "length": 23.4, "tok/s": 1239.6, "my_metric": 7.0}
RUNNING = [
    Progress("start", 12.3),
    Progress("generate", 3.2, done=0, total=240),
    Progress("learn", 61.0, done=12, total=240, metrics=METRICS, left=133.0),
    Progress("evaluate", 4.0, done=120, total=240, part=(3, 10), metrics=METRICS, left=7384.0),
    Progress("evaluate", 4.0, part=(3, 10)),
    Progress("", 0.0, done=240, total=240, metrics=METRICS),
]
START = [
    ("recipe", "grpo"),
    ("model", "models/SmolLM2-135M-Instruct: 134.5 M parameters"),
    ("batch", "50 prompts x 20 completions = 1,000 a rollout, one optimizer step"),
    ("folder", "runs/exp1"),
]
END = [
    ("reward", "0.981 (mean of the last 10), best 0.990 at rollout 231"),
    ("folder", "runs/exp1"),
    ("next", "lit-grpo export --checkpoint runs/exp1/checkpoints/rollout-000240.ckpt --output models/exp1"),
]
SAMPLES = [SampleRow("6+4=", "10", 1.0), SampleRow("What is 8 + 5?\nAnswer.", "Let me think …  " * 10, 0.0)]


def console(width, environment, terminal=True):
    class Stream(io.StringIO):
        encoding = "utf-8"

        def isatty(self):
            return terminal

    return make_console(Stream(), width=width, _environ=environment, legacy_windows=False)


def shown(console: Console) -> str:
    for number, progress in enumerate(RUNNING):
        console.print(f"[{number}]")
        console.print(display(progress, console, console.width))
    show("Run exp1", START, console=console)
    show("Run exp1 finished after 240 rollouts", END, SAMPLES, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def check(name, text):
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("LIT_GRPO_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_a_terminal(width, locale, monkeypatch):
    monkeypatch.setenv("LC_ALL", locale)
    # As under NO_COLOR: what colours say is also said without.
    text = shown(console(width, {"TERM": "xterm", "NO_COLOR": "1"}))
    # Bold, dim and italic are no colours.
    assert set(re.findall(r"\x1b\[([0-9;]*)m", text)) <= {"0", "1", "2", "3", "1;2"}
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert all(len(row) <= width for row in plain.splitlines())
    # The words of a model are its own.
    assert locale != "C" or plain.replace("…", "").isascii()
    check(f"terminal-{width}-{'ascii' if locale == 'C' else 'utf8'}", plain)


@pytest.mark.parametrize("width", [80, 40])
def test_colours(width, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    coloured = shown(console(width, {"TERM": "xterm-256color"}))
    assert "\x1b[32m" in coloured
    check(f"terminal-{width}-colour", coloured)


def test_a_pipe(monkeypatch):
    pipe = console(80, {}, terminal=False)
    for progress in RUNNING:
        if progress.metrics and progress.part is None:
            pipe.file.write(line(progress) + "\n")
    show("Run exp1", START, console=pipe)
    show("Run exp1 finished after 240 rollouts", END, SAMPLES, pipe)
    text = pipe.file.getvalue()
    assert "\x1b" not in text
    check("pipe", text)
