"""Where a completion ends because of its text: one idea of it for all engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_grpo.errors import EngineError
from lit_grpo.types import Sampling

_UNDECODABLE = "\ufffd"


class StopStrings:
    """Looks in token ids, as they are sampled, for the token with which the text first holds one of some strings.

    An engine ends a completion behind that token. A token that completes a string may go on behind it (``>`` and a line
    break are often one token); it stays whole, since its id is what was sampled. Special tokens count as the text they
    are written as.

    Args:
        tokenizer: tokenizer of the policy; it only decodes.
        strings: the texts that end a completion.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        # Every token decodes to a byte or more. Decoders treat the first token of a text in ways of their own, as by
        # stripping its space, so a few more are decoded.
        self._window = max(len(text.encode()) for text in self._strings) + 4
        last = {text[-1] for text in self._strings}
        # A character that takes several tokens, which an ASCII one never does, is not to be seen in any of them.
        if not all(character.isascii() for character in last):
            last.add(_UNDECODABLE)
        self._last_characters = None if any(character.isspace() for character in last) else last
        """Characters of which a completing token holds one; None: not known, since decoders strip white space."""
        self._may_complete: dict[int, bool] = {}

    def end(self, ids: Sequence[int], start: int = 0) -> int | None:
        """Return how many of ``ids`` the completion has, or None if it does not end within them.

        Args:
            ids: ids of the completion, without the prompt.
            start: number of ids that are known not to end it.
        """
        for count in range(start + 1, len(ids) + 1):
            if self._completes(ids[count - 1]):
                text = self._tokenizer.decode(list(ids[max(0, count - self._window) : count]))
                if any(string in text for string in self._strings):
                    return count
        return None

    def _completes(self, token: int) -> bool:
        """Say whether a token can be the last one of a string; most cannot, and then nothing else is decoded."""
        if self._last_characters is None:
            return True
        known = self._may_complete.get(token)
        if known is None:
            text = self._tokenizer.decode([token])
            known = not self._last_characters.isdisjoint(text)
            self._may_complete[token] = known
        return known


def stop_strings(sampling: Sampling, tokenizer: Any) -> StopStrings | None:
    """Return what looks for ``sampling.stop``; None if it is empty.

    Raises:
        EngineError: there is no tokenizer to decode with.
    """
    if not sampling.stop:
        return None
    if tokenizer is None:
        raise EngineError("sampling.stop needs the policy's tokenizer, and the engine was made without one")
    return StopStrings(tokenizer, sampling.stop)
