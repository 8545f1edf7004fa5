"""``lit-grpo filter``: every prompt once, killed or not; no rate of other settings; rows that can be read back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lit_grpo.cli.main import main
from lit_grpo.commands.filter.command import finish
from lit_grpo.commands.filter.options import Options
from lit_grpo.commands.filter.rate_journal import Rate, RateJournal, all_rates_paths, rates_path
from lit_grpo.data import JsonlPrompts
from lit_grpo.errors import UserError
from lit_grpo.types import Prompt
from tests.paths import ROOT

CONFIG = """
seed_everything: 3
model: {policy: {tiny: {alphabet: "0123456789+=", width: 16, layers: 1, heads: 1}}}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts, init_args: {digits: 1, n: 30}}
  rewards: [{class_path: own_rewards.Even}]
  prompts_per_rollout: 4
  group_size: 4
  sampling: {max_new_tokens: 2}
trainer: {accelerator: cpu}
"""
REWARDS = """
import os, signal
from lit_grpo.rewards import Reward

class Even(Reward):
    seen = 0

    def score(self, batch):
        Even.seen += len(batch)
        if Even.seen > int(os.environ.get("KILL_AFTER", 10**9)):
            os.kill(os.getpid(), signal.SIGKILL)
        with open("judged.txt", "a") as file:
            file.writelines(item.prompt.id + "\\n" for item in batch)
        return [float(sum(item.completion.token_ids) % 2 == 0) for item in batch]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    return tmp_path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_killed_and_resumed_equals_unbroken_and_no_prompt_is_sampled_twice(folder, capsys, monkeypatch):
    command = ["filter", "--config", "run.yaml", "--keep-above", "0", "--keep-below", "1", "--output"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "KILL_AFTER": "60"}
    run = [sys.executable, "-c", "import sys; from lit_grpo.cli.main import main; sys.exit(main(sys.argv[1:]))"]
    done = subprocess.run([*run, *command, "cut.jsonl"], env=environment, capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    rates = folder / "cut.rates.jsonl"
    first = {line["id"] for line in lines(rates)[1:]}
    assert 0 < len(first) < 30
    assert not (folder / "cut.jsonl").exists()
    with rates.open("a") as file:
        file.write('{"id": "addition/torn", "samp')  # what a kill in the middle of a write leaves
    (folder / "judged.txt").unlink()

    assert main([*command, "cut.jsonl"]) == 0
    told = capsys.readouterr()
    assert f"{len(first)} of 30 prompts are done already" in told.err
    again = set((folder / "judged.txt").read_text().split())
    assert not again & first
    assert len(again) + len(first) == 30

    assert main([*command, "whole.jsonl.gz"]) == 0
    whole = {line["id"]: line for line in lines(folder / "whole.rates.jsonl")[1:]}
    assert {line["id"]: line for line in lines(rates)[1:]} == whole
    kept = [id for id, line in whole.items() if 0 < line["pass_rate"] < 1]
    assert 0 < len(kept) < 30
    assert f"kept {len(kept)} of 30 prompts, pass rate above 0 and below 1" in capsys.readouterr().out
    rows = JsonlPrompts("whole.jsonl.gz").rows()
    assert [row.id for row in rows] == [row.id for row in JsonlPrompts("cut.jsonl").rows()]
    assert {row.id for row in rows} == set(kept)
    assert all(int(row.answer or "") == sum(row.extra["operands"]) for row in rows)
    assert all(row.extra["pass_rate"] == whole[row.id]["pass_rate"] for row in rows)
    assert sum(line["correct"] for line in whole.values()) == 4 * sum(line["pass_rate"] for line in whole.values())

    # Another band needs no model; other settings are another file.
    (folder / "judged.txt").unlink()
    assert main([*command[:3], "--keep-below", "0.5", "--output", "cut.jsonl"]) == 0
    assert not (folder / "judged.txt").exists()
    assert all(row.extra["pass_rate"] < 0.5 for row in JsonlPrompts("cut.jsonl").rows())
    before = rates.read_bytes()
    for change in (["--samples", "2"], ["--data.sampling.temperature", "0.5"], ["--seed_everything", "4"],
                   ["--data.prompts.init_args.n", "29"], ["--data.format.question_format", "{question}1"]):  # fmt: skip
        assert main([*command, "cut.jsonl", *change]) == 2
        assert "holds pass rates of other settings" in capsys.readouterr().err
    assert rates.read_bytes() == before


def test_bad_options_are_refused_before_anything_is_loaded(folder, capsys):
    (folder / "mine.jsonl").write_text("{}\n")
    for options, what in (
        (["--output", "x.jsonl", "--samples", "0"], "--samples is 0"),
        (["--output", "x.jsonl", "--keep-above", "1.5"], "--keep-above is 1.5"),
        (["--output", "x.jsonl", "--keep-above", "0.6", "--keep-below", "0.4"], "no pass rate is above 0.6 and below"),
        (["--output", "x.jsonl", "--keep-above", "1"], "no pass rate is above 1"),
        (["--output", "x.csv"], "remedy: --output x.jsonl"),
        (["--output", "mine.jsonl"], "is no output of an earlier"),
        (["--keep-below", "0.5"], "--output"),
        (["--output", "x.jsonl", "--keep-bellow", "0.5"], "keep-bellow"),
    ):
        assert main(["filter", "--config", "run.yaml", *options]) == 2
        assert what in " ".join(capsys.readouterr().err.split())
    assert (folder / "mine.jsonl").read_text() == "{}\n"


# Parts.

RATES = [Rate("a/1", 4, 0, 0.0, 0.1, 1.0), Rate("a/2", 4, 2, 0.5, 0.6, 0.0), Rate("a/3", 4, 4, 1.0, 1.0, 0.0)]


def test_a_journal_gives_back_what_was_written_whatever_a_kill_left_behind(tmp_path):
    path = tmp_path / "k.rates.jsonl"
    journal = RateJournal(path, {"samples": 4, "where": Path("x")})
    assert journal.read() == []
    journal.append(RATES[:2])
    journal.append(RATES[2:])
    content = path.read_bytes()
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        torn = RateJournal(path, {"samples": 4, "where": Path("x")})
        found = torn.read()
        assert found == RATES[: len(found)]
        torn.append(RATES[len(found) :])
        assert path.read_bytes() == content
    path.write_bytes(content + b"{" * 1000)
    torn = RateJournal(path, {"samples": 4, "where": Path("x")})
    assert torn.read() == RATES
    torn.append([])
    assert path.read_bytes() == content
    with pytest.raises(UserError, match="samples was 4, now it is 8"):
        RateJournal(path, {"samples": 8, "where": Path("x")}).read()
    with pytest.raises(UserError, match="temperature was null, now it is 1"):
        RateJournal(path, {"samples": 4, "where": Path("x"), "temperature": 1}).read()
    path.write_text('{"prompt": "x"}\n')
    with pytest.raises(UserError, match="holds no pass rates"):
        RateJournal(path, {}).read()


def test_files_of_all_ranks_belong_together(tmp_path):
    output = tmp_path / "k.jsonl.gz"
    assert [rates_path(output, rank).name for rank in range(2)] == ["k.rates.jsonl", "k.rates.1.jsonl"]
    for rank in range(3):
        rates_path(output, rank).write_text("")
    (tmp_path / "kk.rates.jsonl").write_text("")
    assert [path.name for path in all_rates_paths(output)] == ["k.rates.jsonl", "k.rates.1.jsonl", "k.rates.2.jsonl"]


@pytest.mark.parametrize(
    ("above", "below", "kept"),
    [(None, None, [0, 1, 2]), (0, 1, [1]), (None, 0.5, [0]), (0, None, [1, 2]), (0.5, None, [2]), (None, 1, [0, 1])],
)
def test_the_band_leaves_its_bounds_out(tmp_path, above, below, kept, capsys):
    options = Options(tmp_path / "k.jsonl", above=above, below=below)
    options.check()
    prompts = [
        Prompt(rate.id, f"q{i}", (1,), "1", "a", {"prompt": "other", "n": (1, 2)}) for i, rate in enumerate(RATES)
    ]
    assert finish(prompts, {rate.id: rate for rate in RATES}, options, 4) == 0
    rows = JsonlPrompts(str(options.output)).rows()
    assert [row.id for row in rows] == [RATES[i].id for i in kept]
    assert rows[0].extra["prompt_column"] == "other"
    assert rows[0].extra["n"] == [1, 2]
    out = capsys.readouterr().out
    assert "right of 4: 0 1, 2 1, 4 1" in out
    assert "columns renamed to NAME_column, since their names are taken: prompt" in out


def test_a_chat_comes_back_with_all_its_turns(tmp_path):
    turns = ({"role": "system", "content": "s"}, {"role": "user", "content": "q"})
    extra = {"reward_model": {"style": "rule", "ground_truth": "1"}}
    prompts = [Prompt(rate.id, "q", (1,), "1", "sums", extra, turns) for rate in RATES]
    options = Options(tmp_path / "k.jsonl", above=0, below=1)
    assert finish(prompts, {rate.id: rate for rate in RATES}, options, 4) == 0
    (row,) = JsonlPrompts(str(options.output), source_column="source").rows()
    assert (row.question, row.answer, row.messages, row.source) == ("q", "1", turns, "sums")


def test_nothing_kept_is_exit_code_1(tmp_path):
    prompts = [Prompt(rate.id, "q", (1,)) for rate in RATES]
    options = Options(tmp_path / "k.jsonl", above=0.5, below=0.9)
    assert finish(prompts, {rate.id: rate for rate in RATES}, options, 4) == 1
    assert options.output.read_text() == ""
    with pytest.raises(RuntimeError, match="1 prompts have no pass rate"):
        finish(prompts, {rate.id: rate for rate in RATES[1:]}, options, 4)
