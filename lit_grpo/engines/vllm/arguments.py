"""Which further arguments of vLLM (``data.engine.args``) a run takes, and which it decides itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lit_grpo.engines.vllm.installed import KEY
from lit_grpo.errors import UserError

SPREAD = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
"""Arguments that spread one engine over as many cards as their product."""
_LORA = ("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules")
_PLACES = {
    "model": "model.policy.path",
    "dtype": f"{KEY}.dtype",
    "max_model_len": f"{KEY}.max_model_len",
    "max_num_seqs": f"{KEY}.max_num_seqs",
    "gpu_memory_utilization": f"{KEY}.gpu_memory_utilization",
    "trust_remote_code": "model.policy.model_args: {trust_remote_code: true}",
    **dict.fromkeys(("revision", "code_revision", "hf_overrides"), "model.policy.model_args"),
}
_OWN_PLACES = {
    "enable_sleep_mode": f"{KEY}.sleep",
    "device_ids": f"{KEY}.cards",
    **dict.fromkeys(_LORA, f"{KEY}.adapters: hot, with model.policy.lora"),
}
_SERVER_PLACES = {"port": f"{KEY}.server.port", "device_ids": f"{KEY}.server.cards"}
_OF_POLICY = "the engine has the policy's model, in the form that the run gives it"
_OF_SAMPLING = "tokens are drawn as data.sampling says, and the learner computes with the same"
_SPECULATIVE = "log-probabilities of tokens that a draft proposed were not those of the policy (nan on a CPU)"
_DECIDED = {
    "load_format": "weights come from the policy, with each sync",
    "logprobs_mode": "training needs the log-probabilities after temperature, top_p and top_k",
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logits_processors", "watermark_config"), _OF_SAMPLING
    ),
    # vLLM's reset of the prefix cache leaves what lies behind it, under names without a version of the weights.
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"),
        "keys and values of older weights would be read again after a sync",
    ),
    **dict.fromkeys(("model_weights", "hf_config_path", "config_format", "runner", "convert"), _OF_POLICY),
    **dict.fromkeys(
        ("tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init"),
        "prompts come as ids, by the policy's tokenizer",
    ),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _SPECULATIVE),
}
_OWN_DECIDED = {
    "distributed_executor_backend": "each engine runs in one process, which the run starts",
    # Arguments of the engine's classes here, which vLLM does not have.
    **dict.fromkeys(
        (
            *("model_path", "end_token_ids", "policy_tokenizer", "policy_model", "adapter_rank", "adapted_layers"),
            *("processes", "current_weights", "group", "weight_files", "card", "progress_seconds"),
        ),
        "vLLM has no such argument, and the run says it to the engine",
    ),
}
_SERVER_DECIDED = {
    "host": "the run alone talks to the server, from this machine",
    "worker_extension_cls": "by it weights come into the server's workers",
    "enable_scale_out": "ids go in and out by it",
    "disable_log_stats": "by the count of tokens the run sees that the server does not hang",
    "config": "its options are to be seen here, one by one",
    **dict.fromkeys(_LORA, "the weights come with adapters merged into them"),
}
_WHOLE = ("watermark",)
"""Options of ``vllm serve`` that each run may choose, and that another begins with which it may not."""


def check_arguments(args: Mapping[str, Any]) -> None:
    """Check the further arguments of an engine that each rank of a run has for itself.

    Raises:
        UserError: one is the run's own to decide, has a place of its own, or spreads an engine over several cards.
    """
    _check_names(args, _PLACES | _OWN_PLACES, _DECIDED | _OWN_DECIDED)
    check_alone(args)
    if args.get("enable_chunked_prefill") and not torch.cuda.is_available():
        raise UserError(
            "vLLM's engine on a CPU would die of the first long prompt that it splits: it cannot do so with seeds",
            where=f"{KEY}.args.enable_chunked_prefill",
            remedy="leave it out",
        )


def check_server_arguments(args: Mapping[str, Any]) -> None:
    """Check the further arguments of ``vllm serve``, written with underscores or as its options are.

    Raises:
        UserError: one is the run's own to decide, or has a place of its own.
    """
    _check_names(args, _PLACES | _SERVER_PLACES, _DECIDED | _SERVER_DECIDED, options=True)


def check_alone(options: Mapping[str, Any]) -> None:
    """Check that an engine with these options stays on one card, and can have a part of its cache.

    Raises:
        UserError: it spreads over several, or the size of its cache is no number of bytes.
    """
    # In one process vLLM spreads an engine over the ranks that call it alike, and the ranks of a run each have their
    # own prompts: they would wait for each other for ever.
    for name in SPREAD:
        if options.get(name) not in (None, 1):
            raise UserError(
                f"each rank samples its own prompts with an engine on its own card, and args.{name}: {options[name]} "
                "spreads one engine over several",
                where=f"{KEY}.args.{name}",
                remedy=f"leave it out; a model that fits no single card is sampled by {KEY}.name: vllm_server, which "
                f"takes args.{name}, with its cards in {KEY}.server.cards",
            )
    size = options.get("kv_cache_memory_bytes")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise UserError(
            f"the key-value cache is to have {size!r} bytes, and must have a whole number of them from 1 on",
            where=f"{KEY}.args.kv_cache_memory_bytes",
            remedy=f"kv_cache_memory_bytes: {2**30}, for 1 GiB",
        )


def spread(args: Mapping[str, Any]) -> dict[str, int]:
    """Return over how many ranks of each kind a server spreads by its arguments, by the names of :data:`SPREAD`.

    Raises:
        UserError: one of them is no whole number from 1 on.
    """
    given = {_underscored(name): value for name, value in args.items()}
    ranks = {name: 1 if given.get(name) is None else given[name] for name in SPREAD}
    for name, value in ranks.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(
                f"{name} is {value!r}, must be a whole number from 1 on",
                where=f"{KEY}.args.{name}",
                remedy=f"{name}: 2",
            )
    return ranks


def _underscored(name: str) -> str:
    return name.replace("-", "_")


def _check_names(
    args: Mapping[str, Any], places: Mapping[str, str], decided: Mapping[str, str], *, options: bool = False
) -> None:
    """Refuse what has a place of its own or is decided.

    Args:
        args: what was given.
        places: where each such argument belongs.
        decided: why each such argument is not to be chosen.
        options: names are those of a command line, which takes the beginning of a name and a part of a value
            (``speculative_config.method``) as well.
    """
    for given in args:
        name, where = _underscored(given), f"{KEY}.args.{given}"
        if options:
            name = name.partition(".")[0]
            refused = (*places, *decided)
            if name not in (*refused, *_WHOLE):
                name = next((one for one in refused if one.startswith(name)), name)
        if name in places:
            raise UserError(f"{name} has a place of its own", where=where, remedy=f"say it there: {places[name]}")
        if name in decided:
            raise UserError(f"{name} is not to be chosen: {decided[name]}", where=where, remedy="leave it out")
