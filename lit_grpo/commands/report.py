"""``lit-grpo report RUN``: write the page of a run folder or of an MLflow run."""

from __future__ import annotations

from pathlib import Path

from lit_grpo.cli.argument_parser import CommandParser
from lit_grpo.report.mlflow_run import open_run
from lit_grpo.report.run import how_it_ended, main_diagnosis
from lit_grpo.run.folder import shown

EXAMPLES = """\
examples:
  lit-grpo report runs/NAME
  lit-grpo report 666024de588c4f358df6c14d1fcfdae2 --tracking-uri sqlite:///runs/mlflow.db

A run folder gets report.html and report/*.png; a run of MLflow gets them in a folder of its name here.
"""


def run(command: str, argv: list[str]) -> int:
    """Write the report and say where it is; 0, or a :class:`lit_grpo.errors.UserError`."""
    parser = CommandParser(
        command, "Write one HTML page on a run: curves, diagnosis, evidence, times, completions.", EXAMPLES
    )
    parser.add_argument("run", metavar="RUN", help="run folder, id of an MLflow run, or mlruns/EXPERIMENT/ID")
    parser.add_argument("--output", metavar="FOLDER", help="where to write; the run folder if left out")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow store or server that holds the run")
    args = parser.parse_args(argv)
    from lit_grpo.report.page import write_report

    with open_run(args.run, args.tracking_uri) as found:
        own = (Path(args.run) / "metrics.jsonl").exists() or (Path(args.run) / "flight").is_dir()
        folder = Path(args.output) if args.output else Path(args.run) if own else Path(f"report-{_safe(found.name)}")
        path = write_report(found, folder)
        main = main_diagnosis(found)
        print(f"{found.name} {how_it_ended(found)}")
        if main is not None:
            print(f"{main.get('severity')} at step {main['step']}: {main.get('explanation')}")
        for note in found.notes:
            print(f"note: {note}")
        print(f"report: {shown(path.absolute())}")
    return 0


def _safe(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
