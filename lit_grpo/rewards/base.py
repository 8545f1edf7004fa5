"""The interface of all rewards: each looks at a batch of completions and gives every one a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lit_grpo.types import Prompt, RewardInput, Score
from lit_grpo.utils.threads import call_within

T = TypeVar("T")

Scores = Mapping[str, Sequence[Score]]
"""Under each reward's name one score for each completion."""


class Reward:
    """Base class of all rewards. A subclass implements ``score``; everything else has a default.

    Args:
        weight: factor in the total reward of a completion.
        name: key under which the reward is logged (``reward/<name>``); the class name in snake case if left out.
    """

    needs_answer: bool = False
    """True if every prompt must have a gold answer; checked when the data is loaded."""

    extracts_answer: bool = False
    """True if the scores say, by ``no_answer``, which completions hold no parsable answer."""

    needs_tokens: bool = False
    """True if the number of tokens of a completion is needed, not its text alone."""

    correct_threshold: float | None = 1.0
    """A completion with at least this value is correct (full marks by default); None if the reward does not say
    whether an answer is right (format, length, penalties)."""

    deterministic: bool = True
    """True if the same completion always gets the same value. A few completions are then judged a second time
    (``data.rejudge_every``), to notice a verifier that changes its mind; False for what is drawn on purpose, or costs
    money."""

    by_completion: bool = False
    """True if a score depends on nothing but its completion and prompt, and takes so long that a call for each is worth
    it: a completion is then scored as soon as it ends, with no wait for the others of its group."""

    range: tuple[float, float] = (-math.inf, math.inf)
    """Least and greatest value that ``score`` can give, before the weight."""

    score_limit: float | None = 60.0
    """Seconds for each completion of a call of ``score``, after which the call is given up as one that hangs. None: no
    limit, for a reward that bounds its own work."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass that scores in a way of its own does not inherit the word of another that it bounds its work, or
        # looks at no other completion.
        if "score" in vars(cls):
            for name in ("score_limit", "by_completion"):
                if name not in vars(cls):
                    setattr(cls, name, getattr(Reward, name))

    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        self.weight = weight
        self.name = name or _snake_case(type(self).__name__)

    @property
    def compares_with_answer(self) -> bool:
        """True if a score depends on the gold answer: of a row with several it is then asked once for each."""
        return self.needs_answer

    def score(self, batch: Sequence[RewardInput]) -> Sequence[Score | float | None]:
        """Return one score for each input, in order. May be called from several threads at once.

        None leaves the completion to the other rewards; where every one of them gives None, it is left out of training.
        Where one completion fails alone, its exception may stand in the place of its score.

        Everything else calls it through :func:`score_within`, which keeps ``score_limit``.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement score()")

    def row_problem(self, answer: str | None, extra: Mapping[str, Any]) -> str | None:
        """Say why no completion of a row could be scored, None if they can; asked of every row before a model loads.

        Args:
            answer: gold answer of the row.
            extra: further columns of the row.
        """
        return None

    def for_source(self, source: str) -> Reward:
        """Return the reward for completions of a source's prompts: this one, unless it has another for each source.

        Raises:
            UserError: there is none for this source.
        """
        return self

    def correct(self, value: float) -> bool:
        """Say whether a value of this reward means a right answer; False for a reward that does not say that."""
        # Sums of shares such as 3 x 1/3 may miss full marks by a rounding error, hence the small allowance.
        return self.correct_threshold is not None and value >= self.correct_threshold - 1e-9

    def start(self) -> None:
        """Begin to start worker processes, and return at once. Without it the first ``score`` starts them."""

    def final_answers(self, batch: Sequence[RewardInput]) -> Sequence[str | None] | None:
        """Return the final answer of each completion in a normal form: the votes of maj@k, equal where answers are.

        None for a completion without an answer; None altogether, the default, where the reward looks for none.
        """
        return None

    def close(self) -> None:
        """End worker processes and close connections. Safe to call twice."""


class HungRewardError(RuntimeError):
    """Error for a reward whose ``score`` has not returned in its time; it goes on in its thread."""


def score_within(reward: Reward, batch: Sequence[RewardInput]) -> Sequence[Score | float | None]:
    """Call a reward's ``score``, and give the call up when ``score_limit`` is over.

    Where prompts have several gold answers, any of which is right, a reward that compares with the gold is called once
    for each of them, and the best score of a completion counts.

    Raises:
        HungRewardError: it has not returned by then.
        RuntimeError: the reward raised a TimeoutError itself. Whatever else it raises comes as it is.
    """
    if not (reward.compares_with_answer and any(item.prompt.other_answers for item in batch)):
        return _within(reward, reward.score, batch)
    return _best_of_golds(reward, batch)


def answers_within(reward: Reward, batch: Sequence[RewardInput]) -> Sequence[str | None] | None:
    """Call a reward's ``final_answers`` as :func:`score_within` calls its ``score``."""
    return _within(reward, reward.final_answers, batch)


def _best_of_golds(reward: Reward, batch: Sequence[RewardInput]) -> Sequence[Score | float | None]:
    best: dict[int, Score | float | None] = {}
    for turn in range(max(len(item.prompt.golds) for item in batch)):
        # A completion with full marks is asked about no more.
        asked = [
            i for i, item in enumerate(batch)
            if i not in best or (turn < len(item.prompt.golds) and not _full_marks(reward, best[i]))
        ]  # fmt: skip
        part = [replace(batch[i], prompt=_with_gold(batch[i].prompt, turn)) for i in asked]
        given = list(_within(reward, reward.score, part)) if part else []
        # Which score is whose cannot be known then; who called refuses the number.
        if len(given) != len(part):
            return given
        for i, one in zip(asked, given, strict=True):
            if i not in best or _value_of(one) > _value_of(best[i]):
                best[i] = one
    return [best[i] for i in range(len(batch))]


def _with_gold(prompt: Prompt, number: int) -> Prompt:
    gold = prompt.golds[number] if number < len(prompt.golds) else prompt.answer
    return replace(prompt, answer=gold, other_answers=())


def _full_marks(reward: Reward, score: Any) -> bool:
    top, value = reward.range[1], _value_of(score)
    return value >= top - 1e-9 if math.isfinite(top) else reward.correct(value)


def _value_of(score: Any) -> float:
    """Return the value of what a reward gave; less than any number where it is none (an exception, None)."""
    try:
        value = float(score.value if isinstance(score, Score) else score)
    except (TypeError, ValueError):
        return -math.inf
    return -math.inf if math.isnan(value) else value


def _within(reward: Reward, method: Callable[[Sequence[RewardInput]], T], batch: Sequence[RewardInput]) -> T:
    if reward.score_limit is None:
        return method(batch)
    seconds = reward.score_limit * max(1, len(batch))
    try:
        return call_within(seconds, method, batch, name=f"reward-{reward.name}")
    except TimeoutError as error:
        raise HungRewardError(
            f"has not returned in {seconds:g} s (its score_limit is {reward.score_limit:g} s for a completion)"
        ) from error


def primary_reward(rewards: Sequence[Reward]) -> Reward | None:
    """Return the reward that says whether an answer is right: the first in the list with a ``correct_threshold``.

    All that asks which completions are correct goes by it, in training, evaluation and every command. None if no reward
    says so.
    """
    return next((reward for reward in rewards if reward.correct_threshold is not None), None)


def verdicts(rewards: Sequence[Reward], scores: Scores, sources: Sequence[str]) -> list[bool | None] | None:
    """Say of each completion whether it is correct, by the primary reward; None if no reward says what is right.

    Where the primary reward gave None, the next that says what is right decides; where all of them did, the completion
    has no verdict: None in its place. One that the reward failed on is not correct, whatever value it was given.

    Args:
        rewards: rewards of the run.
        scores: scores of each reward by its name.
        sources: source of each completion's prompt.
    """
    if primary_reward(rewards) is None:
        return None
    found: list[bool | None] = []
    for i, source in enumerate(sources):
        judge = _judge_of(rewards, scores, i)
        if judge is None:
            found.append(None)
            continue
        score = scores[judge.name][i]
        # By the reward of the source: where a mixture has one for each, that one knows what its own values mean.
        found.append(judge.for_source(source).correct(score.value) and not score.failed)
    return found


def _judge_of(rewards: Sequence[Reward], scores: Scores, i: int) -> Reward | None:
    """Return the first reward that says whether completion ``i`` is right; None where all that could gave None."""
    judges = (reward for reward in rewards if reward.correct_threshold is not None)
    return next((reward for reward in judges if not scores[reward.name][i].skipped), None)


def flipped_totals(rewards: Sequence[Reward], scores: Scores, sources: Sequence[str]) -> list[float] | None:
    """Return each completion's total reward if the primary reward had said the opposite.

    Its value v becomes low + high - v within its range (1 - v for values from 0 to 1), the other rewards stay, as does
    the total of a completion without a verdict. None if no reward says what is right, or the range is not finite for
    one of the completions. Arguments as of :func:`verdicts`.
    """
    if primary_reward(rewards) is None:
        return None
    totals = weighted_sums(rewards, scores)
    for i, source in enumerate(sources):
        judge = _judge_of(rewards, scores, i)
        if judge is None:
            continue
        low, high = judge.for_source(source).range
        if not (math.isfinite(low) and math.isfinite(high)):
            return None
        totals[i] += judge.weight * (low + high - 2 * scores[judge.name][i].value)
    return totals


def weighted_sums(rewards: Sequence[Reward], scores: Scores) -> list[float]:
    """Return the total reward of each completion: the weighted sum of its scores.

    A reward that gave None adds nothing. NaN where every reward with a weight other than 0 gave None (every reward
    where all have weight 0): nothing scored the completion, and it is left out.
    """
    # A reward that is only logged pays nothing, so that its score is none that a total could be made of.
    paying = [reward for reward in rewards if reward.weight] or list(rewards)
    totals = []
    for i in range(len(scores[rewards[0].name]) if rewards else 0):
        if all(scores[reward.name][i].skipped for reward in paying):
            totals.append(math.nan)
            continue
        given = [(reward.weight, scores[reward.name][i]) for reward in rewards]
        totals.append(sum(weight * score.value for weight, score in given if not score.skipped))
    return totals


def weighted_range(reward: Reward) -> tuple[float, float]:
    """Return the least and greatest that a reward adds to the total; infinite where it does not state its range."""
    # 0 times infinity is no number: a reward that is only logged adds nothing, whatever its range.
    ends = (0.0, 0.0) if reward.weight == 0 else (reward.weight * reward.range[0], reward.weight * reward.range[1])
    return min(ends), max(ends)


def judges_of(rewards: Sequence[Reward]) -> str | None:
    """Say which of several rewards decides what is right; None where there is no choice to be made."""
    able = [reward for reward in rewards if reward.correct_threshold is not None]
    if len(able) < 2:
        return None
    others = ", ".join(repr(reward.name) for reward in able[1:])
    return (
        f"correct is what the reward {able[0].name!r} says, from {able[0].correct_threshold:g} on, the first that can; "
        f"{others} could too: list first what judges, or set correct_threshold: null for what does not"
    )


def total_range(rewards: Sequence[Reward]) -> tuple[float, float]:
    """Return the least and greatest weighted sum of the rewards; infinite where a reward does not state its range."""
    ends = [weighted_range(reward) for reward in rewards]
    return sum(low for low, _ in ends), sum(high for _, high in ends)


def _snake_case(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
