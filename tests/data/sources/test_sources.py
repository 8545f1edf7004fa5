"""Prompt sources: what is read, and how each kind of bad input is refused."""

import contextlib
import gzip
import json
import socket

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_grpo.data import CsvPrompts, HubPrompts, InMemoryPrompts, JsonlPrompts, ParquetPrompts, PromptSource
from lit_grpo.errors import UserError
from lit_grpo.utils.hub import reachable
from tests.paths import SHARED

DATA = SHARED / "data"
ROWS = [
    {"prompt": "1+1=", "answer": "2", "id": "a", "lang": "en", "level": 1},
    {"prompt": "2+2=", "answer": 4, "id": "b", "lang": "de", "level": 2},
    {"prompt": "3+3=", "answer": 6.5, "id": "c", "lang": "en", "level": 2},
]


@pytest.fixture
def write(tmp_path):
    """``write(lines, name)``: a file of these lines (mappings become JSON), and its path as text."""

    def make(lines, name="data.jsonl"):
        path = tmp_path / name
        content = b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines)
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return str(path)

    return make


def refused(source: PromptSource) -> UserError:
    with pytest.raises(UserError) as caught:
        source.rows()
    assert caught.value.where
    return caught.value


def test_jsonl_plain_and_gzip(write):
    plain = JsonlPrompts(write(ROWS))
    assert plain.name == "data"
    assert [(r.id, r.question, r.answer) for r in plain.rows()] == [
        ("a", "1+1=", "2"),
        ("b", "2+2=", "4"),
        ("c", "3+3=", "6.5"),
    ]
    assert plain.rows()[0].extra == {"lang": "en", "level": 1}
    assert plain.rows()[2].where.endswith("data.jsonl:3")
    packed = JsonlPrompts(write(ROWS, "other.jsonl.gz"))
    assert [r.question for r in packed.rows()] == [r.question for r in plain.rows()]
    assert packed.name == "other"


def test_parquet_memory_and_hub_read_the_same(write, tmp_path):
    rows = [{**row, "answer": str(row["answer"])} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    expected = [(r["id"], r["prompt"], r["answer"]) for r in rows]
    (tmp_path / "t.parquet.gz").write_bytes(gzip.compress((tmp_path / "t.parquet").read_bytes()))
    for source in (
        ParquetPrompts(str(tmp_path / "t.parquet")),
        ParquetPrompts(str(tmp_path / "t.parquet.gz")),
        InMemoryPrompts(rows),
        JsonlPrompts(write(rows)),
        HubPrompts(str(folder)),
    ):
        assert [(r.id, r.question, r.answer) for r in source.rows()] == expected
        assert source.rows()[1].extra == {"lang": "de", "level": 2}
        assert source.rows() is source.rows()


def test_columns_filter_and_limit(write):
    path = write([{"q": f"{i}?", "gold": i, "key": 10 + i, "lang": "en" if i % 2 else "zh"} for i in range(10)])
    source = JsonlPrompts(
        path, question_column="q", answer_column="gold", id_column="key", where={"lang": "en"}, limit=3, name="numbers"
    )
    assert [(r.id, r.answer) for r in source.rows()] == [("11", "1"), ("13", "3"), ("15", "5")]
    assert [r.id for r in JsonlPrompts(path, question_column="q", answer_column=None).rows()][:2] == [
        "data/1",
        "data/2",
    ]
    assert JsonlPrompts(path, question_column="q", answer_column=None).rows()[0].answer is None
    assert JsonlPrompts(path, question_column="q").rows()[0].answer is None  # the default column may be missing
    error = refused(JsonlPrompts(path, question_column="q", answer_column="gold", where={"lang": "fr"}))
    assert "none of 10 rows has {'lang': 'fr'}" in error.what
    assert "'lnag'" in refused(JsonlPrompts(path, question_column="q", where={"lnag": "en"})).what
    with pytest.raises(UserError, match="limit is 0"):
        JsonlPrompts(path, limit=0)


def test_only_a_line_feed_ends_a_line(write):
    text = "one\u2028two\u0085three\rfour"
    path = write([json.dumps({"prompt": text}, ensure_ascii=False).encode(), b"", b"  ", {"prompt": "next"}])
    rows = JsonlPrompts(path).rows()
    assert rows[0].question == text
    assert rows[1].where.endswith(":4")


def test_a_missing_file_names_the_nearest(write, tmp_path):
    write(ROWS, "gsm8k_train.jsonl")
    error = refused(JsonlPrompts(str(tmp_path / "gsm8k_trian.jsonl")))
    assert "there is no file" in error.what
    assert "gsm8k_train.jsonl" in (error.remedy or "")
    assert "folder is missing" in (refused(JsonlPrompts(str(tmp_path / "no/where/x.jsonl"))).remedy or "")
    error = refused(ParquetPrompts(str(tmp_path)))
    assert "holds no file of the kind .parquet; it holds gsm8k_train.jsonl" in error.what
    assert "FilePrompts reads all of them" in (error.remedy or "")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"prompt": "x", ', "the line is no JSON"),
        (b'["prompt"]', "no JSON object but list"),
        (b"3", "no JSON object but int"),
        (b'{"prompt": "\xe9t\xe9"}', "not UTF-8: byte 0xe9"),
        (b'{"prompt": ""}', "the prompt in column 'prompt' is empty"),
        (b'{"prompt": " \\n"}', "the prompt in column 'prompt' is empty"),
        (b'{"prompt": null}', "the prompt in column 'prompt' is empty"),
        (b'{"answer": "5"}', "the row has no column 'prompt'; its columns are 'answer'"),
        (b'{"prompt": 5}', "is no text but int"),
        (b'{"prompt": {"role": "user"}}', "is no text but dict"),
        (b'{"prompt": []}', "is an empty list"),
        (b'{"prompt": ["x"]}', "its item 0 is no message: 'x'"),
        (b'{"prompt": [{"role": "user", "content": " "}]}', "holds no question"),
        (b'{"prompt": [{"role": "system", "content": "x"}]}', "holds no question: its roles are system"),
        (b'{"prompt": [{"role": "user", "content": null}]}', "whose content is no text: 'None'"),
        (b'{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "whose content is no text"),
        (b'{"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}', "ends with a mess"),
        (b"{\"prompt\": \"[{'role': 'user']\"}", "looks like a list of messages and is no JSON"),
        (b'{"prompt": "half \\ud83d"}', "half a character"),
        (b'{"prompt": "x", "answer": [1, true]}', "neither text nor a number but list"),
        (b'{"prompt": "x", "answer": true}', "neither text nor a number but bool"),
        (b'{"prompt": "x", "answer": Infinity}', "neither text nor a number but float"),
        (b'{"prompt": "x", "id": ""}', "the id in column 'id' is empty"),
        (b'{"prompt": "x", "id": "a"}', "the id 'a' stands in two rows"),
        (b"[" * 200_000, "cannot be read"),
        (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", "cannot be read"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(write, line, what):
    error = refused(JsonlPrompts(write([ROWS[0], line])))
    assert what in error.what
    assert error.where is not None
    assert error.where.endswith("data.jsonl:2")
    assert error.remedy


def test_other_encodings_and_damaged_files(write, tmp_path):
    assert "UTF-16" in refused(JsonlPrompts(write([json.dumps(ROWS[0]).encode("utf-16")]))).what
    assert JsonlPrompts(write([json.dumps(ROWS[0]).encode("utf-8-sig")])).rows()[0].id == "a"
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode() * 50)[:-20])
    assert "damaged" in refused(JsonlPrompts(str(damaged))).what
    not_parquet = tmp_path / "x.parquet"
    not_parquet.write_bytes(b"PAR1 nothing")
    assert "as Parquet" in refused(ParquetPrompts(str(not_parquet))).what
    assert "no rows" in refused(JsonlPrompts(write([]))).what
    assert "no rows" in refused(InMemoryPrompts([])).what
    assert "cannot be read as one" in refused(JsonlPrompts(write([b"[{", {"prompt": "x"}]))).what
    assert "no mapping" in refused(JsonlPrompts(write([b"[3]"]))).what
    assert "no mapping" in refused(InMemoryPrompts(["x"])).what  # type: ignore[list-item]


def test_a_missing_column_lists_the_columns_and_the_nearest(write):
    path = write([{"question": "x", "anwser": "1"}])
    error = refused(JsonlPrompts(path, question_column="qestion"))
    assert "'question', 'anwser'" in error.what
    assert error.remedy == "did you mean 'question'?"
    assert "'anwser'?" in (
        refused(JsonlPrompts(path, question_column="question", answer_column="the_anwser")).remedy or ""
    )
    assert "'uid'" in refused(JsonlPrompts(path, question_column="question", id_column="uid")).what


def test_rows_without_a_gold_answer_are_read(write):
    rows = JsonlPrompts(write([ROWS[0], {"prompt": "x", "answer": " "}, {"prompt": "y"}])).rows()
    assert [row.answer for row in rows][1:] == [" ", None]


def test_a_missing_number_in_parquet_is_no_answer(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x", "y"], "answer": [1.0, None]}), tmp_path / "t.parquet")
    assert [r.answer for r in ParquetPrompts(str(tmp_path / "t.parquet")).rows()] == ["1.0", None]


def test_the_hub_says_what_is_wrong(write, tmp_path):
    write(ROWS, "train.jsonl")
    error = refused(HubPrompts(str(tmp_path), split="trian"))
    assert "did you mean split: train?" in (error.remedy or "")
    assert "cannot load the data set" in refused(HubPrompts(str(tmp_path / "nothing"))).what


def test_one_of_several_sets_in_one_repository(tmp_path):
    for level, text in (("easy", "1+1="), ("hard", "7*8=")):
        (tmp_path / level).mkdir()
        (tmp_path / level / "train.jsonl").write_text(json.dumps({"prompt": text, "answer": "2"}) + "\n")
        (tmp_path / level / "test.jsonl").write_text(json.dumps({"prompt": "0+0=", "answer": "0"}) + "\n")
    hard = HubPrompts(str(tmp_path), data_files="hard/train.jsonl")
    assert [row.question for row in hard.rows()] == ["7*8="]
    both = HubPrompts(str(tmp_path), data_files=["easy/train.jsonl", "hard/train.jsonl"])
    assert [row.question for row in both.rows()] == ["1+1=", "7*8="]
    assert "cannot load the data set" in refused(HubPrompts(str(tmp_path), data_files="harder/train.jsonl")).what


def test_a_saved_set_has_no_data_files(tmp_path):
    import datasets

    datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}]).save_to_disk(str(tmp_path / "saved"))
    error = refused(HubPrompts(str(tmp_path / "saved"), data_files="train.parquet"))
    assert error.where == "HubPrompts.data_files"


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://localhost:9")  # the port "discard": nobody listens
    error = refused(HubPrompts("openai/no-such-set"))
    assert "localhost cannot be reached, and it is not in the cache" in error.what
    assert not datasets.config.HF_HUB_OFFLINE
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(HubPrompts("openai/no-such-set")).what


def test_reachable_is_told_within_its_time():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reachable("127.0.0.1", port)
    assert not reachable("127.0.0.1", port)


def csv_file(tmp_path, content, name="t.csv"):
    path = tmp_path / name
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(path)


CSV = 'prompt,answer,level\n"one, two",1,3\n"two\nlines ""quoted""",2,4\n\nlast,,3\n'


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_csv(tmp_path, name, bom):
    rows = CsvPrompts(csv_file(tmp_path, bom + CSV, name)).rows()
    assert [(r.question, r.answer) for r in rows] == [("one, two", "1"), ('two\nlines "quoted"', "2"), ("last", "")]
    assert [r.where.rpartition(":")[2] for r in rows] == ["2", "3", "6"]
    assert rows[0].extra == {"level": "3"}
    assert rows[0].id == "t/1"


def test_csv_options(tmp_path):
    path = csv_file(tmp_path, CSV.replace(",", "\t").replace("one\t", "one"))
    assert [r.id for r in CsvPrompts(path, delimiter="\t", where={"level": 3}).rows()] == ["t/1", "t/3"]
    with pytest.raises(UserError, match="delimiter is"):
        CsvPrompts(path, delimiter=";;")


@pytest.mark.parametrize(
    ("content", "what", "line"),
    [
        (CSV + "a,b\n", "the row has 2 fields, the header 3", 7),
        (CSV + "a,b,c,d\n", "the row has 4 fields, the header 3", 7),
        (CSV + '"a,b,c\nx\n', "cannot be read as CSV", 7),
        (CSV + 'a,"b"c,d\n', "cannot be read as CSV", 7),
        (CSV.encode() + b"a,\xe9,c\n", "not UTF-8: byte 0xe9", 7),
        (CSV + ",1,2\n", "the prompt in column 'prompt' is empty", 7),
        ("prompt,answer,answer\na,1,2\n", "the column 'answer' is there twice", 1),
        ("prompt,,\na,1,2\n", "two columns have no name", 1),
        ("quest,answer\na,1\n", "there is no column 'prompt'", 2),
    ],
)
def test_a_bad_csv_row_is_named_by_file_and_line(tmp_path, content, what, line):
    error = refused(CsvPrompts(csv_file(tmp_path, content)))
    assert what in error.what
    assert error.where is not None
    assert error.where.endswith(f"t.csv:{line}")
    assert error.remedy


@given(st.lists(st.binary(max_size=40), max_size=5))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_csv_is_read_or_refused(tmp_path, lines):
    with contextlib.suppress(UserError):
        assert CsvPrompts(csv_file(tmp_path, b"prompt\n" + b"\n".join(lines))).rows()


def test_a_column_of_another_name_is_no_misspelling(write):
    rows = [{"task": "2*3=", "solution": "6"}]
    error = refused(JsonlPrompts(write(rows), question_column="question", answer_column="answer"))
    assert "the columns are 'task', 'solution'" in error.what
    assert "did you mean" not in (error.remedy or "")
    assert "question_column" in (error.remedy or "")


def test_columns_inside_columns_and_answers_inside_text(write):
    rows = [
        {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "so\n#### 1,234 "}},
        {"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": "#### 3\n#### 4"}},
    ]
    columns = {"question_column": "prompt.0.content", "answer_column": "reward_model.ground_truth"}
    source = JsonlPrompts(write(rows), **columns, answer_pattern=r"####\s*(.+)")
    assert [(r.question, r.answer) for r in source.rows()] == [("1+1?", "1,234"), ("2+2?", "4")]
    assert "no column 'prompt.1.content'" in refused(JsonlPrompts(write(rows), question_column="prompt.1.content")).what
    error = refused(JsonlPrompts(write(rows), **columns, answer_pattern=r"answer: (\d+)"))
    assert error.where is not None
    assert error.where.endswith(":1")
    for broken in ("(", "####", "(a)(b)"):
        with pytest.raises(UserError, match="the pattern"):
            JsonlPrompts("x", answer_pattern=broken)


@given(st.lists(st.binary(max_size=60), max_size=6))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(tmp_path, lines):
    path = tmp_path / "any.jsonl"
    path.write_bytes(b"\n".join(lines))
    with contextlib.suppress(UserError):
        assert JsonlPrompts(str(path)).rows()


@pytest.mark.skipif(not DATA.exists(), reason="the shared data is not beside the checkout")
def test_real_data():
    source = JsonlPrompts(str(DATA / "gsm8k_test.jsonl.gz"))
    assert len(source.rows()) == 1319
    assert all(row.answer for row in source.rows())
    assert any("," in (row.answer or "") for row in source.rows())
    chinese = JsonlPrompts(str(DATA / "dapo_17k.jsonl.gz"), where={"lang": "zh"})
    assert len(chinese.rows()) == 3200
    countdown = JsonlPrompts(str(DATA / "countdown_500.jsonl.gz"), limit=10).rows()
    assert countdown[0].extra["target"] == int(countdown[0].answer or 0)
