"""Translation of jsonargparse's complaints to a UserError: the key, where it stands, its value, the nearest valid name.

The patterns are those of jsonargparse 4.53's messages (pinned in pyproject.toml): its exceptions carry no key, value or
type but in their text. A message that no pattern fits is shown as it is, without the usage.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, SequenceNode

from lit_grpo.cli.config_files import Layer
from lit_grpo.cli.errors import class_paths
from lit_grpo.cli.errors.parser_messages import (
    class_problem,
    given_for_keys,
    given_value,
    literal_choices,
    message_below,
    wanted_classes,
    wanted_types,
    whole_value,
)
from lit_grpo.cli.errors.places import Places, Source, key_of, shown_option
from lit_grpo.cli.errors.right_values import (
    EXAMPLES_OF,
    Types,
    class_names,
    group_example,
    key_that_was_meant,
    right_value,
    shown_as,
    takes_class,
    takes_keys,
    type_below,
    types_in_words,
)
from lit_grpo.cli.errors.value_forms import class_in_wrong_form, read, with_closed_brackets
from lit_grpo.errors import UserError
from lit_grpo.utils.examples import members_of
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

_SETS = ("data.val", "data.test")
"""Keys whose own keys are names that a person gives."""
_CLASS_WORDS = frozenset({"class", "cls", "type", "target", "_target_"})
"""Words of other programs for ``class_path``."""

_SAYS_NOTHING = re.compile(r"\s*(a string or stream input is required)?\s*")
"""What jsonargparse says of some values below a list of classes: nothing, or what its YAML reader says of a number."""


class Explainer(Places):
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
        super().__init__(command, argv, layers, keys, types)
        self.own_options = {"help", "print_config", *own_options}

    def explain(self, message: str) -> UserError:
        """Return the error that a message of jsonargparse tells of."""
        # The order matters: a message may quote another inside it, and the outer one names the key.
        if found := re.match(r'(?:Parser|Configuration) key "([^"]+)":\s*(.*)', message, re.DOTALL):
            return self._bad_value(found[1].removeprefix(f"{self.command}."), found[2])
        # What is typed for a whole group is named without the group's own key.
        if found := re.search(r"(?:Group '([^']+)' )?does not accept option '([^']+)'", message):
            return self._unknown_key(".".join(filter(None, (found[1], found[2]))))
        if found := re.search(r"unrecognized arguments: (.*)", message, re.DOTALL):
            return self.unknown_option(found[1].split())
        if found := re.search(r"arguments are required: (.*)", message):
            return self._missing([key.removeprefix(f"{self.command}.") for key in found[1].split(", ")])
        if found := re.match(r"(?:argument )?--(\S+)\.help: (.*)", message, re.DOTALL):
            option = next((one for one in self.options() if one[0] == f"--{found[1]}.help"), ("", ""))
            where, path = shown_option(option), option[1]
            base = re.search(r"is not a subclass of (\w+)", found[2])
            problem = "is no import path" if "import path" in found[2] else f"is no {base[1]}" if base else found[2]
            return self._bad_class(found[1], path, problem, Source(where, f"{found[1]}.class_path", path))
        if found := re.match(r"argument (?:-\w/)?--([^\s/]+?)(?:/\S+)?: expected .*argument", message):
            return self._nothing_behind(found[1])
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
        # And an option for a whole group as well, below which it takes a number for a group.
        for option, text in self.options():
            key = key_of(option)
            group = key in self.known and key not in self.keys and isinstance(read(text), Mapping)
            if group and isinstance(node := yaml.compose(text), MappingNode):
                self._check_mapping(node, f"{key}.")

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
            elif path not in self.keys and value.tag != "tag:yaml.org,2002:str":
                null = value.tag == "tag:yaml.org,2002:null"
                found = "a list" if isinstance(value, SequenceNode) else "null" if null else str(value.value)
                raise UserError(
                    f"`{path}` holds keys and values, not {found}",
                    where=self.place(path),
                    remedy="write its keys below it, or leave it out",
                )

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
            name, *arguments = key.split(".")
            # Below an argument of a class there may be names of a person's own: HealthMonitor.actions.critical.
            wholes = [".".join(arguments[:count]) for count in range(len(arguments), 0, -1)]
            options = [option for whole in wholes if (option := self.option_of_argument(whole)) is not None]
            found = [self.place_of_argument(name, whole) for whole in wholes]
            inner = next((one for one in found if one is not None), None) or self.sources()
            place = shown_option(options[0]) if options else inner
        shown = place if last in place else f"`{key}` in {place}"
        return UserError(error.what, where=shown, remedy=error.remedy)

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
        if not siblings:
            return f"{show(prefix.rstrip('.'))} has no keys below it"
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
        if (whole := next((word for word in self.argv if word.startswith(f"{given} ")), None)) is not None:
            remedy = f"leave out the quotes around both: {given} {shlex.quote(whole.removeprefix(given).strip())}"
            return UserError(f"{whole!r} is one word, not an option and its value", where="command line", remedy=remedy)
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

    def _nothing_behind(self, key: str) -> UserError:
        """Return the error for an option at the end of the command line, or with another option behind it."""
        for option, following in zip(self.argv, [*self.argv[1:], "--"], strict=False):
            name = key_of(option)
            if option.startswith("--") and following.startswith("-") and f"{name}.".startswith(f"{key}."):
                if name.endswith(".help"):
                    what = f"`{key}` is no class, whose arguments could be listed"
                    remedy = f"lit-grpo {self.command} --help {key} describes it"
                    return UserError(what, where=f"command line, {option}", remedy=remedy)
                hint, default = self.types.get(key, (None, None))
                below = name.removeprefix(key).removeprefix(".")
                right = right_value(name, (type_below(hint, below.split(".")) if below else hint, default), None)
                if right is None and takes_class(hint) and below in ("", "class_path"):
                    right = self._example_class(key)
                remedy = "give one" if right is None else f"for example {option} {shlex.quote(right)}"
                return UserError(f"{option} has no value behind it", where="command line", remedy=remedy)
        return UserError(f"--{key} has no value behind it", where="command line", remedy="give one")

    def _bad_value(self, key: str, details: str, source: Source | None = None) -> UserError:
        """Return the error for a value that a key does not take.

        Args:
            key: dotted key.
            details: what jsonargparse says of its value.
            source: what gave the value, where that was the value of a whole group.
        """
        if key == "config":
            return UserError(details, where="--config")
        # jsonargparse first tries text as the path of a file with the value. Nobody who sees this meant one.
        details = re.sub(r"^ *- Expected a path but .* either not accessible or invalid\n", "", details, flags=re.M)
        source = source or self.source(key, details)
        if source is not None and (closed := with_closed_brackets(source.text)) is not None:
            what = f"a bracket in the value of `{source.key}` is not closed"
            option = source.place.removeprefix("command line, ").partition(" ")[0]
            shown = f"{option} {shlex.quote(closed)}" if source.typed else closed
            return UserError(what, where=source.place, remedy=f"did you mean {shown}?")
        if below := message_below(details):
            inner = below[0].removeprefix(f"{self.command}.")
            return self._bad_value(inner, below[1], source and source.part(inner))
        if (broken := class_paths.broken_module(self.given(key, source))) is not None:
            return UserError(f"`{key}`: {broken.what}", where=broken.where, remedy=broken.remedy)
        where = source.place if source is not None else self.place(key)
        if found := re.match(r"\s*init_args is (.*), no mapping", details):
            return self._bad_arguments(key, found[1], where)
        if (error := self._bad_part(key, source)) is not None:
            return error
        nested = bool(whole_value(details)[0])
        if not nested and (given := given_for_keys(details, takes_keys(self.types.get(key)))) is not None:
            return self._bad_group(key, given, where)
        problem = class_problem(details)
        if problem is not None and "NestedArg" not in problem[0]:
            return self._bad_class(key, *problem, source, wanted_classes(details, problem[0]))
        if nested:
            option = where.removeprefix("command line, ").partition(" ")[0]
            what = f"there is no option {option if option.startswith('--') else f'--{key}.{whole_value(details)[0]}'}"
            remedy = f"`{key}` has no keys below it"
            if source is not None and key in self.types and takes_class(self.types[key][0]):
                remedy = source.class_first(key, self._example_class(key))
            return UserError(what, where="command line", remedy=remedy)
        if re.search(r"Subtypes: \[list\[[\w.]+\.Reward\]", details):
            given = given_value(details)
            right = class_paths.one_reward(source.text if source is not None else given or "")
            remedy = f"give a list, for example {shown_as(key, right, where)}"
            return UserError(_cannot_be(key, given), where=where, remedy=remedy)
        return self._bad_type(key, details, where)

    def _bad_arguments(self, key: str, given: str, where: str) -> UserError:
        """Return the error for what is no mapping in the place of all arguments of a class."""
        option = where.removeprefix("command line, ").partition(" ")[0]
        if key in self.types and not takes_class(self.types[key][0]):
            what = f"there is no option {option}"
            return UserError(what, where="command line", remedy=f"`{key}` has no keys below it")
        right = "{NAME: VALUE}"
        for name in class_paths.arguments_of(path := class_paths.full_path(self.chosen_class(key))):
            if (value := right_value(name, class_paths.argument_of(path, name).type, None)) is not None:
                right = f"{{{name}: {value}}}"
                break
        what = f"`{key}.init_args` takes the arguments of a class as keys and values, not {given!r}"
        return UserError(what, where=where, remedy=f"for example {option} {shlex.quote(right)}")

    def _bad_part(self, key: str, source: Source | None) -> UserError | None:
        """Return the error for a word in the place of keys and values below a key, such as one held-out set."""
        hint = self.types[key][0] if key in self.types else None
        if source is not None and source.key != key:
            if not source.key.startswith(f"{key}."):
                return None
            parts = {source.key: read(source.text)}
        else:
            value = self.given(key, source)
            parts = {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, Mapping) else {}
        for part, value in parts.items():
            below = type_below(hint, part.removeprefix(f"{key}.").split("."))
            optional = value is None and type(None) in members_of(below)
            if takes_keys((below, None)) and not isinstance(value, Mapping) and not optional:
                given = "null" if value is None else source.text if source is not None and source.key == part else value
                where = source.place if source is not None else self.place(part)
                return self._bad_group(part, str(given), where, {part: (below, None)})
        return None

    def _bad_group(self, key: str, given: str, where: str, types: Types | None = None) -> UserError:
        """Return the error for a word in the place of keys and values."""
        parent, _, last = key.rpartition(".")
        types = types or self.types
        if parent in _SETS and last == "class_path":
            own = parent.rpartition(".")[2]
            return UserError(
                f"`{parent}` takes sets by name, and {shorten(given, 60)!r} is no set but a source of questions",
                where=where,
                remedy=f"write {own}_prompts: {{class_path: {given}, ...}}, or name the set, "
                f"{own}: {{NAME: {{prompts: {{class_path: {given}, ...}}}}}}",
            )
        typed = where.startswith("command line, --")
        meant = key_that_was_meant(key, given, types)
        below, value = (meant, given) if meant is not None else group_example(key, types) or ("", "")
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
        if name.partition(".")[0] not in known:
            name = name.partition(".")[0]
        # These two stand beside the arguments, and `path` is no `class_path`.
        near = nearest(name, known) or next(iter(near_names(name, ["init_args", "class_path"], slips_only=True)), None)
        listed = f"it takes {', '.join(known)}" if known else "it takes no arguments"
        if near is None and name in _CLASS_WORDS:
            near = "class_path"
        if name.isdigit():
            listed = f"--{key}.NAME is an argument of the last class of the list; for another one write the whole list"
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
        # Python's word for it, unless it was typed.
        given = "null" if given == "None" and "None" not in where else given
        if given is None and where.startswith("command line, --"):
            given = where.removeprefix("command line, ").partition(" ")[2]
        what = _cannot_be(name, given)
        known = self.types.get(key) if argument is None else argument.type
        says_nothing = _SAYS_NOTHING.fullmatch(details) is not None
        types = wanted_types(details) or (types_in_words(known[0]) if says_nothing and known is not None else [])
        types = ["keys and values", "null"] if types == ["null"] and takes_keys(known) else types
        if names := literal_choices(details):
            # What is no word may stand there too; null is everywhere, and nobody misspells it.
            others = [one for one in types if one.endswith(("number", "list", "mapping")) or one == "true or false"]
            return self.bad_choice(name, given, [*names, *others], where)
        last = key if argument is None else argument.name
        right = right_value(last, known, given)
        example = "" if right is None else f"for example {shown_as(last, right, where)}"
        if "text" in types and (number := re.search(rf"\b{last.rpartition('.')[2]}: *([-+.\d][^\s,}}\]]*)", where)):
            return UserError(what, where=where, remedy=f"quotes make it text: {last.rpartition('.')[2]}: '{number[1]}'")
        if types:
            remedy = f"give {' or '.join(types)}"
            return UserError(what, where=where, remedy=", ".join(filter(None, (remedy, example))))
        if says_nothing:
            return UserError(what, where=where, remedy=example or None)
        return UserError(f"`{name}`: {' '.join(details.split())}", where=where)

    def _bad_class(
        self, key: str, class_path: str, problem: str, source: Source | None = None, wanted: Iterable[str] = ()
    ) -> UserError:
        """Return the error for a ``class_path`` that cannot be used, or for its ``init_args``.

        Args:
            key: its key.
            class_path: the class.
            problem: what jsonargparse says of it.
            source: the option or variable that gave it, where one did.
            wanted: names of the classes from which it may derive, where they are known.
        """

        def place(argument: str | None = None) -> str:
            return source.place if source is not None else self.place_of_class(key, class_path, argument)

        if option := re.search(r"Option '([^']+)' is not accepted|unrecognized arguments: --(\w+)", problem):
            name, known = option[1] or option[2], class_paths.arguments_of(class_path)
            if (wrong := class_in_wrong_form(self.given(key, source), name)) is not None:
                return UserError(f"`{key}`: {wrong[0]}", where=place(), remedy=f"write {wrong[1]}")
            error = self.bad_argument(key, class_path, name, known, place(name))
            # A base class stands where nobody has named one.
            base = class_path.rpartition(".")[2]
            if base in EXAMPLES_OF and not (error.remedy or "").startswith("did you mean"):
                own = key in self.types and base in class_names(self.types[key][0])
                example = class_paths.EXAMPLES.get(key, EXAMPLES_OF[base]) if own else EXAMPLES_OF[base]
                source = source or self.source_of(f"{key}.{name}")
                remedy = source.class_first(key, example) if source else f"name its class too: class_path: {example}"
                return UserError(error.what, where=error.where, remedy=remedy)
            return error
        if inner := re.match(r'(?:Parser|Configuration) key "([^"]+)":\s*(.*)', problem, re.DOTALL):
            argument = class_paths.argument_of(class_path, inner[1])
            if "NestedArg" in inner[2]:
                what = f"`{argument.name}` of {class_path} has no keys below it"
                return UserError(what, where=place(), remedy="give its value without a further name behind it")
            return self._bad_type(key, inner[2], place(inner[1]), argument)
        where = place()
        if required := re.search(r"arguments are required: (.*)", problem):
            needed = " and ".join(f"`{name}`" for name in required[1].split(", "))
            remedy = "add it under `init_args:`"
            typed = where.removeprefix("command line, ").partition(" ")[0].partition("=")[0].rstrip("+")
            if typed in (f"--{key}", f"--{key}.class_path"):
                name = required[1].split(", ")[0]
                right = right_value(name, class_paths.argument_of(class_path, name).type, None) or "VALUE"
                remedy = f"give it too, for example --{key}.{name} {shlex.quote(right)}"
            return UserError(f"{class_path} needs {needed} (under `{key}`)", where=where, remedy=remedy)
        first = next((line.strip() for line in problem.splitlines() if line.strip()), problem)[:200]
        if "has no attribute 'keys'" in first:
            what = f"`{key}`: `init_args` of {class_path} takes the arguments as keys and values"
            return UserError(what, where=where, remedy="write init_args: {NAME: VALUE}, or leave it out")
        separator = " " if first.startswith("is no ") else ": "
        example = self._example_class(key, [first.removeprefix("is no "), *wanted])
        below = source is not None and source.key not in (key, f"{key}.class_path")
        if source is not None and below and first == "is no import path" and class_path not in source.text:
            # What the class is misspelt as shows only with the argument behind it where the key takes text too.
            if class_path == self.chosen_class(key) and self.place(key) not in (self.sources(), source.place):
                what, remedy = f"`{key}`: {class_path!r} {first}", class_paths.instead(class_path, first, example)
                return UserError(what, where=self.place(key), remedy=remedy)
            what = f"`{source.key}` is an argument of a class, and `{key}` is {class_path!r}"
            return UserError(what, where=where, remedy=source.class_first(key, example))
        class_path = "null" if class_path == "None" else class_path
        what = f"`{key}`: {class_path!r}{separator}{first}"
        return UserError(what, where=where, remedy=class_paths.instead(class_path, first, example))

    def _example_class(self, key: str, bases: Iterable[str] = ()) -> str:
        """Return the import path of a class that may stand at a key, or that derives from one of some classes."""
        found = next((EXAMPLES_OF[base] for base in bases if base in EXAMPLES_OF), None) or class_paths.EXAMPLES.get(
            key
        )
        types = class_names(self.types[key][0]) if key in self.types else []
        return found or next((EXAMPLES_OF[one] for one in types if one in EXAMPLES_OF), EXAMPLES_OF["Reward"])


def _cannot_be(name: str, given: str | None) -> str:
    return f"`{name}` cannot be" + (f" {given!r}" if given is not None else " this")


def _did_you_mean(word: str, known: list[str]) -> str:
    """Ask ``did you mean 'a' or 'b'? ``; empty if no known word is near."""
    near = near_names(word, known)
    return f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""


def user_error_below(error: BaseException | None) -> UserError | None:
    """Return the UserError that a class raised while it was built or checked, from under the parser's wrapping."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__ or error.__context__
    return error
