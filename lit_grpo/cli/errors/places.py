"""Where on the command line, in the environment and in the files the keys of a configuration are given."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.nodes import Node, ScalarNode

from lit_grpo.cli.config_files import Layer, child, find, mappings_of_class
from lit_grpo.cli.errors.class_paths import arguments_of
from lit_grpo.cli.errors.parser_messages import whole_value
from lit_grpo.cli.errors.right_values import IN_LISTS
from lit_grpo.cli.errors.value_forms import read, reads_as, written


@dataclass(frozen=True)
class Source:
    """Option of the command line, or variable of the environment, that gave a value."""

    place: str
    key: str
    """Its key, which may lie below that of the message."""
    text: str
    """The value, as it was typed."""

    @property
    def typed(self) -> bool:
        return self.place.startswith("command line")

    def part(self, key: str) -> Source:
        """Return what gives a key below the one whose whole value this is."""
        value = read(self.text)
        for name in key.removeprefix(f"{self.key}.").split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return Source(self.place, key, value if isinstance(value, str) else written(value))

    def class_first(self, key: str, example: str) -> str:
        """Say how an argument of a class below ``key`` is given together with its class, such as ``example``."""
        option = self.place.removeprefix("command line, ").partition(" ")[0].partition("=")[0]
        if not self.typed or (self.key == key and ".init_args" not in option):
            return f"name its class too: class_path: {example}"
        group = option.partition(".init_args")[0] if ".init_args" in option else option.rpartition(".")[0]
        # Before it, since options are read in their order.
        group += "+" if example in IN_LISTS else ""
        first = f"name its class before it, for example {group} {example}"
        takes_it = ".init_args" in option or option.rpartition(".")[2] in arguments_of(example)
        return f"{first} {option} {shlex.quote(self.text)}" if takes_it else first


class Places:
    """Finder of keys in one command line: its options, the environment and the files.

    Args:
        command: name of the subcommand.
        argv: arguments of the subcommand.
        layers: configuration files of the subcommand.
        keys: every key that the command takes, dotted.
        types: type and default of each key; keys may be missing.

    Attributes:
        known: the keys and all their parents.
    """

    def __init__(
        self,
        command: str,
        argv: Sequence[str],
        layers: Sequence[Layer],
        keys: Iterable[str],
        types: Mapping[str, tuple[Any, Any]] | None = None,
    ) -> None:
        self.command, self.argv, self.layers = command, list(argv), list(layers)
        self.keys, self.types = sorted(set(keys)), dict(types or {})
        self.known = {".".join(key.split(".")[:n]) for key in self.keys for n in range(1, key.count(".") + 2)}

    def place(self, key: str) -> str:
        """Say where a key was given: the command line, else the last file that has it or its nearest parent."""
        if (option := self.option(lambda name: name == key)) is not None:
            return shown_option(option)
        if (found := find(self.layers, key)) is not None:
            return str(found[0].place(found[1]))
        if (name := self.variable(key)) in os.environ:
            return f"environment variable {name}"
        if (option := self.option(lambda name: name.startswith(f"{key}."))) is not None:
            return shown_option(option)
        parts = key.split(".")
        parents = [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
        if (option := self.option(lambda name: name in parents)) is not None:
            return shown_option(option)
        if (name := next((name for name in map(self.variable, parents) if name in os.environ), "")) != "":
            return f"environment variable {name}"
        for parent in parents:
            if (found := find(self.layers, parent)) is not None:
                return str(found[0].place(found[1]))
        return self.sources()

    def option(self, matches: Callable[[str], bool]) -> tuple[str, str] | None:
        """Return (``--key``, value) of the last option whose key satisfies ``matches``."""
        # From the end: of an option that is given twice the last one holds.
        return next((option for option in reversed(self.options()) if matches(key_of(option[0]))), None)

    def options(self) -> list[tuple[str, str]]:
        """List (``--key``, value) of the options in order; the value is empty where none follows."""
        found = []
        for word, following in zip(self.argv, [*self.argv[1:], ""], strict=False):
            option, equals, value = word.partition("=")
            if option.startswith("--"):
                found.append((option, value if equals else following))
        return found

    def variable(self, key: str) -> str:
        """Name the environment variable of a key."""
        return "__".join([f"LIT_GRPO_{self.command}", *key.split(".")]).upper()

    def sources(self) -> str:
        """List the configuration files, or say ``command line`` if there is none."""
        return ", ".join(layer.file for layer in self.layers) or "command line"

    def option_of_argument(self, argument: str) -> tuple[str, str] | None:
        """Return the last option that gives an argument of some class, or something below it."""
        return self.option(lambda name: f".{argument}." in f"{name}.")

    def place_of_argument(self, class_name: str, argument: str) -> str | None:
        if (option := self.option_of_argument(argument)) is not None:
            return shown_option(option)
        for layer in reversed(self.layers):
            for node in mappings_of_class(layer.root, class_name) if layer.root is not None else ():
                pair = child(node, argument)
                return str(layer.place(pair[0] if pair else node))
        keys = [key for key in self.keys if key.split(".")[-1] == argument]
        return self.place(keys[0]) if len(keys) == 1 else None

    def source_of(self, key: str) -> Source | None:
        """Return the option that gives a key; None if none does."""
        option = self.option(lambda name: name == key)
        return None if option is None else Source(shown_option(option), key, option[1])

    def source(self, key: str, details: str) -> Source | None:
        """Return what gave a wrong value, where that is an option or the environment.

        Args:
            key: the key that a message is about.
            details: what it says of the value, which it quotes.
        """
        below, value = whole_value(details)
        name = key_of(f"--{key}.{below}" if below else f"--{key}")
        typed = [option for option in self.options() if key_of(option[0]) == name]
        # From the end: of an option that is given twice the last one holds, but of one that appends each does.
        right = [option for option in reversed(typed) if reads_as(option[1], value)]
        if found := right or typed[-1:]:
            return Source(shown_option(found[0]), key_of(found[0][0]), found[0][1])
        variable = self.variable(key)
        if variable in os.environ and not below and reads_as(os.environ[variable], value):
            return Source(f"environment variable {variable}", key, os.environ[variable])
        return None

    def chosen_class(self, key: str) -> str:
        """Return the import path of the class at a key, of a list of the last one; empty where none is named."""
        names = (f"--{key}", f"--{key}+", f"--{key}.class_path")
        typed = [text for option, text in self.options() if option in names]
        if typed:
            value = read(typed[-1])
        elif (found := find(self.layers, key)) is not None:
            value = read(yaml.serialize(found[2]))
        else:
            value = self.types[key][1] if key in self.types else None
        value = value[-1] if isinstance(value, list) and value else value
        # The parser's own mapping, of a default, is no Mapping.
        value = value.get("class_path") if hasattr(value, "get") else value
        return value if isinstance(value, str) else ""

    def given(self, key: str, source: Source | None) -> Any:
        """Return the value of a key as YAML reads it, from the option or variable that gave it, else from the files."""
        found = find(self.layers, key)
        return read(source.text if source is not None else yaml.serialize(found[2]) if found is not None else "")

    def place_of_class(self, key: str, class_path: str, argument: str | None = None) -> str:
        """Say where a class, or one of its arguments, stands below ``key``."""
        if argument is not None and (option := self.option(lambda name: name == f"{key}.{argument}")) is not None:
            return shown_option(option)
        found = find(self.layers, key)
        if found is None or self.option(lambda name: name == key) is not None:
            return self.place(key)
        layer, _, value = found
        for node in mappings_of_class(value, class_path):
            pair = child(node, argument) if argument is not None else None
            return str(layer.place(pair[0] if pair else node))
        # A class may be written as its bare path, and a dataclass (an optional part) without any.
        pair = child(value, argument) if argument is not None else None
        named: Node | None = pair[0] if pair else _scalar(value, class_path)
        return str(layer.place(named)) if named is not None else self.place(key)


def key_of(option: str) -> str:
    """Return the key that an option of the command line stands for."""
    # There `init_args` may be left out or stand for all of them, and a + at the end appends to a list.
    return option.removeprefix("--").replace(".init_args.", ".").removesuffix(".init_args").rstrip("+")


def shown_option(option: tuple[str, str]) -> str:
    return f"command line, {option[0]} {option[1]}".rstrip()


def _scalar(node: Node, text: str) -> Node | None:
    """Find the first scalar below ``node`` that reads ``text``."""
    if isinstance(node, ScalarNode):
        return node if node.value == text else None
    for item in node.value if isinstance(node.value, list) else ():
        for inner in item if isinstance(item, tuple) else (item,):
            if (found := _scalar(inner, text)) is not None:
                return found
    return None
