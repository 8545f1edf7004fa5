"""Estimators against values by hand and against all subsets; standard errors against closed forms and a bootstrap."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.errors import UserError
from lit_grpo.evaluation.estimators import best_of_k, default_ks, majority, pass_at_k, standard_error
from tests.evaluation.votes import maj_at_k

ANSWERS = st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8)


def enumerated_majority(answers: list[str | None], shares: dict[str, float], k: int) -> float:
    """The rule, said once more and slowly: of each k-subset, a mean over the answers with the most votes."""
    wins = []
    for subset in combinations(answers, k):
        votes = Counter(answer for answer in subset if answer is not None)
        top = [answer for answer, count in votes.items() if count == max(votes.values())]
        wins.append(sum(shares[answer] for answer in top) / len(top) if top else 0.0)
    return sum(wins) / len(wins)


def test_pass_at_k_by_hand() -> None:
    # 4 samples, 1 right: half of the pairs hold it. 5 samples, 2 right: 1 - C(3,2)/C(5,2) = 1 - 3/10.
    assert pass_at_k(4, 1, 2) == pytest.approx(1 / 2)
    assert pass_at_k(5, 2, 2) == pytest.approx(7 / 10)
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    assert pass_at_k(5, 2, 4) == 1


def test_majority_by_hand() -> None:
    # a a b, a right. Pairs: aa wins; ab twice, tied, half each: (1 + 1/2 + 1/2) / 3. All three: a wins.
    assert maj_at_k(["a", "a", "b"], "a", 2) == pytest.approx(2 / 3)
    assert maj_at_k(["a", "a", "b"], "a", 3) == 1
    # a b c: each subset of three ties three ways.
    assert maj_at_k(["a", "b", "c"], "a", 3) == pytest.approx(1 / 3)
    # The right answer is outvoted: pairs of a b b are ab, ab, bb.
    assert maj_at_k(["a", "b", "b"], "a", 2) == pytest.approx(1 / 3)
    assert maj_at_k(["a", "b", "b"], "a", 3) == 0


def test_missing_answers_take_a_place_and_have_no_vote() -> None:
    assert maj_at_k([None, None, "x"], "x", 3) == 1
    assert maj_at_k([None, None, "x"], "x", 1) == pytest.approx(1 / 3)
    assert maj_at_k([None, None], "x", 2) == 0
    assert maj_at_k(["y"], "x", 1) == 0


@settings(max_examples=150, deadline=None)
@given(answers=ANSWERS, data=st.data())
def test_majority_equals_enumeration(answers: list[str | None], data: st.DataObject) -> None:
    # Several right answers, and some that the verifier contradicts itself on.
    shares = {answer: data.draw(st.sampled_from([0.0, 0.25, 1.0])) for answer in "abcd"}
    sizes = Counter(answers)
    silent = sizes.pop(None, 0)
    ks = list(range(1, len(answers) + 1))
    got = majority(list(sizes.values()), [shares[str(a)] for a in sizes], silent, ks)
    assert got == pytest.approx([enumerated_majority(answers, shares, k) for k in ks], abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(correct=st.lists(st.booleans(), min_size=1, max_size=8))
def test_pass_at_k_equals_enumeration(correct: list[bool]) -> None:
    for k in range(1, len(correct) + 1):
        subsets = list(combinations(correct, k))
        want = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(want, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(samples=st.lists(st.tuples(st.sampled_from([math.nan, -1.0, 0.5, 2.0]), st.booleans()), min_size=1, max_size=7))
def test_best_of_k_equals_enumeration(samples: list[tuple[float, bool]]) -> None:
    def key(score: float) -> float:
        return -math.inf if math.isnan(score) else score

    ks = list(range(1, len(samples) + 1))
    want = []
    for k in ks:
        wins = []
        for subset in combinations(samples, k):
            top = [right for score, right in subset if key(score) == max(key(s) for s, _ in subset)]
            wins.append(sum(top) / len(top))
        want.append(sum(wins) / len(wins))
    assert best_of_k([s for s, _ in samples], [float(c) for _, c in samples], ks) == pytest.approx(want, abs=1e-12)


def test_selectors_at_their_limits() -> None:
    """An oracle gives pass@k, a selector that says nothing gives pass@1, and k = 1 leaves nothing to select."""
    correct = [1.0, 0.0, 0.0, 1.0, 0.0]
    ks = [1, 2, 3, 4, 5]
    assert best_of_k(correct, correct, ks) == pytest.approx([pass_at_k(5, 2, k) for k in ks])
    assert best_of_k([7.0] * 5, correct, ks) == pytest.approx([2 / 5] * 5)
    assert best_of_k([1, 2, 3, 4, 5], correct, [1, 5]) == pytest.approx([2 / 5, 0])


def test_many_samples_stay_exact_and_quick() -> None:
    from fractions import Fraction

    sizes, n = [20, 10, 10, 5, *[1] * 80], 128
    got = majority(sizes, [1.0, *[0.0] * 83], 3, [1, n])
    assert got == pytest.approx([20 / n, 1.0], abs=1e-12)
    # Two answers of 60 and 40 samples: v right votes of k = 21 win if v > 10, and never tie.
    total = sum(Fraction(math.comb(60, v) * math.comb(40, 21 - v), math.comb(100, 21)) for v in range(11, 22))
    assert majority([60, 40], [1.0, 0.0], 0, [21]) == pytest.approx([float(total)], rel=1e-12)


def test_a_k_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match="k = 3 needs between 1 and n = 2"):
        maj_at_k(["a", "b"], "a", 3)
    with pytest.raises(UserError, match="k = 0"):
        best_of_k([1.0], [1.0], [0])


def test_default_ks() -> None:
    assert default_ks(1) == [1]
    assert default_ks(8) == [1, 2, 4, 8]
    assert default_ks(12) == [1, 2, 4, 8, 12]


def test_standard_error_closed_form_and_bootstrap() -> None:
    # 3 of 4 prompts right with one sample each: sqrt(p (1-p) / (n-1)).
    assert standard_error([1, 1, 1, 0]) == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert math.isnan(standard_error([1.0]))
    rng = np.random.default_rng(0)
    rates = rng.beta(0.5, 1.5, size=200)
    correct = rng.random((200, 8)) < rates[:, None]
    values = np.array([pass_at_k(8, int(c), 4) for c in correct.sum(1)])
    resampled = values[rng.integers(0, 200, size=(4000, 200))].mean(1)
    assert standard_error(values) == pytest.approx(resampled.std(), rel=0.05)
    # Samples of a prompt are alike: an error that took all 1,600 for independent would be far too small.
    naive = math.sqrt(correct.mean() * (1 - correct.mean()) / correct.size)
    assert standard_error(correct.mean(1)) > 1.5 * naive
