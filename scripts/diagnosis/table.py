"""The benchmark's results as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = ("run", "expected", "diagnosis", "onset", "first alarm", "delay", "a fifth lost at", "false alarms", "verdict")
ROLLBACK_HEAD = ("run", "best before", "at the end", "of best", "rollbacks (from, to, why)", "saved")


def report(runs: Sequence[Mapping[str, Any]], totals: Mapping[str, Any]) -> str:
    """Write the summary, a row for each run, and what went wrong, run by run."""
    watched = [run for run in runs if run["part"] == "diagnosis"]
    returned = [run for run in runs if run["part"] == "rollback"]
    parts = [summary_lines(totals), table(HEAD, [row(run) for run in watched])]
    if returned:
        parts.append(table(ROLLBACK_HEAD, [rollback_row(run) for run in returned]))
    missed = misses(runs)
    parts.append("Misses, run by run:\n\n" + ("\n".join(f"- {line}" for line in missed) if missed else "none"))
    return "\n\n".join(parts)


def summary_lines(totals: Mapping[str, Any]) -> str:
    """Write the few numbers that matter most."""
    lines = [
        f"recall {_percent(totals['recall'])} of {totals['sabotaged']} sabotaged runs",
        f"right class {_percent(totals['right_class'])} of them",
        f"alarm before a fifth of the best reward was lost: {_percent(totals['in_time'])} of the {totals['fell']} "
        "runs that lost it",
        f"false stops {totals['false_stops']}, false alarms {totals['false_alarms']} (the {totals['healthy']} healthy "
        "runs, and sabotaged ones before the sabotage)",
        f"rollback saved {_percent(totals['rollback_saved'])} of {totals['rollback_runs']} runs",
        f"median delay {totals['median_delay']} rollouts from the onset",
    ]
    if totals["errors"]:
        lines.append(f"{totals['errors']} runs failed and are in no number above")
    return "\n".join(f"- {line}" for line in lines)


def row(run: Mapping[str, Any]) -> list[str]:
    """Write the row of a run that was watched."""
    name = f"{run['name']} {run['seed']}"
    if run["status"] == "error":
        return [name, "", "", "", "", "", "", "", f"failed: {run['reason']}"]
    found = f"{run['diagnosis']} ({run['severity']}, {run['verdict_step']})" if run["detected"] else "-"
    if not run["expected"]:
        verdict = "**false stop**" if run["false_stop"] else "false alarm" if run["false_alarms"] else "ok"
        found = ", ".join(f"{name} ({step})" for step, name, _ in run["all"][:3]) or "-"
    else:
        verdict = "**missed**" if not run["detected"] else "ok" if run["right"] else "**wrong class**"
        if run["false_stop"]:
            verdict += ", **stop before the sabotage**"
        if run["detected"] and not run["in_time"]:
            verdict += ", late"
    cells = (run["onset"], run["step"], run["delay"], run["lost"])
    return [
        name,
        " or ".join(run["expected"]) or "healthy",
        found,
        *map(_cell, cells),
        str(run["false_alarms"]),
        verdict,
    ]


def rollback_row(run: Mapping[str, Any]) -> list[str]:
    """Write the row of a run that could go back."""
    name = f"{run['name']} {run['seed']}"
    if run["status"] == "error":
        return [name, "", "", "", f"failed: {run['reason']}", ""]
    share = run["final"] / run["best"] if run["best"] else 0.0
    returns = "; ".join(f"{at} to {to}, {why}" for at, to, why in run["rollbacks"]) or "none"
    if run["status"] == "stopped":
        returns += f"; then stopped after {run['steps']} rollouts"
    saved = "yes" if run["saved"] else "**no**" if run["collapsed"] else "did not collapse"
    return [name, f"{run['best']:.2f}", f"{run['final']:.2f}", _percent(share), returns, saved]


def misses(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say in words all that was not as it should be."""
    out = []
    for run in runs:
        name = f"{run['name']} seed {run['seed']}"
        if run["status"] == "error":
            out.append(f"{name} ({run['part']}): the run failed: {run['reason']}")
        elif run["part"] == "rollback":
            if run["collapsed"] and not run["saved"]:
                out.append(f"{name}: rollback left it at {run['final']:.2f} of a best of {run['best']:.2f}")
        elif not run["expected"]:
            if run["false_alarms"]:
                said = ", ".join(f"{what} ({severity}) at {step}" for step, what, severity in run["all"])
                out.append(f"{name}: healthy, but {said}")
        else:
            if run["false_alarms"]:
                out.append(f"{name}: {run['false_alarms']} alarms before the sabotage began")
            if not run["detected"]:
                out.append(f"{name}: no alarm")
            elif not run["right"]:
                said = f"{run['diagnosis']} ({run['severity']}) at {run['verdict_step']}"
                out.append(f"{name}: called {said}, is {' or '.join(run['expected'])}")
            if run["detected"] and not run["in_time"]:
                out.append(f"{name}: first alarm at {run['step']}, a fifth of the best was lost at {run['lost']}")
    return out


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)
