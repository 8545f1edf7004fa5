"""Going on from a checkpoint: it is whole and of such a run, and the settings are those it was saved with."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback

from lit_grpo.errors import UserError
from lit_grpo.run.changes import Change, changes_between, check_accepted, flat
from lit_grpo.run.checkpoints import check_whole, damaged
from lit_grpo.utils.spelling import nearest

PARTS = ("model", "data", "seed_everything")
"""Sections of the configuration that say what is learned; the others say on what and how it is shown."""
_NEW_PROMPTS = ("data.prompts", "data.format", "data.clean", "data.demonstrations")


class RunSettings(Callback):
    """Callback that keeps the settings of a run in its checkpoints, for :func:`check_resume` of a run that goes on.

    Args:
        settings: what :func:`settings_of` returned.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)

    def state_dict(self) -> dict[str, Any]:
        return {"settings": dict(self.settings)}


def settings_of(dumped: str) -> dict[str, Any]:
    """Return the settings by dotted key of a configuration as YAML, without what may be secret."""
    content = yaml.safe_load(dumped) or {}
    return {key: value for part in PARTS if part in content for key, value in flat(content[part], part).items()}


def check_resume(path: Path, settings: Mapping[str, Any], accepted: Sequence[str]) -> list[str]:
    """Check a checkpoint before anything is built, and compare its settings with those of the run.

    Args:
        path: a file, or a folder of shards.
        settings: the run's own, of :func:`settings_of`.
        accepted: keys whose change is meant.

    Returns:
        Keys of all settings that have changed.

    Raises:
        UserError: it is damaged or of something else, or settings have changed that are not accepted.
    """
    content = read_head(path)
    _check_kind(path, content, ("lit_grpo", "loops", "callbacks", "lr_schedulers"))
    saved = content["callbacks"].get(RunSettings.__qualname__, {}).get("settings")
    if saved is None:
        # Saved by a program of the user's own: the module compares what it knows.
        return []
    known = {*saved, *settings}
    for key in accepted:
        if not any(one == key or one.startswith(f"{key}.") for one in known):
            close = nearest(key, known)
            raise UserError(f"there is no key {key!r}", where="checkpoint.accept_changes",
                            remedy=f"did you mean {close!r}?" if close else None)  # fmt: skip
    return check_accepted(_with_wholes(changes_between(saved, settings)), accepted)


def check_evaluation(path: Path) -> None:
    """Check a checkpoint whose weights alone are wanted.

    Raises:
        UserError: it is damaged or of something else.
    """
    _check_kind(path, read_head(path), ("lit_grpo",))


def takes_other_prompts(changed: Sequence[str]) -> bool:
    """Tell whether an accepted change is one of the training prompts."""
    return any(key == one or key.startswith(f"{one}.") for key in changed for one in _NEW_PROMPTS)


def read_head(path: Path) -> dict[str, Any]:
    """Check that a checkpoint is whole, and read it without its tensors, which stay on disk.

    Raises:
        UserError: it is damaged, or holds what is not plain data.
    """
    import torch

    # Each rank parses the configuration: one of them is enough to read it all, and its end ends the others.
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
        check_whole(path)
    try:
        if path.is_dir():
            content: Any = torch.load(path / "meta.pt", weights_only=True, map_location="cpu")
        else:
            content = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
    # Whatever torch makes of it: a file from elsewhere may be anything, and must not end in a traceback.
    except Exception as error:
        first = str(error).strip().partition("\n")[0][:200]
        raise damaged(path, f"it cannot be read ({first or type(error).__name__})") from error
    if not isinstance(content, dict):
        raise damaged(path, "it is no checkpoint of a lit-grpo run")
    return content


def _check_kind(path: Path, content: Mapping[str, Any], needed: Sequence[str]) -> None:
    if not path.is_dir():
        needed = [*needed, "state_dict", *(["optimizer_states"] if "loops" in needed else [])]
    if missing := [name for name in needed if name not in content]:
        raise damaged(path, f"it is no checkpoint of a lit-grpo run: it has no {missing[0]!r}")


def _with_wholes(changes: list[Change]) -> list[Change]:
    # A part that was there and is not, or the other way round, is one change and not one of each of its keys.
    parts = {key for change in changes for key in ("model.critic", "model.policy.lora", "model.policy.tiny")
             if change.key == key}  # fmt: skip
    return [change for change in changes if not any(change.key.startswith(f"{part}.") for part in parts)]
