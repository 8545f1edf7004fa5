"""Text that stays text: jsonargparse's parser without its second reading of what YAML has read already.

jsonargparse reads every value twice: a configuration file as YAML, and then each text in it as YAML once more, because
what comes from the command line has to be read there. A quoted ``'#### (.+)'`` is a comment in the second reading,
``'null'`` and ``'~'`` are null, and where a key may be left out that null is taken: the setting vanishes silently.

Here a value that YAML has read is never read again where its key takes text. What is typed (command line, environment)
is read once, and is null only if it is one of :data:`NULLS`; in quotes, as in YAML (``'"null"'``), these are text too.

It replaces seven functions of jsonargparse 4.53 (pinned in pyproject.toml), which offers no hook between the two
readings. They act as before for every parser that is no :class:`TextParser`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentParser, Namespace, _loaders_dumpers, _typehints

from lit_grpo.errors import EngineError, StopRun, UserError
from lit_grpo.utils.bounds import check_arguments
from lit_grpo.utils.examples import members_of
from lit_grpo.utils.imports import line_of

NULLS = frozenset({"null", "Null", "NULL", "~"})
"""What is null where it is typed without quotes."""

Source = Literal["foreign", "read", "typed"]
"""Where a value comes from: another program's parser; YAML or Python, already read; a command line, not yet read."""

_source: ContextVar[Source] = ContextVar("source", default="foreign")
_expected: ContextVar[Any] = ContextVar("expected", default=Any)
"""Type of the key that is being parsed."""


class _Typed(str):
    """Text from the command line for an argument of a class, on its way to the parser of that class."""


@contextmanager
def _values_are(source: Source) -> Iterator[None]:
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


def _ours(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of the parser, so that all that happens in it keeps text."""

    @functools.wraps(method)
    def keeping_text(*args: Any, **kwargs: Any) -> Any:
        with _values_are("read"):
            return method(*args, **kwargs)

    return keeping_text


class TextParser(ArgumentParser):
    """jsonargparse's parser, under which text stays text; LightningCLI's derives from it too."""

    parse_args = _ours(ArgumentParser.parse_args)
    parse_object = _ours(ArgumentParser.parse_object)
    instantiate = _ours(ArgumentParser.instantiate)
    dump = _ours(ArgumentParser.dump)


class _QuotingDumper(yaml.SafeDumper):
    """Writer of YAML that quotes the text ``1e3`` too: YAML 1.1 has no such number, but jsonargparse's reader has."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if _number_like(text):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _number_like(text: str) -> bool:
    if text[:1] not in set("-+.0123456789"):
        return False
    try:
        return not isinstance(yaml.load(text, Loader=_loaders_dumpers.get_yaml_default_loader()), str)
    except (yaml.YAMLError, ValueError):
        return False


_QuotingDumper.add_representer(str, _represent_text)
# Text that was typed for an argument of a class is still of its own type where nothing has parsed it.
_QuotingDumper.add_representer(_Typed, lambda dumper, text: _represent_text(dumper, str(text)))


def _dump_yaml(data: Any) -> str:
    if _source.get() == "foreign":
        return str(_original_dump(data))
    options: dict[str, Any] = _loaders_dumpers.dump_yaml_kwargs
    return str(yaml.dump(data, Dumper=_QuotingDumper, **options))


def make_checked(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Make an object that the configuration names by its class, with arguments checked against their types.

    jsonargparse takes null for every type. A dataclass is checked by whoever takes it, who knows the whole key.

    Raises:
        UserError: an argument is null, no number or out of its range; names the class and the argument.
    """
    if dataclasses.is_dataclass(cls):
        return cls(*args, **kwargs)
    check_arguments(cls, kwargs, cls.__name__, finite=False)
    try:
        return cls(*args, **kwargs)
    except (UserError, StopRun, EngineError):
        raise
    # A class of a person may raise anything while it is made, and end the program.
    except (Exception, SystemExit) as error:
        named = next((name for name in kwargs if re.search(rf"\b{name}\b", str(error))), None)
        raise UserError(
            f"{cls.__name__} cannot be made: {type(error).__name__}: {error}".rstrip(": "),
            # A line of a library helps nobody where the message names the argument.
            where=f"{cls.__name__}.{named}" if named and cls.__module__.startswith("lightning.") else line_of(error),
            remedy="change its arguments or mend it; LIT_GRPO_DEBUG=1 shows the whole traceback",
        ) from error


def takes_text(hint: Any) -> bool:
    """Tell whether a type is ``str``, or a union that has it."""
    return str in members_of(hint)


def _value_type_of_mapping(hint: Any) -> Any:
    """Return the type of the values of a mapping, ``Any`` if it states none; None if the type is no mapping."""
    for one in members_of(hint):
        origin = typing.get_origin(one) or one
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return (*typing.get_args(one), Any, Any)[1]
    return None


def _is_null(text: str) -> bool:
    return text.strip() in NULLS


def _typed_text(text: str, null: bool = True, anything: bool = False) -> str | None:
    """Return what is typed for a key that takes text: itself, null, or a null in quotes as the text that it holds.

    Where a key takes anything, numbers in quotes are text too.
    """
    if null and _is_null(text):
        return None
    word = text.strip()
    if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'":
        try:
            inner = yaml.safe_load(word)
            # Only what could not be written otherwise: any other quotes are part of the text, as they always were.
            plain = yaml.safe_load(inner) if isinstance(inner, str) and inner else ""
            if plain is None or (anything and not isinstance(plain, str)):
                return str(inner)
        except yaml.YAMLError:
            pass
    return text


_original_dump = _loaders_dumpers.dumpers["yaml"]
_original_parse = _typehints.parse_value_or_config
_original_adapt = _typehints.adapt_typehints
_original_check = _typehints.ActionTypeHint._check_type
_original_call = _typehints.ActionTypeHint.__call__
_original_apply = ArgumentParser._apply_actions
_original_environment = ArgumentParser._load_env_vars


def _parse(value: Any, enable_path: bool = True, simple_types: bool = False) -> tuple[Any, Any]:
    """Read one value; stands for jsonargparse's ``parse_value_or_config``."""
    source, expected = _source.get(), _expected.get()
    nested = value if isinstance(value, _typehints.NestedArg) else None
    text = nested.val if nested else value
    if source == "foreign" or not isinstance(text, str):
        return _original_parse(value, enable_path, simple_types)
    if isinstance(text, _Typed):
        text = value = str(text)
        source = "typed"
        _source.set(source)
    if source == "read":
        if simple_types or (nested is None and takes_text(expected)):
            return value, None
        parsed, path = _original_parse(value, enable_path, simple_types)
        # A comment is no value: the key's own type has to refuse it.
        return (value, None) if parsed is None and not _is_null(text) else (parsed, path)
    if nested:
        return _typehints.NestedArg(nested.key, _parse_below(text, nested.key, _value_type_of_mapping(expected))), None
    parsed, path = _original_parse(value, enable_path, simple_types)
    if parsed is None or isinstance(parsed, str):
        parsed = _typed_text(text)
    if not isinstance(parsed, str):
        # What lies inside has now been read.
        _source.set("read")
    return parsed, path


def _is_class(text: Any) -> bool:
    """Tell whether text is the YAML of a class, which a key that takes a class or text has not taken for one."""
    if not isinstance(text, str) or not text.lstrip().startswith("{") or not re.search(r"class_path|init_args", text):
        return False
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return False
    return isinstance(value, dict) and not value.keys().isdisjoint({"class_path", "init_args"})


def _mapping_of(text: str) -> dict[str, Any]:
    """Read the arguments of a class that are typed all at once: ``--data.prompts.init_args '{digits: 2}'``."""
    parsed, _ = _original_parse(text, False)
    if not isinstance(parsed, dict):
        raise ValueError(f"init_args is {text}, no mapping; write '{{NAME: VALUE, ...}}', or one argument: .NAME VALUE")
    _source.set("read")
    return parsed


def _parse_below(text: str, key: str, value_type: Any) -> Any:
    """Read what is typed for one key of a class (``value_type`` is None) or of a mapping."""
    # The parser of the class gets the option as it was typed, and knows the type of the argument.
    if value_type is None:
        return _mapping_of(text) if key == "init_args" else _Typed(text)
    _source.set("read")
    if takes_text(value_type):
        return _typed_text(text, types.NoneType in members_of(value_type))
    try:
        parsed, _ = _original_parse(text, False, simple_types=value_type is Any)
    except yaml.YAMLError:
        return text
    return _typed_text(text, anything=value_type is Any) if parsed is None or isinstance(parsed, str) else parsed


def _adapt(value: Any, hint: Any, *args: Any, **kwargs: Any) -> Any:
    """Check a value against a type; stands for jsonargparse's ``adapt_typehints``."""
    # A comment, read once more, would be null.
    if hint is types.NoneType and isinstance(value, str) and _source.get() != "foreign" and not _is_null(value):
        raise ValueError(f"Expected a {hint}. Got value: {value}")
    # A class in a wrong form would be taken for the path of a file where the key takes text too.
    if _source.get() != "foreign" and takes_text(hint):
        if _is_class(value) and hint is str:
            raise ValueError(f"Expected a {hint}. Got value: {value}")
        if _is_class(kwargs.get("orig_val")):
            kwargs["orig_val"] = None
    nested = _source.get() != "foreign" and isinstance(value, _typehints.NestedArg) and "." in value.key
    # `--data.val.mine.path` is the path of `mine` also where no file has set `data.val`: without a mapping there,
    # jsonargparse takes `mine.path` for the key.
    if nested and kwargs.get("prev_val") is None and dataclasses.is_dataclass(_value_type_of_mapping(hint)):
        kwargs["prev_val"] = {}
    if _source.get() == "read" and isinstance(value, str) and takes_text(hint):
        # A union tries its other members first, and reads the text for each of them.
        others = [one for one in members_of(hint) if one is not str]
        classes = [one for one in others if isinstance(one, type) and one not in _typehints.leaf_types]
        if not any(not issubclass(one, (list, tuple, dict, set)) for one in classes):
            return value
    return _original_adapt(value, hint, *args, **kwargs)


@functools.wraps(_original_check)
def _check(self: Any, value: Any, append: Any = False, cfg: Any = None, mode: Any = None) -> Any:
    source, expected = _source.set(_source.get()), _expected.set(self._typehint)
    try:
        return _original_check(self, value, append=append, cfg=cfg, mode=mode)
    finally:
        _source.reset(source)
        _expected.reset(expected)


@functools.wraps(_original_call)
def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    # argparse calls an action with each option; with no arguments the call makes a copy of the action.
    if not args or _source.get() == "foreign":
        return _original_call(self, *args, **kwargs)
    with _values_are("typed"):
        return _original_call(self, *args, **kwargs)


@functools.wraps(_original_apply)
def _apply(self: ArgumentParser, *args: Any, **kwargs: Any) -> Namespace:
    with _values_are("foreign" if _source.get() == "foreign" else "read"):
        return _original_apply(self, *args, **kwargs)


@functools.wraps(_original_environment)
def _environment(self: ArgumentParser, *args: Any, **kwargs: Any) -> Namespace:
    with _values_are("foreign" if _source.get() == "foreign" else "typed"):
        return _original_environment(self, *args, **kwargs)


_loaders_dumpers.dumpers["yaml"] = _dump_yaml
_typehints.parse_value_or_config = _parse
_typehints.adapt_typehints = _adapt  # type: ignore[assignment]
_typehints.ActionTypeHint._check_type = _check  # type: ignore[method-assign]
_typehints.ActionTypeHint.__call__ = _call  # type: ignore[method-assign]
ArgumentParser._apply_actions = _apply  # type: ignore[method-assign]
ArgumentParser._load_env_vars = _environment  # type: ignore[method-assign]
