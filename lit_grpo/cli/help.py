"""``lit-grpo fit --help`` on one screen, and ``--help KEY`` for what stands behind it.

Everything is read from the source text of the classes, as for misspelt keys: nothing heavy is imported, and the answer
is there at once. ``--KEY.help CLASS`` is jsonargparse's, which imports the class.
"""

from __future__ import annotations

import ast
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lit_grpo.cli.errors.schema import PLAIN_KEYS, Field, read_schema, subclasses, trainer_defaults
from lit_grpo.errors import UserError
from lit_grpo.utils.bounds import Bound
from lit_grpo.utils.spelling import near_names

ALL = "all"
"""Word in the place of a key that lists every one."""
SUMMARIES = {
    "fit": "Train a policy with reinforcement learning.",
    "validate": "Evaluate on the held-out sets (data.val): pass@k, maj@k, best-of-k.",
    "test": "Evaluate on the test sets (data.test), benchmarks by name.",
    "predict": "Write completions for the questions of data.test.",
}
OVERVIEW = """\
usage: lit-grpo {command} --config FILE [--KEY VALUE ...]
{summary}

options:
  --config FILE     YAML; several are put on top of each other, later ones win
  --KEY VALUE       any key below, over the files: --model.optimizer.lr 1e-6
  --ckpt_path PATH  {checkpoint}
  --print_config    print the whole configuration, recipe included, and end
  --help KEY        describe a key and all below it: --help model.objective;
                    --help all: every key
  --KEY.help CLASS  arguments of a class: --data.rewards.help
                    lit_grpo.rewards.MathReward

keys:
"""
CHECKPOINT = {"fit": "go on from a checkpoint: a path, `last` or `best`"}
_EVALUATED = "the checkpoint that is evaluated: a path, `last` or `best`"
_LISTED_BELOW = ("model", "data")
"""Groups so large that the overview names their groups too."""


@dataclass(frozen=True)
class Entry:
    """One key of the configuration."""

    key: str
    field: Field

    @property
    def children(self) -> Mapping[str, Field]:
        """The keys below, of a dataclass that may be left out as well."""
        return self.field.group or (self.field.optional.fields if self.field.optional is not None else {})


def help_of_class(argv: Sequence[str]) -> list[str]:
    """Return the arguments of a command of which ``--KEY.help`` is left alone, where it is one of them.

    jsonargparse reads what stands behind it as options of the class, and refuses all others.
    """
    for word, following in zip(argv, [*argv[1:], "--"], strict=False):
        if word.startswith("--") and word.partition("=")[0].endswith(".help"):
            value = [] if "=" in word or following.startswith("-") else [following]
            return [word, *value]
    return list(argv)


def wanted(argv: list[str]) -> str | None:
    """Return the key that ``--help`` asks for, "" for the overview; None where no help is asked for."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        option, equals, value = word.partition("=")
        if option in ("-h", "--help"):
            if equals:
                return value
            return "" if following.startswith("-") else following
    return None


def help_text(command: str, key: str, width: int | None = None) -> str:
    """Return the help of a command, or of one of its keys.

    Args:
        command: fit, validate, test or predict.
        key: dotted key; "" for the overview, ``all`` for every key.
        width: columns; None: those of the terminal, 100 at most.

    Raises:
        UserError: there is no such key; names those that are near.
    """
    width = width or max(40, min(100, shutil.get_terminal_size((80, 24)).columns))
    top = Entry("", Field(group=read_schema(command).fields))
    if not key:
        return _overview(command, top, width)
    if key == ALL:
        return "\n".join(_described(one, width) for one in entries(top) if one.key) + "\n"
    key = key.removeprefix("--").replace(".init_args.", ".").rstrip(".+")
    found = next((one for one in entries(top) if one.key == key), None)
    if found is None:
        raise _unknown(command, key, top)
    return _page(command, found, width)


def entries(of: Entry) -> Iterator[Entry]:
    """Yield a key and all keys below it, depth first."""
    yield of
    for name, field in of.children.items():
        yield from entries(Entry(f"{of.key}.{name}".removeprefix("."), field))


# Screens.


def _overview(command: str, top: Entry, width: int) -> str:
    rows: list[tuple[str, str]] = []
    others: list[str] = []
    for name, field in top.field.group.items():
        if name in ("config", "ckpt_path"):
            continue
        if name in _LISTED_BELOW:
            single = [child for child, below in field.group.items() if not below.group]
            rows += [(f"{name}.{c}", _first(below.doc)) for c, below in field.group.items() if below.group]
            rows.append((f"{name}.*", ", ".join(single)))
        elif field.group or name in PLAIN_KEYS:
            rows.append((name, _first(field.doc)))
        else:
            others.append(name)
    if others:
        rows.append(("others", ", ".join(others)))
    text = OVERVIEW.format(command=command, summary=SUMMARIES[command], checkpoint=CHECKPOINT.get(command, _EVALUATED))
    widest = max(len(name) for name, _ in rows)
    room = max(20, width - widest - 4)
    for name, doc in rows:
        # Names of keys are listed whole, a description by its beginning.
        listed = name.endswith(".*")
        lines = textwrap.wrap(doc, room) if listed else [textwrap.shorten(doc, room, placeholder=" ...")]
        text += "".join(f"  {name if number == 0 else '':<{widest}}  {line}\n" for number, line in enumerate(lines))
    return text


def _page(command: str, entry: Entry, width: int) -> str:
    lines = [_described(entry, width)]
    if entry.field.takes_class and entry.field.annotation is not None:
        lines.append(f"\nArguments of a class: lit-grpo {command} --{entry.key}.help CLASS")
        names = {node.id for node in ast.walk(entry.field.annotation) if isinstance(node, ast.Name)}
        if known := subclasses(names):
            lines.append("Classes of lit-grpo:\n" + "\n".join(f"  {one}" for one in known))
    children = [Entry(f"{entry.key}.{name}", field) for name, field in entry.children.items()]
    lines += [f"\n{_described(child, width)}" for child in children]
    return "\n".join(line.rstrip("\n") for line in lines) + "\n"


def _described(entry: Entry, width: int) -> str:
    """Return a key with its type, default and description."""
    head = entry.key
    field = entry.field
    if field.group:
        head += "  (keys below)"
    else:
        facts = [type_in_words(field)]
        default = default_in_words(entry)
        facts.append("required" if default is None else f"default: {default}")
        head += "  (" + "; ".join(fact for fact in facts if fact) + ")"
    lines = textwrap.wrap(head, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    lines += textwrap.wrap(plain(field.doc), width, initial_indent="    ", subsequent_indent="    ")
    if entry.children and not field.group:
        lines += [f"    keys below: {', '.join(entry.children)}"] if len(entry.children) < 8 else []
    return "\n".join(lines) + "\n"


def _unknown(command: str, key: str, top: Entry) -> UserError:
    keys = [one.key for one in entries(top) if one.key]
    last = key.rpartition(".")[2]
    # The same last name elsewhere first, then what is spelt alike as a whole or in its last part.
    near = [one for one in keys if one.rpartition(".")[2] == last]
    near += near_names(key, keys, 3)
    names = near_names(last, [one.rpartition(".")[2] for one in keys])
    near += [one for name in names for one in keys if one.rpartition(".")[2] == name]
    near = list(dict.fromkeys(near))[:4]
    above = next((one for one in entries(top) if one.field.takes_class and key.startswith(f"{one.key}.")), None)
    if above is not None:
        remedy = f"its keys are those of a class: lit-grpo {command} --{above.key}.help CLASS lists them"
    elif near:
        remedy = f"did you mean {' or '.join(f'--help {one}' for one in near)}?"
    else:
        remedy = f"lit-grpo {command} --help lists the keys"
    return UserError(f"there is no key {key!r}", where="--help", remedy=remedy)


# Words for what the source text says.


def plain(doc: str) -> str:
    """Return a docstring's text without its markup: ``x`` becomes `x`, :class:`a.b.C` becomes C."""
    doc = re.sub(r":\w+:`~?!?(?:[\w.]*\.)?([\w.]+)`", r"\1", doc)
    # Lightning's descriptions name defaults, some of which are others here; the one that holds stands beside the type.
    doc = re.sub(r"\s*Defaults?(?: to|:) ``[^`]*``\.?", "", doc)
    text = " ".join(doc.replace("``", "`").split())
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith((".", ":", "?", "!")) else ".")


def _first(doc: str) -> str:
    """Return the first sentence of a description, without its full stop."""
    return re.split(r"(?<=[a-z)`])[.;](?:\s|$)", plain(doc), maxsplit=1)[0]


def default_in_words(entry: Entry) -> str | None:
    """Return the default of a key as YAML would have it; None where it has none."""
    own = trainer_defaults()
    if entry.key.startswith("trainer.") and (name := entry.key.removeprefix("trainer.")) in own:
        value = own[name]
        return value["class_path"] if isinstance(value, dict) else _yaml(value)
    if entry.key in ("config", "seed_everything", "monitors"):
        return {"config": "none", "seed_everything": "0", "monitors": "true"}[entry.key]
    node = entry.field.default
    if node is None:
        return None
    if isinstance(node, ast.Call):
        factory = next((one.value for one in node.keywords if one.arg == "default_factory"), None)
        if isinstance(factory, ast.Lambda):
            return ast.unparse(factory.body)
        return {"dict": "{}", "list": "[]", "tuple": "[]"}.get(ast.unparse(factory), "") if factory else ""
    try:
        return _yaml(ast.literal_eval(node))
    except ValueError:
        return ast.unparse(node)


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def type_in_words(field: Field) -> str:
    """Return the type of a key as a person reads it: choices, range, whether null may stand there."""
    if field.annotation is None:
        return ""
    words = dict.fromkeys(_types(field.annotation))
    if field.choices:
        null = [word for word in words if word == "null"]
        return " | ".join([*field.choices, *null])
    return " or ".join(words)


def _types(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _types(node.left)
        yield from _types(node.right)
    elif isinstance(node, ast.Subscript):
        name = ast.unparse(node.value).rpartition(".")[2]
        inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Annotated":
            first, *others = _types(inner[0])
            bound = next((_bound(one) for one in inner[1:] if isinstance(one, ast.Call)), "")
            yield f"{first} {bound}".strip()
            yield from others
        elif name == "Optional":
            yield from _types(inner[0])
            yield "null"
        elif name == "Union":
            for one in inner:
                yield from _types(one)
        elif name == "Literal":
            yield from (str(ast.literal_eval(one)) for one in inner)
        elif name in ("list", "List", "Iterable", "Sequence", "tuple"):
            yield f"list of {next(_types(inner[0]))}"
        elif name in ("dict", "Dict", "Mapping"):
            yield "mapping"
        else:
            yield name
    elif isinstance(node, ast.Constant):
        yield "null" if node.value is None else str(node.value)
    else:
        name = ast.unparse(node).rpartition(".")[2]
        yield {"int": "whole number", "float": "number", "str": "text", "bool": "true or false", "Any": "anything"}.get(
            name, "text or number" if name.startswith("_") else name
        )


def _bound(call: ast.Call) -> str:
    """Return the range that ``Bound(...)`` of the source text declares."""
    values = {one.arg: ast.literal_eval(one.value) for one in call.keywords if one.arg is not None}
    return str(Bound(**values))
