"""The parts a user may name, found by looking through the files that define them.

A part is written once, as a dataclass in the file of its kind. Names, override keys, their help and their types are
derived here; nothing else lists them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from textwrap import dedent
from types import ModuleType, NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from lit_grpo.objectives import advantages, aggregation, sampler_correction, token_advantages, trust_regions
from lit_grpo.objectives.advantages import Estimator
from lit_grpo.objectives.aggregation import Aggregation
from lit_grpo.objectives.filters import Filters
from lit_grpo.objectives.part import Part
from lit_grpo.objectives.ratios import RatioKind
from lit_grpo.objectives.regularizers import Regularizers
from lit_grpo.objectives.sampler_correction import SamplerCorrection
from lit_grpo.objectives.shaping import Shaping
from lit_grpo.objectives.token_weights import EntropySignal, TokenWeights
from lit_grpo.objectives.trust_regions import TrustRegion

PartT = TypeVar("PartT", bound=Part)


def find_parts(base: type[PartT], *modules: ModuleType) -> dict[str, PartT]:
    """Find the parts of one kind in the files that define them: name -> part with its defaults, in file order.

    Looked up by file and not by ``__subclasses__``: a user's own subclass is reached by its import path, and must not
    become a name of the configuration by being imported.
    """
    parts: dict[str, PartT] = {}
    for module in modules:
        for value in vars(module).values():
            own = isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
            if own and "kind" in vars(value) and value.kind != "custom":
                parts[value.kind] = value()
    return parts


ADVANTAGES = find_parts(Estimator, advantages, token_advantages)
TRUST_REGIONS = find_parts(TrustRegion, trust_regions)
SAMPLER_CORRECTIONS = find_parts(SamplerCorrection, sampler_correction)
AGGREGATIONS = find_parts(Aggregation, aggregation)
RATIOS: tuple[str, ...] = get_args(RatioKind)

CHOICES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "advantage": ("advantage", ADVANTAGES),
    "trust_region": ("trust_region", TRUST_REGIONS),
    "sampler_correction": ("sampler", SAMPLER_CORRECTIONS),
    "aggregation": ("aggregation", AGGREGATIONS),
}
"""Key that names a part -> field of the objective, and what may stand there."""
ALWAYS: dict[str, Part] = {
    "filters": Filters(),
    "token_weights": TokenWeights(),
    "entropy_signal": EntropySignal(),
    "regularizers": Regularizers(),
    "shaping": Shaping(),
}
"""Field of the objective -> the part that every objective has there."""
PARTS = (*(name for name, _ in CHOICES.values()), *ALWAYS)
"""Fields of the objective that hold a part with settings."""
CUSTOM: dict[str, str] = {
    "custom_advantage": "Function of AdvantageInputs that gives [N] or [N, T], or an Estimator.",
    "custom_trust_region": "Function of SurrogateInputs that gives F [n, T], or a TrustRegion.",
    "custom_objective": "An Objective, or a function that makes one; the recipe is not used.",
}
"""Keys that take an import path, with their help."""


@dataclass(frozen=True)
class Setting:
    """An override key that belongs to a part, with its type and help."""

    name: str
    annotation: str
    """Type as source text, without None."""
    help: str
    """Docstring of the field in the first part that has one."""
    owners: tuple[str, ...]
    """Names of the parts that take it; empty where every objective has the part."""


def has_setting(part: Any, key: str) -> bool:
    """Tell whether a part takes an override of this name."""
    # What a user's own part is made of is no setting.
    return key not in ("function", "path") and is_dataclass(part) and any(f.name == key for f in fields(part))


def owners(key: str) -> list[str]:
    """Return the parts that a number belongs to: ``clip_high`` -> ``trust_region: clip``, ``trust_region: dcpo``."""
    return [
        f"{choice}: {kind}"
        for choice, (_, known) in CHOICES.items()
        for kind, part in known.items()
        if has_setting(part, key)
    ]


def default_of(key: str) -> Any:
    """Return the default of a setting in the first part that has one; None where it has none."""
    parts = [*(part for _, known in CHOICES.values() for part in known.values()), *ALWAYS.values()]
    found = (getattr(part, key) for part in parts if has_setting(part, key))
    return next((value for value in found if value is not None), None)


@cache
def settings() -> dict[str, dict[str, Setting]]:
    """Return the settings of all parts: heading -> name -> setting.

    Raises:
        TypeError: two parts give one name different types.
    """
    headings: dict[str, list[Part]] = {key: list(known.values()) for key, (_, known) in CHOICES.items()}
    headings |= {key: [part] for key, part in ALWAYS.items()}
    by_heading: dict[str, dict[str, Setting]] = {}
    for heading, parts in headings.items():
        group = by_heading[heading] = {}
        for part in parts:
            for name, annotation, text in _fields(type(part)):
                owner = (str(getattr(part, "kind", "")),) if heading in CHOICES else ()
                old = group.get(name, Setting(name, annotation, "", ()))
                if old.annotation != annotation:
                    raise TypeError(f"{name} is {old.annotation} in one part and {annotation} in {type(part).__name__}")
                group[name] = Setting(name, annotation, old.help or text, old.owners + owner)
    return by_heading


def known_overrides() -> set[str]:
    """Return every name that :meth:`Objective.from_recipe` takes for some recipe."""
    return {name for group in settings().values() for name in group} | set(CHOICES) | {"ratio"} | set(CUSTOM)


def _fields(part: type) -> Iterator[tuple[str, str, str]]:
    """Yield (name, type as text, docstring) of each setting of a part's class."""
    hints, texts = get_type_hints(part), _field_docs(part)
    for f in fields(part):
        yield f.name, _annotation(hints[f.name]), texts.get(f.name, "")


def _field_docs(part: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class and of the classes that it inherits them from."""
    # From the source text: Python keeps the docstrings of classes, and drops those below fields.
    texts: dict[str, str] = {}
    for cls in reversed([c for c in part.__mro__ if is_dataclass(c)]):
        source = dedent(inspect.getsource(cls))
        for match in re.finditer(r'^    (\w+): [^\n]*\n    """(.*?)"""', source, re.S | re.M):
            texts[match[1]] = " ".join(match[2].split())
    return texts


def _annotation(kind: Any) -> str:
    """Return a field's type as source text, without None: ``float``, ``Literal["zero", "raw"]``."""
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(_quoted(value) for value in get_args(kind))}]"
    options = [option for option in get_args(kind) if option is not NoneType]
    return " | ".join(_annotation(option) for option in options) if options else str(kind.__name__)


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
