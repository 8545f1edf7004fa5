"""Secrets of a configuration (keys, tokens, passwords), masked in everything that a run writes or prints.

A secret is known by the name of its key (``api_key``, ``hf_token``, ``password``), by standing under ``env:``, by its
place in an address (``https://user:password@host``, ``?api_key=``), or by the shape that providers give their keys.
"""

from __future__ import annotations

import itertools
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "**masked**"
"""What stands in the place of a secret."""

_SECRET_WORDS = {
    "password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials", "apikey",
    "authorization", "bearer", "cookie",
}  # fmt: skip
_SECRET_PAIRS = {
    ("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("account", "key"), ("auth", "key"),
    ("signing", "key"), ("encryption", "key"), ("subscription", "key"), ("ssh", "key"), ("sas", "token"),
}  # fmt: skip
_NOT_SECRET_BEFORE_TOKEN = {
    "pad",
    "eos",
    "bos",
    "unk",
    "mask",
    "sep",
    "cls",
    "stop",
    "end",
    "start",
    "think",
    "per",
    "by",
}
"""Words that make ``..._token`` a token of text."""
_ALL_SECRET = {"env", "headers", "default_headers"}
"""Keys of mappings all of whose text may be secret."""
_PLAIN_ENVIRONMENT = ("CUDA_", "NCCL_", "OMP_", "GLOO_")
"""Beginnings of the names of environment variables that are shown."""

_IN_ADDRESS = re.compile(r"(?<=://)[^\s/@'\"<>]+(?=@)")
_IN_QUERY = re.compile(r"([?&][^=&\s]*(?:key|token|secret|password|signature|sig)=)[^&#\s'\"]+", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[A-Za-z0-9-]{10,}|AIza[0-9A-Za-z_-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{5,})"
    r"|(?<=Bearer )[^\s'\"]+|(?<=Basic )[A-Za-z0-9+/=]{8,}"
)
# A key and its value as YAML, as an option, or as Python or JSON write them.
_IN_TEXT = re.compile(r"""([\w.-]+)(['"]?\s*[:=]\s*|\s+)(?!\s)(?:'([^'\n]*)'|"([^"\n]*)"|([^\s,;{}\[\]()'"]+))""")


def is_secret_name(name: str) -> bool:
    """Tell whether the value under a key of this name is a secret: ``api_key`` is, ``max_tokens`` is not."""
    last = name.rpartition(".")[2]
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", last)]
    if set(words) & _SECRET_WORDS or any(pair in _SECRET_PAIRS for pair in itertools.pairwise(words)):
        return True
    before = words[-2] if len(words) > 1 else ""
    return bool(words) and words[-1] == "token" and before not in _NOT_SECRET_BEFORE_TOKEN


def masked_text(text: str) -> str:
    """Mask what is secret in a text by its shape or its place: in addresses, keys of known providers."""
    text = _IN_ADDRESS.sub(MASK, text)
    text = _IN_QUERY.sub(lambda found: found[1] + MASK, text)
    return _SHAPES.sub(MASK, text)


def masked_screen(text: str) -> str:
    """Mask a text that quotes configuration or a command line: also values behind the name of a secret."""

    def replaced(found: re.Match[str]) -> str:
        # A name and a word behind it are a sentence, unless the name is an option.
        is_pair = bool(found[2].strip()) or text[max(0, found.start() - 1)] in "-" or found[1].startswith("--")
        value = found[3] or found[4] or found[5]
        if not is_pair or not value or not is_secret_name(found[1]) or value.lower() in ("null", "none"):
            return found[0]
        return found[0].replace(value, MASK)

    return masked_text(_IN_TEXT.sub(replaced, text))


def masked(value: Any, name: str = "") -> Any:
    """Return a copy of a configuration, nested mappings and lists, without its secrets.

    Args:
        value: any value; what is neither text nor a container comes back as it is.
        name: key that it stands under.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, str(key)) for key, item in _variables(value, name)}
    if isinstance(value, Namespace):
        return type(value)(**{key: masked(item, key) for key, item in _variables(vars(value), name)})
    if isinstance(value, list | tuple):
        items = [masked(item, name) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, str) and value:
        return MASK if is_secret_name(name) else masked_text(value)
    return value


def _variables(value: Mapping[Any, Any], name: str) -> Iterable[tuple[Any, Any]]:
    """Return the items of a mapping, those of environment variables already masked."""
    if name.rpartition(".")[2].lower() in _ALL_SECRET:
        return [(key, _masked_variable(str(key), item)) for key, item in value.items()]
    return value.items()


def holds_mask(value: Any, key: str = "") -> str | None:
    """Return the dotted key of the first value that was masked; None if there is none."""
    value = vars(value) if isinstance(value, Namespace) else value
    if isinstance(value, Mapping):
        found = (holds_mask(item, f"{key}.{name}".removeprefix(".")) for name, item in value.items())
        return next((one for one in found if one), None)
    if isinstance(value, list | tuple):
        return next((one for one in (holds_mask(item, key) for item in value) if one), None)
    return key if isinstance(value, str) and MASK in value else None


def with_environment(value: Any, environment: Mapping[str, str]) -> Any:
    """Return a copy in which what is masked under the name of an environment variable has that variable's value."""
    if isinstance(value, Namespace):
        return type(value)(**with_environment(vars(value), environment))
    if isinstance(value, Mapping):
        return {
            key: environment[key] if item == MASK and key in environment else with_environment(item, environment)
            for key, item in value.items()
        }
    return [with_environment(item, environment) for item in value] if isinstance(value, list) else value


def _masked_variable(name: str, value: Any) -> Any:
    shown = name.startswith(_PLAIN_ENVIRONMENT) and not is_secret_name(name)
    return masked_text(value) if shown and isinstance(value, str) else MASK
