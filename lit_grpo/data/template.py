"""The way from rows to prompts: here the chat template is applied and the text tokenised, once for the whole run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from lit_grpo.data.alphabet import check_alphabet
from lit_grpo.data.chat_template import PLAIN_FRAME, ChatFrame, frame_of, variables_of
from lit_grpo.data.sources.base import Row
from lit_grpo.data.sources.messages import system_of, with_question
from lit_grpo.errors import UserError
from lit_grpo.types import Prompt
from lit_grpo.utils.bounds import Bound, check_fields
from lit_grpo.utils.spelling import nearest

_SLOT = "{question}"
_OWN_NAMES = ("auto", "chat", "none")
_BATCH = 1000
"""Rows that are tokenised together: most of what there is to gain, in a few megabytes."""
_TRANSFORMERS = "transformers.tokenization_utils_base"
"""Module of the ``apply_chat_template`` that takes a list of chats."""
_TAKEN_ARGUMENTS = (
    *("conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "padding"),
    *("truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("messages", "processor_kwargs"),
)
"""Arguments of ``apply_chat_template`` that are no variables of the template; what they do is decided here."""


class NamedTemplate(NamedTuple):
    """A prompt as plain text with ``{question}`` and, where it has a place for a system prompt, ``{system}``.

    Or a system prompt alone, for the tokenizer's own chat template.
    """

    text: str
    """Empty: the tokenizer's own chat template."""
    system: str | None = None
    """The system prompt where the user gives none."""
    markers: tuple[str, ...] = ()
    """Texts that must each be one token; a tokenizer that splits them belongs to a model that never saw them."""


NAMED_TEMPLATES: Mapping[str, NamedTemplate] = {
    # The template decides how a base model begins (Dr. GRPO, 2503.20783, section 2.1 and its templates 1 and 2).
    "qwen_math": NamedTemplate(
        "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
        "Please reason step by step, and put your final answer within \\boxed{}.",
        ("<|im_start|>", "<|im_end|>"),
    ),
    # DeepSeek-R1 (2501.12948, table 1) in the form of Dr. GRPO: the completion begins inside <think>.
    "r1": NamedTemplate(
        "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The "
        "Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. "
        "The reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> "
        "tags, respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
        "User: {question}\nAssistant: <think>"
    ),
    # GTPO (2508.03772, appendix 8.2, the box "Prompt").
    "gtpo": NamedTemplate(
        "",
        "You are a helpful assistant for solving math problems.\n"
        "Given a question, first think step by step between <reasoning> and </reasoning>.\n"
        "Then, give the final answer between <answer> and </answer>.",
    ),
}


class PromptTooLongError(UserError):
    """Error for a prompt that has more tokens than ``max_prompt_tokens``."""


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts made from rows, and the rows that were too long to become one."""

    prompts: list[Prompt]
    too_long: list[Row]
    """Rows left out because they have more than ``max_prompt_tokens``."""


@dataclass
class PromptFormat:
    r"""Settings of how a row becomes token ids: template, system prompt, longest prompt.

    Attributes:
        chat_template: ``auto``: the tokenizer's own template if it has one, else plain text. ``chat``: the tokenizer's
            own template, which it must have. ``none``: plain text. ``qwen_math``, ``r1``, ``gtpo``: a named template,
            see ``NAMED_TEMPLATES``; ``gtpo`` is a system prompt for the tokenizer's own. Text that holds ``{question}``
            is a template of your own, with ``{system}`` where the system prompt goes. Anything that holds ``{{`` or
            ``{%`` is a Jinja template, and anything that ends in ``.jinja`` a file with one.
        system_prompt: first message of the chat; rows that have a system message of their own are then refused. With
            ``none`` it stands before the question, with an empty line between them; in a named template or one of your
            own it takes the place of ``{system}``.
        question_format: text around ``{question}``. Other braces are left as they are, so ``\boxed{}`` needs no care.
            Of a chat it is put around the last message of the user.
        chat_template_kwargs: variables of the chat template, as ``{enable_thinking: false}`` of Qwen3's.
        max_prompt_tokens: longest prompt allowed, template and special tokens included. None: any length.
        on_long: ``error`` stops at the first longer prompt; ``drop`` leaves it out (``encode_all``).
    """

    chat_template: str = "auto"
    system_prompt: str | None = None
    question_format: str = _SLOT
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_tokens: Annotated[int | None, Bound(least=1)] = None
    on_long: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        check_fields(self, "")
        if _SLOT not in self.question_format:
            raise UserError(
                f"question_format {self.question_format!r} has no {_SLOT}, so every prompt would be the same",
                where="question_format",
                remedy=f"write {_SLOT} where the question goes",
            )
        if taken := sorted(set(self.chat_template_kwargs) & set(_TAKEN_ARGUMENTS)):
            raise UserError(
                f"chat_template_kwargs sets {taken[0]}, which is no variable of a chat template",
                where="chat_template_kwargs",
                remedy="name variables of the template, such as enable_thinking; the template itself is chat_template",
            )
        if self.on_long not in {"error", "drop"}:
            raise UserError(f"on_long is {self.on_long!r}", where="on_long", remedy="write error or drop")
        self._jinja: str | None = None
        self._text: NamedTemplate | None = None
        self._frame: tuple[Any, Any, ChatFrame] | None = None
        """Tokenizer and template that the frame was found for last, and the frame."""
        self._default_system: str | None = None
        """System prompt that the name of the template stands for, for the tokenizer's own chat template."""
        self._read_template()
        self._check_system_prompt()

    def encode(self, row: Row, tokenizer: Any, source: str = "") -> Prompt:
        """Apply the template to a row and tokenise it.

        Args:
            row: the question.
            tokenizer: a tokenizer of transformers; its ``chat_template`` is read, nothing in it is changed.
            source: name of the data set, kept in the prompt.

        Raises:
            PromptTooLongError: the prompt is longer than ``max_prompt_tokens``, whatever ``on_long`` says.
            UserError: no chat template where one is needed, a system message beside ``system_prompt``, text the
                tokenizer refuses, an empty prompt, or two beginning-of-sequence tokens.
        """
        self._check_variables(tokenizer)
        self._check_not_finished(tokenizer, row)
        return self._prompt(tokenizer, row, self._token_ids(tokenizer, row), source)

    def _prompt(self, tokenizer: Any, row: Row, ids: list[int], source: str) -> Prompt:
        """Check the token ids of a row, and make a prompt of them."""
        where = row.where or row.id
        if not ids:
            raise UserError(f"row {row.id!r} gives an empty prompt", where=where, remedy="mend or remove the row")
        # A tokenizer that adds one to a template that writes one gives the model a start that it has never seen.
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
        name = row.source or source
        return Prompt(row.id, row.question, tuple(ids), row.answer, name, row.extra, row.messages, row.other_answers)

    def encode_all(self, rows: Iterable[Row], tokenizer: Any, source: str = "") -> EncodedPrompts:
        """Encode every row, in order; with ``on_long: drop`` too long ones are left out and given back.

        Raises:
            UserError: as :meth:`encode`; or every row was dropped.
        """
        prompts: list[Prompt] = []
        too_long: list[Row] = []
        rest = iter(rows)
        while some := list(islice(rest, _BATCH)):
            for row, ids in zip(some, self._ids_of_many(tokenizer, some), strict=True):
                try:
                    if ids is None:
                        prompts.append(self.encode(row, tokenizer, source))
                        continue
                    self._check_not_finished(tokenizer, row)
                    prompts.append(self._prompt(tokenizer, row, ids, source))
                except PromptTooLongError:
                    if self.on_long == "error":
                        raise
                    too_long.append(row)
        if too_long and not prompts:
            raise UserError(
                f"all {len(too_long)} prompts are longer than max_prompt_tokens = {self.max_prompt_tokens}",
                where=source or "max_prompt_tokens",
                remedy="raise max_prompt_tokens",
            )
        return EncodedPrompts(prompts, too_long)

    def uses_chat(self, tokenizer: Any) -> bool:
        """Say whether prompts are chats made by a Jinja template, not plain text or a text template.

        Raises:
            UserError: ``chat_template`` is ``chat`` and the tokenizer has none.
        """
        if self._jinja is not None:
            return True
        if self._text is not None:
            return False
        own = getattr(tokenizer, "chat_template", None)
        if self.chat_template in ("chat", *NAMED_TEMPLATES) and not own:
            raise UserError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__!r} has no chat "
                "template",
                where="chat_template",
                remedy="write chat_template: none for plain text, or give a Jinja template",
            )
        return self.chat_template != "none" and bool(own)

    def wraps(self, tokenizer: Any) -> bool:
        """Say whether a template is put around questions, be it a chat or plain text."""
        return self._text is not None or self.uses_chat(tokenizer)

    def describe(self, tokenizer: Any) -> str:
        """Say in words which template prompts go through."""
        if self.chat_template in NAMED_TEMPLATES:
            return f"template {self.chat_template}"
        if self._text is not None:
            return "a text template of your own"
        if self._jinja is not None:
            return f"Jinja template {self.chat_template if self.chat_template.endswith('.jinja') else 'of your own'}"
        return "the tokenizer's chat template" if self.uses_chat(tokenizer) else "plain text, no template"

    def identity(self, tokenizer: Any) -> dict[str, str]:
        """Return all settings that decide how a question becomes text; equal ones give equal prompts."""
        # The template's text and not its name, since another tokenizer has another one under the same setting.
        own: Any = getattr(tokenizer, "chat_template", None)
        template = self._text.text if self._text is not None else self._jinja
        if template is None:
            template = str(own) if self.uses_chat(tokenizer) else ""
        settings = {
            "chat_template": template,
            "system_prompt": self.system_prompt or self._default_system or "",
            "question_format": self.question_format,
        }
        # Left out where there are none, as in checkpoints of a time when there could be none.
        if self.chat_template_kwargs:
            settings["chat_template_kwargs"] = json.dumps(self.chat_template_kwargs, sort_keys=True, default=str)
        return settings

    def warnings(self, tokenizer: Any) -> list[str]:
        """Return one sentence for each thing about the template that does not fit the tokenizer."""
        sentences = []
        for marker in self._text.markers if self._text is not None else ():
            if len(tokenizer(marker, add_special_tokens=False)["input_ids"]) != 1:
                sentences.append(
                    f"the template {self.chat_template} uses {marker}, which is no token of this tokenizer"
                )
        frame = self.frame(tokenizer)
        if self.uses_chat(tokenizer) and frame.same_without_turn and _ends_turn(frame.after, tokenizer):
            sentences.append(
                f"the chat template ends the user's turn with {frame.after.strip()!r} and begins none of the "
                "assistant's (it does not read add_generation_prompt)"
            )
        if self.uses_chat(tokenizer) and "strftime_now" in self.identity(tokenizer)["chat_template"]:
            sentences.append(
                "the chat template writes the date into every prompt, so a run resumed tomorrow has others"
            )
        return sentences

    def frame(self, tokenizer: Any) -> ChatFrame:
        """Return what the template puts around a question."""
        if not self.uses_chat(tokenizer):
            return PLAIN_FRAME
        key = tokenizer, getattr(tokenizer, "chat_template", None)
        # Asked for every row, and the same for all of them.
        if self._frame is None or self._frame[0] is not key[0] or self._frame[1] != key[1]:

            def render(messages: list[dict[str, str]], begin: bool) -> str:
                return str(
                    tokenizer.apply_chat_template(
                        messages,
                        chat_template=self._jinja,
                        add_generation_prompt=begin,
                        tokenize=False,
                        **self.chat_template_kwargs,
                    )
                )

            self._frame = *key, frame_of(render, tokenizer)
        return self._frame[2]

    def _check_variables(self, tokenizer: Any) -> None:
        """Refuse variables that the chat template does not read: they would do nothing."""
        if not (self.chat_template_kwargs and self.uses_chat(tokenizer)):
            return
        template = self.identity(tokenizer)["chat_template"]
        known = variables_of(template)
        unread = [
            name
            for name in self.chat_template_kwargs
            if (name not in known if known is not None else not re.search(rf"\b{re.escape(name)}\b", template))
        ]
        if unread:
            reads = ", ".join(sorted(known or ())) or "none"
            guess = nearest(unread[0], known or ())
            raise UserError(
                f"the chat template does not read {unread[0]}, which chat_template_kwargs sets; it reads {reads}",
                where="data.format.chat_template_kwargs",
                remedy=f"did you mean {guess}?" if guess else "leave it out, or name one that the template reads",
            )

    def _check_not_finished(self, tokenizer: Any, row: Row) -> None:
        """Refuse a text that is a whole chat already: the template would be put around it a second time."""
        if not self.wraps(tokenizer):
            return
        frame = self.frame(tokenizer)
        texts = [row.question] if row.messages is None else [str(message["content"]) for message in row.messages]
        mark = next((found for text in texts if (found := frame.finished_by(text)) is not None), None)
        if mark is not None:
            raise UserError(
                f"the prompt of row {row.id!r} holds {mark!r}, which marks the turns of a chat: it looks finished, and "
                f"{self.describe(tokenizer)} would be put around it a second time",
                where=row.where or row.id,
                remedy="set data.format.chat_template: none, which takes the text as it is, or take the marks out",
            )

    def _ids_of_many(self, tokenizer: Any, rows: Sequence[Row]) -> Sequence[list[int] | None]:
        """Return the token ids of rows, tokenised together; None for all where they have to be taken one by one.

        The ids are those of :meth:`_token_ids`: what a tokenizer of Rust does to a list is what it does to each text.
        One of Python gains nothing by a list, and one with chats of its own may take no list of them.
        """
        alone = [None] * len(rows)
        own_chats = getattr(getattr(type(tokenizer), "apply_chat_template", None), "__module__", "") != _TRANSFORMERS
        if not getattr(tokenizer, "is_fast", False) or len(rows) < 2 or (self.uses_chat(tokenizer) and own_chats):
            return alone
        self._check_variables(tokenizer)
        try:
            if self.uses_chat(tokenizer):
                return self._chat_ids(tokenizer, [self._messages(row, self._question(row)) for row in rows])
            texts = [self._plain_text(self._question(r), self._system_of_plain_text(r, tokenizer)) for r in rows]
            many = tokenizer(texts, add_special_tokens=True)["input_ids"]
            return [self._without_second_bos(tokenizer, row, list(ids)) for row, ids in zip(rows, many, strict=True)]
        # Which row it was, and what to do, is said where each is taken alone.
        except Exception:
            return alone

    def _chat_ids(self, tokenizer: Any, chats: Sequence[list[dict[str, Any]]]) -> list[list[int]]:
        """Return the token ids of chats, tokenised together."""
        found: dict[int, list[int]] = {}
        # Where the row says how the completion begins, the assistant's turn is open already.
        for begun in (False, True):
            some = [i for i, chat in enumerate(chats) if (chat[-1]["role"] == "assistant") == begun]
            if some:
                encoded = self._apply(tokenizer, [chats[i] for i in some], begun)
                found |= zip(some, map(list, encoded["input_ids"]), strict=True)
        return [found[i] for i in range(len(chats))]

    def _apply(self, tokenizer: Any, conversation: Any, begun: bool) -> Any:
        # The template writes its special tokens itself, so none are added here, unlike for plain text.
        return tokenizer.apply_chat_template(
            conversation,
            chat_template=self._jinja,
            add_generation_prompt=not begun,
            continue_final_message=begun,
            tokenize=True,
            return_dict=True,
            **self.chat_template_kwargs,
        )

    def _question(self, row: Row) -> str:
        # Not str.format: other braces, as of \boxed{}, must stay.
        return self.question_format.replace(_SLOT, row.question)

    def _without_second_bos(self, tokenizer: Any, row: Row, ids: list[int]) -> list[int]:
        # A finished chat writes its beginning itself, and the tokenizer writes one more.
        bos: str | None = getattr(tokenizer, "bos_token", None)
        twice = bos and row.question.startswith(bos) and ids[:2] == [tokenizer.bos_token_id] * 2
        return ids[1:] if twice and self._text is None else ids

    def _token_ids(self, tokenizer: Any, row: Row) -> list[int]:
        chat = self.uses_chat(tokenizer)
        question = self._question(row)
        if chat:
            messages = self._messages(row, question)
        else:
            system = self._system_of_plain_text(row, tokenizer)
        try:
            if not chat:
                text = self._plain_text(question, system)
                ids = list(tokenizer(text, add_special_tokens=True)["input_ids"])
                return self._without_second_bos(tokenizer, row, ids)
            return list(self._apply(tokenizer, messages, messages[-1]["role"] == "assistant")["input_ids"])
        except Exception as error:
            # Tokenizers raise plain Exception, templates whatever Jinja raises.
            if not chat:
                check_alphabet(tokenizer, f"{system or ''}{question}", f"the question of row {row.id!r}", row.where)
            raise UserError(
                f"the {'chat template' if chat else 'tokenizer'} cannot take row {row.id!r}: "
                f"{type(error).__name__}: {error}",
                where=row.where or row.id,
                remedy="mend the row, or choose another chat_template or tokenizer",
            ) from error

    def _messages(self, row: Row, question: str) -> list[dict[str, Any]]:
        """Return the turns of a row's chat, the system prompt first."""
        messages = (
            [{"role": "user", "content": question}] if row.messages is None else with_question(row.messages, question)
        )
        system = self._default_system if self.system_prompt is None else self.system_prompt
        if system is None:
            return messages
        self._check_one_system_prompt(row)
        return [{"role": "system", "content": system}, *messages]

    def _check_one_system_prompt(self, row: Row) -> None:
        # Which of the two the model should read cannot be known, and dropping either would go unnoticed.
        ours = self.system_prompt is not None or self._default_system is not None
        if ours and row.messages is not None and system_of(row.messages) is not None:
            setting = "system_prompt" if self.system_prompt is not None else f"chat_template: {self.chat_template}"
            raise UserError(
                f"row {row.id!r} has a system message of its own, and data.format has another ({setting})",
                where=row.where or row.id,
                remedy=f"leave {setting} out, or take the system messages out of the rows; sets under data.val and "
                "data.test may have a format of their own",
            )

    def _system_of_plain_text(self, row: Row, tokenizer: Any) -> str | None:
        """Return the system prompt of a prompt that is made without a chat template.

        Raises:
            UserError: the row is a chat that plain text cannot say, or there are variables for a chat template.
        """
        if self.chat_template_kwargs:
            raise UserError(
                f"chat_template_kwargs are variables of a chat template, and prompts are {self.describe(tokenizer)}",
                where="chat_template_kwargs",
                remedy="leave them out, or choose a model with a chat template or a Jinja template",
            )
        if row.messages is None:
            return self.system_prompt
        self._check_one_system_prompt(row)
        system = system_of(row.messages)
        turns = row.messages[system is not None :]
        # A template of text has a place for one question, and perhaps for a system prompt.
        if self._text is not None and len(turns) == 1 and (system is None or "{system}" in self._text.text):
            return system or self.system_prompt
        roles = ", ".join(message["role"] for message in row.messages)
        if self._text is not None:
            raise UserError(
                f"the template {self.chat_template!r} cannot take the chat of row {row.id!r}, whose messages are of "
                f"{roles}",
                where=row.where or row.id,
                remedy="choose chat_template: chat or a Jinja template, which take every message",
            )
        raise UserError(
            f"the prompt of row {row.id!r} is a list of messages, and {self._why_no_chat(tokenizer)}",
            where=row.where or row.id,
            remedy="choose a model with a chat template, or give one as data.format.chat_template (qwen_math, r1, a "
            "Jinja template or a .jinja file), or take the question's text alone with question_column: "
            "<column>.<number of the message>.content",
        )

    def _why_no_chat(self, tokenizer: Any) -> str:
        if self.chat_template == "none":
            return "chat_template: none makes plain text"
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        return f"the tokenizer {name!r} has no chat template"

    def _plain_text(self, question: str, system: str | None) -> str:
        if self._text is None:
            return question if system is None else f"{system}\n\n{question}"
        values = {"system": system or self._text.system or "", "question": question}
        # In one pass: a question may itself hold the text {system}, which must stay as it is.
        return re.sub(r"\{(system|question)\}", lambda slot: values[slot[1]], self._text.text)

    def _read_template(self) -> None:
        """Decide which kind of template ``chat_template`` is, and read it if it is a file."""
        value = self.chat_template
        if value in _OWN_NAMES:
            return
        if value in NAMED_TEMPLATES:
            named = NAMED_TEMPLATES[value]
            if named.text:
                self._text = named
            else:
                self._default_system = named.system
        # {{question}} is a Jinja template with a variable of that name, {question} a text template.
        elif re.search(r"(?<!\{)\{question\}(?!\})", value):
            self._text = NamedTemplate(value)
        elif "{{" in value or "{%" in value:
            self._jinja = value
        elif value.endswith(".jinja"):
            try:
                self._jinja = Path(value).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"cannot read the chat template {value!r}: {error}", where="chat_template") from error
        else:
            names = [*_OWN_NAMES, *NAMED_TEMPLATES]
            guess = nearest(value, names)
            raise UserError(
                f"unknown chat_template {value!r}",
                where="chat_template",
                remedy=f"write {guess}"
                if guess
                else f"write one of {', '.join(names)}, text with {_SLOT}, a Jinja template or a .jinja file",
            )

    def _check_system_prompt(self) -> None:
        if self._text is None:
            return
        has_place = "{system}" in self._text.text
        if self.system_prompt is not None and not has_place:
            raise UserError(
                f"the template {self.chat_template!r} has no place for a system prompt",
                where="system_prompt",
                remedy="leave system_prompt out, or write a template of your own with {system} in it",
            )
        if has_place and self.system_prompt is None and self._text.system is None:
            raise UserError(
                "the template has a place for a system prompt, {system}, and there is none",
                where="system_prompt",
                remedy="set system_prompt, or take {system} out",
            )


def _ends_turn(after: str, tokenizer: Any) -> bool:
    """Say whether what follows a question ends in a token that ends texts, and so begins nothing."""
    eos: str | None = getattr(tokenizer, "eos_token", None)
    return bool(eos) and after.rstrip().endswith(str(eos))
