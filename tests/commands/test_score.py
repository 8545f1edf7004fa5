"""``lit-grpo score``: ready completions in, one line each out, in order; bad input is one screen."""

import gzip
import io
import json
import subprocess
import sys

import pytest

from lit_grpo.cli.main import main
from lit_grpo.rewards import Reward
from tests.paths import ROOT
from tests.waiting import PATIENCE

CASES = ROOT.parent / "shared/verifier/cases.jsonl"
LIMIT, GRACE = 5.0, PATIENCE


class Brevity(Reward):
    """Of the user: counts characters; a text of 3 makes it fail."""

    correct_threshold = None

    def score(self, batch):
        if any(len(item.text) == 3 for item in batch):
            raise RuntimeError("three")
        return [-float(len(item.text)) * item.prompt.extra.get("factor", 1) for item in batch]


class Tokens(Reward):
    needs_tokens = True

    def score(self, batch):
        return [float(len(item.completion.token_ids)) for item in batch]


@pytest.fixture
def score(tmp_path, capsys):
    """Runs the command on rows (or raw text); (exit code, output rows, standard error)."""

    def score(rows, *options, config=None):
        text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "pairs.jsonl").write_text(text)
        arguments = ["score", "--input", str(tmp_path / "pairs.jsonl"), *options]
        if config is not None:
            (tmp_path / "reward.yaml").write_text(config)
            arguments += ["--config", str(tmp_path / "reward.yaml")]
        code = main(arguments)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, [json.loads(line) for line in out.splitlines()], err

    return score


def test_any_of_several_golds_is_right(score):
    rows = [{"prediction": r"so \boxed{4}", "answer": golds} for golds in (["5", 4], ["5", "6"], [4])]
    code, out, _ = score(rows)
    assert (code, [line["correct"] for line in out]) == (0, [True, False, True])


def test_lines_come_back_in_order_with_the_math_verifier(score):
    rows = [
        {"prediction": r"so \boxed{4}", "answer": "4", "id": "a"},
        {"prediction": r"so \boxed{5}", "answer": 4},
        {"prediction": "", "answer": ""},
        {"prediction": r"\boxed{\frac{1}{2}}", "gold": "0.5"},
        {"prediction": "he has 4", "answer": "4", "finish_reason": "length"},
    ]
    code, out, err = score(rows)
    assert code == 0
    assert [row["correct"] for row in out] == [True, False, False, True, False]
    assert [row["reward"] for row in out] == [{"math": float(row["correct"])} for row in out]
    assert [row.get("id") for row in out] == ["a", None, None, None, None]
    assert all(row["timed_out"] is False and 0 <= row["seconds"] < GRACE for row in out)
    assert "5 lines; 2 correct, 40.0 %; mean math 0.4; 0 timed out" in err


def test_rewards_of_a_configuration(score):
    config = """\
rewards:
  - {class_path: tests.commands.test_score.Brevity, init_args: {weight: 0.5}}
  - {class_path: lit_grpo.rewards.ExactMatch, init_args: {ignore_case: true}}
"""
    rows = [{"prediction": "Paris", "answer": "paris", "factor": 2}, {"prediction": "Rome", "answer": "paris"}]
    code, out, _ = score(rows, config=config)
    assert code == 0
    assert [row["reward"] for row in out] == [
        {"brevity": -10.0, "exact_match": 1.0},
        {"brevity": -4.0, "exact_match": 0},
    ]
    assert [row["correct"] for row in out] == [True, False]
    _, out, _ = score(rows, config="rewards: [{class_path: tests.commands.test_score.Brevity}]")
    assert [row["correct"] for row in out] == [None, None]


def test_the_configuration_of_a_run_serves_too(score):
    config = (ROOT / "configs/quickstart.yaml").read_text()
    code, out, _ = score([{"prediction": "2", "answer": "2"}], config=config)
    assert (code, out[0]["correct"], out[0]["reward"]) == (0, True, {"exact_match": 1.0})


def test_a_reward_that_fails_ends_it_or_scores_zero(score):
    config = "rewards: [{class_path: tests.commands.test_score.Brevity}]"
    rows = [{"prediction": "abc"}, {"prediction": "abcd"}]
    code, out, err = score(rows, config=config)
    assert (code, out) == (1, [])
    assert "RuntimeError: three" in err
    assert "'abc'" in err
    code, out, err = score(rows, "--on-error", "zero", config=config)
    assert code == 0
    assert [(row["reward"]["brevity"], row["failed"]) for row in out] == [(0.0, True), (-4.0, False)]
    assert "1 failed" in err
    assert score(rows, config=f"{config}\non_reward_error: zero\n")[0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"prediction": "x", "answer": "1"}\n{"prediction": \n', ("pairs.jsonl:2", "is no JSON")),
        ('{"prediction": "x", "answer": "1"}\n\n[1]\n', ("pairs.jsonl:3", "no JSON object but list")),
        ('{"answer": "1"}', ("pairs.jsonl:1", "no field `prediction`", "'answer'")),
        ('{"prediction": 5, "answer": "1"}', ("pairs.jsonl:1", "that is a number, not text")),
        ('{"prediction": "x"}', ("pairs.jsonl:1", "no field `answer`", "'math'")),
        ('{"prediction": "x", "answer": [1, true]}', ("pairs.jsonl:1", "`answer` that is a list")),
        ('{"prediction": "x", "answer": "1", "tokens": -2}', ("pairs.jsonl:1", "`tokens` is '-2'")),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_judged(score, text, said):
    code, out, err = score(text)
    assert (code, out) == (2, [])
    assert all(part in " ".join(err.split()) for part in said), err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("rewards: []", "lists no rewards"),
        ("model: {}", "lists no rewards"),
        ("rewards: [{class_path: lit_grpo.rewards.ExactMach}]", "did you mean lit_grpo.rewards.ExactMatch"),
        ("rewards: [{class_path: lit_grpo.rewards.ExactMatch, init_args: {pattren: x}}]", "did you mean `pattern`"),
        ("rewards: [{class_path: lit_grpo.rewards.MathReward, init_args: {limit: 0}}]", "limit is 0"),
        ("rewards: [{class_path: lit_grpo.rewards.MathReward}]\nlimit: 3", "there is no key `limit`"),
        ("rewards: [{class_path: tests.commands.test_score.Tokens}]", "no field `tokens`"),
        ("rewards: [", "not valid YAML"),
    ],
)
def test_a_bad_configuration_is_one_screen(score, config, said):
    code, out, err = score([{"prediction": "x", "answer": "1"}], config=config)
    assert (code, out) == (2, [])
    assert said in " ".join(err.split()), err


def test_files_that_are_not_there(tmp_path, capsys):
    assert main(["score", "--input", str(tmp_path / "none.jsonl")]) == 2
    assert "there is no file" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text("")
    assert main(["score", "--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "no/where")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_standard_input_gzip_and_output_file(tmp_path, capsys, monkeypatch):
    line = b'{"prediction": "#### 7", "answer": "7"}\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line * 3)))
    assert main(["score", "--input", "-", "--output", str(tmp_path / "out.jsonl")]) == 0
    assert capsys.readouterr().out == ""
    assert [json.loads(row)["correct"] for row in (tmp_path / "out.jsonl").read_text().splitlines()] == [True] * 3
    (tmp_path / "in.gz").write_bytes(gzip.compress(line))
    assert main(["score", "--input", str(tmp_path / "in.gz")]) == 0
    assert json.loads(capsys.readouterr().out)["correct"] is True
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line + b"oops\n")))
    assert main(["score", "--input", "-"]) == 2
    assert "standard input:2" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prediction": "\xff", "answer": "1"}')))
    assert main(["score", "--input", "-"]) == 2
    assert "standard input:1" in capsys.readouterr().err


def test_it_imports_neither_torch_nor_lightning(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prediction": "#### 7", "answer": "7"}\n')
    code = (
        "import sys; from lit_grpo.cli.main import main\n"
        f"assert main(['score', '--input', {str(tmp_path / 'a.jsonl')!r}]) == 0\n"
        "print([m for m in ('torch', 'lightning', 'transformers', 'sympy', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.skipif(not CASES.exists(), reason="the shared verifier cases are not beside the checkout")
@pytest.mark.slow
def test_the_shared_cases_from_the_command_line(capsys):
    assert main(["score", "--input", str(CASES)]) == 0
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = [json.loads(line) for line in CASES.read_text("utf-8").splitlines()]
    assert [row["id"] for row in out] == [case["id"] for case in cases]
    assert [case["id"] for case, row in zip(cases, out, strict=True) if row["correct"] != case["expected"]] == []
    assert max(row["seconds"] for row in out) < LIMIT + GRACE
    assert any(row["timed_out"] for row in out)
