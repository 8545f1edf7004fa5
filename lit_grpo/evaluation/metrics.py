"""The metrics pass@k, maj@k, avg@k and best-of-k for torchmetrics: exact over ranks, with standard errors.

Each rank keeps the estimates of its own prompts. ``compute`` gathers all rows, whatever number each rank has, and
leaves out a prompt that is there twice (a distributed sampler repeats prompts to make shards even), so the result is
that of one process.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from lit_grpo.errors import UserError
from lit_grpo.evaluation.estimators import best_of_k, majority, pass_at_k, standard_error


class PromptMean(Metric):
    """Means over prompts of named values, with standard errors; the base class of the other metrics.

    ``compute`` gives ``{name: mean, name + "/se": standard error}`` as float64 scalars, and the number of ``prompts``;
    values that are NaN for a prompt are left out of their mean, and a mean over nothing is NaN.

    Args:
        names: names of the values that each prompt has.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    # The rows of a batch do not depend on earlier ones, so forward() need not update twice.
    full_state_update = False
    is_differentiable = False
    prompt_keys: list[Tensor]
    prompt_values: list[Tensor]

    def __init__(self, names: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.names = list(names)
        self.first_by_prompt: dict[int, float] = {}
        """The first value of each prompt of all ranks, by the prompt's key; as of the last ``compute``."""
        self.add_state("prompt_keys", default=[], dist_reduce_fx="cat")
        self.add_state("prompt_values", default=[], dist_reduce_fx="cat")

    def update(self, values: Tensor, prompts: Sequence[str]) -> None:
        """Add prompts.

        Args:
            values: [prompts, names], one row a prompt.
            prompts: ids of the prompts; one that was seen before is not counted again.
        """
        self._add(values, prompts)

    def _add(self, values: Tensor, prompts: Sequence[str]) -> None:
        if values.shape != (len(prompts), len(self.names)):
            raise ValueError(f"{tuple(values.shape)} values for {len(prompts)} prompts x {len(self.names)} names")
        keys = torch.tensor([_key(prompt) for prompt in prompts], dtype=torch.int64)
        self.prompt_keys.append(keys.to(self.device))
        # The rows themselves are kept, not sums: only then can a prompt that two ranks hold be counted once.
        self.prompt_values.append(values.detach().double().to(self.device))

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        # A rank without prompts must bring a tensor of the others' shape and type to the exchange.
        if not self.prompt_keys:
            self.prompt_keys.append(torch.zeros(0, dtype=torch.int64, device=self.device))
            self.prompt_values.append(torch.zeros(0, len(self.names), dtype=torch.float64, device=self.device))
        super()._sync_dist(*args, **kwargs)

    def rows(self) -> np.ndarray:
        """Return the values of the distinct prompts, [prompts, names]; inside ``compute`` those of all ranks."""
        return self._keyed_rows()[1]

    def _keyed_rows(self) -> tuple[np.ndarray, np.ndarray]:
        keys, values = _joined(self.prompt_keys), _joined(self.prompt_values)
        if not len(keys):
            return np.zeros(0, dtype=np.int64), np.zeros((0, len(self.names)))
        # In the order of the keys, so that sums are rounded alike however prompts are spread over ranks.
        distinct, first = np.unique(keys.numpy(), return_index=True)
        rows: np.ndarray = values.numpy()[first]
        return distinct, rows

    def compute(self) -> dict[str, Tensor]:
        keys, rows = self._keyed_rows()
        self.first_by_prompt = dict(zip(keys.tolist(), rows[:, 0].tolist(), strict=True))
        out: dict[str, Tensor] = {"prompts": torch.tensor(float(len(rows)), dtype=torch.float64)}
        for i, name in enumerate(self.names):
            column = rows[:, i]
            # NaN means that nothing was measured for the prompt, which neither the mean nor its error then counts.
            column = column[~np.isnan(column)]
            mean = float(column.mean()) if len(column) else float("nan")
            out[name] = torch.tensor(mean, dtype=torch.float64)
            out[f"{name}/se"] = torch.tensor(standard_error(column), dtype=torch.float64)
        return out


class _SampleMetric(PromptMean):
    """Base class of the metrics that are estimated from n samples of each prompt."""

    higher_is_better = True
    label = ""

    def __init__(self, ks: Sequence[int], **kwargs: Any) -> None:
        if not ks or min(ks) < 1:
            raise UserError(f"k is {list(ks)}", where=f"{type(self).__name__}.ks", remedy="give numbers from 1")
        self.ks = sorted(set(ks))
        super().__init__([self.label.format(k=k) for k in self.ks], **kwargs)

    def _up_to(self, n: int, total: int, estimate: Callable[[Sequence[int]], list[float]]) -> list[float]:
        """Return the estimates for each k; NaN, which no mean counts, for those above the ``n`` samples that count.

        A k above ``total``, the samples that were drawn, is left to the estimate, which refuses it.
        """
        known = [k for k in self.ks if k <= n or k > total]
        return (estimate(known) if known else []) + [math.nan] * (len(self.ks) - len(known))

    def _add_rows(self, rows: list[list[float]], prompts: Sequence[str]) -> None:
        self._add(torch.tensor(rows, dtype=torch.float64).view(len(rows), len(self.ks)), prompts)


class PassAtK(_SampleMetric):
    """pass@k: the chance that at least one of k samples is right. Unbiased: 1 - C(n-c, k)/C(n, k), 2107.03374 Eq. 1.

    ``compute`` gives ``pass@k`` and ``pass@k/se``.

    Args:
        ks: numbers of samples, each at most n.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    label = "pass@{k}"

    def update(self, correct: Tensor, prompts: Sequence[str], judged: Tensor | None = None) -> None:
        """Add prompts.

        Args:
            correct: [prompts, n] bool.
            prompts: ids of the prompts.
            judged: samples that count, [prompts, n] bool; None: all. A prompt with fewer than k of them says nothing
                of k.
        """
        known = torch.ones_like(correct, dtype=torch.bool) if judged is None else judged
        hits, numbers = (correct.bool() & known).sum(1).tolist(), known.sum(1).tolist()
        total, pairs = correct.shape[1], zip(numbers, hits, strict=True)
        self._add_rows([self._up_to(n, total, partial(_pass_at_ks, n, c)) for n, c in pairs], prompts)


class AvgAtK(_SampleMetric):
    """avg@n: the share of right samples, mean over prompts; its expectation is that of pass@1.

    ``compute`` gives ``avg@n`` and ``avg@n/se``.

    Args:
        n: samples of each prompt.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    label = "avg@{k}"

    def __init__(self, n: int, **kwargs: Any) -> None:
        super().__init__([n], **kwargs)

    def update(self, correct: Tensor, prompts: Sequence[str], judged: Tensor | None = None) -> None:
        """Add prompts; ``correct`` is [prompts, n] bool, and so is ``judged``, the samples that count; None: all."""
        if correct.shape[1] != self.ks[0]:
            raise ValueError(f"{correct.shape[1]} samples of each prompt, expected {self.ks[0]}")
        # 0 / 0 is NaN, and a prompt without a verdict so no part of the mean.
        right = correct.double() if judged is None else correct.double().where(judged, math.nan)
        self._add(right.mean(1, keepdim=True) if judged is None else right.nanmean(1, keepdim=True), prompts)


class MajAtK(_SampleMetric):
    """maj@k: the chance that the most frequent answer of k samples is right.

    Exact over all k-subsets, ties split evenly among the answers that tie, see
    :func:`lit_grpo.evaluation.estimators.majority`. ``compute`` gives ``maj@k`` and ``maj@k/se``.

    Args:
        ks: numbers of samples, each at most n.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    label = "maj@{k}"

    def update(  # type: ignore[override]
        self, correct: Tensor, classes: Tensor, prompts: Sequence[str], judged: Tensor | None = None
    ) -> None:
        """Add prompts.

        Args:
            correct: [prompts, n] bool.
            classes: [prompts, n] int64, equal where the answers of a prompt are; negative where there is none.
            prompts: ids of the prompts.
            judged: samples that count, [prompts, n] bool; None: all.
        """
        rows = []
        for i in range(len(prompts)):
            right, given = _counting(correct[i], judged, i), _counting(classes[i], judged, i)
            members: dict[int, list[float]] = {}
            for hit, answer in zip(right, given, strict=True):
                if answer >= 0:
                    members.setdefault(answer, []).append(float(hit))
            sizes = [len(hits) for hits in members.values()]
            shares = [sum(hits) / len(hits) for hits in members.values()]
            unanswered = len(given) - sum(sizes)
            rows.append(self._up_to(len(given), classes.shape[1], partial(majority, sizes, shares, unanswered)))
        self._add_rows(rows, prompts)


class BestOfK(_SampleMetric):
    """best@k: the chance that the sample with the highest score among k is right.

    Exact over all k-subsets, samples of equal score equally likely, see
    :func:`lit_grpo.evaluation.estimators.best_of_k`. ``compute`` gives ``best@k/<selector>`` and its ``/se``.

    Args:
        ks: numbers of samples, each at most n.
        selector: name of the score.
        kwargs: arguments of :class:`torchmetrics.Metric`.
    """

    def __init__(self, ks: Sequence[int], selector: str, **kwargs: Any) -> None:
        self.label = f"best@{{k}}/{selector}"
        super().__init__(ks, **kwargs)

    def update(  # type: ignore[override]
        self, correct: Tensor, scores: Tensor, prompts: Sequence[str], judged: Tensor | None = None
    ) -> None:
        """Add prompts.

        Args:
            correct: [prompts, n] bool.
            scores: [prompts, n]; NaN is the lowest.
            prompts: ids of the prompts.
            judged: samples that count, [prompts, n] bool; None: all.
        """
        rows = []
        for i in range(len(prompts)):
            given, right = _counting(scores[i], judged, i), _counting(correct[i], judged, i)
            rows.append(self._up_to(len(given), scores.shape[1], partial(best_of_k, given, right)))
        self._add_rows(rows, prompts)


def _pass_at_ks(n: int, correct: int, ks: Sequence[int]) -> list[float]:
    return [pass_at_k(n, correct, k) for k in ks]


def _counting(values: Tensor, judged: Tensor | None, prompt: int) -> list[Any]:
    """Return the values, [n], of one prompt's samples that count."""
    return list((values if judged is None else values[judged[prompt]]).tolist())


def _key(prompt: str) -> int:
    """Hash a prompt's id to a number that is equal in every process."""
    # A number, because ranks can exchange tensors but no text. Not hash(), which Python salts in each process. Shifted,
    # since torch's int64 has a sign.
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=8).digest(), "big") >> 1


def _joined(rows: list[Tensor] | Tensor) -> Tensor:
    # Once ranks have exchanged it, torchmetrics leaves one tensor in place of the list.
    if isinstance(rows, Tensor):
        return rows.cpu()
    return torch.cat(rows).cpu() if rows else torch.zeros(0)
