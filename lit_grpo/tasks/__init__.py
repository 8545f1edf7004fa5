"""Tasks: where questions and gold answers come from, and how they become prompts."""

from lit_grpo.tasks.addition import AdditionPrompts
from lit_grpo.tasks.base import PromptSource, Row
from lit_grpo.tasks.benchmarks import BENCHMARKS, BenchmarkPrompts
from lit_grpo.tasks.char_tokenizer import char_tokenizer
from lit_grpo.tasks.clean import CleanConfig, Dropped, decontaminate, deduplicate
from lit_grpo.tasks.countdown import CountdownPrompts
from lit_grpo.tasks.csv_file import CsvPrompts
from lit_grpo.tasks.hub import HubPrompts
from lit_grpo.tasks.jsonl import JsonlPrompts
from lit_grpo.tasks.memory import InMemoryPrompts
from lit_grpo.tasks.mixed import MixedPrompts
from lit_grpo.tasks.parquet import ParquetPrompts
from lit_grpo.tasks.reasoning_gym import ReasoningGymPrompts
from lit_grpo.tasks.table import FileSource, TableSource
from lit_grpo.tasks.template import NAMED_TEMPLATES, EncodedPrompts, PromptFormat, PromptTooLongError
from lit_grpo.tasks.two_form_addition import TwoFormAddition

__all__ = [
    "BENCHMARKS",
    "NAMED_TEMPLATES",
    "AdditionPrompts",
    "BenchmarkPrompts",
    "CleanConfig",
    "CountdownPrompts",
    "CsvPrompts",
    "Dropped",
    "EncodedPrompts",
    "FileSource",
    "HubPrompts",
    "InMemoryPrompts",
    "JsonlPrompts",
    "MixedPrompts",
    "ParquetPrompts",
    "PromptFormat",
    "PromptSource",
    "PromptTooLongError",
    "ReasoningGymPrompts",
    "Row",
    "TableSource",
    "TwoFormAddition",
    "char_tokenizer",
    "decontaminate",
    "deduplicate",
]
