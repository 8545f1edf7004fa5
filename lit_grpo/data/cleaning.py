"""Cleaning of training prompts: duplicates, contradictions and questions of evaluation sets are left out."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.utils.bounds import Bound, check_fields

DUPLICATE, CONFLICT, CONTAMINATED, TOO_LONG = "duplicate", "conflicting answers", "contaminated", "too long"
"""Reasons for leaving a row out, as the prompt report and ``dropped_file`` name them."""


@dataclass
class CleanConfig:
    """Settings of what is left out of the training prompts before the run; nothing unless asked for.

    Attributes:
        deduplicate: True to keep the first of questions that are equal but for white space and case, and none of them
            if their answers differ.
        decontaminate: evaluation sets whose questions must not be trained on.
        held_out: True to decontaminate against ``val_prompts`` and ``test_prompts`` too.
        ngram: words in a row that a training question must share with one of an evaluation set to be compared with it
            as a whole: 13, as for GPT-3 (2005.14165, appendix C) and Qwen2.5-Math (2409.12122, section 3).
        overlap: share of both questions (twice its length over that of the two) from which on the longest common
            subsequence of their words gives the question away, and it is left out: 0.6, as for Qwen2.5-Math. Questions
            whose letters and digits are all equal are always left out.
        dropped_file: JSON Lines file with every row that was left out, here or by ``format.on_long``: its id, source,
            reason, the other row it met, file and line.
    """

    deduplicate: bool = False
    decontaminate: list[PromptSource] = field(default_factory=list)
    held_out: bool = False
    ngram: Annotated[int, Bound(least=2)] = 13
    overlap: Annotated[float, Bound(above=0, most=1)] = 0.6
    dropped_file: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "data.clean")


@dataclass(frozen=True)
class Dropped:
    """A row that was left out, with the reason."""

    row: Row
    reason: str
    other: str = ""
    """Id of the row that this one repeats, contradicts or gives away; empty where the reason is none of these."""


def deduplicate(rows: Sequence[Row]) -> tuple[list[Row], list[Dropped]]:
    """Split rows into those whose question is new, and the others.

    A row without an answer contradicts nobody; of equal questions the first with an answer stays.
    """
    by_question: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_question[_asked(row)].append(row)
    dropped: dict[str, Dropped] = {}
    for group in by_question.values():
        answers: dict[frozenset[str], Row] = {}
        for row in group:
            if row.answer and row.answer.strip():
                answers.setdefault(_golds(row), row)
        # Nobody knows which of two answers is right, so none of the rows can be trained on. Rows with several golds
        # agree where one gold is in all of them.
        if len(answers) > 1 and not frozenset.intersection(*answers):
            for row in group:
                other = next(r for golds, r in answers.items() if golds != _golds(row))
                dropped[row.id] = Dropped(row, CONFLICT, other.id)
        else:
            first = next(iter(answers.values()), group[0])
            dropped |= {row.id: Dropped(row, DUPLICATE, first.id) for row in group if row is not first}
    return [row for row in rows if row.id not in dropped], list(dropped.values())


def decontaminate(
    rows: Sequence[Row], evaluation: Iterable[Row], *, ngram: int = 13, overlap: float = 0.6
) -> tuple[list[Row], list[Dropped]]:
    """Split rows into those that give no question of an evaluation set away, and the others; see :class:`CleanConfig`.

    A question of an evaluation set with fewer than ``ngram`` words can only be found whole.
    """
    index = EvaluationIndex(evaluation, ngram, overlap)
    kept: list[Row] = []
    dropped: list[Dropped] = []
    for row in rows:
        other = index.find(row.question)
        if other is None:
            kept.append(row)
        else:
            dropped.append(Dropped(row, CONTAMINATED, other.id))
    return kept, dropped


class EvaluationIndex:
    """Index of questions that must not be trained on, by their letters and by their runs of words."""

    def __init__(self, rows: Iterable[Row], ngram: int, overlap: float) -> None:
        self.ngram, self.overlap = ngram, overlap
        self._by_letters: dict[str, Row] = {}
        self._by_run: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)
        self._ends: set[tuple[str, str]] = set()
        self._rows: list[tuple[Row, list[str]]] = []
        for row in rows:
            self._by_letters.setdefault(letters(row.question), row)
            row_words = words(row.question)
            for run in _runs(row_words, ngram):
                self._by_run[run].add(len(self._rows))
                self._ends.add((run[0], run[-1]))
            self._rows.append((row, row_words))

    def find(self, question: str) -> Row | None:
        """Return the row of an evaluation set that a question gives away, or None."""
        if (row := self._by_letters.get(letters(question))) is not None:
            return row
        given = words(question)
        shared = Counter(i for run in self._candidates(given) for i in self._by_run.get(run, ()))
        # The comparison is quadratic in the number of words, so questions with most runs in common come first.
        for i, _ in shared.most_common():
            row, row_words = self._rows[i]
            # The share is of both lengths; Qwen2.5-Math's report leaves open of which. Of the evaluation question's
            # alone, phrases such as "where m and n are relatively prime positive integers" are enough to condemn.
            if 2 * common_subsequence(given, row_words) >= self.overlap * (len(given) + len(row_words)):
                return row
        return None

    def _candidates(self, given: Sequence[str]) -> set[tuple[str, ...]]:
        # Most runs are ruled out by their first and last word, without being built.
        size = self.ngram
        starts = (i for i in range(len(given) - size + 1) if (given[i], given[i + size - 1]) in self._ends)
        return {tuple(given[i : i + size]) for i in starts}


def _asked(row: Row) -> str:
    """Return what two rows that ask the same have in common: of a chat, every message."""
    if row.messages is None or len(row.messages) == 1:
        return normal(row.question)
    return "\n".join(f"{message['role']}: {normal(message['content'])}" for message in row.messages)


def _golds(row: Row) -> frozenset[str]:
    return frozenset(normal(gold) for gold in row.golds)


def normal(text: str | None) -> str:
    """Fold case and collapse white space."""
    return " ".join((text or "").casefold().split())


def letters(text: str) -> str:
    """Keep letters and digits alone, without case."""
    # This is what stays equal when two sources punctuate and typeset a question differently. A question of signs alone
    # has no letters, and must not equal every other such question.
    return "".join(filter(str.isalnum, text.casefold())) or normal(text)


def words(text: str) -> list[str]:
    """Split into runs of ASCII letters and digits, and every other letter by itself."""
    # Chinese puts no spaces between words, so each of its letters counts as one.
    return re.findall(r"[a-z0-9]+|[^\W_]", text.casefold())


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    # One row of the table at a time: only the row before is needed.
    before = [0] * (len(b) + 1)
    for x in a:
        now = [0]
        for j, y in enumerate(b):
            now.append(before[j] + 1 if x == y else max(before[j + 1], now[j]))
        before = now
    return before[-1]


def _runs(text: Sequence[str], size: int) -> set[tuple[str, ...]]:
    return {tuple(text[i : i + size]) for i in range(len(text) - size + 1)}
