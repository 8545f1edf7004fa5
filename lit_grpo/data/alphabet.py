"""Characters that a tokenizer of single characters does not know."""

from __future__ import annotations

from typing import Any

from lit_grpo.errors import UserError


def check_alphabet(tokenizer: Any, text: str, what: str, where: str | None) -> None:
    """Refuse a text with characters that a tokenizer of single characters, as ``tiny`` makes one, has no token for.

    Such a tokenizer says only that it has no token for what is unknown. Any other tokenizer is left alone.

    Args:
        tokenizer: of Hugging Face.
        text: what it is to encode.
        what: the text in words, for the message.
        where: its place in the data, for the message.

    Raises:
        UserError: it names the characters, and where to add them.
    """
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    known = set(tokenizer.get_vocab()) - special
    if any(len(token) > 1 for token in known):
        return
    missing = sorted(set(text) - known)
    if missing:
        listed = ", ".join(map(repr, missing[:10])) + (", ..." if len(missing) > 10 else "")
        raise UserError(
            f"{what} has characters that the tokenizer has no token for: {listed}",
            where=where,
            remedy="add them to the alphabet of the model: model.policy.tiny.alphabet",
        )
