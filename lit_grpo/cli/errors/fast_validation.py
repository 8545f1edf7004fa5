"""Validation of keys and choices from signatures alone, so that a typo is answered before heavy imports."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode

from lit_grpo.cli.config_files import Layer, find, is_config_option
from lit_grpo.cli.errors.error_messages import Explainer
from lit_grpo.cli.errors.schema import Field, NotReadableError, OptionalDataclass, read_schema
from lit_grpo.errors import UserError

_PATHS = frozenset({"path", "dirpath", "ckpt_path", "default_root_dir", "prompts", "val_prompts", "test_prompts"})
"""Last names of keys that take a path."""


def validate_fast(command: str, argv: Sequence[str], layers: Sequence[Layer], own_options: Iterable[str] = ()) -> None:
    """Refuse what the signatures alone show to be wrong; jsonargparse validates everything again.

    Args:
        command: fit, validate, test or predict.
        argv: arguments of the command.
        layers: configuration files of the command.
        own_options: options that are already taken out of ``argv``, without their dashes; one may have been meant.

    Raises:
        UserError: the command does not have a key, or a word is none of the choices of its key.
    """
    try:
        fields = read_schema(command).leaves()
    # Sources that cannot be read are left to jsonargparse: slower, but never wrong.
    except NotReadableError:
        return
    explainer = Explainer(command, argv, layers, fields, own_options)
    explainer.check_keys()
    _check_options(explainer, fields)
    _check_environment(explainer)
    _check_paths(explainer, fields)
    for key, field in fields.items():
        _check_choice(explainer, key, field.choices, key)
        if field.optional is not None:
            _check_optional(explainer, key, key, field.optional)


def _check_options(explainer: Explainer, fields: dict[str, Field]) -> None:
    for word in explainer.argv:
        option = word.partition("=")[0]
        # As for argparse, a word with a space in it is a value, whatever it begins with, and so is -1.
        if re.match(r"--|-[A-Za-z]", option) and " " not in word and not _is_option(option, explainer, fields):
            raise explainer.unknown_option([word])


def _is_option(option: str, explainer: Explainer, fields: dict[str, Field]) -> bool:
    if not option.startswith("--"):
        return option == "-h" or is_config_option(option)
    if option in ("--help", "--print_config"):
        return True
    key = option.removeprefix("--").removesuffix("+").removesuffix(".help")
    # Below a key there may be an argument of a class that only the configuration names; jsonargparse will look.
    return key in explainer.known or any(key.startswith(f"{name}.") for name in fields)


def _check_environment(explainer: Explainer) -> None:
    known = {explainer.variable(key) for key in explainer.known}
    for name in sorted(os.environ):
        if name.startswith(f"LIT_GRPO_{explainer.command.upper()}_") and name not in known:
            raise explainer.unknown_variable(name)


def _check_paths(explainer: Explainer, fields: dict[str, Field]) -> None:
    """Refuse an empty path, which is the current folder, and is what a variable of the shell is that nobody has set."""
    typed = zip(explainer.argv, explainer.argv[1:], strict=False)
    empty = [option for option, value in typed if option.startswith("--") and "=" not in option and value == ""]
    empty += [word.removesuffix("=") for word in explainer.argv if word.startswith("--") and word.endswith("=")]
    keys = [option.removeprefix("--").rstrip("+") for option in empty]
    keys += [key for key in fields if _plain_value(explainer, key) == ""]
    keys += [key for key in fields if os.environ.get(explainer.variable(key)) == ""]
    for key in keys:
        if key.rpartition(".")[2] in _PATHS:
            remedy = "name a path, or null for none; is a variable of the shell not set?"
            raise UserError(f"`{key}` is empty", where=explainer.place(key.replace(".init_args.", ".")), remedy=remedy)


def _check_choice(explainer: Explainer, key: str, choices: tuple[str, ...], name: str) -> None:
    given = _given(explainer, key) if choices else None
    if given is not None and given not in choices:
        raise explainer.bad_choice(name, given, list(choices), explainer.place(key))


def _given(explainer: Explainer, key: str) -> str | None:
    """Return the word that the last layer gives for a key; None if it gives none, or null, a number or a mapping."""
    value = _plain_value(explainer, key)
    return value if isinstance(value, str) else None


def given_value(command: str, argv: Sequence[str], layers: Sequence[Layer], key: str) -> Any:
    """Return the plain value that files and command line give for a key, as YAML reads it, before it is validated.

    None where they give none, or a mapping; the environment is not looked at.
    """
    return _plain_value(Explainer(command, argv, layers, {}, ()), key)


def _plain_value(explainer: Explainer, key: str) -> Any:
    if (option := explainer.option(lambda name: name == key)) is not None:
        text = option[1]
    else:
        found = find(explainer.layers, key)
        if found is None or not isinstance(found[2], ScalarNode):
            return None
        node = found[2]
        if node.tag == "tag:yaml.org,2002:str":
            return node.value
        text = node.value
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _check_optional(explainer: Explainer, outer: str, key: str, cls: OptionalDataclass) -> None:
    """Check names and choices in a dataclass that may be left out; ``outer`` is the first key above that holds one."""
    for name in _names_below(explainer, key):
        if name not in cls.fields:
            place = explainer.place(f"{key}.{name}")
            raise explainer.bad_argument(outer, cls.class_path, name, list(cls.fields), place)
    for name, field in cls.fields.items():
        shown = f"{outer}: {cls.class_path.rpartition('.')[2]}.{name}"
        _check_choice(explainer, f"{key}.{name}", field.choices, shown)
        if field.optional is not None:
            _check_optional(explainer, outer, f"{key}.{name}", field.optional)


def _names_below(explainer: Explainer, key: str) -> Iterator[str]:
    found: list[str] = []
    for layer in explainer.layers:
        if (here := find([layer], key)) is not None and isinstance(here[2], MappingNode):
            found += [str(name.value) for name, _ in here[2].value]
    for word in explainer.argv:
        if word.startswith(f"--{key}."):
            found.append(word.removeprefix(f"--{key}.").partition("=")[0].partition(".")[0])
    # With a class_path a class of the user may stand there, which takes other arguments.
    if not {"class_path", "init_args"} & set(found):
        yield from (name for name in found if name not in ("<<", "help"))
