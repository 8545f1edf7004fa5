"""RewardBySource: each completion is scored by the reward of its prompt's source, and nothing by none."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest

from lit_grpo.cli.main import main
from lit_grpo.data import InMemoryPrompts, MixedPrompts, PromptFormat, PromptSource
from lit_grpo.data.prompt_set import prepare
from lit_grpo.errors import UserError
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.rewards import (
    CosineReward,
    CountdownReward,
    ExactMatch,
    FormatReward,
    NumericReward,
    Reward,
    RewardBySource,
    SourceReward,
    primary_reward,
)
from lit_grpo.rewards.combine import score_all
from lit_grpo.types import Completion, Prompt, RewardInput, Score


def item(source, text, answer="4", **extra):
    prompt = Prompt(f"{source}/1", "?", (1,), answer, source, extra)
    return RewardInput(prompt, Completion(0, 0, (1,), (0.0,), "stop", 0), text)


class Seen(Reward):
    """Keeps what it is shown."""

    def __init__(self, value, **arguments):
        super().__init__(**arguments)
        self.value, self.shown, self.open = value, [], 0

    def score(self, batch):
        self.shown.append([i.text for i in batch])
        return [self.value] * len(batch)

    def start(self):
        self.open += 1

    def close(self):
        self.open -= 1


def by_source(**rewards: Reward) -> RewardBySource:
    return RewardBySource([SourceReward(name.split("_and_"), reward) for name, reward in rewards.items()])


def test_each_sees_its_own_in_one_call_and_scores_come_back_in_order():
    one, two = Seen(1.0), Seen(0.25)
    reward = by_source(a_and_c=one, b=two)
    batch = [item(source, f"{source}{i}") for i, source in enumerate("babcb")]
    assert [s.value for s in score_all([reward], batch)["by_source"]] == [0.25, 1.0, 0.25, 1.0, 0.25]
    assert (one.shown, two.shown) == ([["a1", "c3"]], [["b0", "b2", "b4"]])
    reward.start()
    assert (one.open, two.open) == (1, 1)
    reward.close()
    assert (one.open, two.open) == (0, 0)


def test_real_rewards_judge_by_their_own_rules():
    reward = by_source(sums=NumericReward(), countdown=CountdownReward())
    batch = [
        item("sums", "The answer is 4.0"),
        item("countdown", "<answer>3 + 1</answer>", nums=[1, 3]),
        item("countdown", "The answer is 4", nums=[1, 3]),
        item("sums", "no number"),
    ]
    scores = score_all([reward], batch)["by_source"]
    assert [reward.correct(score.value) for score in scores] == [True, True, False, False]
    assert [scores[i].no_answer for i in (0, 1, 3)] == [False, False, True]
    assert primary_reward([FormatReward(), reward]) is reward
    assert (reward.range, reward.extracts_answer, reward.needs_answer, reward.correct_threshold) == (
        (0.0, 1.0),
        True,
        True,
        1.0,
    )


def test_votes_are_those_of_each_source():
    numeric = NumericReward()
    reward = by_source(sums=numeric, other=Seen(1.0))
    batch = [item("other", "x"), item("sums", "answer is 7"), item("sums", "answer is 8")]
    own = numeric.final_answers(batch[1:])
    assert own is not None
    assert reward.final_answers(batch) == [None, *own]
    assert reward.final_answers(batch[:1]) is None


def read(source, reward):
    tokenizer = char_tokenizer("0123456789+=")
    return prepare(source, "data.prompts", form=PromptFormat(), tokenizer=tokenizer, rewards=[reward])


def test_a_source_of_none_is_refused_where_the_data_is_read():
    rows = [{"prompt": "1+1=", "answer": "2"}]
    sources: list[PromptSource] = [InMemoryPrompts(rows, name=name) for name in ("sums", "words")]
    with pytest.raises(UserError, match=r"the source 'words', but for 'wrods'") as refused:
        read(MixedPrompts(sources), by_source(sums=ExactMatch(), wrods=Seen(1.0)))
    assert "RewardBySource.rewards" in str(refused.value)
    found = read(MixedPrompts(sources), by_source(sums=ExactMatch(), words=Seen(1.0)))
    assert [p.source for p in found.prompts] == ["sums", "words"]


def test_an_answer_is_asked_for_only_where_it_is_compared_with():
    without = InMemoryPrompts([{"prompt": "1+1="}], name="words")
    read(without, by_source(sums=ExactMatch(), words=Seen(1.0)))
    with pytest.raises(UserError, match="has no answer, and the reward 'exact_match'"):
        read(without, by_source(sums=Seen(1.0), words=ExactMatch()))


WRONG = {
    "none": ([], "no reward is given"),
    "twice": ([SourceReward(["a"], ExactMatch()), SourceReward(["b", "a"], ExactMatch())], "source 'a'"),
    "weight": ([SourceReward(["a"], ExactMatch(weight=2.0))], "weight of 'exact_match' is not used here, and it is 2"),
    "one judges": ([SourceReward(["a"], ExactMatch()), SourceReward(["b"], FormatReward())], "'format' nothing"),
}


@pytest.mark.parametrize(("rewards", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_would_mean_nothing_is_refused(rewards, said):
    with pytest.raises(UserError, match=said):
        RewardBySource(rewards)


def test_score_takes_the_source_from_the_line(tmp_path, monkeypatch, capsys):
    rewards = "{sources: [sums], reward: {class_path: lit_grpo.rewards.NumericReward}}, "
    rewards += "{sources: [countdown], reward: {class_path: lit_grpo.rewards.CountdownReward}}"
    one = f"{{class_path: lit_grpo.rewards.RewardBySource, init_args: {{rewards: [{rewards}]}}}}"
    (tmp_path / "reward.yaml").write_text(f"rewards:\n  - {one}\n")
    lines = [
        {"prediction": "The answer is 4", "answer": "4", "source": "sums"},
        {"prediction": "<answer>3+1</answer>", "answer": 4, "source": "countdown", "nums": [1, 3]},
        {"prediction": "<answer>3+1</answer>", "answer": 5, "source": "countdown", "nums": [1, 3]},
    ]
    command = ["score", "--input", "-", "--config", str(tmp_path / "reward.yaml")]

    def run(rows):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
        return main(command), capsys.readouterr()

    code, shown = run(lines)
    assert code == 0, shown.err
    assert [json.loads(line)["correct"] for line in shown.out.splitlines()] == [True, True, False]
    code, shown = run([*lines, {"prediction": "4", "answer": "4"}])
    assert code == 2
    assert "standard input:4, field `source`" in shown.err


def test_check_tries_each_reward_on_its_own_golds():
    from lit_grpo.commands.check.prompts import verifier

    prompts = [Prompt(f"sums/{n}", "?", (1,), str(n), "sums") for n in range(4)]
    prompts += [Prompt(f"other/{n}", "?", (1,), str(n), "other") for n in range(2)]
    strict, blind = ExactMatch(name="strict"), NeverRight(name="blind")
    results = verifier(prompts, [by_source(sums=strict, other=blind)], char_tokenizer("0123456789+="), None)
    assert [(r.values["reward"], r.values["golds"], r.values["taken"]) for r in results] == [
        ("strict", 4, 4),
        ("blind", 2, 0),
    ]


class NeverRight(Reward):
    needs_answer = True

    def score(self, batch):
        return [Score(0.0)] * len(batch)


def test_a_reward_around_it_asks_the_one_of_the_source():
    free = Seen(1.0)
    free.range = (0.0, 1.0)
    around = CosineReward(by_source(sums=ExactMatch(), essays=free), max_tokens=10)
    with pytest.raises(UserError, match="no reward is given for prompts of the source 'zzz'"):
        around.for_source("zzz")
    assert around.for_source("sums").needs_answer
    assert not around.for_source("essays").needs_answer
    assert around.for_source("sums") is around.for_source("sums"), "what is grouped by it stays together"
    assert by_source(sums=around).for_source("sums") is around.for_source("sums")
    plain = CosineReward(ExactMatch(), max_tokens=10)
    assert plain.for_source("sums") is plain
