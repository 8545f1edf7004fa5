"""The command ``lit-grpo``: its table of subcommands, exit codes and error screen.

Nothing heavy is imported here, so that ``lit-grpo --help`` answers at once.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lit_grpo.errors import EngineError, StopRun, UserError
from lit_grpo.terminal.library_output import LibraryOutput, library_output_to_file
from lit_grpo.utils.spelling import nearest

DONE, FAILED, BAD_INPUT, STOPPED, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143
"""Exit codes: done, error in the program, bad input, stopped by a monitor, Ctrl-C (128 + 2), SIGTERM (128 + 15)."""

_LAST_LINES = 20
"""Lines of what libraries said that are shown where they are in no file."""


@dataclass(frozen=True)
class Command:
    """One subcommand of ``lit-grpo``.

    Attributes:
        name: the word that is typed after ``lit-grpo``.
        summary: the line about it in ``lit-grpo --help``.
        function: ``module:name`` of a function that takes the command's name and arguments and returns an exit code.
    """

    name: str
    summary: str
    # As text, so that only the chosen command's module is imported.
    function: str


COMMANDS = (
    Command("init", "write a project of your own that trains at once", "lit_grpo.commands.init.command:run"),
    Command("fit", "train a policy; --ckpt_path goes on from a checkpoint", "lit_grpo.cli.training:run"),
    Command("validate", "evaluate on the held-out sets (data.val): pass@k, maj@k, ...", "lit_grpo.cli.training:run"),
    Command("test", "evaluate on the test sets (data.test), benchmarks by name", "lit_grpo.cli.training:run"),
    Command("predict", "write completions for the questions of data.test", "lit_grpo.cli.training:run"),
    Command("check", "look at a configuration before GPU hours are spent on it", "lit_grpo.commands.check.command:run"),
    Command(
        "filter",
        "sample the training prompts, keep those of the wanted pass rate",
        "lit_grpo.commands.filter.command:run",
    ),
    Command("report", "write one HTML page on a run: curves, diagnosis, completions", "lit_grpo.commands.report:run"),
    Command("score", "score ready completions with any reward; needs no model", "lit_grpo.commands.score:run"),
    Command("export", "turn a checkpoint into a Hugging Face model folder", "lit_grpo.commands.export:run"),
    Command("schema", "write the JSON schema of the configuration, for editors", "lit_grpo.commands.schema:run"),
    Command("completion", "print a script that completes words in bash or zsh", "lit_grpo.commands.completion:run"),
)

HELP = """\
usage: lit-grpo COMMAND [options]
Train language models with reinforcement learning from verifiable rewards.

commands (lit-grpo COMMAND --help lists the options of one):
{commands}

configuration of fit, validate, test and predict:
  --config FILE     YAML; several are put on top of each other, later ones win
  --model.optimizer.lr 1e-6       any key of the YAML, over the files
  LIT_GRPO_FIT__DATA__ROLLOUTS=9  the same in the environment, below the files

examples:
  lit-grpo init my_project
  lit-grpo fit --config configs/quickstart.yaml
  lit-grpo fit --config runs/NAME/config.yaml \\
    --ckpt_path runs/NAME/checkpoints/last.ckpt
  lit-grpo export --checkpoint runs/NAME/checkpoints/last.ckpt --output models/x
  lit-grpo score --input pairs.jsonl --config reward.yaml

A run leaves its metrics, configuration, checkpoints, curves and report in
runs/NAME, and an MLflow run in runs/mlflow.db.
Ctrl-C ends it after the rollout under way and saves it; a second Ctrl-C or
SIGTERM ends it within 10 seconds.
exit codes: 0 done, 1 error, 2 bad input, 3 stopped by a monitor, 130 Ctrl-C,
143 SIGTERM.
LIT_GRPO_DEBUG=1 shows the traceback of an error that else ends in one screen.
LIT_GRPO_LOG=debug tells what a run begins and ends to wait for, and shows what
libraries say, which else goes to log.txt in the folder of the run.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; the console script's entry point."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _take_any_text(sys.stdout, sys.stderr)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(len(command.name) for command in COMMANDS)
        print(HELP.format(commands="\n".join(f"  {c.name:<{width}}  {c.summary}" for c in COMMANDS)), end="")
        return DONE
    if arguments[0] in ("-V", "--version"):
        print(f"lit-grpo {_version()}")
        return DONE
    # Only where nobody has put one of their own: a program that calls main() keeps its hook.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_traceback
    try:
        with library_output_to_file(_configure_logging()) as output:
            try:
                return _run(arguments[0], arguments[1:])
            except Exception as error:
                _show_what_libraries_said(output, error)
                raise
    except UserError as error:
        _show(error, arguments[0])
        return BAD_INPUT
    except StopRun as error:
        print(f"lit-grpo: stopped: {error.reason}", file=sys.stderr)
        return STOPPED
    except EngineError as error:
        print(f"lit-grpo: the rollout engine failed: {_masked(str(error))}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("lit-grpo: interrupted", file=sys.stderr)
        return INTERRUPTED
    # Returned and not raised, so that a program that calls main() goes on.
    except SystemExit as error:
        return _exit_code(error)
    except Exception as error:
        # Only where torch is loaded already: importing it takes seconds, and what fails before needs no memory.
        memory = sys.modules.get("lit_grpo.utils.memory")
        if memory is not None and memory.is_out_of_memory(error):
            _show(memory.screen_of(error), arguments[0])
            return BAD_INPUT
        # By its name: importing the class would import the rewards.
        if type(error).__name__ != "RewardError":
            raise
        sys.stdout.flush()
        print(f"lit-grpo: {_masked(str(error))}", file=sys.stderr, flush=True)
        return FAILED
    finally:
        # A program that calls main() goes on. The process of the console script ends here, and may hang in doing so.
        if argv is not None and (watchdog := sys.modules.get("lit_grpo.cli.watchdog")) is not None:
            watchdog.disarm()


def _take_any_text(*streams: Any) -> None:
    """Let streams write letters that they do not carry as numbers, in the place of an error that ends a run.

    Names of folders, questions and completions may hold any letter, and PYTHONIOENCODING may be ascii.
    """
    for stream in streams:
        if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _run(name: str, argv: list[str]) -> int:
    command = _find(name)
    module, _, function = command.function.partition(":")
    code: int = getattr(importlib.import_module(module), function)(command.name, argv)
    return code


def _show_what_libraries_said(output: LibraryOutput, error: Exception) -> None:
    """Point to what libraries said before a failure that may be theirs; print its end where it is in no file."""
    if isinstance(error, UserError | StopRun) or type(error).__name__ == "RewardError":
        return
    if output.path is not None:
        print(f"lit-grpo: what libraries said before is in {output.path}", file=sys.stderr, flush=True)
    elif lines := output.unwritten()[-_LAST_LINES:]:
        text = "".join(f"  {line}" for line in lines)
        print(f"lit-grpo: what libraries said before:\n{_masked(text)}", file=sys.stderr, end="", flush=True)


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an error in the program as Python does, without the secrets that a message may quote."""
    import traceback

    print(_masked("".join(traceback.format_exception(kind, error, trace))), file=sys.stderr, end="")


def _masked(text: str) -> str:
    from lit_grpo.utils.secrets import masked_screen

    return masked_screen(text)


def _configure_logging() -> int:
    """Send the messages of ``lit_grpo`` to standard error from the level that ``LIT_GRPO_LOG`` names on.

    Returns:
        The level from which on messages of libraries are shown too: the same, or errors alone.
    """
    level = os.environ.get("LIT_GRPO_LOG", "").upper()
    if not level:
        return logging.ERROR
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    if level not in levels:
        raise UserError(
            f"there is no log level {level.lower()!r}",
            where="environment variable LIT_GRPO_LOG",
            remedy=f"choose one of {', '.join(levels).lower()}",
        )
    logger = logging.getLogger("lit_grpo")
    logger.setLevel(level)
    # The rank and the process: with a hang one wants to see which of them is behind the others.
    rank = os.environ.get("LOCAL_RANK", "0")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} pid %(process)d %(name)s: %(message)s"))
    # Assigned, not added: a second call in one process must not print every message twice.
    logger.handlers = [handler]
    return logger.level


def _find(name: str) -> Command:
    for command in COMMANDS:
        if command.name == name:
            return command
    names = [command.name for command in COMMANDS]
    if name.startswith("-"):
        raise UserError(f"the command comes first: {', '.join(names)}", where=name, remedy=f"lit-grpo fit {name} ...")
    near = nearest(name, names)
    raise UserError(
        f"there is no command {name!r}",
        where="command line",
        remedy=f"did you mean {near!r}?" if near else f"choose one of {', '.join(names)}",
    )


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("lit-grpo")
    except PackageNotFoundError:
        return "(not installed)"


def _exit_code(error: SystemExit) -> int:
    # Lightning leaves with SystemExit both after SIGTERM (without a code) and after Ctrl-C (with code 1). Its class is
    # told by name, since importing it would import Lightning.
    if any(cls.__name__ == "SIGTERMException" for cls in type(error).__mro__):
        return TERMINATED
    if isinstance(error.__context__, KeyboardInterrupt):
        return INTERRUPTED
    if error.code is None:
        return DONE
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return FAILED


def _show(error: UserError, command: str) -> None:
    """Print an error as one screen on standard error."""
    # From the first process only, since every rank finds the same fault; but memory may run out on one of them alone.
    if os.environ.get("LOCAL_RANK", "0") != "0" and type(error).__name__ != "MemoryShortageError":
        return
    if os.environ.get("LIT_GRPO_DEBUG", "") not in ("", "0"):
        import traceback

        print(_masked("".join(traceback.format_exception(error))), file=sys.stderr)
    from lit_grpo.cli.errors.terminal import render
    from lit_grpo.utils.secrets import masked_screen

    # What the command has printed comes first where both streams go to one file.
    sys.stdout.flush()
    print(masked_screen(render(error, command)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
