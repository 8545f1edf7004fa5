"""Names under which MLflow keeps metrics: as they are where it takes them, and never two keys under one."""

from __future__ import annotations

import itertools

import pytest
from mlflow.utils.validation import _validate_metric_name

from lit_grpo.tracking.mlflow_target import mlflow_name

KEYS = [
    "reward", "val/pass@8", "val/pass_at_8", "source/数学/reward", "source/代码/reward", "source/é/reward",
    "source/e\u0301/reward", "acc@strict (v2)", "acc_at_strict (v2)", "acc_at_strict _v2_", "a:b", "a;b", "a_b", "a//b",
    "a/_/b", "a/./b", "a/../b", "/a", "a/", "a", ".", "..", "", " ", "a ", "x" * 300, "x" * 299 + "y", "数" * 260,
    "ü" * 251, "a\nb", "a\tb", "😀", "🎉", "a-b", "a.b", "\ud800", "pass@k", "pass_at_k", "x@1@y", "x_at_1@y",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_mlflow_takes_every_name(key):
    name = mlflow_name(key)
    _validate_metric_name(name)
    assert 0 < len(name) <= 250
    assert name == name.strip()


def test_no_two_keys_have_one_name():
    for one, other in itertools.combinations(KEYS, 2):
        assert mlflow_name(one) != mlflow_name(other), (one, other)


@pytest.mark.parametrize(
    "key", ["reward", "source/数学/reward", "source/é/share", "time/a b", "source/_/reward", "x-y.z"]
)
def test_what_mlflow_takes_stays_as_it_is(key):
    assert mlflow_name(key) == key


def test_numbers_behind_an_at_sign_read_as_before():
    assert mlflow_name("val/aime/pass@8") == "val/aime/pass_at_8"
