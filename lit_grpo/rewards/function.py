"""The function reward: a function of the user, called in worker processes that can be killed."""

from __future__ import annotations

import inspect
import itertools
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.function_call import Call, Reply, call_function, call_isolated
from lit_grpo.rewards.isolation.pool import WorkerPool
from lit_grpo.rewards.returned import SKIPPED, NoScoreError
from lit_grpo.types import RewardInput, Score
from lit_grpo.utils.imports import import_by_path
from lit_grpo.utils.threads import call_within

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


_ELSEWHERE = {
    "completions": "texts", "prompts": "questions", "completion_ids": "tokens", "solution": "answers",
    "solutions": "answers", "ground_truth": "answer", "solution_str": "text", "extra_info": "extra",
    "data_source": "item", "response": "text", "completion": "text", "prompt": "question", "label": "answer",
    "labels": "answers", "queries": "texts",
}  # fmt: skip
"""What parameters of the reward functions of TRL, verl and OpenRLHF are called here."""


class FunctionReward(Reward):
    """Reward whose value a function of yours computes, found by import path: ``my_package.rewards.politeness``.

    The names of its parameters say what it gets. For one completion: ``text``, ``answer``, ``question``, ``extra`` (the
    other columns of the row), ``prompt_id``, ``truncated``, ``tokens`` (their number), ``item`` (the whole
    :class:`lit_grpo.types.RewardInput`); it returns a number or a :class:`lit_grpo.types.Score`, nothing else. A
    batch: ``texts``,
    ``answers``, ``questions``, ``extras``, ``prompt_ids``, ``items``, and ``truncated`` or ``tokens`` beside one of
    these; it returns one number for each, in order. Either may be ``async def``; single ones then run together, at most
    ``concurrency`` at a time.

        def politeness(text: str, extra: dict) -> float: ...
        def graded(texts: list[str], answers: list[str]) -> list[float]: ...
        async def ask(text: str, question: str) -> float: ...

    It runs in worker processes, which are killed at the limit and replaced: whatever it does, the run goes on, or ends
    with a message. So what it changes in its module stays in its worker, and what its module loads, each worker has.
    ``in_process: true`` calls it in the training process instead. Python has no way to end a call there: one that hangs
    is given up at the limit and goes on in a thread, one that crashes takes the run with it, and one that holds the
    interpreter's lock holds up everything.

    In Python a function may be given itself. One that workers cannot import (a lambda, a function in a function or in a
    notebook) is called in this process, in threads.

    Args:
        function: import path of the function, looked for beside the configuration too; in Python also the function.
        limit: seconds for one completion, or for one call with a batch; past it the value is 0 with ``timed_out``.
            None: no limit.
        in_process: call it in the training process.
        workers: processes at most; None: one a usable core, at most 8; for a batch function, 1.
        concurrency: calls of an async function at once, in each worker or scoring thread.
        arguments: further arguments of the function, by name.
        correct_threshold: value from which on the answer is right; null: the function does not say what is right.
        needs_answer: True if every prompt must have a gold answer.
        range: least and greatest value that the function can give; null: it is not known.
        weight: factor in the total reward.
        name: key under which the reward is logged; the function's name if left out.

    Raises:
        UserError: there is no such function, or a parameter of it has another name; or an argument makes no sense.
        FunctionError: from ``score``, or in the place of one: the function raised, ended its process, or goes on
            hanging in this one.
    """

    # Every call has a limit of its own.
    score_limit = None

    def __init__(
        self,
        function: str | Callable[..., Any],
        limit: float | None = 60.0,
        in_process: bool = False,
        workers: int | None = None,
        concurrency: int = 16,
        arguments: dict[str, Any] | None = None,
        correct_threshold: float | None = 1.0,
        needs_answer: bool = False,
        range: tuple[float, float] | None = None,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        path = function.replace(":", ".") if isinstance(function, str) else _path_of(function)
        super().__init__(weight, name or path.rpartition(".")[2])
        if limit is not None and not (limit > 0 and math.isfinite(limit)):
            raise UserError(f"limit is {limit}", where="FunctionReward.limit", remedy="give seconds, or null for none")
        for key, value in (("concurrency", concurrency), ("workers", 1 if workers is None else workers)):
            if value < 1:
                raise UserError(f"{key} is {value}", where=f"FunctionReward.{key}", remedy="give 1 or more")
        self._path, self._limit, self._concurrency = path, limit, concurrency
        self._arguments = dict(arguments or {})
        self._function = find_function(path) if isinstance(function, str) else function
        self._parameters, self._batch = _parameters(self._function, path, self._arguments)
        self._async = inspect.iscoroutinefunction(self._function)
        # Who waits usually asks a server, and its answers cost money or are drawn.
        self.deterministic = not self._async
        self.correct_threshold, self.needs_answer = correct_threshold, needs_answer
        if range is not None:
            self.range = (range[0], range[1])
        self.needs_tokens = "tokens" in self._parameters
        # By its path, too, a function of a notebook or script is not found by a worker, whose main program is another.
        importable = not path.startswith("__main__.") if isinstance(function, str) else _is_importable(function)
        self._in_process = in_process or not importable
        self._hung = itertools.count(1)
        self._gave_up = ""
        self._pool: WorkerPool | None = None
        if not self._in_process:
            self._pool = WorkerPool(
                call_isolated,
                limit=math.inf if limit is None else limit,
                # A batch function often keeps a model, and each worker would load its own.
                workers=1 if workers is None and self._batch else workers,
                # What the function needs, nobody but its author knows; torch alone maps many GiB of address space.
                memory=None,
                preload=path.rpartition(".")[0],
                output=True,
                max_bytes=16_000_000,
            )

    @property
    def compares_with_answer(self) -> bool:
        return self.needs_answer or bool({"answer", "answers", "item", "items"} & set(self._parameters))

    def score(self, batch: Sequence[RewardInput]) -> list[Any]:
        if self._batch:
            lists = {name: [_SINGLE[_BATCH[name]](item) for item in batch] for name in self._parameters}
            reply = self._reply([self._call(lists, len(batch))])[0]
            return self._timed_out(len(batch), reply) if reply.timed_out else _scores(reply)
        values = [{name: _SINGLE[name](item) for name in self._parameters} for item in batch]
        if not self._async:
            replies = self._reply([self._call(one, None) for one in values])
            return [self._one(reply) for reply in replies]
        reply = self._reply([self._call(values, None)])[0]
        if not reply.timed_out:
            return _scores(reply)
        # One of them does not give way to the others, so that the limit of each, which the event loop keeps, does not
        # hold. Called one by one, it alone is lost.
        replies = self._reply([self._call([one], None) for one in values])
        return [self._one(reply) for reply in replies]

    def _one(self, reply: Reply) -> Any:
        if reply.error:
            # In the place of its score, so that the others need not be scored anew.
            return FunctionError(reply.error)
        return self._timed_out(1, reply)[0] if reply.timed_out else _with_time(reply.scores[0], reply.seconds)

    @staticmethod
    def _timed_out(count: int, reply: Reply) -> list[Any]:
        return [Score(0.0, timed_out=True, seconds=reply.seconds / count)] * count

    def _call(self, values: Any, count: int | None) -> Call:
        own = self._limit if self._async and not self._batch else None
        return Call(self._path, values, self._arguments, count, own, self._concurrency)

    def _limit_of(self, call: Call) -> float | None:
        """Return the seconds for a call: of several async ones that take turns, as many times the limit."""
        if self._limit is None or not (self._async and not self._batch):
            return self._limit
        # A little more than their own limits, which say better which of them is late.
        return self._limit * math.ceil(len(call.values) / self._concurrency) + min(1.0, self._limit)

    def _reply(self, calls: list[Call]) -> list[Reply]:
        """Make the calls, and return what came of each.

        Raises:
            FunctionError: they cannot be made.
        """
        if self._pool is not None:
            limit = self._limit_of(calls[0]) if calls else None
            try:
                outcomes = self._pool.map(calls, limit)
            except (pickle.PickleError, AttributeError, TypeError, ValueError, RecursionError) as error:
                # Raised by pickle, which names what it cannot send.
                raise FunctionError(f"what {self._path} is called with cannot be sent to a worker: {error}") from error
            return [self._read(outcome.status, outcome.value, outcome.seconds, outcome.error) for outcome in outcomes]
        return [self._here(call) for call in calls]

    def _here(self, call: Call) -> Reply:
        if self._gave_up:
            raise FunctionError(self._gave_up)
        limit = self._limit_of(call)
        try:
            sent = call_within(limit, call_function, self._function, call, name=f"reward-{self.name}")
        except TimeoutError:
            if next(self._hung) >= _MAX_HUNG_CALLS:
                self._gave_up = (
                    f"{_MAX_HUNG_CALLS} calls of {self._path} have not returned, and go on in this process; without "
                    "in_process they would have been ended"
                )
            return Reply([], timed_out=True, seconds=limit or 0.0)
        return self._read("ok", sent, 0.0, "")

    def _read(self, status: str, sent: Any, seconds: float, error: str) -> Reply:
        if status == "timeout":
            return Reply([], timed_out=True, seconds=seconds)
        if status == "crash":
            error = "ended its process (os._exit, a crash, or the machine was out of memory)"
        elif status == "ok":
            error = str(sent.get("raised", ""))
        if error:
            return Reply([], timed_out=False, seconds=seconds, error=f"{self._path}: {error}")
        return Reply([_unpacked(one) for one in sent["scores"]], timed_out=False, seconds=seconds)

    def start(self) -> None:
        if self._in_process:
            limit = "without a limit" if self._limit is None else f"each call given up after {self._limit:g} s"
            warnings.warn(
                f"the reward {self.name!r} runs in this process, {limit}: if {self._path} hangs or crashes, it takes "
                "the run with it",
                stacklevel=2,
            )
        elif self._limit is None:
            warnings.warn(f"the reward {self.name!r} has no limit: if {self._path} hangs, the run waits", stacklevel=2)
        if self._pool is not None:
            self._pool.start()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


class FunctionError(RuntimeError):
    """Failure of a function reward's function."""


# Each is a thread that may burn a core.
_MAX_HUNG_CALLS = 16


def _scores(reply: Reply) -> list[Any]:
    if reply.error:
        raise FunctionError(reply.error)
    return reply.scores


def _path_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '__main__')}.{name.rpartition('.')[2].strip('<>')}"


def _is_importable(function: Callable[..., Any]) -> bool:
    """Say whether a worker would find this very function under its module and name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return False
    return getattr(sys.modules.get(module), name, None) is function


def _unpacked(sent: Any) -> Any:
    if isinstance(sent, list):
        return Score(*sent)
    return NoScoreError(sent["problem"]) if isinstance(sent, dict) else sent


def _with_time(score: Any, seconds: float) -> Any:
    if isinstance(score, Score):
        return score._replace(seconds=seconds)
    if score is None:
        return SKIPPED._replace(seconds=seconds)
    return Score(score, seconds=seconds) if isinstance(score, float) else score


def find_function(path: str) -> Callable[..., Any]:
    """Import the function at ``package.module.name`` or ``package.module:name``.

    Raises:
        UserError: it is not there, is no function, or its module fails when it is imported.
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
        known = _ELSEWHERE.get(unknown[0])
        raise UserError(
            f"{path} asks for {unknown[0]!r}, which is nothing a reward gets",
            where=where,
            remedy=(f"call that parameter {known!r}. " if known else "")
            + f"One completion: {', '.join(_SINGLE)}; a batch: {', '.join(_BATCH)}; "
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
