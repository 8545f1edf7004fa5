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
    GatedReward,
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


def gated(reward=None, **arguments) -> GatedReward:
    gate = FormatReward(tags=["reasoning", "answer"], rule="released")
    return GatedReward(reward or NumericReward(extract="tag"), gate, **arguments)


GATED = {
    "right": ("<reasoning>r</reasoning><answer>4</answer>", 1.0, True),
    "wrong": ("<reasoning>r</reasoning><answer>5</answer>", 0.0, True),
    "right, broken format": ("<answer>4</answer>", 0.0, False),
    "right, text behind": ("<reasoning>r</reasoning><answer>4</answer>!", 0.0, False),
    "neither": ("4", 0.0, False),
}


def test_a_gate_lets_through_what_has_full_marks():
    reward = gated()
    batch = [item("sums", text) for text, _, _ in GATED.values()]
    scores = score_all([reward], batch)["gated"]
    assert [s.value for s in scores] == [value for _, value, _ in GATED.values()]
    assert [s.details for s in scores] == [
        {"inner": float("4</answer>" in text), "open": float(is_open)} for text, _, is_open in GATED.values()
    ]
    # The verdict includes the gate, and so do the votes.
    assert [reward.correct(s.value) for s in scores] == [True, False, False, False, False]
    assert reward.final_answers(batch) == ["4", "5", None, None, None]
    assert [s.no_answer for s in scores] == [False, False, False, False, True]
    # A verifier of weight 0 before it keeps the verdict its own.
    free = NumericReward(weight=0.0)
    assert primary_reward([free, reward]) is free
    assert primary_reward([FormatReward(), reward]) is reward


def test_a_gate_states_its_range_and_what_it_needs():
    reward = gated()
    assert (reward.range, reward.correct_threshold, reward.needs_answer, reward.extracts_answer) == (
        (0.0, 1.0),
        1.0,
        True,
        True,
    )
    assert gated(closed=-1.0).range == (-1.0, 1.0)
    assert gated(CosineReward(NumericReward(), max_tokens=10)).needs_tokens
    # Behind the gate: 2 .. 1 for right ones of length 1 of 10, whatever the format; and 0 where it is shut.
    cosine = gated(CosineReward(NumericReward(), max_tokens=10))
    texts = [text for text, _, _ in GATED.values()]
    values = [s.value for s in cosine.score([item("sums", text) for text in texts])]
    assert [round(v, 2) for v in values] == [1.98, -9.76, 0.0, 0.0, 0.0]
    assert not cosine.correct(0.0)
    inner, gate = Seen(1.0), Seen(1.0)
    with pytest.raises(UserError, match="full marks of 'seen' are not known"):
        GatedReward(inner, gate)
    pair = GatedReward(inner, gate, at_least=0.5)
    pair.start()
    assert (inner.open, gate.open) == (1, 1)
    pair.close()
    assert (inner.open, gate.open) == (0, 0)
    with pytest.raises(UserError, match="closed is 1"):
        gated(closed=1.0)
    with pytest.raises(UserError, match="does not say whether"):
        gated(FormatReward())


def test_a_gate_works_inside_and_around_rewards_by_source():
    text, broken = GATED["right"][0], GATED["right, broken format"][0]
    batch = [item("sums", text), item("sums", broken), item("other", "x"), item("other", broken)]
    inside = by_source(sums=gated(), other=Seen(1.0))
    assert [s.value for s in inside.score(batch)] == [1.0, 0.0, 1.0, 1.0]
    around = gated(by_source(sums=NumericReward(), other=Seen(1.0)))
    assert [s.value for s in around.score(batch)] == [1.0, 0.0, 0.0, 0.0]
    assert around.for_source("sums") is around.for_source("sums")
    assert around.for_source("sums").needs_answer
    assert not around.for_source("other").needs_answer
    own = around.for_source("sums")
    assert [s.value for s in score_all([own], batch[:2])[own.name]] == [1.0, 0.0]
    with pytest.raises(UserError, match="the source 'new'"):
        around.for_source("new")
    gate_by_source = GatedReward(NumericReward(), by_source(sums=ExactMatch(), other=NumericReward()))
    with pytest.raises(UserError, match="the source 'new'"):
        gate_by_source.for_source("new")


GTPO = """
rewards:
  - class_path: lit_grpo.rewards.FormatReward
    init_args: {tags: [reasoning, answer], rule: released}
  - class_path: lit_grpo.rewards.GatedReward
    init_args:
      reward: {class_path: lit_grpo.rewards.MathReward, init_args: {extract: tag}}
      gate: {class_path: lit_grpo.rewards.FormatReward, init_args: {tags: [reasoning, answer], rule: released}}
      weight: 10
      name: accuracy
"""


def test_score_counts_a_shut_gate_as_wrong(tmp_path, monkeypatch, capsys):
    (tmp_path / "reward.yaml").write_text(GTPO)
    lines = [json.dumps({"prediction": text, "answer": "4"}) for text, _, _ in GATED.values()]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    arguments = ["score", "--input", str(tmp_path / "in.jsonl"), "--config", str(tmp_path / "reward.yaml")]
    monkeypatch.setattr(sys, "argv", ["lit-grpo", *arguments])
    assert main(arguments) == 0
    captured = capsys.readouterr()
    found = [json.loads(line) for line in captured.out.splitlines()]
    assert [line["correct"] for line in found] == [value == 1.0 for _, value, _ in GATED.values()]
    assert [line["reward"]["format"] for line in found] == [10.0, 10.0, 1.0, 1.5, 0.0]
    assert "5 lines; 1 correct" in captured.err


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
