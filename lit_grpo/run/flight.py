"""The files of the flight recorder: one whole rollout, token by token, in each safetensors file.

Tensors, for N completions in order of their groups, their S tokens laid end to end, and P tokens of the prompts:

=====================  ===========================================================================================
``lengths``            [N] int32: generated tokens of each completion, as the engine drew them
``tokens``             [S] int32
``sampler_logprobs``   [S] float32: log-probability in the engine, when it drew the token
``learner_logprobs``   [S] float32: log-probability in the learner, before the first update
``ref_logprobs``       [S] float32: log-probability in the reference model
``entropy``            [S] float32, nats
``values``             [S] float32: value of the critic
``advantages``         [S] float32
``mask``               [S] bool: the token is in the learner's loss; a drawn token with False is a fault
``reward``             [N] float32: weighted sum; ``reward/<name>``: each term before its weight; NaN: none was given
``correct``            [N] bool: what the primary reward says, before label noise
``judged``             [N] bool: ``correct`` says anything of it; left out where it does of all
``truncated``          [N] bool; ``no_answer`` [N] bool
``policy_version``     [N] int32: version of the weights that drew the completion
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
"""Name of the recorder's folder in the folder of the run."""
TOKENS_FILE = "tokens.jsonl"
REASON_FILE = "reason.json"

_NAME = re.compile(r"step-(\d+)\.safetensors")


@dataclass(frozen=True)
class RecordedStep:
    """One rollout as the flight recorder kept it.

    Attributes:
        step: number of rollouts trained on, this one included.
        tensors: NumPy arrays under the names of this module's table.
        prompts: id, question and answer of each group's prompt.
        texts: text of each completion.
        group_size: number of completions of each prompt.
        temperature: sampling temperature.
        unfinished: True if the run broke off in this step.
    """

    step: int
    tensors: Mapping[str, Any]
    prompts: Sequence[Mapping[str, Any]]
    texts: Sequence[str]
    group_size: int
    temperature: float
    unfinished: bool

    def rows(self, name: str) -> list[Any]:
        """Cut a per-token tensor into those of the N completions; empty if it was not recorded."""
        import numpy as np

        if name not in self.tensors:
            return []
        # Completions lie end to end without padding, so the running sum of their lengths says where each begins.
        return np.split(self.tensors[name], np.cumsum(self.tensors["lengths"])[:-1])


def step_file(folder: Path, step: int) -> Path:
    """Return the path of a step's record."""
    return folder / f"step-{step:06d}.safetensors"


def recorded_steps(folder: Path) -> dict[int, Path]:
    """Map each recorded step in a folder to its file, in order."""
    if not folder.is_dir():
        return {}
    found = {int(match[1]): path for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def write_step(path: Path, tensors: Mapping[str, Any], rollout: Mapping[str, Any]) -> int:
    """Write the record of one rollout, whole or not at all, and return its size in bytes.

    Args:
        path: the file to write.
        tensors: torch tensors on the CPU, under the names of this module's table.
        rollout: the metadata entry ``rollout``.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors.torch import save

    # To memory first, since safetensors would write straight to the name that readers look for.
    data = save(dict(tensors), metadata={"rollout": json.dumps(rollout)})
    # In every step: no step waits for a disk that a checkpoint is being written to.
    write_atomically(path, data, to_disk=False)
    return len(data)


def read_step(path: Path) -> RecordedStep:
    """Read the record of one rollout.

    Raises:
        ValueError: the file is torn, or is not a record.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            rollout = json.loads((file.metadata() or {})["rollout"])
            # The file is no mapping, so it can only be asked for its keys.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
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
    """Read the text of each token id that occurred in the records of a folder."""
    texts: dict[int, str] = {}
    for line in _lines(folder / TOKENS_FILE):
        try:
            number, text = json.loads(line)
            texts[int(number)] = str(text)
        # A run that was killed may leave half a line.
        except (ValueError, TypeError):
            continue
    return texts


def _lines(path: Path) -> Iterator[str]:
    if path.is_file():
        yield from path.read_text(encoding="utf-8").splitlines()


def link_folder(source: Path, target: Path) -> None:
    """Add the files of ``source`` to ``target``: as hard links where the disk has them, else as copies.

    Sub-folders are left out.
    """
    import shutil

    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if not path.is_file() or path.name.startswith("."):
            continue
        destination = target / path.name
        # A link cannot be made over a file that is there.
        destination.unlink(missing_ok=True)
        # Records are replaced, never changed, so a link keeps what it had. The file of token texts grows in place.
        if path.name == TOKENS_FILE:
            shutil.copy2(path, destination)
            continue
        try:
            os.link(path, destination)
        except OSError:
            shutil.copy2(path, destination)
