"""From a source to the prompts of a run: answers checked, rows cleaned and tokenised, and an account of every row."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_grpo.data import CleanConfig, Dropped, PromptFormat, PromptSource, Row, decontaminate, deduplicate
from lit_grpo.data.cleaning import CONTAMINATED, TOO_LONG, letters
from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.types import Prompt
from lit_grpo.utils.files import write_atomically
from lit_grpo.utils.text import shorten

_CHECKED_WITHIN = 100_000
"""Held-out questions that training questions are compared with unasked."""


@dataclass
class PromptSet:
    """The prompts of one source, and what became of the other rows."""

    name: str
    """``data.prompts``, ``data.val_prompts``, ..."""
    prompts: list[Prompt]
    dropped: list[Dropped]
    places: Mapping[str, str]
    """File and line of each row, by id."""
    weights: Mapping[str, float] | None = None
    """Share of each source, see :attr:`lit_grpo.data.PromptSource.weights`."""

    @property
    def sources(self) -> dict[str, int]:
        """Prompts of each source, in the order in which they first come."""
        return dict(Counter(prompt.source for prompt in self.prompts))

    def keep(self, ids: Container[str], reason: str) -> None:
        """Drop the prompts of other ids."""
        gone = [prompt for prompt in self.prompts if prompt.id not in ids]
        self.prompts = [prompt for prompt in self.prompts if prompt.id in ids]
        for p in gone:
            row = Row(p.id, p.question, p.answer, p.extra, self.places.get(p.id, ""), p.source)
            self.dropped.append(Dropped(row, reason))

    def account(self) -> list[str]:
        """What was kept and dropped and why, in one line; a second one for the sources of a mixture."""
        read = len(self.prompts) + len(self.dropped)
        line = f"{self.name}: {len(self.prompts):,} prompts"
        if self.dropped:
            reasons = Counter(item.reason for item in self.dropped)
            line += f" of {read:,} rows; dropped " + ", ".join(f"{n:,} {reason}" for reason, n in reasons.items())
            hit = Counter(item.other.rpartition("/")[0] for item in self.dropped if item.reason == CONTAMINATED)
            line += f" (given away: {', '.join(f'{s} {n:,}' for s, n in hit.items())})" if hit else ""
        if len(self.sources) < 2:
            return [line]
        shares = self.weights or {name: n / len(self.prompts) for name, n in self.sources.items()}
        parts = ", ".join(f"{name} {n:,} ({shares[name]:.0%} of the rollouts)" for name, n in self.sources.items())
        return [line, f"  sources: {parts}"]

    def identity(self) -> dict[str, Any]:
        """Equal identities, equal prompts in equal order."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(repr((prompt.id, prompt.question, prompt.answer)).encode())
        return {"count": len(self.prompts), "digest": digest.hexdigest(), "weights": dict(self.weights or {})}


def prepare(
    source: PromptSource,
    name: str,
    *,
    form: PromptFormat,
    tokenizer: Any,
    rewards: Sequence[Reward],
    clean: CleanConfig | None = None,
    held_out: Sequence[PromptSource] = (),
) -> PromptSet:
    """Read, check, clean and tokenise a source.

    Args:
        source: of the rows.
        name: of the setting, for messages.
        form: how a question becomes token ids.
        tokenizer: of the policy.
        rewards: whose needs the rows must meet.
        clean: what is left out; None: nothing but what ``form`` drops.
        held_out: sources that must not be trained on, besides those of ``clean``.

    Raises:
        UserError: bad rows, a row without the answer that a reward needs, or nothing left.
    """
    rows: Sequence[Row] = source.rows()
    _check_answers(rows, rewards, name, source.name)
    dropped: list[Dropped] = []
    if clean is not None:
        rows, dropped = _cleaned(rows, clean, held_out)
        if not rows:
            reasons = Counter(item.reason for item in dropped)
            raise UserError(
                f"of {len(dropped)} rows none is left: {', '.join(f'{n} {r}' for r, n in reasons.items())}",
                where=name,
                remedy="change data.clean, or choose other prompts",
            )
    encoded = form.encode_all(rows, tokenizer, source.name)
    dropped += [Dropped(row, TOO_LONG) for row in encoded.too_long]
    found = PromptSet(name, encoded.prompts, dropped, {row.id: row.where for row in rows}, source.weights)
    if missing := set(found.weights or ()) - set(found.sources):
        raise UserError(
            f"of the source {min(missing)!r} no row is left, and it has a weight",
            where=name,
            remedy="change data.clean or data.format, or take the source out",
        )
    return found


def in_both(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> int:
    """How many training questions are also held-out ones, letter by letter."""
    known = {letters(prompt.question) for prompt in held_out[:_CHECKED_WITHIN]}
    return sum(letters(prompt.question) in known for prompt in prompts) if known else 0


def write_dropped(sets: Sequence[PromptSet], path: str) -> None:
    """A JSON object a line for every row that was left out."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    records = [
        {
            "id": item.row.id,
            "set": one.name,
            "source": item.row.source,
            "reason": item.reason,
            "other": item.other,
            "where": item.row.where,
        }
        for one in sets
        for item in one.dropped
    ]
    write_atomically(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def check_resumed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with a checkpoint of other prompts: their order is counted by position.

    Raises:
        UserError: names what differs.
    """
    form, before = now["format"], saved["format"]
    for key, value in form.items():
        if before.get(key) != value:
            was, is_now = shorten(repr(before.get(key)), 60), shorten(repr(value), 60)
            raise UserError(
                f"the checkpoint was trained with another {key}: {was}, not {is_now}",
                where=f"data.format.{key}",
                remedy="set it as it was, or start a new run: lit-grpo export, then model.policy.path",
            )
    if saved["prompts"] != now["prompts"]:
        counts = saved["prompts"]["count"], now["prompts"]["count"]
        what = f"{counts[0]:,} prompts, not {counts[1]:,}" if counts[0] != counts[1] else "others of the same number"
        if saved["prompts"]["digest"] == now["prompts"]["digest"]:
            what = f"other weights of the sources, {saved['prompts']['weights']}"
        raise UserError(
            f"the checkpoint was trained on other prompts: {what}",
            where="data.prompts",
            remedy="give the data it was begun with, or start a new run: lit-grpo export the checkpoint and give "
            "model.policy.path",
        )


def _check_answers(rows: Sequence[Row], rewards: Sequence[Reward], name: str, source: str) -> None:
    sources = {row.source or source for row in rows}
    judging = {one: [reward.for_source(one) for reward in rewards] for one in sources}
    needing = {one: next((r.name for r in found if r.needs_answer), None) for one, found in judging.items()}
    for row in rows:
        needs = needing[row.source or source]
        if needs is not None and (row.answer is None or not str(row.answer).strip()):
            raise UserError(
                f"row {row.id!r} has no answer, and the reward {needs!r} compares with it",
                where=row.where or name,
                remedy="fill in the answer, name the right answer_column, or remove the row",
            )


def _cleaned(
    rows: Sequence[Row], clean: CleanConfig, held_out: Sequence[PromptSource]
) -> tuple[list[Row], list[Dropped]]:
    kept = list(rows)
    dropped: list[Dropped] = []
    if clean.deduplicate:
        kept, dropped = deduplicate(kept)
    against = [*clean.decontaminate, *(held_out if clean.held_out else ())]
    if against:
        evaluation = [_named(row, source) for source in against for row in source.rows()]
        kept, more = decontaminate(kept, evaluation, ngram=clean.ngram, overlap=clean.overlap)
        dropped += more
    return kept, dropped


def _named(row: Row, source: PromptSource) -> Row:
    return row if row.id.rpartition("/")[0] else replace(row, id=f"{source.name}/{row.id}")
