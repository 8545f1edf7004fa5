"""Engine processes that import vLLM while this process still imports what it needs itself.

The text of a configuration says that a run will have engine processes seconds before anything can be built: torch,
Lightning and transformers are imported first. So ``lit-grpo fit`` starts them as soon as it has read its files, and the
engine of the run takes them over, if they turn out to be what it would have started itself. Nothing that this module
imports takes torch.
"""

from __future__ import annotations

import logging
import os
import shutil
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_grpo.engines.vllm.installed import vllm_is_installed
from lit_grpo.engines.vllm_processes.cards import cards_of_driver, environment_on_card
from lit_grpo.engines.vllm_processes.process import EngineProcess, Gone
from lit_grpo.engines.vllm_server.launch import LAUNCHER_VARIABLES, name_of_card
from lit_grpo.engines.vllm_server.process_log import ProcessLog
from lit_grpo.engines.vllm_server.scratch import make_scratch_folder, remove_scratch_folder

log = logging.getLogger(__name__)

_MATTERS = ("CUDA", "HF_", "LD_", "NCCL_", "OMP_", "PATH", "PYTHON", "TRITON_", "TRANSFORMERS_", "VLLM_")
"""Beginnings of the variables that change something in an engine; libraries of the learner set others meanwhile."""


class Reserve:
    """Processes that belong to nobody yet, with what a group of engine processes needs besides.

    Args:
        count: number of processes.
        env: variables added to this process's environment; None leaves one out.
        scratch: folder that is removed when this process ends, however it ends.
        patience: as of :class:`~lit_grpo.engines.vllm_processes.process.EngineProcess`.
    """

    def __init__(self, count: int, env: Mapping[str, str | None], scratch: Path, patience: float = 300.0) -> None:
        self.scratch = scratch
        self._log = ProcessLog(scratch)
        self._processes = [EngineProcess(env, scratch, self._log, patience) for _ in range(count)]
        self._clean_up = weakref.finalize(self, _clean_up, self._processes, scratch)

    def start(self) -> None:
        """Start the processes, and have them import vLLM."""
        for process in self._processes:
            process.start()
            # One that does not come up is started again by whoever takes them over.
            try:
                process.send(("import",))
            except Gone:
                log.debug("a process of vLLM that was started early has ended")

    def would_be(self, count: int, env: Mapping[str, str | None]) -> bool:
        """Tell whether the same processes would be started now."""
        ours = self._processes[0].environment
        now = EngineProcess(env, self.scratch, self._log).environment
        names = {name for name in ours.keys() | now.keys() if name.startswith(_MATTERS)}
        differing = {name for name in names if ours.get(name) != now.get(name)}
        if differing:
            log.debug("engine processes that were started early have another %s", ", ".join(sorted(differing)))
        return len(self._processes) == count and not differing

    def hand_over(self) -> tuple[ProcessLog, list[EngineProcess]]:
        """Return log and processes; whoever takes them has to end them and to remove the folder."""
        self._clean_up.detach()
        return self._log, self._processes

    def close(self) -> None:
        """End the processes, and remove the folder. Safe to call twice, and after :meth:`hand_over`."""
        self._clean_up()


_reserves: list[Reserve] = []
"""The one that :func:`begin` has made, until it is taken."""


def begin(processes: int | None) -> None:
    """Start processes for the engine that a run will have; nothing where it is not known which card that gets.

    Args:
        processes: number of processes; None: one on a card, and none where there is no card.
    """
    several_ranks = any(name in os.environ for name in LAUNCHER_VARIABLES)
    if _reserves or several_ranks or not vllm_is_installed():
        return
    cards = cards_of_driver()
    if cards > 1:
        return
    # Should CUDA find no card, or another one, the run's processes have another environment, and these are not taken.
    env = environment_on_card(name_of_card(0)) if cards else _environment_by_torch(processes)
    if env is None:
        return
    reserve = Reserve(processes or 1, env, make_scratch_folder(None, 0))
    _reserves.append(reserve)
    reserve.start()


def _environment_by_torch(processes: int | None) -> dict[str, str | None] | None:
    """Return what the processes' environment has besides this one's; None: none are to be started."""
    # Without NVIDIA's driver there may be cards of another maker. The import of torch takes a second, which the run
    # needs in any case.
    import torch

    from lit_grpo.engines.vllm_processes.settings import environment

    if torch.cuda.device_count() > 1 or (processes is None and not torch.cuda.is_available()):
        return None
    return environment(processes or 1, number=0)


def take(count: int, env: Mapping[str, str | None], weight_bytes: int) -> Reserve | None:
    """Return the processes that :func:`begin` has started; None: there are none, or not the right ones, which end.

    Args:
        count: processes that are needed.
        env: variables that they must have besides this process's.
        weight_bytes: size of the weights that are to be handed over twice in their folder.
    """
    if not _reserves:
        return None
    reserve = _reserves.pop()
    if reserve.would_be(count, env) and shutil.disk_usage(reserve.scratch).free > 2 * weight_bytes:
        return reserve
    reserve.close()
    return None


def _clean_up(processes: Sequence[EngineProcess], scratch: Path) -> None:
    for process in processes:
        process.close()
    remove_scratch_folder(scratch)
