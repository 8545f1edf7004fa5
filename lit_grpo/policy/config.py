"""The policy and its optimizer, as written in YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class TinyModel:
    """A Qwen2-shaped model with random weights and a character tokenizer, made on the spot: no download.

    Attributes:
        alphabet: the characters the model can read and write.
        layers: transformer blocks.
        width: hidden size.
        heads: attention heads; divides ``width``.
        max_position: longest prompt plus completion, in characters.
        seed: of the initial weights.
    """

    alphabet: str = "0123456789+="
    layers: int = 2
    width: int = 128
    heads: int = 4
    max_position: int = 64
    seed: int = 0


@dataclass
class PolicyConfig:
    """The model that is trained. Give ``path`` or ``tiny``.

    Attributes:
        path: folder of a Hugging Face model, or its name on the hub.
        tiny: make a tiny model instead.
        dtype: number format of weights and computation.
        attention: transformers' attention implementation.
        gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time.
        share_prompts: train each prompt once for all of its completions: the same numbers with fewer tokens. Needs an
            attention that takes a mask (``sdpa``, ``eager``).
        logits_chunk: completion tokens whose logits are held at once; bounds memory, changes nothing else. None: as
            many as make 256 MiB.
        model_args: further arguments of ``AutoModelForCausalLM.from_pretrained``.
    """

    path: str | None = None
    tiny: TinyModel | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    gradient_checkpointing: bool = False
    share_prompts: bool = True
    logits_chunk: int | None = None
    model_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule.

    Attributes:
        lr: peak learning rate.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        schedule: after the warm-up: stay, or fall to ``final_lr_ratio * lr`` over the run's optimizer steps.
        total_steps: optimizer steps at which ``linear`` and ``cosine`` end; None: those of the run.
        warmup_steps: optimizer steps over which the rate rises linearly from 0.
        final_lr_ratio: where ``linear`` and ``cosine`` end.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int | None = None
    warmup_steps: int = 0
    final_lr_ratio: float = 0.0
