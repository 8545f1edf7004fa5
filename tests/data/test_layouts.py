"""Rows as people publish them: each layout is recognised, said in the log, and trains without a line of code."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml

from lit_grpo.cli.main import main
from lit_grpo.data import CsvPrompts, HubPrompts, InMemoryPrompts, JsonlPrompts, ParquetPrompts, PromptSource, Row
from lit_grpo.errors import UserError
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.policy.model.load import load_model
from tests import tiny

ALPHABET = "0123456789+=;<>abcdefghijklmnopqrstuvwxyz"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "add"}
TRL = [{"prompt": [SYSTEM, user(f"{i}+1=")], "answer": str(i + 1), "solution": f"{i}+1={i + 1}"} for i in range(5)]
VERL = [
    {
        "data_source": "sums",
        "prompt": [SYSTEM, user(f"{i}+1=")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "split": "train"},
    }
    for i in range(5)
]
OPENRLHF = [{"input": f"{i}+1=", "label": str(i + 1), "datasource": "sums"} for i in range(5)]
GSM8K = [{"question": f"{i}+1=", "answer": f"so it is\n#### {i + 1},000"} for i in range(5)]
LAYOUTS: dict[str, Any] = {"trl": TRL, "verl": VERL, "openrlhf": OPENRLHF, "gsm8k": GSM8K}
SAID = {
    "trl": "(trl): prompt from prompt (messages), answer from answer, 5 rows",
    "verl": "(verl): prompt from prompt (messages), answer from reward_model.ground_truth, source from data_source, "
    "5 rows",
    "openrlhf": "(openrlhf): prompt from input (text), answer from label, source from datasource, 5 rows",
    "gsm8k": "(gsm8k): prompt from question (text), answer from answer, behind ####, 5 rows",
}


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    path = folder / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def refused(source: PromptSource) -> UserError:
    with pytest.raises(UserError) as caught:
        source.rows()
    assert caught.value.where
    assert caught.value.remedy
    return caught.value


def source_of(path: str, **arguments: Any) -> JsonlPrompts | ParquetPrompts:
    return ParquetPrompts(path, **arguments) if path.endswith(".parquet") else JsonlPrompts(path, **arguments)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    load_model(PolicyConfig(tiny=TinyModel(alphabet=ALPHABET, layers=1, width=32, heads=2))).save_pretrained(folder)
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


class Look(tiny.Recorder):
    """A recorder that a test can find: the command line makes it."""

    last: Look
    questions: list[Any]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        Look.last, self.questions = self, batch.prompts
        self.decoded = [pl_module.tokenizer.decode(p.token_ids) for p in batch.prompts]


def config(folder: Path, path: str, model: Path | None) -> str:
    kind = "ParquetPrompts" if path.endswith(".parquet") else "JsonlPrompts"
    policy: Any = {"path": str(model)} if model else {"tiny": {"alphabet": ALPHABET, "layers": 1, "width": 32}}
    settings = {
        "model": {"policy": policy, "objective": {"recipe": "grpo"}, "micro_batch_size": 8},
        "data": {
            "prompts": {"class_path": f"lit_grpo.data.{kind}", "init_args": {"path": path}},
            "rewards": [{"class_path": "lit_grpo.rewards.ExactMatch"}],
            "prompts_per_rollout": 5,
            "group_size": 2,
            "rollouts": 2,
            "sampling": {"max_new_tokens": 4},
        },
        "trainer": {
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "callbacks": [{"class_path": "tests.data.test_layouts.Look"}],
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return str(folder / "run.yaml")


@pytest.mark.parametrize(("layout", "ending"), [(name, e) for name in LAYOUTS for e in ("jsonl", "parquet")])
def test_each_layout_trains_from_a_path_alone(
    tmp_path: Path, model: Path, layout: str, ending: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, f"five.{ending}", LAYOUTS[layout])
    with caplog.at_level(logging.INFO):
        assert main(["fit", "--config", config(tmp_path, path, model)]) == 0
    assert len(Look.last.metrics) == 2
    prompts = sorted(Look.last.questions, key=lambda prompt: prompt.id)
    assert [prompt.question for prompt in prompts] == [f"{i}+1=" for i in range(5)]
    assert [prompt.answer for prompt in prompts] == [f"{i + 1}{'000' * (layout == 'gsm8k')}" for i in range(5)]
    assert {prompt.source for prompt in prompts} == {"sums" if layout in ("verl", "openrlhf") else "five"}
    system = "<system>add;" if layout in ("trl", "verl") else ""
    assert sorted(Look.last.decoded) == [f"{system}<user>{i}+1=;<assistant>" for i in range(5)]
    assert f"five.{ending} {SAID[layout]}" in caplog.text


def test_variables_of_the_template_come_from_the_command_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = config(tmp_path, write(tmp_path, "t.jsonl", TRL), model)
    template = CHAT + "{% if not enable_thinking %}<think>{% endif %}"
    words = ["--data.format.chat_template", template, "--data.format.chat_template_kwargs.enable_thinking", "false"]
    assert main(["fit", "--config", run, *words, "--data.rollouts", "1"]) == 0
    assert sorted(Look.last.decoded)[0] == "<system>add;<user>0+1=;<assistant><think>"


def test_a_chat_without_a_template_ends_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lit_grpo.module.LitGRPO.configure_model", lambda self: pytest.fail("a model was loaded"))
    assert main(["fit", "--config", config(tmp_path, write(tmp_path, "v.jsonl", VERL), None)]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "has no chat template" in said
    assert "v.jsonl:1" in said
    assert "data.format.chat_template" in said


def test_what_stays_in_the_other_columns(tmp_path: Path) -> None:
    row = JsonlPrompts(write(tmp_path, "v.jsonl", VERL)).rows()[3]
    assert row.extra == {
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 3, "split": "train"},
    }
    assert (row.messages, row.source) == ((SYSTEM, user("3+1=")), "sums")
    assert JsonlPrompts(write(tmp_path, "t.jsonl", TRL)).rows()[0].extra == {"solution": "0+1=1"}
    assert JsonlPrompts(write(tmp_path, "o.jsonl", OPENRLHF)).rows()[0].extra == {}
    gsm8k = JsonlPrompts(write(tmp_path, "g.jsonl", GSM8K)).rows()[0]
    assert (gsm8k.answer, gsm8k.extra) == ("1000", {"solution": "so it is\n#### 1,000"})


def test_every_way_in_reads_the_same(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write(tmp_path / "set", "train.jsonl", VERL)
    expected = JsonlPrompts(write(tmp_path, "x.jsonl", VERL), name="x").rows()
    for source in (
        ParquetPrompts(write(tmp_path, "x.parquet", VERL), name="x"),
        JsonlPrompts(write(tmp_path, "x.json", VERL), name="x"),
        HubPrompts(str(tmp_path / "set"), name="x"),
        InMemoryPrompts(VERL, name="x"),
        JsonlPrompts([write(tmp_path, "a-1.jsonl", VERL[:2]), write(tmp_path, "a-2.jsonl", VERL[2:])], name="x"),
        JsonlPrompts(str(tmp_path / "a-*.jsonl"), name="x"),
    ):
        assert [(r.id, r.question, r.answer, r.source, r.messages) for r in source.rows()] == [
            (r.id, r.question, r.answer, r.source, r.messages) for r in expected
        ]
    files = JsonlPrompts(str(tmp_path / "a-*.jsonl"))
    assert (files.name, files.rows()[2].where) == ("a", f"{tmp_path}/a-2.jsonl:1")
    assert "no file fits" in refused(JsonlPrompts(str(tmp_path / "b-*.jsonl"))).what
    with pytest.raises(UserError, match="list of files is empty"):
        JsonlPrompts([])


def test_csv_has_the_layouts_that_fit_in_text(tmp_path: Path) -> None:
    (tmp_path / "g.csv").write_text('question,answer\n1+1=,"so\n#### 1,200"\n')
    (tmp_path / "m.csv").write_text('input,label\n"[{""role"": ""user"", ""content"": ""1+1=""}]",2\n')
    (row,) = CsvPrompts(str(tmp_path / "g.csv")).rows()
    assert (row.question, row.answer) == ("1+1=", "1200")
    (row,) = CsvPrompts(str(tmp_path / "m.csv")).rows()
    assert (row.question, row.answer, row.messages) == ("1+1=", "2", (user("1+1="),))


def read(row: dict[str, Any], **arguments: Any) -> Row:
    return InMemoryPrompts([row], **arguments).rows()[0]


def test_turns_and_parts_and_what_is_asked() -> None:
    turns = [SYSTEM, user("1+1="), {"role": "assistant", "content": "2"}, user("and 2+2=")]
    row = read({"input": turns, "label": 4})
    assert (row.question, row.answer, row.messages) == ("and 2+2=", "4", tuple(turns))
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    assert read({"prompt": [user(parts)], "answer": 2}).messages == (user("1+1="),)
    # Parquet gives every message the fields of all.
    named = {"role": "user", "content": "1+1=", "name": None}
    assert read({"prompt": [named], "answer": 2}).messages == (user("1+1="),)
    assert read({"messages": [user("1+1=")], "answer": 2}).question == "1+1="
    assert read({"problem": "1+1=", "messages": [user("1+1="), {"role": "assistant"}], "solution": "2"}).answer == "2"
    assert read({"prompt": '[{"a": 1}] has how many items?', "answer": 1}).messages is None


@pytest.mark.parametrize(
    ("row", "arguments", "expected"),
    [
        ({"prompt": "q", "ground_truth": "5"}, {}, "5"),
        ({"prompt": "q", "solution": "5"}, {}, "5"),
        ({"prompt": "q", "answer": "5", "solution": "2+3 is five"}, {}, "5"),
        ({"prompt": "q", "answer": "5", "solution": "2+3\n#### 5"}, {}, "5"),
        ({"prompt": "q", "answer": "1,000", "ground_truth": 1000.0}, {}, "1,000"),
        ({"prompt": "q", "answer": "5", "label": "6"}, {"answer_column": "label"}, "6"),
        ({"prompt": "q", "answer": "5", "label": "6"}, {"layout": "columns"}, "5"),
        ({"prompt": "q", "answer": "so\n#### 1,000"}, {"layout": "columns"}, "so\n#### 1,000"),
        ({"prompt": "q", "answer": "# Title\n#### Part\ntext"}, {}, "# Title\n#### Part\ntext"),
        ({"prompt": "q", "answer": "so\n#### (1,234)"}, {}, "(1,234)"),
        ({"prompt": "q"}, {}, None),
        ({"prompt": "q", "answer": ["5"]}, {}, "5"),
        (
            {"prompt": "q", "reward_model": {"ground_truth": {"target": ["5"]}}},
            {"answer_column": "reward_model.ground_truth.target"},
            "5",
        ),
        ({"prompt": "q", "answer": "5"}, {"answer_column": None}, None),
    ],
)
def test_which_column_is_the_answer(row: dict[str, Any], arguments: dict[str, Any], expected: str | None) -> None:
    assert read(row, **arguments).answer == expected


def test_answers_that_disagree_are_an_error_that_lists_the_columns() -> None:
    for other, value in (("ground_truth", "6"), ("label", 1), ("solution", "6"), ("final_answer", "x")):
        # The second row: the first agrees.
        rows: list[Any] = [{"prompt": "q", "answer": "5", other: "5"}, {"prompt": "r", "answer": "5", other: value}]
        error = refused(InMemoryPrompts(rows))
        assert f"'answer' and {other!r} give different answers, '5' and '{value}'" in error.what
        assert f"the columns are 'prompt', 'answer', {other!r}" in error.what
        assert error.remedy
        assert "answer_column: answer" in error.remedy
        assert f"answer_column: {other}" in error.remedy
        assert error.where == "memory: row 2"
    error = refused(InMemoryPrompts([{**VERL[0], "answer": "7"}]))
    assert "'reward_model.ground_truth' and 'answer'" in error.what
    error = refused(InMemoryPrompts([{"question": "q", "problem": "p", "answer": "1"}]))
    assert "several columns could hold the prompt: 'question', 'problem'" in error.what
    assert error.remedy == "say which: question_column: question"
    error = refused(InMemoryPrompts([GSM8K[0], {"question": "q", "answer": "5"}]))
    assert "holds nothing like '#### 42': '5'" in error.what


def test_a_layout_that_is_asked_for_needs_its_columns() -> None:
    assert read({"input": "q", "label": "1", "answer": "2"}, layout="openrlhf").answer == "1"
    assert read({"question": "q", "answer": "#### 1", "prompt": "p"}, layout="gsm8k").question == "q"
    error = refused(InMemoryPrompts([{"prompt": "q", "answer": "5"}], layout="verl"))
    assert "no column 'reward_model.ground_truth'; the columns are 'prompt', 'answer'" in error.what


def test_golds_that_are_no_text_name_the_way_out() -> None:
    error = refused(InMemoryPrompts([{"prompt": "q", "answer": {"answer": "5", "value": "6"}}]))
    assert "has several fields: answer, value" in error.what
    assert error.remedy == "say which one is the answer: answer_column: answer.answer"
    assert read({"prompt": "q", "answer": {"answer": "5", "value": "6"}}, answer_column="answer.value").answer == "6"
    assert "but list" in refused(InMemoryPrompts([{"prompt": "q", "answer": ["5", {"a": 1}]}])).what


def test_a_single_message_must_be_the_one_that_asks() -> None:
    error = refused(InMemoryPrompts(VERL, question_column="prompt.0.content"))
    assert "'prompt.0.content' is a message of the role 'system', not the question" in error.what
    assert error.remedy == "take the whole list: question_column: prompt"
    assert InMemoryPrompts(VERL, question_column="prompt.1.content").rows()[0].question == "0+1="
    turns = {"prompt": [user("a"), {"role": "assistant", "content": "b"}, user("c")], "answer": "1"}
    assert (
        "not the last message of the user" in refused(InMemoryPrompts([turns], question_column="prompt.0.content")).what
    )


def test_the_source_of_a_row_may_be_a_column() -> None:
    row = {"prompt": "q", "answer": "1", "source": "sums"}
    assert (read(row).source, read(row, source_column="source").source) == ("", "sums")
    assert read(VERL[0], source_column=None).source == ""
    assert "no column 'sauce'" in refused(InMemoryPrompts([row], source_column="sauce")).what


def test_what_the_line_says_of_missing_answers() -> None:
    source = InMemoryPrompts([{"prompt": "q", "answer": "1"}, {"prompt": [user("r")], "answer": None}])
    assert source.columns_taken() == []
    source.rows()
    assert source.columns_taken() == [
        "memory (columns): prompt from prompt (messages and text), answer from answer (missing in 1), 2 rows"
    ]
    source = InMemoryPrompts([{"question": "q"}])
    source.rows()
    assert source.columns_taken() == ["memory (columns): prompt from question (text), no answer, 1 row"]


def test_rows_that_are_not_laid_out_like_the_first_are_named() -> None:
    rows: list[Any] = [{"question": "q", "answer": "3"}, {"question": "r", "answer": "1 + 1 = 2\n#### 2"}]
    error = refused(InMemoryPrompts(rows))
    assert "ends in '#### ...', and that of the first row does not" in error.what
    assert "row 2" in str(error.where)
    assert InMemoryPrompts(rows, layout="columns", question_column="question").rows()[1].answer == "1 + 1 = 2\n#### 2"
    other: list[Any] = [{"prompt": "q", "answer": "3"}, {"question": "r", "answer": "4"}]
    assert (
        "the row has no column 'prompt'; its columns are 'question', 'answer'" in refused(InMemoryPrompts(other)).what
    )


def test_of_several_golds_one_may_be_taken() -> None:
    row = {"prompt": "q", "answer": ["2", "two"]}
    assert read(row).golds == ("2", "two")
    assert read(row, answer_column="answer.0").golds == ("2",)
