"""What a model's own code does between its backbone's states and its logits: scales, soft caps, slices.

Cohere and Granite scale their logits, Gemma 2 caps them, others scale the states before the head, and every family has
its own name for the number. The model's own code is therefore run, with a stand-in for the backbone whose output is
given, and no name is known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_PROBED = 100.0
"""Largest logit of the probe: soft caps of 15 to 50 change it visibly."""


class OwnLogits(nn.Module):
    """The output layer and everything that the model's own code does around it, [M, D] states -> [M, V] logits.

    Args:
        model: a ``*ForCausalLM`` of transformers; held by reference, its weights are no weights of this module.
        base: its backbone.
    """

    def __init__(self, model: nn.Module, base: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that the weights do not get a second name in checkpoints.
        self._held: tuple[Any, Any] = (model, base)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states as the model would."""
        model, base = self._held
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        with _standing_in(base, hidden[None]):
            # Not ``model(...)``: hooks of the whole model, those of sharding among them, belong to a whole pass.
            logits: Tensor = model.forward(input_ids=ids, use_cache=False).logits
        return logits[0]


def changes_logits(model: nn.Module, base: nn.Module) -> bool:
    """Tell whether the model's own code does more with its backbone's states than to give them to its output layer.

    Needs no weights: backbone and output layer both have stand-ins.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        return True
    # On the CPU although models are also made on the meta device, where nothing can be compared.
    with torch.device("cpu"):
        return _probe(model, base, head)


def _probe(model: nn.Module, base: nn.Module, head: Any) -> bool:
    states = torch.linspace(-1.0, 1.0, 16).view(1, 2, 8)
    logits = torch.linspace(-_PROBED, _PROBED, 2 * int(head.weight.shape[0])).view(1, 2, -1)
    seen: list[Tensor] = []

    def instead(given: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append(given)
        return logits

    called: list[bool] = []
    own = vars(head).get("forward")
    head.forward = instead
    try:
        with _standing_in(base, states) as called, torch.no_grad():
            ids = torch.zeros(1, 2, dtype=torch.long)
            out = model.forward(input_ids=ids, use_cache=False).logits
    except Exception:
        # Layers between backbone and output layer fail on states of this size: they are the model's own code too.
        return bool(called)
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own
    # A model that does not call its backbone as a whole (OPT) has nothing for which something could stand in. The
    # policy's check against the model's own forward pass decides.
    return bool(called) and not (len(seen) == 1 and torch.equal(seen[0], states) and torch.equal(out, logits))


class _Output:
    """What a backbone returns, as far as code that makes logits reads it."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        # Caches, attentions and the like: none.

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


@contextmanager
def _standing_in(base: Any, states: Tensor) -> Iterator[list[bool]]:
    own = vars(base).get("forward")
    called: list[bool] = []

    def instead(*_: Any, **__: Any) -> _Output:
        called.append(True)
        return _Output(states)

    base.forward = instead
    try:
        yield called
    finally:
        if own is None:
            del base.forward
        else:
            base.forward = own
