"""From a recipe's name and flat overrides to an objective; what does not apply is refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lit_grpo.errors import UserError
from lit_grpo.objectives.advantages import CustomAdvantage, Estimator
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.part import WHERE
from lit_grpo.objectives.ratios import WITHOUT_OLD
from lit_grpo.objectives.recipes import RECIPES, Recipe
from lit_grpo.objectives.registry import CHOICES, PARTS, RATIOS, has_setting, known_overrides, owners
from lit_grpo.objectives.trust_regions import CustomTrustRegion, TrustRegion
from lit_grpo.utils.imports import import_by_path
from lit_grpo.utils.spelling import nearest


def build(name: str, overrides: Mapping[str, Any]) -> Objective:
    """Build an objective; arguments as of :meth:`Objective.from_recipe`."""
    overrides = {k: v for k, v in overrides.items() if v is not None}
    if (path := overrides.pop("custom_objective", None)) is not None:
        return _custom_objective(path, overrides)
    if name not in RECIPES:
        close = nearest(name, RECIPES)
        raise UserError(
            f"unknown recipe {name!r}",
            where=f"{WHERE}.recipe",
            remedy=f"did you mean {close!r}?" if close else f"one of {', '.join(RECIPES)}",
        )
    recipe = RECIPES[name]
    objective, numbers = _choose_parts(recipe, overrides)
    changes: dict[str, dict[str, Any]] = {}
    for key, value in numbers.items():
        part = next((p for p in PARTS if has_setting(getattr(objective, p), key)), None)
        if part is None:
            raise _does_not_apply(key, objective)
        changes.setdefault(part, {})[key] = _checked(key, value, getattr(objective, part))
    parts = {part: replace(getattr(objective, part), **values) for part, values in changes.items()}
    objective = replace(objective, **parts)
    _check_effect(objective, numbers)
    return objective


def _choose_parts(recipe: Recipe, overrides: Mapping[str, Any]) -> tuple[Objective, dict[str, Any]]:
    """Apply the overrides that choose parts, and return the others: parts decide which numbers apply."""
    objective, remaining = recipe.objective, dict(overrides)
    changed: dict[str, Any] = {}
    for key, (part, known) in CHOICES.items():
        if key not in remaining:
            continue
        kind = remaining.pop(key)
        if kind not in known:
            raise _unknown_value(key, kind, known)
        # Naming the recipe's own part keeps its numbers; another part comes with its own defaults.
        if kind != getattr(objective, part).kind:
            changed[part] = known[kind]
    if "custom_advantage" in remaining:
        path, function = load(remaining.pop("custom_advantage"), f"{WHERE}.custom_advantage")
        # A user's class is the part itself; a function becomes one.
        changed["advantage"] = function if isinstance(function, Estimator) else CustomAdvantage(path, function)
    if "custom_trust_region" in remaining:
        path, function = load(remaining.pop("custom_trust_region"), f"{WHERE}.custom_trust_region")
        own = isinstance(function, TrustRegion)
        changed["trust_region"] = function if own else CustomTrustRegion(path, function)
    if "ratio" in remaining:
        kind = remaining.pop("ratio")
        if kind not in RATIOS:
            raise _unknown_value("ratio", kind, RATIOS)
        changed["ratio"] = kind
        if kind not in WITHOUT_OLD and recipe.off_policy and recipe.objective.ratio in WITHOUT_OLD:
            changed.setdefault("trust_region", recipe.off_policy)
    return replace(objective, **changed), remaining


def _checked(key: str, value: Any, part: Any) -> Any:
    """Return the value if it is of the field's type.

    The command line has checked types by then, but an objective is also made from Python.
    """
    kind = get_type_hints(type(part))[key]
    options = get_args(kind)
    if get_origin(kind) is Literal:
        if value not in options:
            raise _unknown_value(key, value, options)
        return value
    wanted = next((k for k in (bool, int, float) if k is kind or k in options), None)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if (wanted is bool and not isinstance(value, bool)) or (wanted in (int, float) and not number):
        word = {bool: "truth value", int: "whole number", float: "number"}[wanted]
        example = getattr(part, key) if getattr(part, key) is not None else wanted(1)
        raise UserError(
            f"{key} is {value!r:.60}, which is no {word}",
            where=f"{WHERE}.{key}",
            remedy=f"for example {key}: {example}",
        )
    if wanted is int and value != int(value):
        raise UserError(
            f"{key} is {value!r}, must be a whole number",
            where=f"{WHERE}.{key}",
            remedy=f"for example {key}: {int(value)}",
        )
    return wanted(value) if wanted else value


def _unknown_value(key: str, value: object, known: Any) -> UserError:
    close = nearest(str(value), known)
    return UserError(
        f"{key} {value!r} is not known",
        where=f"{WHERE}.{key}",
        remedy=f"did you mean {close!r}?" if close else f"one of {', '.join(known)}",
    )


def _does_not_apply(key: str, objective: Objective) -> UserError:
    belonging = owners(key)
    if belonging:
        parts = {k: getattr(objective, part).kind for k, (part, _) in CHOICES.items()}
        choice = belonging[0].split(":")[0]
        return UserError(
            f"{key} does not apply to {objective.name}: it belongs to {' or '.join(belonging)}, "
            f"and this objective has {choice}: {parts[choice]}",
            where=f"{WHERE}.{key}",
            remedy=f"leave {key} out, or also set {belonging[0]}",
        )
    close = nearest(key, known_overrides())
    return UserError(
        f"unknown override {key!r}",
        where=f"{WHERE}.{key}",
        remedy=f"did you mean {close!r}?" if close else f"one of {', '.join(sorted(known_overrides()))}",
    )


def _check_effect(objective: Objective, given: Mapping[str, Any]) -> None:
    """Refuse settings that are accepted but could not do anything: they are half-set methods."""
    for part in objective.parts():
        for key, reason in part.idle(critic=objective.advantage.critic).items():
            if key in given and given[key] != getattr(_recipe_part(objective, key), key):
                raise UserError(f"{key} has no effect on {objective.name}: {reason}", where=f"{WHERE}.{key}")


def _recipe_part(objective: Objective, key: str) -> Any:
    part = next(p for p in PARTS if has_setting(getattr(objective, p), key))
    return getattr(RECIPES[objective.recipe].objective, part)


def load(spec: str | Mapping[str, Any], where: str) -> tuple[str, Any]:
    """Import ``package.module.name``, or ``{class_path: ..., init_args: {...}}``; classes are made into objects."""
    path = spec if isinstance(spec, str) else str(spec.get("class_path", ""))
    arguments = {} if isinstance(spec, str) else dict(spec.get("init_args") or {})
    target = import_by_path(path, where, remedy="give an import path such as my_package.my_module.my_function")
    if isinstance(target, type) or arguments:
        target = target(**arguments)
    if not callable(target) and not isinstance(target, Objective):
        raise UserError(f"{path!r} is a {type(target).__name__} and cannot be called", where=where)
    return path, target


def _custom_objective(spec: str | Mapping[str, Any], overrides: Mapping[str, Any]) -> Objective:
    where = f"{WHERE}.custom_objective"
    if overrides:
        raise UserError(
            f"a custom objective is whole: {', '.join(sorted(overrides))} cannot be set beside it",
            where=where,
            remedy="give its arguments under custom_objective.init_args",
        )
    path, target = load(spec, where)
    objective = target if isinstance(target, Objective) else target()
    if not isinstance(objective, Objective):
        raise UserError(f"{path!r} gives a {type(objective).__name__}, not an Objective", where=where)
    return objective
