"""Data: where questions and gold answers come from, and how they become prompts."""

from lit_grpo.data.cleaning import CleanConfig, Dropped, decontaminate, deduplicate
from lit_grpo.data.sources.addition import AdditionPrompts
from lit_grpo.data.sources.any_file import FilePrompts
from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.data.sources.benchmarks import BENCHMARKS, BenchmarkPrompts
from lit_grpo.data.sources.countdown import CountdownPrompts
from lit_grpo.data.sources.csv_file import CsvPrompts
from lit_grpo.data.sources.hub import HubPrompts
from lit_grpo.data.sources.jsonl import JsonlPrompts
from lit_grpo.data.sources.memory import InMemoryPrompts
from lit_grpo.data.sources.mixed import MixedPrompts
from lit_grpo.data.sources.parquet import ParquetPrompts
from lit_grpo.data.sources.reasoning_gym import ReasoningGymPrompts
from lit_grpo.data.sources.table import FileSource, TableSource
from lit_grpo.data.sources.two_form_addition import TwoFormAddition
from lit_grpo.data.template import NAMED_TEMPLATES, EncodedPrompts, PromptFormat, PromptTooLongError

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
    "FilePrompts",
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
    "decontaminate",
    "deduplicate",
]
