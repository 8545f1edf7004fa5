"""How many engine processes share a card: as set, as measured by ``lit-grpo check``, or one."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lit_grpo.engines.base import EngineContext, EngineStart, RolloutEngine
from lit_grpo.engines.config import VLLMEngineConfig
from lit_grpo.utils.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

MEASUREMENT = 2
"""Changes where engines change so much that what was measured before holds no longer."""


class Choice(NamedTuple):
    """A number of processes."""

    processes: int
    own: bool
    """Whether the engine has a process of its own, also where it is the only one."""
    reason: str


class VLLM:
    """What ``data.engine.name: vllm`` stands for: an engine in this process, or several in their own."""

    @classmethod
    def from_context(cls, context: EngineContext, **settings: Any) -> RolloutEngine:
        """Build the engine of a run; ``settings`` are those of :class:`lit_grpo.engines.config.VLLMEngineConfig`."""
        from lit_grpo.engines.vllm.engine import VLLMEngine

        if (begun := cls.begin(context, **settings)) is not None:
            return begun.finish(context)
        config = VLLMEngineConfig(**settings)
        _say(config, choose(config, context))
        return VLLMEngine.from_context(context, **settings)

    @classmethod
    def begin(cls, context: EngineContext, **settings: Any) -> EngineStart | None:
        """Begin to start the processes of a run's engine; None: it is in this process, and is built when it is needed.

        Of the policy in ``context`` no more is looked at than its configuration and the sizes of its weights.
        """
        from lit_grpo.engines.vllm_processes.early import EarlyProcesses

        config = VLLMEngineConfig(**settings)
        choice = choose(config, context)
        if not choice.own:
            return None
        _say(config, choice)
        return EarlyProcesses(context, config, choice.processes)


def _say(config: VLLMEngineConfig, choice: Choice) -> None:
    """Say what was chosen, where the configuration leaves it open."""
    if config.processes == "auto":
        from lightning.pytorch.utilities.rank_zero import rank_zero_info

        rank_zero_info(f"data.engine.processes: auto is {choice.processes}: {choice.reason}.")


def choose(config: VLLMEngineConfig, context: EngineContext) -> Choice:
    """Return how many processes a run has, and why."""
    choice = _choose(config, context)
    # An engine in this process is on its card.
    return choice if config.cards is None else choice._replace(own=True)


def _choose(config: VLLMEngineConfig, context: EngineContext) -> Choice:
    if config.processes != "auto":
        return Choice(config.processes, config.processes > 1, "as set")
    if not torch.cuda.is_available():
        return Choice(1, False, "on a CPU one process keeps all cores busy")
    measured = read_measured(measured_key(context.policy.model.config, torch.cuda.get_device_name()))
    # In the learner's process an engine could not start beside the learner, and each would wait for the other's Python
    # where they work at once. With a rank on each of several cards nothing but the latter has been tried.
    own = context.beside_learner or not _several_ranks()
    if measured is not None:
        # More than there are samples at once are refused.
        measured = min(measured, config.max_num_seqs)
        return Choice(measured, measured > 1 or own, "measured by lit-grpo check on this card")
    # 512 sequences of 256 tokens with log-probabilities, tokens/s with 1, 2 and 3 processes on an H200: 93,300, 87,600
    # and 58,000 at 0.5B, and 71,500, 59,800 and 38,300 at 1.5B. Several take turns on the card.
    reason = "one process keeps a card busy, unless its cores are slow; lit-grpo check measures it"
    return Choice(1, own, reason)


def _several_ranks() -> bool:
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def measured_key(model_config: Any, card: str) -> str:
    """Return what a measurement holds for: a card and the shape of a model."""
    text = model_config.get_text_config()
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    shape = "-".join(str(getattr(text, name, "")) for name in names)
    return f"{card}/{getattr(text, 'model_type', '')}/{shape}/{MEASUREMENT}"


def measured_file() -> Path:
    """Return the file that keeps what was measured on this machine."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "lit-grpo" / "engine_processes.json"


def read_measured(key: str) -> int | None:
    """Return the number of processes that was fastest; None where nothing was measured, or cannot be read."""
    try:
        found = json.loads(measured_file().read_text(encoding="utf-8"))[key]["processes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) and found >= 1 else None


def write_measured(key: str, processes: int, tokens_per_second: Mapping[int, float]) -> None:
    """Keep a measurement for later runs with ``processes: auto``.

    Args:
        key: see :func:`measured_key`.
        processes: the fastest number.
        tokens_per_second: what was measured, by number of processes.
    """
    path = measured_file()
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None
    if not isinstance(known, dict):
        known = {}
    known[key] = {"processes": processes, "tokens_per_second": {str(n): rate for n, rate in tokens_per_second.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(known, indent=1) + "\n")
