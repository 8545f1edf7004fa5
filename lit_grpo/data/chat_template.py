"""What a chat template writes around a question, and which variables it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_PROBE = "QUESTION17"
TURN_MARKS = (
    *("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|turn>", "[/INST]", "<|user|>", "<|assistant|>"),
    *("<|User|>", "<|Assistant|>", "<｜User｜>", "<｜Assistant｜>", "<|start_of_role|>", "<|START_OF_TURN_TOKEN|>"),
)
"""Texts by which the chat templates of known families mark whose turn it is."""
_ALWAYS_GIVEN = {
    *("messages", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range", "dict", "cycler"),
    *("joiner", "lipsum", "loop", "tojson"),
}
"""Names of a template that transformers or Jinja themselves give a value."""


@dataclass(frozen=True)
class ChatFrame:
    """What a chat template puts around the question of a user.

    Attributes:
        before: text before the question, a system prompt of the template's own included.
        after: text between the question and the completion.
        same_without_turn: whether the template writes the same where no turn of the assistant is to be begun.
        marks: special tokens by which it marks turns.
    """

    before: str
    after: str
    same_without_turn: bool
    marks: tuple[str, ...]

    def finished_by(self, text: str) -> str | None:
        """Return the mark that shows a text to be a finished chat; None where it looks like a question."""
        switch = self.after.strip()
        # Words alone, as "Assistant:", may stand in any question, so they count at its very end.
        marked = any(sign in switch for sign in "<[|")
        if len(switch) > 4 and (switch in text if marked else text.rstrip().endswith(switch)):
            return switch.split("\n")[0].strip()
        marks = (*self.marks, *TURN_MARKS)
        # Asked for every row, of which hardly any holds the letter that a mark begins with.
        if not any(first in text for first in {mark[0] for mark in marks}):
            return None
        return next((mark for mark in marks if mark in text), None)


PLAIN_FRAME = ChatFrame("", "", False, ())
"""Frame of a text template, or of a chat template that refuses a question without a system prompt."""


def frame_of(render: Callable[[list[dict[str, str]], bool], str], tokenizer: Any) -> ChatFrame:
    """Find out what a template writes around a question.

    Args:
        render: applies the template to messages; its second argument says whether the assistant's turn is begun.
        tokenizer: knows which texts are special tokens.
    """
    messages = [{"role": "user", "content": _PROBE}]
    try:
        text, ended = render(messages, True), render(messages, False)
    # A template raises whatever Jinja does, for instance because it wants a system prompt; the rows will tell.
    except Exception:
        return PLAIN_FRAME
    before, found, after = text.partition(_PROBE)
    if not found:
        return PLAIN_FRAME
    # Tokens that begin, end or pad any text say nothing of turns, and <s> is also a tag of HTML.
    plain = {getattr(tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad", "unk")}
    special = dict.fromkeys([*getattr(tokenizer, "all_special_tokens", ()), *_added(tokenizer)])
    marks = tuple(token for token in special if token and token not in plain and token in before + after)
    return ChatFrame(before, after, text == ended, marks)


def _added(tokenizer: Any) -> list[str]:
    return [str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()]


@lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str] | None:
    """Return the names of the variables that a chat template reads; None where Jinja cannot say.

    Variables that transformers itself sets, as ``messages``, are left out.
    """
    import jinja2
    import jinja2.meta
    from jinja2.ext import loopcontrols
    from jinja2.nodes import CallBlock, Node
    from jinja2.parser import Parser

    class Generation(jinja2.ext.Extension):
        """The tag ``generation`` that transformers adds, around what the assistant writes."""

        def __init__(self, environment: jinja2.Environment) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

        def _same(self, caller: Any) -> Any:
            return caller()

    try:
        tree = jinja2.Environment(extensions=[loopcontrols, Generation]).parse(template)
    except jinja2.TemplateError:
        return None
    names = jinja2.meta.find_undeclared_variables(tree)
    return frozenset(name for name in names if name not in _ALWAYS_GIVEN and not name.endswith("_token"))
