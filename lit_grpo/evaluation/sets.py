"""Evaluation sets as they are written in YAML, and the sampling that each asks of the engine."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from lit_grpo.data.sources.any_file import FilePrompts
from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.data.sources.benchmarks import BENCHMARKS, BenchmarkPrompts
from lit_grpo.data.sources.jsonl import JsonlPrompts
from lit_grpo.data.template import PromptFormat
from lit_grpo.errors import UserError
from lit_grpo.evaluation.estimators import default_ks
from lit_grpo.types import Sampling
from lit_grpo.utils.bounds import Bound, check_fields
from lit_grpo.utils.spelling import nearest

LOGPROB, TOTAL = "logprob", "reward"
"""Selectors of best-of-k besides the names of rewards: mean log-probability of the tokens, and the weighted sum."""


@dataclass
class EvaluationSet:
    """Questions to evaluate on, and how; under the name of a known benchmark, ``{}`` is all that is needed.

    Attributes:
        prompts: source of the questions; None: the benchmark that the set is named after, from the hub.
        path: a file of questions instead; short for ``prompts`` with FilePrompts.
        limit: number of questions to evaluate on; None: all.
        limit_seed: seed to draw ``limit`` questions with, the same ones on every machine; None: the first ones.
        samples: number of completions of each question; None: ``data.eval_group_size``.
        greedy: True for one more completion of each question at temperature 0, reported as ``greedy``.
        sampling: how completions are drawn; None: ``data.eval_sampling``, which is greedy for one sample and as in
            training for more.
        k: the values of k for pass@k, maj@k and best@k; None: 1, 2, 4, ... and ``samples``.
        best_of: selectors for best@k: ``logprob`` (mean log-probability of the tokens), ``reward`` (the weighted sum)
            or the name of a reward; None: ``logprob`` and every reward but the one that says what is correct.
        format: how a question becomes token ids; None: ``data.format``.
    """

    prompts: PromptSource | None = None
    path: str | None = None
    limit: Annotated[int | None, Bound(least=1)] = None
    limit_seed: Annotated[int | None, Bound(least=0)] = None
    samples: Annotated[int | None, Bound(least=1)] = None
    greedy: bool = False
    sampling: Sampling | None = None
    k: Annotated[list[int] | None, Bound(least=1)] = None
    best_of: list[str] | None = None
    format: PromptFormat | None = None


@dataclass(frozen=True)
class EvaluationPart:
    """One pass over an evaluation set: the same number of completions of each question, all drawn alike."""

    set: str
    """Name of the evaluation set."""
    samples: int
    sampling: Sampling
    ks: tuple[int, ...] = (1,)
    best_of: tuple[str, ...] = ()
    greedy: bool = False
    """True for the additional completion at temperature 0 of a set that is sampled as well."""


@dataclass(frozen=True)
class ResolvedSet:
    """An evaluation set with everything decided that the YAML leaves open."""

    name: str
    where: str
    """Key of the set in the configuration, for messages."""
    source: PromptSource
    parts: tuple[EvaluationPart, ...]
    format: PromptFormat | None


class Subset(PromptSource):
    """Some rows of a source, in its order; those of a smaller limit are among those of a larger one.

    Args:
        source: the source of all rows.
        limit: number of rows; all if there are fewer.
        seed: seed that the rows are drawn with, the same on every machine; None: the first rows.
    """

    def __init__(self, source: PromptSource, limit: int, seed: int | None) -> None:
        self.source, self.limit, self.seed, self.name = source, limit, seed, source.name

    def rows(self) -> Sequence[Row]:
        rows = self.source.rows()
        if self.seed is None or self.limit >= len(rows):
            return rows[: self.limit]
        # One shuffle whatever the limit: the questions of a smaller limit are then among those of a larger one.
        order = list(range(len(rows)))
        random.Random(self.seed).shuffle(order)
        return [rows[i] for i in sorted(order[: self.limit])]

    def columns_taken(self) -> list[str]:
        return self.source.columns_taken()


def resolve_sets(
    stage: str,
    sets: Mapping[str, EvaluationSet],
    single: PromptSource | None,
    *,
    samples: int,
    sampling: Sampling | None,
    training: Sampling,
    selectors: Sequence[str],
    primary_reward: str | None,
) -> list[ResolvedSet]:
    """Decide what the YAML leaves open in all sets of a stage, in its order.

    Args:
        stage: ``val`` or ``test``, the key under ``data``.
        sets: the sets of the YAML by name.
        single: one more source, named after itself (``data.val_prompts``, ``data.test_prompts``).
        samples: number of completions of each question where a set does not say.
        sampling: ``data.eval_sampling``; None: see :class:`EvaluationSet`.
        training: how training completions are drawn.
        selectors: names of the rewards.
        primary_reward: name of the reward that says what is correct, if any does.

    Raises:
        UserError: a set without questions, two of one name, or a setting that contradicts another.
    """
    by_name = dict(sets)
    keys = {name: f"data.{stage}.{name}" for name in by_name}
    if single is not None:
        # The name becomes part of metric keys and file names.
        name = re.sub(r"[^\w.-]+", "_", single.name) or "prompts"
        if name in by_name:
            raise UserError(f"two evaluation sets are named {name!r}", where=f"data.{stage}_prompts and {keys[name]}",
                            remedy=f"list both under data.{stage}")  # fmt: skip
        by_name = {name: EvaluationSet(single), **by_name}
        keys[name] = f"data.{stage}_prompts"
    return [
        _resolve(name, settings, keys[name], samples, sampling, training, selectors, primary_reward)
        for name, settings in by_name.items()
    ]


def _resolve(
    name: str,
    settings: EvaluationSet,
    where: str,
    samples: int,
    sampling: Sampling | None,
    training: Sampling,
    selectors: Sequence[str],
    primary_reward: str | None,
) -> ResolvedSet:
    if not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"{name!r} cannot be the name of a set: its metrics are logged under it", where=where,
                        remedy="use letters, digits, _, - and .")  # fmt: skip
    count = samples if settings.samples is None else settings.samples
    check_fields(settings, where)
    resolved = settings.sampling or sampling or (training if count > 1 else replace(training, temperature=0.0))
    if count > 1 and resolved.temperature <= 0:
        raise UserError(
            f"{count} samples at temperature 0 are all the same",
            where=f"{where}.samples",
            remedy="set samples: 1, or a sampling.temperature above 0 (greedy: true adds one greedy completion)",
        )
    ks = sorted(set(settings.k or default_ks(count)))
    if ks[0] < 1 or ks[-1] > count:
        raise UserError(f"k = {ks} with {count} samples of each question", where=f"{where}.k",
                        remedy=f"keep k between 1 and samples, or raise samples to {ks[-1]}")  # fmt: skip
    best_of = _selectors(settings, where, count, selectors, primary_reward)
    parts = [EvaluationPart(name, count, resolved, tuple(ks), best_of)]
    if settings.greedy and resolved.temperature > 0:
        # top_p and top_k mean nothing at temperature 0.
        parts.append(EvaluationPart(name, 1, replace(resolved, temperature=0.0, top_p=1.0, top_k=0), greedy=True))
    return ResolvedSet(name, where, _source(name, settings, where), tuple(parts), settings.format)


def _selectors(
    settings: EvaluationSet, where: str, count: int, selectors: Sequence[str], primary_reward: str | None
) -> tuple[str, ...]:
    if settings.best_of is None:
        return (LOGPROB, *(s for s in selectors if s != primary_reward)) if count > 1 else ()
    for name in settings.best_of:
        if name not in (LOGPROB, TOTAL, *selectors):
            close = nearest(name, (LOGPROB, TOTAL, *selectors))
            remedy = f"did you mean {close}?" if close else f"one of {', '.join((LOGPROB, TOTAL, *selectors))}"
            if name in ("majority", "maj"):
                remedy = "leave it out: selection by majority is maj@k, which is always reported"
            raise UserError(f"best_of: nothing is named {name!r}", where=f"{where}.best_of", remedy=remedy)
    return tuple(dict.fromkeys(settings.best_of))


def _source(name: str, settings: EvaluationSet, where: str) -> PromptSource:
    if settings.prompts is not None and settings.path is not None:
        raise UserError("prompts and path both say where the questions come from", where=where,
                        remedy="keep one of them")  # fmt: skip
    if settings.prompts is not None:
        source = settings.prompts
    elif name in BENCHMARKS:
        source = BenchmarkPrompts(name, path=settings.path)
    elif settings.path is not None:
        # A name that does not say what kind of file it is is one of JSON.
        known = settings.path.removesuffix(".gz").endswith(FilePrompts.endings) or Path(settings.path).is_dir()
        source = FilePrompts(settings.path, name=name) if known else JsonlPrompts(settings.path, name=name)
    else:
        close = nearest(name, BENCHMARKS)
        raise UserError(
            f"the evaluation set {name!r} has no questions, and no benchmark is named so",
            where=where,
            remedy=f"did you mean {close}?"
            if close
            else "give it prompts: or path:; known by name are " + ", ".join(BENCHMARKS),
        )
    if settings.limit is None:
        if settings.limit_seed is not None:
            raise UserError("limit_seed draws nothing without limit", where=f"{where}.limit_seed")
        return source
    return Subset(source, settings.limit, settings.limit_seed)
