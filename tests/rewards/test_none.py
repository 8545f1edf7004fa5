"""None from a reward: the completion is left to the other rewards, or out where there is none."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from lit_grpo.commands.score import run as score_command
from lit_grpo.rewards import ExactMatch, FunctionReward, GatedReward, Reward, RewardBySource, SourceReward, score_all
from lit_grpo.rewards.base import flipped_totals, verdicts, weighted_sums
from lit_grpo.rewards.combine import RewardError, judge_again
from lit_grpo.types import Completion, Prompt, RewardInput, Score


class Given(Reward):
    """Reward that gives what it was told, by the text of the completion."""

    range = (0.0, 1.0)

    def __init__(self, *values: Any, weight: float = 1.0, name: str = "only", threshold: float | None = 1.0) -> None:
        super().__init__(weight, name)
        self.values, self.correct_threshold = values, threshold

    def score(self, batch: Any) -> list[Any]:
        return [self.values[int(item.text)] for item in batch]


def items(count: int, **prompt: Any) -> list[RewardInput]:
    asked = Prompt("p", "", (1,), **prompt)
    return [RewardInput(asked, Completion(0, i, (1,), (0.0,), "stop", 0), str(i)) for i in range(count)]


def perhaps(text: str) -> float | None:
    """Give None for the text 1, and 1 for others."""
    return None if text == "1" else 1.0


async def later(text: str) -> float | None:
    return perhaps(text)


def of_all(texts: list[str]) -> list[Any]:
    return [Score(None, details={"seen": 1.0}) if text == "1" else 1.0 for text in texts]  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, Score(None), Score(0.5, skipped=True)])  # type: ignore[arg-type]
def test_none_is_a_skipped_score_and_not_a_number(value: Any) -> None:
    one, two = score_all([Given(1, value)], items(2))["only"]
    assert (one.value, one.skipped) == (1.0, False)
    assert two.skipped
    assert math.isnan(two.value)


@pytest.mark.parametrize("value", [math.nan, Score(math.nan), [None], Score(1.0, skipped=2)])  # type: ignore[arg-type]
def test_nan_is_an_error_as_ever(value: Any) -> None:
    with pytest.raises(RewardError, match="gave"):
        score_all([Given(value)], items(1))


@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("function", ["perhaps", "later", "of_all"])
def test_none_of_a_function_comes_back_from_its_worker(function: str, in_process: bool) -> None:
    reward = FunctionReward(f"tests.rewards.test_none.{function}", in_process=in_process, workers=1)
    try:
        scores = score_all([reward], items(3))[function]
    finally:
        reward.close()
    assert [score.skipped for score in scores] == [False, True, False]
    assert scores[1].details == ({"seen": 1.0} if function == "of_all" else None)


def test_the_total_is_over_the_rewards_that_scored() -> None:
    rewards = [Given(1, None, 1, None, weight=2, name="a"), Given(1, 0.5, None, None, weight=-1, name="b")]
    totals = weighted_sums(rewards, score_all(rewards, items(4)))
    assert totals[:3] == [1.0, -0.5, 2.0]
    assert math.isnan(totals[3])


def test_a_reward_that_is_only_logged_makes_no_total() -> None:
    rewards = [Given(None, 1, name="a"), Given(1, 1, weight=0, name="b")]
    totals = weighted_sums(rewards, score_all(rewards, items(2)))
    assert math.isnan(totals[0])
    assert totals[1] == 1
    assert weighted_sums(rewards[1:], score_all(rewards[1:], items(2))) == [0, 0]


def test_the_next_reward_that_can_gives_the_verdict() -> None:
    rewards = [
        Given(None, 1, None, None, name="a"),
        Given(1, 0, 0, None, name="b", weight=3),
        Given(1, 1, 1, 1, name="c", threshold=None),
    ]
    scores = score_all(rewards, items(4))
    assert verdicts(rewards, scores, [""] * 4) == [True, True, False, None]
    # Of b the first is 1, which becomes 0; of a the second; the last has no verdict to turn round.
    assert flipped_totals(rewards, scores, [""] * 4) == [1, 1, 4, 1]


def test_a_second_verdict_that_appears_or_goes_is_another() -> None:
    first = score_all([Given(1, None, None, 0)], items(4))
    assert judge_again([Given(1, None, 1, None)], items(4), first) == (2, 4)


def test_wrappers_hand_it_on() -> None:
    gated = GatedReward(Given(1, None, 1, 1), Given(1, 1, None, 0, name="gate"))
    assert [s.value for s in score_all([gated], items(4))["gated"] if not s.skipped] == [1.0, 0.0]
    assert [s.skipped for s in score_all([gated], items(4))["gated"]] == [False, True, True, False]
    by_source = RewardBySource([SourceReward(["x"], Given(None, 1))])
    assert [s.skipped for s in score_all([by_source], items(2, source="x"))["by_source"]] == [True, False]


def test_of_several_golds_a_score_is_better_than_none() -> None:
    class ByGold(Reward):
        needs_answer = True

        def score(self, batch: Any) -> list[Any]:
            return [{"a": None, "b": 0.0}[item.prompt.answer] for item in batch]

    (score,) = score_all([ByGold()], items(1, answer="a", other_answers=("b",)))["by_gold"]
    assert (score.value, score.skipped) == (0.0, False)
    (score,) = score_all([ByGold()], items(1, answer="a"))["by_gold"]
    assert score.skipped


def test_a_score_says_null_and_counts_apart(tmp_path: Any, capsys: Any) -> None:
    given, config = tmp_path / "in.jsonl", tmp_path / "config.yaml"
    given.write_text("".join(json.dumps({"id": i, "prediction": str(i)}) + "\n" for i in range(3)))
    config.write_text(
        "rewards:\n- {class_path: lit_grpo.rewards.FunctionReward, "
        "init_args: {function: tests.rewards.test_none.perhaps}}\n"
    )
    assert score_command("score", ["--input", str(given), "--config", str(config)]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line, parse_constant=lambda _: pytest.fail("NaN is no JSON")) for line in out.splitlines()]
    assert [(line["correct"], line["reward"]["perhaps"]) for line in lines] == [(True, 1), (None, None), (True, 1)]
    assert "2 correct, 100.0 % of the 2 with a verdict; mean perhaps 1; 1 that no reward scored;" in err


def test_exact_match_still_scores_all() -> None:
    assert [s.skipped for s in score_all([ExactMatch()], items(2, answer="1"))["exact_match"]] == [False, False]
