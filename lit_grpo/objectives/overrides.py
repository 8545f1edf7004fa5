"""From a recipe's name and flat overrides to an objective; what does not apply is refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from lit_grpo.errors import UserError, nearest
from lit_grpo.objectives import advantages as adv
from lit_grpo.objectives import aggregation as agg
from lit_grpo.objectives import sampler_correction as sc
from lit_grpo.objectives import token_advantages as tok
from lit_grpo.objectives import trust_regions as tr
from lit_grpo.objectives.objective import Objective
from lit_grpo.objectives.ratios import WITHOUT_OLD
from lit_grpo.objectives.recipes import RECIPES, Recipe
from lit_grpo.utils.imports import import_by_path

WHERE = "model.objective"

ADVANTAGES: dict[str, adv.Estimator] = {
    part.kind: part
    for part in (
        adv.Raw(), adv.GroupStd(), adv.GroupMean(), adv.GroupVariance(), adv.LeaveOneOut(), adv.BatchStd(), adv.Sign(),
        adv.BStar(), tok.BatchWhiten(), tok.GroupMeanWhiten(), tok.Gae(), tok.GaeLength(), tok.SmoothAdvantage(),
    )
}  # fmt: skip
TRUST_REGIONS: dict[str, tr.TrustRegion] = {
    part.kind: part
    for part in (
        tr.NoTrustRegion(), tr.Clip(), tr.Cispo(), tr.Sapo(), tr.Gmpo(), tr.Rspo(), tr.Dcpo(), tr.KlPenalty(),
    )
}  # fmt: skip
SAMPLER_CORRECTIONS: dict[str, sc.SamplerCorrection] = {
    part.kind: part
    for part in (
        sc.NoCorrection(), sc.TisToken(), sc.TisSequence(), sc.MisToken(), sc.MisSequence(), sc.GeoMask(),
        sc.GeoMaskTisToken(),
    )
}  # fmt: skip
AGGREGATIONS: dict[str, agg.Aggregation] = {
    part.kind: part
    for part in (
        agg.SeqMean(), agg.TokenMean(), agg.TokenMeanGroup(), agg.SumConst(), agg.SeqSum(), agg.PerPromptSet(),
        agg.PerPromptSetConst(), agg.OnlyTokenMean(), agg.ConflictTokens(),
    )
}  # fmt: skip
RATIOS = ("none", "self", "token", "sequence", "sequence_token", "sequence_product", "geometric")

PARTS = (
    "shaping", "advantage", "trust_region", "sampler", "aggregation", "filters", "token_weights", "entropy_signal",
    "regularizers",
)  # fmt: skip
CHOICES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "advantage": ("advantage", ADVANTAGES),
    "trust_region": ("trust_region", TRUST_REGIONS),
    "sampler_correction": ("sampler", SAMPLER_CORRECTIONS),
    "aggregation": ("aggregation", AGGREGATIONS),
}
CUSTOM = ("custom_advantage", "custom_trust_region", "custom_objective")


@dataclass(frozen=True)
class CustomAdvantage(adv.Estimator):
    """A user's function of :class:`AdvantageInputs`, or an object called so; it returns [N] or [N, T]."""

    kind: ClassVar[str] = "custom"
    path: str = ""
    function: Any = field(default=None, compare=False, repr=False)

    def __call__(self, inputs: adv.AdvantageInputs) -> Tensor:
        value: Tensor = self.function(inputs)
        return value


def build(name: str, overrides: Mapping[str, Any]) -> Objective:
    """See :meth:`Objective.from_recipe`."""
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
    objective, rest = _choose_parts(recipe, overrides)
    changes: dict[str, dict[str, Any]] = {}
    for key, value in rest.items():
        part = next((p for p in PARTS if _has(getattr(objective, p), key)), None)
        if part is None:
            raise _does_not_apply(key, objective)
        changes.setdefault(part, {})[key] = _checked(key, value, getattr(objective, part))
    parts = {part: replace(getattr(objective, part), **values) for part, values in changes.items()}
    objective = replace(objective, **parts)
    _check_effect(objective, rest)
    return objective


def _choose_parts(recipe: Recipe, overrides: Mapping[str, Any]) -> tuple[Objective, dict[str, Any]]:
    """Structural overrides first: they decide which numbers apply."""
    objective, rest = recipe.objective, dict(overrides)
    changed: dict[str, Any] = {}
    for key, (part, known) in CHOICES.items():
        if key not in rest:
            continue
        kind = rest.pop(key)
        if kind not in known:
            raise _unknown_value(key, kind, known)
        if kind != getattr(objective, part).kind:  # naming the recipe's own part keeps its numbers
            changed[part] = known[kind]
    if "custom_advantage" in rest:
        path, function = load(rest.pop("custom_advantage"), f"{WHERE}.custom_advantage")
        own = function if isinstance(function, adv.Estimator) else CustomAdvantage(path, function)
        changed["advantage"] = own
    if "custom_trust_region" in rest:
        path, function = load(rest.pop("custom_trust_region"), f"{WHERE}.custom_trust_region")
        own_region = function if isinstance(function, tr.TrustRegion) else tr.CustomTrustRegion(path, function)
        changed["trust_region"] = own_region
    if "ratio" in rest:
        kind = rest.pop("ratio")
        if kind not in RATIOS:
            raise _unknown_value("ratio", kind, RATIOS)
        changed["ratio"] = kind
        if kind not in WITHOUT_OLD:
            changed["on_policy_only"] = False
            if recipe.off_policy and recipe.objective.ratio in WITHOUT_OLD:
                changed.setdefault("trust_region", recipe.off_policy)
        elif "ratio" not in recipe.optional and recipe.objective.ratio not in WITHOUT_OLD:
            changed["on_policy_only"] = True
    return replace(objective, **changed), rest


def _has(part: Any, key: str) -> bool:
    return key not in ("function", "path") and is_dataclass(part) and any(f.name == key for f in fields(part))


def _checked(key: str, value: Any, part: Any) -> Any:
    """The value, if it is of the field's type."""
    kind = get_type_hints(type(part))[key]
    options = get_args(kind)
    if get_origin(kind) is Literal:
        if value not in options:
            raise _unknown_value(key, value, options)
        return value
    wanted = next((k for k in (bool, int, float) if k is kind or k in options), None)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if (wanted is bool and not isinstance(value, bool)) or (wanted in (int, float) and not number):
        raise UserError(f"{key} is a {wanted.__name__}, not {value!r}", where=f"{WHERE}.{key}")
    if wanted is int and value != int(value):
        raise UserError(f"{key} is a whole number, not {value!r}", where=f"{WHERE}.{key}")
    return wanted(value) if wanted else value


def _unknown_value(key: str, value: object, known: Any) -> UserError:
    close = nearest(str(value), known)
    return UserError(
        f"{key} {value!r} is not known",
        where=f"{WHERE}.{key}",
        remedy=f"did you mean {close!r}?" if close else f"one of {', '.join(known)}",
    )


def _owners(key: str) -> list[str]:
    """``clip_high`` -> ``trust_region: clip``, ``trust_region: dcpo``: what a number belongs to."""
    return [f"{k}: {kind}" for k, (_, known) in CHOICES.items() for kind, part in known.items() if _has(part, key)]


def known_overrides() -> set[str]:
    """Every name that :meth:`Objective.from_recipe` takes for some recipe."""
    parts = [part for _, known in CHOICES.values() for part in known.values()]
    parts += [getattr(RECIPES["grpo"].objective, p) for p in PARTS]
    return {f.name for part in parts for f in fields(part)} | set(CHOICES) | {"ratio"} | set(CUSTOM)


def _does_not_apply(key: str, objective: Objective) -> UserError:
    owners = _owners(key)
    if owners:
        parts = {k: getattr(objective, part).kind for k, (part, _) in CHOICES.items()}
        belongs = owners[0].split(":")[0]
        return UserError(
            f"{key} does not apply to {objective.name}: it belongs to {' or '.join(owners)}, "
            f"and this objective has {belongs}: {parts[belongs]}",
            where=f"{WHERE}.{key}",
            remedy=f"leave {key} out, or also set {owners[0]}",
        )
    close = nearest(key, known_overrides())
    return UserError(
        f"unknown override {key!r}",
        where=f"{WHERE}.{key}",
        remedy=f"did you mean {close!r}?" if close else f"one of {', '.join(sorted(known_overrides()))}",
    )


def _check_effect(objective: Objective, given: Mapping[str, Any]) -> None:
    """Numbers that are accepted but could not do anything are half-set methods: refused."""
    r, s, w = objective.regularizers, objective.shaping, objective.token_weights
    idle = {
        "kl_estimator": (not r.kl_loss, "no KL term is in the loss (kl_coef is 0 or kl_in is reward)"),
        "kl_in": (not r.kl_coef, "kl_coef is 0"),
        "value_clip": (not objective.advantage.critic, "the objective has no critic"),
        "label_noise_seed": (not s.label_noise, "label_noise is 0"),
        "invalid_entropy": (not s.entropy_reward, "the reward is not the entropy"),
        "overlong_max": (not s.overlong_penalty, "overlong_penalty is off"),
        "overlong_cache": (not s.overlong_penalty, "overlong_penalty is off"),
        "top_entropy_denominator": (not w.top_entropy, "top_entropy is 0"),
        "entropy_threshold": (not objective.entropy_signal.entropy_filter, "entropy_filter is off"),
        "initial_entropy": (not objective.entropy_signal.entropy_filter, "entropy_filter is off"),
    }
    for key, (without_effect, reason) in idle.items():
        if key in given and without_effect and given[key] != getattr(_default_part(objective, key), key):
            raise UserError(f"{key} has no effect on {objective.name}: {reason}", where=f"{WHERE}.{key}")


def _default_part(objective: Objective, key: str) -> Any:
    part = next(p for p in PARTS if _has(getattr(objective, p), key))
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
