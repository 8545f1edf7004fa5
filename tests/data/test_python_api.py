"""Rows, data sets, paths and dictionaries handed to the data module in Python: taken, or refused in one sentence."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lit_grpo import RolloutDataModule
from lit_grpo.data import AdditionPrompts, PromptFormat
from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.rewards import ExactMatch, FunctionReward
from lit_grpo.types import Sampling
from tests import tiny

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]


class Sampler:
    """An engine that is made already."""

    def generate(self) -> None: ...


def fit(**changes: Any) -> RolloutDataModule:
    data = tiny.data(rollouts=1, **changes)
    tiny.trainer().fit(tiny.module(), datamodule=data)
    return data


def test_rows_and_dictionaries_train(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        data = fit(
            prompts=ROWS,
            sampling={"max_new_tokens": 3, "stop_token_ids": [2]},
            format={"chat_template": "Q{question}".replace("Q", "0+")},
            engine={"name": "transformers", "batch_size": 16},
            clean={"deduplicate": True},
            curriculum={"above": 0.0, "below": 0.9},
            rejudge_every=0,
        )
    assert data.sampling == Sampling(max_new_tokens=3, stop_token_ids=(2,))
    assert [prompt.question for prompt in data.train_prompts] == [row["prompt"] for row in ROWS]
    assert "memory (columns): prompt from prompt (text), answer from answer, 4 rows" in caplog.text
    assert "the first prompt (memory/1), as the model reads it:\n  | 0+0+1=\n  its answer: '1'" in caplog.text


def test_paths_data_sets_and_evaluation_sets_in_a_word(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = fit(
        prompts=datasets.Dataset.from_list(ROWS),
        val={"mine": ROWS, "file": str(tmp_path / "a.jsonl"), "told": {"prompts": ROWS, "samples": 2}},
        eval_sampling={"max_new_tokens": 2, "temperature": 0.5},
    )
    assert {one.name: len(list(one.source.rows())) for one in data.evaluations["val"]} == {
        "mine": 4, "file": 4, "told": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "what", "remedy"),
    [
        ({"sampling": {"max_tokens": 3}}, "Sampling has no 'max_tokens'", "did you mean 'max_new_tokens'?"),
        (
            {"sampling": 3},
            "sampling is 3, and no Sampling",
            "give Sampling(...), or a dict: {'temperature': 1.0}; it has temperature",
        ),
        ({"format": "chat"}, "format is 'chat', and no PromptFormat", "give PromptFormat(...)"),
        ({"prompts": AdditionPrompts}, "AdditionPrompts is a class", "make one of it: AdditionPrompts(...)"),
        ({"prompts": ["1+1="]}, "a list of texts without answers", "[{'prompt': text} for text in TEXTS]"),
        ({"prompts": [("1+1=", "2")]}, "the rows are pairs", "for question, answer in ROWS]"),
        ({"prompts": iter(ROWS)}, "gives its rows once", "prompts=list(...)"),
        ({"prompts": {"prompt": ["1"], "answer": []}}, "not a list of rows", "columns of one length"),
        (
            {"prompts": {"class_path": "lit_grpo.data.AdditionPrompts", "init_args": {"digits": 1}}},
            "the prompts are a dict",
            "in Python make one: AdditionPrompts(digits=1)",
        ),
        ({"rewards": [{"class_path": "MathReward"}]}, "is no reward", "in Python make one: MathReward()"),
        ({"rewards": [(len, 0.5)]}, "is no reward", "FunctionReward(function, weight=0.5)"),
        ({"rewards": {"right": len}}, "is no reward", "FunctionReward(function, name='right')"),
        ({"val": ROWS}, "val is a list, and sets of questions have names", "val={'mine': QUESTIONS}"),
        ({"val": "gsm8k"}, "val is a str", "val={'gsm8k': {}}"),
        ({"sampling": Sampling}, "sampling is the class Sampling", "make one of it: Sampling(...)"),
        ({"on_reward_error": "ignore"}, "on_reward_error is 'ignore'", "Choose one of raise, zero"),
        ({"engine": "vlm"}, "name is 'vlm'", "did you mean 'vllm'?"),
        ({"engine": {"name": "vlm"}}, "name is 'vlm'", "did you mean 'vllm'?"),
        ({"engine": {"server": {"prot": 1}}}, "ServerConfig has no 'prot'", "did you mean 'port'?"),
        ({"engine": Sampler()}, "an engine of the class Sampler is made already", "give its class, engine=Sampler"),
        ({"rewards": [ExactMatch]}, "ExactMatch is a class, not a reward", "make one of it: ExactMatch(...)"),
        ({"rewards": ["MathReward"]}, "'MathReward' is no reward", "make one, MathReward()"),
        ({"val": {"a": {"sample": 3}}}, "EvaluationSet has no 'sample'", "did you mean 'samples'?"),
    ],
)
def test_what_is_none_of_these_is_refused_in_one_sentence(arguments: dict[str, Any], what: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        tiny.data(**arguments)
    assert what in caught.value.what
    assert remedy in str(caught.value.remedy)
    assert str(caught.value.where).startswith("data.")


def ends_in_answer(text: str, answer: str) -> float:
    return float(text.endswith(answer))


class TorchRows:
    """A data set of torch: rows by number and how many there are."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, str]:
        return ROWS[index]


def test_tables_and_columns_are_rows() -> None:
    pandas = pytest.importorskip("pandas")
    pyarrow = pytest.importorskip("pyarrow")
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    for given in (pandas.DataFrame(ROWS), pyarrow.Table.from_pylist(ROWS), columns, TorchRows(), Path("a.jsonl")):
        source = tiny.data(prompts=given).prompts
        assert source is not None
        if isinstance(given, Path):
            assert type(source).__name__ == "FilePrompts"
            continue
        assert [(row.question, row.answer) for row in source.rows()] == [(r["prompt"], r["answer"]) for r in ROWS]


def test_an_engine_may_be_its_name_or_a_class() -> None:
    assert tiny.data(engine="transformers").engine_config.name == "transformers"
    assert tiny.data(engine=Sampler).engine_config.custom_engine == f"{__name__}.Sampler"
    assert tiny.data(engine={"custom_engine": Sampler}).engine_config.custom_engine == f"{__name__}.Sampler"


def test_the_import_path_of_a_function_is_a_reward() -> None:
    (reward,) = tiny.data(rewards="tests.rewards.user_functions.polite").rewards
    assert (type(reward), reward.name) == (FunctionReward, "polite")


def test_parameters_of_rewards_of_other_libraries_are_named_as_here() -> None:
    with pytest.raises(UserError, match="asks for 'completions'") as caught:
        tiny.data(rewards=lambda completions: 1.0)
    assert "call that parameter 'texts'" in str(caught.value.remedy)


def test_functions_are_rewards_and_one_needs_no_list() -> None:
    (reward,) = tiny.data(rewards=ends_in_answer).rewards
    assert (type(reward), reward.name) == (FunctionReward, "ends_in_answer")
    assert [r.name for r in tiny.data(rewards=[ExactMatch(), ends_in_answer]).rewards] == [
        "exact_match", "ends_in_answer",
    ]  # fmt: skip
    assert len(tiny.data(rewards=ExactMatch()).rewards) == 1
    with pytest.raises(UserError, match="asks for 'other', which is nothing a reward gets"):
        tiny.data(rewards=lambda text, other: 1.0)
    fit(prompts=ROWS, rewards=[ends_in_answer])


def test_a_run_warns_of_what_the_preflight_warns_of() -> None:
    rows = [{"prompt": "1+1=", "answer": str(i)} for i in range(4)]
    with pytest.warns(UserWarning, match="all prompts are the same, with 4 answers"):
        fit(prompts=rows)
    with pytest.warns(UserWarning, match="prompts end in an end-of-sequence token"):
        fit(prompts=ROWS, format=PromptFormat(chat_template="{question}<eos>"))


def test_conversations_are_learned_from_as_demonstrations() -> None:
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    data = tiny.data(
        prompts=[{"messages": turns}] * 2,
        rewards=[],
        group_size=1,
        rollouts=1,
        format={"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"},
        demonstrations={"column": "solution"},
    )
    recorder = tiny.Recorder()
    module = tiny.module(objective=ObjectiveConfig(recipe="sft"))
    tiny.trainer(callbacks=[recorder]).fit(module, datamodule=data)
    tokens = module.tokenizer
    assert {tokens.decode(ids) for ids in recorder.ids[0]} == {"2<eos>"}
    assert {tokens.decode(prompt.token_ids) for prompt in data.train_prompts} == {"1+1="}
