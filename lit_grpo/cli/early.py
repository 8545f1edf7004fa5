"""Answers misspelt keys and choices at once, before anything heavy is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence

import yaml
from yaml.nodes import MappingNode, ScalarNode

from lit_grpo.cli.explain import Explainer
from lit_grpo.cli.layers import Layer, find, is_config_option
from lit_grpo.cli.schema import Field, NotReadableError, Part, read_schema


def check_early(command: str, argv: Sequence[str], layers: Sequence[Layer], own: Iterable[str] = ()) -> None:
    """Refuse what can be told to be wrong from the signatures alone; the parser looks at everything again.

    Args:
        command: fit, validate, test or predict.
        argv: its arguments.
        layers: its configuration files.
        own: options without their dashes that have been taken out of ``argv``; one of them may have been meant.

    Raises:
        UserError: a key that the command does not have, a word that is none of its key's choices.
    """
    try:
        fields = read_schema(command).leaves()
    except NotReadableError:
        return
    explainer = Explainer(command, argv, layers, fields, own)
    explainer.check_keys()
    _check_options(explainer, fields)
    _check_environment(explainer)
    for key, one in fields.items():
        _check_choice(explainer, key, one.choices, key)
        if one.part is not None:
            _check_part(explainer, key, key, one.part)


def _check_options(explainer: Explainer, fields: dict[str, Field]) -> None:
    for word in explainer.argv:
        option = word.partition("=")[0]
        # Like the parser: a word with a space in it is a value, whatever it begins with; -1 is one too.
        if re.match(r"--|-[A-Za-z]", option) and " " not in word and not _is_option(option, explainer, fields):
            raise explainer.unknown_option([word])


def _is_option(option: str, explainer: Explainer, fields: dict[str, Field]) -> bool:
    if not option.startswith("--"):
        return option == "-h" or is_config_option(option)
    if option in ("--help", "--print_config"):
        return True
    key = option.removeprefix("--").removesuffix("+").removesuffix(".help")
    # Below a key there may be one of a class, which only the parser knows.
    return key in explainer.known or any(key.startswith(f"{name}.") for name in fields)


def _check_environment(explainer: Explainer) -> None:
    known = {explainer.variable(key) for key in explainer.known}
    for name in sorted(os.environ):
        if name.startswith(f"LIT_GRPO_{explainer.command.upper()}_") and name not in known:
            raise explainer.unknown_variable(name)


def _check_choice(explainer: Explainer, key: str, choices: tuple[str, ...], name: str) -> None:
    given = _given(explainer, key) if choices else None
    if given is not None and given not in choices:
        raise explainer.bad_choice(name, given, list(choices), explainer.place(key))


def _given(explainer: Explainer, key: str) -> str | None:
    """The word that holds for a key; None if it is not given, or is no word (null, a number, a mapping)."""
    if (option := explainer.option(lambda name: name == key)) is not None:
        try:
            value = yaml.safe_load(option[1])
        except yaml.YAMLError:
            return None
        return value if isinstance(value, str) else None
    found = find(explainer.layers, key)
    node = found[2] if found is not None else None
    return node.value if isinstance(node, ScalarNode) and node.tag == "tag:yaml.org,2002:str" else None


def _check_part(explainer: Explainer, outer: str, key: str, part: Part) -> None:
    """The names and choices of a dataclass that may be left out; ``outer`` is the first key above that is one."""
    for name in _names_below(explainer, key):
        if name not in part.fields:
            place = explainer.place(f"{key}.{name}")
            raise explainer.bad_argument(outer, part.class_path, name, list(part.fields), place)
    for name, one in part.fields.items():
        shown = f"{outer}: {part.class_path.rpartition('.')[2]}.{name}"
        _check_choice(explainer, f"{key}.{name}", one.choices, shown)
        if one.part is not None:
            _check_part(explainer, outer, f"{key}.{name}", one.part)


def _names_below(explainer: Explainer, key: str) -> Iterator[str]:
    found: list[str] = []
    for layer in explainer.layers:
        if (here := find([layer], key)) is not None and isinstance(here[2], MappingNode):
            found += [str(name.value) for name, _ in here[2].value]
    for word in explainer.argv:
        if word.startswith(f"--{key}."):
            found.append(word.removeprefix(f"--{key}.").partition("=")[0].partition(".")[0])
    if not {"class_path", "init_args"} & set(found):  # a class of the user's may take other arguments
        yield from (name for name in found if name not in ("<<", "help"))
