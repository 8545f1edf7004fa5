"""Checks of a vLLM server that is running: whether a run can use it, and what to type if not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lit_grpo.engines.vllm.installed import KEY
from lit_grpo.engines.vllm.start import OTHER_ENGINE
from lit_grpo.engines.vllm_server.client import GENERATE, Client, ServerRefusal, ServerTrouble
from lit_grpo.engines.vllm_server.worker import EXTENSION, SHAPE
from lit_grpo.errors import UserError

HAND_COMMAND = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --skip-tokenizer-init --generation-config vllm "
    f"--logprobs-mode processed_logprobs --worker-extension-cls {EXTENSION}"
)
FACTS = ("logprobs_mode", "device", "chunked_prefill", "shape", "max_model_len", "dtype", "altering")
"""What a worker must tell of itself."""


def check_server(
    client: Client,
    call_workers: Callable[[str], list[dict[str, Any]]],
    model_config: Any,
    max_model_len: int,
    own_log: Callable[[], str] | None = None,
) -> dict[str, Any]:
    """Check that the server has what a run needs.

    Args:
        client: connected to the server.
        call_workers: calls a method of :class:`lit_grpo.engines.vllm_server.worker.WeightLoader` in every worker.
        model_config: transformers configuration of the policy.
        max_model_len: longest prompt plus completion, in tokens, that the run will ask for.
        own_log: tells the end of the log of a server that the run has started; None: somebody else has.

    Returns:
        What the server's first worker says of itself.

    Raises:
        UserError: the server fails, lacks something, or serves another model.
    """
    try:
        return _checked_facts(client, call_workers, model_config, max_model_len)
    except UserError as error:
        if own_log is None:
            raise
        # What a server that is started by hand may lack is not why one fails that was started with all of it.
        cause = error.__cause__ if isinstance(error.__cause__, (ServerRefusal, ServerTrouble)) else error.what
        raise UserError(
            f"the vLLM server that was started for this run cannot be used: {str(cause).rstrip('.')}. {own_log()}",
            where=KEY,
            remedy=f"mend what the log names ({KEY}.args, {KEY}.server, or the model); {OTHER_ENGINE}",
        ) from error


def _checked_facts(
    client: Client, call_workers: Callable[[str], list[dict[str, Any]]], model_config: Any, max_model_len: int
) -> dict[str, Any]:
    where, remedy = f"{KEY}.server.url", f"start it like this: {HAND_COMMAND}"
    try:
        facts = call_workers("lit_grpo_facts")[0]
        client.post("/update_weight_version", {"new_version": "none"})
    except ServerRefusal as error:
        message = "the vLLM server takes no weights: it was started without VLLM_SERVER_DEV_MODE=1"
        raise UserError(f"{message} ({error})", where=where, remedy=remedy) from error
    except ServerTrouble as error:
        message = f"the vLLM server's workers know nothing of lit-grpo: they need --worker-extension-cls {EXTENSION}"
        raise UserError(f"{message} ({error})", where=where, remedy=remedy) from error
    probe = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "logprobs": 0, "detokenize": False}}
    try:
        answer = client.post(GENERATE, probe)
    except ServerRefusal as error:
        message = "the vLLM server does not take token ids: it was started without --enable-scale-out"
        raise UserError(f"{message} ({error})", where=where, remedy=remedy) from error
    except ServerTrouble as error:
        raise UserError(f"the vLLM server cannot sample: {error}", where=where, remedy=remedy) from error
    try:
        tells_version = bool(answer["choices"][0].get("weight_versions"))
        missing = [name for name in FACTS if name not in facts] or [
            n for n in ("get",) if not hasattr(facts["shape"], n)
        ]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"the server's answers are not those of vLLM: {type(error).__name__}: {error}", where=where, remedy=remedy
        ) from error
    if missing:
        raise UserError(
            f"the vLLM server's workers do not tell their {', '.join(missing)}: they run another version of lit-grpo",
            where=where,
            remedy=remedy,
        )
    if not tells_version:
        raise UserError(
            "the vLLM server does not say which weights sampled a token", where=where, remedy="use vLLM 0.32 or newer"
        )
    if facts["logprobs_mode"] != "processed_logprobs":
        raise UserError(
            f"the vLLM server gives {facts['logprobs_mode']}, training needs the probabilities after temperature",
            where=where,
            remedy="start it with --logprobs-mode processed_logprobs",
        )
    if facts["altering"]:
        option = str(facts["altering"][0]).replace("_", "-")
        raise UserError(
            f"the vLLM server was started with --{option}: what it samples, or says of it, is not what the learner "
            "computes with",
            where=where,
            remedy=f"start it without --{option}",
        )
    if facts["device"] == "cpu" and facts["chunked_prefill"]:
        raise UserError(
            "the vLLM server on CPU would die of the first long prompt that it splits: it cannot do so with seeds",
            where=where,
            remedy="start it with --no-enable-chunked-prefill",
        )
    text = model_config.get_text_config()
    for name in SHAPE:
        served, own = facts["shape"].get(name), getattr(text, name, None)
        if served != own:
            raise UserError(
                f"the vLLM server serves another model: its {name} is {served}, the policy's is {own}",
                where=where,
                remedy="start it with the model folder of the policy",
            )
    if facts["max_model_len"] < max_model_len:
        raise UserError(
            f"the vLLM server's max_model_len is {facts['max_model_len']}, the run needs {max_model_len}",
            where=where,
            remedy=f"start it with --max-model-len {max_model_len}",
        )
    return facts
