"""What each of several engine processes is started with: its part of what all of them may use together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lit_grpo.engines.config import EngineConfig, VLLMEngineConfig, VLLMServerEngineConfig
from lit_grpo.engines.vllm.arguments import check_alone
from lit_grpo.engines.vllm.installed import KEY
from lit_grpo.engines.vllm.start import CPU_CACHE_BYTES
from lit_grpo.engines.vllm_processes.cards import environment_on_card
from lit_grpo.engines.vllm_server.cards import check_apart, place_on_machine
from lit_grpo.engines.vllm_server.launch import name_of_card
from lit_grpo.engines.vllm_server.process import check_servers_of_ranks
from lit_grpo.errors import UserError

_CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def per_process(options: Mapping[str, Any], processes: int) -> dict[str, Any]:
    """Return the options of one engine: its part of the memory, and of the samples that are drawn at once.

    Raises:
        UserError: the options spread an engine over several cards, a size of the cache is no whole number, or there are
            more processes than samples that may be drawn at once.
    """
    check_alone(options)
    part = dict(options)
    at_once = part.get("max_num_seqs", 256)
    if at_once < processes:
        raise UserError(
            f"{processes} processes are to sample {at_once} completions at once, all of them together",
            where=f"{KEY}.max_num_seqs",
            remedy=f"{KEY}.max_num_seqs: {processes} or more, or {KEY}.processes: {at_once} or fewer",
        )
    part["max_num_seqs"] = -(-at_once // processes)
    part["gpu_memory_utilization"] = part.get("gpu_memory_utilization", 0.4) / processes
    if part.get("kv_cache_memory_bytes") is not None:
        part["kv_cache_memory_bytes"] //= processes
    if not torch.cuda.is_available():
        # vLLM lets the variable win over the argument; the processes do not have it, see `environment`.
        whole = _gibibytes(os.environ[_CPU_CACHE]) * 2**30 if os.environ.get(_CPU_CACHE) else None
        part["kv_cache_memory_bytes"] = (
            whole // processes if whole else part.get("kv_cache_memory_bytes") or CPU_CACHE_BYTES // processes
        )
    return part


def _gibibytes(text: str) -> int:
    """Return the number of gibibytes that an environment variable names.

    Raises:
        UserError: it names none that vLLM would take.
    """
    if not text.isdecimal():
        raise UserError(
            f"{_CPU_CACHE} is {text!r}, and vLLM takes a whole number of gibibytes",
            where=f"environment variable {_CPU_CACHE}",
            remedy=f"{_CPU_CACHE}=1, or unset it and set {KEY}.args.kv_cache_memory_bytes",
        )
    return int(text)


def check_cards(config: VLLMEngineConfig) -> None:
    """Check the cards of engines that have cards of their own, as far as one process can.

    Raises:
        UserError: there are no such cards, one is named twice, or the engines are to sleep on them.
    """
    if config.cards is None:
        return
    where, there = f"{KEY}.cards", torch.cuda.device_count()
    if missing := [number for number in config.cards if number >= there]:
        raise UserError(
            f"there is no card {missing[0]}: this process sees {there}",
            where=where,
            remedy="count from 0, among the cards that CUDA_VISIBLE_DEVICES leaves; or leave it out, for engines on "
            "the ranks' own cards",
        )
    if len(set(config.cards)) < len(config.cards) or not config.cards:
        raise UserError(
            f"{config.cards} names a card twice, or none", where=where, remedy="name one card for each rank"
        )
    if config.sleep:
        raise UserError(
            "engines on cards of their own have nobody to give their memory to while they sleep",
            where=f"{KEY}.sleep",
            remedy=f"leave it out, or {where}",
        )


def check_ranks(config: EngineConfig, devices: Sequence[torch.device], processes: int) -> None:
    """Check the engines of a run against its ranks, as soon as these are known and before a model is loaded.

    Args:
        config: which engine, and its settings.
        devices: of the ranks on this machine, in their order.
        processes: number of ranks on all machines.

    Raises:
        UserError: the ranks' engines or servers cannot each have cards, an address or a port of their own.
    """
    if config.custom_engine is not None:
        return
    if config.name == "vllm" and config.cards is not None:
        _check_one_for_each(config.cards, len(devices))
        check_apart(config.cards, devices, f"{KEY}.cards")
    if config.name == "vllm_server":
        check_servers_of_ranks(VLLMServerEngineConfig(args=config.args, server=config.server), devices, processes)


def _check_one_for_each(cards: Sequence[int], ranks: int) -> None:
    if ranks != len(cards):
        raise UserError(
            f"{ranks} ranks train on this machine, and {len(cards)} cards are named for their engines",
            where=f"{KEY}.cards",
            remedy="name one for each rank: trainer.devices: 4 with cards: [4, 5, 6, 7]",
        )


def card_of_rank(cards: Sequence[int] | None) -> int | None:
    """Return the card that this rank's engines run on, None for its own. All ranks must call it.

    Raises:
        UserError: this machine has not as many ranks as cards are named.
    """
    if cards is None:
        return None
    place, here = place_on_machine()
    _check_one_for_each(cards, here)
    return cards[place]


def environment(processes: int, number: int | None = None, card: int | None = None) -> dict[str, str | None]:
    """Return what the processes' environment has besides this one's; None: what it has not.

    Args:
        processes: number of processes, which share this machine's cores where it has no card.
        number: of this process's card, as it counts them; None: its present one.
        card: number of the card that they run on; None: this process's own.
    """
    if torch.cuda.is_available():
        own = name_of_card(torch.cuda.current_device() if number is None else number)
        return environment_on_card(own, None if card is None else name_of_card(card))
    threads = max(1, torch.get_num_threads() // processes)
    # vLLM binds its threads to the first cores that it finds, which would be the same ones in all processes.
    return {"OMP_NUM_THREADS": str(threads), _BINDING: os.environ.get(_BINDING, "nobind"), _CPU_CACHE: None}
