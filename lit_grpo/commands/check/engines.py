"""With how many processes vLLM samples fastest on this card: measured with the run's own prompts and limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lit_grpo.commands.check.result import Result
from lit_grpo.engines import EngineConfig, RolloutEngine
from lit_grpo.engines.base import StartSeconds
from lit_grpo.engines.vllm_processes.choose import measured_key, write_measured
from lit_grpo.errors import EngineError, UserError
from lit_grpo.types import Request, Sampling

CANDIDATES = (1, 2, 3, 4)
"""Numbers of processes that are tried."""
WORTH = 1.05
"""How much faster more processes must be, since each takes memory of the card for itself."""


def start(found: StartSeconds) -> Result:
    """Say how long the run's engine took to be ready, and how much of that the learner had to wait for."""
    return Result("start", "pass", str(found), values=found._asdict())


def left_open(config: EngineConfig) -> bool:
    """Tell whether the number of processes is to be chosen, and there is anything to choose."""
    named = config.custom_engine is None and config.name == "vllm"
    return named and config.processes == "auto" and torch.cuda.is_available()


def measure(
    present: RolloutEngine,
    build: Callable[[int], RolloutEngine],
    sync: Callable[[RolloutEngine], None],
    requests: Sequence[Request],
    sampling: Sampling,
) -> Result:
    """Sample the same with each number of processes, one engine after the other.

    Args:
        present: the run's engine, with weights. It is closed.
        build: makes an engine of so many processes.
        sync: gives an engine weights.
        requests: what is sampled, as much as one rollout.
        sampling: how.

    Returns:
        The fastest number and all tokens a second; a number of which no engine can be started is left out.
    """
    # The one that is there is asked first: vLLM allows one engine with sleep mode in the life of a process.
    first = getattr(present, "processes", 1)
    rates: dict[int, float] = {}
    failed: dict[int, str] = {}
    for processes in sorted(CANDIDATES, key=lambda number: number != first):
        try:
            engine = present if processes == first else build(processes)
        except (EngineError, UserError) as error:
            failed[processes] = str(error).partition("\n")[0]
            continue
        try:
            if engine is not present:
                sync(engine)
            rates[processes] = _tokens_per_second(engine, requests, sampling)
        except EngineError as error:
            failed[processes] = str(error).partition("\n")[0]
        finally:
            engine.close()
            torch.cuda.empty_cache()
    if first not in CANDIDATES:
        present.close()
    notes = "".join(f"; {processes}: {why}" for processes, why in sorted(failed.items()))
    if not rates:
        return Result("engine processes", "warn", f"no engine could be measured{notes}", "set data.engine.processes: 1")
    fastest = _fastest(rates)
    shown = ", ".join(f"{processes}: {rates[processes]:,.0f}" for processes in sorted(rates))
    found = (
        f"{fastest} is best for {sum(len(r.seeds) for r in requests)} samples at once (tokens/s with {shown}{notes})"
    )
    return Result("engine processes", "pass", found, values={"processes": fastest, "tokens_per_second": rates})


def keep(result: Result, model_config: Any) -> None:
    """Keep what was measured for runs with ``data.engine.processes: auto`` of this shape of model on this card."""
    key = measured_key(model_config, torch.cuda.get_device_name())
    write_measured(key, result.values["processes"], result.values["tokens_per_second"])


def _fastest(rates: dict[int, float]) -> int:
    best = min(rates)
    for processes in sorted(rates):
        if rates[processes] > WORTH * rates[best]:
            best = processes
    return best


def _tokens_per_second(engine: RolloutEngine, requests: Sequence[Request], sampling: Sampling) -> float:
    # The first time kernels are compiled.
    list(engine.generate(requests, sampling))
    began = time.perf_counter()
    tokens = sum(len(completion.token_ids) for completion in engine.generate(requests, sampling))
    return tokens / (time.perf_counter() - began)
