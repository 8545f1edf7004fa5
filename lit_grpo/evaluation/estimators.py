"""Unbiased estimates from n samples of one prompt of what k samples would give, and their standard errors.

Each is the exact mean over all k-subsets of the n samples, counted and not enumerated, so nothing is drawn at random:
the expectation is that of k fresh samples, whatever n is. Plain Python and numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import comb

import numpy as np

from lit_grpo.errors import UserError
from lit_grpo.objectives.pass_at_k import pass_at_k

__all__ = ["best_of_k", "default_ks", "majority", "pass_at_k", "standard_error"]


def majority(sizes: Sequence[int], shares: Sequence[float], silent: int, ks: Sequence[int]) -> list[float]:
    """Chance that the answer with the most votes among k of the samples is right, for each k.

    Rule for ties: every answer with the most votes is equally likely to be chosen, so each counts by its share. Samples
    without an answer take a place among the k and have no vote; where no sample of the k has one, the result is wrong.
    Self-consistency, 2203.11171, with the mean over all subsets in place of one draw.

    For a right answer with v of the k votes, the ways to choose the other k - v samples are counted so that no answer
    has more than v of them, by how many have exactly v: those tie.

    Args:
        sizes: number of samples that give each distinct answer, all at least 1.
        shares: share of each answer's samples that were judged correct, 0 or 1 unless the judge contradicts itself.
        silent: samples without an answer.
        ks: numbers of samples, each between 1 and n = sum(sizes) + silent.

    Raises:
        UserError: a k out of range.
    """
    n = sum(sizes) + silent
    _check(n, ks)
    most = max(ks)
    good = np.zeros(most + 1)  # summed over subsets, by their size
    for place, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        if not share:
            continue
        others = [*sizes[:place], *sizes[place + 1 :]]
        for votes in range(1, min(size, most) + 1):
            room = most - votes
            # Answers with fewer samples than that can neither win nor tie: they are all alike, as are the silent.
            harmless = silent + sum(other for other in others if other < votes)
            ways = np.zeros((room // votes + 1, room + 1))  # [answers that tie, samples chosen]
            ways[0] = [comb(harmless, chosen) for chosen in range(room + 1)]
            for other in others:
                if other >= votes:
                    ways = _with_answer(ways, other, votes)
            tied = 1.0 + np.arange(len(ways))
            good[votes:] += share * comb(size, votes) * (ways / tied[:, None]).sum(0)
    return [float(good[k] / comb(n, k)) for k in ks]


def _with_answer(ways: np.ndarray, size: int, votes: int) -> np.ndarray:
    """``ways`` after one more answer of ``size`` samples has been dealt 0 to ``votes`` places."""
    room = ways.shape[1] - 1
    after = ways.copy()
    for more in range(1, min(votes - 1, room) + 1):
        after[:, more:] += comb(size, more) * ways[:, : room + 1 - more]
    if votes <= room:
        after[1:, votes:] += comb(size, votes) * ways[:-1, : room + 1 - votes]
    return after


def best_of_k(scores: Sequence[float], correct: Sequence[float], ks: Sequence[int]) -> list[float]:
    """Chance that the sample with the highest score among k is right, for each k: best-of-n selection by a score.

    With the samples sorted, the best of a k-subset is at a level in C(up to it, k) - C(below it, k) of the C(n, k)
    subsets. Rule for ties: samples of equal score are equally likely to be chosen. NaN is the lowest score.

    Args:
        scores: what the selector says of each sample.
        correct: 1 for a right sample, 0 for a wrong one.
        ks: numbers of samples, each between 1 and n.

    Raises:
        UserError: a k out of range.
    """
    n = len(scores)
    _check(n, ks)
    levels: dict[float, list[float]] = {}
    for score, right in zip(scores, correct, strict=True):
        levels.setdefault(-math.inf if math.isnan(score) else float(score), []).append(float(right))
    out = [0.0] * len(ks)
    below = 0
    for score in sorted(levels):
        members = levels[score]
        for place, k in enumerate(ks):
            chosen = comb(below + len(members), k) - comb(below, k)
            out[place] += chosen / comb(n, k) * sum(members) / len(members)
        below += len(members)
    return out


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Of the mean of independent values, here one a prompt: std(ddof 1) / sqrt(prompts); NaN for fewer than two.

    The samples of a prompt are not independent, their prompts are: the error is clustered by prompt, and holds the
    choice of prompts and of samples together (2411.00640, section 2.2).
    """
    array = np.asarray(values, dtype=np.float64)
    return float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else math.nan


def default_ks(samples: int) -> list[int]:
    """1, 2, 4, ... and ``samples`` itself."""
    return sorted({samples} | {2**i for i in range(samples.bit_length()) if 2**i <= samples})


def _check(n: int, ks: Sequence[int]) -> None:
    for k in ks:
        if not 1 <= k <= n:
            raise UserError(f"k = {k} needs between 1 and n = {n} samples", remedy="draw more samples or lower k")
