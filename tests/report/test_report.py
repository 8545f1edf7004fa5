"""The report of a run: what is on the page, whatever the run left behind, and whatever its model wrote."""

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lit_grpo.cli.main import main
from lit_grpo.report.mlflow_run import open_run
from lit_grpo.report.page import make_report, write_report
from lit_grpo.report.run import Ending, Headline, Run, headline, how_it_ended, main_episode, read_folder
from lit_grpo.report.samples import choose_steps, level, visible
from lit_grpo.run import flight
from lit_grpo.tracking import charts
from lit_grpo.tracking.mlflow_target import MAIN_CURVES
from tests.report.made_up_run import END, ONSET, SEEN, make_run, write_record

HOSTILE = (
    '</div></section><script>document.title="owned"</script><img src=x onerror=alert(1)>"\'&lt;{{ 7*7 }}\u202e\x00'
)


class Page(HTMLParser):
    """Elements and visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._hidden = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag in ("style", "script")
        if tag not in ("span", "b"):
            self.texts.append(" ")

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        if not self._hidden:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))

    def of(self, tag, **wanted):
        return [a for t, a in self.tags if t == tag and all(a.get(k) == v for k, v in wanted.items())]


@pytest.fixture(autouse=True)
def few_pictures(request, monkeypatch):
    """Drawing takes most of the time, so only tests of pictures draw all of them."""
    if "pictures" not in request.node.name:
        monkeypatch.setattr(charts, "PANELS", charts.PANELS[:1])


def page_of(folder):
    return Page(write_report(read_folder(folder), folder).read_text(encoding="utf-8"))


def test_the_page_tells_the_story_of_a_collapse(tmp_path):
    page = page_of(make_run(tmp_path / "run"))
    text = page.text
    assert "✖ critical: C_NL" in text
    assert "C_NL collapse, began at step 20; entropy 0.4 → 1.6" in text
    assert "began step 20" in text
    assert "done rollback" in text
    assert text.index("halve the learning rate") < text.index("clip the ratio")
    assert "entropy 20 0.4 1.6 0.8" in text  # the evidence: window, before, value, bound
    assert "grad_norm 1 - inf 5" in text
    assert "▲ warning: conflict" in text, "the earlier, milder diagnosis is in the order of time"
    assert "target: 18" in text, "so is what was done"
    order = text.partition("In order of time")[2]
    assert order.index("warning: conflict") < order.index("critical: C_NL") < order.index("→ rollback")
    assert "nl" in text
    assert "1e-06" in text
    for title in ("First recorded: step 1", "Before onset: step 19", f"After onset: step {SEEN}"):
        assert title in text
    assert "before onset" in text
    assert "since onset" in text  # the phase split
    assert "sampling 2 s 63%" in text
    assert "Finished after 30 rollouts." in text


@pytest.mark.slow
def test_pictures_are_in_the_page_and_beside_it(tmp_path):
    folder = make_run(tmp_path / "run")
    page = page_of(folder)
    files = {path.stem: path.read_bytes() for path in (folder / "report").glob("*.png")}
    inside = {a["id"].removeprefix("chart-") for a in page.of("figure")}
    assert inside == set(files)
    assert {"reward", "reward_terms", "entropy", "length", "grad_norm", "phases", "reward_histogram"} <= set(files)
    assert "clip" not in files
    assert "share of tokens clipped" in page.text.partition("Not logged, or 0 throughout:")[2]
    for data in files.values():
        Image.open(io.BytesIO(data)).verify()
    alts = [a["aria-label"] for a in page.of("svg", role="img")]
    entropy = next(alt for alt in alts if alt.startswith("entropy"))
    assert f"entropy 0.4 at step 1, 2.4 at step {END}, lowest 0.4 at 1, highest 2.4 at {END}" in entropy
    assert f"onset at step {ONSET}; seen at step {SEEN}; rollback at step {SEEN}" in entropy
    assert any("first recorded: step 1: 2 at 0, 1 at 0.5, 1 at 1" in alt for alt in alts)


def test_a_new_report_leaves_nothing_of_the_old_one(tmp_path):
    folder = make_run(tmp_path / "run")
    page_of(folder)
    assert (folder / "report/reward_histogram.png").exists()
    bare = make_run(tmp_path / "bare", records=False)
    write_report(read_folder(bare), folder)
    assert not (folder / "report/reward_histogram.png").exists()


def test_the_page_needs_nothing_else(tmp_path):
    html = write_report(read_folder(make_run(tmp_path / "run")), tmp_path).read_text()
    page = Page(html)
    assert not [t for t, _ in page.tags if t in ("img", "link", "iframe", "object")]
    assert page.of("script") == [{}]
    # The name of SVG, which the script needs to make elements, is no address that is asked for.
    assert not re.search(r"https?:|url\(|@import|fetch\(", html.replace("http://www.w3.org/2000/svg", ""))
    (policy,) = page.of("meta", **{"http-equiv": "Content-Security-Policy"})
    script = html.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy["content"] == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert page.of("meta", name="viewport")


def test_what_a_model_wrote_stays_text(tmp_path):
    folder = make_run(tmp_path / "run", say=HOSTILE)
    (folder / "config.yaml").write_text(f"data: {{rollouts: 30}}\n# {HOSTILE[:-1]}")
    with (folder / "findings.jsonl").open("a") as file:
        file.write(json.dumps({"event": "diagnosis", "diagnosis": HOSTILE, "severity": HOSTILE, "step": 28,
                               "explanation": HOSTILE, "findings": [{"monitor": HOSTILE, "evidence": [
                                   {"metric": HOSTILE, "value": HOSTILE, "threshold": 1}]}]}) + "\n")  # fmt: skip
    page = page_of(folder)
    clean = page_of(make_run(tmp_path / "clean"))
    assert len(page.of("script")) == 1
    assert not page.of("img")
    assert not [a for _, a in page.tags if any(key.startswith("on") for key in a)]
    # The same elements as for harmless words, but for the rows that the third diagnosis and the config bring.
    assert len(page.of("section")) == len(clean.of("section"))
    assert len(page.of("span", **{"class": "t e3"})) == len(clean.of("span", **{"class": "t e3"}))
    assert '<script>document.title="owned"</script>' in page.text
    assert "{{ 7*7 }}" in page.text
    assert "\u202e" not in "".join(page.texts).partition("Configuration")[0].partition("Completions")[2]
    assert "\\u202e" in page.text
    assert "\\x00" in page.text


def test_tokens_are_marked_in_three_ways(tmp_path):
    page = page_of(make_run(tmp_path / "run"))
    classes = [a.get("class", "").split() for a in page.of("span") if "title" in a]
    seen = {c for some in classes for c in some}
    assert {"e0", "e1", "e2", "e3", "e4", "a2", "a1", "b2", "x"} <= seen
    titles = [a["title"] for a in page.of("span") if "title" in a]
    assert "entropy 2.00, surprise 1.10, advantage 1.00" in titles
    assert "entropy 0.00, surprise 1.37, advantage 1.00, not in the loss" in titles
    modes = page.of("input", type="radio")
    assert [a["id"] for a in modes] == ["show-entropy", "show-surprise", "show-advantage"]
    assert "checked" in modes[0]
    assert "tokens 3, cut at the limit" in page.text


def test_marks_can_be_told_apart_without_colour(tmp_path):
    html = write_report(read_folder(make_run(tmp_path / "run")), tmp_path).read_text()
    looks = re.findall(r"\.by-entropy \.e\d { background: #(\w+); border-bottom: (.*?); }", html)
    assert len(looks) == 5
    shades = [sum(int(colour[i : i + 2], 16) * w for i, w in ((0, 0.3), (2, 0.59), (4, 0.11))) for colour, _ in looks]
    assert shades == sorted(shades, reverse=True)
    assert all(a - b > 8 for a, b in pairwise(shades)), "each level is darker in grey"
    assert len({line for _, line in looks}) == 5, "each level has a line of its own"


def test_levels():
    assert [level(v) for v in (0.0, 0.1, 0.5, 1.0, 5.0)] == [0, 1, 2, 3, 4]
    assert level(None) is level(float("nan")) is None
    assert visible("a\u200bb\x1b[0m\n") == "a\\u200bb\\x1b[0m\n"


# What a run leaves when something is missing.


def test_without_findings(tmp_path):
    page = page_of(make_run(tmp_path / "run", findings=False))
    assert "No diagnosis. No alarm was raised. Watching: EntropyMonitor." in page.text
    assert "Last recorded: step 30" in page.text
    assert "whole run" in page.text
    assert "Evidence" not in page.text


def test_without_monitors(tmp_path):
    folder = make_run(tmp_path / "run", findings=False)
    (folder / "config.yaml").write_text("trainer: {callbacks: null}\ndata: {rollouts: 30}")
    assert "No monitor was on in this run" in page_of(folder).text


def test_without_a_flight_recorder(tmp_path):
    page = page_of(make_run(tmp_path / "run", records=False))
    assert "No completions were recorded. Add lit_grpo.callbacks.FlightRecorder" in page.text


def test_cut_half_way(tmp_path):
    """A machine that died: half a line in the metrics and in the findings, half a record, no end."""
    folder = make_run(tmp_path / "run", steps=24, planned=100, findings=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 25, "rewa')
    (folder / "findings.jsonl").write_text('{"event": "finding", "monit')
    torn = flight.step_file(folder / flight.FOLDER, 24)
    torn.write_bytes(torn.read_bytes()[:50])
    page = page_of(folder)
    assert "after 24 of 100 rollouts; nothing says why" in page.text
    assert "1 lines of findings.jsonl could not be read." in page.text
    assert "The flight record of step 24 cannot be read" in page.text
    assert "First recorded: step 1" in page.text
    assert "No diagnosis. No alarm was raised." in page.text


def test_broke_off_in_its_first_step(tmp_path):
    folder = make_run(tmp_path / "run", steps=0, findings=False)
    kept = folder / flight.FOLDER / "exception-000001"
    kept.mkdir()
    write_record(kept, 1, "hm", unfinished=True)
    (kept / flight.REASON_FILE).write_text('{"reason": "exception", "step": 1, "explanation": "ValueError: boom"}')
    page = page_of(folder)
    assert "Broke off after 0 of 30 rollouts: ValueError: boom." in page.text
    assert "First recorded: step 1 (broke off in this step)" in page.text
    assert "No metrics were recorded" in page.text


def test_what_an_alarm_kept_is_found_when_the_ring_has_lost_it(tmp_path):
    folder = make_run(tmp_path / "run")
    ring = folder / flight.FOLDER
    flight.link_folder(ring, ring / "C_NL-000026")
    for path in flight.recorded_steps(ring).values():
        path.unlink()
    assert "Before onset: step 19" in page_of(folder).text


def test_after_a_rollback_both_lives_are_there(tmp_path):
    """Steps 19 to 30 went wrong and were left behind; the second life went from 19 to 24 until now."""
    folder = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({**line, "policy/entropy": 0.125}) + "\n" for line in lines[18:24])
        file.write(json.dumps({"step": 24, "val/reward": 0.5}) + "\n")  # a key that the step did not have
    ring = folder / flight.FOLDER
    flight.link_folder(ring, ring / f"C_NL-{SEEN:06d}")
    write_record(ring, 19, "anew")
    run = read_folder(folder)
    assert run.steps == list(range(1, 25))
    assert run.values("policy/entropy")[17:] == [0.4] + [0.125] * 6
    ((steps, old),) = run.abandoned
    assert steps == list(range(18, 31))
    assert old["policy/entropy"][-1] == pytest.approx(2.4)
    pictures, html = make_report(run)
    reward = next(p for p in pictures if p.name == "reward")
    assert "left behind: training 0 at step 30" in reward.alt
    assert "left behind by a rollback" in html
    assert "anew" not in html, "the collapse is shown, not what came after it"


def test_stopped_by_a_guard(tmp_path):
    folder = make_run(tmp_path / "run", steps=5)
    with (folder / "findings.jsonl").open("a") as file:
        file.write('{"event": "exception", "step": 6, "reason": "engine and learner disagree"}\n')
    assert how_it_ended(read_folder(folder)).text == "stopped after 5 of 30 rollouts: engine and learner disagree"


def test_stopped_by_a_monitor(tmp_path):
    folder = make_run(tmp_path / "run", steps=12)
    (folder / "run.json").write_text('{"tags": {"stop.reason": "C_NL: all is lost", "stop.callback": "HealthMonitor"}}')
    ending = how_it_ended(read_folder(folder))
    assert (ending.state, ending.text) == (
        "stopped",
        "stopped after 12 of 30 rollouts by HealthMonitor: C_NL: all is lost",
    )


def said(name: str, step: int, severity: str, **more: Any) -> list[dict[str, Any]]:
    """A finding and its diagnosis, as the journal holds them."""
    found = {"monitor": "M", "kind": name.lower(), "step": step, "onset": step, "severity": severity}
    diagnosis = {"diagnosis": name, "step": step, "onset": step, "severity": severity, "findings": [found],
                 "explanation": f"{name} was seen", "action": "log"}  # fmt: skip
    return [{"event": "finding", "diagnosis": name, **found}, {"event": "diagnosis", **diagnosis, **more}]


def over(name: str, step: int) -> dict[str, Any]:
    return {"event": "over", "monitor": "M", "kind": name.lower(), "diagnosis": name, "step": step}


def run_of(tmp_path: Path, *events: dict[str, Any], planned: int = END, **tags: str) -> Path:
    folder = make_run(tmp_path / "run", findings=False, records=False, planned=planned)
    (folder / "findings.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "run.json").write_text(json.dumps({"tags": tags}))
    return folder


FINISHED, HEALTHY = "finished", "✔ finished, healthy"
STOPPED = {"stop.reason": "it is lost", "stop.callback": "HealthMonitor"}
BY_HAND = {"stop.reason": "Ctrl-C", "stop.callback": "keyboard"}
BACK = {"event": "rollback", "step": 20, "target": 10}
EXCEPTION = {"event": "exception", "step": 31, "reason": "they disagree", "diagnosis": "plumbing_ratio"}


@pytest.mark.parametrize(
    ("events", "planned", "tags", "gravity", "text"),
    [
        ([*said("truncation", 1, "warning"), over("truncation", 20)], 30, {}, "good", HEALTHY),
        ([*said("c", 1, "critical"), over("c", 20)], 30, {}, "good", HEALTHY),
        (said("slow", 1, "info"), 30, {}, "good", HEALTHY),
        ([], 30, {}, "good", HEALTHY),
        (said("truncation", 1, "warning"), 30, {}, "warning", "▲ finished; held at the end: truncation"),
        ([*said("a", 1, "warning"), over("a", 9), *said("a", 12, "warning")], 30, {}, "warning",
         "▲ finished; held at the end: a"),
        (said("a", 1, "warning") + said("b", 2, "critical"), 30, {}, "critical", "✖ finished; held at the end: b, a"),
        ([*said("a", 1, "warning"), over("a", 9), *said("b", 20, "critical", action="stop")], 60, STOPPED, "critical",
         "✖ stopped: b"),
        # The second warning never named a diagnosis while the first one held.
        ([*said("a", 1, "warning"), said("b", 4, "warning")[0], over("a", 20)], 30, {}, "warning",
         "▲ finished; held at the end: b"),
        ([*said("a", 1, "warning"), over("a", 20), *said("b", 22, "info")], 30, {}, "good", HEALTHY),
        ([EXCEPTION], 60, {}, "critical", "✖ stopped: plumbing_ratio"),
        (said("a", 1, "warning"), 60, BY_HAND, "warning", "▲ interrupted; held at the end: a"),
        ([], 60, BY_HAND, "calm", "● interrupted; nothing wrong at the last step"),
        ([], 60, {}, "calm", "● not finished, or still running; nothing wrong at the last step"),
        (said("b", 20, "critical"), 60, {}, "critical", "✖ not finished, or still running; held at the end: b"),
        ([*said("b", 20, "critical", action="rollback"), BACK], 30, {}, "good", HEALTHY),
        ([*said("a", 5, "warning"), *said("b", 20, "critical"), BACK], 30, {}, "warning",
         "▲ finished; held at the end: a"),
    ],
)  # fmt: skip
def test_the_headline_is_the_state_in_which_the_run_ended(tmp_path, events, planned, tags, gravity, text):
    run = read_folder(run_of(tmp_path, *events, planned=planned, **tags))
    assert headline(run, how_it_ended(run), watched=True) == Headline(gravity, text)


def test_an_error_is_the_headline_whatever_was_seen_before(tmp_path):
    run = read_folder(run_of(tmp_path, *said("a", 3, "warning")))
    assert headline(run, Ending("broken", "boom"), watched=True).text == "✖ ended by an error, while this held: a"


def test_a_run_that_nothing_watched_is_not_called_healthy(tmp_path):
    folder = run_of(tmp_path)
    (folder / "findings.jsonl").unlink()
    (folder / "config.yaml").write_text("trainer: {callbacks: null}\ndata: {rollouts: 30}")
    text = page_of(folder).text
    assert "● finished Finished after 30 rollouts." in text
    assert "healthy" not in text


def test_a_warning_of_the_first_step_does_not_head_a_perfect_run(tmp_path):
    """The report of a quickstart that ended at 0.98 was headed "warning: truncation"."""
    events = [*said("truncation", 1, "warning"), over("truncation", 25), *said("conflict", 8, "warning"),
              over("conflict", 21)]  # fmt: skip
    page = page_of(run_of(tmp_path, *events))
    assert page.of("div", **{"class": "box good"})
    assert not page.of("div", **{"class": "box warning"})
    text = page.text
    assert text.index(HEALTHY) < text.index("Earlier, over at step 25 - ▲ warning: truncation")
    # What a person came for stands before what is long over.
    assert text.index("Point at a curve") < text.index("Earlier, over at step 25")
    assert "truncation was seen" in text
    others = text.partition("Other diagnoses")[2].partition("Evidence")[0]
    assert "▲ warning: conflict 8 8 over at step 21 conflict was seen" in others
    assert "→ over" in text.partition("In order of time")[2]


def test_what_a_run_ran_on_stands_with_its_configuration(tmp_path):
    folder = run_of(tmp_path)
    tags = {"env.torch": "2.13.0", "diagnosis": "truncation", "team": "maths"}
    (folder / "run.json").write_text(json.dumps({"tags": tags}))
    (folder / "config.yaml").write_text("model: {policy: {tiny: {layers: 2, width: 128, seed: 0}}}")
    text = page_of(folder).text
    before, _, after = text.partition("config.yaml")
    assert "env.torch" in after
    assert "env.torch" not in before
    assert "tag team maths" in before
    assert "tag diagnosis" not in before
    assert "policy tiny: layers 2, width 128 " in before


@pytest.mark.parametrize(
    ("given", "name"),
    [([("warning", "log"), ("critical", "log")], 2), ([("critical", "log"), ("warning", "stop")], 2),
     ([("warning", "log"), ("warning", "log")], 1), ([], None)],
)  # fmt: skip
def test_the_diagnosis_that_tells_the_story(given, name):
    events = [{"event": "diagnosis", "step": i, "severity": s, "action": a} for i, (s, a) in enumerate(given, 1)]
    found = main_episode(Run(name="", source="", steps=[], metrics={}, events=events))
    assert (found and found.event["step"]) == name


@pytest.mark.parametrize(
    ("steps", "onset", "seen", "chosen"),
    [([1, 5, 9, 10], 7, 9, [1, 5, 9]), ([8, 9, 10], 7, 9, [8, 9, 10]), ([1, 2, 3], 9, 9, [1, 3]),
     ([4], None, None, [4]),
     ([1, 2, 3], None, None, [1, 3]), ([], 5, 6, []), ([1, 8], 7, 9, [1, 8])],
)  # fmt: skip
def test_which_steps_are_shown(tmp_path, steps, onset, seen, chosen):
    run = Run(name="", source="", steps=[], metrics={}, records=dict.fromkeys(steps, tmp_path))
    assert [step for _, step in choose_steps(run, onset, seen)] == chosen


# Where it is read from.


def test_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs/first")
    assert main(["report", "runs/first"]) == 0
    out = capsys.readouterr().out
    assert "critical at step 26, over at step 26: C_NL collapse" in out
    assert out.splitlines()[-1] == "report: runs/first/report.html"
    assert main(["report", "runs/first", "--output", "elsewhere"]) == 0
    assert (tmp_path / "elsewhere/report/reward.png").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [("runs/frist", "did you mean runs/first?"), ("runs", "it holds runs: first"),
     ("0" * 32, "not the store that holds it"), ("elsewhere/deep", "give a folder of runs/")],
)  # fmt: skip
def test_a_run_that_is_not_there(tmp_path, capsys, monkeypatch, given, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    make_run(tmp_path / "runs/first")
    assert main(["report", given]) == 2
    assert said in re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.mark.slow
def test_from_mlflow(tmp_path, monkeypatch, mlflow_runs):
    import mlflow

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{mlflow_runs}/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("e", artifact_location=(tmp_path / "runs/artifacts").as_uri())
    run_id = client.create_run(experiment, run_name="sent", tags={"stop.reason": "enough"}).info.run_id
    folder = make_run(tmp_path / "local", findings=True)
    for step, value in enumerate([0.1, 0.2, 0.3], 1):
        client.log_metric(run_id, "reward", value, step=step, timestamp=step + 1)
    client.log_metric(run_id, MAIN_CURVES["reward"], 0.3, step=3, timestamp=4)  # the second name of a main curve
    client.log_metric(run_id, "reward", 0.25, step=2, timestamp=9)  # trained again after a resume
    for name in ("findings.jsonl", "config.yaml", "objective.json"):
        client.log_artifact(run_id, str(folder / name))
    client.set_terminated(run_id, "KILLED")
    for where in (run_id, f"runs:/{run_id}", f"runs/artifacts/{run_id}/artifacts"):
        with open_run(where) as run:
            assert (run.name, run.steps, run.values("reward")) == ("sent", [1, 2], [0.1, 0.25])
            assert [steps for steps, _ in run.abandoned] == [[1, 2, 3]]
            assert list(run.metrics) == ["reward"]
            assert len(run.events) == 4
            assert how_it_ended(run).text == "stopped after 2 of 30 rollouts by a monitor: enough"
            _, html = make_report(run)
            assert "✖ critical: C_NL" in html
    assert main(["report", "f" * 32, "--tracking-uri", uri]) == 2
    assert main(["report", run_id, "--tracking-uri", "sqlite:///nowhere/mlflow.db"]) == 2
    assert not (tmp_path / "nowhere").exists()


def test_from_a_file_store(tmp_path):
    folder = tmp_path / "mlruns/1" / ("a1" * 16)
    (folder / "metrics/reward").mkdir(parents=True)
    (folder / "metrics/policy").mkdir()
    (folder / "metrics/policy/entropy").write_text("100 0.5 1\n101 0.6 2\n")
    (folder / "metrics/reward/right").write_text("100 1.0 2\n")
    (folder / "meta.yaml").write_text("run_name: old\nstatus: 3\n")
    make_run(folder / "artifacts", records=False)
    with open_run(str(folder)) as run:
        assert (run.name, run.steps, run.values("policy/entropy")) == ("old", [1, 2], [0.5, 0.6])
        assert run.values("reward/right")[1] == 1.0
        assert main_episode(run)
