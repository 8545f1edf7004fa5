"""``lit-grpo init``: write a project of one's own, which is to be changed until it is about something else.

It imports nothing heavy: it answers at once.
"""

from __future__ import annotations

import json
import shlex
from importlib.resources import files
from pathlib import Path
from string import Template

from lit_grpo.cli.argument_parser import CommandParser
from lit_grpo.errors import UserError
from lit_grpo.utils.files import write_atomically

EXAMPLES = """\
It writes config.yaml, data.jsonl, reward.py, test_reward.py and README.md. As they stand, a model learns to add two
digits: without --model a tiny one with random weights, which takes a CPU and no download.

examples:
  lit-grpo init sums
  lit-grpo init sums --model Qwen/Qwen2.5-0.5B-Instruct
"""
TINY = {
    "what": "A tiny model with random weights learns to add two digits from reward alone, on a CPU, in minutes.",
    "policy": (
        "  policy:\n"
        "    # Made on the spot. A real model in its place: `policy: {path: FOLDER or id of the hub}`.\n"
        '    tiny: {alphabet: "0123456789+=", layers: 2, width: 128, heads: 4}'
    ),
    "objective": (
        "    # The random model must first find out that some sums have two digits: the bonus keeps it looking.\n"
        "    entropy_coef: 0.03\n"
    ),
    "lr": "7.0e-4, schedule: cosine, final_lr_ratio: 0.1",
    "tokens": "16384", "prompts": "50", "group": "20", "rollouts": "240", "new_tokens": "3",
    "monitor": (
        " It stops nothing here: a random model is\n"
        "    # rarely right at first. Without `actions`, as with a real model, what is critical ends the run.\n"
        "    - {class_path: lit_grpo.callbacks.HealthMonitor, init_args: {actions: {critical: log}}}"
    ),
    "batch": ", batch_size: 1024", "strict": " and text == answer",
    "next": "A real model: `lit-grpo init ANOTHER --model PATH|ID` writes the same project around it.",
}  # fmt: skip
"""What stands in the templates for a tiny model."""
REAL = {
    "objective": "",
    "lr": "1.0e-6",
    "tokens": "4096", "prompts": "8", "group": "8", "rollouts": "60", "new_tokens": "16",
    "monitor": " What is critical ends it.\n    - {class_path: lit_grpo.callbacks.HealthMonitor}",
    "batch": "", "strict": "",
    "next": "On a GPU set `data.engine: {name: vllm}`, which samples many times faster.",
}  # fmt: skip
"""What stands in the templates for a model of the person's."""
FILES = ("config.yaml", "reward.py", "test_reward.py", "README.md")


def run(command: str, argv: list[str]) -> int:
    """Write the project, say what to type next, and return the exit code."""
    parser = CommandParser(command, "Write a project of your own that trains at once.", EXAMPLES)
    parser.add_argument("name", metavar="NAME", help="the folder to make; one that is there must be empty")
    parser.add_argument("--model", metavar="PATH|ID", help="begin with this model: a folder, or an id of the hub")
    options = parser.parse_args(argv)
    folder = Path(options.name)
    write_project(folder, options.model)
    print(f"A project of five files is in {folder}. Now type:\n")
    if folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(folder))}")
    print("  lit-grpo fit --config config.yaml --data.rollouts 2   # does it run?")
    print("  lit-grpo fit --config config.yaml\n")
    print("README.md says what each file is for, and what to change first.")
    return 0


def write_project(folder: Path, model: str | None) -> None:
    """Write the five files.

    Args:
        folder: where; made if it is missing.
        model: folder or hub id of the model to begin with; None: a tiny one of random weights.

    Raises:
        UserError: the folder is a file, is not empty or cannot be made, or the model is a folder that does not exist.
    """
    values = TINY if model is None else REAL | _about(_placed(model))
    if folder.is_symlink() or folder.exists():
        if not folder.is_dir():
            raise UserError(f"{folder} is there already, and no folder", where="NAME", remedy="choose another name")
        if any(folder.iterdir()):
            raise UserError(f"the folder {folder} is not empty", where="NAME", remedy="choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            template = Template((files(__package__) / "project" / f"{name}.template").read_text(encoding="utf-8"))
            write_atomically(folder / name, template.substitute(values, name=folder.resolve().name))
        write_atomically(
            folder / "data.jsonl", "".join(f"{json.dumps(row)}\n" for row in _rows(chat=model is not None))
        )
    except OSError as error:
        raise UserError(
            f"the project cannot be written: {error.strerror or error}",
            where=str(folder),
            remedy="choose another place",
        ) from error


def _placed(model: str) -> str:
    """Return the model as the configuration names it: a folder by its whole path, since the person goes elsewhere."""
    if not model.strip():
        raise UserError("the model has no name", where="--model", remedy="give a folder, or an id of the hub")
    path = Path(model).expanduser()
    if path.is_dir():
        return str(path.resolve())
    # An id of the hub has one slash at most, and no dot or tilde before it.
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(f"there is no folder {model}", where="--model", remedy="give a folder, or an id of the hub")
    return model


def _about(model: str) -> dict[str, str]:
    return {
        "what": f"The model {model} learns to add two digits and to answer with the number.",
        # As JSON, which is YAML too, whatever characters the path has.
        "policy": f"  policy: {{path: {json.dumps(model, ensure_ascii=False)}}}",
    }


def _rows(chat: bool) -> list[dict[str, str]]:
    question = "What is {a} + {b}? Answer with just the number." if chat else "{a}+{b}="
    return [
        {"question": question.format(a=a, b=b), "answer": str(a + b)} for a in range(10) for b in range(10)
    ]  # fmt: skip
