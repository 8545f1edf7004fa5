"""Public maths benchmarks by name: where each is on the hub, and which columns hold question and answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.data.sources.hub import HubPrompts
from lit_grpo.data.sources.jsonl import JsonlPrompts
from lit_grpo.data.sources.table import Record
from lit_grpo.errors import UserError, nearest


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as a data set of the hub.

    Attributes:
        dataset: name of the data set.
        split: name of the split that is the test set, which some data sets call ``train``.
        question: column of the question.
        answer: column of the gold answer; a list is joined with commas.
        config: configuration of the data set, if it has several.
        prompts: number of questions.
        about: description in one line.
    """

    dataset: str
    split: str
    question: str
    answer: str
    prompts: int
    about: str
    config: str | None = None


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        "openai/gsm8k", "test", "question", "answer", 1319, "grade-school word problems, 2110.14168", "main"
    ),
    "math500": Benchmark("HuggingFaceH4/MATH-500", "test", "problem", "answer", 500, "from MATH, 2305.20050"),
    "aime24": Benchmark("HuggingFaceH4/aime_2024", "train", "problem", "answer", 30, "AIME 2024 I and II"),
    "aime25": Benchmark("math-ai/aime25", "test", "problem", "answer", 30, "AIME 2025 I and II"),
    "amc23": Benchmark("math-ai/amc23", "test", "question", "answer", 40, "AMC 12 2023"),
    "minerva": Benchmark(
        "math-ai/minervamath", "test", "question", "answer", 272, "undergraduate science and maths, 2206.14858"
    ),
    "olympiadbench": Benchmark(
        "Hothan/OlympiadBench", "train", "question", "final_answer", 674, "English text-only maths competitions, "
        "2402.14008", "OE_TO_maths_en_COMP",
    ),
    "college_math": Benchmark(
        "realtreetune/college_math", "test", "problem", "answer", 2818, "college textbooks, 2403.02884"
    ),
    "gaokao2023": Benchmark(
        "MARIO-Math-Reasoning/Gaokao2023-Math-En", "train", "question", "answer", 385, "Chinese college entrance "
        "examination 2023, in English",
    ),
}  # fmt: skip


class BenchmarkPrompts(PromptSource):
    """A public benchmark by name. Without network, ``path`` names a JSONL file of the same questions.

    GSM8K's gold is what follows ``####``, and the whole solution goes into the column ``solution``; of several answers
    in a list the gold is the list with commas; a row without a gold answer (Gaokao 2023 has two) is left out.

    Args:
        benchmark: one of gsm8k, math500, aime24, aime25, amc23, minerva, olympiadbench, college_math, gaokao2023.
        path: a JSONL file (gzip or not) with the columns ``prompt`` and ``answer`` instead of the hub's data set.
        revision: branch, tag or commit of the hub's data set; give a commit for numbers that can be compared.
        limit: number of rows to keep, the first ones.

    Raises:
        UserError: there is no benchmark of that name.
    """

    def __init__(
        self, benchmark: str, path: str | None = None, revision: str | None = None, limit: int | None = None
    ) -> None:
        if benchmark not in BENCHMARKS:
            close = nearest(benchmark, BENCHMARKS)
            raise UserError(
                f"there is no benchmark {benchmark!r}",
                where="BenchmarkPrompts.benchmark",
                remedy=f"did you mean {close!r}?" if close else f"one of {', '.join(BENCHMARKS)}",
            )
        self.name = benchmark
        self._source: PromptSource
        if path is not None:
            self._source = JsonlPrompts(path, limit=limit, name=benchmark)
        else:
            self._source = _OnHub(benchmark, revision, limit)

    def rows(self) -> Sequence[Row]:
        return self._source.rows()


class _OnHub(HubPrompts):
    """The rows of a benchmark as the hub has them, with the gold answer as one text."""

    def __init__(self, benchmark: str, revision: str | None, limit: int | None) -> None:
        self.benchmark = BENCHMARKS[benchmark]
        super().__init__(
            self.benchmark.dataset,
            config=self.benchmark.config,
            split=self.benchmark.split,
            revision=revision,
            question_column=self.benchmark.question,
            answer_column=self.benchmark.answer,
            limit=limit,
            name=benchmark,
        )

    def records(self) -> Iterator[Record]:
        for record, where in super().records():
            # A question without a gold answer can only be counted wrong, so it is left out.
            gold = gold_text(record.get(self.benchmark.answer))
            if gold is not None and gold.strip():
                yield {**self._with_solution(record), self.benchmark.answer: gold}, where

    def _with_solution(self, record: Mapping[str, Any]) -> dict[str, Any]:
        answer = record.get(self.benchmark.answer)
        # GSM8K's answer column holds whole solutions, which are kept beside the gold.
        whole = isinstance(answer, str) and "####" in answer
        return {**record, "solution": answer} if whole else dict(record)


def gold_text(answer: Any) -> str | None:
    """Make one text of what a benchmark has in its answer column."""
    if isinstance(answer, list | tuple):
        return ", ".join(str(part) for part in answer)
    if isinstance(answer, str):
        return answer.rpartition("####")[2].strip() if "####" in answer else answer
    return None if answer is None else str(answer)
