"""The tokens that a vLLM engine in this process samples, taken before vLLM makes its own outputs of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lit_grpo.engines.base import EngineError


class SampledTokens(NamedTuple):
    """The ids that one running sample consists of so far, and the log-probability of each."""

    ids: list[int]
    logprobs: list[float]


class LogprobCollector:
    """Takes each step's ids and log-probabilities from the engine core, and hands the output processor only the ends.

    vLLM's output processor detokenizes, searches stop strings and files log-probabilities by rank, token by token: a
    fifth of the time of sampling from a small model, which is bound by the processor's speed. Nothing of that is wanted
    here. It sees a sample's last output alone, and so still ends each request and reports why it ended. All else that
    ``LLMEngine.step`` does stays vLLM's.

    Statistics of vLLM's own (``disable_log_stats: false``) are counted token by token by the output processor: with
    them on, it sees everything.

    Args:
        engine: a ``vllm.v1.engine.llm_engine.LLMEngine`` whose core is in this process.

    Raises:
        EngineError: this version of vLLM is built otherwise.
    """

    def __init__(self, engine: Any) -> None:
        try:
            self._client, self._all_wanted = engine.engine_core, bool(engine.log_stats)
            self._get_output = self._client.get_output
        except AttributeError as error:
            raise EngineError(f"this version of vLLM hides what its engine samples: {error}") from error
        self._running: dict[str, SampledTokens] = {}
        self._client.get_output = self._take

    @property
    def running(self) -> Mapping[str, SampledTokens]:
        """The tokens so far of every request that is open."""
        return self._running

    def open(self, request_id: str) -> SampledTokens:
        """Take the tokens of a request from now on, by the id that ``LLMEngine.add_request`` returned."""
        tokens = self._running[request_id] = SampledTokens([], [])
        return tokens

    def drop(self, request_id: str) -> None:
        """Forget a request that was aborted. vLLM ignores what still comes of it."""
        self._running.pop(request_id, None)

    def close(self) -> None:
        """Give vLLM its own method back, and hold no reference to the engine any longer."""
        self._running.clear()
        if self._client is not None:
            del self._client.get_output
        self._client = self._get_output = None

    def _take(self) -> Any:
        # The loop below runs once for each token of each sample, so it is kept short: no call that can be spared.
        step = self._get_output()
        running = self._running
        kept = []
        for output in step.outputs:
            tokens = running.get(output.request_id)
            # Not one of ours, or dropped: vLLM deals with it.
            if tokens is None:
                kept.append(output)
                continue
            # One row for each token; the sampled token's own is the first column.
            new = output.new_token_ids
            if len(new) == 1:
                tokens.ids.append(new[0])
                tokens.logprobs.append(output.new_logprobs.logprobs.item(0))
            # Several in one step; there are none where the request ended with an error.
            elif new:
                tokens.ids.extend(new)
                tokens.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())
            if output.finish_reason is not None:
                kept.append(output)
                del running[output.request_id]
        if not self._all_wanted:
            step.outputs = kept
        return step
