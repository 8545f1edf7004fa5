"""Memory that ran out: whether an error says so, what is free, who holds the rest, and the screen that tells it."""

from __future__ import annotations

import gc
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lit_grpo.errors import UserError

_SIGNS = (
    # What torch's allocator on the CPU says, which raises a plain RuntimeError; the second on Windows and macOS.
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    # What libraries beside torch's allocator on the GPU say.
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    # What vLLM says when it starts. The first: on a card that somebody else fills; the others: with too small a share.
    "is less than desired GPU memory utilization",
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "out of memory when warming up sampler",
)
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)", re.ASCII)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
_NVIDIA_SMI_SECONDS = 10.0
_NAMED_PROCESSES = 4
"""Most other processes that a screen names, the largest first."""
_WORTH_SAYING = 2**30
"""Bytes of a GPU of unknown use that a screen mentions; a CUDA context alone takes half of that."""
_NO_LIMIT = 2**60
"""Bytes above which a limit of a control group is none."""


class MemoryShortageError(UserError):
    """The screen of a run that cannot go on because memory ran out."""


@dataclass(frozen=True)
class Holder:
    """A process that holds memory."""

    pid: int
    name: str
    bytes: int | None
    """None: not known, as on a card that is shared between containers."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) {'an unknown amount' if self.bytes is None else gib(self.bytes)}"


@dataclass(frozen=True)
class MemoryReport:
    """What is known of the memory of one device at one moment; None stands for what is not known."""

    device: str
    """Name of the device, as ``GPU 0 (NVIDIA H200)`` or ``main memory``."""
    asked: int | None = None
    """Bytes that were asked for in vain."""
    free: int | None = None
    total: int | None = None
    own: int | None = None
    """Bytes that this process holds."""
    tensors: int | None = None
    """Of these, bytes of tensors; the rest is kept by torch for later ones. GPU only."""
    others: tuple[Holder, ...] | None = None
    """Other processes that hold memory there, the largest first."""

    def __str__(self) -> str:
        asked = "how much was asked for is not known" if self.asked is None else f"{gib(self.asked)} were asked for"
        if self.free is None:
            free = f"how much of {self.device} is free is not known"
        else:
            free = f"{gib(self.free)} of {self.device} are free"
            free += "" if self.total is None else f", which has {gib(self.total)}"
        parts = [f"{asked}; {free}"]
        if self.own is None:
            parts.append("what this process holds is not known")
        else:
            own = f"this process holds {gib(self.own)}"
            if self.tensors is not None:
                own += f", {gib(self.tensors)} of it tensors and the rest kept by torch for later ones"
            parts.append(own)
        if self.others is None:
            parts.append("which other processes hold memory there is not known (nvidia-smi gives no answer)")
        elif not self.others:
            parts.append("no other process is seen there")
        else:
            named = ", ".join(map(str, self.others[:_NAMED_PROCESSES]))
            more = len(self.others) - _NAMED_PROCESSES
            parts.append(f"other processes there: {named}" + (f" and {more} more" if more > 0 else ""))
        if (rest := self.unexplained) is not None and rest >= _WORTH_SAYING:
            parts.append(f"{gib(rest)} are held by what is not seen from here (CUDA itself, other containers)")
        return ". ".join(part[0].upper() + part[1:] for part in parts)

    @property
    def unexplained(self) -> int | None:
        """Bytes of a GPU that are neither free nor held by a process that is seen; None where that is not known."""
        if self.tensors is None or self.free is None or self.total is None or self.own is None or self.others is None:
            return None
        if any(holder.bytes is None for holder in self.others):
            return None
        return max(0, self.total - self.free - self.own - sum(holder.bytes or 0 for holder in self.others))


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error, or the one that it was made from, says that memory ran out."""
    seen: set[int] = set()
    # A compiler and vLLM raise their own errors from the one of the allocator.
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # It has been told already.
        if isinstance(error, MemoryShortageError):
            return False
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError | ValueError) and any(sign in str(error) for sign in _SIGNS):
            return True
        error = error.__cause__
    return False


def bytes_asked(message: str) -> int | None:
    """Return the bytes that an allocator says it was asked for; None where the message names none."""
    found = _ASKED.search(message)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def free_what_is_unused(device: torch.device | str) -> None:
    """Give back what garbage and torch's allocator hold, so that what is asked for next may fit."""
    # The traceback of an error is a cycle that holds the tensors of its frames.
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def report(device: torch.device | str, message: str = "") -> MemoryReport:
    """Return what is known of a device's memory now. Never raises.

    Args:
        device: CPU or a GPU.
        message: message of the error, which says how much was asked for.
    """
    device = torch.device(device)
    asked = bytes_asked(message)
    try:
        return _on_gpu(device, asked) if device.type == "cuda" else _in_main_memory(asked)
    # A driver that is out of memory may refuse to say how it stands, and the screen is still to come.
    except Exception as error:
        return MemoryReport(f"{device} ({type(error).__name__} while it was asked)", asked)


def out_of_memory_error(
    doing: str, device: torch.device | str, message: str, *, where: str | None, remedies: Sequence[str]
) -> MemoryShortageError:
    """Return the screen for memory that ran out.

    Args:
        doing: what could not be done, as in "memory ran out while" ...
        device: on which it was to be done.
        message: of the error that says so.
        where: key of the configuration that bounds it.
        remedies: what may help, the most likely first; each a phrase in the imperative.
    """
    found = report(device, message)
    steps = list(remedies)
    scarce = found.free is not None and found.free < 2 * (found.asked or _WORTH_SAYING)
    if found.others and "ulimit" not in found.device and (scarce or torch.device(device).type == "cuda"):
        steps.insert(0, "end the other processes, or wait for them")
    remedy = "; ".join(f"({number}) {step}" for number, step in enumerate(steps, 1))
    # vLLM says in its own words what it lacks, and names no bytes.
    said = "" if found.asked is not None else f" ({_first_line(message)})"
    return MemoryShortageError(f"memory ran out while {doing}{said}. {found}.", where=where, remedy=remedy)


@contextmanager
def screen_if_out_of_memory(
    doing: str, device: torch.device | str, *, where: str | None, remedies: Sequence[str]
) -> Iterator[None]:
    """Turn an error within that says that memory ran out into the screen of :func:`out_of_memory_error`.

    Raises:
        MemoryShortageError: memory ran out. Every other error passes as it is.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory_error(doing, device, message_of(error), where=where, remedies=remedies) from error


def screen_of(error: BaseException) -> MemoryShortageError:
    """Return the screen for an error that says that memory ran out, of which nothing else is known."""
    device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    remedies = (
        "hold the model in fewer bytes (model.policy.dtype, model.policy.quantization) or spread it over several GPUs "
        "(trainer.strategy: fsdp)",
        "lower data.engine.gpu_memory_utilization and model.micro_batch_tokens",
    )
    return out_of_memory_error("the command ran", device, message_of(error), where=None, remedies=remedies)


def gib(count: float) -> str:
    """Return bytes in the unit that torch and nvidia-smi count in, as GiB or, below one, as MiB."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def message_of(error: BaseException) -> str:
    """Return the message, in a chain of errors, of the one that says that memory ran out."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, torch.OutOfMemoryError | MemoryError) or any(sign in str(found) for sign in _SIGNS):
            return str(found) or type(found).__name__
        found = found.__cause__
    return str(error)


def _first_line(message: str) -> str:
    line = next((line.strip() for line in message.splitlines() if line.strip()), "without a message")
    return line if len(line) <= 300 else f"{line[:300]} ..."


# ---------------------------------------------------------------------------------------------------- GPU


def _on_gpu(device: torch.device, asked: int | None) -> MemoryReport:
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    # A card that CUDA_VISIBLE_DEVICES hides counts for nvidia-smi, so the card is named by its own id.
    card = getattr(properties, "uuid", None)
    return MemoryReport(
        device=f"GPU {index} ({properties.name})",
        asked=asked,
        free=free,
        total=total,
        own=torch.cuda.memory_reserved(index),
        tensors=torch.cuda.memory_allocated(index),
        others=None if card is None else processes_on_card(f"GPU-{card}"),
    )


def processes_on_card(card: str) -> tuple[Holder, ...] | None:
    """Return the other processes that compute on a card, as ``nvidia-smi`` sees them; None where it gives no answer.

    Args:
        card: its id, ``GPU-...``.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return _parsed(done.stdout, card, os.getpid())


def _parsed(answer: str, card: str, own: int) -> tuple[Holder, ...]:
    found = []
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) < 4 or cells[0] != card or not cells[1].isdigit() or int(cells[1]) == own:
            continue
        # A name may hold commas, and the amount is "[N/A]" where containers share a card.
        amount = int(cells[-1]) * 2**20 if cells[-1].isdigit() else None
        found.append(Holder(int(cells[1]), ",".join(cells[2:-1]), amount))
    return tuple(sorted(found, key=lambda holder: -(holder.bytes or 0)))


# ---------------------------------------------------------------------------------------------------- main memory


def _in_main_memory(asked: int | None) -> MemoryReport:
    figures = dict(re.findall(r"^(\w+): +(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE | re.ASCII))
    free = int(figures["MemAvailable"]) * 1024 if "MemAvailable" in figures else None
    total = int(figures["MemTotal"]) * 1024 if "MemTotal" in figures else None
    name = "main memory"
    for bound, used in _CGROUPS:
        most, now = _read(bound).strip(), _read(used).strip()
        if most.isdigit() and now.isdigit() and int(most) < min(_NO_LIMIT, total or _NO_LIMIT):
            total, name = int(most), "the main memory that this container may use"
            free = min(int(most) - int(now), free if free is not None else int(most))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    taken = re.search(r"^VmSize:\s+(\d+) kB$", _read("/proc/self/status"), re.MULTILINE | re.ASCII)
    if limit != resource.RLIM_INFINITY and taken is not None and limit - int(taken[1]) * 1024 < (free or _NO_LIMIT):
        total, free = limit, max(0, limit - int(taken[1]) * 1024)
        name = "the address space that this process may use (ulimit -v)"
    others = _processes()
    own = next((holder.bytes for holder in others or () if holder.pid == os.getpid()), None)
    rest = None if others is None else tuple(holder for holder in others if holder.pid != os.getpid())
    return MemoryReport(name, asked, free, total, own, None, rest)


def _processes() -> tuple[Holder, ...] | None:
    """Return the processes that hold more than 256 MiB of main memory, the largest first; None where none are seen."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        status = _read(str(folder / "status"))
        held = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE | re.ASCII)
        if held is None:
            continue
        amount = int(held[1]) * 1024
        if amount >= 2**28 or folder.name == str(os.getpid()):
            found.append(Holder(int(folder.name), status.partition("\n")[0].removeprefix("Name:").strip(), amount))
    return tuple(sorted(found, key=lambda holder: -(holder.bytes or 0))) or None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    # A process may end while it is looked at, and other systems have no such files.
    except OSError:
        return ""
