"""The scaling benchmark measures steps that learn, and fits what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts import scaling

SMALL = scaling.Point(group_size=2, prompt=6, completion=4, vocabulary=50, width=16, layers=1, steps=2)


def test_exponent_is_the_slope_of_the_logarithms():
    assert scaling.exponent([(x, 3 * x**1.5) for x in (1, 4, 9, 30)]) == pytest.approx(1.5)


@pytest.mark.parametrize("share", [True, False])
def test_a_point_is_measured(share):
    seconds = scaling.measure(replace(SMALL, share=share))
    assert len(seconds) == 2, "the warm-up is left out"
    assert min(seconds) > 0


def test_rollouts_hold_what_the_point_says():
    loader = scaling.Rollouts(replace(SMALL, prompts=4, ranks=2), rank=1)
    batches = list(loader)
    assert len(batches) == len(loader) == 3
    for k, batch in enumerate(batches):
        assert batch.policy_version == k
        assert len(batch.prompts) == 2
        assert {len(p.token_ids) for p in batch.prompts} == {6}
        assert {len(c.token_ids) for c in batch.completions} == {4}
        assert batch.reward.tolist() == [0.0, 1.0] * 2, "every group learns"


def test_tables_and_plots(tmp_path):
    both = {True: [(1, 1.0), (2, 2.0)], False: [(1, 1.0), (2, 4.0)]}
    text = scaling.table("group_size", both)
    assert "| 2 | 2.000 | 4.000 | 2.00 |" in text
    assert "| exponent | 1.00 | 2.00 | |" in text
    scaling.plot({"group_size": both, "ranks": both}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size < 60_000
