"""What a chart draws, how good a run was, which completions are shown, and what tells runs apart."""

import json
import math
from typing import Any

import pytest

from lit_grpo.cli.main import main
from lit_grpo.report.compare import differences, make_comparison
from lit_grpo.report.completions import MOST_GROUPS, MOST_IN_GROUP, collect
from lit_grpo.report.curves import draw_curves, held_out_errors, scores
from lit_grpo.report.page import make_report, write_report
from lit_grpo.report.plot import Chart, Series, draw_histogram, draw_lines, draw_stack, thin, ticks
from lit_grpo.report.recorded import read_rows
from lit_grpo.report.run import Run, read_folder
from lit_grpo.tracking.charts import Mark
from tests.report.made_up_run import make_run
from tests.report.rich_run import ERROR, completion_rows, make_rich_run
from tests.report.test_report import HOSTILE, Page


def points(path: str) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in path[1:].rstrip("Z").split("L"))
    return [(float(x), float(y)) for x, y in pairs]


def drawn(*series: Series, **how: Any) -> Chart:
    chart = draw_lines("a", "a", series, **how)
    assert chart is not None
    return chart


# Charts.


def test_a_curve_holds_its_values():
    values = [0.0, 0.25, math.nan, 1.0]
    chart = drawn(Series("x", [1, 2, 3, 4], values))
    (low, high), (line,) = chart.y_range, chart.lines
    read = [(1 + 3 * x / 1000, low + (high - low) * (1 - y / 1000)) for x, y in points(line.path)]
    assert read == [pytest.approx(pair, abs=1e-5) for pair in ((1, 0), (2, 0.25), (4, 1))]
    assert line.title == "x 0 at step 1, 1 at step 4, lowest 0 at 1, highest 1 at 4"


def test_a_logarithmic_curve_holds_its_values():
    chart = drawn(Series("x", [1, 2, 3], [1e-3, 1e2, 0.0]), log=True)
    (low, high), (line,) = chart.y_range, chart.lines
    read = [10 ** (low + (high - low) * (1 - y / 1000)) for _, y in points(line.path)]
    assert read == pytest.approx([1e-3, 1e2], rel=1e-4), "0 has no place on this axis"
    assert chart.y_ticks[0][1] == "0.001"
    assert not drawn(Series("x", [1, 2], [1.0, 2.0]), log=True).log, "a factor of 2 needs none"


@pytest.mark.parametrize("values", [[math.nan] * 3, [], [math.inf] * 3])
def test_nothing_finite_is_no_chart(values):
    assert draw_lines("a", "a", [Series("x", range(len(values)), values)]) is None


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-9, 1e12])
def test_a_flat_curve_and_a_single_point_are_drawn(value):
    for values in ([value], [value] * 5):
        chart = drawn(Series("x", range(len(values)), values), log=True)
        assert points(chart.lines[0].path)[0][1] == pytest.approx(500)
        assert chart.y_ticks


def test_thinning_loses_no_extreme():
    values = [math.sin(i / 70) for i in range(10_000)]
    values[4321], values[8765] = 40.0, -40.0
    kept = thin(values)
    assert len(kept) <= 800
    assert {0, 9999, 4321, 8765} <= set(kept)
    assert thin([1.0] * 800) == list(range(800))


def test_errors_are_a_band_around_the_curve():
    chart = drawn(Series("x", [1, 2], [0.5, 0.5], [0.1, 0.1]))
    low, high = chart.y_range
    read = sorted(low + (high - low) * (1 - y / 1000) for _, y in points(chart.lines[0].band))
    assert read == pytest.approx([0.4, 0.4, 0.6, 0.6], abs=1e-5)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.03, 1.07), (1, 240), (2.1e-5, 6e-5), (999, 1400)])
def test_ticks_are_round_and_inside(low, high):
    found = ticks(low, high, 5)
    assert 3 <= len(found) <= 7
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in found)
    assert all(len(f"{t:.3g}") <= 7 for t in found)


def test_bars_stand_on_each_other_and_share_out_the_height():
    chart = draw_stack("p", "seconds", [1, 2], [("a", [1.0, 2.0]), ("b", [3.0, 2.0])], [Mark(2, "seen")])
    first = [bar for bar in chart.bars if bar.title.startswith("step 1:")]
    assert first[0].height * 3 == pytest.approx(first[1].height)
    assert first[1].y + first[1].height == pytest.approx(first[0].y)
    histogram = draw_histogram("h", "rewards", [("one", [0.0, 0.0, 1.0, 1.0]), ("two", [1.0])])
    assert [bar.height for bar in histogram.bars] == [500, 500, 0, 1000]
    assert len(draw_histogram("h", "rewards", [("one", [i / 50 for i in range(51)])]).bars) == 8


# How good it was.


def test_the_head_says_how_good_the_run_was(tmp_path):
    run = read_folder(make_rich_run(tmp_path / "run"))
    final, best, held, best_held = scores(run)
    assert (final.name, final.value) == ("final reward", "0.958")  # the mean of steps 55 to 60
    assert final.more == "mean of 6 rollouts, 0.0424 at the beginning"
    assert (best.value, best.more) == ("0.958", "mean of 6 rollouts up to step 60")
    assert (held.value, held.error, held.more) == ("0.5", str(ERROR), "at step 60, 0.0763 at step 10")
    assert best_held.value == "0.5"
    text = Page(make_report(run)[1]).text
    head = text.partition("Point at a curve")[0]
    assert "final reward 0.958 mean of 6 rollouts, 0.0424 at the beginning" in head
    assert "held-out reward 0.5 ± 0.03 at step 60" in head


def test_a_standard_error_of_0_is_said_in_words(tmp_path):
    run = read_folder(make_rich_run(tmp_path / "run"))
    for key in [key for key in run.metrics if key.endswith("/reward/se")]:
        run.metrics[key] = [0.0 if math.isfinite(value) else value for value in run.metrics[key]]
    held, best_held = scores(run)[2:]
    assert (held.error, held.more) == ("", "at step 60, 0.0763 at step 10, the same for every question")
    assert best_held.error == ""
    assert "± 0" not in Page(make_report(run)[1]).text


def test_the_best_is_not_the_last_of_a_run_that_fell(tmp_path):
    folder = make_rich_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(
            json.dumps({**line, "reward": 1.0 if 20 <= i < 30 else 0.0}) + "\n" for i, line in enumerate(lines)
        )
    final, best, *_ = scores(read_folder(folder))
    assert (final.value, best.value, best.more) == ("0", "1", "mean of 6 rollouts up to step 26")


def test_the_error_of_several_sets_is_that_of_their_mean():
    run = Run(name="", source="", steps=[1, 2], metrics={
        "val/a/reward/se": [0.3, 0.3], "val/b/c/reward/se": [0.4, math.nan], "val/a/reward/change/se": [9.0, 9.0],
        "val/a/reward/right/se": [9.0, 9.0],
    })  # fmt: skip
    assert held_out_errors(run) == [pytest.approx(0.25), pytest.approx(math.nan, nan_ok=True)]


def test_held_out_stands_beside_training(tmp_path):
    run = read_folder(make_rich_run(tmp_path / "run"))
    charts, left_out = draw_curves(run, [])
    reward = next(chart for chart in charts if chart.name == "reward")
    assert [line.label for line in reward.lines] == ["training", "held out"]
    assert reward.lines[1].band
    assert reward.lines[1].dots
    assert len({chart.x_range for chart in charts}) == 1
    assert "share of tokens clipped" in left_out


def test_a_reward_of_one_term_is_not_called_missing():
    run = Run(name="", source="", steps=[1], metrics={"reward": [1.0], "reward/right": [1.0],
                                                    "reward_errors/timeout_frac/right": [0.0]})  # fmt: skip
    assert not [title for title in draw_curves(run, [])[1] if title.startswith("reward")]


# Completions.


def test_completions_stand_in_groups_the_best_and_the_worst_first(tmp_path):
    page = Page(write_report(read_folder(make_rich_run(tmp_path / "run", say=HOSTILE)), tmp_path).read_text())
    assert len(page.of("div", **{"class": "group"})) == 6
    text = page.text
    best, worst = text.partition("The best ")[2].partition("The worst ")[0], text.partition("The worst ")[2]
    assert "rollout 21, reward 0.75, correct yes, right 0.75, form 1, tokens 3" in best
    assert worst.index("reward 0, correct no, right 0, form 1, tokens 3, cut at the limit") < worst.index("said 2-0-0")
    assert "right answer: 2" in text
    group = text.partition("Groups, side by side")[2]
    assert group.index("said 2-0-3") < group.index("said 2-0-0")
    assert "No completions were recorded" not in text
    assert not page.of("img")


def test_a_page_of_a_thousand_rollouts_is_small(tmp_path):
    rows = completion_rows(101, groups=2, size=8, say="word " * 150)
    folder = make_rich_run(tmp_path / "run", steps=1000, rows=rows)
    path = write_report(read_folder(folder), folder)
    assert path.stat().st_size < 3_000_000
    page = Page(path.read_text())
    shown = [int(a["data-rollout"]) for a in page.of("div", **{"class": "group"})]
    assert len(shown) <= MOST_GROUPS
    assert shown[0] == 1001
    assert shown[-1] == 1
    assert "of 1616 recorded completions" in page.text


def test_a_large_group_keeps_its_ends():
    (group,) = collect(completion_rows(1, groups=1, size=40), []).groups
    rewards = [answer.reward for answer in group.answers]
    assert len(rewards) == MOST_IN_GROUP
    assert (rewards[0], rewards[-1]) == (39 / 40, 0.0)


def test_where_all_are_alike_there_is_no_worst():
    rows = [{**row, "reward": 0.0} for row in completion_rows()]
    found = collect(rows, [])
    assert found.best
    assert not found.worst
    one_right = collect([{**row, "reward": float(i == 5)} for i, row in enumerate(rows)], [])
    assert [answer.reward for _, answer in one_right.best] == [1.0]
    assert [answer.reward for _, answer in one_right.worst] == [0.0] * 3
    unscored = collect([{**row, "reward": None} for row in rows], [])
    assert not unscored.best
    assert unscored.groups[0].answers[0].facts[0] == ("reward", "none")


def test_without_a_file_the_groups_are_those_of_the_flight_recorder(tmp_path):
    page = Page(write_report(read_folder(make_run(tmp_path / "run")), tmp_path).read_text())
    assert {a["data-rollout"] for a in page.of("div", **{"class": "group"})} == {"1", "19", "26"}
    assert "Token by token" in page.text


def test_a_table_of_a_tracker_holds_the_same(tmp_path):
    rows = completion_rows()
    columns = ["rollout", "prompt", "answer", "completion", "reward", "correct"]
    data = [[{True: "yes", False: "no"}[r[c]] if c == "correct" else r[c] for c in columns] for r in rows]
    (tmp_path / "completions.json").write_text(json.dumps({"columns": columns, "data": data}))
    assert [{c: row[c] for c in columns} for row in read_rows(tmp_path)] == [
        {c: row[c] for c in columns} for row in rows
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rollout": "1"}\n7\n{"rollout": true}', "\x00\xff"])
def test_torn_records_leave_gaps(tmp_path, text):
    for name in ("completions.jsonl", "completions.json"):
        (tmp_path / name).write_text(text)
        assert read_rows(tmp_path) == []
        (tmp_path / name).unlink()
    assert collect([{"rollout": 1}], []).groups[0].answers[0].text == ""


# Several runs.


def test_several_runs_in_one_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_rich_run(tmp_path / "runs/a")
    make_rich_run(tmp_path / "runs/b", steps=30, lr="5.0e-06")
    assert main(["report", "runs/a"]) == 0
    assert "final reward 0.958, best reward 0.958, held-out reward 0.5 ± 0.03" in capsys.readouterr().out
    assert main(["report", "runs/a", "runs/b"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "report: runs-compared/report.html"
    assert "b finished after 30 rollouts" in out
    page = Page((tmp_path / "runs-compared/report.html").read_text())
    assert "model.optimizer.lr 1e-06 5e-06" in page.text
    assert "data.rollouts 60 30" in page.text
    assert "data.group_size" not in page.text
    assert [a["href"] for a in page.of("a")] == ["./../runs/a/report.html"], "the other one has no report yet"
    names = [a["data-name"] for a in page.of("path") if "data-name" in a]
    assert names[:2] == ["a", "b"]
    assert "0.5 ± 0.03" in page.text


def test_what_is_no_run_among_several_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/artifacts").mkdir(parents=True)
    (tmp_path / "runs/mlflow.db").touch()
    for name in "ab":
        make_rich_run(tmp_path / "runs" / name)
    assert main(["report", "runs/a", "runs/artifacts", "runs/b", "runs/mlflow.db"]) == 0
    assert capsys.readouterr().out.startswith("left out, no runs: runs/artifacts, runs/mlflow.db\n")
    # A name that is not there is a mistake, and so is a list without a run.
    assert main(["report", "runs/a", "runs/c"]) == 2
    assert main(["report", "runs/artifacts", "runs/mlflow.db"]) == 2


def test_the_report_of_a_run_is_not_overwritten_by_a_comparison(tmp_path, capsys):
    folders = [str(make_rich_run(tmp_path / name)) for name in "ab"]
    assert main(["report", *folders, "--output", folders[0]]) == 2
    assert "whose own report would be lost" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "a/report.html").exists()


def test_runs_of_one_name_are_told_apart_and_hostile_names_stay_text(tmp_path):
    runs = [read_folder(make_rich_run(tmp_path / place / "<script>alert(1)<")) for place in "ab"]
    page = Page(make_comparison(runs, tmp_path))
    assert len(page.of("script")) == 1
    assert [run.name for run in runs] == ["<script>alert(1)< (1)", "<script>alert(1)< (2)"]
    assert "None: the configurations say the same." in page.text


def test_what_differs():
    one = {"a": 1, "b": {"c": [1, 2], "d": None}, "e": [{"x": 1}, {"x": 2}]}
    two = {"a": 1, "b": {"c": [1, 3]}, "e": [{"x": 1}, {"x": 3}]}
    assert differences([one, two]) == [("b.c", ["[1, 2]", "[1, 3]"]), ("e.1.x", ["2", "3"]), ("b.d", ["null", "-"])]
    assert differences([one, one]) == []
