"""The pass rates of a filter run on disk: appended as they are found, complete up to the moment of a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.utils.text import shorten


@dataclass(frozen=True)
class Rate:
    """What was found of one prompt."""

    id: str
    samples: int
    correct: int
    pass_rate: float
    reward: float
    """Mean total reward."""
    truncated: float
    """Share of completions cut by the length limit."""


def rates_path(output: Path, rank: int = 0) -> Path:
    """Where the pass rates of an output file are kept: ``kept.jsonl`` has ``kept.rates.jsonl``."""
    stem = output.name.removesuffix(".gz").removesuffix(".jsonl")
    return output.with_name(f"{stem}.rates.{rank}.jsonl" if rank else f"{stem}.rates.jsonl")


def all_rates_paths(output: Path) -> list[Path]:
    """The files of all ranks of this and of earlier attempts."""
    first = rates_path(output)
    others = output.parent.glob(f"{first.name.removesuffix('.jsonl')}.*.jsonl") if output.parent.is_dir() else ()
    return [path for path in (first, *sorted(others)) if path.is_file()]


class Journal:
    """One file of rates: a line with the settings, then a line for each prompt. A line cut by a kill is dropped.

    Args:
        path: of the file; it need not be there.
        settings: all that decides what the rates mean; rates of other settings are never added to.

    Raises:
        UserError: the file holds rates of other settings, or is none of ours.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings, default=str))
        self._length = 0

    def read(self) -> list[Rate]:
        """The rates so far."""
        content = self.path.read_bytes() if self.path.is_file() else b""
        whole = content[: content.rfind(b"\n") + 1]
        self._length = len(whole)
        lines = whole.splitlines()
        if not lines:
            return []
        try:
            self._compare(json.loads(lines[0])["settings"])
            return [Rate(**json.loads(line)) for line in lines[1:]]
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{self.path} holds no pass rates of `lit-grpo filter`: {error}",
                where=str(self.path),
                remedy="give another --output",
            ) from error

    def append(self, rates: Iterable[Rate]) -> None:
        """Write at the end, and bring to the disk."""
        text = "".join(json.dumps(asdict(rate), ensure_ascii=False) + "\n" for rate in rates)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            file.truncate(self._length)
            file.seek(self._length)
            if not self._length:
                text = json.dumps({"settings": self.settings}, ensure_ascii=False) + "\n" + text
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
            self._length = file.tell()

    def _compare(self, before: Mapping[str, Any]) -> None:
        for key in self.settings | dict(before):
            if before.get(key) != self.settings.get(key):
                was, is_now = (
                    shorten(json.dumps(settings.get(key), ensure_ascii=False), 120)
                    for settings in (before, self.settings)
                )
                raise UserError(
                    f"{self.path} holds pass rates of other settings: {key} was {was}, now it is {is_now}",
                    where=str(self.path),
                    remedy="give another --output, or remove that file to begin anew",
                )


def weights_identity(folders: Sequence[str | None]) -> list[list[Any]]:
    """Name, size and time of every file with weights, so that a model trained on in the same folder is another one."""
    found: list[list[Any]] = []
    for folder in folders:
        path = Path(folder) if folder else None
        if path is None or not path.exists():
            continue
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        kinds = {".safetensors", ".bin", ".pt", ".ckpt", ".distcp", ".gguf"}
        found += [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files if p.suffix in kinds]
    return found
