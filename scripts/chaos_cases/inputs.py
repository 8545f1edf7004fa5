"""Malformed inputs: each must end in one screen, soon, and none may be taken in silence.

Everything heavy is imported once, and each input runs in a fork of that process, with the command line's own ``main``:
some two seconds each instead of ten.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.chaos_cases import input_cases, input_cases_of_code
from scripts.chaos_cases.input_cases import Case

SECONDS = 40.0
"""An input that has not ended by then hangs."""
MOST_LINES = 45
"""Longest error that is one screen."""
_OUTPUT = ".output"


@dataclass(frozen=True)
class Outcome:
    """How one input ended."""

    case: Case
    verdict: str
    """``screen``, ``accepted``, or what must not be: ``traceback``, ``hang``, ``long``, ``no screen``, ``other fault``,
    ``exit N``."""
    code: int
    seconds: float
    output: str

    @property
    def held(self) -> bool:
        """Whether a malformed input ended in one screen, and a right one ran."""
        return self.verdict == ("accepted" if self.case.accept else "screen")


def all_cases() -> list[Case]:
    """Make the whole corpus."""
    makers = (
        input_cases.yaml_files, input_cases.command_lines, input_cases.trainers, input_cases.contradictions,
        input_cases.data_files, input_cases_of_code.rewards, input_cases_of_code.scores, input_cases_of_code.models,
        input_cases.classes, input_cases.objectives, input_cases.words, input_cases.numbers,
    )  # fmt: skip
    return [case for make in makers for case in make()]


def judge(case: Case, code: int, output: str, hung: bool) -> str:
    """Say how an input ended, from its exit code and what it printed."""
    if hung:
        return "hang"
    if "Traceback (most recent call last)" in output:
        return "traceback"
    if code == 0:
        return "accepted"
    if code != 2:
        return f"exit {code}"
    begin = output.find(": error\n")
    if begin < 0:
        return "no screen"
    screen = output[begin:]
    if screen.count("\n") > MOST_LINES:
        return "long"
    return "screen" if case.mentions in screen else "other fault"


def run_cases(cases: Sequence[Case], workers: int = 2, seconds: float = SECONDS) -> Iterator[Outcome]:
    """Run each case in a fork of this process; yield outcomes as they come."""
    _import_everything()
    waiting = list(reversed(cases))
    running: dict[int, tuple[Case, Path, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            case = waiting.pop()
            folder = Path(tempfile.mkdtemp(prefix="input-"))
            _lay_out(case, folder)
            sys.stdout.flush()
            child = os.fork()
            if child == 0:
                _child(case, folder)
            running[child] = (case, folder, time.monotonic())
        time.sleep(0.01)
        for child, (case, folder, began) in list(running.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            spent = time.monotonic() - began
            hung = not done and spent > seconds
            if hung:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
            elif not done:
                continue
            else:
                # Workers of rewards that outlive their run.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child, signal.SIGKILL)
            output = (folder / _OUTPUT).read_text(errors="replace") if (folder / _OUTPUT).exists() else ""
            code = os.waitstatus_to_exitcode(status)
            yield Outcome(case, judge(case, code, output, hung), code, spent, output)
            del running[child]
            shutil.rmtree(folder, ignore_errors=True)


def _lay_out(case: Case, folder: Path) -> None:
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if case.setup is not None:
        case.setup(folder)


def _child(case: Case, folder: Path) -> None:
    """Run the command line in this process, and end it as the interpreter does."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        descriptor = os.open(_OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.environ.update(case.environment)
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        from lit_grpo.cli.main import main

        code = main([word.replace("{folder}", str(folder)) for word in case.argv])
    # As the interpreter would.
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _import_everything() -> None:
    """Import what a run imports, so that forks begin with it."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import mlflow.tracking  # noqa: F401
    import torch
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import lit_grpo.cli.lightning_cli
    import lit_grpo.commands.check.command
    import lit_grpo.rewards.math.verify  # noqa: F401

    torch.set_num_threads(1)


def _record(outcome: Outcome) -> dict[str, object]:
    return {
        "group": outcome.case.group,
        "name": outcome.case.name,
        "verdict": outcome.verdict,
        "held": outcome.held,
        "code": outcome.code,
        "seconds": round(outcome.seconds, 2),
        "output": outcome.output[-3000:],
    }


def table(outcomes: Iterable[Outcome]) -> str:
    """Count the outcomes by group, as a Markdown table."""
    outcomes = list(outcomes)
    rows = ["| group | inputs | one screen | right, and run | not as it must be |", "|---|---|---|---|---|"]
    groups = [*dict.fromkeys(o.case.group for o in outcomes), "all"]
    for group in groups:
        own = [o for o in outcomes if group in (o.case.group, "all")]
        counts = Counter(o.verdict for o in own if o.held)
        bad = Counter(o.verdict if o.verdict != "accepted" else "taken in silence" for o in own if not o.held)
        wrong = ", ".join(f"{count} {verdict}" for verdict, count in bad.items()) or "0"
        rows.append(f"| {group} | {len(own)} | {counts['screen']} | {counts['accepted']} | {wrong} |")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    """Run the corpus, print what did not hold and the table; exit code 1 if anything did not."""
    parser = argparse.ArgumentParser(prog="chaos.py inputs", description=__doc__)
    parser.add_argument("--only", default="", help="inputs whose group and name hold this text")
    parser.add_argument("--every", type=int, default=1, help="every n-th input only")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="an input that takes longer hangs")
    parser.add_argument("--list", action="store_true", help="print each input with its outcome")
    parser.add_argument("--output", help="JSON Lines file of all outcomes")
    options = parser.parse_args(argv)
    cases = [c for c in all_cases() if options.only in f"{c.group}: {c.name}"][:: options.every]
    began, outcomes = time.monotonic(), []
    for outcome in run_cases(cases, options.workers, options.seconds):
        outcomes.append(outcome)
        if options.list or not outcome.held:
            last = " / ".join(line.strip() for line in outcome.output.strip().splitlines()[-3:])
            case = outcome.case
            print(f"{outcome.verdict:12} {outcome.seconds:5.1f} s  {case.group}: {case.name}  | {last[:300]}")
    print(table(outcomes))
    seconds = sorted(o.seconds for o in outcomes)
    middle, total = seconds[len(seconds) // 2], time.monotonic() - began
    print(f"{len(outcomes)} inputs in {total:.0f} s; median {middle:.1f} s, longest {seconds[-1]:.1f} s")
    if options.output:
        Path(options.output).write_text("".join(json.dumps(_record(o)) + "\n" for o in outcomes))
    return int(not all(o.held for o in outcomes))
