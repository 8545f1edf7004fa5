"""The policy, its optimizer, its reference and its critic, as written in YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from lit_grpo.utils.bounds import Bound


@dataclass
class TinyModel:
    """A Qwen2-shaped model with random weights and a character tokenizer, made on the spot: no download.

    Attributes:
        alphabet: the characters the model can read and write.
        layers: transformer blocks.
        width: hidden size.
        heads: attention heads; divides ``width``.
        max_position: longest prompt plus completion, in characters.
        seed: seed of the initial weights.
        experts: experts of each layer; above 0 the model is a mixture of experts, Qwen3-MoE-shaped.
        experts_per_token: experts that each token goes through.
    """

    alphabet: str = "0123456789+="
    layers: Annotated[int, Bound(least=1)] = 2
    width: Annotated[int, Bound(least=2)] = 128
    heads: Annotated[int, Bound(least=1)] = 4
    max_position: Annotated[int, Bound(least=2)] = 64
    seed: Annotated[int, Bound(least=0)] = 0
    experts: Annotated[int, Bound(least=0)] = 0
    experts_per_token: Annotated[int, Bound(least=1)] = 2


@dataclass
class LoraConfig:
    """Low-rank adapters, which alone are trained while the model's own weights stay. Needs the extra ``lora``.

    A learning rate about ten times that of full training is usual.

    Attributes:
        rank: rank of each adapter.
        alpha: adapters are scaled by ``alpha / rank``.
        dropout: 0; kept out, since the learner would compute other probabilities than the engine sampled from.
        target_modules: layers that get an adapter: ``all-linear`` (all but the output head), or ends of layer names.
        seed: seed of the adapters' initial values.
    """

    rank: Annotated[int, Bound(least=1)] = 32
    alpha: Annotated[float, Bound(above=0)] = 64.0
    dropout: Annotated[float, Bound(least=0, most=1)] = 0.0
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    seed: Annotated[int, Bound(least=0)] = 0


@dataclass
class QuantizationConfig:
    """Base weights of 4 bits under low-rank adapters (QLoRA, 2305.14314). Needs ``lora`` and the extra ``quantized``.

    Layers compute in ``policy.dtype``.

    Attributes:
        type: format of the 4 bits: ``nf4``, quantiles of a normal distribution, or ``fp4``.
        double: whether to quantize the scales of the blocks too: 4.13 bits a weight instead of 4.5.
    """

    type: Literal["nf4", "fp4"] = "nf4"
    double: bool = True


@dataclass
class PolicyConfig:
    """The model that is trained, from ``path`` or ``tiny``.

    Attributes:
        path: folder of a Hugging Face model, or its name on the hub; or a folder of adapters (LoRA) that peft wrote,
            which are merged into the model that they name.
        tiny: a tiny model to be made instead.
        dtype: number format of weights and computation.
        attention: ``sdpa`` works everywhere; ``varlen``, torch's variable-length flash attention, on packed rows (CUDA,
            computing in bfloat16); ``auto``: ``varlen`` where it works, else ``sdpa``; ``flash_attention_2`` needs the
            package of that name, and no shared prompts; ``eager`` is slow.
        gradient_checkpointing: whether activations are recomputed in the backward pass: less memory, about a third more
            time. A number between 0 and 1: of that share of the blocks, the first ones, rounded up.
        share_prompts: whether a prompt is computed once for all of its completions: the same numbers with fewer tokens.
        pack: whether the completions of a micro-batch stand one behind the other in one row: the same numbers without
            padding.
        logits_chunk: completion tokens whose logits are held at once; bounds memory, changes nothing else. None: as
            many as make 256 MiB in float32, compiled 512 MiB in bfloat16.
        compile: whether ``torch.compile`` compiles the transformer blocks and what is done with the logits: the same
            numbers up to rounding, fewer and larger kernels. The run waits for the compiler before its first update.
            None: with ``varlen`` attention, models of ``path`` without experts and without ``quantization``.
        lora: low-rank adapters to train instead of the weights; a separate critic then has some of its own.
        quantization: 4-bit format of the weights under the adapters.
        model_args: further arguments of ``from_pretrained``. What says where the model is and who may read it
            (``trust_remote_code``, ``revision``, ``code_revision``, ``subfolder``, ``token``, ``cache_dir``,
            ``local_files_only``, ``force_download``, ``proxies``) goes to every loader: weights, configuration,
            tokenizer, generation configuration. Fields of the model's configuration replace those of config.json.
    """

    path: str | None = None
    tiny: TinyModel | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "sdpa", "varlen", "flash_attention_2", "eager"] = "auto"
    gradient_checkpointing: Annotated[bool | float, Bound(least=0, most=1)] = False
    share_prompts: bool = True
    pack: bool = True
    logits_chunk: Annotated[int | None, Bound(least=1)] = None
    compile: bool | None = None
    lora: LoraConfig | None = None
    quantization: QuantizationConfig | None = None
    model_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig:
    """An optimizer, AdamW unless another is named, and its learning-rate schedule.

    Attributes:
        type: import path of a ``torch.optim.Optimizer``: ``torch.optim.AdamW``, ``bitsandbytes.optim.AdamW8bit`` (8-bit
            states, a quarter of the memory; CUDA, extra ``quantized``), ``torchao.optim.AdamW8bit`` (likewise, and in
            shards; with ``args: {bf16_stochastic_round: true}`` for weights in bfloat16), one of your own.
        args: further arguments of the optimizer.
        lr: peak learning rate.
        betas: decay rates of the two moments. (0.9, 0.95) as in GTPO's GRPO, Dr. GRPO and OpenRLHF; torch, TRL and verl
            default to (0.9, 0.999).
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        schedule: what follows the warm-up: the rate stays, or falls to ``final_lr_ratio * lr`` over the run's optimizer
            steps.
        total_steps: optimizer steps at which ``linear`` and ``cosine`` end; None: those of the run.
        warmup_steps: optimizer steps over which the rate rises linearly from 0.
        warmup_ratio: the same as a share of ``total_steps``, or else of the run's optimizer steps, rounded up; in the
            place of ``warmup_steps``.
        final_lr_ratio: share of ``lr`` at which ``linear`` and ``cosine`` end.
        scheduler: import path of a ``torch.optim.lr_scheduler.LRScheduler``, stepped after every optimizer step, in the
            place of ``schedule`` and the warm-up; None: those.
        scheduler_args: arguments of the scheduler besides the optimizer.
    """

    type: str = "torch.optim.AdamW"
    args: dict[str, Any] = field(default_factory=dict)
    lr: Annotated[float, Bound(above=0, most=1000)] = 1e-6
    betas: Annotated[tuple[float, float], Bound(least=0, below=1)] = (0.9, 0.95)
    eps: Annotated[float, Bound(least=0)] = 1e-8
    weight_decay: Annotated[float, Bound(least=0)] = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: Annotated[int | None, Bound(least=1)] = None
    warmup_steps: Annotated[int, Bound(least=0)] = 0
    warmup_ratio: Annotated[float, Bound(least=0, below=1)] = 0.0
    final_lr_ratio: Annotated[float, Bound(least=0, most=1)] = 0.0
    scheduler: str | None = None
    scheduler_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class ReferenceConfig:
    """The reference of a KL term: the policy before training, made only if the objective asks for it.

    Attributes:
        refresh_every: rollouts after which the reference becomes the policy of that moment; its weights are then part
            of every checkpoint. None: it stays what ``policy`` describes, and is never saved.
    """

    refresh_every: Annotated[int | None, Bound(least=1)] = None


@dataclass
class CriticConfig:
    """The value function of methods with one: a linear head on a model of its own, or on the policy's backbone.

    Attributes:
        backbone: the model below the head. ``separate``: a base model of its own, which learns from the value loss
            alone.
            ``shared``: the policy's; one forward pass then gives log-probabilities and values, and the critic is the
            head alone.
        path: folder or hub name of the model that a separate critic begins as; None: a copy of the policy's. Its
            tokens must be the policy's. Number format, attention, checkpointing and adapters are set by ``policy``.
        tiny: a tiny model to be made instead.
        model_args: arguments of the loaders for ``path``, such as ``revision``. How models are reached
            (``trust_remote_code``, ``token``, ``cache_dir``, ``local_files_only``, ``proxies``) is as for the policy.
        detach: whether a shared backbone learns nothing from the value loss. Otherwise it does, in the measure of
            ``objective.value_coef``.
        optimizer: optimizer of the critic, with a shared backbone of the head alone; None: as the policy's.
        max_grad_norm: the norm of the gradient of what this optimizer holds is clipped to this; None: no clipping.
        bounded: whether values are ``value_low + (value_high - value_low) * sigmoid(head)``, so that none leaves the
            range of the reward, instead of the head itself.
        value_low: smallest total reward.
        value_high: largest total reward.
        warmup_rollouts: number of rollouts at the start that train the critic alone, on Monte Carlo returns; policy and
            shared backbone stay untouched meanwhile. None: as the recipe was published, 50 for vapo (2504.05118) and 0
            for the others.
        measure_every: rollouts from one measurement of the critic after its update to the next
            (``critic/value_*_after``); each costs a forward pass. 0: never.
    """

    backbone: Literal["separate", "shared"] = "separate"
    path: str | None = None
    tiny: TinyModel | None = None
    model_args: dict[str, Any] = field(default_factory=dict)
    detach: bool = False
    optimizer: OptimizerConfig | None = None
    max_grad_norm: Annotated[float | None, Bound(above=0)] = 1.0
    bounded: bool = False
    value_low: float = 0.0
    value_high: float = 1.0
    warmup_rollouts: Annotated[int | None, Bound(least=0)] = None
    measure_every: Annotated[int, Bound(least=0)] = 10
