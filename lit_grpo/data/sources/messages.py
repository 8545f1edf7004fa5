"""Prompts that are chats already: a list of messages with roles, as TRL, verl, OpenRLHF and ShareGPT write them."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lit_grpo.data.sources.golds import plain
from lit_grpo.errors import UserError
from lit_grpo.types import Message

_AS_TEXT = tuple(f"[{{{quote}{key}{quote}" for quote in ('"', "'") for key in ("role", "content", "from"))
"""Beginnings of a text that is a written-out list of messages, white space left out."""
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
"""What ShareGPT's ``from`` calls the roles of a chat; other names are as they are."""
CONVERSATIONS = ("messages", "conversations", "conversation")
"""Columns that hold a whole conversation by custom, so that the assistant's last message is the answer to learn."""

LastAssistant = Literal["auto", "leave_out", "continue"]


class Chat(NamedTuple):
    """A chat that was read from a column."""

    messages: tuple[Message, ...]
    left_out: str | None = None
    """Text of the assistant's last message, which is no part of the prompt; None where the chat has none."""


def is_chat(value: Any) -> bool:
    """Say whether a column's value is meant as a list of messages, also where it is written out as text."""
    if isinstance(value, str):
        # Only what begins so is read as JSON: a question that happens to be some other JSON stays a question.
        return "".join(value[:40].split()).startswith(_AS_TEXT)
    value = plain(value)
    return isinstance(value, Sequence) or (isinstance(value, Mapping) and _as_list(value) is not value)


def read_chat(value: Any, column: str, where: str, last_assistant: LastAssistant = "auto") -> Chat:
    """Check a list of messages and return it, the content of each as one text.

    Args:
        value: the list, or a text that is such a list in JSON. A message has ``role`` and ``content``, or ShareGPT's
            ``from`` and ``value``.
        column: name of the column, for messages about it.
        where: file and line.
        last_assistant: what a last message of the assistant is. ``auto``: in a column of whole conversations
            (``CONVERSATIONS``) the answer, which is left out of the prompt, in any other an error. ``leave_out``: the
            answer. ``continue``: the beginning of the completion, with which the prompt ends.

    Raises:
        UserError: the list is empty, a message has no role or no text, nobody asks anything, or the last message is
            the assistant's and nobody says what it is.
    """

    def bad(what: str, remedy: str) -> UserError:
        return UserError(f"the prompt in column {column!r} {what}", where=where, remedy=remedy)

    if isinstance(value, str):
        value = _written_list(value)
        if value is None:
            raise bad("looks like a list of messages and is no JSON", "write the list as JSON")
    value = _as_list(plain(value))
    if not value:
        raise bad("is an empty list", "mend or remove the row")
    messages = []
    for number, given in enumerate(value):
        message = _with_role(plain(given))
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
            raise bad(
                f"is a list, and its item {number} is no message: {str(message)[:60]!r}",
                'write each message as {"role": "user", "content": "..."}, or the question as text',
            )
        # A turn that only calls tools has no text of its own.
        called = message.get("content") is None and bool(message.get("tool_calls"))
        text = "" if called else _text(message.get("content"))
        if text is None:
            raise bad(
                f"has a message ({number}, {message['role']}) whose content is no text: "
                f"{str(message.get('content'))[:60]!r}",
                'write the content as text, or as a list of {"type": "text", "text": "..."}; images are not read',
            )
        # In a Parquet table every message has the fields of all, empty where it had none.
        further = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
        messages.append({"role": message["role"], "content": text, **further})
    left_out: str | None = None
    if messages[-1]["role"] == "assistant" and last_assistant != "continue":
        inside = column.rpartition(".")[2]
        # A message without text is the place of an answer, and no answer.
        if last_assistant == "auto" and inside not in CONVERSATIONS and messages[-1]["content"].strip():
            raise bad(
                "ends with a message of the assistant, and nobody says whether that is the answer",
                "set last_assistant: leave_out if it is the answer, and no part of the prompt; last_assistant: "
                "continue if the model is to go on with it",
            )
        left_out = messages.pop()["content"]
    roles = [message["role"] for message in messages]
    if roles and roles[-1] == "assistant" and last_assistant != "continue":
        raise bad("ends with two messages of the assistant", "mend the row, or set last_assistant: continue")
    if "user" not in roles or not messages[_last_user(messages)]["content"].strip():
        raise bad(f"holds no question: its roles are {', '.join(roles)}", 'add a message of the role "user"')
    return Chat(tuple(messages), left_out)


def _written_list(text: str) -> Any:
    """Return the list that a text is in JSON, or as Python prints it (pandas in CSV files); None if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _as_list(value: Any) -> Any:
    """Return the messages of a column of lists (``{role: [...], content: [...]}``), anything else as it is."""
    # So the package datasets gives a list of mappings whose feature is a Sequence.
    if isinstance(value, Mapping):
        lists = {key: plain(column) for key, column in value.items()}
        if ({"role", "content"} <= set(lists) or {"from", "value"} <= set(lists)) and all(
            isinstance(column, (list, tuple)) for column in lists.values()
        ):
            return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    return value


def _with_role(message: Any) -> Any:
    """Return a message with ``role`` and ``content``, also where it is written as ShareGPT does."""
    if not isinstance(message, Mapping) or isinstance(message.get("role"), str):
        return message
    speaker = message.get("from")
    if not isinstance(speaker, str) or not speaker:
        return message
    rest = {key: value for key, value in message.items() if key not in ("from", "value", "role", "content")}
    text = message.get("value") if message.get("value") is not None else message.get("content")
    return {"role": _SHAREGPT_ROLES.get(speaker, speaker), "content": text, **rest}


def question_of(messages: Sequence[Message]) -> str:
    """Return the text of the last message of the user."""
    return str(messages[_last_user(messages)]["content"])


def with_question(messages: Sequence[Message], question: str) -> list[dict[str, Any]]:
    """Return the messages with another text in the last message of the user."""
    last = _last_user(messages)
    return [{**m, "content": question} if i == last else dict(m) for i, m in enumerate(messages)]


def system_of(messages: Sequence[Message]) -> str | None:
    """Return the text of the first message where its role is ``system`` (or ``developer``)."""
    return str(messages[0]["content"]) if messages[0]["role"] in ("system", "developer") else None


def _last_user(messages: Sequence[Message]) -> int:
    return max(i for i, message in enumerate(messages) if message["role"] == "user")


def _text(content: Any) -> str | None:
    """Join the parts of a content; None where one of them is no text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        return None
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    # Chat templates put parts behind each other, with nothing in between.
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
