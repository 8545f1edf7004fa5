"""Recorded completions in their groups: what was asked, and the answers of one group side by side, the best first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_grpo.report.samples import visible
from lit_grpo.run import flight

MOST_GROUPS = 120
"""Groups on a page at most, spread evenly over the run, with those of the best and the worst completions."""
MOST_IN_GROUP = 8
LONGEST = 800
"""Characters of a prompt or of a completion that are shown at most."""
EXTREMES = 3
"""Number of the best and of the worst completions that are shown first."""


@dataclass(frozen=True)
class Answer:
    """One completion of a group."""

    text: str
    more: int
    """Number of characters that are left out."""
    reward: float | None
    """None if no reward scored it."""
    facts: list[tuple[str, str]]

    @property
    def rank(self) -> float:
        """Return the reward, for sorting; what was not scored comes last."""
        return -math.inf if self.reward is None else self.reward


@dataclass(frozen=True)
class Group:
    """The recorded completions of one prompt in one rollout, the best first."""

    rollout: int
    prompt: str
    gold: str | None
    answers: list[Answer]

    @property
    def rewards(self) -> list[float]:
        return [answer.reward for answer in self.answers if answer.reward is not None]


@dataclass(frozen=True)
class Recorded:
    """Everything that a page shows of the recorded completions."""

    groups: list[Group] = field(default_factory=list)
    """Newest rollout first."""
    best: list[tuple[Group, Answer]] = field(default_factory=list)
    worst: list[tuple[Group, Answer]] = field(default_factory=list)
    total: int = 0
    """Number of completions that were recorded, shown or not."""


def collect(rows: Sequence[Mapping[str, Any]], records: Sequence[flight.RecordedStep]) -> Recorded:
    """Put recorded completions into groups and choose those that a page shows.

    Args:
        rows: what :func:`lit_grpo.report.recorded.read_rows` gave.
        records: flight records of further rollouts; those of rollouts that ``rows`` has are left out.
    """
    found: dict[tuple[int, str, str], list[Answer]] = {}
    golds: dict[tuple[int, str, str], str | None] = {}
    for row in rows:
        prompt = str(row.get("prompt") or "")
        key = (row["rollout"], str(row.get("id") or ""), prompt)
        found.setdefault(key, []).append(_answer_of_row(row))
        golds[key] = _gold(row.get("answer"))
    known = {rollout for rollout, _, _ in found}
    for record in records:
        for i, text in enumerate(record.texts if record.step not in known else ()):
            prompt_row = record.prompts[i // record.group_size]
            prompt = str(prompt_row.get("question") or "")
            # By place: a rollout may hold the same prompt in several groups.
            key = (record.step, str(i // record.group_size), prompt)
            found.setdefault(key, []).append(_answer_of_record(record, i, text))
            golds[key] = _gold(prompt_row.get("answer"))
    groups = [
        Group(key[0], _cut(key[2])[0], golds[key], sorted(answers, key=lambda a: a.rank, reverse=True))
        for key, answers in found.items()
    ]
    # A stable sort: the groups of a rollout stay in their order.
    groups.sort(key=lambda group: -group.rollout)
    scored = [(group, answer) for group in groups for answer in group.answers if answer.reward is not None]
    best = _distinct(sorted(scored, key=lambda pair: -pair[1].rank))
    worst = _distinct(sorted(scored, key=lambda pair: pair[1].rank))
    # Where all are alike there is no worst.
    if best and best[0][1].rank == worst[0][1].rank:
        worst = []
    total = sum(len(group.answers) for group in groups)
    return Recorded(_spread(groups, [group for group, _ in [*best, *worst]]), best, worst, total)


def _distinct(pairs: Sequence[tuple[Group, Answer]]) -> list[tuple[Group, Answer]]:
    chosen: dict[tuple[str, str], tuple[Group, Answer]] = {}
    for group, answer in pairs:
        chosen.setdefault((group.prompt, answer.text), (group, answer))
        if len(chosen) == EXTREMES:
            break
    return list(chosen.values())


def _spread(groups: list[Group], wanted: Sequence[Group]) -> list[Group]:
    """Choose groups spread evenly, first and last among them, and all wanted ones; each with its best and worst."""
    room = MOST_GROUPS - len(wanted)
    if len(groups) > MOST_GROUPS:
        places = {round(i * (len(groups) - 1) / (room - 1)) for i in range(room)}
        names = {id(group) for group in wanted}
        groups = [group for i, group in enumerate(groups) if i in places or id(group) in names]
    return [
        group
        if len(group.answers) <= MOST_IN_GROUP
        else Group(group.rollout, group.prompt, group.gold, _ends(group.answers))
        for group in groups
    ]


def _ends(answers: list[Answer]) -> list[Answer]:
    return [*answers[: MOST_IN_GROUP // 2], *answers[-(MOST_IN_GROUP // 2) :]]


def _answer_of_row(row: Mapping[str, Any]) -> Answer:
    facts = []
    if isinstance(row.get("correct"), bool):
        facts.append(("correct", "yes" if row["correct"] else "no"))
    rewards = row.get("rewards")
    if isinstance(rewards, dict) and len(rewards) > 1:
        facts += [(str(name), "none" if value is None else _score(value)) for name, value in rewards.items()]
    if row.get("tokens") is not None:
        facts.append(("tokens", f"{row['tokens']}" + (", cut at the limit" if row.get("truncated") is True else "")))
    return _answer(str(row.get("completion") or ""), row.get("reward"), facts)


def _answer_of_record(record: flight.RecordedStep, i: int, text: str) -> Answer:
    facts = []
    tensors = record.tensors
    if "correct" in tensors and ("judged" not in tensors or tensors["judged"][i]):
        facts.append(("correct", "yes" if tensors["correct"][i] else "no"))
    cut = ", cut at the limit" if tensors["truncated"][i] else ""
    facts.append(("tokens", f"{int(tensors['lengths'][i])}{cut}"))
    return _answer(text, float(tensors["reward"][i]), facts)


def _answer(text: str, reward: Any, facts: list[tuple[str, str]]) -> Answer:
    number = float(reward) if isinstance(reward, int | float) and math.isfinite(reward) else None
    shown, more = _cut(text)
    return Answer(shown, more, number, [("reward", "none" if number is None else _score(number)), *facts])


def _cut(text: str) -> tuple[str, int]:
    return visible(text[:LONGEST]), max(0, len(text) - LONGEST)


def _score(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else str(value)


def _gold(answer: Any) -> str | None:
    if answer in (None, ""):
        return None
    return visible(" or ".join(map(str, answer)) if isinstance(answer, list) else str(answer))[:LONGEST]
