"""The cost of a run: memory and time, measured on one real step and scaled to the longest completions."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lit_grpo.commands.check.result import Result
from lit_grpo.distributed.sharding import dtype_of, local
from lit_grpo.run.phases import learner_phases

if TYPE_CHECKING:
    from lit_grpo.policy.forward.policy import Policy

GIB = 1024**3
TIGHT = 0.9
"""Share of the memory above which the preflight warns."""


class Memory(NamedTuple):
    """Memory of this process on its device, in bytes."""

    peak: int
    """Highest use of memory so far."""
    total: int | None
    """Size of the device's memory; None where the system does not tell."""
    where: str
    """Which memory it is, in words: ``of the card`` or ``of main memory``."""


def memory(device: torch.device) -> Memory:
    """Measure peak use and size: of the card on CUDA, of the machine or its container otherwise."""
    if device.type == "cuda":
        # Not only torch's allocations: an engine in this process may allocate by itself.
        free, total = torch.cuda.mem_get_info(device)
        return Memory(max(torch.cuda.max_memory_reserved(device), total - free), total, "of the card")
    # Linux counts ru_maxrss in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Memory(peak, _main_memory(), "of main memory")


def _main_memory() -> int | None:
    # A container's limit, under version 2 and version 1 of control groups, may be below what the machine has.
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path).strip()
        # Without a limit the file holds "max" or a number near 2**63.
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


def weight_bytes(models: Iterable[nn.Module | None]) -> dict[str, int]:
    """Count the bytes of weights, gradients and AdamW's two moments on this rank; a shared parameter counts once."""
    # By identity: a reference model or a critic may share parameters with the policy.
    parameters = {id(p): p for model in models if model is not None for p in model.parameters()}.values()
    sizes = [(local(p).numel() * p.element_size(), p.requires_grad) for p in parameters]
    trained = sum(size for size, requires_grad in sizes if requires_grad)
    return {"weights": sum(size for size, _ in sizes), "gradients": trained, "moments": 2 * trained}


def logits_bytes(
    policy: Policy, limit: int, vocabulary: int, *, micro_batch_tokens: int | None, micro_batch_size: int | None
) -> int:
    """Count the bytes of one micro-batch's logits at the length limit.

    Args:
        policy: the policy, whose head computes ``logits_chunk`` positions at once.
        limit: data.sampling.max_new_tokens.
        vocabulary: number of tokens in the vocabulary.
        micro_batch_tokens: ``micro_batch_tokens`` of the module.
        micro_batch_size: ``micro_batch_size`` of the module.
    """
    positions = min(x for x in (micro_batch_tokens, policy.logits_chunk) if x is not None)
    if micro_batch_size is not None:
        positions = min(positions, micro_batch_size * limit)
    # Twice: logits and log-softmax in float32; compiled, logits and their gradient in the dtype of the forward pass.
    itemsize = dtype_of(policy).itemsize if getattr(policy, "compiled", False) else 4
    return 2 * itemsize * positions * vocabulary


def memory_result(
    static: Mapping[str, int], logits: int, measured: Memory, *, longest: int, limit: int, prompt: int, processes: int
) -> Result:
    """Compare the measured peak, scaled to micro-batches as long as the limit allows, with the memory there is.

    Args:
        static: what :func:`weight_bytes` counts, which no length changes.
        logits: what :func:`logits_bytes` counts.
        measured: memory after one real step.
        longest: tokens of the longest completion in that step.
        limit: data.sampling.max_new_tokens.
        prompt: tokens of the longest prompt.
        processes: processes that share the weights.
    """
    fixed = sum(static.values())
    # Activations grow with the tokens of a micro-batch; weights, gradients and moments do not.
    factor = max(1.0, (prompt + limit) / max(1, prompt + longest))
    expected = int(fixed + max(0, measured.peak - fixed) * factor)
    values: dict[str, Any] = {
        **static, "peak": measured.peak, "expected_at_limit": expected, "room": measured.total,
        "logits_at_limit": logits, "processes": processes,
    }  # fmt: skip
    found = (
        f"peak {gib(measured.peak)} in one step ({gib(fixed)} weights, gradients and moments); at the length limit "
        f"about {gib(expected)}"
    )
    if measured.total is None:
        return Result("memory", "warn", found + "; how much there is is not known", "compare it yourself", values)
    found += f" of {gib(measured.total)} {measured.where}"
    remedy = "lower model.micro_batch_tokens, set model.policy.logits_chunk or gradient_checkpointing: true"
    if expected > measured.total:
        return Result("memory", "fail", found, remedy, values)
    if expected > TIGHT * measured.total:
        return Result("memory", "warn", found, remedy, values)
    return Result("memory", "pass", found, values=values)


def gib(size: int) -> str:
    """Write a number of bytes in GiB, or in MiB where it is small."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 1024**2:.0f} MiB"


def time_result(metrics: Mapping[str, float], rollouts: int) -> Result:
    """State the seconds of one rollout by phase, and what the run will take at that rate."""
    phases = learner_phases({key for key, value in metrics.items() if math.isfinite(value)})
    parts = {name: metrics[key] for key, name in phases.items()}
    total = sum(parts.values())
    share = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in parts.items() if seconds >= 0.01 * total)
    found = f"{span(total)} for the first rollout ({share}); {rollouts} like it would take {span(total * rollouts)}"
    # It alone pays for what is made once: threads, caches, compiled parts.
    found += ", later ones are mostly faster"
    speed = metrics.get("time/tokens_per_second")
    return Result("time", "pass", found, values={"seconds": total, "rollouts": rollouts, "parts": parts,
                                                 "tokens_per_second": speed})  # fmt: skip


def span(seconds: float) -> str:
    """Write seconds as people say a length of time: in ms, s, min or h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
