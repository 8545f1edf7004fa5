"""What ``model_args`` may say, and which of it each of transformers' loaders gets: model, configuration, tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from lit_grpo.errors import UserError
from lit_grpo.policy.config import PolicyConfig
from lit_grpo.utils.secrets import MASK
from lit_grpo.utils.spelling import nearest

KEY = "model.policy.model_args"
TRUST = f"{KEY}.trust_remote_code"

_ACCESS: dict[str, tuple[type, ...]] = {
    "trust_remote_code": (bool,),
    "token": (str, bool),
    "cache_dir": (str,),
    "local_files_only": (bool,),
    "force_download": (bool,),
    "proxies": (dict,),
}
"""How a model is reached, whichever it is, with the types of the values."""
_PLACE: dict[str, tuple[type, ...]] = {"revision": (str,), "code_revision": (str,), "subfolder": (str,)}
"""Where in its repository a model lies; of another repository it says nothing."""
_WEIGHTS = frozenset({"variant", "use_safetensors", "weights_only", "key_mapping", "experts_implementation"})
"""What the loader of weights alone knows."""

_ELSEWHERE = {
    "dtype": "set model.policy.dtype: float32 or bfloat16",
    "torch_dtype": "set model.policy.dtype: float32 or bfloat16",
    "attn_implementation": "set model.policy.attention: sdpa, eager, varlen or flash_attention_2",
    "quantization_config": "set model.policy.quantization: {type: nf4} and model.policy.lora",
    "load_in_4bit": "set model.policy.quantization: {type: nf4} and model.policy.lora",
    "load_in_8bit": "set model.policy.quantization: {type: nf4} and model.policy.lora",
    "device_map": "set trainer.devices, and trainer.strategy: fsdp to spread a model over several cards",
    "device_mesh": "set trainer.devices, and trainer.strategy: fsdp to spread a model over several cards",
    "max_memory": "set trainer.strategy: fsdp to spread a model over several cards",
    "tp_plan": "set trainer.strategy: fsdp to spread a model over several cards",
    "tp_size": "set trainer.strategy: fsdp to spread a model over several cards",
    "offload_folder": "set trainer.strategy: fsdp to spread a model over several cards",
    "offload_state_dict": "set trainer.strategy: fsdp to spread a model over several cards",
    "offload_buffers": "set trainer.strategy: fsdp to spread a model over several cards",
    "use_auth_token": "write token, or set the variable HF_TOKEN",
    "pretrained_model_name_or_path": "set model.policy.path",
    "adapter_kwargs": "give the folder of the adapter as model.policy.path",
    "gguf_file": "give a folder with weights in safetensors: those of GGUF files are rounded for another program",
    "ignore_mismatched_sizes": "leave it out: weights of another shape would be replaced by random ones",
    "config": "give fields of the configuration by their names, as in model_args: {max_position_embeddings: 4096}",
    "state_dict": "leave it out: weights are read from the model's folder",
    "output_loading_info": "leave it out",
    "return_unused_kwargs": "leave it out",
    "from_tf": "convert the weights to safetensors first",
    "from_flax": "convert the weights to safetensors first",
    "low_cpu_mem_usage": "leave it out: weights are never held twice",
    "gradient_checkpointing": "set model.policy.gradient_checkpointing",
    "use_cache": "leave it out: learner and engine each set it",
}
"""Arguments of transformers that something else here decides, and what to write in their place."""


class LoaderArguments(NamedTuple):
    """The arguments of each loader for one model; all of them are told where it is and whether its code may run."""

    place: dict[str, Any]
    """For tokenizers and generation configurations."""
    config: dict[str, Any]
    """For configurations: also the fields that replace those of config.json."""
    model: dict[str, Any]
    """For weights."""


def loader_arguments(config: PolicyConfig) -> LoaderArguments:
    """Sort ``model_args`` by loader; see :class:`LoaderArguments`.

    ``trust_remote_code`` is always there: without it transformers would ask on the terminal.
    """
    # A checkpoint holds secrets masked; without its token the hub's client takes the one of this machine.
    given = {name: value for name, value in config.model_args.items() if value != MASK}
    known = {*_ACCESS, *_PLACE}
    # Of nothing transformers would make a question again.
    place = {"trust_remote_code": False} | {n: v for n, v in given.items() if n in known and v is not None}
    fields = {name: value for name, value in given.items() if name not in known and name not in _WEIGHTS}
    weights = {name: value for name, value in given.items() if name in _WEIGHTS}
    return LoaderArguments(place, {**place, **fields}, {**place, **fields, **weights})


def arguments_of_another(policy: PolicyConfig, own: dict[str, Any]) -> dict[str, Any]:
    """Return the ``model_args`` of a second model of the run: how the policy's is reached, and what is its own."""
    return {name: value for name, value in policy.model_args.items() if name in _ACCESS} | own


def check_model_args(config: PolicyConfig) -> None:
    """Refuse arguments that something else decides, or whose value is of the wrong kind.

    Raises:
        UserError: as said; it names the option that does it.
    """
    if config.tiny is not None and config.model_args.keys() - _ACCESS:
        raise UserError(
            "a tiny model is made on the spot: there is nothing that model_args could load",
            where=KEY,
            remedy="leave model_args out, or give model.policy.path",
        )
    for name, value in config.model_args.items():
        if name in _ELSEWHERE:
            raise UserError(f"{name} is decided elsewhere", where=f"{KEY}.{name}", remedy=_ELSEWHERE[name])
        kinds = (_ACCESS | _PLACE).get(name)
        if kinds and value is not None and not isinstance(value, kinds):
            words = {"str": "a text", "bool": "true or false", "dict": "a mapping"}
            names = " or ".join(words[kind.__name__] for kind in kinds)
            shown = MASK if name == "token" else repr(value)
            raise UserError(f"{name} is {shown}, not {names}", where=f"{KEY}.{name}", remedy=f"give {names}")


def refuse_unknown(names: Iterable[str], fields: Iterable[str]) -> None:
    """Refuse arguments that neither a loader nor the model's configuration knows.

    Args:
        names: what the loader of the configuration has left over.
        fields: fields of the configuration.
    """
    left = sorted(set(names) - {"trust_remote_code", "code_revision", *_PLACE, *_ACCESS, *_WEIGHTS})
    if left:
        near = nearest(left[0], [*_ACCESS, *_PLACE, *_WEIGHTS, *fields])
        raise UserError(
            f"{left[0]} is no argument of the loader and no field of the model's configuration",
            where=f"{KEY}.{left[0]}",
            remedy=f"did you mean {near}?" if near else "leave it out",
        )
