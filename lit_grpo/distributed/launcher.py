"""What started the processes of a run, and whether the Trainer counts as many as there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_grpo.errors import UserError

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Variables by which Lightning tells the first of several processes."""


@dataclass(frozen=True)
class Launcher:
    """A program that has started several processes of one command."""

    name: str
    processes: int
    """On all machines together."""
    on_machine: int
    """On this one; 0 where that is not known."""

    @property
    def machines(self) -> int:
        """Number of machines, if each has as many processes as this one; 1 where that is not known."""
        return max(1, self.processes // self.on_machine) if self.on_machine else 1


def launcher_in(environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that has left its variables in an environment; None: none has, or it started one process.

    Lightning's own, which sets some of torchrun's variables too, starts as many as the Trainer counts.
    """

    def number(name: str) -> int:
        # Slurm writes "8(x2)" for two machines with eight each.
        text = environment.get(name, "").partition("(")[0]
        return int(text) if text.isdecimal() else 0

    # torchrun first, which srun may have started, once on each machine.
    if "TORCHELASTIC_RUN_ID" in environment:
        launcher = Launcher("torchrun", number("WORLD_SIZE"), number("LOCAL_WORLD_SIZE"))
    else:
        # Of a step that srun began: a batch script, in which one process may run, has the tasks of the whole job.
        launcher = Launcher("srun", number("SLURM_STEP_NUM_TASKS"), number("SLURM_STEP_TASKS_PER_NODE"))
    return launcher if launcher.processes > 1 else None


def check_launcher(trainer: pl.Trainer, environment: Mapping[str, str] = os.environ) -> None:
    """Check that the Trainer counts the processes that were started, and can find other machines that it is told of.

    Processes that do not know of each other would each train a model of their own, on the same data.

    Args:
        trainer: the Trainer, before it runs.
        environment: variables of this process.

    Raises:
        UserError: there are more or fewer processes than the Trainer counts, this one is not the first where it counts
            one, or there are other machines and nothing that says where the first one is.
    """
    counted, machines = trainer.num_devices * trainer.num_nodes, trainer.num_nodes
    launcher = launcher_in(environment)
    if launcher is not None and launcher.processes != counted:
        nodes = f", trainer.num_nodes to {launcher.machines}" if launcher.machines > 1 or machines > 1 else ""
        here = launcher.on_machine or launcher.processes
        raise UserError(
            f"{launcher.name} has started {launcher.processes} processes, and the Trainer counts "
            f"{trainer.num_devices} on {machines} machine{'s' * (machines > 1)}",
            where="trainer.devices",
            remedy=f"set trainer.devices to {here}{nodes} and trainer.strategy to fsdp or ddp; or start one process",
        )
    # Lightning's functions for rank 0 alone go by these, whatever the Trainer counts.
    ranks = [name for name in _RANKS if environment.get(name, "0") != "0"]
    if counted == 1 and ranks:
        raise UserError(
            f"{ranks[0]} is {environment[ranks[0]]}: this process is one of several, and the Trainer counts one",
            where=f"environment variable {ranks[0]}",
            remedy="unset it, or set trainer.devices to the number of processes",
        )
    strategy = trainer.strategy
    if machines == 1 or launcher is not None:
        return
    if type(getattr(strategy, "cluster_environment", None)) is not LightningEnvironment:
        return
    if not environment.get("MASTER_ADDR"):
        raise UserError(
            f"the run has {machines} machines, and nothing says where the first one is",
            where="trainer.num_nodes",
            remedy="start it by torchrun or srun (docs/distributed.md), or set MASTER_ADDR, MASTER_PORT and NODE_RANK "
            "on each machine",
        )
    place = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT', '')}".rstrip(":")
    rank_zero_info(f"waiting for the other machines of {machines} at {place}")
