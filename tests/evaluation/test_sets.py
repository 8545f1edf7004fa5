"""Evaluation sets: what the YAML leaves open, what is refused, which questions, right answers and votes."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.data import BENCHMARKS, AdditionPrompts, BenchmarkPrompts, HubPrompts, InMemoryPrompts
from lit_grpo.data.sources.benchmarks import gold_text
from lit_grpo.errors import UserError
from lit_grpo.evaluation import EvaluationSet
from lit_grpo.evaluation.grading import answer_classes, grade, selector_scores
from lit_grpo.evaluation.sets import EvaluationPart, Subset, resolve_sets
from lit_grpo.rewards import ExactMatch, MathReward
from lit_grpo.rewards.base import verdicts
from lit_grpo.types import Completion, Prompt, RewardInput, Rollout, Sampling
from tests import tiny
from tests.paths import ROOT, SHARED

TRAINING = Sampling(temperature=1.0, max_new_tokens=64)


def resolved(sets: dict[str, EvaluationSet], **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "samples": 1, "sampling": None, "training": TRAINING, "selectors": ["math", "format"], "primary_reward": "math",
    }  # fmt: skip
    return resolve_sets("test", sets, changes.pop("single", None), **(settings | changes))


def test_a_benchmark_by_name_needs_nothing() -> None:
    (one,) = resolved({"gsm8k": EvaluationSet()})
    assert isinstance(one.source, BenchmarkPrompts)
    assert one.parts == (EvaluationPart("gsm8k", 1, Sampling(temperature=0.0, max_new_tokens=64)),)


def test_several_samples_are_drawn_as_in_training_and_greedy_comes_beside() -> None:
    (one,) = resolved({"math500": EvaluationSet(samples=6, greedy=True)})
    assert one.parts[0] == EvaluationPart("math500", 6, TRAINING, (1, 2, 4, 6), ("logprob", "format"))
    assert (one.parts[1].greedy, one.parts[1].samples, one.parts[1].sampling.temperature) == (True, 1, 0.0)
    own = Sampling(temperature=0.6)
    assert resolved({"aime24": EvaluationSet(samples=2, sampling=own)}, sampling=TRAINING)[0].parts[0].sampling == own
    assert len(resolved({"aime24": EvaluationSet(greedy=True)})[0].parts) == 1, "it is greedy already"


def test_the_single_source_is_a_set_named_after_itself() -> None:
    first, second = resolved({"gsm8k": EvaluationSet()}, single=AdditionPrompts(name="my sums"))
    assert (first.name, first.where, second.name) == ("my_sums", "data.test_prompts", "gsm8k")
    with pytest.raises(UserError, match="two evaluation sets are named 'gsm8k'"):
        resolved({"gsm8k": EvaluationSet()}, single=AdditionPrompts(name="gsm8k"))


@pytest.mark.parametrize(
    ("name", "given", "message", "where"),
    [
        ("gsm8", EvaluationSet(), "did you mean gsm8k", "data.test.gsm8"),
        ("a/b", EvaluationSet(path="x"), "cannot be the name", "data.test.a/b"),
        ("x", EvaluationSet(AdditionPrompts(), path="x"), "both say", "data.test.x"),
        ("gsm8k", EvaluationSet(samples=0), "samples is 0", "data.test.gsm8k.samples"),
        ("gsm8k", EvaluationSet(samples=4, sampling=Sampling(temperature=0.0)), "all the same", "gsm8k.samples"),
        ("gsm8k", EvaluationSet(samples=4, k=[8]), "with 4 samples", "gsm8k.k"),
        ("gsm8k", EvaluationSet(samples=4, best_of=["majority"]), "maj@k, which is always", "gsm8k.best_of"),
        ("gsm8k", EvaluationSet(samples=4, best_of=["fromat"]), "did you mean format", "gsm8k.best_of"),
        ("gsm8k", EvaluationSet(limit_seed=1), "without limit", "gsm8k.limit_seed"),
    ],
)
def test_what_is_refused(name: str, given: EvaluationSet, message: str, where: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolved({name: given})
    assert where in str(caught.value.where)


def test_a_subset_is_the_same_everywhere_and_a_smaller_one_lies_in_a_larger() -> None:
    source = AdditionPrompts(digits=1)
    ids = {limit: [row.id for row in Subset(source, limit, 3).rows()] for limit in (5, 20, 1000)}
    assert (len(ids[5]), len(ids[20])) == (5, 20)
    three = [row.id for row in Subset(source, 3, 3).rows()]
    assert three == ["addition/3+5", "addition/4+1", "addition/4+5"], "on every machine"
    assert set(ids[5]) < set(ids[20])
    assert [row.id for row in source.rows() if row.id in set(ids[20])] == ids[20], "in the order of the source"
    assert len(ids[1000]) == 100
    assert [row.id for row in Subset(source, 2, None).rows()] == ["addition/0+0", "addition/0+1"]


def test_golds_of_benchmarks_become_one_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert gold_text("3 * 4 = 12\n#### 1,200") == "1200"
    assert gold_text(["2", "-2"]) == "2, -2"
    assert gold_text(27.0) == "27.0"
    assert gold_text(None) is None
    rows = {
        "gsm8k": [{"question": "q", "answer": "so\n#### 5"}],
        "math": [{"problem": "q", "solution": r"$2+3 = \boxed{5}$", "level": "Level 1"}],
        "olympiadbench": [{"id": 7, "question": "q", "final_answer": ["1", "3"]}],
        "gaokao2023": [{"question": "q", "answer": ""}, {"question": "r", "answer": "A"}],
    }
    for name, records in rows.items():
        monkeypatch.setattr(HubPrompts, "records", lambda self, records=records: ((r, "row") for r in records))
        (row,) = BenchmarkPrompts(name).rows()
        assert (name, row.answer) in {("gsm8k", "5"), ("math", "5"), ("olympiadbench", "1, 3"), ("gaokao2023", "A")}
        if name in ("gsm8k", "math"):
            assert row.extra["solution"] == {"gsm8k": "so\n#### 5", "math": r"$2+3 = \boxed{5}$"}[name]
            assert BenchmarkPrompts(name, split="train").rows()[0].extra["solution"] == row.extra["solution"]
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"prompt": "1+1?", "answer": "2"}))
    assert [row.question for row in BenchmarkPrompts("aime24", path=str(file)).rows()] == ["1+1?"]
    with pytest.raises(UserError, match="no benchmark 'aime'"):
        BenchmarkPrompts("aime")
    with pytest.raises(UserError, match="aime24 has no questions to train on"):
        BenchmarkPrompts("aime24", split="train")


def test_the_script_for_gsm8k_keeps_the_solutions() -> None:
    script = runpy.run_path(str(ROOT / "scripts/get_gsm8k"))
    row = {"question": "q", "answer": "10 x 120 = 1,200\n#### 1,200"}
    written = script["as_written"](row, "gsm8k_train/0")
    assert written["answer"] == "1200"
    assert written["solution"] == row["answer"]
    (read,) = InMemoryPrompts([written]).rows()
    assert (read.id, read.question, read.answer) == ("gsm8k_train/0", "q", "1200")
    assert read.extra == {"solution": row["answer"], "source": "gsm8k"}


DATA = SHARED / "data"
FILES = {"aime24": "aime24", "aime25": "aime25", "amc23": "amc23", "gaokao2023": "gaokao2023en", "gsm8k": "gsm8k_test"}


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data sets are not beside this checkout")
@pytest.mark.parametrize("name", FILES)
def test_local_copies_have_the_questions_of_the_benchmark(name: str) -> None:
    rows = BenchmarkPrompts(name, path=str(DATA / f"{FILES[name]}.jsonl.gz")).rows()
    missing = 2 if name == "gaokao2023" else 0  # two have no gold answer
    assert len(rows) == BENCHMARKS[name].prompts - missing
    assert all(row.answer for row in rows)


def texts(*given: str, gold: str = "12") -> Rollout:
    count = len(given)
    rollout = tiny.rollout([0.0] * count, [2] * count, count)
    return replace(rollout, prompts=[Prompt("p", "", (1,), gold)], texts=list(given))


def test_right_answers_are_one_answer_and_wrong_ones_by_their_normal_form() -> None:
    rollout = texts("The answer is 12.", r"\boxed{12.0}", "The answer is 1,300", r"\boxed{1300}", "I do not know", "")
    reward = MathReward(workers=1)
    try:
        items = [RewardInput(rollout.prompts[0], c, t) for c, t in zip(rollout.completions, rollout.texts, strict=True)]
        scores = reward.score(items)
        found = verdicts([reward], {reward.name: scores}, [""] * len(scores))
        rewards = {reward.name: torch.tensor([score.value for score in scores])}
        rollout = replace(rollout, rewards=rewards, correct=torch.tensor(found))
        graded = grade(rollout, [reward], EvaluationPart("s", 6, TRAINING), list(range(6)))
    finally:
        reward.close()
    assert graded.correct is not None
    assert graded.answers is not None
    assert graded.correct.tolist() == [True, True, False, False, False, False]
    assert answer_classes(graded.correct, graded.answers, 6).tolist() == [[0, 0, 1, 1, -1, -1]]


def test_without_a_primary_reward_nothing_is_called_right() -> None:
    class Short(ExactMatch):
        correct_threshold = None

    rollout = texts("a", "b")
    assert grade(rollout, [Short()], EvaluationPart("s", 2, TRAINING), []).correct is None


def test_the_log_probability_of_a_sample_is_the_mean_of_its_tokens() -> None:
    rollout = texts("a", "b", "c")
    logprobs = [(-1.0, -3.0), (-0.5,), ()]
    completions = [Completion(0, i, (1,) * len(p), p, "stop", 0) for i, p in enumerate(logprobs)]
    rollout = replace(rollout, completions=completions)
    scores = selector_scores(rollout, "logprob")
    assert scores[0, :2].tolist() == [-2.0, -0.5]
    assert scores[0, 2].isnan()
