"""Public maths benchmarks by name: where each is on the hub, and which columns hold question and answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.data.sources.hub import HubPrompts
from lit_grpo.data.sources.jsonl import JsonlPrompts
from lit_grpo.data.sources.layout import behind_hashes
from lit_grpo.data.sources.table import Record
from lit_grpo.errors import UserError
from lit_grpo.rewards.math.answer import final_answer
from lit_grpo.utils.spelling import nearest


@dataclass(frozen=True)
class Benchmark:
    r"""A benchmark as a data set of the hub.

    Attributes:
        dataset: name of the data set.
        split: name of the split that is the test set, which some data sets call ``train``.
        question: column of the question.
        answer: column of the gold answer; a list is joined with commas.
        prompts: number of questions.
        about: description in one line.
        config: configuration of the data set, if it has several.
        train: name of the split to train on, if the data set has one.
        boxed: whether the answer column holds solutions, whose last ``\boxed{}`` is the gold answer.
    """

    dataset: str
    split: str
    question: str
    answer: str
    prompts: int
    about: str
    config: str | None = None
    train: str | None = None
    boxed: bool = False


BENCHMARKS: dict[str, Benchmark] = {
    "gsm8k": Benchmark(
        "openai/gsm8k", "test", "question", "answer", 1319, "grade-school word problems, 2110.14168", "main",
        train="train",
    ),
    "math": Benchmark(
        "DigitalLearningGmbH/MATH-lighteval", "test", "problem", "solution", 5000, "competition problems, 2103.03874",
        "default", train="train", boxed=True,
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
    r"""A public benchmark by name. Without network, ``path`` names a JSONL file of the same questions.

    GSM8K's gold is what follows ``####``, without the commas of thousands, and MATH's what stands in the last
    ``\boxed{}``; the whole solution goes into the column ``solution``. Of several answers in a list the gold is the
    list with commas; a row without a gold answer (Gaokao 2023 has two) is left out.

    Args:
        benchmark: one of gsm8k, math, math500, aime24, aime25, amc23, minerva, olympiadbench, college_math, gaokao2023.
        path: a JSONL file (gzip or not) with the columns ``prompt`` and ``answer`` instead of the hub's data set.
        revision: branch, tag or commit of the hub's data set; give a commit for numbers that can be compared.
        limit: number of rows to keep, the first ones.
        split: ``test``, or ``train`` of those that have questions to train on (gsm8k, math).

    Raises:
        UserError: there is no benchmark of that name, or it has no such split.
    """

    def __init__(
        self,
        benchmark: str,
        path: str | None = None,
        revision: str | None = None,
        limit: int | None = None,
        split: Literal["test", "train"] = "test",
    ) -> None:
        if benchmark not in BENCHMARKS:
            close = nearest(benchmark, BENCHMARKS)
            raise UserError(
                f"there is no benchmark {benchmark!r}",
                where="BenchmarkPrompts.benchmark",
                remedy=f"did you mean {close!r}?" if close else f"one of {', '.join(BENCHMARKS)}",
            )
        self.name = benchmark
        if split == "train" and BENCHMARKS[benchmark].train is None and path is None:
            raise UserError(
                f"{benchmark} has no questions to train on",
                where="BenchmarkPrompts.split",
                remedy=f"split: train is there for {', '.join(n for n, b in BENCHMARKS.items() if b.train)}",
            )
        self._source: PromptSource
        if path is not None:
            self._source = JsonlPrompts(path, limit=limit, name=benchmark)
        else:
            self._source = _OnHub(benchmark, revision, limit, split)

    def rows(self) -> Sequence[Row]:
        return self._source.rows()

    def columns_taken(self) -> list[str]:
        return self._source.columns_taken()


class _OnHub(HubPrompts):
    """The rows of a benchmark as the hub has them, with the gold answer as one text."""

    def __init__(self, benchmark: str, revision: str | None, limit: int | None, split: str) -> None:
        self.benchmark = BENCHMARKS[benchmark]
        super().__init__(
            self.benchmark.dataset,
            config=self.benchmark.config,
            split=str(self.benchmark.train) if split == "train" else self.benchmark.split,
            revision=revision,
            question_column=self.benchmark.question,
            answer_column=_GOLD,
            limit=limit,
            name=benchmark,
        )

    def records(self) -> Iterator[Record]:
        for record, where in super().records():
            whole = record.get(self.benchmark.answer)
            gold = final_answer(str(whole)) if self.benchmark.boxed else gold_text(whole)
            # A question without a gold answer can only be counted wrong, so it is left out.
            if gold is not None and gold.strip():
                rest = {k: v for k, v in record.items() if k != self.benchmark.answer}
                # Worked solutions that hold the gold answer are kept beside it.
                solution = {"solution": whole} if isinstance(whole, str) and whole != gold else {}
                yield {**rest, **solution, _GOLD: gold}, where


_GOLD = "answer"


def gold_text(answer: Any) -> str | None:
    """Make one text of what a benchmark has in its answer column."""
    if isinstance(answer, list | tuple):
        return ", ".join(str(part) for part in answer)
    if isinstance(answer, str):
        return behind_hashes(answer) or answer
    return None if answer is None else str(answer)
