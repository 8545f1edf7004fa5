"""From a row to a prompt: the chat template is applied and the text is tokenised here, once, and never again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_grpo.errors import UserError, nearest
from lit_grpo.tasks.base import Row
from lit_grpo.types import Prompt

_SLOT = "{question}"


class PromptTooLongError(UserError):
    """A prompt has more tokens than ``max_prompt_tokens``."""


@dataclass(frozen=True)
class EncodedPrompts:
    """What :meth:`PromptFormat.encode_all` gives back."""

    prompts: list[Prompt]
    dropped: int
    """Rows left out because they were too long."""


@dataclass
class PromptFormat:
    """How a row becomes token ids.

    Attributes:
        chat_template: ``auto``: the tokenizer's own template if it has one, else plain text. ``chat``: the tokenizer's
            own template, which it must have. ``none``: plain text. Anything that holds ``{{`` or ``{%`` is a Jinja
            template, and anything that ends in ``.jinja`` a file with one.
        system_prompt: first message of the chat; in plain text it stands before the question, with an empty line
            between them.
        question_format: text around ``{question}``. Other braces are left as they are, so ``\\boxed{}`` needs no care.
        max_prompt_tokens: longest prompt allowed, template and special tokens included. None: any length.
        on_long: ``error`` stops at the first longer prompt; ``drop`` leaves it out and counts it (``encode_all``).
    """

    chat_template: str = "auto"
    system_prompt: str | None = None
    question_format: str = _SLOT
    max_prompt_tokens: int | None = None
    on_long: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        if _SLOT not in self.question_format:
            raise UserError(
                f"question_format {self.question_format!r} has no {_SLOT}, so every prompt would be the same",
                where="question_format",
                remedy=f"write {_SLOT} where the question goes",
            )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise UserError(f"max_prompt_tokens is {self.max_prompt_tokens}", where="max_prompt_tokens")
        if self.on_long not in {"error", "drop"}:
            raise UserError(f"on_long is {self.on_long!r}", where="on_long", remedy="write error or drop")
        self._template = self._read_template()

    def encode(self, row: Row, tokenizer: Any, source: str = "") -> Prompt:
        """Apply the template and tokenise, once.

        Args:
            row: the question.
            tokenizer: of transformers; its ``chat_template`` is read, nothing in it is changed.
            source: name of the data set, kept in the prompt.

        Raises:
            PromptTooLongError: the prompt is longer than ``max_prompt_tokens``, whatever ``on_long`` says.
            UserError: no chat template where one is needed, text the tokenizer refuses, an empty prompt, or two
                beginning-of-sequence tokens.
        """
        question = self.question_format.replace(_SLOT, row.question)
        ids = self._token_ids(question, tokenizer, row)
        where = row.where or row.id
        if not ids:
            raise UserError(f"row {row.id!r} gives an empty prompt", where=where, remedy="mend or remove the row")
        bos = getattr(tokenizer, "bos_token_id", None)
        if bos is not None and ids[:2] == [bos, bos]:
            raise UserError(
                f"the prompt of row {row.id!r} begins with two beginning-of-sequence tokens",
                where=where,
                remedy="the tokenizer adds one by itself: take it out of the template or the text",
            )
        if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
            raise PromptTooLongError(
                f"the prompt of row {row.id!r} has {len(ids)} tokens, more than max_prompt_tokens "
                f"= {self.max_prompt_tokens}",
                where=where,
                remedy="raise max_prompt_tokens, or leave such rows out with on_long: drop",
            )
        return Prompt(row.id, row.question, tuple(ids), row.answer, source, row.extra)

    def encode_all(self, rows: Iterable[Row], tokenizer: Any, source: str = "") -> EncodedPrompts:
        """Encode every row, in order; with ``on_long: drop`` too long ones are left out and counted.

        Raises:
            UserError: as :meth:`encode`; or every row was dropped.
        """
        prompts: list[Prompt] = []
        dropped = 0
        for row in rows:
            try:
                prompts.append(self.encode(row, tokenizer, source))
            except PromptTooLongError:
                if self.on_long == "error":
                    raise
                dropped += 1
        if dropped and not prompts:
            raise UserError(
                f"all {dropped} prompts are longer than max_prompt_tokens = {self.max_prompt_tokens}",
                where=source or "max_prompt_tokens",
                remedy="raise max_prompt_tokens",
            )
        return EncodedPrompts(prompts, dropped)

    def uses_chat(self, tokenizer: Any) -> bool:
        """True if prompts are chats of this tokenizer, False if they are plain text.

        Raises:
            UserError: ``chat_template`` is ``chat`` and the tokenizer has none.
        """
        if self._template is not None:
            return True
        own = getattr(tokenizer, "chat_template", None)
        if self.chat_template == "chat" and not own:
            raise UserError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__!r} has no chat "
                "template",
                where="chat_template",
                remedy="write chat_template: none for plain text, or give a Jinja template",
            )
        return self.chat_template != "none" and bool(own)

    def _token_ids(self, question: str, tokenizer: Any, row: Row) -> list[int]:
        chat = self.uses_chat(tokenizer)
        try:
            if not chat:
                text = question if self.system_prompt is None else f"{self.system_prompt}\n\n{question}"
                return list(tokenizer(text, add_special_tokens=True)["input_ids"])
            messages = [{"role": "user", "content": question}]
            if self.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": self.system_prompt})
            encoded = tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
            )
            return list(encoded["input_ids"])
        except Exception as error:  # tokenizers raise plain Exception, templates whatever Jinja raises
            raise UserError(
                f"the {'chat template' if chat else 'tokenizer'} cannot take row {row.id!r}: "
                f"{type(error).__name__}: {error}",
                where=row.where or row.id,
                remedy="mend the row, or choose another chat_template or tokenizer",
            ) from error

    def _read_template(self) -> str | None:
        """The Jinja text, or None for the tokenizer's own template or plain text."""
        value = self.chat_template
        if value in _NAMES:
            return None
        if "{{" in value or "{%" in value:
            return value
        if value.endswith(".jinja"):
            try:
                return Path(value).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"cannot read the chat template {value!r}: {error}", where="chat_template") from error
        guess = nearest(value, _NAMES)
        raise UserError(
            f"unknown chat_template {value!r}",
            where="chat_template",
            remedy=f"write {guess}"
            if guess
            else f"write one of {', '.join(_NAMES)}, a Jinja template or a .jinja file",
        )


_NAMES: Sequence[str] = ("auto", "chat", "none")
