"""Completions from before and after a fault, token by token, each with its entropy, surprise and advantage."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lit_grpo.report.run import Run
from lit_grpo.run import flight

LONGEST = 400
"""Number of tokens of a completion that are shown at most."""
BOUNDS = (0.05, 0.35, math.log(2), math.log(4))
"""Nats above which entropy and surprise reach the next of five levels."""


@dataclass(frozen=True)
class TokenView:
    """One token as the page shows it."""

    text: str
    """The token's text with control characters made visible."""
    breaks: bool
    """True if a line break follows."""
    entropy: int | None
    """Level from 0 to 4; None where it was not recorded."""
    surprise: int | None
    """Level from 0 to 4 of -log p when the token was drawn; None where it was not recorded."""
    advantage: int
    """Level of the advantage from -2 (pushed down most) to 2; 0 without advantage or record."""
    title: str
    """The numbers in words, shown when the pointer rests on the token."""
    outside: bool
    """True if the token was drawn but is missing from the learner's loss."""


@dataclass(frozen=True)
class CompletionView:
    """One completion as the page shows it."""

    step: int
    prompt: str
    answer: str | None
    facts: list[tuple[str, str]]
    tokens: list[TokenView]
    more: int
    """Number of tokens that are left out."""
    text: str
    """The completion as plain text, for where token texts are not known."""


@dataclass(frozen=True)
class RolloutView:
    """Some completions of one rollout as the page shows them."""

    title: str
    completions: list[CompletionView]
    modes: frozenset[str]
    """Names of what was recorded, of entropy, surprise and advantage."""


def choose_steps(run: Run, onset: int | None, seen: int | None) -> list[tuple[str, int]]:
    """Choose (title, step) of up to three records to show.

    They are the first, the last before the onset and the first since it was seen; the last one where that makes fewer
    than three. Without an onset they are the first and the last.
    """
    steps = list(run.records)
    if not steps:
        return []
    chosen = {steps[0]: "first recorded"}
    if onset is not None:
        before = [s for s in steps if s < onset]
        after = [s for s in steps if s >= (seen or onset)] or [s for s in steps if s >= onset]
        chosen |= {before[-1]: "before onset"} if before else {}
        # Of a run that began with it, the first record says more about what was first.
        if after:
            chosen.setdefault(after[0], "after onset")
    if len(chosen) < 3:
        chosen.setdefault(steps[-1], "last recorded")
    return [(title, step) for step, title in chosen.items()]


def read_records(run: Run, chosen: Sequence[tuple[str, int]]) -> list[tuple[str, flight.RecordedStep]]:
    """Read records; one that cannot be read is left out and noted in ``run.notes``."""
    records = []
    for title, step in chosen:
        try:
            records.append((title, flight.read_step(run.records[step])))
        except ValueError as error:
            run.notes.append(f"The flight record of step {step} cannot be read: {str(error).rpartition(': ')[2]}")
    return records


def rollout_view(title: str, record: flight.RecordedStep, token_texts: dict[int, str]) -> RolloutView:
    """Show a record's completions with the highest, middle and lowest reward, with different texts if there are any."""
    reward = record.tensors["reward"]
    # Those that no reward scored come last, and are shown where they are among few.
    order = sorted(range(len(reward)), key=lambda i: _place(reward[i]))
    scored = sum(not math.isnan(float(value)) for value in reward)
    wanted = [order[0], order[scored // 2], order[scored - 1]] if scored else order[:1]
    # By text: after a collapse most completions are the same, and one of them shows it.
    rows: dict[str, int] = {}
    for i in [*wanted, *order[1:]]:
        if len(rows) < 3 and i not in rows.values():
            rows.setdefault(record.texts[i], i)
    modes = {"advantages": "advantage", "entropy": "entropy", "sampler_logprobs": "surprise"}
    known = frozenset(mode for name, mode in modes.items() if name in record.tensors)
    by_reward = sorted(rows.values(), key=lambda i: _place(reward[i]))
    return RolloutView(
        title=f"{title}: step {record.step}" + (" (broke off in this step)" if record.unfinished else ""),
        completions=[_completion_view(record, i, token_texts) for i in by_reward],
        modes=known,
    )


def _completion_view(record: flight.RecordedStep, i: int, token_texts: dict[int, str]) -> CompletionView:
    prompt = record.prompts[i // record.group_size]
    ids = record.rows("tokens")[i].tolist()

    def row(name: str) -> list[float] | None:
        rows = record.rows(name)
        return [float(v) for v in rows[i]] if rows else None

    entropy, sampled, advantages, mask = row("entropy"), row("sampler_logprobs"), row("advantages"), row("mask")
    facts = [("reward", _score(record.tensors["reward"][i], "none, left out"))]
    if "correct" in record.tensors and ("judged" not in record.tensors or record.tensors["judged"][i]):
        facts.append(("correct", "yes" if record.tensors["correct"][i] else "no"))
    facts += [
        (name, _score(values[i], "none"))
        for name, values in record.tensors.items()
        if name.startswith("reward/") and sum(n.startswith("reward/") for n in record.tensors) > 1
    ]
    facts.append(("tokens", str(len(ids)) + (", cut at the limit" if record.tensors["truncated"][i] else "")))
    if advantages:
        low, high = min(advantages), max(advantages)
        facts.append(("advantage", f"{low:+.2f}" if high - low < 1e-6 else f"{low:+.2f} to {high:+.2f}"))
    if entropy:
        facts.append(("mean entropy", f"{sum(entropy) / len(entropy):.2f} nats"))
    largest = max((abs(a) for rows in record.rows("advantages") for a in rows.tolist()), default=0.0)
    tokens = [
        _token_view(
            token_texts.get(token, f"<{token}>"),
            entropy[t] if entropy else None,
            # Surprise is -log p, which is 0 for a token that was certain.
            -sampled[t] if sampled else None,
            advantages[t] if advantages else None,
            largest,
            outside=bool(mask) and not mask[t],  # type: ignore[index]
        )
        for t, token in enumerate(ids[:LONGEST])
    ]
    return CompletionView(
        step=record.step,
        prompt=visible(str(prompt.get("question") or "")),
        answer=_gold(prompt.get("answer")),
        facts=facts,
        # Without the texts the tokens would be bare numbers, and the page shows the plain text.
        tokens=tokens if token_texts else [],
        more=max(0, len(ids) - LONGEST),
        text=visible(record.texts[i])[: 4 * LONGEST],
    )


def scored_rewards(record: flight.RecordedStep) -> list[float]:
    """Return the rewards of a record's completions, without those that no reward scored."""
    return [value for value in record.tensors["reward"].tolist() if not math.isnan(value)]


def _place(reward: Any) -> tuple[bool, float]:
    """Return the key that sorts by falling reward, what has none last."""
    value = float(reward)
    return (True, 0.0) if math.isnan(value) else (False, -value)


def _score(reward: Any, unscored: str) -> str:
    return unscored if math.isnan(float(reward)) else f"{float(reward):.3g}"


def _gold(answer: Any) -> str | None:
    """Return the gold as it is shown: of several, each of which is right, all of them."""
    if answer is None:
        return None
    return visible(" or ".join(map(str, answer)) if isinstance(answer, list) else str(answer))


def _token_view(
    text: str, entropy: float | None, surprise: float | None, advantage: float | None, largest: float, outside: bool
) -> TokenView:
    numbers = [
        f"{name} {value:.2f}"
        for name, value in (("entropy", entropy), ("surprise", surprise), ("advantage", advantage))
        if value is not None and math.isfinite(value)
    ]
    # Two shades of each sign: below and above half of the largest advantage in the rollout.
    size = 0 if advantage is None or not abs(advantage) > 1e-9 or not largest else 1 + (abs(advantage) > largest / 2)
    return TokenView(
        text=visible(text, newline="↵"),
        breaks="\n" in text,
        entropy=level(entropy),
        surprise=level(surprise),
        advantage=size if (advantage or 0) > 0 else -size,
        title=", ".join(numbers) + (", not in the loss" if outside else ""),
        outside=outside,
    )


def level(value: Any) -> int | None:
    """Return the level of a value by :data:`BOUNDS`, 0 to 4; None for None and what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return sum(value > bound for bound in BOUNDS)


def visible(text: str, newline: str = "\n") -> str:
    """Make control and format characters visible."""
    # A model may write characters that hide or reorder the text around them, and the page must show what is there.
    out = []
    for c in text:
        if c == "\n":
            out.append(newline)
        elif unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
            out.append(f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}")
        else:
            out.append(c)
    return "".join(out)
