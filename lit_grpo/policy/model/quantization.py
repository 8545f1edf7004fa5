"""Base weights in 4 bits under low-rank adapters (QLoRA, 2305.14314), by bitsandbytes.

The linear layers of the blocks are quantized while they are loaded; embedding, norms and output head stay. A layer
computes with the weights that its 4 bits stand for, in ``policy.dtype``; engines and exported folders get those
weights, adapters merged in, as a model that was never quantized.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from lit_grpo.errors import UserError
from lit_grpo.policy.config import PolicyConfig, QuantizationConfig

KEY = "model.policy.quantization"
FINGERPRINT = "quantized_base"
"""Key in a checkpoint for the mean absolute value of each quantized weight, in the order of the model."""
_NEEDED = ("bitsandbytes", "accelerate", "peft")


def check_quantization(config: PolicyConfig) -> None:
    """Check the settings of quantized weights; imports nothing heavy.

    Raises:
        UserError: there are no adapters, the model is made on the spot, or a package is missing.
    """
    if config.quantization is None:
        return
    if config.lora is None:
        raise UserError("weights of 4 bits cannot be trained, only adapters beside them", where=KEY,
                        remedy="add model.policy.lora, or leave quantization out")  # fmt: skip
    if config.tiny is not None:
        raise UserError("a tiny model is made on the spot, and only weights that are loaded are quantized", where=KEY,
                        remedy="give model.policy.path, or leave quantization out")  # fmt: skip
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise UserError(
            f"quantized weights need {' and '.join(missing)}, not installed here",
            where=KEY,
            remedy="pip install 'lit-grpo[quantized]' -c constraints.txt",
        )


def loading_arguments(config: QuantizationConfig | None, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that quantize a model while it is loaded; none without ``config``."""
    if config is None:
        return {}
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=config.type,
            bnb_4bit_use_double_quant=config.double,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=torch.uint8,
        )
    }


def after_loading(model: Any) -> None:
    """Prepare a freshly loaded model for training over its quantized weights.

    Raises:
        UserError: no layer was quantized, since the model has no linear layers that bitsandbytes knows.
    """
    layers = [layer for layer in model.modules() if is_quantized(getattr(layer, "weight", None))]
    if not layers:
        raise UserError(f"{type(model).__name__} has no linear layers that can be quantized", where=KEY,
                        remedy="leave quantization out")  # fmt: skip
    # Engines and exported folders are made from the configuration, and what they hold is not quantized.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for layer in layers:
        # On some CPUs a pass without gradient would repack the weights for another kernel, with other rounding.
        layer.support_avx512bf16_for_cpu = False


def is_quantized(parameter: Any) -> bool:
    return getattr(parameter, "quant_state", None) is not None


def dequantized(parameter: Any) -> Tensor:
    """Return the weights that the 4 bits stand for, [out, in], in the number format of the layer's computation."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, parameter.quant_state)


def plain_layers(model: nn.Module) -> None:
    """Replace quantized layers by plain ones of the same shape, whose values are yet to be filled in."""
    for name, layer in list(model.named_modules()):
        weight: Any = getattr(layer, "weight", None)
        if isinstance(layer, nn.Linear) and is_quantized(weight):
            rows, columns = weight.quant_state.shape
            new = nn.Linear(columns, rows, layer.bias is not None, weight.device, weight.quant_state.dtype)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new.requires_grad_(False))


def keep_base_out_of_checkpoints(owner: nn.Module) -> None:
    """Leave quantized weights out of the checkpoints of ``owner``, and save a fingerprint of them instead.

    A checkpoint over other weights is refused when it is loaded.
    """
    # Quantized weights never change, so the model's folder has them already.
    names = [name for name, parameter in owner.named_parameters() if is_quantized(parameter)]
    if not names:
        return

    # Rounded to 4 bits on another kind of device some weights may differ, so means are compared and not the bits.
    @cache
    def fingerprint() -> Tensor:
        parameters = dict(owner.named_parameters())
        return torch.stack([dequantized(parameters[name]).abs().double().mean().cpu() for name in names])

    def on_save(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in names:
            for key in [key for key in state if key == prefix + name or key.startswith(f"{prefix}{name}.")]:
                del state[key]
        state[prefix + FINGERPRINT] = fingerprint()

    def before_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        saved_fingerprint = state.pop(prefix + FINGERPRINT, None)
        if saved_fingerprint is None or saved_fingerprint.shape != (len(names),):
            _refuse_other_base("the checkpoint was written over weights that were not quantized like these")
        current = fingerprint()
        gap = float(((saved_fingerprint.cpu().double() - current).abs() / current.clamp_min(1e-12)).max())
        if not gap < 1e-3:
            _refuse_other_base(
                f"the checkpoint's adapters were trained over other base weights: they differ by {gap:.2g}"
            )

    def after_load(module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [k for k in incompatible.missing_keys if not k.endswith(tuple(names))]

    owner.register_state_dict_post_hook(on_save)
    owner.register_load_state_dict_pre_hook(before_load)
    owner.register_load_state_dict_post_hook(after_load)


def _refuse_other_base(what: str) -> None:
    raise UserError(what, where="ckpt_path", remedy="go on with the model folder and settings that the run began with")
