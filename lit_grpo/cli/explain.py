"""Turns jsonargparse's complaints into one screen: the key, where it stands, what was given, the nearest valid name.

The messages are those of jsonargparse 4.53 (pinned); one that is not recognised is shown as it is, without the usage.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Sequence

from yaml.nodes import MappingNode, Node, ScalarNode

from lit_grpo.cli import messages
from lit_grpo.cli.layers import Layer, child, find, mappings_of_class
from lit_grpo.errors import UserError, nearest


class Explainer:
    """Knows the valid keys of a command and where the given ones come from.

    Args:
        command: name of the subcommand.
        argv: its arguments.
        layers: its configuration files.
        keys: every key the command takes, dotted.
        own: options of the command that are no keys, without their dashes; those of LightningCLI need not be named.

    Attributes:
        known: the keys and all their parents.
    """

    def __init__(
        self,
        command: str,
        argv: Sequence[str],
        layers: Sequence[Layer],
        keys: Iterable[str],
        own: Iterable[str] = (),
    ) -> None:
        self.command, self.argv, self.layers = command, list(argv), list(layers)
        self.keys, self.own = sorted(set(keys)), {"help", "print_config", *own}
        self.known = {".".join(key.split(".")[:n]) for key in self.keys for n in range(1, key.count(".") + 2)}

    def explain(self, message: str) -> UserError:
        """The error that ``message`` tells of."""
        if found := re.match(r'(?:Parser|Configuration) key "([^"]+)":\s*(.*)', message, re.DOTALL):
            return self._bad_value(found[1].removeprefix(f"{self.command}."), found[2])
        if found := re.search(r"does not accept option '([^']+)'", message):
            return self._unknown_key(found[1])
        if found := re.search(r"unrecognized arguments: (.*)", message, re.DOTALL):
            return self.unknown_option(found[1].split())
        if found := re.search(r"arguments are required: (.*)", message):
            return self._missing([key.removeprefix(f"{self.command}.") for key in found[1].split(", ")])
        if found := re.match(r"argument (?:-\w/)?--(\S+?): (.*)", message, re.DOTALL):
            return UserError(f"{found[1]}: {found[2]}", where=self.place(found[1]), remedy="give the option a value")
        if found := re.match(r'Invalid option "([^"]*)" for --print_config', message):
            kinds = ["skip_default", "skip_unset"]
            return self.bad_choice("--print_config", found[1], kinds, "command line")
        return UserError(message, where=self.sources())

    def check_keys(self) -> None:
        """Refuse keys in the files that the command does not have; the parser overlooks those with nothing in them.

        Raises:
            UserError: for the first one.
        """
        for layer in self.layers:
            if layer.root is not None:
                self._check_mapping(layer.root, "")

    def _check_mapping(self, node: MappingNode, prefix: str) -> None:
        for key, value in node.value:
            path = prefix + str(key.value).rstrip("+")
            if key.value != "<<" and path not in self.known:
                raise self._unknown_key(path)
            if isinstance(value, MappingNode) and any(known.startswith(f"{path}.") for known in self.keys):
                self._check_mapping(value, f"{path}.")

    # Where things stand.

    def place(self, key: str) -> str:
        """Where a key was given: the command line, else the last file that has it or its nearest parent."""
        if (option := self.option(lambda name: name == key)) is not None:
            return _shown(option)
        if (found := find(self.layers, key)) is not None:
            return str(found[0].place(found[1]))
        if (name := self.variable(key)) in os.environ:
            return f"environment variable {name}"
        if (option := self.option(lambda name: name.startswith(f"{key}."))) is not None:
            return _shown(option)
        parts = key.split(".")
        parents = [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
        if (option := self.option(lambda name: name in parents)) is not None:
            return _shown(option)
        for parent in parents:
            if (found := find(self.layers, parent)) is not None:
                return str(found[0].place(found[1]))
        return self.sources()

    def option(self, matches: Callable[[str], bool]) -> tuple[str, str] | None:
        """(``--key``, value) of the last option whose key satisfies ``matches``."""
        for i in range(len(self.argv) - 1, -1, -1):
            option, equals, value = self.argv[i].partition("=")
            if option.startswith("--") and matches(option[2:].replace(".init_args.", ".").rstrip("+")):
                value = value if equals else next(iter(self.argv[i + 1 : i + 2]), "")
                return option, value
        return None

    def variable(self, key: str) -> str:
        """The environment variable of a key."""
        return "__".join([f"LIT_GRPO_{self.command}", *key.split(".")]).upper()

    def sources(self) -> str:
        """The files and options that were given at all."""
        return ", ".join(layer.file for layer in self.layers) or "command line"

    def locate(self, error: UserError) -> UserError:
        """Add file and line to an error whose ``where`` is a key, or ``Class.argument``."""
        key = error.where or ""
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
            return error
        first, _, last = key.rpartition(".")
        if key.split(".")[0] in self.known or not first:
            place = self.place(key)
        else:
            place = self._place_of_argument(first, last) or self.sources()
        shown = place if last in place else f"`{key}` in {place}"
        return UserError(error.what, where=shown, remedy=error.remedy)

    def _place_of_argument(self, class_name: str, argument: str) -> str | None:
        if (option := self.option(lambda name: name.endswith(f".{argument}"))) is not None:
            return _shown(option)
        for layer in reversed(self.layers):
            for node in mappings_of_class(layer.root, class_name) if layer.root is not None else ():
                pair = child(node, argument)
                return str(layer.place(pair[0] if pair else node))
        keys = [key for key in self.keys if key.split(".")[-1] == argument]
        return self.place(keys[0]) if len(keys) == 1 else None

    # What is wrong with them.

    def _unknown_key(self, key: str) -> UserError:
        parts, depth = self._first_unknown(key)
        bad, parent = parts[depth - 1], ".".join(parts[: depth - 1])
        here = f"`{parent}` has no key `{bad}`" if parent else f"there is no key `{bad}`"
        remedy = self._suggest(parts, depth, "`{}`".format)
        return UserError(here, where=self.place(".".join(parts[:depth])), remedy=remedy)

    def _first_unknown(self, key: str) -> tuple[list[str], int]:
        """The parts of a key, and how many of them lead to the first that is not known."""
        parts = key.split(".")
        return parts, next((n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) not in self.known), len(parts))

    def _suggest(self, parts: list[str], depth: int, show: Callable[[str], str], own: Iterable[str] = ()) -> str:
        bad, prefix = parts[depth - 1], "".join(f"{part}." for part in parts[: depth - 1])
        siblings = sorted({k[len(prefix) :].split(".")[0] for k in self.keys if k.startswith(prefix)} | set(own))
        rest = "".join(f".{part}" for part in parts[depth:])
        begun = [name for name in siblings if bad and name.startswith(bad)]
        begun = [name for name in begun if prefix + name + rest in self.known] or begun
        close = begun if 0 < len(begun) < 5 else difflib.get_close_matches(bad, siblings, n=1, cutoff=0.7)
        if not close and (elsewhere := [k for k in self.keys if k.split(".")[-1] == parts[-1]]):
            return f"did you mean {' or '.join(show(k) for k in elsewhere[:3])}?"
        near = close or [name for name in [nearest(bad, siblings)] if name]
        if not near:
            return f"valid {'options' if own else 'keys'} here: {', '.join(siblings)}"
        meant = [prefix + name + (rest if prefix + name + rest in self.known else "") for name in near]
        return f"did you mean {' or '.join(show(key) for key in meant)}?"

    def unknown_option(self, words: list[str]) -> UserError:
        """Of words on the command line that no option takes."""
        options = [word for word in words if word.startswith("-")]
        if "--" in words:
            return UserError("`--` is not expected here", where="command line", remedy="leave it out")
        if not options:
            return UserError(
                f"{words[0]!r} is not expected here",
                where="command line",
                remedy=f"options begin with --, as in `lit-grpo {self.command} --config FILE`",
            )
        given = options[0].partition("=")[0]
        key = given.lstrip("-")
        if not given.startswith("--") and key.rstrip("+") in self.known | self.own:
            remedy = f"did you mean --{key}?"
        else:
            parts, depth = self._first_unknown(key)
            remedy = self._suggest(parts, depth, "--{}".format, self.own if len(parts) == 1 else ())
        return UserError(f"there is no option {given}", where="command line", remedy=remedy)

    def unknown_variable(self, name: str) -> UserError:
        """Of a variable in the environment that looks like one of a key, and is none."""
        above = next((key for key in self.keys if name.startswith(self.variable(key) + "__")), None)
        near = nearest(name, [self.variable(key) for key in self.known])
        if above is not None:
            remedy = f"{self.variable(above)} sets the whole of `{above}`, as in YAML"
        else:
            remedy = f"did you mean {near}?" if near else "write LIT_GRPO_FIT__DATA__ROLLOUTS for data.rollouts"
        return UserError(f"no key is set by {name}", where=f"environment variable {name}", remedy=remedy)

    def _missing(self, keys: list[str]) -> UserError:
        names = " and ".join(f"`{key}`" for key in keys)
        return UserError(
            f"{names} {'is' if len(keys) == 1 else 'are'} missing",
            where=self.sources(),
            remedy="set it in a file given with --config (configs/quickstart.yaml is a complete one), "
            f"or on the command line as --{keys[0]} ...",
        )

    def _bad_value(self, key: str, details: str) -> UserError:
        if key == "config":
            return UserError(details, where="--config")
        if found := messages.class_problem(details):
            return self._bad_class(key, *found)
        if below := re.search(r"NestedArg\(key='([^']+)'", details):
            what = f"there is no option --{key}.{below[1]}"
            return UserError(what, where="command line", remedy=f"`{key}` has no keys below it")
        return self._bad_type(key, details, self.place(key))

    def bad_choice(self, name: str, given: str | None, choices: list[str], where: str) -> UserError:
        """A word that is none of the choices."""
        remedy = f"{messages.did_you_mean(given or '', choices)}Choose one of {', '.join(choices)}"
        return UserError(_cannot_be(name, given), where=where, remedy=remedy)

    def bad_argument(self, key: str, class_path: str, name: str, known: list[str], where: str) -> UserError:
        """An argument that a class below ``key`` does not have."""
        near = nearest(name, [*known, "init_args", "class_path"])
        listed = f"it takes {', '.join(known)}" if known else "it takes no arguments"
        what = f"{class_path} has no argument `{name}` (under `{key}`)"
        return UserError(what, where=where, remedy=f"did you mean `{near}`?" if near else listed)

    def _bad_type(self, name: str, details: str, where: str) -> UserError:
        """A value of the wrong type, or none of the choices."""
        given = messages.given_value(details)
        what = _cannot_be(name, given)
        if names := messages.choices(details):
            return self.bad_choice(name, given, names, where)
        if kinds := messages.wanted_kinds(details):
            return UserError(what, where=where, remedy=f"give {' or '.join(kinds)}")
        return UserError(f"`{name}`: {' '.join(details.split())}", where=where)

    def _bad_class(self, key: str, class_path: str, problem: str) -> UserError:
        """Something is wrong with a ``class_path`` or its ``init_args``."""
        if option := re.search(r"Option '([^']+)' is not accepted|unrecognized arguments: --(\w+)", problem):
            bad, names = option[1] or option[2], messages.arguments_of(class_path)
            return self.bad_argument(key, class_path, bad, names, self._place_of_class(key, class_path, bad))
        if inner := re.match(r'(?:Parser|Configuration) key "([^"]+)":\s*(.*)', problem, re.DOTALL):
            name = f"{class_path.rpartition('.')[2]}.{inner[1]}"
            return self._bad_type(f"{key}: {name}", inner[2], self._place_of_class(key, class_path, inner[1]))
        where = self._place_of_class(key, class_path)
        if required := re.search(r"arguments are required: (.*)", problem):
            needed = " and ".join(f"`{name}`" for name in required[1].split(", "))
            return UserError(
                f"{class_path} needs {needed} (under `{key}`)", where=where, remedy="add it under `init_args:`"
            )
        first = next((line.strip() for line in problem.splitlines() if line.strip()), problem)[:200]
        separator = " " if first.startswith("is no ") else ": "
        what = f"`{key}`: {class_path!r}{separator}{first}"
        return UserError(what, where=where, remedy=_instead(class_path, first))

    def _place_of_class(self, key: str, class_path: str, argument: str | None = None) -> str:
        """Where a class, or one of its arguments, stands below ``key``."""
        if argument is not None and (option := self.option(lambda name: name == f"{key}.{argument}")) is not None:
            return _shown(option)
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


def _cannot_be(name: str, given: str | None) -> str:
    return f"`{name}` cannot be" + (f" {given!r}" if given is not None else " this")


def _shown(option: tuple[str, str]) -> str:
    return f"command line, {option[0]} {option[1]}".rstrip()


def _scalar(node: Node, text: str) -> Node | None:
    if isinstance(node, ScalarNode):
        return node if node.value == text else None
    for item in node.value if isinstance(node.value, list) else ():
        for part in item if isinstance(item, tuple) else (item,):
            if (found := _scalar(part, text)) is not None:
                return found
    return None


def _instead(class_path: str, problem: str) -> str:
    if problem.startswith("is no ") and problem != "is no import path":
        return f"name a class that derives from {problem.removeprefix('is no ')}"
    return messages.similar_class(class_path)
