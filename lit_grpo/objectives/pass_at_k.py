"""pass@k and maj@k: exact values from n samples of a problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import comb

from lit_grpo.errors import UserError


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them correct, hold a correct one: 1 - C(n-c, k)/C(n, k). 2107.03374 Eq. 1.

    Raises:
        UserError: fewer samples than k.
    """
    _check(n, k)
    if not 0 <= c <= n:
        raise UserError(f"{c} correct of {n} samples is not possible")
    return 1.0 if n - c < k else 1 - comb(n - c, k) / comb(n, k)


def maj_at_k(answers: Sequence[Hashable | None], correct: Hashable, k: int, *, none_votes: bool = False) -> float:
    """Chance that the most frequent answer of k of the samples is correct, over all k-subsets; ties are split evenly.

    Counted, not enumerated: for each number of correct votes, the ways to draw the others so that none has more.

    Args:
        answers: one parsed answer per sample; None where there is none.
        correct: the right answer.
        k: votes.
        none_votes: let unparsable answers vote as one class; by default they take a place but have no vote.

    Raises:
        UserError: fewer samples than k.
    """
    _check(len(answers), k)
    sizes = Counter(answers)
    silent = 0 if none_votes else sizes.pop(None, 0)
    right = sizes.pop(correct, 0)
    wanted = 0.0
    for votes in range(1, min(right, k) + 1):
        # ways[(drawn, tied)]: choices of the other samples with at most ``votes`` of each answer
        ways = {(drawn, 0): comb(silent, drawn) for drawn in range(min(silent, k - votes) + 1)}
        for size in sizes.values():
            step: dict[tuple[int, int], int] = {}
            for (drawn, tied), number in ways.items():
                for more in range(min(size, votes, k - votes - drawn) + 1):
                    key = (drawn + more, tied + (more == votes))
                    step[key] = step.get(key, 0) + number * comb(size, more)
            ways = step
        good = sum(number / (tied + 1) for (drawn, tied), number in ways.items() if drawn == k - votes)
        wanted += comb(right, votes) * good
    return wanted / comb(len(answers), k)


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise UserError(f"k = {k} needs between 1 and n = {n} samples", remedy="draw more samples or lower k")
