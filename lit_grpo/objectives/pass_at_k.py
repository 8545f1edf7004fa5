"""pass@k: the exact value from n samples of a problem."""

from __future__ import annotations

from math import comb

from lit_grpo.errors import UserError


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that k of n samples, c of them correct, hold a correct one. 2107.03374 Eq. 1.

    It is 1 - C(n-c, k)/C(n, k).

    Raises:
        UserError: there are fewer samples than k, or fewer than are correct.
    """
    if not 1 <= k <= n:
        raise UserError(f"k = {k} needs between 1 and n = {n} samples", remedy="draw more samples or lower k")
    if not 0 <= c <= n:
        raise UserError(f"{c} correct of {n} samples is not possible")
    return 1.0 if n - c < k else 1 - comb(n - c, k) / comb(n, k)
