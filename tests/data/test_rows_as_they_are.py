"""Rows as people bring them: conversations, finished chats, options, tests of programs, files and folders."""

from __future__ import annotations

import gzip
import json
import string
from pathlib import Path
from typing import Any

import pytest

from lit_grpo import RolloutDataModule
from lit_grpo.data import (
    CsvPrompts,
    FilePrompts,
    HubPrompts,
    InMemoryPrompts,
    JsonlPrompts,
    ParquetPrompts,
    PromptFormat,
    PromptSource,
    Row,
)
from lit_grpo.data.doubts import doubts_of, shown_prompt
from lit_grpo.data.prompt_set import prepare
from lit_grpo.data.sources.given import as_source
from lit_grpo.errors import UserError
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.rewards import CodeReward, ExactMatch, Reward
from lit_grpo.types import Completion, Prompt, RewardInput

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def tokenizer(template: str | None = CHAT, special: tuple[str, ...] = ()) -> Any:
    made = char_tokenizer(string.printable[:95] + "\n")
    if special:
        made.add_special_tokens({"additional_special_tokens": list(special)})
    made.chat_template = template
    return made


def read(row: dict[str, Any], **arguments: Any) -> Row:
    (found,) = InMemoryPrompts([row], **arguments).rows()
    return found


def text(row: Row, tokens: Any = None, **form: Any) -> str:
    tokens = tokens or tokenizer()
    return str(tokens.decode(PromptFormat(**form).encode(row, tokens).token_ids))


def refused(source: PromptSource) -> UserError:
    with pytest.raises(UserError) as caught:
        source.rows()
    assert caught.value.where
    assert caught.value.remedy
    return caught.value


# ------------------------------------------------------------------------------------------- conversations


TURNS = [said("system", "s"), said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]


@pytest.mark.parametrize("column", ["messages", "conversations", "conversation"])
def test_the_answer_of_a_conversation_is_no_part_of_the_prompt(column: str) -> None:
    source = InMemoryPrompts([{column: TURNS, "answer": "1"}])
    (row,) = source.rows()
    assert text(row) == "<system>s;<user>a;<assistant>b;<user>c;<assistant>"
    assert (row.question, row.extra["solution"]) == ("c", "d")
    assert "the assistant's last message left out of 1 and kept as solution" in source.columns_taken()[0]


def test_in_a_column_of_prompts_somebody_has_to_say_what_the_last_message_is() -> None:
    error = refused(InMemoryPrompts([{"prompt": TURNS}]))
    assert "ends with a message of the assistant" in error.what
    assert "last_assistant: leave_out" in str(error.remedy)
    row = read({"prompt": TURNS}, last_assistant="leave_out")
    assert (text(row), row.extra["solution"]) == ("<system>s;<user>a;<assistant>b;<user>c;<assistant>", "d")
    # What the remedy names, and the assistant's turn stays open.
    row = read({"prompt": TURNS}, last_assistant="continue")
    assert text(row) == "<system>s;<user>a;<assistant>b;<user>c;<assistant>d"
    # A message without text is the place of the answer.
    assert text(read({"prompt": [*TURNS[:-1], said("assistant", "")]})).endswith("<user>c;<assistant>")


def test_a_solution_of_the_data_stays() -> None:
    assert read({"messages": TURNS, "answer": "1", "solution": "own"}).extra["solution"] == "own"


def test_sharegpt_is_read_in_every_way_it_is_written() -> None:
    wanted = "<user>a;<assistant>b;<user>c;<assistant>"
    assert text(read({"conversations": SHAREGPT})) == wanted
    assert text(read({"conversations": json.dumps(SHAREGPT)})) == wanted
    assert text(read({"prompt": SHAREGPT, "answer": "1"})) == wanted
    columns = {key: [turn[key] for turn in SHAREGPT] for key in ("from", "value")}
    assert text(read({"conversations": columns})) == wanted
    tools = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "observation", "value": "3"}]
    assert text(read({"conversations": tools})) == "<system>s;<user>a;<observation>3;<assistant>"


def test_a_system_prompt_beside_a_chat_is_its_first_message() -> None:
    source = InMemoryPrompts([{"system": "s", "conversations": SHAREGPT}, {"system": "", "conversations": SHAREGPT}])
    first, second = map(text, source.rows())
    assert (first, second) == ("<system>s;" + second, "<user>a;<assistant>b;<user>c;<assistant>")
    assert "the system message of 1 from system" in source.columns_taken()[0]
    own = [said("system", "own"), said("user", "a")]
    assert text(read({"system": "s", "prompt": own})) == "<system>own;<user>a;<assistant>"


def test_where_no_usual_column_is_there_the_candidates_are_named() -> None:
    error = refused(InMemoryPrompts([{"text": "q", "level": 3, "story": "s"}]))
    assert error.remedy == (
        "say which holds the question: question_column: text or story; "
        "in Python: InMemoryPrompts(ROWS, question_column='text')"
    )
    assert read({"Problem": "q", "Answer": 34, "Solution": "so it is"}).golds == ("34",)


def test_lists_of_messages_in_the_ways_that_tables_store_them(tmp_path: Path) -> None:
    turns = [said("system", "s"), said("user", "it's")]
    wanted = "<system>s;<user>it's;<assistant>"
    assert text(read({"prompt": {"role": ["system", "user"], "content": ["s", "it's"]}})) == wanted
    # pandas writes a list into CSV as Python prints it.
    assert text(read({"prompt": str(turns)})) == wanted
    numpy = pytest.importorskip("numpy")
    assert text(read({"prompt": numpy.array(turns, dtype=object)})) == wanted


def test_a_turn_that_only_calls_tools_has_no_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    turns = [said("user", "a"), call, said("tool", "3")]
    assert text(read({"prompt": turns})) == "<user>a;<assistant>;<tool>3;<assistant>"


def test_a_system_message_of_the_row_and_one_of_the_run_are_one_too_many() -> None:
    row = read({"prompt": TURNS[:2]})
    with pytest.raises(UserError, match="has a system message of its own"):
        PromptFormat(system_prompt="other").encode(row, tokenizer())
    assert text(read({"prompt": TURNS[1:2]}), system_prompt="other") == "<system>other;<user>a;<assistant>"


# ------------------------------------------------------------------------------------------- finished chats


FINISHED = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n"
MARKS = ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("template", "special", "question"),
    [
        (QWEN, MARKS, FINISHED), (QWEN, (), FINISHED), (CHAT, (), FINISHED), (CHAT, (), "<user>a;<assistant>"),
        (CHAT, (), "[INST] a [/INST]"), (CHAT, ("<turn>",), "<start_of_turn>user\na"),
        ("{% for m in messages %}<turn>{{ m.content }}{% endfor %}:", ("<turn>",), "<turn>a:"),
        ("User: {{ messages[0].content }}\n\nAssistant:", (), "User: a\n\nAssistant:"),
    ],
)  # fmt: skip
def test_a_finished_chat_is_not_wrapped_again(template: str, special: tuple[str, ...], question: str) -> None:
    tokens = tokenizer(template, special)
    row = read({"prompt": question, "answer": "1"})
    with pytest.raises(UserError, match="looks finished, and the tokenizer's chat template would be put") as caught:
        PromptFormat().encode(row, tokens)
    assert caught.value.where == "memory: row 1"
    assert "data.format.chat_template: none" in str(caught.value.remedy)
    # The remedy is tried: the text arrives as it is.
    assert text(row, tokens, chat_template="none") == question
    with pytest.raises(UserError, match="looks finished"):
        PromptFormat().encode(read({"prompt": [said("user", question)]}), tokens)


@pytest.mark.parametrize("named", ["r1", "Q: {question}\nA:"])
def test_templates_of_text_are_not_put_around_a_finished_chat_either(named: str) -> None:
    with pytest.raises(UserError, match="looks finished"):
        PromptFormat(chat_template=named).encode(read({"prompt": FINISHED}), tokenizer(None))


def test_questions_about_tags_are_questions() -> None:
    for question in ("What does <s>this</s> mean?", "Is a<b and b>c?", "Who is the assistant: A or B?", "list[int]?"):
        assert text(read({"prompt": question})) == f"<user>{question};<assistant>"
        assert text(read({"prompt": question}), tokenizer(QWEN, MARKS)).count("<|im_start|>") == 2


def test_a_finished_chat_that_writes_its_beginning_gets_one() -> None:
    tokens = tokenizer(QWEN, MARKS)
    from tokenizers.processors import TemplateProcessing

    tokens.add_special_tokens({"bos_token": "<bos>"})
    tokens.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokens.bos_token_id)]
    )
    row = read({"prompt": f"<bos>{FINISHED}"})
    assert text(row, tokens, chat_template="none") == f"<bos>{FINISHED}"


# ------------------------------------------------------------------------------------------- what looks wrong


def doubts(prompts: list[Prompt], tokens: Any, **form: Any) -> list[str]:
    return [doubt.what for doubt in doubts_of(prompts, PromptFormat(**form), tokens, [tokens.eos_token_id])]


def encoded(tokens: Any, *questions: str, **form: Any) -> list[Prompt]:
    rows = [Row(str(i), question, str(i)) for i, question in enumerate(questions)]
    return PromptFormat(**form).encode_all(rows, tokens).prompts


def test_what_looks_wrong_is_said() -> None:
    tokens = tokenizer()
    assert doubts(encoded(tokens, "a", "b"), tokens) == []
    assert "all prompts are the same, with 3 answers: 'You are a tutor.'" in doubts(
        encoded(tokens, *["You are a tutor."] * 3), tokens
    )
    (doubt,) = doubts(encoded(tokens, "a", "b\nAssistant:"), tokens)
    assert "ends in 'Assistant:' as a chat in plain text does" in doubt
    assert doubts(encoded(tokens, "b\nAssistant:", chat_template="none"), tokens, chat_template="none") == []
    (doubt,) = doubts(encoded(tokens, FINISHED, chat_template="none"), tokens, chat_template="none")
    assert "holds <|im_start|>, which is no token of this tokenizer" in doubt
    (doubt,) = doubts(encoded(tokens, "a <eos> b"), tokens)
    assert "holds <eos>, a special token" in doubt
    (doubt,) = doubts(encoded(tokens, "a<eos>", chat_template="none"), tokens, chat_template="none")
    assert "1 prompts end in an end-of-sequence token" in doubt


def test_columns_that_are_read_otherwise_than_meant_are_said() -> None:
    tokens = tokenizer()

    def of(answer: Any, **extra: Any) -> list[str]:
        return doubts([PromptFormat().encode(read({"prompt": "q", "answer": answer, **extra}), tokens)], tokens)

    for written in ("['2', 'two']", '["2"]'):
        assert "is a list written as text" in of(written)[0]
    for fine in ("[1, 2]", ["2", "two"], "a [b] 'c'", "2"):
        assert of(fine) == []
    for column, value in (("images", ["a.png"]), ("context", "long ago"), ("system", "be brief"), ("tools", [{}])):
        assert f"has the column {column}, which is no part of the prompt" in of("2", **{column: value})[0]
        assert of("2", **{column: None}) == []
    assert of("2", context="q") == [], "the question holds it already"


def test_a_template_that_begins_no_turn_is_said() -> None:
    tokens = tokenizer("{% for m in messages %}{{ m.content }}<eos>\n{% endfor %}")
    (sentence,) = PromptFormat().warnings(tokens)
    assert "begins none of the assistant's" in sentence
    assert PromptFormat().warnings(tokenizer("[INST]{{ messages[0].content }}[/INST]")) == []


def test_the_first_prompt_is_shown_with_its_golds() -> None:
    tokens = tokenizer()
    prompt = PromptFormat().encode(Row("x/1", "a" * 1000, "1", other_answers=("one",)), tokens)
    shown = shown_prompt(prompt, tokens, 100)
    assert shown.startswith("the first prompt (x/1), as the model reads it:\n  | <user>aaa")
    assert shown.endswith("a;<assistant>\n  its answer: '1' or 'one'")
    assert "characters ...]" in shown
    assert len(shown) < 250


# ------------------------------------------------------------------------------------------- multiple choice


@pytest.mark.parametrize(
    ("options", "gold", "letter"),
    [
        (["x", "y", "z"], 1, "B"), (["x", "y", "z"], "B", "B"), (["x", "y", "z"], "(C)", "C"), (["x", "y"], "y", "B"),
        (["x", "y"], "1", "B"), (["2", "1", "0"], "1", "B"), ({"text": ["x", "y"], "label": ["A", "B"]}, "B", "B"),
        ({"text": ["x", "y"], "label": ["1", "2"]}, "2", "B"), ({"A": "x", "B": "y"}, "A", "A"),
        ([{"label": "A", "text": "x"}, {"label": "B", "text": "y"}], "B", "B"), ('["x", "y"]', ["B"], "B"),
    ],
)  # fmt: skip
def test_options_are_written_below_and_the_gold_is_a_letter(options: Any, gold: Any, letter: str) -> None:
    row = read({"question": "Q?", "choices": options, "answer": gold})
    assert row.answer == letter
    assert row.question.startswith("Q?\nA. ")
    assert read({"question": "Q?", "choices": options, "answer": gold}, layout="columns", question_column="question",
                answer_column=None).question == "Q?"  # fmt: skip


def test_the_names_that_benchmarks_use_for_options() -> None:
    options = {"text": ["x", "y"], "label": ["A", "B"]}
    assert read({"question_stem": "Q?", "choices": options, "answerKey": "B"}).answer == "B"
    assert read({"question": "Q?", "options": ["x", "y"], "answer": "B", "answer_index": 1}).answer == "B"


def test_options_that_the_question_lists_are_not_listed_twice() -> None:
    question = "Q?\nA) x1\nB) y1"
    assert read({"question": question, "choices": ["x1", "y1"], "answer": 0}).question == question


def test_a_gold_that_is_no_option_is_refused_and_other_columns_of_that_name_are_left_alone() -> None:
    good = {"question": "Q?", "choices": ["x", "y"], "answer": "x"}
    error = refused(InMemoryPrompts([good, good | {"answer": "w"}]))
    assert "is none of the options: 'w'" in error.what
    assert error.where == "memory: row 2"
    assert read({"question": "Q?", "options": {"temperature": 1}, "answer": "x"}).question == "Q?"
    assert read({"question": "Q?", "choices": ["x", "y"], "answer": "42"}).question == "Q?"


# ------------------------------------------------------------------------------------------- code


PAIRS = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}
CASES = [{"input": "1\n", "output": "2\n"}, {"input": "2\n", "output": "3\n"}]
ASSERTS = ["assert f(1) == 2", "assert f(2) == 3"]
CALLS = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], [3]]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "reward_model": {"ground_truth": json.dumps(PAIRS)}},
        {"prompt": "p", "reward_model": {"ground_truth": json.dumps(CASES)}},
        {"question": "p", "input_output": json.dumps(PAIRS), "solutions": "[]", "difficulty": "easy"},
        {"prompt": "p", "verification_info": json.dumps({"language": "python", "test_cases": CASES})},
        {"problem": "p", "tests": json.dumps(CASES), "solutions": ["x"]},
        {"question": "p", "public_test_cases": json.dumps([c | {"testtype": "stdin"} for c in CASES])},
        {"prompt": "p", "official_tests": CASES},
        {"prompt": "p", "public_tests": {"input": ["1\n", "2\n"], "output": ["2\n", "3\n"]}},
        {"prompt": "p", "input_output": {"inputs": [["1", ""], ["2", ""]], "outputs": [["2", ""], ["3", ""]]}},
    ],
)
def test_inputs_and_outputs_are_found_where_people_keep_them(row: dict[str, Any]) -> None:
    source = InMemoryPrompts([row])
    (found,) = source.rows()
    assert (found.extra["cases"], found.answer) == (CASES, None)
    assert "tests from" in source.columns_taken()[0]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "test_list": ASSERTS, "code": "x", "task_id": 3},
        {"messages": [said("user", "p")], "ground_truth": json.dumps(ASSERTS), "dataset": "code"},
        {"prompt": "p", "test": "def check(g):\n    assert g(1) == 2\n", "entry_point": "f", "canonical_solution": ""},
        {"question": "p", "test": "from solution import f\n\ndef test_f():\n    assert f(1) == 2\n", "solution": "x"},
        {"prompt": "p", "reward_model": {"ground_truth": json.dumps(CALLS)}},
        {"prompt": "p", "input_output": json.dumps({**CALLS, "outputs": [2, 3]})},
        {"prompt": "p", "public_test_cases": [
            {"input": "1", "output": "2", "testtype": "functional", "metadata": '{"func_name": "f"}'}]},
    ],
)  # fmt: skip
def test_tests_that_call_a_function_run_as_they_are(row: dict[str, Any]) -> None:
    (found,) = InMemoryPrompts([row]).rows()
    assert "cases" not in found.extra
    right = "def f(x):\n    return x + 1\n"
    method = "class Solution:\n    def f(self, x):\n        return x + 1\n"
    wrong = "def f(x):\n    return x\n"
    try:
        reward = CodeReward(workers=1, unprotected=True)
    except UserError as error:
        pytest.skip(str(error))
    programs = [right, wrong, *([method] if "fn" in str(row) or "func" in str(row) else [])]
    prompt = Prompt(found.id, found.question, (1,), found.answer, "", found.extra)
    batch = [
        RewardInput(prompt, Completion(0, 0, (1,), (0.0,), "stop", 0), f"```python\n{program}\n```")
        for program in programs
    ]
    try:
        assert [score.value for score in reward.score(batch)] == [1.0, 0.0, 1.0][: len(batch)]
    finally:
        reward.close()


def test_mathematics_and_code_in_one_verl_file_are_told_apart() -> None:
    math = {"prompt": "p", "data_source": "math", "reward_model": {"ground_truth": "7"}}
    code = {"prompt": "p", "data_source": "taco", "reward_model": {"ground_truth": json.dumps(PAIRS)}}
    for rows in ([math, code], [code, math]):
        source = InMemoryPrompts(rows)
        found = {row.source: row for row in source.rows()}
        assert (found["math"].answer, found["taco"].answer) == ("7", None)
        assert "cases" not in found["math"].extra
        assert found["taco"].extra["cases"] == CASES
        assert "answer from reward_model.ground_truth, tests from reward_model.ground_truth (1 rows)" in str(
            source.columns_taken()
        )


class NeedsTests(Reward):
    """What CodeReward asks of a row, without a sandbox."""

    def row_problem(self, answer: str | None, extra: Any) -> str | None:
        return CodeReward.row_problem(CodeReward.__new__(CodeReward), answer, extra)


def test_rows_without_tests_are_found_with_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CodeReward, "_tests", "tests", raising=False)
    monkeypatch.setattr(CodeReward, "_cases", "cases", raising=False)
    path = tmp_path / "code.jsonl"
    rows = [{"prompt": "p", "reward_model": {"ground_truth": json.dumps(PAIRS)}} for _ in range(3)]
    for bad in ("", "{}", '{"inputs": [], "outputs": []}', '{"inputs": ["1"], "outputs": []}', json.dumps(PAIRS)[:-9]):
        rows[1] = {"prompt": "p", "reward_model": {"ground_truth": bad}}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(UserError, match="there are no tests") as caught:
            prepare(
                JsonlPrompts(str(path)), "data.prompts", form=PromptFormat(), tokenizer=tokenizer(),
                rewards=[NeedsTests()],
            )  # fmt: skip
        assert caught.value.where == f"{path}:2"


def test_tests_that_the_reward_reads_stay_as_they_are() -> None:
    for given in ({"tests": "assert f(1) == 2"}, {"tests": ASSERTS}, {"cases": CASES}):
        row = {"prompt": "p", **given}
        assert read(row).extra == given


# ------------------------------------------------------------------------------------------- files and folders


ROWS = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def questions(source: PromptSource) -> list[str]:
    return [row.question for row in source.rows()]


def folder_of_everything(folder: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (folder / "deep").mkdir()
    (folder / ".cache").mkdir()
    (folder / "a.jsonl").write_text(lines(ROWS[:1]))
    (folder / "b.json.gz").write_bytes(gzip.compress(json.dumps(ROWS[1:2]).encode()))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[2:3]), folder / "c.parquet")
    (folder / "deep" / "d.csv").write_text("question,answer\n3+1=,4\n")
    (folder / ".cache" / "old.jsonl").write_text("no JSON")
    (folder / "README.md").write_text("about")


def test_a_folder_gives_the_files_of_the_kind_that_is_asked_for(tmp_path: Path) -> None:
    folder_of_everything(tmp_path)
    path = str(tmp_path)
    assert questions(FilePrompts(path)) == ["0+1=", "1+1=", "2+1=", "3+1="]
    assert questions(JsonlPrompts(path)) == ["0+1=", "1+1="]
    assert questions(ParquetPrompts(path)) == ["2+1="]
    assert questions(CsvPrompts(path)) == ["3+1="]
    assert questions(FilePrompts([f"{path}/c.parquet", f"{path}/a.*", f"{path}/deep"])) == ["2+1=", "0+1=", "3+1="]
    assert questions(FilePrompts(f"{path}/*.j*")) == ["0+1=", "1+1="]
    assert "does not say what kind of file" in refused(FilePrompts(f"{path}/README.md")).what
    assert "holds no file of the kind .parquet; it holds d.csv" in refused(ParquetPrompts(f"{path}/deep")).what


def test_a_path_in_the_place_of_a_source_is_named_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n', encoding="utf-8")
    data = RolloutDataModule(prompts=f"{tmp_path}/rows.jsonl", rewards=[ExactMatch()])
    assert isinstance(data.prompts, FilePrompts)
    assert questions(data.prompts) == ["1+1="]
    missing = RolloutDataModule(prompts=f"{tmp_path}/rowz.jsonl", rewards=[ExactMatch()]).prompts
    assert missing is not None
    error = refused(missing)
    assert error.where == "data.prompts"
    assert "did you mean" in str(error.remedy)
    of_class = refused(FilePrompts(f"{tmp_path}/rowz.jsonl"))
    assert of_class.where == "FilePrompts.path"


def test_every_class_reads_what_save_to_disk_wrote(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": table, "test": table.select([3])}).save_to_disk(str(tmp_path / "two"))
    datasets.DatasetDict({"only": table}).save_to_disk(str(tmp_path / "three"))
    for kind in (FilePrompts, JsonlPrompts, ParquetPrompts, CsvPrompts, HubPrompts):
        assert len(questions(kind(str(tmp_path / "one")))) == 4
        assert questions(kind(str(tmp_path / "two" / "test"))) == ["3+1="]
    for kind in (FilePrompts, JsonlPrompts, ParquetPrompts, CsvPrompts):
        error = refused(kind(str(tmp_path / "two")))
        assert "holds several splits: train, test" in error.what
        # The remedy is tried.
        assert len(questions(kind(str(error.remedy).removeprefix("give the folder of one: ")))) == 4
        assert len(questions(kind(str(tmp_path / "three")))) == 4
        assert len(questions(kind([str(tmp_path / "one"), str(tmp_path / "two" / "test")], id_column=None))) == 5
    assert len(questions(HubPrompts(str(tmp_path / "two")))) == 4
    assert questions(HubPrompts(str(tmp_path / "two"), split="test")) == ["3+1="]
    error = refused(HubPrompts(str(tmp_path / "two"), split="tset"))
    assert "has no split 'tset', only train, test" in error.what
    (tmp_path / "one" / "state.json").write_text("{")
    assert "cannot read the saved data set" in refused(HubPrompts(str(tmp_path / "one"))).what


def test_rows_that_python_hands_over(tmp_path: Path) -> None:
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    given = [
        ROWS, tuple(ROWS), datasets.Dataset.from_list(ROWS), pandas.DataFrame(ROWS), str(tmp_path / "a.jsonl"),
        tmp_path / "a.jsonl", tmp_path, InMemoryPrompts(ROWS), [Row(str(i), f"{i}+1=", str(i + 1)) for i in range(4)],
    ]  # fmt: skip
    for one in given:
        source = as_source(one, "data.prompts")
        assert source is not None
        assert [(row.question, row.answer) for row in source.rows()] == [(f"{i}+1=", str(i + 1)) for i in range(4)]
    assert as_source(None, "data.prompts") is None


def test_what_is_no_prompts_is_refused_in_one_sentence() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    prompt = Prompt("a", "q", (1,), "1")
    for given, what in (
        (InMemoryPrompts, "InMemoryPrompts is a class"),
        (datasets.DatasetDict({"train": table}), "the prompts are a DatasetDict"),
        ({"prompt": "q"}, "the prompts are a dict"), ([], "an empty list"), (7, "the prompts are an int"),
        (["a question"], "the prompts are a list of texts"), ([prompt], "item 0 of the prompts is a Prompt"),
        ([{"prompt": "q"}, prompt], "item 1 of the prompts is a Prompt"), (lambda: ROWS, "the prompts are a function"),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            as_source(given, "data.prompts")
        assert what in caught.value.what
        assert caught.value.where == "data.prompts"
        assert caught.value.remedy
