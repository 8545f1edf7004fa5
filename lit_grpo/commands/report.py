"""``lit-grpo report``: write the page of a run folder or of an MLflow run."""

from __future__ import annotations

from pathlib import Path

from lit_grpo.cli.argument_parser import CommandParser
from lit_grpo.report.mlflow_run import open_run
from lit_grpo.report.run import how_it_ended, main_episode
from lit_grpo.run.folder import shown

EXAMPLES = """\
examples:
  lit-grpo report runs/NAME
  lit-grpo report 666024de588c4f358df6c14d1fcfdae2 --tracking-uri sqlite:///runs/mlflow.db

A run folder gets report.html and report/*.png; a run of MLflow gets them in a folder of its name here.
"""


def run(command: str, argv: list[str]) -> int:
    """Write the report, print where it is, and return the exit code."""
    parser = CommandParser(
        command, "Write one HTML page on a run: curves, diagnosis, evidence, times, completions.", EXAMPLES
    )
    parser.add_argument("run", metavar="RUN", help="run folder, id of an MLflow run, or mlruns/EXPERIMENT/ID")
    parser.add_argument("--output", metavar="FOLDER", help="where to write; the run folder if left out")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow store or server that holds the run")
    args = parser.parse_args(argv)
    from lit_grpo.report.page import write_report

    with open_run(args.run, args.tracking_uri) as opened:
        given = Path(args.run)
        is_run_folder = (given / "metrics.jsonl").exists() or (given / "flight").is_dir()
        # A run of MLflow has no folder here that a report belongs into.
        default = given if is_run_folder else Path(f"report-{_safe(opened.name)}")
        folder = Path(args.output) if args.output else default
        path = write_report(opened, folder)
        main = main_episode(opened)
        print(f"{opened.name} {how_it_ended(opened).text}")
        if main is not None:
            over = "" if main.over is None else f", over at step {main.over}"
            event = main.event
            print(f"{event.get('severity')} at step {event['step']}{over}: {event.get('explanation')}")
        for note in opened.notes:
            print(f"note: {note}")
        print(f"report: {shown(path.absolute())}")
    return 0


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
