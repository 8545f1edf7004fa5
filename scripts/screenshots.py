"""Make the pictures of the documents again: one short training run, its report, and the pages of its trackers.

    python scripts/screenshots.py                     # trains (minutes on a CPU), then writes docs/images/*.png
    python scripts/screenshots.py --work /tmp/shots   # keeps the run there; with one already there, only the pictures

It needs Chromium with chromedriver, and the extra `trackers`. Nothing is fetched from a network. What Weights & Biases
has stored offline is printed, since it has no page without its server.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lit_grpo.utils.ports import free_port  # noqa: E402
from tests.report.browser import MISSING, Browser, browser  # noqa: E402

IMAGES = ROOT / "docs" / "images"
LARGEST = 150_000
"""Bytes of the largest picture that belongs into the repository."""
TENSORBOARD_PAGE = (
    "/?darkMode=false&pinnedCards="
    + urllib.parse.quote(
        json.dumps([{"plugin": "scalars", "tag": tag} for tag in
                    ("reward", "val/reward", "completions/length", "policy/entropy")], separators=(",", ":"))
    )
    + "#timeseries"
)  # fmt: skip
"""Path of TensorBoard's page with the main curves pinned above all others."""
OVERLAY = """\
trainer:
  check_val_every_n_epoch: null
  val_check_interval: 10
  logger:
    - {class_path: lit_grpo.tracking.RunLogger, init_args: {run_name: sums}}
    - {class_path: TensorBoardLogger, init_args: {save_dir: tb, name: sums, version: ""}}
    - {class_path: WandbLogger, init_args: {offline: true, save_dir: wandb_files}}
data:
  val: {all: {prompts: {class_path: lit_grpo.data.AdditionPrompts}}}
"""


def train(work: Path, rollouts: int) -> None:
    """Train the quickstart's model with all three trackers in ``work``."""
    (work / "overlay.yaml").write_text(OVERLAY, encoding="utf-8")
    (work / "wandb_files").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "lit_grpo.cli.main", "fit", "--config", str(ROOT / "configs/quickstart.yaml"),
               "--config", "overlay.yaml", "--data.rollouts", str(rollouts)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}
    subprocess.run(command, cwd=work, env=environment, check=True)


@contextlib.contextmanager
def server(command: Sequence[str], work: Path, path: str = "/") -> Iterator[str]:
    """A server of pages; ``{port}`` in its command is where it listens. Gives its address."""
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in command]
    with (work / "server.log").open("w") as log:
        process = subprocess.Popen(words, cwd=work, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while True:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(address + path, timeout=20).status == 200:
                    break
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError((work / "server.log").read_text()[-2000:])
            time.sleep(0.5)
        yield address
    finally:
        # Its workers too.
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def wait_for(session: Browser, text: str, seconds: float = 120) -> None:
    """Wait until a page shows a text."""
    deadline = time.monotonic() + seconds
    while text not in (session.run("return document.body.innerText") or ""):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the page never showed {text!r}")
        time.sleep(0.5)
    # Charts are drawn after the words around them.
    time.sleep(4)


def save(session: Browser, name: str) -> None:
    """Write what the browser shows, in few colours, as a page of charts has."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        session.screenshot(Path(folder) / "shot.png")
        picture = Image.open(io.BytesIO((Path(folder) / "shot.png").read_bytes())).convert("RGB")
    target = IMAGES / f"{name}.png"
    picture.quantize(128, dither=Image.Dither.NONE).save(target, optimize=True)
    size = target.stat().st_size
    if size > LARGEST:
        raise RuntimeError(f"{target} has {size} bytes, more than {LARGEST}")
    print(f"{target.relative_to(ROOT)}: {size // 1000} kB")


def of_report(work: Path, run: Path) -> None:
    """The report on a screen, in the dark, and on a phone."""
    # As it is written today, where the run is from another day.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "lit_grpo.cli.main", "report", str(run)], cwd=work, env=environment, check=True
    )
    page = run / "report.html"
    with browser(work / "profile", 1280, 960) as session:
        session.media()
        session.open(page)
        save(session, "report")
        session.media(scheme="dark")
        session.open(page)
        save(session, "report_dark")
        session.media()
        session.open(page)
        # The widest table of the page: groups of completions side by side.
        session.run("[...document.querySelectorAll('h2')].find(h => /completions/i.test(h.innerText)).scrollIntoView()")
        save(session, "report_completions")
    with browser(work / "phone", 390, 844, phone=True) as session:
        session.media()
        session.open(page)
        save(session, "report_phone")


def of_mlflow(work: Path, run: Path) -> None:
    """MLflow's page of the run, at the address that the end of a run prints, and its table of completions."""
    run_id = json.loads((run / "run.json").read_text())["run_id"]
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{work}/runs/mlflow.db",
               "--host", "127.0.0.1", "--port", "{port}", "--workers", "1"]  # fmt: skip
    with server(command, work, "/health") as address, browser(work / "mlflow", 1440, 960) as session:
        session.call("POST", "/url", {"url": f"{address}/#/experiments/1/runs/{run_id}/model-metrics"})
        wait_for(session, "1 main")
        _close_assistant(session)
        save(session, "mlflow")
        session.call("POST", "/url", {"url": f"{address}/#/experiments/1/runs/{run_id}"})
        wait_for(session, "Parameters")
        _close_assistant(session)
        save(session, "mlflow_overview")


def _close_assistant(session: Browser) -> None:
    """Close the panel that MLflow opens beside every page at the first visit."""
    session.run("document.querySelector('[data-component-id=\"mlflow.assistant.chat_panel.close\"]')?.click()")
    time.sleep(3)


def of_tensorboard(work: Path) -> None:
    """TensorBoard's scalars, with the reward first."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", "tb", "--host", "127.0.0.1", "--port", "{port}"]
    with server(command, work) as address, browser(work / "tensorboard", 1440, 960) as session:
        session.call("POST", "/url", {"url": address + TENSORBOARD_PAGE})
        wait_for(session, "Pinned")
        save(session, "tensorboard")


def log_records(data: bytes) -> Iterator[bytes]:
    """Read the records of a log in LevelDB's format, which Weights & Biases writes behind a header of 7 bytes.

    A record stands in one fragment, or in a first, middle ones and a last, none of which crosses a border of 32 KiB.
    """
    block, header, at, parts = 32768, 7, 7, []
    while at + header <= len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts.append(data[at + header : at + header + length])
        at += header + length
        # 1 is a whole record, 4 the last fragment of one.
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def wandb_contents(folder: Path) -> dict[str, Any]:
    """Count what one offline run of Weights & Biases holds: rollouts and keys of its history, configuration, tables."""
    # Its classes are made when it is loaded; no checker of types sees them.
    wandb_internal_pb2: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")

    (path,) = folder.rglob("offline-run-*/run-*.wandb")
    records: Counter[str] = Counter()
    steps: dict[int, set[str]] = {}
    config: set[str] = set()
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type") or ""
        records[kind] += 1
        if kind == "history":
            keys = {item.key or ".".join(item.nested_key) for item in record.history.item}
            values = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            number = int(json.loads(values.get("trainer/global_step") or values.get("_step") or "0"))
            steps.setdefault(number, set()).update(keys)
        elif kind in ("run", "config"):
            update = (record.run.config if kind == "run" else record.config).update
            config |= {item.key or ".".join(item.nested_key) for item in update}
    return {
        "file": path.name,
        "kB": path.stat().st_size // 1000,
        "records": dict(records),
        "rollouts": len(steps),
        "keys": sorted(set().union(*steps.values())),
        "configuration": sorted(config),
        "tables": len(list(path.parent.rglob("completions_*.table.json"))),
    }


def main() -> int:
    """Train where nothing is yet, and make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="DIR", help="folder of the run and the servers (a temporary one)")
    parser.add_argument("--rollouts", type=int, default=240, help="length of the run (240)")
    parser.add_argument("--only", choices=("report", "mlflow", "tensorboard", "wandb"), help="these pictures alone")
    args = parser.parse_args()
    if MISSING:
        print(MISSING, file=sys.stderr)
        return 2
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = (args.work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        run = work / "runs" / "sums"
        if not (run / "report.html").exists():
            train(work, args.rollouts)
        if args.only in (None, "report"):
            of_report(work, run)
        if args.only in (None, "mlflow"):
            of_mlflow(work, run)
        if args.only in (None, "tensorboard"):
            of_tensorboard(work)
        if args.only in (None, "wandb"):
            print(json.dumps(wandb_contents(work / "wandb_files"), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
