"""The check for arguments of one class that layered configuration silently hands to another.

If one file says ``class_path: A, init_args: {x: 1}`` and a later one ``class_path: B``, jsonargparse keeps ``x: 1`` for
B wherever B takes an ``x`` too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from yaml.nodes import MappingNode, ScalarNode

from lit_grpo.cli.config_files import Layer
from lit_grpo.cli.errors.class_paths import arguments_of
from lit_grpo.errors import UserError


@dataclass
class _ChosenClass:
    """A class chosen under a key, and the arguments set for it there."""

    class_path: str
    arguments: dict[str, str]
    """File and line of each argument, by its name."""
    where: str
    """File and line, or option, that chose the class."""


def check_class_changes(layers: Sequence[Layer], argv: Sequence[str]) -> None:
    """Check that no argument passes from one class to the class that a later layer puts in its place.

    Raises:
        UserError: a later layer changes a class and would inherit arguments of the earlier one.
    """
    chosen: dict[str, _ChosenClass] = {}
    for layer in layers:
        for key, new in _chosen_classes(layer, layer.root, ""):
            _merge(chosen, key, new)
    # The command line comes last, as the layer that wins.
    words = [word.partition("=") for word in argv]
    for i, (option, equals, value) in enumerate(words):
        key = option.removeprefix("--").removesuffix(".class_path")
        if option.startswith("--") and key in chosen:
            value = value if equals else next((word[0] for word in words[i + 1 : i + 2]), "")
            options = [word[0] for word in words if word[0].startswith(f"--{key}.")]
            own = {name.removeprefix(f"--{key}.").removeprefix("init_args."): "the command line" for name in options}
            _merge(chosen, key, _ChosenClass(value, own, f"command line, {option} {value}"))


def _merge(chosen: dict[str, _ChosenClass], key: str, new: _ChosenClass) -> None:
    old = chosen.get(key)
    if old is not None and _name(old.class_path) != _name(new.class_path):
        accepted = arguments_of(new.class_path)
        inherited = [name for name in old.arguments if name in accepted and name not in new.arguments]
        if inherited:
            names = ", ".join(f"`{name}`" for name in inherited)
            raise UserError(
                f"`{key}` changes from {old.class_path} to {new.class_path}, which would take over {names}, set for "
                f"the other class in {old.arguments[inherited[0]]}",
                where=new.where,
                remedy=f"set {names} here too, or leave it out there",
            )
        old = None
    arguments = {**(old.arguments if old else {}), **new.arguments}
    chosen[key] = _ChosenClass(new.class_path, arguments, new.where)


def _chosen_classes(layer: Layer, node: MappingNode | None, prefix: str) -> Iterator[tuple[str, _ChosenClass]]:
    """Yield every class chosen in a file, by dotted key."""
    # Lists are not looked into: a later layer replaces them as a whole, so nothing leaks in them.
    for key, value in node.value if node is not None else ():
        if not isinstance(value, MappingNode):
            continue
        path = prefix + str(key.value)
        children = {str(k.value): v for k, v in value.value}
        class_path, arguments = children.get("class_path"), children.get("init_args")
        if isinstance(class_path, ScalarNode):
            pairs = arguments.value if isinstance(arguments, MappingNode) else ()
            lines = {str(k.value): str(layer.place(k)).partition("\n")[0] for k, _ in pairs}
            yield path, _ChosenClass(class_path.value, lines, str(layer.place(class_path)))
        else:
            yield from _chosen_classes(layer, value, f"{path}.")


def _name(class_path: str) -> str:
    # Of a class only the last name: the same one may be written by its module or by the package that re-exports it.
    return class_path.rpartition(".")[2]
