"""Cards of the vLLM servers that a run starts: which ones each rank's server has, and what cannot be had."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lit_grpo.engines.vllm.arguments import spread
from lit_grpo.engines.vllm.installed import KEY
from lit_grpo.engines.vllm_server.launch import name_of_card
from lit_grpo.errors import UserError

if TYPE_CHECKING:
    from lit_grpo.engines.config import VLLMServerEngineConfig

WHERE = f"{KEY}.server.cards"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_EXAMPLE = "trainer.devices: 2 with server.cards: [[2], [3]], or [[4, 5], [6, 7]] with args.tensor_parallel_size: 2"


def environment_of_cards(cards: Sequence[int]) -> dict[str, str]:
    """Return what the environment of a server on these cards has; numbers are those that this process counts."""
    return {VISIBLE: ",".join(map(name_of_card, cards))}


def place_on_machine() -> tuple[int, int]:
    """Return this rank's place among the ranks of its machine, from 0, and their number. All ranks must call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    # No launcher tells how many ranks a machine has in a way that all others share.
    rank, own = torch.distributed.get_rank(), socket.gethostname()
    names = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(names, own)
    here = [number for number, name in enumerate(names) if name == names[rank]]
    return here.index(rank), len(here)


def check_server_cards(config: VLLMServerEngineConfig) -> None:
    """Check the cards of servers that are started here, as far as that can be done without knowing the ranks.

    Raises:
        UserError: there are no such cards, one is named twice, or a server gets more or fewer than its arguments need.
    """
    cards = config.server.cards
    if cards is None:
        return
    if VISIBLE in config.server.env:
        raise UserError(
            f"server.cards names the servers' cards, and so does {VISIBLE} in server.env",
            where=WHERE,
            remedy=f"leave one of them out; server.cards counts the cards that this run sees, {VISIBLE} the machine's",
        )
    # From Python anything may come.
    if not all(isinstance(part, (list, tuple)) for part in cards):
        raise UserError(f"{cards} is no list of lists of cards", where=WHERE, remedy=_EXAMPLE)
    named, there = [number for part in cards for number in part], torch.cuda.device_count()
    if missing := [number for number in named if number >= there]:
        raise UserError(
            f"there is no card {missing[0]}: this process sees {there}",
            where=WHERE,
            remedy=f"count from 0, among the cards that {VISIBLE} leaves",
        )
    if len(set(named)) < len(named) or not named:
        raise UserError(f"{cards} names a card twice, or none", where=WHERE, remedy=_EXAMPLE)
    needed = math.prod(spread(config.args).values())
    for part in cards:
        if len(part) != needed:
            raise UserError(
                f"a server spreads over {needed} by {KEY}.args, and {part} in {cards} names {len(part)}",
                where=WHERE,
                remedy="name for each rank as many cards as tensor_parallel_size x pipeline_parallel_size x "
                f"data_parallel_size: {_EXAMPLE}",
            )


def check_cards_of_servers(config: VLLMServerEngineConfig, devices: Sequence[torch.device]) -> None:
    """Check that each rank's own server has cards of its own, where it matters.

    Args:
        config: settings of the servers, which are started here.
        devices: of the ranks on this machine, in their order.

    Raises:
        UserError: there are not as many lists of cards as ranks, a rank learns on one of them, or all servers would
            start on the same cards.
    """
    server = config.server
    if server.cards is not None:
        check_number_of_ranks(len(server.cards), len(devices))
        check_apart([number for part in server.cards for number in part], devices, WHERE)
    elif torch.cuda.is_available() and len(devices) > 1 and "{rank}" not in server.env.get(VISIBLE, ""):
        seen = f"{VISIBLE} is {server.env[VISIBLE]!r} for all" if VISIBLE in server.env else f"{VISIBLE} is not set"
        raise UserError(
            f"{len(devices)} ranks train on this machine, each starts a vLLM server, and all servers would start on "
            f"the same cards: {seen}",
            where=WHERE,
            remedy=f"name the cards of each rank's server: {_EXAMPLE}",
        )


def check_number_of_ranks(lists: int, ranks: int) -> None:
    """Check that each rank of this machine has a list of cards for its server.

    Raises:
        UserError: it has not.
    """
    if lists != ranks:
        raise UserError(
            f"{ranks} ranks train on this machine, and the cards of {lists} servers are named",
            where=WHERE,
            remedy=f"name one list for each rank: {_EXAMPLE}",
        )


def check_apart(cards: Sequence[int], devices: Sequence[torch.device], where: str) -> None:
    """Check that engines with cards of their own are on none where a rank learns.

    Args:
        cards: numbers of the engines' cards.
        devices: of the ranks on this machine, in their order.
        where: key of the cards.

    Raises:
        UserError: a rank learns on one of them.
    """
    # A device without a number is the first.
    learners = [device.index or 0 for device in devices if device.type == "cuda"]
    if shared := [number for number in cards if number in learners]:
        raise UserError(
            f"card {shared[0]} is named for an engine, and rank {learners.index(shared[0])} of this machine learns "
            f"there: the ranks have the cards {', '.join(map(str, learners))}",
            where=where,
            remedy="name other cards, or let fewer ranks learn (trainer.devices)",
        )
