"""Text of completions, and text for messages, tables and parameters that have limited room."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any


def completion_text(tokenizer: Any, token_ids: Sequence[int], end_token_ids: Collection[int]) -> str:
    """Decode a completion as rewards see it: without the token that ended it, padding and beginnings, with all others.

    Tags such as ``<think>`` and ``<answer>`` are special tokens of some tokenizers, which a decoder that leaves out all
    special tokens would take away with the end.

    Args:
        tokenizer: of the policy.
        token_ids: ids of the completion, the end token included if it was drawn.
        end_token_ids: ids that end a completion.
    """
    ids = list(token_ids)
    if ids and ids[-1] in end_token_ids:
        ids.pop()
    # A policy of random weights draws these too. They stand for no text, and nobody asks for them as tags.
    nothing = {getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "bos_token_id", None)}
    ids = [token for token in ids if token not in nothing]
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def shorten(text: str, limit: int, mark: str = "...", *, keep_end: bool = False) -> str:
    """Cut a text to at most ``limit`` characters, with ``mark`` where something was left out.

    Args:
        text: returned as it is where it fits.
        limit: characters of the result, the mark included.
        mark: stands for what was left out; ``{omitted}`` in it becomes the number of characters that are missing.
        keep_end: cut in the middle and keep both ends, as for completions, whose answer is usually at the end.

    >>> shorten("a long sentence", 10)
    'a long ...'
    >>> shorten("2 + 2 is, after much thought, 4", 15, keep_end=True)
    '2 + 2 ...ght, 4'
    """
    if len(text) <= limit:
        return text
    # With the number of the whole text the room for the mark is never too small.
    kept = max(0, limit - len(mark.replace("{omitted}", str(len(text)))))
    mark = mark.replace("{omitted}", str(len(text) - kept))
    tail = kept // 2 if keep_end else 0
    return text[: kept - tail] + mark + text[len(text) - tail :]


def in_bytes(count: float) -> str:
    """Write a number of bytes as a person would say it, in powers of ten.

    >>> in_bytes(734), in_bytes(6_340_000), in_bytes(2_152_240_128)
    ('734 B', '6.34 MB', '2.15 GB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB" if count < 1000 else f"{count:,.0f} GB"


def in_units(number: int) -> str:
    """Write a number of parameters in thousands, millions or billions.

    >>> in_units(734), in_units(134_515_008), in_units(7_600_000_000)
    ('734', '134.5 M', '7.6 B')
    """
    for size, unit in ((10**9, " B"), (10**6, " M"), (10**3, " k")):
        if number >= size:
            return f"{number / size:.1f}".removesuffix(".0") + unit
    return str(number)
