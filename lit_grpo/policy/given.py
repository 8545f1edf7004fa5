"""What people hand over as policy and optimizer in Python: settings, a dictionary, a path, a class."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.policy.config import OptimizerConfig, PolicyConfig, TinyModel
from lit_grpo.utils.dataclasses import from_arguments
from lit_grpo.utils.imports import path_of


def as_policy(given: Any, key: str) -> PolicyConfig:
    """Return the settings of the policy that a value stands for.

    Args:
        given: settings, a dictionary of them, the folder of a model or its name on the hub, or a :class:`TinyModel`.
        key: key of the configuration, for messages.

    Raises:
        UserError: it is nothing of these; of a model or tokenizer that is loaded already it says how to give it.
    """
    if isinstance(given, str | os.PathLike):
        return PolicyConfig(path=os.fspath(given))
    if isinstance(given, TinyModel):
        return PolicyConfig(tiny=given)
    if given is None:
        raise UserError("no policy is given", where=key, remedy="give a model folder, or {'tiny': {}} for a try")
    # By its methods, so that transformers need not be imported.
    loaded = [one for one in (given if isinstance(given, list | tuple) else [given]) if _is_loaded(one)]
    if loaded:
        raise _not_loaded(loaded, key)
    policy = from_arguments(PolicyConfig, given, key)
    if policy.path is not None and _is_loaded(policy.path):
        raise _not_loaded([policy.path], f"{key}.path")
    return policy if policy.path is None else replace(policy, path=os.fspath(policy.path))


def as_optimizer(given: Any, key: str) -> OptimizerConfig:
    """Return the settings of the optimizer that a value stands for.

    Args:
        given: settings, a dictionary of them, or the class of an optimizer. Where settings name a class (``type``,
            ``scheduler``), the class itself may stand too.
        key: key of the configuration, for messages.

    Raises:
        UserError: it is nothing of these, or an optimizer that is made already.
    """
    if callable(getattr(given, "step", None)) and not isinstance(given, type):
        raise UserError(
            f"an optimizer of the class {type(given).__name__} is made already, before there is a model",
            where=key,
            remedy=f"give its settings: OptimizerConfig(type={_named(type(given))!r}, lr=...)",
        )
    if isinstance(given, type) and not issubclass(given, OptimizerConfig):
        return OptimizerConfig(type=path_of(given, key))
    if isinstance(given, int | float) and not isinstance(given, bool):
        raise UserError(
            f"the optimizer is {given}", where=key, remedy=f"a learning rate is OptimizerConfig(lr={given})"
        )
    optimizer = from_arguments(OptimizerConfig, given, key)
    named = {name: getattr(optimizer, name) for name in ("type", "scheduler")}
    paths: dict[str, Any] = {
        name: path_of(one, f"{key}.{name}") for name, one in named.items() if isinstance(one, type)
    }
    return replace(optimizer, **paths)


def _is_loaded(given: Any) -> bool:
    return callable(getattr(given, "save_pretrained", None)) and not isinstance(given, type)


def _not_loaded(loaded: list[Any], key: str) -> UserError:
    names = " and ".join(type(one).__name__ for one in loaded)
    came_from = next((name for one in loaded if (name := getattr(one, "name_or_path", ""))), None)
    saved = "; ".join(f"{word}.save_pretrained('FOLDER')" for word in ("model", "tokenizer"))
    unchanged = f"policy={came_from!r} if it is as it was loaded; else " if came_from else ""
    return UserError(
        f"{names} is loaded already, and a run loads its model itself: a checkpoint has to say what it began with, "
        "and engines and other processes read it too",
        where=key,
        remedy=f"{unchanged}{saved}, and policy='FOLDER'",
    )


def _named(cls: type) -> str:
    # torch.optim.adamw.AdamW is torch.optim.AdamW to everybody.
    short = cls.__module__.startswith("torch.optim.")
    return f"torch.optim.{cls.__name__}" if short else f"{cls.__module__}.{cls.__qualname__}"
