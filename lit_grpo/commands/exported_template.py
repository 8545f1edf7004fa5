"""The chat template of an exported model: with it, transformers alone makes the prompts that the run trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from lit_grpo.data.template import NAMED_TEMPLATES

_QUESTION, _SYSTEM = "{question}", "{system}"
_TEXT = re.compile(r"(?<!\{)\{question\}(?!\})")
"""What tells a text template from a Jinja template."""


def template_for(identity: Mapping[str, str], tokenizer: Any) -> str:
    """Return a Jinja template that writes the last message of the user as the run wrote a question.

    Args:
        identity: what :meth:`lit_grpo.data.PromptFormat.identity` said of the run's prompts.
        tokenizer: the tokenizer of the model, for the tokens that it puts around plain text.
    """
    template, system = identity.get("chat_template", ""), identity.get("system_prompt", "")
    before, after = identity.get("question_format", _QUESTION).split(_QUESTION, 1)
    if template and not _TEXT.search(template):
        variables = json.loads(identity.get("chat_template_kwargs", "{}"))
        return _around(template, system, before, after, variables)
    # Plain text and text templates: the same signs, as one Jinja expression behind the other.
    named = next((one for one in NAMED_TEMPLATES.values() if one.text and one.text == template), None)
    system = system or (named.system if named is not None else None) or ""
    text = template or (f"{_SYSTEM}\n\n{_QUESTION}" if system else _QUESTION)
    first, last = text.split(_QUESTION, 1)
    start, end = _tokens_around(tokenizer)
    given = "{%- if messages[0]['role'] == 'system' -%}{%- set ns.system = messages[0]['content'] -%}{%- endif -%}"
    return (
        f"{{%- set ns = namespace(system={_literal(system)}, question='') -%}}{given}"
        "{%- for message in messages -%}{%- if message['role'] == 'user' -%}"
        "{%- set ns.question = message['content'] -%}{%- endif -%}{%- endfor -%}"
        + _text(start + first)
        + _text(before)
        + "{{- ns.question -}}"
        + _text(after)
        + _text(last + end)
    )


def _around(template: str, system: str, before: str, after: str, variables: Mapping[str, Any]) -> str:
    """Return a chat template with the run's variables, system prompt and question format in front of it."""
    head = ""
    for name, value in variables.items():
        head += f"{{%- if {name} is not defined -%}}{{%- set {name} = {_literal(value)} -%}}{{%- endif -%}}"
    if system:
        message = f"{{'role': 'system', 'content': {_literal(system)}}}"
        head += "{%- if messages[0]['role'] != 'system' -%}"
        head += f"{{%- set messages = [{message}] + messages -%}}{{%- endif -%}}"
    if before or after:
        # Around the last message of the user alone, as in the run.
        content = f"{_literal(before)} ~ message['content'] ~ {_literal(after)}"
        head += (
            "{%- set ns = namespace(turns=[], last=-1) -%}{%- for message in messages -%}"
            "{%- if message['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
            "{%- for message in messages -%}{%- if loop.index0 == ns.last -%}"
            f"{{%- set ns.turns = ns.turns + [dict(message, content={content})] -%}}"
            "{%- else -%}{%- set ns.turns = ns.turns + [message] -%}{%- endif -%}{%- endfor -%}"
            "{%- set messages = ns.turns -%}"
        )
    # An expression between the two: behind a block, a line feed at the template's beginning would be left out.
    return f"{head}{{{{- '' }}}}{template}" if head else template


def _text(text: str) -> str:
    """Return Jinja for a text with the system prompt in it."""
    if not text:
        return ""
    return "".join(
        f"{{{{- {_literal(part)} -}}}}" if index == 0 else f"{{{{- ns.system -}}}}{{{{- {_literal(part)} -}}}}"
        for index, part in enumerate(text.split(_SYSTEM))
    )


def _literal(value: Any) -> str:
    # Jinja reads JSON's texts, lists and mappings; its constants are the same in small letters, and null is none.
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _tokens_around(tokenizer: Any) -> tuple[str, str]:
    """Return the tokens that a tokenizer puts before and behind a plain text, as they are written."""
    bare = tokenizer("0", add_special_tokens=False)["input_ids"]
    whole = list(tokenizer("0", add_special_tokens=True)["input_ids"])
    place = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    written = ["".join(tokenizer.convert_ids_to_tokens(ids)) for ids in (whole[:place], whole[place + len(bare) :])]
    return written[0], written[1]
