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


def majority(sizes: Sequence[int], shares: Sequence[float], unanswered: int, ks: Sequence[int]) -> list[float]:
    """Compute the chance that the answer with the most votes among k of the samples is right, for each k.

    This is self-consistency, 2203.11171, with the mean over all subsets in place of one draw. Every answer with the
    most votes is equally likely to be chosen, so each counts by its share. Samples without an answer take a place among
    the k and have no vote; where no sample of the k has an answer, the result is wrong.

    For a right answer with v of the k votes, the ways to choose the other k - v samples are counted so that no answer
    has more than v of them, by how many have exactly v: those tie.

    Args:
        sizes: number of samples that give each distinct answer, all at least 1.
        shares: share of each answer's samples that were graded correct, 0 or 1 unless the verifier contradicts itself.
        unanswered: number of samples without an answer.
        ks: numbers of samples, each between 1 and n = sum(sizes) + unanswered.

    Raises:
        UserError: a k out of range.
    """
    n = sum(sizes) + unanswered
    _check(n, ks)
    max_k = max(ks)
    # By subset size: number of subsets whose vote is right, ties by their share. Floats: counts exceed 64 bits.
    right_subsets = np.zeros(max_k + 1)
    for index, (size, share) in enumerate(zip(sizes, shares, strict=True)):
        # A wrong answer adds nothing, and most answers are wrong.
        if not share:
            continue
        others = [*sizes[:index], *sizes[index + 1 :]]
        for votes in range(1, min(size, max_k) + 1):
            remaining = max_k - votes
            # Answers with fewer samples than votes can neither win nor tie, and neither can samples without an answer:
            # which of them is chosen makes no difference, so all are counted together.
            harmless = unanswered + sum(other for other in others if other < votes)
            # [answers that tie, samples chosen]
            ways = np.zeros((remaining // votes + 1, remaining + 1))
            ways[0] = [comb(harmless, chosen) for chosen in range(remaining + 1)]
            for other in others:
                if other >= votes:
                    ways = _with_answer(ways, other, votes)
            tied = 1.0 + np.arange(len(ways))
            right_subsets[votes:] += share * comb(size, votes) * (ways / tied[:, None]).sum(0)
    return [float(right_subsets[k] / comb(n, k)) for k in ks]


def _with_answer(ways: np.ndarray, size: int, votes: int) -> np.ndarray:
    """Return ``ways`` with 0 to ``votes`` samples of one more answer, which has ``size``, among the chosen."""
    remaining = ways.shape[1] - 1
    # Into a copy: of this answer's samples one number is chosen, never several in a row.
    after = ways.copy()
    for chosen in range(1, min(votes - 1, remaining) + 1):
        after[:, chosen:] += comb(size, chosen) * ways[:, : remaining + 1 - chosen]
    # With exactly as many votes it ties: one row further.
    if votes <= remaining:
        after[1:, votes:] += comb(size, votes) * ways[:-1, : remaining + 1 - votes]
    return after


def best_of_k(scores: Sequence[float], correct: Sequence[float], ks: Sequence[int]) -> list[float]:
    """Compute the chance that the sample with the highest score among k is right, for each k.

    With the samples sorted, the best of a k-subset is at a level in C(up to it, k) - C(below it, k) of the C(n, k)
    subsets. Samples of equal score are equally likely to be chosen. NaN is the lowest score.

    Args:
        scores: score of each sample by the selector.
        correct: 1 for a right sample, 0 for a wrong one.
        ks: numbers of samples, each between 1 and n.

    Raises:
        UserError: a k out of range.
    """
    n = len(scores)
    _check(n, ks)
    levels: dict[float, list[float]] = {}
    for score, right in zip(scores, correct, strict=True):
        # NaN equals nothing, itself included, and could be neither sorted nor grouped.
        levels.setdefault(-math.inf if math.isnan(score) else float(score), []).append(float(right))
    out = [0.0] * len(ks)
    below = 0
    for score in sorted(levels):
        members = levels[score]
        for i, k in enumerate(ks):
            chosen = comb(below + len(members), k) - comb(below, k)
            out[i] += chosen / comb(n, k) * sum(members) / len(members)
        below += len(members)
    return out


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Compute the standard error of a mean over prompts: std(ddof 1) / sqrt(prompts); NaN for fewer than two.

    The samples of a prompt are not independent, their prompts are: the error is clustered by prompt, and holds the
    choice of prompts and of samples together (2411.00640, section 2.2).
    """
    array = np.asarray(values, dtype=np.float64)
    return float(array.std(ddof=1) / math.sqrt(len(array))) if len(array) > 1 else math.nan


def default_ks(samples: int) -> list[int]:
    """Return the powers of two up to ``samples``, and ``samples`` itself."""
    return sorted({samples} | {2**i for i in range(samples.bit_length()) if 2**i <= samples})


def _check(n: int, ks: Sequence[int]) -> None:
    for k in ks:
        if not 1 <= k <= n:
            raise UserError(f"k = {k} needs between 1 and n = {n} samples", remedy="draw more samples or lower k")
