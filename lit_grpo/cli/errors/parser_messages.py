"""Reading of jsonargparse's messages: which class, value or type they complain of.

The patterns are those of jsonargparse 4.53's messages (pinned in pyproject.toml): its exceptions carry no key, value or
type but in their text.
"""

from __future__ import annotations

import re


def class_problem(details: str) -> tuple[str, str] | None:
    """Return (class path, its problem) of the class that jsonargparse could not use; of nested ones the innermost."""
    if found := re.search(r"Expected a dot import path string: ?(.*)", details):
        return found[1].strip(), "is no import path"
    if found := re.search(r"Import path (\S+) does not correspond to a subclass of (\S+)", details):
        return found[1], f"is no {found[2]}"
    # In a union the message leaves out which path.
    if found := re.search(r"Import path does not correspond to a subclass of (\S+)", details):
        return given_value(details) or "", f"is no {found[1]}"
    if found := re.search(r"Not a valid subclass of (\w+)\. Got value: (.*)", details):
        return found[2].strip(), f"is no {found[1]}"
    found = re.search(r"Problem with given class_path '([^']+)':\s*\n(.*)", details, re.DOTALL)
    if not found:
        return None
    lines = found[2].splitlines()
    # The problem is the block indented like its first line; complaints of the union's other types follow, further left.
    indent = len(lines[0]) - len(lines[0].lstrip())
    block = []
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) < indent:
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


def whole_value(details: str) -> tuple[str, str]:
    """Return (dotted key below that of the message, value) of all that was given, of which a part may be wrong.

    The key is empty where the value is that of the very key.
    """
    if found := re.search(r"Unable to load config ['\"](.*?)['\"]\s*(?:\n|$)", details):
        return "", found[1]
    # The union that is named last is the outermost.
    values = re.findall(r"^ *Given value: (.*)$", details, re.M) or re.findall(r"Got value: (.*)", details)
    last = values[-1].strip() if values else ""
    nested = re.fullmatch(r"NestedArg\(key='([^']+)', val=(.*)\)", last)
    return (nested[1], nested[2]) if nested else ("", last)


def message_below(details: str) -> tuple[str, str] | None:
    """Return (dotted key, message) of the key that is wrong in a mapping that is given for a whole group."""
    found = re.search(
        r"Unable to load config.*?- (?:Parser|Configuration) key \"([^\"]+)\":\s*(.*)", details, re.DOTALL
    )
    return (found[1], found[2]) if found else None


def wanted_classes(details: str, given: str) -> list[str]:
    """Name the types of what may stand where ``given`` stands, which is no import path."""
    before, found, _ = details.partition(f"Expected a dot import path string: {given}")
    types = re.findall(r"Subtypes: (.*)", before) if found else []
    return [name.rpartition(".")[2] for name in re.findall(r"[\w.]+", types[-1])] if types else []


def given_for_keys(details: str, optional: bool) -> str | None:
    """Return what was given in the place of keys and values, as text; None if that is not what a message says.

    Args:
        details: message of jsonargparse.
        optional: whether the key takes a dataclass that may be left out, of which messages are worded otherwise.
    """
    if found := re.search(r"Unable to load config ['\"](.*?)['\"]\s*(?:\n|$)", details):
        return found[1]
    if found := re.search(r"Subclasses are disabled for \w+, thus '([^']+)' is not accepted", details):
        return found[1]
    if not optional or not re.search(r"Given value type: <class '(str|int|float|bool|list)'>", details):
        return None
    # A dotted word is the import path of a class.
    given = given_value(details)
    return None if given is None or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", given) else given


def wanted_types(details: str) -> list[str]:
    """Name the types that a value did not match, in words a person uses."""
    types = re.findall(r"Expected an? (.+?)(?:\. Got value|$)", details, re.M)
    return list(dict.fromkeys(in_words(type_name) for type_name in types))


def in_words(type_name: str) -> str:
    """Name a type as a person would."""
    if found := re.match(r"tuple with (\d+) elements", type_name):
        return f"a list of {found[1]}"
    if type_name.startswith("string with form"):
        return "a time such as 0:30:00"
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
