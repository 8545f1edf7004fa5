"""What every process of vLLM is started with: a supervisor, this package on its path, a card, and nothing of a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SUPERVISOR = Path(__file__).with_name("supervisor.py")
# On the process's path, so that it finds lit_grpo in an uninstalled checkout too.
ROOT = Path(__file__).parents[3]
# What torchrun and Lightning's launcher tell a process of its rank. vLLM would take it for its own, and torch, told
# that an agent of torchrun keeps the store of every group (TORCHELASTIC_USE_AGENT_STORE), would wait for one at any
# address.
LAUNCHER_VARIABLES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"),
}


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what the launcher of several ranks has put there, for a process that is no rank."""
    return {
        name: value
        for name, value in environment.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }


def name_of_card(number: int) -> str:
    """Return what the machine calls a card that has this number in this process."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return visible[number].strip() if visible else str(number)
