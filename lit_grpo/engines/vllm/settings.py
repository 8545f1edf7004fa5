"""What vLLM is told of the policy and of each request, the same in this process and on a server."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from lit_grpo.engines.base import EngineContext
from lit_grpo.engines.config import VLLMEngineConfig
from lit_grpo.engines.vllm.adapters import adapted_layers, adapter_rank
from lit_grpo.types import Sampling


def sampling_settings(sampling: Sampling, end_token_ids: Sequence[int], seed: int) -> dict[str, Any]:
    """Return the arguments of ``vllm.SamplingParams`` for one sample."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_new_tokens,
        "seed": seed,
        # All end tokens are named, and none is taken from the model folder: engines then end at the same ids.
        "ignore_eos": True,
        "stop_token_ids": [*end_token_ids, *sampling.stop_token_ids],
        # 0 further tokens: the log-probability of the sampled id alone.
        "logprobs": 0,
        "detokenize": False,
    }


def stop_settings(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of ``vllm.SamplingParams`` that end a sample by its text, for a server with a tokenizer."""
    if not sampling.stop:
        return {}
    # A server without a tokenizer takes them and samples on; what is behind the end is cut off here in any case.
    return {
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "detokenize": True,
    }


def engine_dtype(dtype: str, learner_dtype: str) -> str:
    """Return the number format of the engine's weights: ``dtype``, or what ``auto`` stands for.

    ``auto`` takes the learner's, except that on a GPU float32 becomes bfloat16, which vLLM's attention kernels need.
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if torch.cuda.is_available() else learner_dtype


def engine_options(context: EngineContext, config: VLLMEngineConfig) -> dict[str, Any]:
    """Return the arguments of :class:`lit_grpo.engines.vllm.engine.VLLMEngine` for a run, all plain values."""
    rank = None if config.adapters == "merged" else adapter_rank(context.policy_config.lora, config)
    return {
        "adapter_rank": rank,
        "adapted_layers": () if rank is None else adapted_layers(context),
        "end_token_ids": tuple(context.end_token_ids),
        "dtype": engine_dtype(config.dtype, context.policy_config.dtype),
        "max_model_len": config.max_model_len or context.max_model_len,
        "seed": context.seed,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_num_seqs": config.max_num_seqs,
        "load_format": "dummy",
        "enable_sleep_mode": bool(config.sleep) and torch.cuda.is_available(),
        "trust_remote_code": runs_own_code(context),
        **config.args,
    }


def model_config_of(context: EngineContext) -> Any:
    """Return a copy of the policy's transformers configuration that names its architecture."""
    model = context.policy.model
    model_config = copy.deepcopy(model.config)
    if not model_config.architectures:
        # FSDP2 puts a class of its own before the model's.
        names = [c.__name__ for c in type(model).__mro__ if not c.__name__.startswith("FSDP")]
        model_config.architectures = names[:1]
    return model_config


def runs_own_code(context: EngineContext) -> bool:
    """Tell whether the code that a model's folder brings may be run in the engine, as the learner may run it."""
    return bool(context.policy_config.model_args.get("trust_remote_code", False))
