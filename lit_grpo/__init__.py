"""lit-grpo: reinforcement learning from verifiable rewards on PyTorch Lightning.

    from lit_grpo import LitGRPO, RolloutDataModule

Both are loaded when they are first asked for, so that importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lit_grpo.datamodule import RolloutDataModule
    from lit_grpo.module import LitGRPO

__all__ = ["LitGRPO", "RolloutDataModule", "__version__"]

_WHERE = {"LitGRPO": "lit_grpo.module", "RolloutDataModule": "lit_grpo.datamodule"}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'lit_grpo' has no attribute {name!r}")
