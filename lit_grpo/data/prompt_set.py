"""The prompts of a run, made from a source: answers checked, rows cleaned and tokenised, every row accounted for."""

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

# Nobody asked for this comparison, so it must not delay the start of a run on a large set.
_MAX_HELD_OUT_COMPARED = 100_000
"""Number of held-out questions that training questions are compared with where no cleaning was asked for."""


@dataclass
class PromptSet:
    """The prompts of one source, and the rows of it that were left out."""

    name: str
    """Key of the source in the configuration: ``data.prompts``, ``data.val_prompts``, ..."""
    prompts: list[Prompt]
    dropped: list[Dropped]
    """Rows that were left out, each with its reason."""
    locations: Mapping[str, str]
    """File and line of each row, by id."""
    weights: Mapping[str, float] | None = None
    """Share of each source in the rollouts, see :attr:`lit_grpo.data.PromptSource.weights`."""

    @property
    def sources(self) -> dict[str, int]:
        """Number of prompts of each source, in the order in which the sources first come."""
        return dict(Counter(prompt.source for prompt in self.prompts))

    def keep(self, ids: Container[str], reason: str) -> None:
        """Keep the prompts of these ids, and count the others as dropped for ``reason``."""
        removed = [prompt for prompt in self.prompts if prompt.id not in ids]
        self.prompts = [prompt for prompt in self.prompts if prompt.id in ids]
        for p in removed:
            where = self.locations.get(p.id, "")
            row = Row(p.id, p.question, p.answer, p.extra, where, p.source, p.messages, p.other_answers)
            self.dropped.append(Dropped(row, reason))

    def summary_lines(self) -> list[str]:
        """Say in one line what was kept, what dropped and why, and in a second one how a mixture is made up."""
        read = len(self.prompts) + len(self.dropped)
        line = f"{self.name}: {len(self.prompts):,} prompt{'' if len(self.prompts) == 1 else 's'}"
        if self.dropped:
            reasons = Counter(item.reason for item in self.dropped)
            line += f" of {read:,} rows; dropped " + ", ".join(f"{n:,} {reason}" for reason, n in reasons.items())
            given_away = Counter(item.other.rpartition("/")[0] for item in self.dropped if item.reason == CONTAMINATED)
            line += f" (given away: {', '.join(f'{s} {n:,}' for s, n in given_away.items())})" if given_away else ""
        if len(self.sources) < 2:
            return [line]
        shares = self.weights or {name: n / len(self.prompts) for name, n in self.sources.items()}
        mixture = ", ".join(f"{name} {n:,} ({shares[name]:.0%} of the rollouts)" for name, n in self.sources.items())
        return [line, f"  sources: {mixture}"]

    def identity(self) -> dict[str, Any]:
        """Return values that are equal where prompts and their order are, for the check of a checkpoint."""
        # A digest, so that a checkpoint need not hold the texts.
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(repr((prompt.id, prompt.question, prompt.answer)).encode())
            # Left out where there are none, as in checkpoints of a time when there could be none.
            if prompt.other_answers:
                digest.update(repr(prompt.other_answers).encode())
            if prompt.messages is not None:
                digest.update(repr([sorted(message.items()) for message in prompt.messages]).encode())
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
        source: source of the rows.
        name: key of the source in the configuration, for messages.
        form: settings of how a question becomes token ids.
        tokenizer: tokenizer of the policy.
        rewards: rewards of the run; where one compares with a gold answer, every row must have one.
        clean: what is left out; None: nothing but what ``form`` drops.
        held_out: sources that must not be trained on, besides those of ``clean``.

    Raises:
        UserError: bad rows, a row without the answer that a reward needs, or nothing left.
    """
    rows: Sequence[Row] = source.rows()
    # Checked before cleaning, so that a row without an answer is refused whether or not it would be left out.
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
    prompt_set = PromptSet(name, encoded.prompts, dropped, {row.id: row.where for row in rows}, source.weights)
    # The loader could not give a source its share if none of its rows is left.
    if missing := set(prompt_set.weights or ()) - set(prompt_set.sources):
        raise UserError(
            f"of the source {min(missing)!r} no row is left, and it has a weight",
            where=name,
            remedy="change data.clean or data.format, or take the source out",
        )
    return prompt_set


def in_both(prompts: Sequence[Prompt], held_out: Sequence[Prompt]) -> int:
    """Count the training questions that are also held-out ones, letter by letter."""
    held_out_letters = {letters(prompt.question) for prompt in held_out[:_MAX_HELD_OUT_COMPARED]}
    return sum(letters(prompt.question) in held_out_letters for prompt in prompts) if held_out_letters else 0


def write_dropped(sets: Sequence[PromptSet], path: str) -> None:
    """Write one JSON object a line for every row that was left out.

    Raises:
        UserError: the file cannot be written.
    """
    file = Path(path)
    records = [
        {
            "id": item.row.id,
            "set": prompt_set.name,
            "source": item.row.source,
            "reason": item.reason,
            "other": item.other,
            "where": item.row.where,
        }
        for prompt_set in sets
        for item in prompt_set.dropped
    ]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}",
            where="data.clean.dropped_file",
            remedy="give a file in a folder that can be written in",
        ) from error


def check_resumed(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with a checkpoint that was trained on other prompts.

    Raises:
        UserError: the prompts or their format differ; it names what differs.
    """
    # The order of the prompts is kept as a position in them, which would mean others.
    form, before = now["format"], saved["format"]
    for key in dict.fromkeys([*form, *before]):
        if before.get(key, "") != form.get(key, ""):
            was, is_now = shorten(repr(before.get(key)), 60), shorten(repr(form.get(key)), 60)
            raise UserError(
                f"the checkpoint was trained with another {key}: {was}, not {is_now}",
                where=f"data.format.{key}",
                remedy="set it as it was, or start a new run: lit-grpo export, then model.policy.path",
            )
    if "vocabulary" in saved and saved["vocabulary"] != now.get("vocabulary"):
        raise UserError(
            "the checkpoint was trained with another vocabulary: the same token ids would be other text",
            where="model.policy",
            remedy="give the model folder, or the alphabet of the tiny model, that the run began with",
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
    rewards_of = {of_source: [reward.for_source(of_source) for reward in rewards] for of_source in sources}
    needing_reward = {
        of_source: next((r.name for r in candidates if r.needs_answer), None)
        for of_source, candidates in rewards_of.items()
    }
    for row in rows:
        of_row = rewards_of[row.source or source]
        needs = needing_reward[row.source or source]
        if needs is not None and (row.answer is None or not str(row.answer).strip()):
            raise UserError(
                f"row {row.id!r} has no answer, and the reward {needs!r} compares with it",
                where=row.where or name,
                remedy="fill in the answer, name the right answer_column, or remove the row",
            )
        for reward in of_row:
            # Found now, and not in the rollout that comes to the row.
            problems = (reward.row_problem(gold, row.extra) for gold in row.golds or (None,))
            if (problem := next((p for p in problems if p is not None), None)) is not None:
                raise UserError(
                    f"the reward {reward.name!r} cannot score row {row.id!r}: {problem}",
                    where=row.where or name,
                    remedy="mend or remove the row, or choose the reward and its columns for this data",
                )


def _cleaned(
    rows: Sequence[Row], clean: CleanConfig, held_out: Sequence[PromptSource]
) -> tuple[list[Row], list[Dropped]]:
    kept = list(rows)
    dropped: list[Dropped] = []
    # Duplicates go first, so that each question is compared with the evaluation sets once.
    if clean.deduplicate:
        kept, dropped = deduplicate(kept)
    against = [*clean.decontaminate, *(held_out if clean.held_out else ())]
    if against:
        evaluation = [_named(row, source) for source in against for row in source.rows()]
        kept, more = decontaminate(kept, evaluation, ngram=clean.ngram, overlap=clean.overlap)
        dropped += more
    return kept, dropped


def _named(row: Row, source: PromptSource) -> Row:
    # The id begins with the set's name, so that the report can say which set was given away.
    return row if row.id.rpartition("/")[0] else replace(row, id=f"{source.name}/{row.id}")
