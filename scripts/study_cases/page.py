"""The page docs/study.md and its figures, made from recorded runs alone."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts import side_by_side
from scripts.diagnosis.scoring import smoothed
from scripts.study_cases import measures as m
from scripts.study_cases.claims import CLAIMS, TWINS, Claim
from scripts.study_cases.results import NOT_RUN, NOT_SUPPORTED, SUPPORTED, UNTESTED, PartResult, seeds_for, verdict_of
from scripts.study_cases.runs import command_of, files_of

RECORDED = "study_runs.json.gz"
"""File beside the page that holds the recorded runs and calculations."""
MOST_BYTES = 60_000
"""Size of a figure at most."""
COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#a463f2", "#97805d", "#111111")

HEAD = """\
# The sources' claims, tried

What the papers behind the methods say, claim by claim, tried on models that train in seconds, with one verdict each.
The landscape study is "Towards Understanding the Optimization Landscape of GRPO and its Variants".
This page is written by `python scripts/study.py --plot` from recorded runs ({recorded}), and a test
holds it to them.

    python scripts/study.py --list                     # the claims, and how long each takes
    python scripts/study.py --claim cl_delays --jobs 2 # one: its runs, where they are not there yet, and its verdict
    python scripts/study.py --jobs 2                   # all; can be cut and repeated

- **{supported}**: every inequality of the claim holds for every seed, and the mean over seeds is beyond its bound by
  two standard errors. Calculations have no seeds but policies drawn at random, and hold for each.
- **{not_supported}**: one does not. With three seeds that is no proof of the contrary, and these models are small: two
  layers of width 96 that read single characters, warm-started to about half of the answers (countdown: a fifth),
  16 prompts x 8 completions a rollout. What is said here is said of them.
- **{untested}**, with the reason; **{not_run}**: there are configurations and a test, but no
  recorded runs.
- *Seeds for*: for how many seeds every inequality is so, whatever the spread; 3/3 without support is an effect within
  two standard errors. Where a setting leaves no room for a claim, the claim's section says so after the verdict.
- *Minutes*: on one core, of all runs of the claim, as recorded; claims share runs, and none is made twice.

Claims on stability are tried at twice the rate at which GRPO learns, since nothing collapses at that one in time. At
that rate four updates a rollout undo every form at once, so those on clipping are tried at a lower one as well, and
those on methods for many updates at a quarter of it.

| task | rollouts | rate | updates a rollout |
|---|---|---|---|
{tasks}

A value is mean ± standard error over seeds (each seed); one that every seed has stands alone. A collapse is the loss
of a fifth of the best reward, means of ten rollouts; where a run has none, it counts as one rollout after its end. On
countdown, whose 16 questions a rollout move the reward more than that, the run has to be below four fifths of GRPO's
at the lower rate as well, on the same questions, by two standard errors. No monitor takes part in the runs, which
would
change the collapse; what they say is read from the recorded metrics afterwards.

Not here: Qwen 0.5B on GSM8K, which is in [results.md](results.md).
"""


# ------------------------------------------------------------------------------------------------ what is recorded


def read(path: Path) -> dict[str, Any]:
    """Read recorded runs (``runs``) and calculations (``exact``)."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def write(path: Path, recorded: dict[str, Any]) -> None:
    """Write recorded runs and calculations; equal ones give equal files."""
    path.write_bytes(gzip.compress(json.dumps(recorded, separators=(",", ":")).encode(), mtime=0))


def collect(runs: Sequence[m.Run], exact: dict[str, Sequence[PartResult]]) -> dict[str, Any]:
    """Put together what is recorded, in the order of arms and seeds."""
    kept = [run for run in runs if run["status"] != "error"]
    kept.sort(key=lambda run: (run["arm"], run["seed"]))
    return {"exact": {name: [asdict(part) for part in parts] for name, parts in exact.items()}, "runs": kept}


def runs_with_twins(recorded: dict[str, Any]) -> dict[tuple[str, int], m.Run]:
    """Return the recorded runs by arm and seed, each with the rewards of its twin where its task has one.

    A run whose twin is not recorded is left out: its collapse could not be told.
    """
    found = {(run["arm"], run["seed"]): run for run in recorded["runs"]}
    for (arm, seed), run in list(found.items()):
        twin = TWINS.get(arm.partition("/")[0])
        if twin is not None and (twin, seed) in found:
            found[arm, seed] = run | {"twin": m.rewards(found[twin, seed])}
        elif twin is not None:
            del found[arm, seed]
    return found


def runs_of(claim: Claim, recorded: dict[str, Any]) -> dict[str, list[m.Run]] | None:
    """Return the runs of a claim by arm, in the order of its seeds; None if one is missing."""
    found = runs_with_twins(recorded)
    if any((arm, seed) not in found for arm in claim.arms for seed in claim.seeds):
        return None
    return {arm: [found[arm, seed] for seed in claim.seeds] for arm in claim.arms}


def judge(claim: Claim, recorded: dict[str, Any]) -> tuple[str, list[PartResult]]:
    """Return the verdict on a claim, and its parts."""
    if claim.untestable:
        return UNTESTED, []
    if claim.exact:
        parts = [
            PartResult(**part | {"values": tuple(part["values"])}) for part in recorded["exact"].get(claim.name, ())
        ]
        return (verdict_of(parts), parts) if parts else (NOT_RUN, [])
    runs = runs_of(claim, recorded)
    if runs is None or claim.test is None:
        return NOT_RUN, []
    parts = claim.test(runs)
    # A measure of a collapse says nothing of runs that have none.
    lacking = any(math.isnan(value) for part in parts for value in part.values)
    return UNTESTED if lacking else verdict_of(parts), parts


# ------------------------------------------------------------------------------------------------ the page


def page(recorded: dict[str, Any]) -> str:
    """Write the page in Markdown."""
    judged = {claim.name: judge(claim, recorded) for claim in CLAIMS}
    counts = {word: sum(verdict == word for verdict, _ in judged.values())
              for word in (SUPPORTED, NOT_SUPPORTED, UNTESTED, NOT_RUN)}  # fmt: skip
    words = {"supported": SUPPORTED, "not_supported": NOT_SUPPORTED, "untested": UNTESTED, "not_run": NOT_RUN}
    lines = [HEAD.format(recorded=f"[{RECORDED}]({RECORDED})", tasks="\n".join(_tasks()), **words)]
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    agreement = [seeds_for(parts) for verdict, parts in judged.values() if verdict == NOT_SUPPORTED]
    whole = sum(agreeing == seeds for agreeing, seeds in agreement)
    none = sum(agreeing == 0 for agreeing, _ in agreement)
    lines.append(
        f"{len(CLAIMS)} claims: {said}. Of those not supported, every seed is for {whole}, with a spread too wide for "
        f"three; some seeds are for {len(agreement) - whole - none}, none for {none}.\n"
    )
    lines += [_time(recorded), ""]
    lines += ["| claim | source | verdict | seeds for | minutes |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        verdict, parts = judged[claim.name]
        agreeing = "{}/{}".format(*seeds_for(parts)) if parts else "-"
        minutes = minutes_of(claim, recorded)
        took = "-" if minutes is None else f"{minutes:.1f}"
        lines.append(f"| [{claim.name}](#{claim.name}) | {claim.source} | {verdict} | {agreeing} | {took} |")
    lines += ["", "## Which monitor saw a collapse, and when", "", *_collapses(recorded)]
    for title, chosen in (
        ("Calculated", [claim for claim in CLAIMS if claim.exact]),
        ("Trained", [claim for claim in CLAIMS if claim.arms]),
        ("Not to be tested here", [claim for claim in CLAIMS if claim.untestable]),
    ):
        lines += ["", f"## {title}"] if chosen else []
        for claim in chosen:
            lines += ["", *_section(claim, *judged[claim.name], runs_of(claim, recorded))]
    return "\n".join(lines) + "\n"


def _tasks() -> list[str]:
    """Write one row a task: how long its runs are, and at which rate."""
    rows = []
    for task in dict.fromkeys(files_of(arm)[0] for claim in CLAIMS for arm in claim.arms):
        config = side_by_side.load(task)
        model = config["model"]
        cells = (
            task.stem,
            config["data"]["rollouts"],
            f"{model['optimizer']['lr']:g}",
            model.get("updates_per_rollout", 1),
        )
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return rows


def minutes_of(claim: Claim, recorded: dict[str, Any]) -> float | None:
    """Return how long all runs of a claim take one after the other, on one core; None if one is not recorded."""
    seconds = {(run["arm"], run["seed"]): run["seconds"] for run in recorded["runs"]}
    wanted = [(arm, seed) for arm in claim.needed for seed in claim.seeds]
    return (
        None if not wanted or any(job not in seconds for job in wanted) else sum(map(seconds.__getitem__, wanted)) / 60
    )


def _time(recorded: dict[str, Any]) -> str:
    """Write how long all runs take, and the longest claim."""
    known = {claim.name: minutes for claim in CLAIMS if (minutes := minutes_of(claim, recorded)) is not None}
    if not known:
        return "No claim has all of its runs."
    longest = max(known, key=known.__getitem__)
    total = sum(run["seconds"] for run in recorded["runs"]) / 3600
    return (
        f"All {len(recorded['runs'])} recorded runs take {total:.1f} hours of one core, {total / 2:.1f} on two; "
        f"the longest claim, {longest}, {known[longest]:.0f} minutes of one core."
    )


def _section(claim: Claim, verdict: str, parts: Sequence[PartResult], runs: dict[str, list[m.Run]] | None) -> list[str]:
    why = claim.untestable or ("a run has no collapse to measure" if verdict == UNTESTED else "")
    reason = f", because {why}" if why else ""
    lines = [f"### {claim.name}", "", f"{claim.statement} ({claim.source})", "", f"**{verdict}**{reason}."]
    if claim.note and parts:
        lines += ["", claim.note]
    if claim.remark and runs:
        lines += ["", claim.remark(runs)]
    if parts:
        lines += ["", "| measured | has to be | found | |", "|---|---|---|---|"]
        for part in parts:
            holds = "holds" if part.holds else "does not hold"
            lines.append(f"| {part.says.replace('|', chr(92) + '|')} | {part.bound} | {part.found()} | {holds} |")
    if claim.arms:
        lines += ["", f"`python scripts/study.py --claim {claim.name}`, seeds {', '.join(map(str, claim.seeds))}:", ""]
        lines += [f"    {command_of(arm)}" for arm in claim.arms]
        if parts:
            lines += ["", f"![{', '.join(claim.curves)} of {', '.join(claim.arms)}](study/{claim.name}.png)"]
    return lines


def _collapses(recorded: dict[str, Any]) -> list[str]:
    """Write one line for each run that lost a fifth of its best reward."""
    fell = [(run, lost) for run in runs_with_twins(recorded).values() if (lost := m.lost_at(run)) is not None]
    leads = [lost - alarm[0] for run, lost in fell if (alarm := m.first_alarm(run)) and alarm[0] <= lost]
    count = len(recorded["runs"])
    if not fell:
        return [f"None of the {count} recorded runs lost a fifth of its best reward."]
    said = f"{len(fell)} of the {count} recorded runs lost a fifth of their best reward. "
    said += f"A monitor had spoken by then in {len(leads)}"
    said += f", {statistics.median(leads):g} rollouts before at the median." if leads else "."
    lines = [
        said,
        "",
        "| run | seed | a fifth lost at | first warning or worse | rollouts before |",
        "|---|---|---|---|---|",
    ]
    for run, lost in fell:
        alarm = m.first_alarm(run)
        seen = f"{alarm[1]} at {alarm[0]}" if alarm else "none"
        lines.append(f"| {run['arm']} | {run['seed']} | {lost} | {seen} | {lost - alarm[0] if alarm else '-'} |")
    return lines


# ------------------------------------------------------------------------------------------------ figures


def draw(claim: Claim, runs: dict[str, list[m.Run]], path: Path) -> None:
    """Draw the curves of a claim: means of five rollouts, over seeds, with the smallest and largest seed as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(8, 2.1), layout="constrained")
    for axis, key in zip(figure.subplots(1, len(claim.curves)), claim.curves, strict=True):
        for colour, (arm, of_arm) in zip(COLOURS, runs.items(), strict=False):
            columns = [smoothed(m.known(run, key), 5) for run in of_arm if m.known(run, key)]
            if not columns:
                continue
            rows = list(zip(*columns, strict=False))
            steps = range(1, len(rows) + 1)
            axis.plot(steps, [statistics.fmean(row) for row in rows], color=colour, lw=1.2, label=arm.partition("/")[2])
            axis.fill_between(
                steps, [min(row) for row in rows], [max(row) for row in rows], color=colour, alpha=0.15, lw=0
            )
        axis.set_title(key, fontsize=7)
        axis.tick_params(labelsize=6)
    figure.axes[0].legend(fontsize=5.5, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    # Few colours are in it, and a table of them is a quarter of the size.
    Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)


def publish(recorded: dict[str, Any], docs: Path) -> Path:
    """Write recorded runs, figures and page into the documents' folder; returns the page's path."""
    write(docs / RECORDED, recorded)
    for claim in CLAIMS:
        runs = runs_of(claim, recorded) if claim.arms else None
        if runs is not None:
            draw(claim, runs, docs / "study" / f"{claim.name}.png")
    path = docs / "study.md"
    path.write_text(page(recorded), encoding="utf-8")
    return path
