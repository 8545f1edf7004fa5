"""``torch.compile`` for the learner's passes: each transformer block, and what is done with the logits.

Compiled block by block (*regional* compilation) the compiler works once on a block, whose code all others run, and
sharding, checkpointing and adapters work around the blocks as ever. With ``varlen`` attention a block is one piece; the
padded products of ``sdpa``, which are others in every micro-batch, stay outside and cut it in four.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from lit_grpo.errors import UserError

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
BACKEND = "inductor"
# Policy, critic and reference, with and without gradient, in several number formats: each is a form of its own.
VARIANTS = 64
"""Forms of one piece of code that are compiled before the compiler gives up."""


def compile_blocks(model: nn.Module) -> None:
    """Compile every transformer block, in place, when it is first run. Names of weights stay as they are.

    Raises:
        UserError: transformers names no transformer blocks for the model.
    """
    from lit_grpo.distributed.sharding import blocks
    from lit_grpo.policy.forward import attention

    attention.register(compiles=True)
    try:
        model_blocks = blocks(model)
    except UserError as error:
        raise UserError(error.what, where="model.policy.compile", remedy="set compile: false") from error
    attention.note_reach(model)
    keep_code()
    tell_what_compiles_again()
    dynamo = cast(Any, torch._dynamo).config
    dynamo.recompile_limit = max(dynamo.recompile_limit, VARIANTS)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * VARIANTS)
    # Numbers of a model, such as the epsilon of a norm, never change. The compiler takes them to vary, finds that they
    # are added to tensors, and traces the whole block a second time: also where its code is kept.
    dynamo.specialize_float = True
    for block in model_blocks:
        # Dynamic, since rows have another length in every micro-batch.
        block.compile(dynamic=True, **_backend())


def keep_code() -> None:
    """Let compiled code be kept from run to run, in a folder of this user's that outlives a restart of the machine.

    The compiler keeps it among temporary files otherwise. ``TORCHINDUCTOR_CACHE_DIR`` names another folder.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "lit-grpo" / "inductor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled code is kept among temporary files: %s cannot be made (%s)", folder, error)
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def tell_what_compiles_again() -> None:
    """Let the compiler say what it compiles once more and why, where ``LIT_GRPO_LOG=debug`` asks for it.

    All forms are compiled ahead of the first step; a step that waits for the compiler has met another one.
    ``TORCH_LOGS`` is left as it is.
    """
    if log.isEnabledFor(logging.DEBUG) and not os.environ.get("TORCH_LOGS"):
        torch._logging.set_logs(recompiles=True)


def mark_varying(*tensors: Any) -> None:
    """Tell the compiler that the first size of tensors is another in every micro-batch."""
    # It takes sizes of what it is given to vary, but not those of what it finds inside of an object.
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


def is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


@functools.cache
def compiled(function: F) -> F:
    """Compile a function for inputs of any shape, once for all callers."""
    return cast(F, torch.compile(function, dynamic=True, **_backend()))


def _backend() -> dict[str, Any]:
    """Return the compiler, set so that its code holds for micro-batches of any size."""
    if BACKEND != "inductor":
        return {"backend": BACKEND}
    # On a card it fuses sums over rows with sums over columns only where a micro-batch is large (in torch 2.11 from
    # 5 * 2**20 numbers on): the first large one, in the first step, waited 13 s for other code.
    fusion = "triton.mix_order_reduction"
    return {"backend": BACKEND, "options": {fusion: False} if fusion in torch._inductor.list_options() else {}}


def eagerly() -> AbstractContextManager[None]:
    """Run what is within uncompiled, where compiling does not pay: sampling token by token, a check on few tokens."""
    return cast(AbstractContextManager[None], torch.compiler.set_stance("force_eager"))
