"""The adapters of a checkpoint alone, in the form in which peft loads them over their model."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.errors import UserError
from lit_grpo.utils.files import move_into_place

if TYPE_CHECKING:
    from torch import Tensor

    from lit_grpo.commands.export import Exported
    from lit_grpo.policy.config import PolicyConfig

_NAME = re.compile(r"(.+)\.lora_(A|B)\.default\.weight")


def write_adapter(
    weights: dict[str, Tensor], policy: PolicyConfig, tokenizer: Any, dtype: str | None, target: Path, card: str
) -> Exported:
    """Write the adapters among a policy's weights, with the tokenizer and the model card, whole or not at all.

    Raises:
        UserError: the run trained no adapters, or there is no one model below them.
    """
    import torch
    from safetensors.torch import save_file

    from lit_grpo.commands.export import Exported
    from lit_grpo.commands.model_card import CARD_FILE
    from lit_grpo.policy.model.adapter_folder import is_adapter

    if policy.lora is None:
        raise UserError(
            "the run trained whole weights and no adapters", where="--adapter", remedy="leave --adapter out"
        )
    if policy.path is None or is_adapter(Path(policy.path).expanduser()):
        below = (
            "a tiny model, which is made on the spot" if policy.path is None else f"the merged adapters {policy.path}"
        )
        raise UserError(f"the adapters were trained over {below}: no folder holds the model below them",
                        where="--adapter", remedy="leave --adapter out: the merged model is written")  # fmt: skip
    import peft

    found = {name: match for name in weights if (match := _NAME.fullmatch(name))}
    to_dtype = getattr(torch, dtype) if dtype else None
    tensors = {
        f"base_model.model.{match[1]}.lora_{match[2]}.weight": weights[name].to(to_dtype).contiguous().clone()
        for name, match in found.items()
    }
    settings = peft.LoraConfig(
        r=policy.lora.rank,
        lora_alpha=policy.lora.alpha,  # type: ignore[arg-type] # any number will do
        target_modules=sorted({match[1] for match in found.values()}),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=policy.path,
        inference_mode=True,
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir()
        settings.save_pretrained(str(temporary))
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(temporary)
        (temporary / CARD_FILE).write_text(card, encoding="utf-8")
        move_into_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    count = sum(tensor.numel() for tensor in tensors.values())
    return Exported(target, "LoRA", count, str(next(iter(tensors.values())).dtype).removeprefix("torch."))
