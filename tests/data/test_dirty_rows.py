"""Real data, with what is odd in it: read whole, unchanged, and as the README beside it counts it."""

import gzip
import json
from typing import Any

import pytest

from lit_grpo.data import CleanConfig, JsonlPrompts, PromptFormat
from lit_grpo.errors import UserError
from lit_grpo.rewards import ExactMatch
from lit_grpo.rewards.math.answer import final_answer
from tests.paths import SHARED

DATA = SHARED / "data"
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="the shared data is not beside the checkout")
ROWS = {
    "gsm8k_train": 7473, "gsm8k_test": 1319, "dapo_17k": 17176, "deepmath_5k": 4990, "aime24": 30, "aime25": 30,
    "amc23": 40, "olympiadbench_math_en": 675, "olymmath_en": 200, "college_math_ccby": 1220, "gaokao2023en": 383,
    "countdown_500": 500,
}  # fmt: skip


def path(name):
    return DATA / f"{name}.jsonl.gz"


def rows(name, **arguments):
    return JsonlPrompts(str(path(name)), **arguments).rows()


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_read_as_it_stands(name):
    source = JsonlPrompts(str(path(name)))
    found = source.rows()
    assert all(row.answer and row.answer.strip() for row in found)
    assert len(found) == ROWS[name]
    with gzip.open(path(name), "rt", encoding="utf-8") as file:
        for number, (line, row) in enumerate(zip(file, found, strict=True), start=1):
            record = json.loads(line)
            assert (row.id, row.question, row.answer) == (record["id"], record["prompt"], record["answer"])
            assert row.extra == {k: v for k, v in record.items() if k not in ("id", "prompt", "answer")}
            assert row.where == f"{path(name)}:{number}"


def test_golds_with_a_thousands_comma_are_kept_and_found_in_answers():
    golds = [r.answer or "" for name in ("gsm8k_train", "gsm8k_test") for r in rows(name)]
    with_comma = [gold for gold in golds if "," in gold]
    assert len(with_comma) == 93
    assert "2,125" in with_comma
    assert all(gold.replace(",", "").isdigit() for gold in with_comma)
    found = final_answer(r"So the total is \boxed{2125}.")
    assert found is not None
    assert found.replace(",", "") == "2125"


def test_long_integers_and_chinese_rows():
    found = rows("dapo_17k")
    assert all((r.answer or "").lstrip("-").isdigit() for r in found)
    assert max(len(r.answer or "") for r in found) == 23
    assert len(rows("dapo_17k", where={"lang": "zh"})) == 3200


def test_answers_of_several_values_stay_one_list():
    several = [r for r in rows("olympiadbench_math_en") if r.extra["is_multiple_answer"]]
    assert len(several) > 50
    assert sum("," in (r.answer or "") for r in several) > 0.9 * len(several)
    assert rows("olympiadbench_math_en", where={"is_multiple_answer": True})[0].id == several[0].id


def test_noisy_golds_pass_through():
    golds = {r.id: r.answer for r in rows("deepmath_5k")}
    assert golds["deepmath/2"] == "x"
    prose = [r for r in rows("college_math_ccby") if (r.answer or "").count(" ") > 8 and "\n" in (r.answer or "")]
    assert prose
    assert "The eigenvectors and eigenvalues are:" in {(r.answer or "").splitlines()[0] for r in prose}


def test_an_empty_gold_is_named_by_file_and_line(tmp_path):
    """The source of gaokao2023en has two; the published file leaves them out."""
    from lit_grpo.data.prompt_set import prepare

    with gzip.open(path("gaokao2023en"), "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file][:5]
    lines[3]["answer"] = ""
    (tmp_path / "raw.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    source = JsonlPrompts(str(tmp_path / "raw.jsonl"))
    settings: dict[str, Any] = {
        "form": PromptFormat(chat_template="none"),
        "tokenizer": Characters(),
        "rewards": [ExactMatch()],
    }
    with pytest.raises(UserError, match="has no answer, and the reward 'exact_match'") as caught:
        prepare(source, "data.prompts", **settings)
    assert caught.value.where == f"{tmp_path / 'raw.jsonl'}:4"


class Characters:
    """A tokenizer of code points."""

    chat_template = None
    bos_token_id = None

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) for c in text]}


def test_a_real_file_is_prepared_with_every_row_accounted_for(tmp_path):
    from lit_grpo.data.prompt_set import prepare, write_dropped

    clean = CleanConfig(deduplicate=True, decontaminate=[JsonlPrompts(str(path("amc23")))])
    found = prepare(
        JsonlPrompts(str(path("dapo_17k")), where={"lang": "en"}),
        "data.prompts",
        form=PromptFormat(max_prompt_tokens=900, on_long="drop"),
        tokenizer=Characters(),
        rewards=[ExactMatch()],
        clean=clean,
    )
    reasons = [item.reason for item in found.dropped]
    assert {"contaminated", "too long"} <= set(reasons)
    assert len(found.prompts) + len(found.dropped) == 13976
    (line,) = found.summary_lines()
    assert line.startswith(f"data.prompts: {len(found.prompts):,} prompts of 13,976 rows; dropped ")
    assert f"{reasons.count('too long'):,} too long" in line
    assert f"(given away: amc23 {reasons.count('contaminated')})" in line
    write_dropped([found], str(tmp_path / "sub/dropped.jsonl"))
    written = [json.loads(text) for text in (tmp_path / "sub/dropped.jsonl").read_text().splitlines()]
    assert len(written) == len(found.dropped)
    hit = next(row for row in written if row["reason"] == "contaminated")
    assert hit["other"].startswith("amc23/")
    assert hit["where"].rpartition(":")[0] == str(path("dapo_17k"))
