"""One point is run: `lit-grpo fit` on so many cards, watched, and ended where the time is over."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scripts.scaling_gpu_cases.files import ROOT, configuration
from scripts.scaling_gpu_cases.keeper import kept
from scripts.scaling_gpu_cases.points import Point

Launcher = Literal["lightning", "torchrun"]
# The first is what a run says of itself, the others what libraries say where it could not.
_NO_MEMORY = ("memory ran out", "out of memory", "OutOfMemory", "No available memory for the cache blocks")
_GRACE_SECONDS = 20.0
_POLL_SECONDS = 0.2
_MEMORY_SECONDS = 1.0
_LAST_LINES = 12


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    rows: list[dict[str, Any]]
    """Metrics of each rollout, as the run has recorded them."""
    seconds: float
    """From the command to its end."""
    card_gib: float | None
    """The most that all programs together took on one card; None where nothing tells."""
    failure: str | None
    """Why it has no figures; None where it has."""
    cut: bool = False
    """Whether it was ended because the time was over."""


def run(
    point: Point,
    place: Path,
    folder: Path,
    *,
    seconds: float,
    on_cards: bool,
    engine: str,
    launcher: Launcher,
    more: Sequence[Path] = (),
    held: Sequence[int] = (),
) -> Outcome:
    """Run a point, for ``seconds`` at most.

    Args:
        point: what is measured.
        place: folder of model and prompts.
        folder: of this run, made anew.
        seconds: after which it is ended.
        on_cards: False on a CPU.
        engine: ``vllm`` or ``transformers``.
        launcher: who starts the ranks.
        more: configurations that are laid over the point's own.
        held: descriptors of locks, held until nothing of the run is left.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = configuration(point, place, folder / "run", on_cards=on_cards, engine=engine)
    # YAML reads JSON.
    (folder / "config.yaml").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    start, log = time.monotonic(), folder / "log.txt"
    with log.open("w", encoding="utf-8") as out, _card_memory(on_cards) as most:
        ranks = kept(
            command(point, [folder / "config.yaml", *more], launcher),
            grace=_GRACE_SECONDS,
            held=held,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_environment(folder.parent),
        )
        with ranks as process:
            while process.poll() is None and time.monotonic() - start < seconds:
                time.sleep(_POLL_SECONDS)
            cut = process.poll() is None
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    text = log.read_text(encoding="utf-8", errors="replace")
    failure = None
    if cut:
        failure = f"it was not done after {seconds:.0f} s"
    elif process.returncode or len(rows) < point.warmup + point.steps:
        failure = reason(text, process.returncode)
    return Outcome(rows, time.monotonic() - start, most[0] if most else None, failure, cut)


def command(point: Point, configs: Sequence[Path], launcher: Launcher) -> list[str]:
    """Return the command of a point."""
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={point.ranks}"]
    start = ranks if launcher == "torchrun" and point.ranks > 1 else []
    chosen = [word for config in configs for word in ("--config", str(config))]
    return [sys.executable, *start, "-m", "lit_grpo", "fit", *chosen]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read what a run has recorded of its rollouts; a line that is not whole is the last one of a run that was cut."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if "time/update" in row]


def reason(text: str, code: int) -> str:
    """Say in few words why a run failed, by what it wrote last."""
    lines = [line for line in text.splitlines() if line.strip()]
    for words in _NO_MEMORY:
        if (found := next((line.strip() for line in lines if words in line), None)) is not None:
            return f"out of memory: {found:.300}"
    return f"exit code {code}: " + "\n".join(lines[-_LAST_LINES:])


def _environment(folder: Path) -> dict[str, str]:
    # What a launcher has left here would make the run wait for ranks that nobody starts.
    from lit_grpo.engines.vllm_server.launch import without_launcher

    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return without_launcher(os.environ) | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        # Kept from point to point: what one has compiled the next finds.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled")),
    }


@contextlib.contextmanager
def _card_memory(on_cards: bool) -> Iterator[list[float]]:
    """Watch the memory of all cards; the list holds, at the end, the most that was taken on one, in GiB."""
    most: list[float] = []
    if not on_cards or shutil.which("nvidia-smi") is None:
        yield most
        return
    over = threading.Event()

    def watch() -> None:
        ask = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not over.wait(_MEMORY_SECONDS):
            told = subprocess.run(ask, capture_output=True, text=True).stdout.split()
            used = [float(word) / 1024 for word in told if word.replace(".", "").isdigit()]
            most[:] = [max([*most, *used])] if used else most

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        over.set()
        watcher.join()
