"""The tests of a change hold what they promise: values counted by hand, and false alarms below the stated rate."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from lit_grpo.callbacks.monitors import statistics
from lit_grpo.callbacks.monitors.history import History


def test_the_bound_is_the_quantile_of_students_t():
    # Tables of the normal and of Student's t.
    assert statistics.bound(1000, 1, 10**6) == pytest.approx(3.0902, abs=1e-3)
    assert statistics.bound(1000, 1, 20) == pytest.approx(3.5518, abs=0.01)
    assert statistics.bound(2000, 1, 30) == pytest.approx(3.6460, abs=0.01)
    assert statistics.bound(100, 10, 10**6) == statistics.bound(1000, 1, 10**6), "ten comparisons in each look"


def test_the_noise_is_that_of_single_values_and_no_trend_or_jump_is_part_of_it():
    draw = random.Random(0)
    still = [draw.gauss(0, 1) for _ in range(80)]
    assert statistics.noise(still) == pytest.approx(1, rel=0.25)
    assert statistics.noise([v + 0.05 * i for i, v in enumerate(still)]) == pytest.approx(
        statistics.noise(still), rel=0.1
    )
    jumped = [v + 20 * (i > 40) for i, v in enumerate(still)]
    assert statistics.noise(jumped) == pytest.approx(statistics.noise(still), rel=0.25)
    assert statistics.noise([3.0] * 80) == 0
    # By an independent loop: without the largest difference, corrected for its absence.
    short = [0.0, 1.0, 0.0, 2.0]
    kept = sorted((b - a) ** 2 for a, b in pairwise(short))[:-1]
    assert statistics.noise(short) == pytest.approx(math.sqrt(sum(kept) / 2 / 2 * (1 + 4 / 3)))


def test_rewards_of_a_single_prompt_have_noise_though_most_neighbours_are_equal():
    """A median of the differences would be 0, and every fall beyond all doubt."""
    draw = random.Random(1)
    values = [float(draw.random() > 0.2) for _ in range(80)]
    assert 0.3 < statistics.noise(values) < 0.6, "0.4 is right"


def test_values_that_hang_together_have_more_noise_than_their_neighbours_say():
    draw = random.Random(2)
    estimates = []
    for _ in range(50):
        value, values = 0.0, []
        for _ in range(80):
            value = 0.6 * value + draw.gauss(0, 0.8)
            values.append(value)
        steps = [b - a for a, b in pairwise(values)]
        estimates.append(statistics.noise(values) / math.sqrt(sum(s * s for s in steps) / len(steps) / 2))
    assert sum(estimates) / len(estimates) > 1.3


def test_a_fall_is_measured_from_the_best_window_and_a_rise_from_the_worst():
    values = [0.0, 4.0, 5.0, 3.0, 1.0, 0.0]
    found = statistics.fall(values, 2, 2)
    assert (found.before, found.now, found.place, found.share) == (4.5, 0.5, 2, pytest.approx(8 / 9))
    assert found.errors == pytest.approx(4 / (statistics.noise(values) * 1))
    assert statistics.rise([-v for v in values], 2, 2)[:4] == (-4.5, -0.5, found.errors, 2)
    assert statistics.fall(values[:3], 2, 2) == statistics.NO_CHANGE


@pytest.mark.parametrize("shift", [0.0, -0.5, -1.0, -3.0])
def test_a_fall_has_a_share_on_scales_that_go_below_nothing(shift):
    """A reward from -1 to 1 has its nothing at -1: half of what there was is lost, wherever 0 lies."""
    values = [0.0 + shift] * 2 + [1.0 + shift] * 6 + [0.5 + shift] * 4
    share = statistics.fall(values, 3, 3).share
    assert share == pytest.approx(0.5 if shift >= -1 else 0.5 / 2), "best of -2: as a share of its size"
    history = History(["reward"], 20)
    for step, value in enumerate(values):
        history.push(step, {"reward": value})
    assert history.lost("reward", 3) == pytest.approx(share)


def test_the_slope_and_its_error():
    assert statistics.slope([1.0, 3.0, 5.0]) == 2
    values = [0.0, 1.0, 0.0, 2.0]
    x = [-1.5, -0.5, 0.5, 1.5]
    slope = sum(a * b for a, b in zip(x, values, strict=True)) / 5
    assert statistics.slope(values) == pytest.approx(slope)
    assert statistics.slope_errors(values) == pytest.approx(slope / (statistics.noise(values) / math.sqrt(5)))


def test_measurements_with_errors_are_split_where_they_differ_most():
    found = statistics.fall_of_measured([0.6, 0.8, 0.3], [0.1, 0.2, 0.1])
    then = (0.6 / 0.01 + 0.8 / 0.04) / (1 / 0.01 + 1 / 0.04)
    assert found.before == pytest.approx(then)
    assert (found.now, found.place) == (pytest.approx(0.3), 1)
    assert found.errors == pytest.approx((then - 0.3) / math.sqrt(1 / 125 + 0.01))
    assert statistics.fall_of_measured([0.2, 0.8], [0.1, 0.1]) == statistics.NO_CHANGE


def test_the_tail_of_the_binomial():
    assert statistics.binomial_tail(2, 2, 0.5) == pytest.approx(0.25)
    assert statistics.binomial_tail(1, 3, 0.5) == pytest.approx(7 / 8)
    assert statistics.binomial_tail(0, 3, 0.5) == 1
    assert statistics.binomial_tail(4, 3, 0.5) == 0


@pytest.mark.parametrize("kind", ["normal", "few prompts", "skewed"])
def test_falls_that_are_chance_are_as_rare_as_is_said(kind):
    """1,500 looks at a run length of 500: three alarms are promised at most, also where values are not normal."""
    draw = random.Random(3)
    single = {
        "normal": lambda: draw.gauss(0.5, 0.1),
        "few prompts": lambda: sum(draw.random() < 0.7 for _ in range(2)) / 2,
        "skewed": lambda: 10 - draw.expovariate(2),
    }[kind]
    values, alarms = [single() for _ in range(100)], 0
    bound = statistics.bound(500, 120 - 19, statistics.NEWEST - 1)
    for _ in range(1500):
        values = [*values[-119:], single()]
        alarms += statistics.fall(values, 10, 10).errors > bound
    assert alarms <= 3
