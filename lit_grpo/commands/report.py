"""``lit-grpo report``: write the page of a run, or of several."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from lit_grpo.cli.argument_parser import CommandParser
from lit_grpo.errors import UserError
from lit_grpo.report.mlflow_run import open_run
from lit_grpo.report.run import Run, how_it_ended, is_run_folder, main_episode
from lit_grpo.run.folder import shown

EXAMPLES = """\
examples:
  lit-grpo report runs/NAME
  lit-grpo report runs/NAME runs/OTHER --output compared
  lit-grpo report 666024de588c4f358df6c14d1fcfdae2 --tracking-uri sqlite:///runs/mlflow.db

A run folder gets report.html and report/*.png; a run of MLflow gets them in a folder of its name here.
Several runs get one page: their curves upon each other, and the settings in which they differ.
"""


def run(command: str, argv: list[str]) -> int:
    """Write the report, print where it is, and return the exit code."""
    parser = CommandParser(
        command, "Write one HTML page on a run: curves, diagnosis, evidence, times, completions.", EXAMPLES
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="run folder, id of an MLflow run, or mlruns/EXPERIMENT/ID; or several"
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="where to write; the run folder if left out, runs-compared for several"
    )
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow store or server that holds the run")
    args = parser.parse_args(argv)
    if len(args.runs) > 1:
        return _compare(_without_others(args.runs), args.tracking_uri, Path(args.output or "runs-compared"))
    from lit_grpo.report.page import write_report

    with open_run(args.runs[0], args.tracking_uri) as opened:
        given = Path(args.runs[0])
        # A run of MLflow has no folder here that a report belongs into.
        default = given if is_run_folder(given) else Path(f"report-{_safe(opened.name)}")
        folder = Path(args.output) if args.output else default
        path = write_report(opened, folder)
        print(f"{opened.name} {how_it_ended(opened).text}")
        _print_quality(opened)
        if (main := main_episode(opened)) is not None:
            over = "" if main.over is None else f", over at step {main.over}"
            event = main.event
            print(f"{event.get('severity')} at step {event['step']}{over}: {event.get('explanation')}")
        for note in opened.notes:
            print(f"note: {note}")
        print(f"report: {shown(path.absolute())}")
    return 0


def _without_others(given: list[str]) -> list[str]:
    """Leave out what is there and is no run: ``runs/*`` names MLflow's store and artifacts too. Says what that was."""
    others = [one for one in given if Path(one).exists() and not is_run_folder(Path(one))]
    # Where none is left, the first is refused by the words that belong to it; mlruns/EXPERIMENT/ID is a run of MLflow.
    others = [one for one in others if not (Path(one) / "meta.yaml").exists()]
    if not others or len(others) == len(given):
        return given
    print(f"left out, no runs: {', '.join(others)}")
    return [one for one in given if one not in others]


def _compare(wheres: list[str], tracking_uri: str | None, folder: Path) -> int:
    from lit_grpo.report.compare import write_comparison

    if is_run_folder(folder):
        raise UserError(
            f"{shown(folder.absolute())} is a run, whose own report would be lost",
            where="--output",
            remedy="name another folder",
        )
    with ExitStack() as stack:
        opened = [stack.enter_context(open_run(where, tracking_uri)) for where in wheres]
        path = write_comparison(opened, folder)
        for one in opened:
            print(f"{one.name} {how_it_ended(one).text}")
            _print_quality(one)
            for note in one.notes:
                print(f"note: {note}")
    print(f"report: {shown(path.absolute())}")
    return 0


def _print_quality(run: Run) -> None:
    from lit_grpo.report.curves import scores

    found = [f"{one.name} {one.value}" + (f" ± {one.error}" if one.error else "") for one in scores(run)]
    if found:
        print("  " + ", ".join(found))


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
