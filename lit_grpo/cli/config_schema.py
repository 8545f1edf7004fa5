"""The JSON schema of the configuration of ``fit``, from the parser that reads it, for editors.

jsonargparse writes the schema of its parser. Here it gets what that one leaves out: the ranges that ``Bound`` declares,
and classes under any of the names by which a configuration may call them, those of the person's own included.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

from jsonargparse import ArgumentParser, _typehints
from jsonargparse._completions_jsonschema import ParserJsonschema, get_doc_short_description

from lit_grpo.utils.bounds import Bound, parameter_hints

OURS = ("lit_grpo.", "lightning.")
"""Beginnings of the import paths of classes whose arguments are listed; what others import is chance."""


def config_schema(parser: ArgumentParser, classes: dict[str, type]) -> dict[str, Any]:
    """Describe every configuration that a parser takes, as JSON Schema of 2020-12.

    Args:
        parser: the parser of one command.
        classes: class whose constructor takes what stands below a key of the top, by that key.
    """
    schema: dict[str, Any] = _Schema().generate(parser)
    for key, cls in classes.items():
        _add_bounds(schema["properties"][key], parameter_hints(cls))
    return schema


class _Schema(ParserJsonschema):
    def subclass_def(self, class_type: Any, action: Any) -> dict[str, Any]:
        anything: dict[str, Any] = {"type": ["string", "object"]}
        try:
            paths = [path for path in _typehints.get_all_subclass_paths(class_type) if path.startswith(OURS)]
        # Metaclasses have no list of their subclasses.
        except TypeError:
            return anything
        if not paths:
            return anything
        known = [self._when_named(path, action) for path in paths]
        # An object is open in its class_path, since a class of the person's own may stand there.
        one = {**self.unknown_class_path_schema(), "allOf": known}
        # With a class as its default, a part of its arguments may be given alone.
        del one["required"]
        return {"anyOf": [{"type": "string"}, one]}

    def _when_named(self, path: str, action: Any) -> dict[str, Any]:
        cls = _typehints.import_object(path)
        name = path.rpartition(".")[2]
        arguments = self.class_parser_schema(path, action)
        if isinstance(cls, type):
            _add_bounds(arguments, parameter_hints(cls))
        # By any package that exports it, or by its bare name.
        written = {"type": "string", "pattern": rf"^(({'|'.join(p[:-1] for p in OURS)})\.([a-z_]+\.)*)?{name}$"}
        return {
            "if": {"properties": {"class_path": written}, "required": ["class_path"]},
            "then": {"properties": {"init_args": arguments}, "description": get_doc_short_description(cls) or name},
        }

    def class_parser_schema(self, class_type: Any, action: Any, description: str | None = None) -> dict[str, Any]:
        schema: dict[str, Any] = super().class_parser_schema(class_type, action, description)
        if dataclasses.is_dataclass(class_type) and isinstance(class_type, type):
            _add_bounds(schema, parameter_hints(class_type))
        return schema


def _add_bounds(schema: dict[str, Any], hints: dict[str, Any]) -> None:
    """Put ranges into the properties of an object, and of the dataclasses in it, by the types of its parameters."""
    for name, entry in schema.get("properties", {}).items():
        bound, cls = _declared(hints.get(name))
        if bound is not None:
            lists = [one["items"] for one in (entry, *entry.get("anyOf", ())) if isinstance(one.get("items"), dict)]
            for target in (entry, *lists):
                # These keywords say something about numbers alone: text and null pass.
                target.update(_limits(bound))
        if cls is not None:
            _add_bounds(entry, parameter_hints(cls))


def _limits(bound: Bound) -> dict[str, float]:
    keywords = (
        ("minimum", bound.least), ("exclusiveMinimum", bound.above), ("maximum", bound.most),
        ("exclusiveMaximum", bound.below),
    )  # fmt: skip
    return {keyword: limit for keyword, limit in keywords if limit is not None}


def _declared(hint: Any) -> tuple[Bound | None, type | None]:
    """(bound, dataclass) in a type, however deep in unions and annotations."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return None, hint
    bound = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Bound)), None)
    inner = [_declared(one) for one in typing.get_args(hint) if typing.get_origin(hint) is not typing.Literal]
    bounds = [bound, *(one for one, _ in inner)]
    return next((b for b in bounds if b is not None), None), next((c for _, c in inner if c is not None), None)
