"""Make the model and tokenizer that a :class:`PolicyConfig` describes; problems are found before weights are read."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lit_grpo.errors import UserError
from lit_grpo.policy.config import PolicyConfig, TinyModel
from lit_grpo.policy.forward import attention
from lit_grpo.policy.model.adapter_folder import base_of, has_tokenizer, is_adapter, merge_into
from lit_grpo.policy.model.arguments import TRUST, check_model_args, loader_arguments, refuse_unknown
from lit_grpo.policy.model.compiling import compile_blocks
from lit_grpo.policy.model.files import check_folder
from lit_grpo.policy.model.kind import check_kind
from lit_grpo.policy.model.lora import add_adapters, check_lora
from lit_grpo.policy.model.quantization import after_loading, check_quantization, loading_arguments
from lit_grpo.utils.bounds import check_fields
from lit_grpo.utils.hub import from_cache_alone, why_unreachable
from lit_grpo.utils.random import drawn_from
from lit_grpo.utils.text import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

KEY = "model.policy"
_MOST_TINY_WEIGHTS = 10**9
_WHOLE = "give a folder on this machine that is whole, or a hub name while the hub can be reached"


def check_policy(config: PolicyConfig) -> None:
    """Check all settings of the policy that can be checked without reading weights.

    Raises:
        UserError: neither or both of ``path`` and ``tiny`` are given, the folder is missing or holds no model, or two
            settings contradict each other.
    """
    check_fields(config, KEY)
    if config.path is not None and config.tiny is not None:
        raise UserError(
            "the policy has both `path` (a model folder or hub name) and `tiny` (a random model made on the spot)",
            where=KEY,
            remedy=f"leave one out; one that a file sets is taken away by --{KEY}.tiny null, or --{KEY}.path null",
        )
    if config.path is None and config.tiny is None:
        raise UserError(
            "the policy needs either `path` (a model folder or hub name) or `tiny` (a random model made on the spot)",
            where=KEY,
            remedy="for example `policy: {path: models/SmolLM2-135M-Instruct}`",
        )
    if config.share_prompts and config.attention == "flash_attention_2":
        raise UserError(
            "flash_attention_2 takes no mask, which shared prompts need",
            where=f"{KEY}.share_prompts",
            remedy="set share_prompts: false, or attention: sdpa",
        )
    # transformers takes the package "kernels" as well, which fetches such a kernel.
    if config.attention == "flash_attention_2" and not (find_spec("flash_attn") or find_spec("kernels")):
        raise UserError(
            "flash_attention_2 needs the package flash_attn, which is not installed",
            where=f"{KEY}.attention",
            remedy="set attention: auto, which takes torch's own flash attention on CUDA, or pip install flash-attn",
        )
    if config.attention == "varlen":
        _check_varlen(config)
    check_model_args(config)
    if config.lora is not None:
        check_lora(config.lora)
    check_quantization(config)
    if config.tiny is not None:
        _check_tiny(config.tiny)
    elif config.path is not None and is_folder_name(config.path):
        folder = Path(config.path).expanduser()
        if is_adapter(folder):
            _check_adapter(config, folder)
        else:
            check_folder(folder / (config.model_args.get("subfolder") or ""), f"{KEY}.path")
    else:
        _check_hub(config)


def _check_adapter(config: PolicyConfig, folder: Path) -> None:
    """Check a folder of adapters and the model that they belong to."""
    base = base_of(folder, f"{KEY}.path")
    if config.quantization is not None:
        raise UserError(
            f"the folder {folder} holds adapters (LoRA) of {base}: merged into weights of 4 bits they would be rounded",
            where=f"{KEY}.quantization",
            remedy="leave quantization out; or merge them first (peft: merge_and_unload, save_pretrained) and give the "
            "folder of the result",
        )
    try:
        check_policy(replace(config, path=base))
    except UserError as error:
        raise UserError(
            f"the folder {folder} holds adapters (LoRA) of the model {base}, and {error.what}",
            where=f"{KEY}.path",
            remedy=f"put the model there, or correct base_model_name_or_path in {folder / 'adapter_config.json'}",
        ) from error


def _check_varlen(config: PolicyConfig) -> None:
    where = f"{KEY}.attention"
    if not torch.cuda.is_available():
        raise UserError("varlen attention runs on CUDA GPUs alone", where=where, remedy="set attention: auto")
    if not config.pack:
        raise UserError("varlen attention is that of packed rows", where=where,
                        remedy="set pack: true, or attention: sdpa")  # fmt: skip


def resolve_backend(config: PolicyConfig, dtype: torch.dtype | None = None, device: str = "cpu") -> PolicyConfig:
    """Choose attention and compiling for a device and a number format, where the settings leave them open.

    Reads the model's configuration, no weights.

    Args:
        config: settings of the policy.
        dtype: number format of the computation; None: that of the weights.
        device: type of the device, ``cpu`` or ``cuda``.

    Returns:
        The same settings with ``attention`` and ``compile`` decided.

    Raises:
        UserError: the attention does not work in the number format.
    """
    dtype_name = str(dtype).removeprefix("torch.") if dtype is not None else config.dtype
    if config.attention == "varlen" and dtype_name != "bfloat16":
        raise UserError(
            f"varlen attention computes in bfloat16, not in {dtype_name}",
            where=f"{KEY}.attention",
            remedy="set trainer.strategy: fsdp, which computes in bfloat16 on CUDA, also on one card, and keeps "
            "float32 weights; or dtype: bfloat16; or attention: auto",
        )
    backend, compiles = config.attention, config.compile
    if backend == "auto":
        flash = device == "cuda" and dtype_name == "bfloat16" and config.pack and _flash_fits(config)
        backend = "eager" if _needs_eager(config) else "varlen" if flash else "sdpa"
    if compiles is None:
        plain = config.tiny is None and config.quantization is None
        compiles = backend == "varlen" and plain and not _has_experts(config)
    return replace(config, attention=backend, compile=compiles)


def _flash_fits(config: PolicyConfig) -> bool:
    """Tell whether flash attention takes heads of this size, and the model attends to all tokens before."""
    text = load_model_config(config).get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layer_types = getattr(text, "layer_types", None)
    full = set(layer_types) == {"full_attention"} if layer_types else not getattr(text, "sliding_window", None)
    return size % 8 == 0 and size <= 256 and full


def _needs_eager(config: PolicyConfig) -> bool:
    """Tell whether the model attends in a way that only its own code computes: a soft cap, sinks, a learnt mask."""
    if config.tiny is not None:
        return False
    text = load_model_config(config).get_text_config()
    if getattr(text, "attn_logit_softcapping", None) is not None or hasattr(text, "keep_window_size"):
        return True
    return not getattr(_model_class(config), "_supports_sdpa", True)


def _model_class(config: PolicyConfig) -> Any:
    """Return the class that the policy's model will have; None: that of a tiny model, or code of its own."""
    from transformers import AutoModelForCausalLM

    if config.tiny is not None:
        return None
    return AutoModelForCausalLM._model_mapping.get(type(load_model_config(config)), None)


def _has_experts(config: PolicyConfig) -> bool:
    return bool(getattr(load_model_config(config).get_text_config(), "num_experts_per_tok", None))


def check_replay(config: PolicyConfig) -> None:
    """Check that the choices of the model's routers can be replayed; reads no weights.

    Raises:
        UserError: the model has no experts, so there is nothing to replay; or its blocks would be compiled, in which
            routers cannot be told what to choose.
    """
    if config.compile:
        raise UserError(
            "routers of compiled blocks cannot be told which experts to use",
            where=f"{KEY}.compile",
            remedy="set compile: false, or routing_replay: none",
        )
    if not _has_experts(config):
        raise UserError(
            "the model is dense: it has no experts whose choice could be replayed",
            where="model.routing_replay",
            remedy="set routing_replay: none",
        )


def _check_tiny(tiny: TinyModel) -> None:
    # A slip of the keyboard would otherwise ask for all memory of the machine.
    if (weights := 12 * tiny.layers * tiny.width**2 * max(1, tiny.experts)) > _MOST_TINY_WEIGHTS:
        raise UserError(
            f"layers {tiny.layers} and width {tiny.width} make a model of {weights:.1e} weights, which is not tiny",
            where=f"{KEY}.tiny.width",
            remedy=f"stay below {_MOST_TINY_WEIGHTS:.0e} weights, or give the path of a model folder",
        )
    if tiny.width % tiny.heads or (tiny.width // tiny.heads) % 2:
        raise UserError(
            f"width {tiny.width} cannot be split into {tiny.heads} heads of even size",
            where=f"{KEY}.tiny.width",
            remedy="choose a width that is a multiple of 2 x heads",
        )
    if tiny.experts and not 1 <= tiny.experts_per_token <= tiny.experts:
        raise UserError(
            f"a token cannot go through {tiny.experts_per_token} of {tiny.experts} experts",
            where=f"{KEY}.tiny.experts_per_token",
            remedy=f"choose 1 to {tiny.experts}",
        )


def is_folder_name(path: str) -> bool:
    """Tell whether a path means a folder: it exists, or it is not ``name`` or ``owner/name`` as on the hub."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists() or path.startswith("models/")


def _check_hub(config: PolicyConfig) -> None:
    """Refuse at once a hub name that is neither in the cache nor can be asked for."""
    assert config.path is not None
    if _in_cache(config) or not _asks_nobody():
        return
    raise UserError(
        f"the model {config.path} is no folder on this machine and not in the hub's cache, and {_asks_nobody()}",
        where=f"{KEY}.path",
        remedy=f"for a folder write ./{config.path}; fetch a model of the hub once where there is a network",
    )


@cache
def _asks_nobody() -> str | None:
    """Say why the hub cannot be asked, once for the whole program; None if it can be."""
    from huggingface_hub import constants

    return why_unreachable(constants.ENDPOINT, constants.HF_HUB_OFFLINE)


def _unreachable_hub(config: PolicyConfig) -> bool:
    """Tell whether a model is one of a hub that cannot be asked: its client would try, for each file in the cache."""
    if config.path is None:
        return False
    location = _location(config)
    return not is_folder_name(location) and _asks_nobody() is not None


def _in_cache(config: PolicyConfig) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    assert config.path is not None
    folder, place = config.model_args.get("subfolder"), ("cache_dir", "revision")
    given = {name: config.model_args[name] for name in place if config.model_args.get(name)}
    try:
        found = try_to_load_from_cache(config.path, f"{folder}/config.json" if folder else "config.json", **given)
        return isinstance(found, str)
    except HFValidationError:
        return False


def load_tokenizer(config: PolicyConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer alone; reads no weights."""
    check_policy(config)
    if config.tiny is not None:
        from lit_grpo.policy.model.char_tokenizer import char_tokenizer

        return char_tokenizer(config.tiny.alphabet)
    from transformers import AutoTokenizer

    location = _location(config)
    if config.path is not None and is_adapter(own := Path(config.path).expanduser()) and has_tokenizer(own):
        location = str(own)
    with _named_errors(config):
        return AutoTokenizer.from_pretrained(location, **loader_arguments(config).place)


def load_model_config(config: PolicyConfig) -> Any:
    """Load the transformers configuration alone (context length, end tokens); reads no weights."""
    check_policy(config)
    if config.tiny is not None:
        return _tiny_config(config.tiny)
    from transformers import AutoConfig

    with _named_errors(config):
        arguments = loader_arguments(config).config
        loaded, unused = AutoConfig.from_pretrained(_location(config), **arguments, return_unused_kwargs=True)
        refuse_unknown(unused, vars(loaded))
    check_kind(loaded, config.path or "", f"{KEY}.path")
    return loaded


def load_model(config: PolicyConfig) -> PreTrainedModel:
    """Load the causal language model, with new adapters if it trains by LoRA.

    It is in evaluation mode, apart from gradient checkpointing. Under ``torch.device("meta")`` it is the same model
    without weights, which are then not read.
    """
    check_policy(config)
    from transformers import AutoModelForCausalLM

    attention.register()
    backend = config.attention
    if backend == "auto":
        backend = "eager" if _needs_eager(config) else "sdpa"
    implementation = attention.implementation(_model_class(config), backend)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    if config.tiny is not None:
        # Its weights depend on its own seed alone, and the run's random numbers not on whether it was made.
        with drawn_from(config.tiny.seed):
            tiny_config = _tiny_config(config.tiny)
            model = AutoModelForCausalLM.from_config(tiny_config, dtype=dtype, attn_implementation=implementation)
        model = model.to(torch.empty(0).device)
    elif torch.empty(0).is_meta:
        model = _skeleton(config, dtype, implementation)
    else:
        # Read first, since it says which arguments nobody knows.
        load_model_config(config)
        with _named_errors(config):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                _location(config),
                dtype=dtype,
                attn_implementation=implementation,
                output_loading_info=True,
                **loading_arguments(config.quantization, dtype),
                **loader_arguments(config).model,
            )
            model, report = loaded
            _check_loaded(config, report)
            if config.path is not None and is_adapter(folder := Path(config.path).expanduser()):
                model = merge_into(model, folder).eval()
        if config.quantization is not None:
            after_loading(model)
    # A skeleton on the meta device has loaded nothing; scripts/benchmark_start.py reads when a model was.
    if not torch.empty(0).is_meta:
        log.debug("the model is loaded")
    # Compiled last: the compiler must see the blocks as they will run, with checkpointing and adapters.
    if config.gradient_checkpointing:
        checkpoint_blocks(model, float(config.gradient_checkpointing))
    if config.lora is not None:
        add_adapters(model, config.lora)
    if config.compile:
        compile_blocks(model)
    return model


def checkpoint_blocks(model: PreTrainedModel, share: float = 1.0) -> None:
    """Recompute the activations of blocks in the backward pass.

    Args:
        model: a model of transformers.
        share: of the blocks whose activations are recomputed, rounded up to whole blocks.

    Raises:
        UserError: the model cannot leave single blocks out.
    """
    from lit_grpo.distributed.sharding import blocks

    # Keeping and putting back random states costs a tenth of a small block's time. With dropout off for good only noisy
    # routers draw numbers; Mixtral, PhiMoE and DBRX each have names of their own for the noise.
    draws = any("jitter" in name and bool(value) for part in model.modules() for name, value in vars(part).items())
    options = {"use_reentrant": False, "preserve_rng_state": draws}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if share < 1:
        try:
            parts = [block for block in blocks(model) if hasattr(block, "gradient_checkpointing")]
        except UserError:
            parts = []
        if not parts:
            raise UserError(
                f"{type(model).__name__} recomputes the activations of all of its blocks or of none",
                where=f"{KEY}.gradient_checkpointing",
                remedy="write true or false",
            )
        # The last blocks keep theirs: the backward pass has freed them when it comes to those that need room again.
        for block in parts[math.ceil(share * len(parts)) :]:
            cast(Any, block).gradient_checkpointing = False
    # Checkpointing is off in evaluation mode; nothing else differs, since dropout is off for good.
    model.train()


def _skeleton(config: PolicyConfig, dtype: torch.dtype, implementation: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model_config = load_model_config(config)
    arguments = loader_arguments(config).place
    # The configuration is read, so that only the model's code is still to be found.
    known = {key: arguments[key] for key in ("trust_remote_code", "code_revision") if key in arguments}
    with _named_errors(config):
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=implementation, **known)
    return model.eval()


def end_token_ids(config: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return all ids that end a completion, sorted: the tokenizer's and those of the generation configuration."""
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    if config.path is not None:
        # Chat models often end a turn with another token than the tokenizer's; some have no generation_config.json.
        try:
            with from_cache_alone() if _unreachable_hub(config) else nullcontext():
                eos = _generation_config(config).eos_token_id
        except OSError:
            eos = None
        # Folders without that file name them in config.json, where transformers looks as well.
        for named in (eos, getattr(load_model_config(config).get_text_config(), "eos_token_id", None)):
            ids |= set(named) if isinstance(named, list | tuple) else ({named} if named is not None else set())
    if not ids:
        raise UserError(
            "neither the tokenizer nor the generation configuration names an end-of-sequence token",
            where=f"{KEY}.path",
            remedy="set eos_token in the model folder's tokenizer_config.json",
        )
    return tuple(sorted(int(i) for i in ids))


def _generation_config(config: PolicyConfig) -> Any:
    from transformers import GenerationConfig

    arguments = loader_arguments(config).place
    # It has no code, and takes what it does not know for settings of generation.
    arguments = {name: value for name, value in arguments.items() if name not in ("trust_remote_code", "code_revision")}
    return GenerationConfig.from_pretrained(_location(config), **arguments)


def generation_file(config: PolicyConfig) -> Path | None:
    """Return the generation configuration of a model that is a folder, or None."""
    if config.path is None:
        return None
    file = Path(_location(config)) / (config.model_args.get("subfolder") or "") / "generation_config.json"
    return file if file.is_file() else None


def _location(config: PolicyConfig) -> str:
    """Return the folder or hub name that configuration and weights are read from: below adapters, their model's."""
    assert config.path is not None
    if not is_folder_name(config.path):
        return config.path
    folder = Path(config.path).expanduser()
    if not is_adapter(folder):
        return str(folder)
    return _location(replace(config, path=base_of(folder, f"{KEY}.path")))


def _check_loaded(config: PolicyConfig, report: Mapping[str, Any]) -> None:
    """Refuse a model some of whose weights were not in its files: transformers makes them up at random."""
    missing = sorted(str(name) for name in report.get("missing_keys", ()))
    if missing:
        raise UserError(
            f"the weights of {config.path} lack {len(missing)} that its config.json asks for, such as {missing[0]}: "
            "they would be random",
            where=f"{KEY}.path",
            remedy="give a folder that is whole, or correct num_hidden_layers in its config.json",
        )


class _named_errors:  # noqa: N801 - reads as a statement
    """A context that turns transformers' long messages about an unreachable or unknown model into a ``UserError``."""

    def __init__(self, config: PolicyConfig) -> None:
        self.path = config.path
        self.cache = from_cache_alone() if _unreachable_hub(config) else nullcontext()

    def __enter__(self) -> None:
        self.cache.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.cache.__exit__(kind, error, trace)
        # Files of a model may be broken in as many ways as there are libraries that read them. Memory that ran out and
        # what the program itself says are no fault of the files.
        if isinstance(error, Exception) and not isinstance(error, (UserError, MemoryError, torch.OutOfMemoryError)):
            text = str(error).strip()
            # Of several lines the one that says something: transformers begins some messages with a headline.
            first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
            where, remedy = f"{KEY}.path", _WHOLE
            if "ignore_mismatched_sizes" in text:
                first = "its weights have other shapes than its config.json says"
            elif "trust_remote_code" in text:
                raise UserError(
                    f"the model {self.path} brings code of its own, which is run only where you allow it",
                    where=TRUST,
                    remedy=f"read the code, then set {TRUST}: true",
                ) from error
            elif "attn_implementation" in text or "scaled_dot_product_attention" in text:
                where, remedy = f"{KEY}.attention", "set model.policy.attention: eager"
            elif "Unrecognized configuration class" in text:
                first = "it is no causal language model (transformers has no AutoModelForCausalLM for its model_type)"
                remedy = "give a model that continues a text; encoders, encoder-decoders and classifiers do not"
            raise UserError(
                f"the model {self.path} cannot be loaded: {shorten(first, 300)}", where=where, remedy=remedy
            ) from error


def _tiny_config(tiny: TinyModel) -> Any:
    from lit_grpo.policy.model.char_tokenizer import char_tokenizer

    tokenizer = char_tokenizer(tiny.alphabet)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": tiny.width,
        "intermediate_size": 4 * tiny.width,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.heads,
        "max_position_embeddings": tiny.max_position,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "use_cache": True,
    }
    if tiny.experts:
        from transformers import Qwen3MoeConfig

        # A field of the configuration that its signature does not show.
        shape["head_dim"] = tiny.width // tiny.heads
        return Qwen3MoeConfig(
            **shape,
            moe_intermediate_size=2 * tiny.width,
            num_experts=tiny.experts,
            num_experts_per_tok=tiny.experts_per_token,
            norm_topk_prob=True,
        )
    from transformers import Qwen2Config

    return Qwen2Config(**shape)
