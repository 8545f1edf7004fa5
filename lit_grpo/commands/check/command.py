"""``lit-grpo check``: look at a configuration before GPU hours are spent on it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from lit_grpo.cli.argument_parser import CommandParser
from lit_grpo.cli.config_files import config_files
from lit_grpo.cli.main import DONE, FAILED
from lit_grpo.cli.training import read_configuration
from lit_grpo.errors import StopRun, UserError
from lit_grpo.utils.logging import log_level

EXAMPLES = """\
Everything else is as for `lit-grpo fit`: several --config, and any key as --data.group_size 16.
Nothing is written but the table, FILE, and with data.engine.processes: auto on a card how many engine processes are
fastest there (~/.cache/lit-grpo), which later runs take. The exit code is 0 if nothing failed, else 1; 2 for bad input.
What the run needs (model, data, packages, cards, memory, disk) is said first, from the settings alone.

examples:
  lit-grpo check --config configs/quickstart.yaml
  lit-grpo check --config configs/papers/dapo.yaml --needs     # for a run on other machines; fetches and loads nothing
  lit-grpo check --config configs/gsm8k_smollm2_cpu.yaml --prompts 16 --json check.json
"""


def run(command: str, argv: list[str]) -> int:
    """Run the preflight, print the table, and return the exit code."""
    parser = CommandParser(command, "Look at a configuration before GPU hours are spent on it.", EXAMPLES)
    parser.add_argument("--config", metavar="FILE", action="append", help="as for fit; may be given several times")
    parser.add_argument("--prompts", metavar="N", type=int, default=32, help="prompts to sample from (32)")
    parser.add_argument("--gold-format", metavar="TEXT", help="how the verifier wants an answer, with {answer} in it")
    parser.add_argument("--no-step", action="store_true", help="leave out the training step: no memory, no time")
    parser.add_argument("--needs", action="store_true", help="say what the run needs, and load and fetch nothing")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    args, fit_argv = parser.parse_known_args(argv)
    if args.prompts < 1:
        raise UserError(f"--prompts is {args.prompts}, must be at least 1", where="command line")
    if args.gold_format is not None and "{answer}" not in args.gold_format:
        raise UserError("--gold-format has no {answer}", where="command line", remedy=r"as in '\boxed{{answer}}'")
    # The arguments of `fit`: --config, which this parser takes so that its --help lists it, is put back.
    fit_argv = [*(word for file in args.config or [] for word in ("--config", file)), *fit_argv]
    layers = read_configuration("fit", fit_argv, parser.options(), start_engine=not args.needs)
    warnings.filterwarnings("ignore", message=".*in eval mode at the start of training.*")
    from lit_grpo.cli.lightning_cli import BuildOnlyCLI, ParseOnlyCLI
    from lit_grpo.commands.check.needs import needs
    from lit_grpo.commands.check.preflight import Preflight
    from lit_grpo.commands.check.prompts import rendered
    from lit_grpo.commands.check.result import Result, show, write_json

    about: dict[str, Any] = {"config": config_files(fit_argv, "fit"), "prompts": args.prompts}
    if args.needs:
        needed = list[Result]()
        ParseOnlyCLI(fit_argv, layers, lambda settings: needed.extend(needs(settings)))
        show(needed)
        if args.json:
            write_json(needed, Path(args.json), about)
            print(f"results: {args.json}")
        return DONE

    def show_needs(settings: dict[str, Any]) -> None:
        # At once: where the model or the data is missing, the check ends before its own table.
        show(needs(settings), count=False)

    preflight = Preflight(args.prompts, step=not args.no_step, gold_format=args.gold_format)
    # Lightning's notes do not belong among the lines of the table.
    with log_level("lightning.pytorch.utilities.rank_zero", logging.WARNING):
        cli = BuildOnlyCLI(fit_argv, layers, [preflight], before=show_needs, limit_train_batches=1, limit_val_batches=0)
        try:
            cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        except (UserError, KeyboardInterrupt, SystemExit):
            raise
        # Whatever engine, reward or step raise is what the preflight is there to find.
        except Exception as error:
            preflight.results.append(failure(preflight.activity, error))
    if not cli.trainer.is_global_zero:
        return DONE
    results: list[Result] = preflight.results
    show(results)
    if shown := rendered(results):
        print(shown)
    if args.json:
        write_json(results, Path(args.json), about)
        print(f"results: {args.json}")
    return FAILED if any(r.status == "fail" for r in results) else DONE


def failure(activity: str, error: Exception) -> Any:
    """Return the table's line for an error that was raised during ``activity``."""
    from lit_grpo.commands.check.result import Result

    text = error.reason if isinstance(error, StopRun) else str(error).strip() or type(error).__name__
    text = text if len(text) <= 600 else f"{text[:600]} ..."
    name = type(error).__name__
    if "out of memory" in text.lower():
        remedy = "lower model.micro_batch_tokens or data.engine.gpu_memory_utilization, set model.policy.logits_chunk"
    elif isinstance(error, StopRun):
        remedy = "the run itself would stop here"
    else:
        remedy = "LIT_GRPO_DEBUG=1 lit-grpo fit with the same arguments shows where"
    return Result("one step" if "step" in activity else "sampling", "fail", f"while {activity}: {name}: {text}", remedy)
