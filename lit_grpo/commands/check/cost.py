"""What a run will take: memory and time, measured on one real step and scaled to the longest completions."""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lit_grpo.commands.check.result import Result
from lit_grpo.distributed.sharding import dtype_of, local

GIB = 1024**3
TIGHT = 0.9


class Memory(NamedTuple):
    """Bytes."""

    peak: int
    """Highest use so far of this process on its device."""
    total: int | None
    """What there is for it; None where the system does not tell."""
    where: str


def memory(device: torch.device) -> Memory:
    """Peak use and room: of the card on CUDA, of the machine or its container otherwise."""
    if device.type == "cuda":
        # Not only torch's: an engine in this process may allocate by itself.
        free, total = torch.cuda.mem_get_info(device)
        return Memory(max(torch.cuda.max_memory_reserved(device), total - free), total, "of the card")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Memory(peak, _room(), "of main memory")


def _room() -> int | None:
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path).strip()
        if text.isdigit() and int(text) < 1 << 60:
            limits.append(int(text))
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    return min(limits, default=None)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def weights(module: Any) -> dict[str, int]:
    """Bytes of weights, gradients and AdamW's two moments of everything the module holds on this rank."""
    parts: list[nn.Module] = [m for m in (module.policy, module.critic, module.reference_policy) if m is not None]
    params = {id(p): p for part in parts for p in part.parameters()}.values()
    held = [(local(p).numel() * p.element_size(), p.requires_grad) for p in params]
    trained = sum(size for size, learns in held if learns)
    return {"weights": sum(size for size, _ in held), "gradients": trained, "moments": 2 * trained}


def longest_pass(module: Any, limit: int, vocabulary: int) -> int:
    """Bytes of the logits of one micro-batch at the length limit: float32, once more for the log-softmax.

    The head holds ``logits_chunk`` positions at once; compiled, logits and their gradient in the format of the passes.
    """
    positions = min(x for x in (module.micro_batch_tokens, module.policy.logits_chunk) if x is not None)
    if module.micro_batch_size is not None:
        positions = min(positions, module.micro_batch_size * limit)
    size = dtype_of(module.policy).itemsize if getattr(module.policy, "compiled", False) else 4
    return 2 * size * positions * vocabulary


def memory_result(
    module: Any, seen: Memory, *, longest: int, limit: int, prompt: int, vocabulary: int, cards: int
) -> Result:
    """The measured peak, and what it may become when a micro-batch is as long as the limit allows.

    Args:
        module: LitGRPO.
        seen: after one real step.
        longest: tokens of the longest completion in that step.
        limit: data.sampling.max_new_tokens.
        prompt: tokens of the longest prompt.
        vocabulary: size.
        cards: processes that share the weights.
    """
    fixed = weights(module)
    static = sum(fixed.values())
    moving = max(0, seen.peak - static)
    factor = max(1.0, (prompt + limit) / max(1, prompt + longest))
    expected = int(static + moving * factor)
    logits = longest_pass(module, limit, vocabulary)
    values: dict[str, Any] = {
        **fixed, "peak": seen.peak, "expected_at_limit": expected, "room": seen.total, "logits_at_limit": logits,
        "processes": cards,
    }  # fmt: skip
    found = (
        f"peak {gib(seen.peak)} in one step ({gib(static)} weights, gradients and moments); at the length limit about "
        f"{gib(expected)}"
    )
    if seen.total is None:
        return Result("memory", "warn", found + "; how much there is is not known", "compare it yourself", values)
    found += f" of {gib(seen.total)} {seen.where}"
    remedy = "lower model.micro_batch_tokens, set model.policy.logits_chunk or gradient_checkpointing: true"
    if expected > seen.total:
        return Result("memory", "fail", found, remedy, values)
    if expected > TIGHT * seen.total:
        return Result("memory", "warn", found, remedy, values)
    return Result("memory", "pass", found, values=values)


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 1024**2:.0f} MiB"


PHASES = {"time/sync": "weights to the engine", "time/generate": "sampling", "time/wait": "waiting for sampling",
          "time/reward": "rewards", "time/update": "training"}  # fmt: skip


def time_result(metrics: Mapping[str, float], rollouts: int) -> Result:
    """Seconds of one rollout by phase, and what the run will take at that rate."""
    parts = {name: metrics[key] for key, name in PHASES.items() if math.isfinite(metrics.get(key, math.nan))}
    if "waiting for sampling" in parts:
        parts = {name: s for name, s in parts.items() if name not in ("sampling", "rewards")}
    total = sum(parts.values())
    share = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds >= 0.01 * total)
    found = f"{span(total)} for the first rollout ({share}); {rollouts} rollouts take about {span(total * rollouts)}"
    speed = metrics.get("tokens_per_second")
    return Result("time", "pass", found, values={"seconds": total, "rollouts": rollouts, "parts": parts,
                                                 "tokens_per_second": speed})  # fmt: skip


def span(seconds: float) -> str:
    """A length of time as people say it."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
