"""What people hand over as objective in Python: settings, a dictionary, a recipe's name, functions for its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.objectives.config import ObjectiveConfig
from lit_grpo.objectives.objective import Objective
from lit_grpo.utils.dataclasses import from_arguments
from lit_grpo.utils.imports import path_of

_CUSTOM = ("custom_advantage", "custom_trust_region", "custom_objective")


def as_objective_config(given: Any, key: str) -> ObjectiveConfig:
    """Return the settings of the objective that a value stands for.

    Args:
        given: settings, a dictionary of them, or the name of a recipe. Where settings name a function or class of your
            own (``custom_advantage``, ...), it may stand itself, and is found again by its import path.
        key: key of the configuration, for messages.

    Raises:
        UserError: it is nothing of these, or an object that has no import path.
    """
    if isinstance(given, str):
        given = {"recipe": given}
    if isinstance(given, Objective):
        raise UserError(
            f"the objective {given.name!r} is an object, and a checkpoint has to say what a run was trained with",
            where=key,
            remedy=f"give what it was made of, objective={{'recipe': {given.recipe!r}, ...}}, or the import path of "
            "one of your own: objective={'custom_objective': 'my_module.my_objective'}",
        )
    if callable(given) and not isinstance(given, type):
        raise UserError(
            f"the objective is {getattr(given, '__name__', None) or type(given).__name__}",
            where=key,
            remedy="an advantage or trust region of your own is objective={'recipe': 'grpo', 'custom_advantage': "
            "my_function}; a whole one objective={'custom_objective': 'my_module.my_objective'}",
        )
    config = from_arguments(ObjectiveConfig, given, key)
    return replace(config, **{name: _custom(getattr(config, name), f"{key}.{name}") for name in _CUSTOM})


def _custom(given: Any, key: str) -> Any:
    if given is None or isinstance(given, str | Mapping):
        return given
    if callable(given):
        return path_of(given, key)
    raise UserError(
        f"{key.rpartition('.')[2]} is an object of the class {type(given).__name__}",
        where=key,
        remedy="give its import path, 'my_module.my_objective', or the function or class that makes it",
    )
