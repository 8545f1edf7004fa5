"""Room for the next token of a running sample in vLLM's key-value cache, found without walking through its layers."""

from __future__ import annotations

import inspect
from typing import Any


class SlotShortcut:
    """Answers vLLM's question for a slot at once where the last block of a sample has room.

    In every step vLLM's scheduler asks the cache's manager for slots, and to file full blocks for their prefix, one
    running sample after another. A block holds 16 tokens, so that fifteen times of sixteen nothing comes of it, after a
    dozen calls through its layers: a sixth of the time of sampling from a small model, which is bound by the speed of
    Python. Both questions are answered here where the answer is "nothing to do", by the numbers that vLLM's own code
    compares in the end; all else is left to vLLM.

    It is for models with one kind of cache, of full attention, which gives no block back before a sample has ended.
    Elsewhere, and where a version of vLLM is built otherwise, nothing is changed.

    Args:
        engine: a ``vllm.v1.engine.llm_engine.LLMEngine`` whose core is in this process.
    """

    def __init__(self, engine: Any) -> None:
        self._manager: Any = None
        try:
            scheduler = engine.engine_core.engine_core.scheduler
            manager = scheduler.kv_cache_manager
            kinds = manager.coordinator.single_type_managers
            self._empty, self._allocate, self._cache = (
                manager.empty_kv_cache_blocks,
                manager.allocate_slots,
                manager.cache_blocks,
            )
            plain = [type(kind).__name__ for kind in kinds] == ["FullAttentionManager"]
            # A connector files blocks too, drafts take slots that may be given back, and where prefixes are known by
            # parts of a block, more is filed than full ones.
            alone = scheduler.connector is None and scheduler.num_lookahead_tokens == 0
            alone = alone and manager.block_pool.hash_block_size == kinds[0].block_size
            self._blocks, self._filed, self._size = (
                kinds[0].req_to_blocks,
                kinds[0].num_cached_block,
                int(kinds[0].block_size),
            )
            asked = list(inspect.signature(self._allocate).parameters)
            asks = asked[:2] == ["request", "num_new_tokens"] and "num_lookahead_tokens" in asked
            files = len(inspect.signature(self._cache).parameters) == 2
        except (AttributeError, IndexError, TypeError, ValueError):
            return
        if plain and alone and asks and files:
            self._manager = manager
            manager.allocate_slots, manager.cache_blocks = self.allocate_slots, self.cache_blocks

    # Both run once for each token of each sample, so they are kept short.

    def allocate_slots(self, request: Any, num_new_tokens: int, *, num_lookahead_tokens: int = 0, **more: Any) -> Any:
        """Return no new blocks where none is needed and none became full; else what vLLM's own method returns."""
        if num_new_tokens == 1 and not num_lookahead_tokens and not more:
            filed = self._filed.get(request.request_id)
            # None: it has no blocks, since it has not begun or was taken off.
            if filed is not None:
                needed = request.num_computed_tokens + 1
                if needed <= len(self._blocks[request.request_id]) * self._size and needed // self._size <= filed:
                    return self._empty
        return self._allocate(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **more)

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """File the blocks of a sample that became full, if one did."""
        if num_computed_tokens // self._size > self._filed.get(request.request_id, 0):
            self._cache(request, num_computed_tokens)

    def close(self) -> None:
        """Give vLLM its own methods back, and hold no reference to the engine any longer."""
        if self._manager is not None:
            del self._manager.allocate_slots, self._manager.cache_blocks
        self._manager = self._empty = self._allocate = self._cache = self._blocks = self._filed = None
