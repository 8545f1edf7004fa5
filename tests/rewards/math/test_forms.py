"""The math verifier on the gold answers of the shared data, written in five forms: scripts/verifier_forms.py."""

import importlib.util
import re

import pytest

from lit_grpo.rewards import MathReward
from tests.paths import ROOT, SHARED

_SPEC = importlib.util.spec_from_file_location("verifier_forms", ROOT / "scripts/verifier_forms.py")
assert _SPEC is not None
assert _SPEC.loader is not None
forms = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(forms)

pytestmark = pytest.mark.skipif(not (SHARED / "data").exists(), reason="the shared data is not beside the checkout")

UNREADABLE = {
    "$2: 15$ PM",
    "$\\$ 3000 @ 4.6 \\%$ $\\$ 4500$ @ 6.6\\%",
    "$\\$ 1600 @ 4 \\%$; $\\$ 2400$ @ 8\\%",
    "$\\{$ All real numbers. $\\}: \\mathbb{R}$",
    "$\\propto$ solutions",
    "J: $4 \\mathrm{hr}, \\mathrm{S}: 14 \\mathrm{hr}$",
    "$221,$8$",
}
"""Golds that a reader could not tell from the sentence either: dollars that do not match, or words behind them."""
PROSE = re.compile(r"[.:?]\s|\n|\b(?:because|since|which|where|but|Thus|Then)\b")
"""Golds of several sentences or with a clause behind them: "The answer is" ends before those."""


@pytest.fixture(scope="module")
def verifier():
    reward = MathReward(limit=60.0, workers=2)
    yield reward
    reward.close()


def check(name: str, every: int, verifier: MathReward) -> None:
    golds = forms.golds_of(SHARED / f"data/{name}.jsonl.gz", every)
    lines = list(forms.sweep(name, golds, verifier))
    assert [line.form for line in lines][:4] == list(forms.FORMS)[:4]
    for line in lines:
        assert line.fooled == [], line.form
        assert line.differing == 0, line.form
        unexpected = line.refused
        if line.form == "answer is":
            unexpected = [gold for gold in unexpected if gold not in UNREADABLE and not PROSE.search(gold.strip())]
        assert unexpected == [], line.form
        assert line.pairs >= line.golds - (len(golds) == 1)


# Every seventh row of the large files: with the small ones as a whole, a few seconds.
@pytest.mark.parametrize("name", forms.FILES)
def test_golds_in_every_form(name, verifier):
    check(name, 1 if name in {"aime24", "aime25", "amc23", "gaokao2023en"} else 7, verifier)


@pytest.mark.slow
@pytest.mark.parametrize("name", forms.FILES)
def test_all_golds_in_every_form(name, verifier):
    check(name, 1, verifier)


def test_the_pairs_are_answers_that_differ():
    assert not forms.differ("1,000", "$1000$")
    assert not forms.differ("0.50", "0.5")
    assert not forms.differ(r"\frac{1}{2}", r"$\dfrac12$")
    assert not forms.differ("2x + 1", "1 + 2x")
    assert forms.differ("7", "8")
    assert forms.differ("2x + 1", "2x + 3")
    assert forms.other_golds(["7", "$7$", "8"]) == ["8", "8", "7"]
    assert forms.other_golds(["7", "7.0"]) == [None, None]


def test_a_verifier_that_takes_anything_is_seen():
    class Lenient(MathReward):
        def verify(self, golds, texts, truncated=None):
            return [v._replace(correct=True) for v in super().verify(golds, texts, truncated)]

    lenient = Lenient(workers=1)
    (boxed, *_) = forms.sweep("x", ["7", "8", "9"], lenient)
    lenient.close()
    assert (boxed.right, boxed.taken, boxed.pairs) == (3, 3, 3)
