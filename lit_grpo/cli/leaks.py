"""Refuses a silent trap of layered configuration: arguments of one class that become another's.

If one file says ``class_path: A, init_args: {x: 1}`` and a later one ``class_path: B``, the parser keeps ``x: 1`` for B
wherever B takes an ``x`` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from yaml.nodes import MappingNode, ScalarNode

from lit_grpo.cli.layers import Layer
from lit_grpo.cli.messages import arguments_of
from lit_grpo.errors import UserError


@dataclass
class _Choice:
    """A class chosen under a key, and the arguments set for it there."""

    class_path: str
    arguments: dict[str, str]
    """Name -> where."""
    where: str


def refuse_leaks(layers: Sequence[Layer], argv: Sequence[str]) -> None:
    """Check that no argument passes from one class to another.

    Raises:
        UserError: a later layer changes a class and would inherit arguments of the earlier one.
    """
    chosen: dict[str, _Choice] = {}
    for layer in layers:
        for key, choice in _choices(layer, layer.root, ""):
            _merge(chosen, key, choice)
    words = [word.partition("=") for word in argv]
    for i, (option, equals, value) in enumerate(words):
        key = option.removeprefix("--").removesuffix(".class_path")
        if option.startswith("--") and key in chosen:
            value = value if equals else next((word[0] for word in words[i + 1 : i + 2]), "")
            options = [word[0] for word in words if word[0].startswith(f"--{key}.")]
            own = {name.removeprefix(f"--{key}.").removeprefix("init_args."): "the command line" for name in options}
            _merge(chosen, key, _Choice(value, own, f"command line, {option} {value}"))


def _merge(chosen: dict[str, _Choice], key: str, new: _Choice) -> None:
    old = chosen.get(key)
    if old is not None and _name(old.class_path) != _name(new.class_path):
        taken = [name for name in old.arguments if name in arguments_of(new.class_path) and name not in new.arguments]
        if taken:
            raise UserError(
                f"`{key}` changes from {old.class_path} to {new.class_path}, which would take over "
                f"{', '.join(f'`{name}`' for name in taken)}, set for the other class in {old.arguments[taken[0]]}",
                where=new.where,
                remedy=f"set {', '.join(f'`{name}`' for name in taken)} here too, or leave it out there",
            )
        old = None
    arguments = {**(old.arguments if old else {}), **new.arguments}
    chosen[key] = _Choice(new.class_path, arguments, new.where)


def _choices(layer: Layer, node: MappingNode | None, prefix: str) -> Iterator[tuple[str, _Choice]]:
    """Every class chosen in a file, by dotted key. Lists are replaced as a whole, so nothing leaks in them."""
    for key, value in node.value if node is not None else ():
        if not isinstance(value, MappingNode):
            continue
        path = prefix + str(key.value)
        parts = {str(k.value): v for k, v in value.value}
        class_path, arguments = parts.get("class_path"), parts.get("init_args")
        if isinstance(class_path, ScalarNode):
            pairs = arguments.value if isinstance(arguments, MappingNode) else ()
            places = {str(k.value): str(layer.place(k)).partition("\n")[0] for k, _ in pairs}
            yield path, _Choice(class_path.value, places, str(layer.place(class_path)))
        else:
            yield from _choices(layer, value, f"{path}.")


def _name(class_path: str) -> str:
    return class_path.rpartition(".")[2]
