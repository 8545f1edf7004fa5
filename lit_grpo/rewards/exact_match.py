"""The exact-match reward: 1 where the answer is the gold answer, character for character."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, get_args

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.math.answer import check_extract, final_answer
from lit_grpo.types import RewardInput, Score

ExactExtract = Literal["whole", "auto", "boxed", "tag", "last_number", "last_line"]


class ExactMatch(Reward):
    """Reward of 1 if the completion, or the final answer in it, equals the gold answer, else 0.

    Space around either is ignored.

    Args:
        pattern: regular expression, dots match newlines; its last match is the answer: its first group, or the whole
            match if it has none. No match scores 0. Left out, ``extract`` says what the answer is. Run by the package
            ``regex``, whose syntax is that of ``re`` and more.
        extract: form in which an answer counts: ``auto``, ``boxed``, ``tag`` or ``last_number``, as in
            :class:`lit_grpo.rewards.MathReward`; ``last_line``: the last line that is not empty, unless the completion
            was cut off; ``whole``: the completion.
        answer_tag: name of the tag around an answer.
        ignore_case: compare after Unicode case folding.
        limit: seconds for ``pattern`` on one completion, since an expression such as ``(a+)+b`` may take for ever; past
            it the completion scores 0 with ``timed_out``.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: ``pattern`` is not a regular expression or stands beside ``extract``, ``limit`` is not positive, or
            ``extract`` or ``answer_tag`` is none.
    """

    needs_answer = True
    range = (0.0, 1.0)

    def __init__(
        self,
        pattern: str | None = None,
        ignore_case: bool = False,
        extract: ExactExtract = "whole",
        answer_tag: str = "answer",
        limit: float = 1.0,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        super().__init__(weight, name)
        # Not `re`, which has no time limit: a pattern of the user may backtrack for ever on what a model wrote.
        import regex

        if not limit > 0:
            raise UserError(f"limit is {limit}", where="ExactMatch.limit", remedy="give a positive number of seconds")
        try:
            self._pattern: Any = regex.compile(pattern, regex.DOTALL) if pattern else None
        except regex.error as error:
            raise UserError(
                f"{pattern!r} is not a regular expression: {error}",
                where="ExactMatch.pattern",
                remedy="in YAML, write it in single quotes so that backslashes stay",
            ) from error
        check_extract(extract, answer_tag, "ExactMatch", get_args(ExactExtract))
        if pattern and extract != "whole":
            raise UserError(
                f"both pattern and extract: {extract} say where the answer is",
                where="ExactMatch.extract",
                remedy="keep one of them",
            )
        self._ignore_case, self._limit = ignore_case, limit
        self._extract, self._answer_tag = extract, answer_tag
        self.extracts_answer = self._pattern is not None or extract != "whole"

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [self._score(item) for item in batch]

    def _score(self, item: RewardInput) -> Score:
        began = time.perf_counter()
        try:
            answer = self._answer(item)
        except TimeoutError:
            return Score(0.0, timed_out=True, no_answer=True, seconds=time.perf_counter() - began)
        value = float(self._normalise(answer) == self._normalise(item.prompt.answer))
        return Score(value, no_answer=answer is None)

    def final_answers(self, batch: Sequence[RewardInput]) -> list[str | None]:
        return [self._vote(x) for x in batch]

    def _vote(self, item: RewardInput) -> str | None:
        try:
            answer = self._answer(item)
        except TimeoutError:
            return None
        return None if answer is None else str(self._normalise(answer))

    def _answer(self, item: RewardInput) -> str | None:
        text = item.text
        if self._pattern is None:
            if self._extract == "whole":
                return text
            if self._extract == "last_line":
                return None if item.completion.truncated else (text.strip().rpartition("\n")[2] or None)
            return final_answer(text, "words", item.completion.truncated, self._extract, self._answer_tag)
        last = None
        # The last match counts, as with every other reward: a withdrawn first guess is not the answer. With concurrent,
        # other threads go on meanwhile.
        for last in self._pattern.finditer(text, timeout=self._limit, concurrent=True):  # noqa: B007
            pass
        if last is None:
            return None
        return last[1] if self._pattern.groups else last[0]

    def _normalise(self, text: str | None) -> str | object:
        if text is None:
            # A missing answer equals nothing, another missing one included.
            return object()
        text = text.strip()
        return text.casefold() if self._ignore_case else text
