"""Checks of what an engine gives, whichever it is: ids of the vocabulary, with the log-probability that each had."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from lit_grpo.engines.base import EngineError
from lit_grpo.types import Completion, Request, Sampling

ROUNDING = 1e-2
"""Nats that a log-probability may lie above 0: a sum of exponentials in bfloat16 is no more exact."""
GUARD = "model.guards.max_engine_gap"


def check_completion(
    completion: Completion,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    vocab_size: int | None = None,
    needs_logprobs: bool = True,
) -> None:
    """Check one completion before anything is made of it.

    Args:
        completion: what the engine gave.
        requests: what it was asked for, by the number that the completion names.
        sampling: how it was to sample.
        vocab_size: number of ids that the policy knows; None: not known.
        needs_logprobs: whether every sampled id must have a log-probability. Otherwise they may be missing altogether,
            or NaN, which both say that they are unknown.

    Raises:
        EngineError: the completion answers no request, is too long, holds an id that is none, or a log-probability that
            is none or of an event that cannot happen.
    """
    asked = {request.index: request for request in requests}.get(completion.request)
    if asked is None or not 0 <= completion.sample < len(asked.seeds):
        raise EngineError(
            f"the engine gave sample {completion.sample} of request {completion.request}, which was not asked for"
        )
    name = f"sample {completion.sample} of request {completion.request}"
    ids, logprobs = completion.token_ids, completion.logprobs
    if len(ids) > sampling.max_new_tokens:
        raise EngineError(f"the engine gave {name} with {len(ids)} ids; at most {sampling.max_new_tokens} were allowed")
    if completion.finish_reason not in ("stop", "length"):
        raise EngineError(f"the engine ended {name} with {completion.finish_reason!r}, not by stop or length")
    if not _are_ids(ids, vocab_size):
        token, place = next((t, i) for i, t in enumerate(ids) if not _are_ids((t,), vocab_size))
        size = "" if vocab_size is None else f" of {vocab_size} ids"
        raise EngineError(
            f"the engine gave {name} with the id {token!r} at place {place}, outside the policy's vocabulary{size}: "
            "does it serve another model, or has it another tokenizer?"
        )
    if needs_logprobs and not logprobs and ids:
        raise EngineError(
            f"the engine gave {name} without log-probabilities, so that nothing can tell whether it samples from the "
            f"policy. Let it give them; {GUARD}: null trains without that guard"
        )
    if len(logprobs) != len(ids) and (needs_logprobs or logprobs):
        raise EngineError(f"the engine gave {name} with {len(ids)} ids and {len(logprobs)} log-probabilities")
    if not all(_is_number(kind) for kind in set(map(type, logprobs))):
        raise EngineError(f"the engine gave {name} with log-probabilities that are no numbers")
    # A sum shows a NaN or an infinity among many as one does alone, and takes no loop in Python.
    if logprobs and not (math.isfinite(sum(logprobs)) and max(logprobs) <= ROUNDING):
        for place, logprob in enumerate(logprobs):
            if -math.inf < logprob <= ROUNDING or (math.isnan(logprob) and not needs_logprobs):
                continue
            raise EngineError(
                f"the engine gave {name} with the log-probability {logprob} at place {place} of {len(ids)}, which no "
                "token that was sampled can have: its weights or its logits are no longer finite, or it reports the "
                "probabilities of another distribution"
            )


def _is_number(kind: type) -> bool:
    return kind is not bool and hasattr(kind, "__float__")


def _are_ids(ids: Sequence[object], vocab_size: int | None) -> bool:
    # A float that happens to be whole, or a truth value, is a sign of a broken answer. NumPy's integers are none.
    if not ids:
        return True
    if any(kind is bool or not hasattr(kind, "__index__") for kind in set(map(type, ids))):
        return False
    numbers = cast(Sequence[int], ids)
    return min(numbers) >= 0 and (vocab_size is None or max(numbers) < vocab_size)
