"""The prompts of a stage: several sets by name, each made once for a vocabulary, with what looks wrong with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lit_grpo.data.doubts import Doubt, doubts_of, shown_prompt
from lit_grpo.data.prompt_set import PromptSet, in_both
from lit_grpo.data.template import PromptFormat
from lit_grpo.errors import UserError
from lit_grpo.types import Prompt, Sampling

TRAIN = "train"
"""Name of the training prompts; those of evaluation sets are called ``val/NAME`` and ``test/NAME``."""
_SHOWN_CHARACTERS = 400
"""Most characters of the first prompt that a run shows at its beginning; ``lit-grpo check`` shows more."""


class Remark(NamedTuple):
    """One thing that a person is told about the prompts."""

    text: str
    warns: bool = False
    """Whether it looks wrong."""


class PromptSets:
    """Sets of prompts by name, as token ids of one vocabulary."""

    def __init__(self) -> None:
        self.sets: dict[str, PromptSet] = {}
        self._doubts: dict[str, list[Doubt]] = {}
        """What looks wrong with the prompts of each set."""
        self._made_for: dict[str, Any] = {}
        """Template and vocabulary that each set was made with."""
        self._hashed: tuple[Any, str] | None = None
        """The tokenizer whose words were hashed last, and their hash."""

    def vocabulary(self, tokenizer: Any) -> str:
        """Return a hash of a tokenizer's words with their ids."""
        # By the object, since one data module may be used with the models of several fits.
        if self._hashed is None or self._hashed[0] is not tokenizer:
            words = json.dumps(sorted(tokenizer.get_vocab().items()))
            self._hashed = tokenizer, hashlib.sha256(words.encode()).hexdigest()
        return self._hashed[1]

    def holds(self, name: str, form: PromptFormat, tokenizer: Any, *, taught: bool = False) -> bool:
        """Tell whether a set was made already, for the same template and vocabulary.

        The ids of another vocabulary mean another text.

        Args:
            name: name of the set.
            form: how a question becomes token ids.
            tokenizer: tokenizer of the policy.
            taught: whether the prompts are those whose solutions are taught.
        """
        return self._made_for.get(name) == self._made_with(form, tokenizer, taught)

    def put(
        self,
        name: str,
        prompts: PromptSet,
        form: PromptFormat,
        tokenizer: Any,
        ends: Sequence[int],
        *,
        taught: bool = False,
    ) -> None:
        """Keep a set that was made.

        Args:
            name: name of the set.
            prompts: its prompts.
            form: as of :meth:`holds`.
            tokenizer: likewise.
            ends: ids that end a completion.
            taught: as of :meth:`holds`.
        """
        self._doubts[name] = doubts_of(prompts.prompts, form, tokenizer, ends)
        self.sets[name], self._made_for[name] = prompts, self._made_with(form, tokenizer, taught)

    def _made_with(self, form: PromptFormat, tokenizer: Any, taught: bool) -> Any:
        return form.identity(tokenizer), self.vocabulary(tokenizer), taught

    def identity(self, form: PromptFormat, tokenizer: Any) -> dict[str, Any]:
        """Return what the training prompts and their order depend on, for the check of a checkpoint."""
        return {
            "format": form.identity(tokenizer),
            # Ids of another vocabulary, of the same size, mean other text to the same weights.
            "vocabulary": self.vocabulary(tokenizer),
            "prompts": self.sets[TRAIN].identity(),
        }

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt of all sets; 0 if there is none yet."""
        return max((len(prompt.token_ids) for one in self.sets.values() for prompt in one.prompts), default=0)

    def shortest(self, count: int) -> list[Prompt]:
        """Return the shortest prompts of all sets, fewer than ``count`` if there are no more, none of them twice."""
        prompts = {prompt.token_ids: prompt for one in self.sets.values() for prompt in one.prompts}
        return [prompts[ids] for ids in sorted(prompts, key=lambda ids: (len(ids), ids))[:count]]

    def report(self, form: PromptFormat, tokenizer: Any) -> Iterator[Remark]:
        """Yield how prompts are made, what looks wrong with them, and the first of them."""
        yield Remark(f"prompts are made with {form.describe(tokenizer)}")
        for sentence in form.warnings(tokenizer):
            yield Remark(f"data.format: {sentence}.", warns=True)
        for name, one in self.sets.items():
            for doubt in self._doubts[name]:
                yield Remark(f"{one.name}: {doubt.what}. Remedy: {doubt.remedy}.", warns=True)
        if self.sets:
            first = self.sets.get(TRAIN) or next(iter(self.sets.values()))
            yield Remark(shown_prompt(first.prompts[0], tokenizer, _SHOWN_CHARACTERS))
        for name, held_out in self.sets.items() if TRAIN in self.sets else ():
            if name != TRAIN and (count := in_both(self.sets[TRAIN].prompts, held_out.prompts)):
                yield Remark(
                    f"{count:,} training questions are also in {held_out.name}; data.clean: {{held_out: true}} "
                    "leaves them out"
                )


def check_lengths(
    prompts: PromptSet, where: str, samplings: Sequence[Sampling], *, vocabulary: int, positions: int | None
) -> None:
    """Check that the model has a position for every token of a prompt and its completion, and the ids that end one.

    Args:
        prompts: the prompts of a set.
        where: key of their source in the configuration, for a prompt whose line is not known.
        samplings: all ways in which completions are drawn. They share one engine, so that the longest limit counts.
        vocabulary: number of tokens of the tokenizer.
        positions: number of positions of the model; None: no limit.

    Raises:
        UserError: an id that ends a completion is no token, or the longest prompt leaves too little room.
    """
    for sampling in samplings:
        if beyond := [token for token in sampling.stop_token_ids if token >= vocabulary]:
            raise UserError(
                f"stop_token_ids holds {beyond[0]}, and the tokenizer has {vocabulary} tokens",
                where="data.sampling.stop_token_ids",
                remedy=f"give ids below {vocabulary}, or texts with stop",
            )
    if positions is None or not prompts.prompts:
        return
    longest = max(prompts.prompts, key=lambda prompt: len(prompt.token_ids))
    length, new = len(longest.token_ids), max(sampling.max_new_tokens for sampling in samplings)
    if length + new > positions:
        room = positions - new
        raise UserError(
            f"the prompt of row {longest.id!r} has {length} tokens; with {new} new tokens that is "
            f"more than the {positions} positions of the model",
            where=prompts.locations.get(longest.id) or where,
            remedy="lower data.sampling.max_new_tokens"
            + (
                f", or set data.format: {{max_prompt_tokens: {room}, on_long: drop}}"
                if room > 0
                else f" below {positions - length + 1}"
            ),
        )
