"""What each of several engine processes is started with: its part of what all of them may use together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from lit_grpo.engines.vllm.start import CPU_CACHE_BYTES, KEY
from lit_grpo.errors import UserError

_CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_SPREAD = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def check_arguments(args: Mapping[str, Any]) -> None:
    """Check the further arguments of an engine that each rank of a run has for itself.

    Raises:
        UserError: one spreads an engine over several cards.
    """
    # In one process vLLM spreads an engine over the ranks that call it alike, and the ranks of a run each have their
    # own prompts: they would wait for each other for ever.
    for name in _SPREAD:
        if args.get(name) not in (None, 1):
            raise UserError(
                f"each rank samples its own prompts with an engine on its own card, and args.{name}: {args[name]} "
                "spreads one engine over several",
                where=f"{KEY}.args.{name}",
                remedy=f"leave it out; a model that fits no single card is sampled by {KEY}.name: vllm_server, which "
                f"takes args.{name}, with its cards in {KEY}.server.env.CUDA_VISIBLE_DEVICES",
            )


def per_process(options: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Return the options of one engine: its part of the memory, and of the samples that are drawn at once.

    Raises:
        UserError: the options spread an engine over several cards.
    """
    check_arguments(options)
    part = dict(options)
    part["max_num_seqs"] = -(-part.get("max_num_seqs", 256) // processes)
    part["gpu_memory_utilization"] = part.get("gpu_memory_utilization", 0.4) / processes
    if part.get("kv_cache_memory_bytes") is not None:
        part["kv_cache_memory_bytes"] //= processes
    if not torch.cuda.is_available():
        # vLLM lets the variable win over the argument; the processes do not have it, see `environment`.
        whole = int(os.environ[_CPU_CACHE]) * 2**30 if os.environ.get(_CPU_CACHE) else None
        part["kv_cache_memory_bytes"] = (
            whole // processes if whole else part.get("kv_cache_memory_bytes") or CPU_CACHE_BYTES // processes
        )
    return part


def environment(processes: int) -> dict[str, str | None]:
    """Return what the processes' environment has besides this one's; None: what it has not."""
    if torch.cuda.is_available():
        number = torch.cuda.current_device()
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        card = visible[number].strip() if visible else str(number)
        # What these processes do on a CPU is Python; threads of torch would only wait for each other.
        return {"CUDA_VISIBLE_DEVICES": card, "OMP_NUM_THREADS": "1"}
    threads = max(1, torch.get_num_threads() // processes)
    # vLLM binds its threads to the first cores that it finds, which would be the same ones in all processes.
    return {"OMP_NUM_THREADS": str(threads), _BINDING: os.environ.get(_BINDING, "nobind"), _CPU_CACHE: None}
