"""Translation of jsonargparse's complaints to a UserError: the key, where it stands, its value, the nearest valid name.

The patterns are those of jsonargparse 4.53's messages (pinned in pyproject.toml): its exceptions carry no key, value or
type but in their text. A message that no pattern fits is shown as it is, without the usage.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from lit_grpo.cli.config_files import Layer, child, find, mappings_of_class
from lit_grpo.cli.errors import class_paths
from lit_grpo.cli.errors.right_values import group_example, key_that_was_meant, right_value, shown_as, takes_keys
from lit_grpo.errors import UserError
from lit_grpo.utils.foreign_names import FOREIGN_NAMES
from lit_grpo.utils.spelling import near_names, nearest
from lit_grpo.utils.text import shorten

ELSEWHERE = {
    "optimizer": "--model.optimizer.type torch.optim.SGD names another optimizer, and --model.optimizer.lr its rate",
    **{
        name: f"it is an argument of the run's logger: --trainer.logger.{name}"
        for name in ("run_name", "run_dir", "experiment", "tracking_uri", "tags")
    },
    "root": "--trainer.default_root_dir names the folder that `runs` is in",
    "output_dir": "--trainer.default_root_dir names the folder that `runs` is in",
    "resume": "--ckpt_path last, best or PATH goes on from a checkpoint",
    "seed": "--seed_everything",
    "lr_scheduler": "--model.optimizer.schedule is constant, linear or cosine, and --model.optimizer.scheduler takes a "
    "class of torch",
}
"""Options that are typed at the top and stand elsewhere, of LightningCLI and of other programs, and where they are."""

EXAMPLES = {
    "trainer.logger": "lightning.pytorch.loggers.TensorBoardLogger",
    "trainer.callbacks": "lit_grpo.callbacks.HealthMonitor",
    "trainer.plugins": "lightning.pytorch.plugins.MixedPrecision",
    "data.prompts": "lit_grpo.data.JsonlPrompts",
    "data.val_prompts": "lit_grpo.data.JsonlPrompts",
    "data.test_prompts": "lit_grpo.data.JsonlPrompts",
    "data.clean.decontaminate": "lit_grpo.data.BenchmarkPrompts",
}
"""A class that may stand at a key, for a word that is no class; a reward anywhere else."""


_SAYS_NOTHING = re.compile(r"\s*(a string or stream input is required)?\s*")
"""What jsonargparse says of some values below a list of classes: nothing, or what its YAML reader says of a number."""


class Explainer:
    """Maker of error screens for one command line: it has the valid keys and finds where the given ones stand.

    Args:
        command: name of the subcommand.
        argv: arguments of the subcommand.
        layers: configuration files of the subcommand.
        keys: every key that the command takes, dotted.
        own_options: options of the command that are no keys, without their dashes; ``help`` and ``print_config`` of
            LightningCLI are known.
        types: type and default of each key, for examples of a right value; keys may be missing.

    Attributes:
        known: the keys and all their parents.
    """

    def __init__(
        self,
        command: str,
        argv: Sequence[str],
        layers: Sequence[Layer],
        keys: Iterable[str],
        own_options: Iterable[str] = (),
        types: Mapping[str, tuple[Any, Any]] | None = None,
    ) -> None:
        self.command, self.argv, self.layers = command, list(argv), list(layers)
        self.keys, self.own_options = sorted(set(keys)), {"help", "print_config", *own_options}
        self.types = dict(types or {})
        self.known = {".".join(key.split(".")[:n]) for key in self.keys for n in range(1, key.count(".") + 2)}

    def explain(self, message: str) -> UserError:
        """Return the error that a message of jsonargparse tells of."""
        # The order matters: a message may quote another inside it, and the outer one names the key.
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
            return self.bad_choice("--print_config", found[1], ["skip_default", "skip_unset"], "command line")
        return UserError(message, where=self.sources())

    def check_keys(self) -> None:
        """Refuse keys in the files that the command does not have.

        Raises:
            UserError: a key is unknown; it names the first one.
        """
        # jsonargparse would refuse most of them too, but overlooks an unknown key with an empty mapping.
        for layer in self.layers:
            if layer.root is not None:
                self._check_mapping(layer.root, "")

    def _check_mapping(self, node: MappingNode, prefix: str) -> None:
        for key, value in node.value:
            path = prefix + str(key.value).rstrip("+")
            if key.value != "<<" and path not in self.known:
                raise self._unknown_key(path)
            if key.value == "<<" or not any(known.startswith(f"{path}.") for known in self.keys):
                continue
            if isinstance(value, MappingNode):
                self._check_mapping(value, f"{path}.")
            # Text may be the path of a file with the keys. What may be left out as a whole is a key of its own.
            elif path not in self.keys and (isinstance(value, SequenceNode) or value.tag == "tag:yaml.org,2002:null"):
                found = "a list" if isinstance(value, SequenceNode) else "null"
                raise UserError(
                    f"`{path}` holds keys and values, not {found}",
                    where=self.place(path),
                    remedy="write its keys below it, or leave it out",
                )

    # Finding the file and line of a key.

    def place(self, key: str) -> str:
        """Say where a key was given: the command line, else the last file that has it or its nearest parent."""
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
        """Return (``--key``, value) of the last option whose key satisfies ``matches``."""
        # From the end: of an option that is given twice the last one holds.
        for i in range(len(self.argv) - 1, -1, -1):
            option, equals, value = self.argv[i].partition("=")
            if option.startswith("--") and matches(_key_of(option)):
                value = value if equals else next(iter(self.argv[i + 1 : i + 2]), "")
                return option, value
        return None

    def variable(self, key: str) -> str:
        """Name the environment variable of a key."""
        return "__".join([f"LIT_GRPO_{self.command}", *key.split(".")]).upper()

    def sources(self) -> str:
        """List the configuration files, or say ``command line`` if there is none."""
        return ", ".join(layer.file for layer in self.layers) or "command line"

    def locate(self, error: UserError) -> UserError:
        """Add file and line to an error whose ``where`` is a key, or ``Class.argument``."""
        key = error.where or ""
        # Anything else is a place already, such as a file and line of the data.
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
            return error
        first, _, last = key.rpartition(".")
        # A file in the current folder, such as rows.jsonl, looks like a key, and is its own place.
        if first and key not in self.known and Path(key).is_file():
            return error
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

    # Errors by kind.

    def _unknown_key(self, key: str) -> UserError:
        parts, depth = self._first_unknown(key)
        unknown, parent = parts[depth - 1], ".".join(parts[: depth - 1])
        what = f"`{parent}` has no key `{unknown}`" if parent else f"there is no key `{unknown}`"
        remedy = ELSEWHERE.get(parts[0]) if depth == 1 else None
        remedy = remedy or self._suggest(parts, depth, "`{}`".format)
        return UserError(what, where=self.place(".".join(parts[:depth])), remedy=remedy)

    def _first_unknown(self, key: str) -> tuple[list[str], int]:
        """Split a key; return its parts and how many of them lead to the first unknown one."""
        parts = key.split(".")
        return parts, next((n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) not in self.known), len(parts))

    def _suggest(self, parts: list[str], depth: int, show: Callable[[str], str], own: Iterable[str] = ()) -> str:
        """Name the nearest valid keys for one whose part number ``depth`` is unknown, or list those that are valid."""
        unknown, prefix = parts[depth - 1], "".join(f"{part}." for part in parts[: depth - 1])
        siblings = sorted({k[len(prefix) :].split(".")[0] for k in self.keys if k.startswith(prefix)} | set(own))
        suffix = "".join(f".{part}" for part in parts[depth:])
        # A shortened name first, then a misspelt one, then the same last name somewhere else in the configuration.
        completions = [name for name in siblings if unknown and name.startswith(unknown)]
        completions = [name for name in completions if prefix + name + suffix in self.known] or completions
        few = 0 < len(completions) < 5
        close = completions if few else near_names(unknown, siblings, slips_only=True)
        if not close and (elsewhere := [k for k in self.keys if k.split(".")[-1] == parts[-1]]):
            return f"did you mean {' or '.join(show(k) for k in elsewhere[:3])}?"
        near = close or near_names(unknown, siblings)
        if not near:
            return f"valid {'options' if own else 'keys'} here: {', '.join(siblings)}"
        meant = [prefix + name + (suffix if prefix + name + suffix in self.known else "") for name in near]
        return f"did you mean {' or '.join(show(key) for key in meant)}?"

    def unknown_option(self, words: list[str]) -> UserError:
        """Return the error for words on the command line that no option takes."""
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
        if not given.startswith("--") and key.rstrip("+") in self.known | self.own_options:
            remedy = f"did you mean --{key}?"
        else:
            parts, depth = self._first_unknown(key)
            remedy = self._suggest(parts, depth, "--{}".format, self.own_options if len(parts) == 1 else ())
        if (meant := FOREIGN_NAMES.get(key.rpartition(".")[2])) is not None:
            remedy = f"{key.rpartition('.')[2]} is --{meant} here (docs/migrating.md)"
        remedy = ELSEWHERE.get(key.split(".")[0], remedy)
        return UserError(f"there is no option {given}", where="command line", remedy=remedy)

    def unknown_variable(self, name: str) -> UserError:
        """Return the error for an environment variable that looks like one of a key, and is none."""
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
        # jsonargparse first tries text as the path of a file with the value. Nobody who sees this meant one.
        details = re.sub(r"^ *- Expected a path but .* either not accessible or invalid\n", "", details, flags=re.M)
        if (given := given_for_keys(details, takes_keys(self.types.get(key)))) is not None:
            return self._bad_group(key, given)
        if found := class_problem(details):
            return self._bad_class(key, *found)
        if below := re.search(r"NestedArg\(key='([^']+)'", details):
            what = f"there is no option --{key}.{below[1]}"
            return UserError(what, where="command line", remedy=f"`{key}` has no keys below it")
        if re.search(r"Subtypes: \[list\[[\w.]+\.Reward\]", details):
            given = given_value(details)
            remedy = f"give a list: {_one_reward(given or '')}"
            return UserError(_cannot_be(key, given), where=self.place(key), remedy=remedy)
        return self._bad_type(key, details, self.place(key))

    def _bad_group(self, key: str, given: str) -> UserError:
        """Return the error for a word in the place of keys and values."""
        where, last = self.place(key), key.rpartition(".")[2]
        typed = where.startswith("command line, --")
        meant = key_that_was_meant(key, given, self.types)
        below, value = (meant, given) if meant is not None else group_example(key, self.types) or ("", "")
        shown = f"--{key}.{below} {shlex.quote(value)}" if typed else f"{last}: {{{below}: {value}}}"
        remedy = f"did you mean {shown}?" if meant is not None else f"give its keys, for example {shown}"
        what = f"`{key}` takes keys below it, not {shorten(given, 60)!r}"
        return UserError(
            what, where=where, remedy=remedy if below else f"lit-grpo {self.command} --help {key} lists them"
        )

    def bad_choice(self, name: str, given: str | None, choices: list[str], where: str) -> UserError:
        """Return the error for a word that is none of the choices."""
        remedy = f"{_did_you_mean(given or '', choices)}Choose one of {', '.join(choices)}"
        return UserError(_cannot_be(name, given), where=where, remedy=remedy)

    def bad_argument(self, key: str, class_path: str, name: str, known: list[str], where: str) -> UserError:
        """Return the error for an argument that a class below ``key`` does not have."""
        near = nearest(name, [*known, "init_args", "class_path"])
        listed = f"it takes {', '.join(known)}" if known else "it takes no arguments"
        what = f"{class_path} has no argument `{name}` (under `{key}`)"
        return UserError(what, where=where, remedy=f"did you mean `{near}`?" if near else listed)

    def _bad_type(self, key: str, details: str, where: str, argument: class_paths.Argument | None = None) -> UserError:
        """Return the error for a value of the wrong type, or none of the choices.

        Args:
            key: its key.
            details: what jsonargparse says of it.
            where: file and line, or the option.
            argument: what is known of it, where it is an argument of a class below the key.
        """
        name = key if argument is None else f"{key}: {argument.of}.{argument.name}"
        given = given_value(details)
        what = _cannot_be(name, given)
        types = wanted_types(details)
        if names := literal_choices(details):
            # What is no word may stand there too; null is everywhere, and nobody misspells it.
            others = [one for one in types if one.endswith("number") or one == "true or false"]
            return self.bad_choice(name, given, [*names, *others], where)
        last = key if argument is None else argument.name
        if given is None and where.startswith("command line, --"):
            given = where.removeprefix("command line, ").partition(" ")[2]
        right = right_value(last, self.types.get(key) if argument is None else argument.type, given)
        example = "" if right is None else f"for example {shown_as(last, right, where)}"
        if types:
            remedy = f"give {' or '.join(types)}"
            return UserError(what, where=where, remedy=", ".join(filter(None, (remedy, example))))
        if _SAYS_NOTHING.fullmatch(details):
            return UserError(_cannot_be(name, given), where=where, remedy=example or None)
        return UserError(f"`{name}`: {' '.join(details.split())}", where=where)

    def _bad_class(self, key: str, class_path: str, problem: str) -> UserError:
        """Return the error for a ``class_path`` that cannot be used, or for its ``init_args``."""
        if option := re.search(r"Option '([^']+)' is not accepted|unrecognized arguments: --(\w+)", problem):
            name, known = option[1] or option[2], class_paths.arguments_of(class_path)
            return self.bad_argument(key, class_path, name, known, self._place_of_class(key, class_path, name))
        if inner := re.match(r'(?:Parser|Configuration) key "([^"]+)":\s*(.*)', problem, re.DOTALL):
            argument = class_paths.argument_of(class_path, inner[1])
            return self._bad_type(key, inner[2], self._place_of_class(key, class_path, inner[1]), argument)
        where = self._place_of_class(key, class_path)
        if required := re.search(r"arguments are required: (.*)", problem):
            needed = " and ".join(f"`{name}`" for name in required[1].split(", "))
            return UserError(
                f"{class_path} needs {needed} (under `{key}`)", where=where, remedy="add it under `init_args:`"
            )
        first = next((line.strip() for line in problem.splitlines() if line.strip()), problem)[:200]
        separator = " " if first.startswith("is no ") else ": "
        what = f"`{key}`: {class_path!r}{separator}{first}"
        return UserError(what, where=where, remedy=_instead(key, class_path, first))

    def _place_of_class(self, key: str, class_path: str, argument: str | None = None) -> str:
        """Say where a class, or one of its arguments, stands below ``key``."""
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


def _key_of(option: str) -> str:
    """Return the key that an option of the command line stands for."""
    # There `init_args` may be left out or stand for all of them, and a + at the end appends to a list.
    return option.removeprefix("--").replace(".init_args.", ".").removesuffix(".init_args").rstrip("+")


def _shown(option: tuple[str, str]) -> str:
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


def _instead(key: str, class_path: str, problem: str) -> str:
    if problem == "is no Reward" and not class_path.rpartition(".")[2][:1].isupper():
        return f"name a class that derives from Reward, or give a function: {_one_reward(class_path)}"
    if problem.startswith("is no ") and problem != "is no import path":
        return f"name a class that derives from {problem.removeprefix('is no ')}"
    return class_paths.similar_class(class_path, EXAMPLES.get(key))


def _one_reward(word: str) -> str:
    """Write the list of one reward that was probably meant: a class by its bare name, else a function."""
    if word.rpartition(".")[2][:1].isupper():
        return f"[{word}]"
    function = (
        word if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", word) and not word.endswith(".py") else "my_module.my_function"
    )
    return f"[{{class_path: lit_grpo.rewards.FunctionReward, init_args: {{function: {function}}}}}]"


# Reading jsonargparse's messages.


def class_problem(details: str) -> tuple[str, str] | None:
    """Return (class path, its problem) of the class that jsonargparse could not use; of nested ones the innermost."""
    if found := re.search(r"Expected a dot import path string: (\S+)", details):
        return found[1], "is no import path"
    if found := re.search(r"Import path (\S+) does not correspond to a subclass of (\S+)", details):
        return found[1], f"is no {found[2]}"
    found = re.search(r"Problem with given class_path '([^']+)':\s*\n(.*)", details, re.DOTALL)
    if not found:
        return None
    lines = found[2].splitlines()
    # The problem is the block indented like its first line; complaints of the union's other types follow, further left.
    indent = len(lines[0]) - len(lines[0].lstrip())
    block = []
    for line in lines:
        if len(line) - len(line.lstrip()) < indent:
            break
        block.append(line[indent:])
    return class_problem("\n".join(block)) or (found[1], "\n".join(block))


def literal_choices(details: str) -> list[str]:
    """List the values of the ``Literal`` types that a value did not match."""
    found: list[str] = []
    for body in re.findall(r"Literal\[(.*?)\](?=\.| |,|\]|$)", details, re.M):
        found += [item.strip().strip("'\"") for item in body.split(",")]
    return list(dict.fromkeys(found))


def given_value(details: str) -> str | None:
    """Return the value that a message complains of, as text."""
    found = re.search(r"Got value: (.*)", details) or re.search(r"Given value: (.*)", details)
    return found[1].strip().strip("'\"") if found else None


def given_for_keys(details: str, optional: bool) -> str | None:
    """Return what was given in the place of keys and values, as text; None if that is not what a message says.

    Args:
        details: message of jsonargparse.
        optional: whether the key takes a dataclass that may be left out, of which messages are worded otherwise.
    """
    if found := re.search(r"Unable to load config ['\"](.*?)['\"]\s*(?:\n|$)", details):
        return found[1]
    if not optional or not re.search(r"Given value type: <class '(str|int|float|bool|list)'>", details):
        return None
    # A dotted word is the import path of a class.
    given = given_value(details)
    return None if given is None or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", given) else given


def wanted_types(details: str) -> list[str]:
    """Name the types that a value did not match, in words a person uses."""
    types = re.findall(r"Expected an? (.+?)(?:\. Got value|$)", details, re.M)
    return list(dict.fromkeys(_in_words(type_name) for type_name in types))


def _in_words(type_name: str) -> str:
    words = {
        "float": "a number",
        "int": "a whole number",
        "bool": "true or false",
        "str": "text",
        "NoneType": "null",
        "dict": "a mapping",
        "list": "a list",
        "tuple": "a list",
        "Iterable": "a list",
    }
    name = re.sub(r"^<class '(.*)'>$", r"\1", type_name.strip()).partition("[")[0].rpartition(".")[2]
    return words.get(name, name)


def _did_you_mean(word: str, known: list[str]) -> str:
    """Ask ``did you mean 'a' or 'b'? ``; empty if no known word is near."""
    near = near_names(word, known)
    return f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""


def user_error_below(error: BaseException | None) -> UserError | None:
    """Return the UserError that a class raised while it was built or checked, from under the parser's wrapping."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error
