"""The function reward: a function of the user, found by import path."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.isolation.pool import WorkerPool
from lit_grpo.types import RewardInput, Score
from lit_grpo.utils.imports import import_by_path

_SINGLE: dict[str, Callable[[RewardInput], Any]] = {
    "text": lambda item: item.text,
    "answer": lambda item: item.prompt.answer,
    "question": lambda item: item.prompt.question,
    "extra": lambda item: dict(item.prompt.extra),
    "prompt_id": lambda item: item.prompt.id,
    "truncated": lambda item: item.completion.truncated,
    "tokens": lambda item: len(item.completion.token_ids),
    "item": lambda item: item,
}
"""Values that a function of one completion may ask for, by the name of its parameter."""
_BATCH = {
    "texts": "text", "answers": "answer", "questions": "question", "extras": "extra", "prompt_ids": "prompt_id",
    "truncated": "truncated", "tokens": "tokens", "items": "item",
}  # fmt: skip
"""Values for a function of a whole batch, lists of equal length: the name of each in ``_SINGLE``."""


class FunctionReward(Reward):
    """Reward whose value a function of yours computes, found by import path: ``my_package.rewards.politeness``.

    The names of its parameters say what it gets. For one completion: ``text``, ``answer``, ``question``, ``extra`` (the
    other columns of the row), ``prompt_id``, ``truncated``, ``tokens`` (their number), ``item`` (the whole
    :class:`lit_grpo.types.RewardInput`); it returns a number or a :class:`lit_grpo.types.Score`. A batch: ``texts``,
    ``answers``, ``questions``, ``extras``, ``prompt_ids``, ``items``, and ``truncated`` or ``tokens`` beside one of
    these; it returns one number for each, in order. Either may be ``async def``; single ones then run together, at most
    ``concurrency`` at a time.

        def politeness(text: str, extra: dict) -> float: ...
        def graded(texts: list[str], answers: list[str]) -> list[float]: ...
        async def ask(text: str, question: str) -> float: ...

    Args:
        function: import path of the function; looked for beside the configuration too.
        limit: seconds for one completion. A function that is not async then runs in worker processes that are killed
            at the limit; past it the value is 0 with ``timed_out``. None: no limit.
        concurrency: calls of an async function at once, in each scoring thread.
        arguments: further arguments of the function, by name.
        correct_threshold: value from which on the answer is right; null: the function does not say what is right.
        needs_answer: True if every prompt must have a gold answer.
        range: least and greatest value that the function can give; null: it is not known.
        weight: factor in the total reward.
        name: key under which the reward is logged; the function's name if left out.

    Raises:
        UserError: there is no such function, or a parameter of it has another name; or ``limit`` with a batch function.
    """

    def __init__(
        self,
        function: str,
        limit: float | None = None,
        concurrency: int = 16,
        arguments: dict[str, Any] | None = None,
        correct_threshold: float | None = 1.0,
        needs_answer: bool = False,
        range: tuple[float, float] | None = None,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name or function.rpartition(".")[2])
        if limit is not None and not (limit > 0 and math.isfinite(limit)):
            raise UserError(f"limit is {limit}", where="FunctionReward.limit", remedy="give seconds, or null for none")
        if concurrency < 1:
            raise UserError(
                f"concurrency is {concurrency}", where="FunctionReward.concurrency", remedy="give 1 or more"
            )
        self._path, self._limit, self._concurrency = function, limit, concurrency
        self._arguments = dict(arguments or {})
        self._function = find_function(function)
        self._parameters, self._batch = _parameters(self._function, function, self._arguments)
        self._async = inspect.iscoroutinefunction(self._function)
        self.correct_threshold, self.needs_answer = correct_threshold, needs_answer
        if range is not None:
            self.range = (range[0], range[1])
        self.needs_tokens = "tokens" in self._parameters
        self._pool: WorkerPool | None = None
        if limit is not None and not self._async:
            self._check_isolated()
            self._pool = WorkerPool(call_isolated, limit=limit)
        elif limit is not None and self._batch:
            raise UserError(
                f"{function} takes a whole batch, and a limit is for one completion",
                where="FunctionReward.limit",
                remedy="leave it out, or write the function for one completion",
            )

    def _check_isolated(self) -> None:
        if self._batch or "item" in self._parameters:
            raise UserError(
                f"{self._path} cannot run in worker processes, which limit needs",
                where="FunctionReward.limit",
                remedy="write it for one completion, with text, answer, extra and so on in place of item",
            )

    def score(self, batch: Sequence[RewardInput]) -> Sequence[Score | float]:
        if self._pool is not None:
            return self._isolated(batch)
        if self._batch:
            lists = {name: [_SINGLE[_BATCH[name]](item) for item in batch] for name in self._parameters}
            result = self._function(**lists, **self._arguments)
            return list(asyncio.run(result) if self._async else result)
        if self._async:
            # A loop of its own for each call, since score runs in several threads and a loop belongs to one.
            return asyncio.run(self._together(batch))
        return [self._function(**self._values(item), **self._arguments) for item in batch]

    def _values(self, item: RewardInput) -> dict[str, Any]:
        return {name: _SINGLE[name](item) for name in self._parameters}

    async def _together(self, batch: Sequence[RewardInput]) -> list[Score | float]:
        semaphore = asyncio.Semaphore(self._concurrency)

        async def one(item: RewardInput) -> Score | float:
            async with semaphore:
                try:
                    return await asyncio.wait_for(self._function(**self._values(item), **self._arguments), self._limit)
                except TimeoutError:
                    # Without a limit it is the function's own, and an error like any other.
                    if self._limit is None:
                        raise
                    return Score(0.0, timed_out=True, seconds=self._limit)

        return list(await asyncio.gather(*(one(item) for item in batch)))

    def _isolated(self, batch: Sequence[RewardInput]) -> list[Score | float]:
        assert self._pool is not None
        scores: list[Score | float] = []
        outcomes = self._pool.map([(self._path, {**self._values(item), **self._arguments}) for item in batch])
        for outcome in outcomes:
            if outcome.status == "timeout":
                scores.append(Score(0.0, timed_out=True, seconds=outcome.seconds))
            elif outcome.status == "ok":
                values = outcome.value if isinstance(outcome.value, list) else [outcome.value]
                scores.append(Score(*values)._replace(seconds=outcome.seconds))
            else:
                raise RuntimeError(f"{self._path}: {outcome.error}")
        return scores

    def start(self) -> None:
        if self._pool is not None:
            self._pool.start()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def find_function(path: str) -> Callable[..., Any]:
    """Import the function at ``package.module.name`` or ``package.module:name``.

    Raises:
        UserError: it is not there, or is no function.
    """
    path = path.replace(":", ".")
    where = "FunctionReward.function"
    function = import_by_path(path, where, remedy="as in my_module.my_function; is it in the folder you are in?")
    # A class is callable too, but what it makes is no score.
    if not callable(function) or inspect.isclass(function):
        module, _, name = path.rpartition(".")
        raise UserError(f"{module} has no function {name!r}, only a {type(function).__name__}", where=where)
    return function


def _parameters(function: Callable[..., Any], path: str, given: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the names of the values that a function asks for, and whether it takes a whole batch."""
    where = "FunctionReward.function"
    parameters = inspect.signature(function).parameters.values()
    wanted = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in given]
    # Values are handed over by name, which a positional-only parameter does not take.
    positional = [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY and p.default is p.empty]
    available = {*_SINGLE, *_BATCH}
    unknown = positional + [p.name for p in wanted if p.name not in available and p.default is p.empty]
    if unknown:
        raise UserError(
            f"{path} asks for {unknown[0]!r}, which is nothing a reward gets",
            where=where,
            remedy=f"one completion: {', '.join(_SINGLE)}; a batch: {', '.join(_BATCH)}; "
            "anything else under `arguments`, or with a default",
        )
    unused = next((name for name in given if name not in {p.name for p in parameters}), None)
    if unused is not None and not any(p.kind == p.VAR_KEYWORD for p in parameters):
        raise UserError(f"{path} has no parameter {unused!r}", where="FunctionReward.arguments")
    names = [p.name for p in wanted if p.name in available]
    # `truncated` and `tokens` are one word for one completion and for many, so the other names decide.
    plural, singular = {*names} - {*_SINGLE}, {*names} - {*_BATCH}
    if plural and singular:
        raise UserError(
            f"{path} asks for {sorted(singular)[0]!r} of one completion and {sorted(plural)[0]!r} of a batch",
            where=where,
            remedy="use the names of one kind",
        )
    if not names:
        raise UserError(
            f"{path} asks for nothing of the completion",
            where=where,
            remedy=f"its parameters may be {', '.join(_SINGLE)}",
        )
    return names, bool(plural)


def call_isolated(call: tuple[str, dict[str, Any]]) -> Any:
    """Call the function at a path for one completion, in a worker process; return plain data."""
    path, arguments = call
    value = find_function(path)(**arguments)
    # A Score is sent as a list, since only what JSON can hold leaves a worker.
    if isinstance(value, tuple):
        return [float(value[0]), *value[1:]]
    return float(value)
