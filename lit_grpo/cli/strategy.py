"""What ``trainer.strategy`` means here."""

from __future__ import annotations

from typing import Any

from lit_grpo.errors import UserError

# FSDP1: refuses CPU and norm clipping, and ends with Lightning's next major version.
_FSDP1 = ("fsdp_cpu_offload",)


def resolve_strategy(strategy: Any) -> Any:
    """The strategy for the Trainer. ``fsdp`` is FSDP2 (Lightning's ModelParallelStrategy), never FSDP1.

    Raises:
        UserError: sharding, which the policy does not do yet.
    """
    if strategy == "fsdp" or strategy in _FSDP1 or type(strategy).__name__ in ("FSDPStrategy", "ModelParallelStrategy"):
        raise UserError(
            "the policy cannot be sharded over devices yet",
            where="trainer.strategy",
            remedy="use `strategy: auto` with one device, or `strategy: ddp` with several",
        )
    return strategy
