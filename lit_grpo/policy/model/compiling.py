"""``torch.compile`` for the learner's passes: each transformer block, and what is done with the logits.

Compiled block by block (*regional* compilation) the compiler works once on a block, whose code all others run, and
sharding, checkpointing and adapters work around the blocks as ever. With ``varlen`` attention a block is one piece; the
padded products of ``sdpa``, which are others in every micro-batch, stay outside and cut it in four.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from lit_grpo.errors import UserError

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
    dynamo = cast(Any, torch._dynamo).config
    dynamo.recompile_limit = max(dynamo.recompile_limit, VARIANTS)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 4 * VARIANTS)
    for block in model_blocks:
        # Dynamic, since rows have another length in every micro-batch.
        block.compile(dynamic=True, backend=BACKEND)


def is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


@functools.cache
def compiled(function: F) -> F:
    """Compile a function for inputs of any shape, once for all callers."""
    return cast(F, torch.compile(function, dynamic=True, backend=BACKEND))


def eagerly() -> AbstractContextManager[None]:
    """Run what is within uncompiled, where compiling does not pay: sampling token by token, a check on few tokens."""
    return cast(AbstractContextManager[None], torch.compiler.set_stance("force_eager"))
