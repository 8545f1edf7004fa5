"""Checks of requests to vLLM, in this process or on a server."""

from __future__ import annotations

from collections.abc import Sequence

from lit_grpo.engines.vllm.installed import KEY
from lit_grpo.errors import UserError
from lit_grpo.types import Request, Sampling

LOWEST_TEMPERATURE = 0.01
"""vLLM silently samples at this temperature when a lower one above 0 is asked for."""


def check_requests(requests: Sequence[Request], sampling: Sampling, *, max_model_len: int, vocab_size: int) -> None:
    """Check what vLLM is asked for before any of it is sampled.

    Raises:
        UserError: a request or a setting that vLLM would refuse or quietly change.
    """
    if sampling.max_new_tokens < 1:
        raise UserError(
            f"max_new_tokens is {sampling.max_new_tokens}, must be at least 1", where="data.sampling.max_new_tokens"
        )
    if sampling.temperature < 0 or 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise UserError(
            f"vLLM cannot sample at temperature {sampling.temperature}",
            where="data.sampling.temperature",
            remedy=f"0 (greedy) or at least {LOWEST_TEMPERATURE}",
        )
    for request in requests:
        length = len(request.token_ids)
        if not length:
            raise UserError(f"prompt {request.index} is empty")
        if length + sampling.max_new_tokens > max_model_len:
            raise UserError(
                f"prompt {request.index} has {length} tokens; with max_new_tokens {sampling.max_new_tokens} that "
                f"is more than the engine's max_model_len {max_model_len}",
                where=f"{KEY}.max_model_len",
                remedy=f"raise it to at least {length + sampling.max_new_tokens}, lower max_new_tokens, "
                "or leave out long prompts",
            )
        if min(request.token_ids) < 0 or max(request.token_ids) >= vocab_size:
            raise UserError(
                f"prompt {request.index} holds ids outside the model's vocabulary of {vocab_size}",
                remedy="use the tokenizer of the same model folder",
            )
