"""Forgetting what vLLM's cache holds of old weights, without a walk over all blocks of a large card."""

from __future__ import annotations

import functools
import hashlib
import inspect
from typing import Any

KNOWN_POOLS = {"1d40517a": "0.26.0", "a979957e": "0.32.0"}
"""Digests of the code of ``BlockPool`` that is counted on, and a version of vLLM that has it.

See :func:`pool_digest`.
"""


def reset_prefix_cache(llm: Any) -> bool:
    """Have vLLM forget all prefixes, and return whether it could: not while a sample holds a block.

    vLLM takes the name off every block that it has, a hundred thousand or more, of which a rollout names some
    thousands. Where its code is what was read, it is shown those alone, by its own list of them.

    Args:
        llm: a ``vllm.LLM`` whose core is in this process.
    """
    pool = _known_pool(llm)
    if pool is None:
        return bool(llm.reset_prefix_cache())
    blocks = pool.blocks
    # Several blocks may hold the same prefix, each its own copy.
    named = pool.cached_block_hash_to_block._cache.values()
    pool.blocks = [b for held in named for b in (held.values() if isinstance(held, dict) else (held,))]
    try:
        return bool(llm.reset_prefix_cache())
    finally:
        pool.blocks = blocks


def _known_pool(llm: Any) -> Any:
    """Return vLLM's pool of blocks, or None where it is not what was read."""
    try:
        from vllm.v1.core.block_pool import BlockPool

        pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        # Who watches them is told of blocks by number.
        if type(pool) is not BlockPool or getattr(pool, "_reuse_watchers", None):
            return None
        return pool if pool_digest() in KNOWN_POOLS else None
    except (AttributeError, ImportError, KeyError, OSError, TypeError):
        return None


@functools.cache
def pool_digest() -> str:
    """Return eight hexadecimal digits of the code that names blocks, and that takes the names off.

    Raises:
        KeyError: vLLM's pool has no such method.
        OSError: the code is not there.
    """
    from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool

    names = ("cache_full_blocks", "_insert_block_hash", "_remove_cached_block_hashes", "move_block_hashes",
             "reset_prefix_cache")  # fmt: skip
    parts = [BlockHashToBlockMap, *(vars(BlockPool)[name] for name in names)]
    return hashlib.sha256("".join(map(inspect.getsource, parts)).encode()).hexdigest()[:8]
