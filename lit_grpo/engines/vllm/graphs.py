"""CUDA graphs of vLLM's decoding: one for a full batch too, whatever number of samples that is."""

from __future__ import annotations

from typing import Any

DECODING_GRAPHS: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Captured graphs without torch.compile: as fast for decoding, and a start of seconds instead of a minute."""
_LARGEST = 512
"""The largest batch for which vLLM captures a graph by itself."""
_STEP = 32
"""Distance of the sizes above that."""
_TOGETHER = 8
"""Part of a batch, one in so many, that waiting samples take together where a batch with prompts has no graph."""
_CHOSEN = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def with_full_batch(compilation: Any, max_num_seqs: int) -> Any:
    """Return vLLM's ``compilation_config`` with a graph for ``max_num_seqs`` samples.

    vLLM captures graphs for batches of 1, 2, 4, multiples of 8 to 256 and of 16 to 512, those above ``max_num_seqs``
    left out, and pads a batch to the next. A larger one runs without a graph, which takes several times as long where
    the processor binds: with ``max_num_seqs`` 171, as each of three processes has of 512, that is any batch from 169 on
    (a quarter of the tokens a second, seen on an H200), and with 1024 any from 513 on.

    Args:
        compilation: the setting so far. One that is no dictionary, that names sizes, or that wants no graphs is left
            as it is.
        max_num_seqs: samples of the largest batch.
    """
    own = {1, 2, 4, *range(8, 256, 8), *range(256, _LARGEST + 1, 16)}
    if (
        max_num_seqs in own
        or not isinstance(compilation, dict)
        or any(compilation.get(name) is not None for name in _CHOSEN)
        or compilation.get("cudagraph_mode") in ("NONE", 0)
    ):
        return compilation
    # Those above it are for batches that also hold prompts, where the mode has graphs for them.
    sizes = {size for size in own if size <= 2 * max_num_seqs} | set(range(_LARGEST + _STEP, max_num_seqs, _STEP))
    return {**compilation, "cudagraph_capture_sizes": sorted(sizes | {max_num_seqs})}


def admitted_together(config: Any) -> int:
    """Return how many places of a full batch are to be free before waiting samples take them.

    Where more samples are asked for than fit into a batch, in each step some end and others take their places. Without
    a graph for a batch in which some are read in, every step would then go without one: on an H200 512 samples of 0.5B
    took 18 ms a step, and 6 with a graph.

    Args:
        config: a ``vllm.config.VllmConfig``.
    """
    graphs = config.compilation_config.cudagraph_mode
    only_decoding = bool(graphs.decode_mode()) and not graphs.mixed_mode()
    return max(1, config.scheduler_config.max_num_seqs // _TOGETHER) if only_decoding else 1
