"""The flight recorder's files: one rollout whole, token by token, in a safetensors file.

Tensors (N completions in order, whole groups; S tokens of all of them laid end to end, P of the prompts):

=====================  ===========================================================================================
``lengths``            [N] int32: generated tokens of each completion, as the engine drew them
``tokens``             [S] int32
``sampler_logprobs``   [S] float32: engine, when it drew the token
``learner_logprobs``   [S] float32: learner, before the first update
``ref_logprobs``       [S] float32
``entropy``            [S] float32, nats
``values``             [S] float32: critic
``advantages``         [S] float32
``mask``               [S] bool: the token is in the learner's loss; False here for a drawn token is a fault
``reward``             [N] float32: weighted sum; ``reward/<name>`` each term before its weight
``truncated``          [N] bool; ``no_answer`` [N] bool
``policy_version``     [N] int32: of the weights that drew it
``prompt_lengths``     [N / group_size] int32; ``prompt_tokens`` [P] int32
=====================  ===========================================================================================

A tensor that the run does not have is left out. The metadata entry ``rollout`` is JSON: ``step``, ``group_size``,
``temperature``, ``unfinished`` (the run broke off in this step), ``wall_time``, ``prompts`` (id, question, answer) and
``texts``. ``tokens.jsonl`` beside the files holds the text of every token id that occurred.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.utils.files import write_atomically

FOLDER = "flight"
"""In the folder of the run."""
TOKENS_FILE = "tokens.jsonl"
REASON_FILE = "reason.json"

_NAME = re.compile(r"step-(\d+)\.safetensors")


@dataclass(frozen=True)
class RecordedStep:
    """One rollout as it was recorded; ``tensors`` are NumPy arrays under the names of this module's table."""

    step: int
    """Rollouts trained on, this one included."""
    tensors: Mapping[str, Any]
    prompts: Sequence[Mapping[str, Any]]
    texts: Sequence[str]
    group_size: int
    temperature: float
    unfinished: bool

    def rows(self, name: str) -> list[Any]:
        """A per-token tensor cut into the N completions; empty if it was not recorded."""
        import numpy as np

        if name not in self.tensors:
            return []
        return np.split(self.tensors[name], np.cumsum(self.tensors["lengths"])[:-1])


def step_file(folder: Path, step: int) -> Path:
    """Where the record of a step is."""
    return folder / f"step-{step:06d}.safetensors"


def recorded_steps(folder: Path) -> dict[int, Path]:
    """The records in a folder, by step, in order."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def write_step(path: Path, tensors: Mapping[str, Any], rollout: Mapping[str, Any]) -> int:
    """Write a record, whole or not at all, and return its size in bytes.

    Args:
        path: the file.
        tensors: torch tensors on the CPU.
        rollout: the metadata entry.

    Raises:
        OSError: the disk refuses.
    """
    from safetensors.torch import save

    data = save(dict(tensors), metadata={"rollout": json.dumps(rollout)})
    write_atomically(path, data)
    return len(data)


def read_step(path: Path) -> RecordedStep:
    """Read a record.

    Raises:
        ValueError: the file is torn or is no record.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            rollout = json.loads((file.metadata() or {})["rollout"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return RecordedStep(
            step=int(rollout["step"]),
            tensors=tensors,
            prompts=rollout["prompts"],
            texts=rollout["texts"],
            group_size=int(rollout["group_size"]),
            temperature=float(rollout["temperature"]),
            unfinished=bool(rollout["unfinished"]),
        )
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is no flight record: {error}") from error


def read_token_texts(folder: Path) -> dict[int, str]:
    """Text of each token id that occurred."""
    texts: dict[int, str] = {}
    for line in _lines(folder / TOKENS_FILE):
        try:
            number, text = json.loads(line)
            texts[int(number)] = str(text)
        except (ValueError, TypeError):  # a torn last line
            continue
    return texts


def _lines(path: Path) -> Iterator[str]:
    if path.is_file():
        yield from path.read_text(encoding="utf-8").splitlines()


def link_folder(source: Path, target: Path) -> None:
    """Put what is in ``source`` into ``target`` too: hard links where the disk can, copies elsewhere. Sub-folders stay.

    Records are replaced, never changed, so a link keeps what it had.
    """
    import shutil

    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if not path.is_file() or path.name.startswith("."):
            continue
        place = target / path.name
        place.unlink(missing_ok=True)
        try:
            if path.name == TOKENS_FILE:  # grows
                raise OSError
            os.link(path, place)
        except OSError:
            shutil.copy2(path, place)
