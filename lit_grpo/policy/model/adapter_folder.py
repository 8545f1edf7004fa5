"""A folder that peft wrote, adapters without the model below them, as the model that training begins with."""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError

log = logging.getLogger(__name__)

NAME = "adapter_config.json"


def is_adapter(path: Path) -> bool:
    """Tell whether a folder holds adapters and no model."""
    return (path / NAME).is_file() and not (path / "config.json").is_file()


def base_of(path: Path, where: str) -> str:
    """Return the folder or hub name of the model below the adapters of a folder, as the folder says it.

    Raises:
        UserError: the adapters are not LoRA's, name no model, are not there, or peft is not installed.
    """
    try:
        settings: Any = json.loads((path / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path / NAME} cannot be read: {error}", where=where, remedy="copy the folder again"
        ) from error
    settings = settings if isinstance(settings, dict) else {}
    base, kind = settings.get("base_model_name_or_path"), settings.get("peft_type")
    if kind != "LORA" or settings.get("task_type") not in (None, "CAUSAL_LM"):
        found = f"{kind} for {settings.get('task_type')}" if kind == "LORA" else kind
        raise UserError(
            f"the folder {path} holds adapters of the kind {found}, not the LoRA of a language model",
            where=where,
            remedy="merge them into their model with the program that made them, and give the folder of the result",
        )
    if not isinstance(base, str) or not base:
        raise UserError(
            f"the folder {path} holds adapters (LoRA), and {NAME} does not say of which model",
            where=where,
            remedy=f"write the folder of the model into {path / NAME} as base_model_name_or_path",
        )
    if is_adapter(Path(base).expanduser()):
        raise UserError(
            f"the folder {path} holds adapters (LoRA) of {base}, which holds adapters itself",
            where=where,
            remedy=f"merge those of {base} into their model first (peft: merge_and_unload, save_pretrained)",
        )
    if not any((path / f"adapter_model.{ending}").is_file() for ending in ("safetensors", "bin")):
        raise UserError(
            f"the folder {path} says that it holds adapters of {base}, but has no adapter_model.safetensors",
            where=where,
            remedy="copy the whole folder",
        )
    if find_spec("peft") is None:
        raise UserError(
            f"the folder {path} holds adapters (LoRA) of {base}, and peft, which reads them, is not installed",
            where=where,
            remedy="pip install 'lit-grpo[lora]' -c constraints.txt",
        )
    return base


def has_tokenizer(path: Path) -> bool:
    """Tell whether a folder has a tokenizer of its own, such as one with added tokens or a chat template."""
    return any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def merge_into(model: Any, path: Path) -> Any:
    """Return a model into whose weights the adapters of a folder are merged, on the device that it is on."""
    from peft import PeftModel

    merged = PeftModel.from_pretrained(model, str(path)).merge_and_unload(safe_merge=True)
    # peft leaves the base frozen.
    merged.requires_grad_(True)
    log.info("the adapters of %s are merged into their model, from which training goes on", path)
    return merged
