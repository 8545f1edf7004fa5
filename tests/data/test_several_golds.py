"""Several right golds: how they are read, and that every reward takes any of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from lit_grpo.data import InMemoryPrompts, PromptFormat, Row, deduplicate
from lit_grpo.data.prompt_set import prepare
from lit_grpo.errors import UserError
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.rewards import (
    AdditionReward,
    ChoiceReward,
    CosineReward,
    CountdownReward,
    ExactMatch,
    FunctionReward,
    GatedReward,
    LengthReward,
    MathReward,
    NumericReward,
    Reward,
    RewardBySource,
    SourceReward,
    score_all,
)
from lit_grpo.types import Completion, Prompt, RewardInput, Score


def golds(value: Any, **arguments: Any) -> tuple[str, ...]:
    (row,) = InMemoryPrompts([{"prompt": "q", "answer": value}], **arguments).rows()
    return row.golds


def verl(ground_truth: Any) -> tuple[str, ...]:
    (row,) = InMemoryPrompts([{"prompt": "q", "reward_model": {"ground_truth": ground_truth}}]).rows()
    return row.golds


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("2", ("2",)), (2, ("2",)), (2.5, ("2.5",)), (["2"], ("2",)), (["2", "two", "2"], ("2", "two")),
        ([2, 3.5], ("2", "3.5")), ([["2", "two"]], ("2", "two")), ({"target": ["2", "two"]}, ("2", "two")),
        ({"text": ["Paris"], "answer_start": [3]}, ("Paris",)), ({"only": "2"}, ("2",)), (None, ()), ([], ()),
        ({"value": "Paris", "aliases": ["City of Light", "Paris"], "type": "x"}, ("Paris", "City of Light")),
        # A text is the answer itself, whatever it looks like.
        ("[1, 2]", ("[1, 2]",)), ('["a", "b"]', ('["a", "b"]',)),
    ],
)  # fmt: skip
def test_what_a_column_of_golds_may_hold(value: Any, wanted: tuple[str, ...]) -> None:
    assert golds(value) == wanted


def test_verl_stores_golds_as_json() -> None:
    assert verl(json.dumps(["2", "two"])) == ("2", "two")
    assert verl(json.dumps({"target": ["2", "two"]})) == ("2", "two")
    assert verl({"target": "2"}) == ("2",)
    assert verl("[1, 2]") == ("[1, 2]",), "an interval or a list that is the answer"
    assert verl('{"name": "f", "arguments": {}}') == ('{"name": "f", "arguments": {}}',), "a call that is the answer"


def test_numbers_and_arrays_of_numpy_are_golds() -> None:
    numpy = pytest.importorskip("numpy")
    assert golds(numpy.int64(7)) == ("7",)
    assert golds(numpy.array(["2", "two"], dtype=object)) == ("2", "two")


def test_patterns_and_hashes_are_looked_for_in_every_gold() -> None:
    assert golds(["x = 2", "x = 3"], answer_pattern=r"= (\d)") == ("2", "3")
    assert golds(["so\n#### 2", "or\n#### 3"], layout="gsm8k", question_column="prompt") == ("2", "3")


@pytest.mark.parametrize("value", [True, [True], ["2", {"a": 1}], {"answer": "1", "value": "2"}, float("inf")])
def test_what_is_no_gold_is_refused(value: Any) -> None:
    with pytest.raises(UserError) as caught:
        golds(value)
    assert caught.value.where == "memory: row 1"
    assert caught.value.remedy


def test_columns_agree_where_one_gold_is_in_both() -> None:
    row = {"prompt": "q", "answer": "2", "golden_answers": ["two", "2"]}
    assert InMemoryPrompts([row]).rows()[0].golds == ("2",)
    with pytest.raises(UserError, match="different answers"):
        InMemoryPrompts([row | {"golden_answers": ["3"]}]).rows()


def inputs(text: str, *answers: str, **extra: Any) -> list[RewardInput]:
    prompt = Prompt("p", "q", (1,), answers[0], "", extra, None, answers[1:])
    return [RewardInput(prompt, Completion(0, 0, (1, 2), (0.0, 0.0), "stop", 0), text)]


def value(reward: Reward, batch: Sequence[RewardInput]) -> list[float]:
    return [score.value for score in score_all([reward], batch)[reward.name]]


REWARDS: list[tuple[Reward, str, str, str]] = [
    (ExactMatch(), "two", "2", "two"),
    (AdditionReward(), "7", "5", "7"),
    (NumericReward(), "The answer is 7.", "5", "7"),
    (ChoiceReward(), "The answer is B", "A", "B"),
    (GatedReward(ExactMatch(), LengthReward(10, at_max=1.0), name="gated"), "two", "2", "two"),
    (RewardBySource([SourceReward([""], ExactMatch())]), "two", "2", "two"),
]


@pytest.mark.parametrize(("reward", "text", "first", "second"), REWARDS, ids=lambda x: getattr(x, "name", ""))
def test_every_reward_takes_any_of_the_golds(reward: Reward, text: str, first: str, second: str) -> None:
    assert value(reward, inputs(text, first, second)) == [1.0]
    assert value(reward, inputs(text, second, first)) == [1.0]
    assert value(reward, inputs(text, first)) == [0.0]
    assert value(reward, [*inputs(text, first), *inputs(text, first, second)]) == [0.0, 1.0]


def test_rewards_with_workers_take_any_of_the_golds() -> None:
    for reward, text, first, second in (
        (MathReward(workers=1), r"\boxed{\frac12}", "3", "0.5"),
        (CosineReward(MathReward(workers=1), max_tokens=10), r"\boxed{7}", "3", "7"),
        (CountdownReward(), "1+2", "4", "3"),
    ):
        try:
            right, wrong = value(reward, [*inputs(text, first, second, nums=[1, 2]), *inputs(text, first, nums=[1, 2])])
        finally:
            reward.close()
        assert right > wrong, reward.name


def same(text: str, answer: str | None) -> float:
    return float(text == answer)


def test_a_function_sees_one_gold_at_a_time() -> None:
    reward = FunctionReward(same, in_process=True)
    assert not reward.needs_answer
    assert value(reward, inputs("two", "2", "two")) == [1.0]


class Counting(Reward):
    """Half marks for the second gold, and a note of what it was asked."""

    needs_answer = True
    range = (0.0, 1.0)

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str | None] = []

    def score(self, batch: Sequence[RewardInput]) -> list[Any]:
        self.asked += [item.prompt.answer for item in batch]
        assert not any(item.prompt.other_answers for item in batch)
        given: dict[str | None, Any] = {"full": 1.0, "half": 0.5, "none": 0.0, "broken": ValueError("no")}
        return [Score(given[item.prompt.answer], no_answer=item.prompt.answer == "none") for item in batch]


def test_the_best_score_counts_and_full_marks_end_the_asking() -> None:
    reward = Counting()
    assert value(reward, inputs("", "none", "half", "full", "none")) == [1.0]
    assert reward.asked == ["none", "half", "full"]
    (score,) = score_all([reward], inputs("", "half", "none"))[reward.name]
    assert score == Score(0.5)


def test_a_row_that_a_reward_cannot_score_is_found_by_any_of_its_golds() -> None:
    tokenizer = char_tokenizer("q")
    source = InMemoryPrompts([{"prompt": "q", "answer": ["A", "it"]}])
    with pytest.raises(UserError, match="'it' is none of"):
        prepare(source, "data.prompts", form=PromptFormat(), tokenizer=tokenizer, rewards=[ChoiceReward()])


def test_rows_agree_where_they_share_a_gold() -> None:
    def row(identity: str, *answers: str) -> Row:
        return Row(identity, "q", answers[0], other_answers=answers[1:])

    kept, dropped = deduplicate([row("a", "2", "two"), row("b", "2")])
    assert ([r.id for r in kept], [d.reason for d in dropped]) == (["a"], ["duplicate"])
    kept, dropped = deduplicate([row("a", "2", "two"), row("b", "3")])
    assert ([r.id for r in kept], {d.reason for d in dropped}) == ([], {"conflicting answers"})


def test_golds_are_part_of_the_identity_and_say_how_many_are_right() -> None:
    tokenizer = char_tokenizer("q")

    def made(*answers: str) -> Any:
        source = InMemoryPrompts([{"prompt": "q", "answer": list(answers)}])
        found = prepare(source, "data.prompts", form=PromptFormat(), tokenizer=tokenizer, rewards=[ExactMatch()])
        return found.identity()["digest"], source.columns_taken()[0]

    one, two = made("2"), made("2", "two")
    assert one[0] != two[0]
    assert "any of up to 2 is right" in two[1]
    assert "right" not in one[1]
