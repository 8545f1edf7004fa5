"""The pass rates of a filter run on disk: appended as they are measured, complete up to the moment of a kill."""

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
    """The pass rate of one prompt."""

    id: str
    samples: int
    correct: int
    pass_rate: float
    reward: float
    """Mean total reward of the prompt's completions."""
    truncated: float
    """Share of completions cut by the length limit."""


def rates_path(output: Path, rank: int = 0) -> Path:
    """Name the file of an output file's pass rates: ``kept.rates.jsonl`` for ``kept.jsonl``."""
    stem = output.name.removesuffix(".gz").removesuffix(".jsonl")
    return output.with_name(f"{stem}.rates.{rank}.jsonl" if rank else f"{stem}.rates.jsonl")


def all_rates_paths(output: Path) -> list[Path]:
    """List the files of all ranks of this and of earlier attempts."""
    first = rates_path(output)
    others = output.parent.glob(f"{first.name.removesuffix('.jsonl')}.*.jsonl") if output.parent.is_dir() else ()
    return [path for path in (first, *sorted(others)) if path.is_file()]


class RateJournal:
    """File of pass rates: a line with the settings, then a line for each prompt; a line cut by a kill is dropped.

    Args:
        path: path of the file, which need not exist.
        settings: settings that decide what the rates mean; a file of other settings is never added to.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        # Through JSON and back, so that they compare equal with those in the file: a tuple becomes a list.
        self.path, self.settings = path, json.loads(json.dumps(settings, default=str))
        self._length = 0

    def read(self) -> list[Rate]:
        """Return the rates that the file holds.

        Raises:
            UserError: the file holds rates of other settings, or something else.
        """
        content = self.path.read_bytes() if self.path.is_file() else b""
        # What stands behind the last line feed is half a line that a kill left behind.
        whole = content[: content.rfind(b"\n") + 1]
        self._length = len(whole)
        lines = whole.splitlines()
        if not lines:
            return []
        try:
            self._check_settings(json.loads(lines[0])["settings"])
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
        """Append rates and wait until they are on the disk."""
        text = "".join(json.dumps(asdict(rate), ensure_ascii=False) + "\n" for rate in rates)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("r+b" if self.path.exists() else "w+b") as file:
            # The half line of a kill is cut off, or the next record would be glued to it.
            file.truncate(self._length)
            file.seek(self._length)
            if not self._length:
                text = json.dumps({"settings": self.settings}, ensure_ascii=False) + "\n" + text
            file.write(text.encode())
            # Synced batch by batch: rates cost GPU time, and a batch takes far longer than bringing it to the disk.
            file.flush()
            os.fsync(file.fileno())
            self._length = file.tell()

    def _check_settings(self, earlier: Mapping[str, Any]) -> None:
        for key in self.settings | dict(earlier):
            if earlier.get(key) != self.settings.get(key):
                was, is_now = (
                    shorten(json.dumps(settings.get(key), ensure_ascii=False), 120)
                    for settings in (earlier, self.settings)
                )
                raise UserError(
                    f"{self.path} holds pass rates of other settings: {key} was {was}, now it is {is_now}",
                    where=str(self.path),
                    remedy="give another --output, or remove that file to begin anew",
                )


def weights_identity(folders: Sequence[str | None]) -> list[list[Any]]:
    """List name, size and time of every file with weights in the folders."""
    # A model that was trained on in the same folder is another one, and its path does not tell.
    identity: list[list[Any]] = []
    for folder in folders:
        path = Path(folder) if folder else None
        if path is None or not path.exists():
            continue
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        suffixes = {".safetensors", ".bin", ".pt", ".ckpt", ".distcp", ".gguf"}
        identity += [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files if p.suffix in suffixes]
    return identity
