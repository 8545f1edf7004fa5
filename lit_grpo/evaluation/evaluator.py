"""The results of an evaluation, gathered batch by batch for each set, and the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lit_grpo.evaluation.estimators import standard_error
from lit_grpo.evaluation.grading import Graded, answer_classes, selector_scores
from lit_grpo.evaluation.metrics import AvgAtK, BestOfK, MajAtK, PassAtK, PromptMean
from lit_grpo.evaluation.sets import EvaluationPart
from lit_grpo.types import Rollout, Sampling

HEADLINE = ("reward", "pass@1")
"""Keys that are also logged as the mean over all sets, without a set's name."""
UNKNOWN = ("unscored_frac", "unjudged_frac")
"""Shares of the samples that no reward scored, and of those without a reward or a verdict; absent where they are 0."""


@dataclass
class EvaluationResult:
    """Results of an evaluation over all ranks."""

    stage: str
    """``val`` or ``test``."""
    sets: dict[str, dict[str, float]] = field(default_factory=dict)
    """Metrics of each set by its name; docs/evaluation.md lists the keys."""
    parts: dict[str, list[EvaluationPart]] = field(default_factory=dict)
    """Parts of each set by its name, which say how it was sampled."""

    def metrics(self) -> dict[str, float]:
        """Return all metrics by their logged names: ``test/gsm8k/pass@1``, and ``test/reward``, the mean over sets."""
        out = {
            f"{self.stage}/{name}/{key}": value for name, of_set in self.sets.items() for key, value in of_set.items()
        }
        for key in HEADLINE:
            values = [of_set[key] for of_set in self.sets.values() if key in of_set]
            if values:
                out[f"{self.stage}/{key}"] = sum(values) / len(values)
        return out


class Evaluator:
    """Collector of one evaluation: call ``update`` with every batch, then ``compute``, on all ranks.

    Every rank must see at least one batch of each set, which may be empty;
    :class:`lit_grpo.rollout.loader.EvaluationLoader` makes as many batches on each.

    Args:
        stage: ``val`` or ``test``.
        device: device on which ranks exchange tensors.
        best: ``best`` after the evaluation before this one. A set with the same prompts then has ``reward/change``, the
            mean change of their rewards since, and its standard error, of which the difficulty of the prompts is no
            part.
    """

    def __init__(
        self, stage: str, device: torch.device | str = "cpu", best: Mapping[str, Mapping[int, float]] | None = None
    ) -> None:
        self.stage, self.device = stage, device
        self.best: dict[str, dict[int, float]] = {name: dict(of_set) for name, of_set in (best or {}).items()}
        """Reward of each prompt, by set and by the prompt's key, in the evaluation with the best mean; greedy ones
        aside. :meth:`compute` brings it up to date."""
        self._meters: dict[tuple[str, bool], _PartMeters] = {}

    def update(self, batch: Rollout) -> list[dict[str, Any]]:
        """Add a batch, and return one record for each completion, see :func:`records`."""
        graded = graded_of(batch)
        # A batch from a loader of one's own belongs to no set, and is reported under the stage's name.
        key = graded.part.set or self.stage, graded.part.greedy
        if key not in self._meters:
            self._meters[key] = _PartMeters(batch, graded, self.device)
        self._meters[key].update(batch, graded)
        return records(batch)

    def compute(self) -> EvaluationResult:
        """Compute the results of all ranks so far; every rank must call it, since they exchange their numbers."""
        result = EvaluationResult(self.stage)
        for (name, greedy), meters in self._meters.items():
            of_set = result.sets.setdefault(name, {})
            result.parts.setdefault(name, []).append(meters.part)
            for key, value in meters.compute().items():
                of_set.setdefault(_greedy_name(key) if greedy else key, value)
            if not greedy:
                best, now = self.best.get(name, {}), meters.means.first_by_prompt
                change = _change(best, now)
                of_set |= change
                # Of other prompts nothing can be said, and the next evaluation is compared with this one.
                if change.get("reward/change", 1.0) > 0:
                    self.best[name] = now
        return result


class _PartMeters:
    """Metrics of one part of an evaluation set."""

    def __init__(self, batch: Rollout, graded: Graded, device: torch.device | str) -> None:
        self.part = graded.part
        n, ks = batch.group_size, graded.part.ks
        self.means = PromptMean(
            [
                "reward",
                *(f"reward/{name}" for name in batch.rewards),
                *("length", "truncated_frac", "no_answer_frac"),
                *UNKNOWN,
            ]
        )
        # Only what can be known: without verdicts nothing is right or wrong, without answers nothing is voted on, and
        # of a single sample avg@n and maj@k are pass@1.
        has_verdicts = graded.correct is not None
        self.pass_at_k = PassAtK(ks) if has_verdicts else None
        self.average = AvgAtK(n) if has_verdicts and n > 1 else None
        self.majority = MajAtK(ks) if has_verdicts and n > 1 and graded.answers is not None else None
        self.best_of_k = {name: BestOfK(ks, name) for name in graded.part.best_of if has_verdicts}
        self.all: list[Metric] = [self.means, *self.best_of_k.values()]
        self.all += [metric for metric in (self.pass_at_k, self.average, self.majority) if metric is not None]
        # Ranks exchange the states on this device: NCCL takes GPU tensors alone.
        for metric in self.all:
            metric.to(device)

    def update(self, batch: Rollout, graded: Graded) -> None:
        names, n = [prompt.id for prompt in batch.prompts], batch.group_size
        columns = [batch.reward, *batch.rewards.values()]
        columns += [torch.tensor([float(len(c.token_ids)) for c in batch.completions])]
        columns += [torch.tensor([float(c.truncated) for c in batch.completions])]
        # NaN is left out of a mean, while a 0 would say that every completion has an answer.
        unknown = torch.full((len(batch.completions),), math.nan)
        scored, judged = batch.scored, judged_rows(batch)
        no_answer = unknown if batch.no_answer is None else batch.no_answer.double()
        columns += [no_answer if judged is None else no_answer.where(judged, math.nan)]
        for known in (scored, judged):
            columns += [torch.zeros(len(batch.completions)) if known is None else (~known).double()]
        self.means.update(torch.stack([_by_prompt(column, n) for column in columns], 1), names)
        if self.pass_at_k is None or graded.correct is None:
            return
        correct = graded.correct.view(-1, n)
        known = None if judged is None else judged.view(-1, n)
        self.pass_at_k.update(correct, names, known)
        if self.average is not None:
            self.average.update(correct, names, known)
        if self.majority is not None and graded.answers is not None:
            self.majority.update(correct, answer_classes(graded.correct, graded.answers, n), names, known)
        for selector, metric in self.best_of_k.items():
            metric.update(correct, selector_scores(batch, selector), names, known)

    def compute(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for metric in self.all:
            values |= {key: float(value) for key, value in metric.compute().items()}
        for key in UNKNOWN:
            # As a rule every sample has its score, and nothing is said of it.
            if values[key] == 0:
                del values[key], values[f"{key}/se"]
        # What was not measured is left out, never reported as a number.
        return {key: value for key, value in values.items() if not math.isnan(value)}


def _change(before: Mapping[int, float], now: Mapping[int, float]) -> dict[str, float]:
    """Compare the rewards of the same prompts; nothing where they are others."""
    if len(now) < 2 or before.keys() != now.keys():
        return {}
    changes = np.array([now[key] - before[key] for key in sorted(now)])
    # NaN is the reward of a prompt whose samples all went unscored.
    changes = changes[~np.isnan(changes)]
    if len(changes) < 2:
        return {}
    return {"reward/change": float(changes.mean()), "reward/change/se": standard_error(changes)}


def _by_prompt(values: Tensor, group_size: int) -> Tensor:
    """Return the mean of each prompt's values; NaN is left out, and the mean over nothing."""
    groups = values.double().view(-1, group_size)
    return groups.nanmean(1) if bool(groups.isnan().any()) else groups.mean(1)


def judged_rows(batch: Rollout) -> Tensor | None:
    """Return the completions that have a reward and a verdict, [N] bool; None where all have."""
    known = [flags for flags in (batch.scored, batch.judged) if flags is not None]
    return torch.stack(known).all(0) if known else None


def _greedy_name(key: str) -> str:
    """Name a metric of the greedy completion: its ``pass@1`` is ``greedy``, its length ``greedy/length``."""
    return key.replace("pass@1", "greedy") if key.startswith("pass@1") else f"greedy/{key}"


def graded_of(batch: Rollout) -> Graded:
    """Return the grades that the loader has put into a batch; of a batch from a loader of one's own its verdicts."""
    if isinstance(batch.evaluation, Graded):
        return batch.evaluation
    part = EvaluationPart("", batch.group_size, Sampling(temperature=batch.temperature), tuple({1, batch.group_size}))
    return Graded(part, batch.correct, None, [])


def records(batch: Rollout) -> list[dict[str, Any]]:
    """Return one record of plain values for each completion: what is saved of an evaluation."""
    graded, size, judged = graded_of(batch), batch.group_size, judged_rows(batch)
    out = []
    for i, text in enumerate(batch.texts):
        prompt, completion = batch.prompts[i // size], batch.completions[i]
        out.append(
            {
                "id": prompt.id,
                "set": graded.part.set,
                "sample": i % size,
                "greedy": graded.part.sampling.temperature <= 0,
                "seed": graded.seeds[i] if graded.seeds else None,
                "question": prompt.question,
                "answer": prompt.answer_column,
                "completion": text,
                "final_answer": None if graded.answers is None else graded.answers[i],
                # What no reward scored or judged has null there: JSON has no NaN, and 0 and false are verdicts.
                "correct": None
                if graded.correct is None or not (judged is None or judged[i])
                else bool(graded.correct[i]),
                "reward": _number(batch.reward[i]),
                "rewards": {name: _number(values[i]) for name, values in batch.rewards.items()},
                "finish_reason": completion.finish_reason,
                "tokens": len(completion.token_ids),
                "logprob": _mean(completion.logprobs),
            }
        )
    return out


def _number(value: Tensor) -> float | None:
    return None if value.isnan() else float(value)


def _mean(values: Sequence[float]) -> float | None:
    mean = sum(values) / len(values) if values else math.nan
    return mean if math.isfinite(mean) else None
