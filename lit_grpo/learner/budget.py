"""The bound on a micro-batch, and how it gives way where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from lit_grpo.types import Rollout
from lit_grpo.utils.memory import (
    MemoryShortageError,
    free_what_is_unused,
    is_out_of_memory,
    message_of,
    out_of_memory_error,
)

T = TypeVar("T")

FEWER_ACTIVATIONS = (
    "set model.policy.gradient_checkpointing: true and a smaller model.policy.logits_chunk",
    "lower data.sampling.max_new_tokens or leave out long prompts (data.format.max_prompt_tokens)",
)
"""What a person may do where no smaller micro-batch helps, the cheapest first."""
FEWER_WEIGHTS = (
    "take a smaller model, or hold it in fewer bytes (model.policy.dtype, model.policy.quantization)",
    "train adapters (model.policy.lora), hold optimizer states in 8 bits (model.optimizer.type), or spread the model "
    "over several GPUs (trainer.strategy: fsdp)",
)
"""The same where it is the model itself, or what its optimizer keeps, that does not fit."""
LESS_ENGINE = "leave the learner more of the card: a lower data.engine.gpu_memory_utilization, or data.engine.sleep: 1"


def remedies(device: torch.device | str, *, activations: bool = True) -> tuple[str, ...]:
    """Return what may help on a device, the cheapest first; ``activations``: whether these may be what is large."""
    card = (LESS_ENGINE,) if torch.device(device).type == "cuda" else ()
    return (*(FEWER_ACTIVATIONS if activations else ()), *card, *FEWER_WEIGHTS)


RAISE_AFTER = 20
"""Rollouts in which memory sufficed after which a bound that had become smaller is doubled again."""


@dataclass
class MicroBatchBudget:
    """Bounds on what goes through a model at once. The gradient does not depend on them, memory does.

    A bound that became smaller is doubled again after :data:`RAISE_AFTER` rollouts in which memory sufficed, up to what
    it was: memory may have run out because of one unusual rollout, or of another program on the card. Where it runs out
    at the larger bound once more, the smaller one stays, so that a run which simply needs it pays for one attempt.
    """

    tokens: int | None = None
    """Most tokens; None: no bound yet. A completion that is longer is a micro-batch by itself."""
    size: int | None = None
    """Most completions; None: no bound."""
    halvings: int = 0
    """How often memory ran out, so that the bound on tokens became smaller."""
    highest: int | None = None
    """Bound that may be returned to; None: the present one stays, or never became smaller."""
    sufficed: int = 0
    """Rollouts in which memory sufficed, since the bound last changed; -1 in a rollout in which it became smaller."""
    raised: bool = False
    """Whether the bound has been doubled again."""

    def halve(self, tokens: int) -> None:
        """Allow half of ``tokens``, which were too many, or of the present bound where that is less."""
        bound = tokens if self.tokens is None else min(tokens, self.tokens)
        self._lower(max(1, bound // 2), bound if self.tokens is None else self.tokens)
        self.halvings += 1

    def lower_to(self, tokens: int | None) -> None:
        """Allow no more than ``tokens``, which another rank came to; None: no bound."""
        if tokens is not None and (self.tokens is None or tokens < self.tokens):
            self._lower(tokens, 2 * tokens if self.tokens is None else self.tokens)

    def agree(self, reduce_max: Callable[[Tensor], Tensor]) -> None:
        """Take the smallest bound on tokens that a rank came to; all ranks call it, with a maximum over them."""
        own = float("inf") if self.tokens is None else float(self.tokens)
        found = torch.tensor([-own, -1.0 if self.highest is None else float(self.highest)], dtype=torch.float64)
        least, highest = reduce_max(found).tolist()
        self.lower_to(None if least == float("-inf") else int(-least))
        # A rank that follows another knows its bound, and not what that one had before it.
        if self.highest is not None:
            self.highest = max(self.highest, int(highest))

    def _lower(self, tokens: int, before: int) -> None:
        first = self.highest is None and not self.raised
        self.highest = None if self.raised else before if first else self.highest
        self.tokens, self.sufficed = tokens, -1

    def end_rollout(self) -> bool:
        """Take note that a rollout has been learned from, and tell whether the bound has been doubled for the next.

        Every rank calls it, once all have the same bound, so that it changes on all of them at once.
        """
        self.sufficed += 1
        if self.tokens is None or self.highest is None or self.sufficed < RAISE_AFTER or self.tokens >= self.highest:
            return False
        self.tokens, self.sufficed, self.raised = min(2 * self.tokens, self.highest), 0, True
        return True

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs in order to cut its steps as this one would have."""
        return {"tokens": self.tokens, "highest": self.highest, "sufficed": self.sufficed, "raised": self.raised}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state` returned."""
        self.tokens, self.highest = state["tokens"], state["highest"]
        self.sufficed, self.raised = state["sufficed"], state["raised"]


class MemoryRanOut(Exception):  # noqa: N818 - the step is repeated
    """The decision to do a step again: memory ran out in one of its micro-batches.

    It holds no tensors. The error itself does, by the frames of its traceback.

    Args:
        rows: completions of the micro-batch.
        message: message of the error.
    """

    def __init__(self, rows: Tensor, message: str) -> None:
        self.rows, self.message = rows, message
        super().__init__(message)


def attempt(run: Callable[[], T], rows: Tensor) -> T:
    """Return ``run()``, a pass over completions ``rows``.

    Raises:
        MemoryRanOut: memory ran out in it. Every other error passes as it is.
    """
    try:
        return run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = message_of(error)
    # Outside of the handler, where the error is gone and with it the tensors that its traceback holds.
    raise MemoryRanOut(rows, message)


@dataclass(frozen=True)
class GivesWay:
    """What a rank does when one of its micro-batches does not fit: it makes them smaller, or ends the run."""

    budget: MicroBatchBudget
    tokens_of: Callable[[Rollout, Tensor], int]
    """Number of tokens that go through the model for some completions of a rollout."""
    recover: Callable[[], None] = lambda: None
    """Puts the models back in order after a pass that broke off."""
    refuses: str | None = None
    """Why a pass cannot be done again in this run, in a clause that follows "and"; None: it can."""
    device: torch.device | str = "cpu"
    say: Callable[[str], None] = lambda _: None
    """Tells the person about a smaller budget."""

    def give_way(self, batch: Rollout, failure: MemoryRanOut, doing: str) -> None:
        """Make micro-batches smaller than one that did not fit, and free what it has left behind.

        Args:
            batch: the rollout.
            failure: the micro-batch, and what the allocator said.
            doing: what was being done, in words.

        Raises:
            MemoryShortageError: it was a single completion already, or passes cannot be done again in this run.
        """
        count, tokens = len(failure.rows), self.tokens_of(batch, failure.rows)
        if self.refuses is not None or count == 1:
            raise self._screen(failure.message, doing, count, tokens)
        self.recover()
        free_what_is_unused(self.device)
        before = self.budget.tokens
        self.budget.halve(tokens)
        self.say(
            f"Memory ran out while {doing}, on a micro-batch of {count} completions with {tokens:,} tokens. Nothing is "
            f"lost: it is done again with at most {self.budget.tokens:,} tokens at once "
            f"({'there was no bound' if before is None else f'{before:,} before'}), and so is what follows. "
            f"To begin with that: model.micro_batch_tokens: {self.budget.tokens}."
        )

    def _screen(self, message: str, doing: str, count: int, tokens: int) -> MemoryShortageError:
        what = f"{doing}, on a micro-batch of {count} completion{'s' * (count > 1)} with {tokens:,} tokens"
        steps = list(remedies(self.device))
        if self.refuses is None:
            what += ", which cannot be divided"
        else:
            what += f", and {self.refuses}"
            steps.insert(0, f"set model.micro_batch_tokens to {max(1, tokens // 2)} or less, and go on from the "
                            "last checkpoint")  # fmt: skip
        return out_of_memory_error(what, self.device, message, where="model.micro_batch_tokens", remedies=steps)
