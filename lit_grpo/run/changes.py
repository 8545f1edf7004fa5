"""What differs between the settings a run was saved with and those it goes on with, and which differences may be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.utils.secrets import masked, masked_text

FREE = (
    *("data.rollouts", "data.val", "data.test", "data.val_prompts", "data.test_prompts", "data.eval_sampling"),
    *("data.eval_group_size", "data.engine", "data.on_reward_error", "data.rejudge_every"),
    *("data.on_incomplete_rollout", "data.clean.dropped_file", "model.micro_batch_tokens"),
    *("model.micro_batch_size", "model.zero_advantage_samples", "model.step_kl_samples"),
    *("model.max_skipped_steps", "model.guards", "model.sharding", "model.policy.attention"),
    *("model.policy.gradient_checkpointing", "model.policy.share_prompts", "model.policy.pack"),
    *("model.policy.logits_chunk", "model.policy.compile", "model.critic.measure_every"),
)
"""Keys that may change without a word: how long the run is, how it is evaluated, what it runs on."""
FIXED = (
    *("model.policy.tiny", "model.policy.lora", "model.policy.quantization", "model.optimizer.type"),
    *("model.critic.optimizer.type", "model.critic.backbone", "model.critic.lora", "model.critic.tiny"),
    *("model.optimizer.scheduler", "model.critic.optimizer.scheduler"),
    *("model.optimizer.scheduler_args", "model.critic.optimizer.scheduler_args"),
)
"""Keys that what is saved depends on: weights and optimizer states of another kind do not fit."""
# Present or absent as a whole; what is below them may change.
WHOLE = ("model.critic",)
SHOWN = 8


@dataclass(frozen=True)
class Change:
    """One setting that differs.

    Attributes:
        key: its key in the configuration.
        was: value that the run was saved with; None where it had none.
        now: value that it would go on with.
    """

    key: str
    was: Any
    now: Any

    def plain(self) -> str:
        """Return the change in words."""
        return f"{self.key}: {_short(self.was)}, now {_short(self.now)}"


def flat(settings: Any, prefix: str) -> dict[str, Any]:
    """Return nested settings as one dictionary of plain values by dotted key; entries of lists are numbered.

    Secrets are masked (:mod:`lit_grpo.utils.secrets`), so that another key of a server is no other setting.
    """
    return _flat(masked(settings, prefix), prefix)


def _flat(settings: Any, prefix: str) -> dict[str, Any]:
    if isinstance(settings, Mapping) and settings:
        return {k: v for name, value in settings.items() for k, v in _flat(value, f"{prefix}.{name}").items()}
    if isinstance(settings, list | tuple) and any(isinstance(one, Mapping | list | tuple) for one in settings):
        return {k: v for i, value in enumerate(settings) for k, v in _flat(value, f"{prefix}.{i}").items()}
    return {prefix: _plain(settings)}


def changes_between(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return what differs between two :func:`flat` dictionaries, keys that may change freely left out."""
    found = []
    for key in dict.fromkeys([*saved, *now]):
        was, is_now = saved.get(key), now.get(key)
        if not _same(was, is_now) and not _below(key, FREE):
            found.append(Change(key, was, is_now))
    return found


def check_accepted(changes: Sequence[Change], accepted: Sequence[str]) -> list[str]:
    """Return the keys of changes that are all accepted.

    Raises:
        UserError: one is not named in ``accepted``, or is of a kind that no checkpoint can be used with.
    """
    for change in changes:
        whole = next((key for key in WHOLE if change.key == key), None)
        if _below(change.key, FIXED) or whole is not None:
            raise UserError(
                f"the checkpoint does not fit these settings: it was saved with {change.plain()}",
                where=change.key,
                remedy="set it as it was, or begin a new run from its weights: lit-grpo export, then model.policy.path",
            )
    refused = [change for change in changes if not _below(change.key, accepted)]
    if refused:
        raise refuse(refused)
    return [change.key for change in changes]


def refuse(changes: Sequence[Change]) -> UserError:
    """Return the error that shows changes nobody has named."""
    lines = [change.plain() for change in changes[:SHOWN]]
    if len(changes) > SHOWN:
        lines.append(f"and {len(changes) - SHOWN} more")
    # Entries of a list are named by the list.
    names = dict.fromkeys(re.sub(r"\.\d+(\..*)?$", "", change.key) for change in changes)
    return UserError(
        "the run would go on with other settings than it was saved with: " + "; ".join(lines),
        where=changes[0].key,
        remedy=f"set them as they were, or name what is meant: --checkpoint.accept_changes {','.join(names)}",
    )


def keys_in(given: Iterable[str] | str | None) -> list[str]:
    """Return the keys of ``accept_changes``, which may be one text with commas between them."""
    parts = given.split(",") if isinstance(given, str) else list(given or ())
    return [part.strip() for part in parts if part.strip()]


def _below(key: str, prefixes: Iterable[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _same(was: Any, now: Any) -> bool:
    # Nothing and an empty list or dictionary say the same.
    return was == now or (was in (None, [], {}) and now in (None, [], {}))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if value is None or isinstance(value, bool | int | float):
        return value
    return masked_text(str(value))


def _short(value: Any) -> str:
    text = "none" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
