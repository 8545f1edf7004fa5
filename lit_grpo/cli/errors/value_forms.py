"""The form of a value that is typed or written in a file: an open bracket, arguments that stand beside their class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

_CLASS_KEYS = frozenset({"class_path", "init_args", "dict_kwargs"})
_CLOSING = {"{": "}", "[": "]"}


def read(text: str) -> Any:
    """Read text as YAML; text that is none is itself."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def reads_as(text: str, given: str) -> bool:
    """Tell whether ``text``, as it was typed, may be the value that a message shows as ``given``."""
    value = read(text)
    return given in (text, repr(text), str(value), repr(value))


def with_closed_brackets(text: str) -> str | None:
    """Return the text with the brackets that it lacks at its end; None if it is YAML already, or not even then.

    >>> with_closed_brackets("[{a: 1}"), with_closed_brackets("[1]"), with_closed_brackets("a]")
    ('[{a: 1}]', None, None)
    """
    if text.lstrip()[:1] not in _CLOSING or not isinstance(read(text), str):
        return None
    missing: list[str] = []
    for letter in text:
        if letter in _CLOSING:
            missing.append(_CLOSING[letter])
        elif missing and letter == missing[-1]:
            missing.pop()
    closed = text + "".join(reversed(missing))
    return None if isinstance(read(closed), str) else closed


def class_in_wrong_form(value: Any, refused: str) -> tuple[str, str] | None:
    """Find a class that is written in the way of other programs, such as ``{ExactMatch: {weight: 2}}``.

    Args:
        value: what was given, as YAML reads it.
        refused: the argument that its base class does not have, since jsonargparse takes all keys for arguments then.

    Returns:
        What is wrong, and the class in its right form as YAML; None if no class is in a wrong form.
    """
    for mapping in _mappings(value):
        beside = {name: one for name, one in mapping.items() if name not in _CLASS_KEYS}
        arguments = mapping.get("init_args")
        if "class_path" in mapping and beside and refused == "class_path":
            known = dict(arguments) if isinstance(arguments, Mapping) else {}
            right = {"class_path": mapping["class_path"], "init_args": known | beside}
            return f"`{next(iter(beside))}` stands beside `class_path`, not below `init_args`", written(right)
        name = next(iter(mapping), None)
        named = isinstance(name, str) and re.fullmatch(r"([A-Za-z_]\w*\.)*[A-Z]\w*", name) is not None
        if named and len(mapping) == 1 and refused.startswith(str(name)):
            below = mapping[name]
            arguments = {"init_args": below} if isinstance(below, Mapping) and below else {}
            return f"the class `{name}` stands in the place of a key", written({"class_path": name, **arguments})
    return None


def written(value: Any) -> str:
    """Write a value as YAML in one line, with quotes where text needs them."""
    options: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "width": 1_000_000}
    return yaml.safe_dump(value, **options).strip().removesuffix("\n...")


def _mappings(value: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(value, Mapping):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for one in inner:
        yield from _mappings(one)
