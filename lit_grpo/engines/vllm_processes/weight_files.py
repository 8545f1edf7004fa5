"""The files by which weights are handed to processes, and which stay for one that is started again."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lit_grpo.engines.base import EngineError, NamedWeights
from lit_grpo.engines.vllm.adapters import split
from lit_grpo.engines.vllm_server.weights import write_weights


class WeightFiles:
    """Files of the weights that were loaded last.

    Args:
        scratch: folder for what is handed over.
        adapted: adapters come beside the weights that they belong to, and have a folder of their own.
    """

    def __init__(self, scratch: Path, *, adapted: bool) -> None:
        self._weights, self._adapters = scratch / "weights", scratch / "adapters"
        self._adapted = adapted

    @property
    def folders(self) -> list[Path]:
        """Folders of all that a process needs which has no weights, in the order in which it reads them."""
        return [self._weights, self._adapters] if self._adapted else [self._weights]

    def write(self, stream: NamedWeights, *, adapters_alone: bool) -> list[Path]:
        """Write weights, and return the folders that processes have to read which have the former ones.

        Args:
            stream: the weights.
            adapters_alone: the stream has adapters and nothing beside them: processes have what they belong to.

        Raises:
            EngineError: something came beside the adapters.
            OSError: there is no room for the files.
        """
        if not self._adapted:
            write_weights(self._weights, stream, None)
            return self.folders
        adapters: dict[str, Tensor] = {}
        below = split(stream, adapters)
        if adapters_alone:
            for name, _ in below:
                raise EngineError(f"{name} came beside the adapters, and is none")
        else:
            write_weights(self._weights, below, None)
        write_weights(self._adapters, adapters.items(), None)
        return [self._adapters] if adapters_alone else self.folders
