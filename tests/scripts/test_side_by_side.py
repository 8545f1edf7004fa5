"""Runs side by side: what is written is not run again, one that fails ends no other, both tables come out."""

from __future__ import annotations

import json

import pytest

from scripts import critic_curves, recipe_table, side_by_side


def half(number):
    return {"number": number} | side_by_side.attempt(lambda: {"half": 1 / (2 - number)})


@pytest.mark.parametrize("jobs", [1, 2])
def test_each_run_is_written_when_it_ends_and_a_failure_ends_no_other(tmp_path, jobs, capsys):
    out = tmp_path / "new/runs.jsonl"
    found = side_by_side.run_all(half, [(1,), (2,), (3,)], jobs, out, lambda r: f"number {r['number']}", {"set": "a"})
    assert {r["number"]: r["status"] for r in found} == {1: "done", 2: "error", 3: "done"}
    assert {r["set"] for r in found} == {"a"}
    assert next(r["reason"] for r in found if r["number"] == 2) == "ZeroDivisionError: division by zero"
    assert "3/3 number" in capsys.readouterr().err
    assert {r["number"]: r["half"] for r in side_by_side.read(out)} == {1: 1.0, 3: -1.0}, "what failed is run again"


def test_a_line_cut_by_a_crash_is_left_out_and_the_next_one_whole(tmp_path):
    out = tmp_path / "runs.jsonl"
    out.write_text('{"number": 0, "status": "done"}\n{"number": 1, "sta')
    side_by_side.run_all(half, [(1,)], 1, out, str)
    assert [r["number"] for r in side_by_side.read(out)] == [0, 1]


def test_files_are_laid_over_one_another(tmp_path):
    (tmp_path / "a.yaml").write_text("model: {lr: 1, deep: {x: 1, y: [1, 2]}}\n")
    (tmp_path / "b.yaml").write_text("model: {deep: {y: [3]}}\ndata: 2\n")
    found = side_by_side.load(tmp_path / "a.yaml", tmp_path / "b.yaml")
    assert found == {"model": {"lr": 1, "deep": {"x": 1, "y": [3]}}, "data": 2}


def test_recipes_from_end_to_end(tmp_path, capsys):
    out = tmp_path / "runs.jsonl"
    common = ["--only", "dapo", "--seeds", "3", "--rollouts", "2", "--prompts", "3", "--group-size", "4"]
    assert recipe_table.main([*common, "--jobs", "1", "--out", str(out)]) in (0, 1)
    (written,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert written["status"] in ("done", "stopped"), written
    assert len(written["rewards"]) == written["done_rollouts"] <= 2
    assert "| `dapo` |" in capsys.readouterr().out
    recipe_table.main([*common, "--jobs", "0", "--out", str(out)])
    assert "| `dapo` |" in capsys.readouterr().out


def test_critics_from_end_to_end(tmp_path, capsys):
    out, picture = tmp_path / "runs.jsonl", tmp_path / "curves.png"
    common = ["--only", "ppo/shared", "--seeds", "0", "--rollouts", "2", "--out", str(out), "--picture", str(picture)]
    assert critic_curves.main([*common, "--jobs", "1"]) == 0
    (written,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert written["settings"]["model"]["critic"]["backbone"] == "shared"
    assert {len(curve) for curve in written["curves"].values()} == {2}
    before, lines = picture.read_bytes()[:4], out.read_text()
    assert before == b"\x89PNG"
    assert critic_curves.main([*common, "--jobs", "1"]) == 0, "what has ended is not run again"
    assert out.read_text() == lines
    assert capsys.readouterr().out.count("| `ppo/shared` |") >= 2
