"""The configuration files of a command as YAML trees, which tell in which file and line a key stands."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lit_grpo.errors import UserError
from lit_grpo.utils.spelling import near_files
from lit_grpo.utils.text import shorten

MOST_BYTES = 1_000_000
"""Largest configuration file that is read."""
MOST_NODES = 100_000
"""Most keys and values of a file, with aliases written out."""
MOST_LEVELS = 50
"""Most levels of keys and lists inside each other."""
MOST_DIGITS = 400
"""Most digits of a number: the largest that any setting could hold has 309."""


@dataclass(frozen=True)
class Place:
    """A line of a configuration file, counted from 1."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        # A line that fills the screen would hide what is wrong with it.
        return f"{self.file}:{self.line}\n{self.line:>4} | {shorten(self.text.rstrip(), 200)}"


@dataclass
class Layer:
    """One configuration file as a tree of YAML nodes."""

    file: str
    lines: list[str]
    root: MappingNode | None

    def place(self, node: Node) -> Place:
        """Return the line at which a node begins."""
        line = node.start_mark.line
        return Place(self.file, line + 1, self.lines[line] if line < len(self.lines) else "")


def config_files(argv: Sequence[str], command: str) -> list[str]:
    """List the files that ``--config`` (or ``-c``) names, in order, behind the one that the environment names."""
    files = [os.environ[name] for name in (f"LIT_GRPO_{command.upper()}__CONFIG",) if os.environ.get(name)]
    words = iter(argv)
    for word in words:
        if word in ("-c", "--config"):
            if (value := next(words, None)) is not None:
                files.append(value)
        elif word.startswith("--config="):
            files.append(word.removeprefix("--config="))
        elif is_config_option(word):
            files.append(word.removeprefix("-c").removeprefix("="))
    return files


def is_config_option(word: str) -> bool:
    """Tell ``-c``, ``-c=FILE`` and ``-cFILE`` from a long option that is one dash short."""
    return word == "-c" or word.startswith("-c=") or (word.startswith("-c") and Path(word[2:]).suffix != "")


def read_layers(argv: Sequence[str], command: str) -> list[Layer]:
    """Read every configuration file of a command, in the order in which later ones win.

    Raises:
        UserError: a file is missing, is not YAML, is no mapping, or holds a key twice.
    """
    return [_read(file) for file in config_files(argv, command)]


def _read(file: str) -> Layer:
    path = Path(file)
    if not file or file.startswith("-"):
        raise UserError(
            "--config has no file behind it", where="command line", remedy="name a YAML file: --config FILE"
        )
    if path.is_dir():
        there = ", ".join(_configurations(path)[:8])
        what = f"{file} is a folder, and a configuration is a file"
        raise UserError(
            what, where="--config", remedy=f"it has {there}" if there else "name a YAML file: --config FILE"
        )
    if not path.is_file():
        raise UserError(f"there is no configuration file {file}", where="--config", remedy=_similar_file(path))
    try:
        size = path.stat().st_size
        text = path.read_text(encoding="utf-8") if size <= MOST_BYTES else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration file {file} cannot be read: {error}", where="--config") from error
    if size > MOST_BYTES:
        raise UserError(
            f"the file has {size:,} bytes, which is no configuration",
            where=file,
            remedy=f"give a YAML file of at most {MOST_BYTES:,} bytes; data goes under data.prompts",
        )
    lines = text.splitlines()
    try:
        # Composed and not loaded, because nodes know their line and values do not.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line if mark else 0
        place = Place(file, line + 1, lines[line] if line < len(lines) else "")
        what = " ".join(text for text in (error.context, error.problem) if text)
        hint = "indent with spaces" if "\t" in place.text else "look at this line and the one above it"
        raise UserError(f"this is not valid YAML: {what}", where=str(place), remedy=hint) from error
    except yaml.YAMLError as error:
        raise UserError(f"this is not valid YAML: {error}", where=file) from error
    except RecursionError as error:
        raise _too_deep(file) from error
    layer = Layer(file, lines, root if isinstance(root, MappingNode) else None)
    if root is not None and layer.root is None:
        raise UserError(
            "a configuration file holds keys and values at its top, like `model:`", where=str(layer.place(root))
        )
    if layer.root is not None:
        _check_size(layer, layer.root, ())
        _check_values(layer, layer.root)
        # YAML itself would silently take the last of two equal keys.
        _refuse_double_keys(layer, layer.root)
    return layer


def _check_values(layer: Layer, node: Node) -> None:
    """Refuse what has the form of YAML and no value: tags of other programs, a merge (``<<``) of what is no mapping."""
    try:
        yaml.SafeLoader("").construct_document(copy.deepcopy(node))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or node.start_mark
        text = layer.lines[mark.line] if mark.line < len(layer.lines) else ""
        what = " ".join(text for text in (error.context, error.problem) if text)
        raise UserError(
            f"this is YAML, but no value: {what}",
            where=str(Place(layer.file, mark.line + 1, text)),
            remedy="write plain text, numbers, lists and mappings, without tags (!)",
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"this is YAML, but no value: {error}", where=layer.file) from error


def _too_deep(place: str) -> UserError:
    return UserError(
        f"keys or lists lie in each other more than {MOST_LEVELS} deep",
        where=place,
        remedy="a configuration has some ten levels: look for brackets or indentation too many",
    )


def _check_size(layer: Layer, node: Node, above: tuple[Node, ...], counted: list[int] | None = None) -> None:
    """Refuse what a few lines can blow up to more than any memory holds, and numbers that are not what they look like.

    Anchors (``&a``) and aliases (``*a``) share one node, which the program would see once for every alias.
    """
    counted = [0] if counted is None else counted
    counted[0] += 1
    if counted[0] > MOST_NODES:
        raise UserError(
            f"with its aliases written out the file has more than {MOST_NODES:,} values",
            where=layer.file,
            remedy="leave out the anchors (&) and aliases (*)",
        )
    if any(node is one for one in above):
        raise UserError("an alias (*) lies inside its own anchor (&)", where=str(layer.place(node)))
    if len(above) > MOST_LEVELS:
        raise _too_deep(str(layer.place(node)))
    if isinstance(node, ScalarNode):
        _check_number(layer, node)
    for item in node.value if isinstance(node, MappingNode | SequenceNode) else ():
        for inner in item if isinstance(item, tuple) else (item,):
            _check_size(layer, inner, (*above, node), counted)


def _check_number(layer: Layer, node: ScalarNode) -> None:
    if node.style or not node.tag.endswith((":int", ":float")):
        return
    if ":" in node.value:
        raise UserError(
            f"YAML reads {node.value} as a number to the base of 60",
            where=str(layer.place(node)),
            remedy="write the number that is meant, or quotes around text",
        )
    if len(node.value) > MOST_DIGITS:
        raise UserError(f"this number has {len(node.value):,} digits", where=str(layer.place(node))[:200])


def _similar_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either; you are in {Path.cwd()}"
    here = _configurations(folder)
    # In the folder that was named, else in those next to it: above, beside and below.
    around = [one for one in (folder.parent, *_folders(folder.parent), *_folders(folder)) if one != folder]
    for places in ([folder], around):
        found = {name: place for place in reversed(places) for name in _configurations(place)}
        if near := near_files(path.name, found, 2):
            return f"did you mean {' or '.join(str(found[name] / name) for name in near)}?"
    there = ", ".join(here[:8]) + (", ..." if len(here) > 8 else "") or "no configuration"
    if folder.resolve() == Path.cwd():
        return f"you are in {Path.cwd()}, which has {there}"
    return f"{folder} has {there}; you are in {Path.cwd()}"


def _configurations(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(one.name for one in folder.iterdir() if one.suffix in (".yaml", ".yml", ".json"))
    return []


def _folders(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))[:50]
    return []


def _refuse_double_keys(layer: Layer, node: Node) -> None:
    if isinstance(node, MappingNode):
        first: dict[str, Node] = {}
        for key, value in node.value:
            name = str(key.value)
            # The merge key << may stand there several times.
            if name in first and name != "<<":
                raise UserError(
                    f"the key `{name}` is there twice, first in line {first[name].start_mark.line + 1}",
                    where=str(layer.place(key)),
                    remedy="keep one of them",
                )
            first[name] = key
            _refuse_double_keys(layer, value)
    elif isinstance(node, SequenceNode):
        for item in node.value:
            _refuse_double_keys(layer, item)


def find(layers: Sequence[Layer], key: str) -> tuple[Layer, Node, Node] | None:
    """Return (layer, key node, value node) of a dotted key in the last file that has it.

    ``init_args`` may be left out of the key.
    """
    # From the end, since a later file wins.
    for layer in reversed(layers):
        if layer.root is not None and (found := _descend(layer.root, key.split("."))) is not None:
            return layer, *found
    return None


def _descend(node: Node, names: Sequence[str]) -> tuple[Node, Node] | None:
    if not isinstance(node, MappingNode):
        return None
    for key, value in node.value:
        # `callbacks+` appends to a list and stands for the same key.
        if str(key.value).rstrip("+") == names[0]:
            return (key, value) if len(names) == 1 else _descend(value, names[1:])
    for key, value in node.value:
        if key.value == "init_args":
            return _descend(value, names)
    return None


def mappings_of_class(node: Node, class_path: str) -> Iterator[MappingNode]:
    """Yield every mapping below ``node`` whose ``class_path`` is this one; a bare name in its place is no mapping."""
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if key.value == "class_path" and isinstance(value, ScalarNode) and _same(value.value, class_path):
                yield node
            else:
                yield from mappings_of_class(value, class_path)
    elif isinstance(node, SequenceNode):
        for item in node.value:
            yield from mappings_of_class(item, class_path)


def _same(written: str, resolved: str) -> bool:
    # The configuration may name a re-export, and jsonargparse resolves it to the module that defines the class.
    return written == resolved or written.rpartition(".")[2] == resolved.rpartition(".")[2]


def child(node: Node, name: str) -> tuple[Node, Node] | None:
    """Return (key node, value node) of a key of a mapping or of its ``init_args``."""
    return _descend(node, name.split("."))
