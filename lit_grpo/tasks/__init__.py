"""Tasks: where questions and gold answers come from, and how they become prompts."""

from lit_grpo.tasks.addition import AdditionPrompts
from lit_grpo.tasks.base import PromptSource, Row
from lit_grpo.tasks.char_tokenizer import char_tokenizer
from lit_grpo.tasks.template import EncodedPrompts, PromptFormat, PromptTooLongError

__all__ = [
    "AdditionPrompts",
    "EncodedPrompts",
    "PromptFormat",
    "PromptSource",
    "PromptTooLongError",
    "Row",
    "char_tokenizer",
]
