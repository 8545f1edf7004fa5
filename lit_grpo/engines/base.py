"""What a rollout engine is: prompts in, completions out as they finish, weights in when they changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from lit_grpo.errors import EngineError as EngineError
from lit_grpo.types import Completion, Request, Sampling

NamedWeights = Iterable[tuple[str, Tensor]]
"""(transformers parameter name, full tensor), one at a time so that a sharded policy is gathered layer by layer."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions with the weights of one policy version.

    An engine knows nothing of rewards or groups. It returns ids exactly as they were drawn, with the log-probability
    that each had, and stamps the version of the weights that were loaded.
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first sync."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield ``len(request.seeds)`` completions for every request, in any order, as they finish.

        Raises:
            EngineError: the engine cannot go on; no completion is lost or yielded twice before it.
        """
        ...

    def sync(self, weights: NamedWeights, version: int) -> None:
        """Load the weights of ``version`` and forget everything computed from older ones (prefix cache included)."""
        ...

    def close(self) -> None:
        """Free processes and memory. Safe to call twice."""
        ...
