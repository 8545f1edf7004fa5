"""Prompts that are chats already: a list of messages with roles, as TRL, verl and OpenRLHF write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.types import Message

_AS_TEXT = ('[{"role"', '[{"content"', "[{'role'", "[{'content'")
"""Beginnings of a text that is a written-out list of messages, white space left out."""


def is_chat(value: Any) -> bool:
    """Say whether a column's value is meant as a list of messages, also where it is written out as text."""
    if isinstance(value, str):
        # Only what begins so is read as JSON: a question that happens to be some other JSON stays a question.
        return "".join(value[:40].split()).startswith(_AS_TEXT)
    return isinstance(value, Sequence)


def read_chat(value: Any, column: str, where: str) -> tuple[Message, ...]:
    """Check a list of messages and return it, the content of each as one text.

    Args:
        value: the list, or a text that is such a list in JSON.
        column: name of the column, for messages about it.
        where: file and line.

    Raises:
        UserError: the list is empty, a message has no role or no text, nobody asks anything, or the last message is
            the assistant's, which would be the answer.
    """

    def bad(what: str, remedy: str) -> UserError:
        return UserError(f"the prompt in column {column!r} {what}", where=where, remedy=remedy)

    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise bad("looks like a list of messages and is no JSON", "write the list as JSON") from error
    if not value:
        raise bad("is an empty list", "mend or remove the row")
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
            raise bad(
                f"is a list, and its item {number} is no message: {str(message)[:60]!r}",
                'write each message as {"role": "user", "content": "..."}, or the question as text',
            )
        text = _text(message.get("content"))
        if text is None:
            raise bad(
                f"has a message ({number}, {message['role']}) whose content is no text: "
                f"{str(message.get('content'))[:60]!r}",
                'write the content as text, or as a list of {"type": "text", "text": "..."}; images are not read',
            )
        # In a Parquet table every message has the fields of all, empty where it had none.
        further = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
        messages.append({"role": message["role"], "content": text, **further})
    roles = [message["role"] for message in messages]
    if "user" not in roles or not messages[_last_user(messages)]["content"].strip():
        raise bad(f"holds no question: its roles are {', '.join(roles)}", 'add a message of the role "user"')
    if roles[-1] == "assistant":
        raise bad(
            "ends with a message of the assistant, which the model would have to continue",
            "leave that message out of the prompt: put the answer into a column of its own",
        )
    return tuple(messages)


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
