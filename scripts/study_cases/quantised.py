"""A sampler with few bits: what a quantised rollout engine is to a learner in full precision, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from lit_grpo.engines.base import EngineContext, NamedWeights
from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.errors import UserError
from lit_grpo.types import Completion, Request, Sampling


class QuantisedEngine(TransformersEngine):
    """The transformers engine on a copy of the weights, whose matrices are rounded to a few bits at every sync.

    Greedy completions, which evaluations ask for, come from the learner's own weights: what is learned is to be
    measured, and not what the rounding costs at the time of sampling.

    Args:
        bits: of each weight of a matrix: one of 2^bits - 1 evenly spaced values, the largest of its row in size being
            the outermost. From 2 to 16.
        exact: engine of the greedy completions.
    """

    def __init__(self, *args: Any, bits: int, exact: TransformersEngine, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if not 2 <= bits <= 16:
            raise ValueError(f"bits must be from 2 to 16, is {bits}")
        self.bits, self.exact = bits, exact

    @classmethod
    def from_context(cls, context: EngineContext, **settings: Any) -> Self:
        """Build the engine of a run.

        Args:
            context: of the run.
            settings: ``bits`` and those of ``TransformersEngineConfig``.

        Raises:
            UserError: it would sample while the learner changes its weights, which greedy completions come from.
        """
        if context.beside_learner:
            raise UserError(
                "the engine with few bits takes turns with the learner",
                where="data.engine.custom_engine",
                remedy="leave model.max_staleness at 0",
            )
        bits = int(settings.pop("bits", 8))
        exact = TransformersEngine.from_context(context, **settings)
        model = context.policy.without_adapters()
        return cls(model, context.end_token_ids, exact.batch_size, own_weights=True, bits=bits, exact=exact)

    def sync(self, weights: NamedWeights, version: int) -> None:
        """Copy the weights and round the copies of matrices."""
        super().sync(weights, version)
        self.exact.sync((), version)
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.ndim == 2:
                    weight.copy_(rounded(weight, self.bits))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """See :class:`lit_grpo.engines.base.RolloutEngine`."""
        sampled = super().generate(requests, sampling)
        yield from self.exact.generate(requests, sampling) if sampling.temperature == 0 else sampled

    def close(self) -> None:
        self.exact.close()
        super().close()


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Round each row of a matrix to 2^bits - 1 evenly spaced values around 0, [rows, columns]."""
    steps = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / steps
    return (weight / scale).round() * scale
