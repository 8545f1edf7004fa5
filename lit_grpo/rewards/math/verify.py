"""The math verifier: 1 where the final answer of a completion agrees with the gold answer, else 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, get_args

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.isolation.pool import Outcome, WorkerPool
from lit_grpo.rewards.math.answer import Extract, Kind, check_extract, final_answer, gold_answer
from lit_grpo.rewards.math.grade import grade, grade_quickly, kind_of, normal_form
from lit_grpo.types import RewardInput, Score


class Verdict(NamedTuple):
    """Verdict of the verifier on one completion."""

    correct: bool
    timed_out: bool = False
    seconds: float = 0.0
    """Time in a worker; 0 where the written form decided."""
    answer: str | None = None
    """Final answer found in the text; None if there is none."""
    error: str = ""
    """Reason why a worker could not decide; such an answer counts as wrong."""
    crashed: bool = False
    """True if the worker process died."""
    reading: float = 0.0
    """Seconds to find the answer in the text and to look at its written form."""


class MathReward(Reward):
    r"""Reward of 1 for a right final answer, else 0: by its written form where that decides, else by math-verify.

    math-verify and SymPy run in processes that are killed at the time limit, so no answer can hold up or end a run. A
    timeout is a wrong answer with ``Score.timed_out``, a worker that died of it one with ``Score.failed``.

    Which answer counts is for ``extract`` to say. ``auto``: the last complete ``<answer>...</answer>``, whatever stands
    before it (without one, what follows an opening tag, if the completion was not cut off: a stop string may be left
    out of the text); else the last ``\boxed`` (several joined by "or" are a list); else what follows the last ``####``
    or "answer is"; else what the last sentence ends in, unless the completion was cut off or refuses. ``tag`` and
    ``boxed``: a complete one of that form alone. ``last_number``: the last number, unless it is part of a formula or
    the completion was cut off. Within a tag a box or "answer is" counts before the whole; an empty tag is no answer.
    What a base model adds after inventing a next question is ignored.

    Choices: a unit, percent sign or base may be left out, not exchanged (5 m is 500 cm, not 5 cm); degrees agree with
    radians; intervals agree with inequalities; a gold decimal of three or more digits is taken as rounded, and agrees
    with an exact answer to its last place; other numbers must be equal, whatever their size; lists, sets and unions
    have no order, tuples have; unevaluated sums and products count; an empty gold agrees with nothing.

    Args:
        limit: seconds for one answer, from the moment a worker takes it.
        workers: processes at most; None: one a usable core, at most 8.
        memory: MiB of address space for each worker.
        extract: form in which an answer counts: ``auto``, ``boxed``, ``tag`` or ``last_number``.
        answer_tag: name of the tag around an answer.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: an argument is not positive, or ``extract`` or ``answer_tag`` is none.
    """

    needs_answer = True
    range = (0.0, 1.0)
    # Each answer has a limit of its own.
    score_limit = None
    by_completion = True
    extracts_answer = True

    def __init__(
        self,
        limit: float = 5.0,
        workers: int | None = None,
        memory: int = 2048,
        extract: Extract = "auto",
        answer_tag: str = "answer",
        weight: float = 1.0,
        name: str | None = "math",
    ) -> None:
        super().__init__(weight, name)
        for key, value in (("limit", limit), ("workers", 1 if workers is None else workers), ("memory", memory)):
            if not value > 0:
                raise UserError(f"{key} is {value}", where=f"MathReward.{key}", remedy="give a positive number")
        check_extract(extract, answer_tag, "MathReward", get_args(Extract))
        self._extract, self._answer_tag = extract, answer_tag
        # Workers see next to none of the environment, which may hold keys.
        self._pool = WorkerPool(grade, limit=limit, workers=workers, memory=memory * 1024**2, environment=False)

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        golds = [x.prompt.answer or "" for x in batch]
        verdicts = self.verify(golds, [x.text for x in batch], [x.completion.truncated for x in batch])
        return [
            Score(float(v.correct), v.timed_out, v.crashed, no_answer=not v.answer, seconds=v.reading + v.seconds)
            for v in verdicts
        ]

    def start(self) -> None:
        self._pool.start()

    def final_answers(self, batch: Sequence[RewardInput]) -> list[str | None]:
        out: list[str | None] = []
        for x in batch:
            answer = self._final_answer(x.text, kind_of(gold_answer(x.prompt.answer or "")), x.completion.truncated)
            out.append(normal_form(answer) if answer else None)
        return out

    def _final_answer(self, text: str, kind: Kind, truncated: bool) -> str | None:
        return final_answer(text, kind, truncated, self._extract, self._answer_tag)

    def verify(
        self, golds: Sequence[str], texts: Sequence[str], truncated: Sequence[bool] | None = None
    ) -> list[Verdict]:
        """Return the verdicts on ready texts, in order.

        Args:
            golds: gold answer of each text; whole solutions with a box or ``####`` are allowed.
            texts: whole completions.
            truncated: True for each text that the length limit cut; None: none was cut.
        """
        was_cut = truncated or [False] * len(texts)
        # The samples of one prompt share their gold, so each gold is read once.
        cleaned = {gold: (gold_answer(gold), kind_of(gold_answer(gold))) for gold in {*golds}}
        # The samples of one prompt often agree, so each pair of gold and answer is compared once.
        quick: dict[tuple[str, str | None], bool | None] = {}
        hard: dict[tuple[str, str | None], Future[Outcome]] = {}
        read: list[tuple[tuple[str, str | None], float]] = []
        for gold, text, short in zip(golds, texts, was_cut, strict=True):
            began = time.perf_counter()
            pair = cleaned[gold][0], self._final_answer(text, cleaned[gold][1], short)
            if pair not in quick:
                quick[pair] = grade_quickly(pair[0], pair[1]) if pair[1] else False
                if quick[pair] is None:
                    # Submitted at once: the workers begin while the other texts are read.
                    (hard[pair],) = self._pool.submit([pair])
            read.append((pair, time.perf_counter() - began))
        verdicts = []
        # Waited for only when all is read and submitted: the workers run beside each other.
        for pair, reading in read:
            if pair not in hard:
                verdicts.append(Verdict(bool(quick[pair]), answer=pair[1], reading=reading))
                continue
            outcome = hard[pair].result()
            verdicts.append(
                Verdict(
                    correct=outcome.status == "ok" and outcome.value is True,
                    timed_out=outcome.status == "timeout",
                    seconds=outcome.seconds,
                    answer=pair[1],
                    error=outcome.error,
                    crashed=outcome.status == "crash",
                    reading=reading,
                )
            )
        return verdicts

    def close(self) -> None:
        self._pool.close()
