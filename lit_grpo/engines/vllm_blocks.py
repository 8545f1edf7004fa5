"""A short cut through vLLM's cache bookkeeping for tokens that need none.

For each token of each sample vLLM asks its cache manager for room and, under asynchronous scheduling once more,
whether a block has become full and can be shared. With blocks of 16 tokens the answers are, in 15 of 16 steps, that
there is room in the last block and that none has. Coming to them takes vLLM a dozen calls through layers that are there
for sliding windows, recurrent states, remote caches and drafts: a third of the scheduler's time, and small models are
sampled from only as fast as the scheduler runs.
"""

from __future__ import annotations

import warnings
from typing import Any

_NEXT_TOKEN = {"num_lookahead_tokens": 0}
"""How the scheduler asks for a running sample's next token. Prompts come with more, drafts with another number."""


def answer_at_once(scheduler: Any) -> bool:
    """Let the cache manager of vLLM's ``scheduler`` give these answers without asking around.

    Whenever there is something to do (a new block, a full one, a prompt, a draft) vLLM's own methods do it, so what is
    allocated, shared and sampled stays the same.

    Returns:
        False: nothing was changed. The cache is not a single one of full attention, or, with a warning, this version of
        vLLM is built otherwise.
    """
    try:
        return _answer_at_once(scheduler)
    except (ImportError, AttributeError) as error:
        warnings.warn(f"this version of vLLM is built otherwise ({error}): sampling may be slower", stacklevel=2)
        return False


def _answer_at_once(scheduler: Any) -> bool:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinatorNoPrefixCache, UnitaryKVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    manager = scheduler.kv_cache_manager
    coordinator = manager.coordinator
    kinds = coordinator.single_type_managers
    if type(coordinator) not in (UnitaryKVCacheCoordinator, KVCacheCoordinatorNoPrefixCache):
        return False
    if len(kinds) != 1 or type(kinds[0]) is not FullAttentionManager or scheduler.connector is not None:
        return False
    size: int = kinds[0].block_size
    if kinds[0].block_pool.hash_block_size != size or getattr(coordinator, "num_reprefillable_tokens", 0) != 0:
        return False
    blocks, shared, nothing_new = kinds[0].req_to_blocks, kinds[0].num_cached_block, manager.empty_kv_cache_blocks
    sharing = bool(manager.enable_caching)
    allocate, share = manager.allocate_slots, manager.cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        key = request.request_id
        if num_new_tokens == 1 and options == _NEXT_TOKEN and not args and key in blocks:
            tokens = request.num_computed_tokens + 1
            if tokens <= len(blocks[key]) * size:
                # The newest tokens may not have come from the device yet: their block is not full.
                full = min(tokens, request.num_tokens) // size
                if not sharing or full <= shared.get(key, 0):
                    return nothing_new
        return allocate(request, num_new_tokens, *args, **options)

    def cache_blocks(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens // size > shared.get(request.request_id, 0):
            share(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate_slots, cache_blocks
    return True
