"""Scoring of a batch by every reward, each held to its contract: one finite number, or None, for each completion."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import HungRewardError, Reward, answers_within, score_within
from lit_grpo.rewards.returned import NoScoreError, given_score
from lit_grpo.types import RewardInput, Score
from lit_grpo.utils.text import shorten

OnError = Literal["raise", "zero"]

_SAMPLE_LENGTH = 400
_ON_ERROR = "data.on_reward_error: zero (lit-grpo score: --on-error zero)"
# Far above any reward, and far below what 32 bits hold: the spread of a group is the root of a sum of squares.
_LARGEST = 1e15


class RewardError(RuntimeError):
    """Failure of a reward that raised or gave no finite number; stops the run and shows the sample.

    Args:
        reward: name of the reward.
        problem: what it did, as the predicate of a sentence.
        prompt_id: prompt of the completion at fault, or None where the batch as a whole is at fault.
        sample: text of that completion, shortened.
    """

    def __init__(self, reward: str, problem: str, prompt_id: str | None = None, sample: str | None = None) -> None:
        self.reward, self.problem, self.prompt_id, self.sample = reward, problem, prompt_id, sample
        lines = [f"reward {reward!r} {problem}"]
        if prompt_id is not None:
            lines.append(f"  prompt: {prompt_id}")
        if sample is not None:
            lines.append(f"  sample: {sample!r}")
        lines.append(f"  remedy: mend the reward, or count such completions and score them 0 with {_ON_ERROR}")
        super().__init__("\n".join(lines))

    # An exception is pickled by its args, which here are the finished text and not the four arguments.
    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.reward, self.problem, self.prompt_id, self.sample))


def check_rewards(rewards: Sequence[Reward], where: str = "data.rewards") -> None:
    """Refuse, before the first rollout, rewards that cannot work together.

    Args:
        rewards: of a run.
        where: key of the configuration that they stand under.

    Raises:
        UserError: no reward at all, two of one name, or a weight that is not finite.
    """
    if not rewards:
        raise UserError(
            "no reward is given",
            where=where,
            remedy="list at least one: `rewards: [ExactMatch]`; in Python rewards=[ExactMatch()], or a function",
        )
    # Scores and metrics are kept under the name, so one of the two would be lost.
    doubles = [name for name, count in Counter(r.name for r in rewards).items() if count > 1]
    if doubles:
        raise UserError(
            f"two rewards are named {doubles[0]!r}; they would be logged as one",
            where=where,
            remedy="give one of them another init_args.name",
        )
    for reward in rewards:
        if not math.isfinite(reward.weight):
            raise UserError(f"the weight of reward {reward.name!r} is {reward.weight}", where=where)


def score_all(
    rewards: Sequence[Reward], batch: Sequence[RewardInput], on_error: OnError = "raise"
) -> dict[str, list[Score]]:
    """Score every completion with every reward. Safe to call from several threads at once.

    Args:
        rewards: rewards of distinct names.
        batch: completions, in any order; prompts may repeat.
        on_error: ``raise`` ends the run at the first bad score; ``zero`` gives it value 0 and ``failed=True``. A batch
            that raises is scored once more, one by one, so that only the completions at fault are lost.

    Returns:
        Under each reward's name, ``len(batch)`` scores in the order of ``batch``, all finite and of a size that 32 bits
        can compute with but those that are ``skipped``, where the reward gave None.

    Raises:
        RewardError: see ``on_error``. A wrong number of scores always raises: which is whose cannot be known.
        UserError: from :func:`check_rewards`.
    """
    check_rewards(rewards)
    return {reward.name: _score(reward, batch, on_error) for reward in rewards}


def final_answers(reward: Reward, batch: Sequence[RewardInput]) -> list[str | None] | None:
    """Return what a reward's ``final_answers`` gives, held to its contract: one for each completion, or None.

    Raises:
        RewardError: it raised, did not return, or gave another number of them.
    """
    try:
        given = answers_within(reward, batch)
        answers = None if given is None else list(given)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise RewardError(reward.name, f"gave no final answers: {_describe(error)}") from error
    if answers is not None and len(answers) != len(batch):
        raise RewardError(reward.name, f"gave {len(answers)} final answers for {len(batch)} completions")
    return answers


def judge_again(
    rewards: Sequence[Reward],
    batch: Sequence[RewardInput],
    scores: Mapping[str, Sequence[Score]],
    on_error: OnError = "raise",
) -> tuple[int, int]:
    """Judge completions a second time, and count those whose verdict is another than before.

    Only rewards that are :attr:`lit_grpo.rewards.Reward.deterministic` are asked. A verdict is another if a value has
    moved by more than a tenth of the reward's range (of the values seen, where it states none). A completion that a
    reward failed on or did not get to in time is left out: that is counted elsewhere.

    Args:
        rewards: rewards of the run.
        batch: completions, as they were given to :func:`score_all`.
        scores: what that returned.
        on_error: as of :func:`score_all`.

    Returns:
        Completions with another verdict, and completions that were judged a second time.
    """
    asked = [reward for reward in rewards if reward.deterministic]
    changed, judged = [False] * len(batch), [bool(asked)] * len(batch)
    for reward in asked:
        first, second = scores[reward.name], _score(reward, batch, on_error)
        values = [score.value for score in (*first, *second) if not score.skipped]
        width = reward.range[1] - reward.range[0]
        width = width if math.isfinite(width) else max(values, default=0.0) - min(values, default=0.0)
        for i, (one, other) in enumerate(zip(first, second, strict=True)):
            judged[i] &= not (one.failed or one.timed_out or other.failed or other.timed_out)
            # A comparison with NaN, the value of a skipped score, is false.
            changed[i] |= one.skipped != other.skipped or abs(one.value - other.value) > 0.1 * width
    return sum(c and j for c, j in zip(changed, judged, strict=True)), sum(judged)


def _score(reward: Reward, batch: Sequence[RewardInput], on_error: OnError) -> list[Score]:
    if not batch:
        return []
    try:
        scores = list(score_within(reward, batch))
    except HungRewardError as error:
        # Not once more one by one: the call that hangs goes on, and each of those might hang as well.
        if on_error == "raise":
            raise RewardError(reward.name, str(error)) from error
        return [Score(0.0, timed_out=True, failed=True)] * len(batch)
    except KeyboardInterrupt:
        raise
    # SystemExit too, which would end the run as if it had been asked to.
    except BaseException as error:
        # The batch does not say which completion is at fault; one by one, it can be named or scored 0 alone.
        return _score_singly(reward, batch, on_error, error)
    if len(scores) != len(batch):
        completions = f"{len(batch)} completion{'s' if len(batch) > 1 else ''}"
        raise RewardError(reward.name, f"gave {len(scores)} scores for {completions}")
    return [_checked(reward, item, score, on_error) for item, score in zip(batch, scores, strict=True)]


def _score_singly(reward: Reward, batch: Sequence[RewardInput], on_error: OnError, error: BaseException) -> list[Score]:
    checked: list[Score] = []
    for item in batch:
        try:
            scores = list(score_within(reward, [item]))
        except KeyboardInterrupt:
            raise
        except BaseException as single:
            if on_error == "raise":
                raise _error_of(reward, item, f"raised {_describe(single)}") from single
            checked.append(Score(0.0, failed=True))
            continue
        if len(scores) != 1:
            raise RewardError(reward.name, f"gave {len(scores)} scores for 1 completion")
        checked.append(_checked(reward, item, scores[0], on_error))
    if on_error == "raise":
        # No completion fails alone, but going on would hide that the call on the batch does not work.
        raise RewardError(reward.name, f"raised {_describe(error)} on a batch of {len(batch)}") from error
    return checked


def _checked(reward: Reward, item: RewardInput, score: Score | float | None, on_error: OnError) -> Score:
    # A reward may put the error of one completion in the place of its score: the others need not be scored anew.
    if isinstance(score, Exception) and not isinstance(score, NoScoreError):
        if on_error == "raise":
            raise _error_of(reward, item, f"raised {_describe(score)}") from score
        return Score(0.0, failed=True)
    try:
        checked = given_score(score)
    except NoScoreError as error:
        problem = str(error)
    else:
        size = abs(checked.value) * max(1.0, abs(reward.weight))
        bad = next((key for key, value in (checked.details or {}).items() if not math.isfinite(value)), None)
        if (checked.skipped or size <= _LARGEST) and bad is None:
            return checked
        if bad is not None and checked.details is not None:
            problem = f"gave {checked.details[bad]} for its figure {bad!r}"
        elif math.isfinite(checked.value):
            problem = f"gave {checked.value:g}, which is beyond {_LARGEST:g} (weight {reward.weight:g})"
        else:
            problem = f"gave {checked.value}"
    if on_error == "raise":
        raise _error_of(reward, item, problem)
    return Score(0.0, failed=True)


def _error_of(reward: Reward, item: RewardInput, problem: str) -> RewardError:
    return RewardError(reward.name, problem, item.prompt.id, _both_ends(item.text, _SAMPLE_LENGTH))


def _describe(error: BaseException) -> str:
    return _both_ends(f"{type(error).__name__}: {error}", _SAMPLE_LENGTH)


# Both ends of a text are shown, since the answer is usually at its end.
def _both_ends(text: str, limit: int) -> str:
    return shorten(text, limit, " […{omitted} characters…] ", keep_end=True)
