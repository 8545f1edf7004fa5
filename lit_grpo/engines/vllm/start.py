"""Start vLLM inside this process, and leave the process otherwise as it was."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lit_grpo.engines.base import EngineError
from lit_grpo.engines.vllm.graphs import DECODING_GRAPHS, with_full_batch
from lit_grpo.engines.vllm.installed import INSTALL, KEY, check_installed
from lit_grpo.errors import UserError
from lit_grpo.utils.spelling import nearest

OTHER_ENGINE = f"{KEY}.name: transformers samples from the policy itself"
# vLLM itself would take a share of all memory.
CPU_CACHE_BYTES = 2**30
"""Size of the key-value cache on a CPU where nothing else is set."""


def check_in_process() -> None:
    """Check that vLLM can run inside this process, without importing it.

    Raises:
        UserError: vLLM is not installed, or set up to run in another process.
    """
    check_installed("the vllm engine needs vLLM, which is not installed")
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise UserError(
            "VLLM_ENABLE_V1_MULTIPROCESSING is set, but weights can only be handed to an engine in this process",
            where="environment",
            remedy="unset VLLM_ENABLE_V1_MULTIPROCESSING",
        )


def checked_path(model_path: str | Path) -> Path:
    """Return the path of a model folder, or of a model on the hub as it is.

    Raises:
        UserError: no model is there.
    """
    path = Path(model_path).expanduser()
    is_hub_name = isinstance(model_path, str) and model_path.count("/") == 1 and not model_path.startswith((".", "/"))
    if (path / "config.json").is_file() or (is_hub_name and not path.parent.is_dir()):
        return path
    raise UserError(f"{path} is no model folder: it holds no config.json", where="model.policy.path")


def import_ahead() -> None:
    """Import what :func:`start` needs, in a process that is to hold an engine alone; it takes nothing on a card.

    Two thirds of a start on a CPU are these imports. ``import vllm`` alone is a third of them: its classes are loaded
    when they are asked for, and those that run a model when there is one. What is wrong with them is said by the start.
    """
    _settle_environment()
    with contextlib.suppress(Exception):
        from vllm import LLM, EngineArgs  # noqa: F401
        from vllm.platforms import current_platform

        import_module("vllm.v1.worker.cpu_worker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker")


def _settle_environment() -> None:
    for name, value in {
        # In this process, so that weights are passed by reference.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(name, value)


def start(defaults: dict[str, Any], own: dict[str, Any]) -> Any:
    """Import vLLM and start it with ``defaults`` and the user's ``own`` arguments, which win.

    Raises:
        UserError: an argument is unknown, or vLLM refuses a value.
        EngineError: vLLM does not start for another reason.
    """
    _settle_environment()
    try:
        from vllm import LLM, EngineArgs
        from vllm.platforms import current_platform
    except Exception as error:
        raise UserError(f"vLLM is installed but cannot be imported: {error}", remedy=INSTALL) from error
    known = {item.name for item in fields(EngineArgs)}
    for name in own:
        if name not in known:
            near = nearest(name, known)
            raise UserError(
                f"vLLM has no engine argument {name}",
                where=f"{KEY}.args.{name}",
                remedy=f"did you mean {near}?" if near else None,
            )
    args = {**defaults, **own}
    if current_platform.is_cpu():
        # Compiling takes longer than it saves in short runs; blocks of 32 instead of 128 let short prompts be shared.
        # A prompt that is split over two steps ends in "CPU Generator does not use offset" where requests have seeds.
        args = {"enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False, **args}
        # vLLM lets the environment variable win over the argument.
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            args.setdefault("kv_cache_memory_bytes", CPU_CACHE_BYTES)
    elif not args.get("enforce_eager"):
        graphs = with_full_batch(args.get("compilation_config", DECODING_GRAPHS), args["max_num_seqs"])
        args = {**args, "compilation_config": graphs}
    try:
        return LLM(**args)
    # Among them what pydantic finds wrong with a value: its validation errors are ValueErrors.
    except (ValueError, TypeError, OSError) as error:
        if current_platform.is_cpu() and "mamba cache mode" in str(error):
            raise UserError(
                "vLLM on CPU does not serve a model whose layers hold a state (state space, convolution, linear "
                "attention): it would have to split prompts, which it cannot where every sample has its own seed",
                where=KEY,
                remedy=OTHER_ENGINE,
            ) from error
        raise UserError(f"vLLM does not start with these settings: {error}", where=KEY) from error
    except Exception as error:
        raise EngineError(f"vLLM does not start: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def process_left_alone(offline: bool) -> Iterator[None]:
    """Put back what starting vLLM changes in the process.

    It seeds the global random number generators, replaces ``torch.set_num_threads`` by a no-op (CPU), and freezes the
    garbage collector, after which a model made earlier would never be collected.
    """
    import numpy as np

    python, numpy, threads = random.getstate(), np.random.get_state(), torch.set_num_threads
    hub = os.environ.get("HF_HUB_OFFLINE")
    gc.collect()
    # vLLM collects five times while it starts: 2 s less if it need not walk what is there already.
    gc.freeze()
    # A folder is complete: vLLM would wait for a hub that cannot be reached.
    if offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = threads
        gc.unfreeze()
        if offline and hub is None:
            del os.environ["HF_HUB_OFFLINE"]


@contextlib.contextmanager
def place_among_processes() -> Iterator[None]:
    """Tell vLLM this process's rank and device by the variables that ``torchrun`` sets, and put them back.

    Lightning's own launcher sets no ``RANK``, and with ``CUDA_VISIBLE_DEVICES`` a device has another number in this
    process than on the machine. Does nothing where one process runs alone.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield
        return
    rank = torch.distributed.get_rank()
    device = torch.cuda.current_device() if torch.cuda.is_available() else int(os.environ.get("LOCAL_RANK", rank))
    launcher = {"RANK": str(rank), "LOCAL_RANK": str(device), "WORLD_SIZE": str(torch.distributed.get_world_size())}
    before = {name: os.environ.get(name) for name in launcher}
    os.environ.update(launcher)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def forget_groups() -> None:
    """Make vLLM forget the process groups of closed engines, on every rank alike.

    They are made for the first model of a process: after a dense one, a mixture of experts would find no group for its
    experts, and not start.
    """
    loaded = sys.modules.get("vllm.distributed.parallel_state")
    if loaded is not None and loaded.model_parallel_is_initialized():
        loaded.destroy_model_parallel()


def forget_graph_pool() -> None:
    """Make vLLM forget the memory pool of a closed engine's CUDA graphs.

    CUDA has freed the pool by then, and vLLM would hand it to the next engine of the process.
    """
    from vllm.platforms import current_platform

    type(current_platform)._global_graph_pool = None
