"""What ``ckpt_path: last`` and ``best`` mean: the checkpoints of the run that is named, else of the newest run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lit_grpo.callbacks.rollout_checkpoint import BEST, LAST
from lit_grpo.errors import UserError
from lit_grpo.run.checkpoints import ROLLBACK_FOLDER
from lit_grpo.run.folder import shown
from lit_grpo.tracking.run_note import RUN_FILE
from lit_grpo.utils.spelling import near_files

Word = Literal["last", "best"]
WORDS: dict[str, str] = {"last": LAST, "best": BEST}
"""Name of the link in a folder of checkpoints by the word that stands for it."""
LIGHTNINGS_WORDS = ("last", "best", "hpc")
"""Words in the place of a path that Lightning knows."""


@dataclass(frozen=True)
class CheckpointPlaces:
    """Where the checkpoints of earlier runs may lie.

    Attributes:
        folders: folders of checkpoints that were named; where there are any, nothing else is looked at.
        runs: folders of runs, each with ``checkpoints`` in it.
        roots: folders of all runs, looked at where no run is named.
    """

    folders: Sequence[Path] = ()
    runs: Sequence[Path] = ()
    roots: Sequence[Path] = field(default_factory=tuple)

    def find(self, word: Word) -> Path | None:
        """Return the newest checkpoint that a word stands for; None if there is none."""
        if self.folders:
            candidates: Iterable[Path] = self.folders
        elif self.runs:
            candidates = [run / "checkpoints" for run in self.runs]
        else:
            candidates = [folder for root in self.roots if root.is_dir() for folder in root.glob("*/checkpoints")]
        found = [folder / WORDS[word] for folder in candidates if (folder / WORDS[word]).exists()]
        return max(found, key=lambda path: path.stat().st_mtime, default=None)

    def begun(self) -> Path | None:
        """Return the newest folder of a named run that was ended before its first checkpoint; None if there is none.

        Such a run begins anew in its folder, where nothing can be lost but the rollouts that are made again.
        """
        begun = [run for run in self.runs if (run / RUN_FILE).is_file()]
        # One checkpoint, of whatever name, is worth a folder of its own for the next run of that name.
        if self.folders or any(_has_checkpoint(run) for run in self.runs):
            return None
        return max(begun, key=lambda run: (run / RUN_FILE).stat().st_mtime, default=None)

    def newer_without(self, found: Path) -> Path | None:
        """Return the newest run, where it has no checkpoint and ``found`` is of an earlier one; None otherwise."""
        if self.folders or self.runs:
            return None
        runs = [file.parent for root in self.roots if root.is_dir() for file in root.glob(f"*/{RUN_FILE}")]
        newest = max(runs, key=lambda run: (run / RUN_FILE).stat().st_mtime, default=None)
        return None if newest is None or newest == found.parent.parent or _has_checkpoint(newest) else newest

    def described(self) -> str:
        """Return the places in words."""
        places = self.folders or [run / "checkpoints" for run in self.runs] or self.roots
        return " and ".join(shown(place) for place in places)


def _has_checkpoint(run: Path) -> bool:
    return any((run / folder).is_dir() and any((run / folder).iterdir()) for folder in ("checkpoints", ROLLBACK_FOLDER))


def runs_named(root: Path, name: str) -> list[Path]:
    """Return the folders of all runs of one name: ``root/name`` and, of later ones, ``root/name-2`` and so on."""
    later = [path for path in root.glob(f"{name}-*") if path.name.removeprefix(f"{Path(name).name}-").isdigit()]
    return [root / name, *later]


def begins_anew(places: CheckpointPlaces) -> str:
    """Say why a fit with ``last`` begins anew, and where."""
    if (run := places.begun()) is not None:
        return f"ckpt_path: last: the run {shown(run)} was ended before its first checkpoint, and begins anew there"
    return f"ckpt_path: last: there is no checkpoint in {places.described()} yet; the run begins anew"


def check_is_there(ckpt_path: str | Path) -> None:
    """Check that a checkpoint that is named by its path is there, before a model is loaded.

    Raises:
        UserError: it is not.
    """
    # Lightning has words of its own (hpc, registry), and a place that is no path of this machine is a remote store.
    name = str(ckpt_path)
    if name in LIGHTNINGS_WORDS or name.startswith("registry") or "://" in name or Path(name).exists():
        return
    folder = Path(name).parent
    near = near_files(Path(name).name, [one.name for one in folder.glob("*.ckpt")])
    raise UserError(
        f"there is no checkpoint {name}",
        where="ckpt_path",
        remedy=f"did you mean {folder / near[0]}?"
        if near
        else "give the path of one, for example runs/NAME/checkpoints/last.ckpt, or `last` or `best`",
    )


def no_checkpoint(word: Word, places: CheckpointPlaces) -> UserError:
    """Return the error of a word that stands for nothing."""
    return UserError(
        f"there is no {word} checkpoint in {places.described()}",
        where="ckpt_path",
        remedy="give the path of one, for example runs/NAME/checkpoints/last.ckpt"
        + ("; the best is kept where rollouts are evaluated (data.val)" if word == "best" else ""),
    )
