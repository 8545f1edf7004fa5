"""The shortcut to a slot of vLLM's cache: answers only where vLLM's own answer is "nothing to do". Without vLLM."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from lit_grpo.engines.vllm.slots import SlotShortcut

SIZE = 4
EMPTY = object()


class FullAttentionManager:
    """As vLLM's of one kind of layers: the blocks of each request, and how many of them are filed."""

    def __init__(self) -> None:
        self.req_to_blocks: defaultdict[str, list[int]] = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}
        self.block_size = SIZE


class SlidingWindowManager(FullAttentionManager):
    """Gives blocks back while a sample runs."""


class Manager:
    """As vLLM's manager of the cache; notes what it is asked."""

    empty_kv_cache_blocks = EMPTY

    def __init__(self, *kinds: Any, hash_block_size: int = SIZE) -> None:
        self.coordinator = SimpleNamespace(single_type_managers=kinds)
        self.block_pool = SimpleNamespace(hash_block_size=hash_block_size)
        self.asked: list[Any] = []

    def allocate_slots(self, request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **more: Any) -> Any:
        self.asked.append((request.request_id, num_new_tokens, num_lookahead_tokens, more))
        return "vLLM's own"

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        self.asked.append((request.request_id, num_computed_tokens))


class OtherArguments(Manager):
    def allocate_slots(self, request: Any, tokens: int, **more: Any) -> Any:  # type: ignore[override]
        pytest.fail("only its form is looked at")


class NoDrafts(Manager):
    def allocate_slots(self, request: Any, num_new_tokens: int) -> Any:  # type: ignore[override]
        pytest.fail("only its form is looked at")


class OtherCache(Manager):
    def cache_blocks(self, request: Any, num_computed_tokens: int, more: int = 0) -> None:
        pytest.fail("only its form is looked at")


def engine(manager: Any, **scheduler: Any) -> Any:
    made = SimpleNamespace(**({"kv_cache_manager": manager, "connector": None, "num_lookahead_tokens": 0} | scheduler))
    return SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(scheduler=made)))


def installed(manager: Manager) -> set[str]:
    """Return which of vLLM's methods the shortcut stands before."""
    return {"allocate_slots", "cache_blocks"} & vars(manager).keys()


def running(computed: int, blocks: int, filed: int | None) -> tuple[Manager, Any]:
    """Return vLLM's manager with the shortcut in it, and a sample with so many tokens, blocks and filed ones."""
    kind = FullAttentionManager()
    kind.req_to_blocks["a"] = list(range(blocks))
    if filed is not None:
        kind.num_cached_block["a"] = filed
    manager = Manager(kind)
    SlotShortcut(engine(manager))
    assert installed(manager)
    return manager, SimpleNamespace(request_id="a", num_computed_tokens=computed)


@pytest.mark.parametrize(
    ("computed", "blocks", "filed", "at_once"),
    [
        (5, 2, 1, True),
        # The last place of a block: it becomes full, and is to be filed.
        (7, 2, 1, False),
        (7, 2, 2, True),
        # The first place behind the last block.
        (8, 2, 2, False),
        (6, 2, 1, True),
        # A block that became full before is still not filed.
        (5, 2, 0, False),
        # Not begun, or taken off.
        (5, 2, None, False),
    ],
)
def test_only_what_needs_no_block_and_fills_none_is_answered_at_once(
    computed: int, blocks: int, filed: int | None, at_once: bool
) -> None:
    manager, request = running(computed, blocks, filed)
    found = manager.allocate_slots(request, 1)
    assert found is EMPTY if at_once else found == "vLLM's own"
    assert manager.asked == ([] if at_once else [("a", 1, 0, {})])


def test_whatever_else_is_asked_for_goes_to_vllm_as_it_is() -> None:
    manager, request = running(5, 2, 1)
    assert manager.allocate_slots(request, 1, num_lookahead_tokens=0) is EMPTY
    others: list[tuple[int, int, dict[str, Any]]] = [
        (2, 0, {}),
        (1, 1, {}),
        (1, 0, {"num_new_computed_tokens": 0}),
        (1, 0, {"delay_cache_blocks": True}),
    ]
    for tokens, ahead, more in others:
        assert manager.allocate_slots(request, tokens, num_lookahead_tokens=ahead, **more) == "vLLM's own"
    assert manager.asked == [("a", *other) for other in others]


@pytest.mark.parametrize(("computed", "filed", "files"), [(7, 1, False), (8, 1, True), (8, 2, False), (8, None, True)])
def test_blocks_are_filed_when_one_became_full(computed: int, filed: int | None, files: bool) -> None:
    manager, request = running(computed, 2, filed)
    manager.cache_blocks(request, computed)
    assert manager.asked == ([("a", computed)] if files else [])


@pytest.mark.parametrize(
    "other",
    [
        engine(Manager(SlidingWindowManager())),
        engine(Manager(FullAttentionManager(), FullAttentionManager())),
        engine(Manager()),
        engine(Manager(FullAttentionManager()), connector=object()),
        engine(Manager(FullAttentionManager()), num_lookahead_tokens=2),
        engine(Manager(FullAttentionManager(), hash_block_size=2)),
        engine(OtherArguments(FullAttentionManager())),
        engine(NoDrafts(FullAttentionManager())),
        engine(OtherCache(FullAttentionManager())),
        SimpleNamespace(engine_core=object()),
    ],
)
def test_where_vllm_is_built_otherwise_nothing_is_changed(other: Any) -> None:
    made = SlotShortcut(other)
    core = getattr(other.engine_core, "engine_core", None)
    assert core is None or not installed(core.scheduler.kv_cache_manager)
    made.close()


def test_a_closed_shortcut_leaves_vllm_as_it_was_and_holds_nothing_of_it() -> None:
    manager = Manager(FullAttentionManager())
    made = SlotShortcut(engine(manager))
    assert installed(manager)
    made.close()
    made.close()
    assert not installed(manager)
    assert not [value for value in vars(made).values() if value is not None and not isinstance(value, int)]
