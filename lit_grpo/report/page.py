"""The page of a report: one HTML file that needs nothing else; its charts lie beside it as PNG files too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_grpo.report.completions import collect
from lit_grpo.report.curves import draw_curves, scores, window
from lit_grpo.report.plot import draw_histogram, draw_stack
from lit_grpo.report.render import number, render
from lit_grpo.report.run import Ending, Episode, Run, diagnoses, episodes, headline, how_it_ended, main_episode
from lit_grpo.report.samples import BOUNDS, choose_steps, read_records, rollout_view, scored_rewards
from lit_grpo.run.folder import REPORT_FILE
from lit_grpo.run.phases import PHASES, learner_phases
from lit_grpo.tracking.charts import Mark, Picture, draw_histograms, draw_panels, draw_phases
from lit_grpo.utils.files import write_atomically

SIGNS = {"critical": "✖ critical", "warning": "▲ warning", "info": "● info"}
MARKS_SHOWN = 4
"""Number of steps that the charts mark at most."""


def write_report(run: Run, folder: Path, ending: Ending | None = None) -> Path:
    """Write ``report.html`` and ``report/*.png`` into ``folder`` and return the page's path.

    Args:
        run: the run to report on.
        folder: folder of the report, created if it does not exist.
        ending: how the run ended, where the caller knows better than the files.
    """
    pictures, html = make_report(run, ending)
    images = folder / "report"
    images.mkdir(parents=True, exist_ok=True)
    # An earlier report of this folder may have had charts that this one has not.
    for old in images.glob("*.png"):
        old.unlink()
    for picture in pictures:
        (images / f"{picture.name}.png").write_bytes(picture.png)
    path = folder / REPORT_FILE
    # The page comes last, so it is never there without the files beside it.
    write_atomically(path, html)
    return path


def make_report(run: Run, ending: Ending | None = None) -> tuple[list[Picture], str]:
    """Return the pictures of a report and its HTML page."""
    ending = ending or how_it_ended(run)
    story = main_episode(run)
    main = None if story is None else story.event
    marks = _marks(run, main)
    onset = int(main.get("onset") or main["step"]) if main else None
    pictures = draw_panels(run, marks)[0] if run.steps else []
    curves, left_out = draw_curves(run, marks) if run.steps else ([], [])

    chosen = choose_steps(run, onset, int(main["step"]) if main else None)
    records = read_records(run, chosen)
    rollouts = [rollout_view(title, record, run.token_texts) for title, record in records]
    histogram = None
    if rewards := [(f"{t}: step {r.step}", scored_rewards(r)) for t, r in records if scored_rewards(r)]:
        histogram = draw_histogram("reward_histogram", "rewards of the completions", rewards)
        pictures.append(draw_histograms(rewards))
    phases = learner_phases({key for key in PHASES if run.has(key)})
    phase_chart = None
    if phases and run.steps:
        parts = [(name, run.values(key)) for key, name in phases.items()]
        phase_chart = draw_stack("phases", "seconds per rollout", run.steps, parts, marks)
        pictures.append(draw_phases(run, phases, marks))
    recorded = collect(run.completions, [record for _, record in records])

    modes = [m for m in ("entropy", "surprise", "advantage") if any(m in rollout.modes for rollout in rollouts)]
    html = render(
        "page.html.jinja",
        run=run,
        ended=ending.text,
        headline=headline(run, ending, watched=_is_watched(run)),
        facts=_facts(run),
        environment=[(key, value) for key, value in sorted(run.tags.items()) if _is_of_environment(key)],
        main=_shown_diagnosis(main) if main else None,
        over=_when_over(story) if story else "",
        over_step=story.over if story else None,
        others=[_shown_episode(e) for e in episodes(run) if story is not None and e.event is not story.event],
        history=_history(run),
        quiet=_why_quiet(run),
        curves=curves,
        left_out=left_out,
        phases=_phase_table(run, phases, onset),
        onset=onset,
        phase_chart=phase_chart,
        histogram=histogram,
        rollouts=rollouts,
        recorded=recorded,
        shown_completions=sum(len(group.answers) for group in recorded.groups),
        scores=scores(run),
        modes=modes,
        bounds=BOUNDS,
        last=_last_numbers(run),
    )
    return pictures, html


def _marks(run: Run, main: dict[str, Any] | None) -> list[Mark]:
    marks = []
    if main is not None:
        onset = main.get("onset")
        if isinstance(onset, int):
            marks.append(Mark(onset, "onset"))
        marks.append(Mark(int(main["step"]), "seen", solid=True))
    rolled = [e for e in run.events if e.get("event") == "rollback" and isinstance(e.get("step"), int)]
    marks += [Mark(e["step"], "rollback", solid=True) for e in rolled]
    return marks[:MARKS_SHOWN]


def _shown_diagnosis(event: dict[str, Any]) -> dict[str, Any]:
    """Return a diagnosis event with every entry that the page asks for, whatever the file lacks."""
    findings = [f for f in event.get("findings") or [] if isinstance(f, dict)]
    return {
        "name": str(event.get("diagnosis") or "unnamed"),
        "sign": SIGNS.get(str(event.get("severity")), str(event.get("severity") or "")),
        "severity": str(event.get("severity") or ""),
        "step": event["step"],
        "onset": event.get("onset"),
        "explanation": str(event.get("explanation") or ""),
        "action": str(event.get("action") or ""),
        "instead": str(event.get("instead") or ""),
        "remedies": [str(r) for r in event.get("remedies") or []],
        "findings": [
            {
                "monitor": str(f.get("monitor") or ""),
                "step": f.get("step"),
                "explanation": str(f.get("explanation") or ""),
                "evidence": [e for e in f.get("evidence") or [] if isinstance(e, dict)],
            }
            for f in findings
        ],
    }


def _when_over(episode: Episode) -> str:
    """Say since when a diagnosis is over; "" if it held at the end."""
    if episode.over is None:
        return ""
    return (
        f"left behind by a rollback at step {episode.over}" if episode.left_behind else f"over at step {episode.over}"
    )


def _shown_episode(episode: Episode) -> dict[str, Any]:
    shown = _shown_diagnosis(episode.event)
    return {**shown, "over": _when_over(episode) or "held at the end"}


def _history(run: Run) -> list[dict[str, str]]:
    """List diagnoses and what was done about them, in the order in which they were written."""
    rows = []
    # By identity, since events are dictionaries, which no set can hold.
    usable = {id(e) for e in diagnoses(run)}
    for event in run.events:
        kind = event.get("event")
        if id(event) in usable:
            shown = _shown_diagnosis(event)
            done = f"{shown['action']}: {shown['instead']}" if shown["instead"] else shown["action"]
            row = {"what": f"{shown['sign']}: {shown['name']}", "more": shown["explanation"], "done": done}
        elif kind in ("over", "rollback", "adjust", "skip_step", "clipped_step", "exception"):
            others = {
                key: value for key, value in event.items() if key not in ("event", "step") and value not in (None, {})
            }
            row = {"what": f"→ {kind}", "more": "; ".join(f"{k}: {v}" for k, v in others.items()), "done": ""}
        else:
            continue
        rows.append({"step": str(event.get("step", "-")), **row})
    return rows


def _watching(run: Run) -> list[str]:
    """Return the names of the callbacks of the configuration that watch a run."""
    callbacks = (run.settings().get("trainer") or {}).get("callbacks") or []
    names = [str(c.get("class_path", "")).rpartition(".")[2] for c in callbacks if isinstance(c, dict)]
    return [n for n in names if n.endswith(("Monitor", "Detector"))]


def _is_watched(run: Run) -> bool:
    return bool(run.events or _watching(run))


def _why_quiet(run: Run) -> str:
    """Say why there is no diagnosis: nothing was wrong, or nothing was watching."""
    if run.events:
        return "The monitors raised no diagnosis."
    if watching := _watching(run):
        return f"No alarm was raised. Watching: {', '.join(watching)}."
    if run.config:
        remedy = "Add lit_grpo.callbacks.HealthMonitor to trainer.callbacks."
        return f"No monitor was on in this run, so nothing watched it. {remedy}"
    return "No alarm is recorded; whether a monitor was on is not known."


def _facts(run: Run) -> list[tuple[str, str]]:
    settings = run.settings()
    model, data = settings.get("model") or {}, settings.get("data") or {}
    policy = model.get("policy") or {} if isinstance(model, dict) else {}
    facts = [("read from", run.source)]
    if run.started:
        facts.append(("started", run.started))
    if policy:
        facts.append(("policy", str(policy.get("path") or _tiny(policy.get("tiny")))))
    if name := run.objective.get("name"):
        facts.append(("objective", str(name)))
    if isinstance(model, dict) and isinstance(model.get("optimizer"), dict):
        facts.append(("learning rate", f"{model['optimizer'].get('lr'):g}"))
    if isinstance(data, dict) and data.get("group_size"):
        facts.append(("rollout", f"{data.get('prompts_per_rollout')} prompts x {data['group_size']} completions"))
    if run.run_id:
        facts.append(("MLflow run", run.run_id))
    # The diagnosis has a place of its own, the environment stands with the configuration.
    elsewhere = ("diagnosis", "diagnosis_step")
    tags = sorted(run.tags.items())
    return facts + [(f"tag {k}", v) for k, v in tags if k not in elsewhere and not _is_of_environment(k)]


def _is_of_environment(tag: str) -> bool:
    return tag.startswith(("env.", "git.", "lit_grpo."))


def _tiny(settings: Any) -> str:
    """Write the main settings of a model that was made on the spot, as ``tiny: layers 2, width 128``."""
    if not isinstance(settings, dict):
        return "tiny"
    shown = [f"{key} {settings[key]}" for key in ("layers", "width", "heads", "alphabet") if key in settings]
    return f"tiny: {', '.join(shown)}" if shown else "tiny"


def _last_numbers(run: Run) -> list[tuple[str, str, str, str]]:
    """List (metric, first, lowest to highest, last).

    Each is a mean of a tenth of the run or at most 10 rollouts, but for evaluations.
    """
    rows = []
    for key in (
        "reward",
        "val/reward",
        "policy/entropy",
        "completions/length",
        "completions/truncated_frac",
        "optim/grad_norm",
        "time/tokens_per_second",
    ):
        values = [v for v in run.values(key) if math.isfinite(v)]
        if values:
            # Evaluations are few, and their mean over a tenth of the run would hide how they ended.
            size = 1 if key.startswith("val/") else window(len(run.steps))
            windows = [_mean(values[max(0, i - size + 1) : i + 1]) for i in range(size - 1, len(values))] or values
            extent = f"{number(min(windows))} to {number(max(windows))}"
            rows.append((key, number(windows[0]), extent, number(windows[-1])))
    return rows


def _phase_table(run: Run, phases: Mapping[str, str], onset: int | None) -> list[dict[str, Any]]:
    """Tabulate mean seconds and share of each phase; before and since the onset if there is one."""
    spans = [("whole run", list(range(len(run.steps))))]
    if onset is not None:
        before = [i for i, s in enumerate(run.steps) if s < onset]
        since = [i for i, s in enumerate(run.steps) if s >= onset]
        if before and since:
            spans = [("before onset", before), ("since onset", since)]
    columns = []
    for title, rows in spans:
        seconds = {name: _mean([run.values(key)[i] for i in rows]) for key, name in phases.items()}
        total = sum(seconds.values())
        cells = [(name, _seconds(s), f"{s / total:.0%}" if total else "-") for name, s in seconds.items()]
        columns.append({"title": title, "cells": cells, "total": _seconds(total)})
    return columns


def _seconds(value: float) -> str:
    if value < 0.0005:
        return "under 1 ms" if value else "0 s"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{number(value)} s"


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else 0.0
