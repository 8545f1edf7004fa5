"""Running samples that need nothing but their next token for some steps, and are counted when those are over."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lit_grpo.engines.vllm.tokens import SampledTokens

_FORGOTTEN = 512
"""So many samples that have ended may be remembered before they are looked for."""


class Steady:
    """A sample, and what is known of it for the steps until it is due.

    Args:
        request: vLLM's own record of it, whose counters stand where they stood when it became steady.
        tokens: where its tokens are collected.
    """

    # Read once for each token.
    __slots__ = (
        "add_id", "add_taken_id", "add_taken_logprob", "add_to_all", "computed", "ends", "outputs", "request",
        "scheduled", "updated",
    )  # fmt: skip

    def __init__(self, request: Any, tokens: SampledTokens) -> None:
        params = request.sampling_params
        self.request = request
        self.add_id, self.add_to_all = request._output_token_ids.append, request._all_token_ids.append
        self.add_taken_id, self.add_taken_logprob = tokens.ids.append, tokens.logprobs.append
        self.ends = frozenset([params.eos_token_id, *params.stop_token_ids])
        """Ids that end it."""
        self.computed = self.outputs = 0
        """Tokens in the cache and sampled tokens, those under way included, when it became steady; both less the steps
        that were scheduled by then."""
        self.scheduled = self.updated = 0
        """Steps that were scheduled, and whose tokens were filed, when it became steady."""


class SteadySamples:
    """The samples that are steady, and the steps that they have behind them.

    A step changes four counters of every running sample by one. For a sample that is known to need no block, to fill
    none and to reach no limit in the following steps nobody reads them, and they are written at once when it is due.
    Its tokens are filed in every step.

    Every steady sample is part of every step, so all that must be kept is how many steps there were.

    Args:
        scheduler: of vLLM's engine.
        ahead: whether a step is scheduled before the tokens of the last are known.
        size: tokens of a block.
    """

    def __init__(self, scheduler: Any, *, ahead: bool, size: int) -> None:
        self._scheduler, self._ahead, self._size = scheduler, ahead, size
        self._staggered = ahead and bool(scheduler.use_v2_model_runner)
        self._due: dict[int, list[str]] = {}
        """Samples by the number of the step before which their counters must be written."""
        self._known: dict[str, Steady] = {}
        """Samples that are or were steady: most become so again and again."""
        self.samples: dict[str, Steady] = {}
        """By vLLM's id of the request."""
        self.scheduled = self.updated = 0
        """Steps that were scheduled, and whose tokens were filed."""
        self.under_way = 0
        """Steps whose tokens were not known when the last one was scheduled."""

    def begin(self) -> None:
        """Write what must be known before the next step is scheduled."""
        under_way = self.scheduled - self.updated
        # When a sample is due follows from it.
        if under_way != self.under_way:
            self.write_all()
            self.under_way = under_way
        for name in self._due.pop(self.scheduled, ()):
            if name in self.samples:
                self.write(name)

    def keep(self, names: Collection[str]) -> None:
        """Forget all samples but these; the others were taken off from outside."""
        for name in self.samples.keys() - names:
            del self.samples[name]

    def add(self, request: Any, tokens: SampledTokens, steps: int) -> None:
        """Take a sample whose step was just scheduled and counted, and that is not due for ``steps`` more of them."""
        name = request.request_id
        one = self._known.get(name)
        if one is None or one.request is not request:
            if len(self._known) > 2 * len(self.samples) + _FORGOTTEN:
                self._known = {key: one for key, one in self._known.items() if not one.request.is_finished()}
            one = self._known[name] = Steady(request, tokens)
        one.computed = request.num_computed_tokens - self.scheduled
        one.outputs = len(request._output_token_ids) + request.num_in_flight_tokens - self.scheduled
        one.scheduled, one.updated = self.scheduled, self.updated
        self.samples[name] = one
        self._due.setdefault(self.scheduled + steps, []).append(name)

    def write(self, name: str) -> None:
        """Bring the counters of a sample up to date. It is steady no more."""
        one = self.samples.pop(name)
        request, scheduled = one.request, self.scheduled - one.scheduled
        under_way = scheduled - (self.updated - one.updated)
        request.num_computed_tokens += scheduled
        request.num_in_flight_tokens += under_way
        if self._ahead:
            request.num_output_placeholders += under_way
        if self._staggered and scheduled:
            request.next_decode_eligible_step = self._scheduler.current_step + 1
        if len(request._all_token_ids) // self._size > len(request.block_hashes):
            request.update_block_hashes()

    def write_all(self) -> None:
        """Bring the counters of all samples up to date."""
        for name in list(self.samples):
            self.write(name)
        self._due.clear()
