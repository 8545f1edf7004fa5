"""Duplicates, contradictions and contamination, made up and real."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_grpo.data import CleanConfig, InMemoryPrompts, JsonlPrompts, MixedPrompts, Row, decontaminate, deduplicate
from lit_grpo.data.cleaning import common_subsequence, letters, words
from lit_grpo.errors import UserError
from tests.paths import SHARED

DATA = SHARED / "data"
needs_shared = pytest.mark.skipif(not DATA.exists(), reason="the shared data is not beside the checkout")
LONG = "Alice has five red apples and Bob has twice as many green pears, how many pieces of fruit do they have?"


def rows(*pairs):
    return [Row(f"s/{i}", question, answer) for i, (question, answer) in enumerate(pairs)]


def test_equal_questions_are_kept_once_and_contradictions_not_at_all():
    given = rows(
        ("What is 1 + 1?", "2"),
        ("what is  1 + 1?\n", " 2"),
        ("Solve x.", "3"),
        ("SOLVE x.", "4"),
        ("solve x.", "3"),
        ("Another.", None),
        ("another.", "7"),
        ("What is 1 + 2?", "3"),
    )
    kept, dropped = deduplicate(given)
    assert [row.id for row in kept] == ["s/0", "s/6", "s/7"]
    assert [(d.row.id, d.reason, d.other) for d in sorted(dropped, key=lambda d: d.row.id)] == [
        ("s/1", "duplicate", "s/0"),
        ("s/2", "conflicting answers", "s/3"),
        ("s/3", "conflicting answers", "s/2"),
        ("s/4", "conflicting answers", "s/3"),
        ("s/5", "duplicate", "s/6"),
    ]


@given(st.lists(st.tuples(st.sampled_from(["a", "A", "a ", "b", "b\n", "c"]), st.sampled_from(["1", "2", None]))))
def test_every_row_is_kept_or_accounted_for(pairs):
    given = rows(*pairs)
    kept, dropped = deduplicate(given)
    assert sorted([r.id for r in kept] + [d.row.id for d in dropped]) == sorted(r.id for r in given)
    questions = [r.question.casefold().split()[0] for r in kept]
    assert len(questions) == len(set(questions))


@pytest.mark.parametrize(
    ("question", "found"),
    [
        (LONG, True),
        (LONG.upper().replace(",", " -"), True),
        (LONG + " Give your answer as an integer.", True),
        (LONG.replace("twice", "thrice"), False),  # the longest run of equal words is too short
        (LONG.replace("fruit do they have", "food do both of them have"), True),
        ("1+1=", False),
        ("A story. " * 40 + LONG, False),
        ("2 + 2 = ?", True),
    ],
)
def test_contamination(question, found):
    evaluation = [Row("test/9", LONG), Row("test/10", "$2+2=$?")]
    kept, dropped = decontaminate([Row("x", question)], evaluation)
    assert bool(dropped) is found
    assert len(kept) + len(dropped) == 1
    if found:
        assert dropped[0].reason == "contaminated"
        assert dropped[0].other in ("test/9", "test/10")


def test_a_common_phrase_is_no_contamination():
    phrase = "can be written as m over n, where m and n are relatively prime positive integers. What is m plus n?"
    area = "In the plane a triangle has sides of lengths 3, 4 and 6. The radius of the circle through its corners"
    other = "Ten dice are thrown at once by a blindfolded monkey. The chance that no two of them show equal pips"
    evaluation = [Row("t/1", f"{area} {phrase}")]
    kept, _ = decontaminate([Row("x", f"{other} {phrase}")], evaluation)
    assert len(kept) == 1
    kept, _ = decontaminate([Row("x", f"{area.replace('In the plane', 'Somewhere')} {phrase}")], evaluation)
    assert not kept


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_the_longest_common_subsequence_is_that_of_all_subsequences(a, b):
    def subsequences(x):
        return {tuple(x[i] for i in range(len(x)) if mask >> i & 1) for mask in range(1 << len(x))}

    assert common_subsequence(a, b) == max(map(len, subsequences(a) & subsequences(b)))


def test_letters_and_words():
    assert letters(r"Let $X^{2}$ = \frac{1}{2}.") == "letx2frac12"
    assert letters("?!") == "?!"
    assert words(r"已知 $x_1 = 2$, Find") == ["已", "知", "x", "1", "2", "find"]


def test_bad_settings_are_refused():
    for settings in ({"ngram": 1}, {"overlap": 0.0}, {"overlap": 1.5}):
        with pytest.raises(UserError) as caught:
            CleanConfig(**settings)
        assert caught.value.where == f"data.clean.{next(iter(settings))}"


@needs_shared
def test_real_contamination_is_found():
    """The README beside the data counts 8, 16 and 10 questions of the evaluation sets in dapo_17k, letter by letter."""
    training = JsonlPrompts(str(DATA / "dapo_17k.jsonl.gz")).rows()
    exact = {"amc23": 8, "gaokao2023en": 16, "olympiadbench_math_en": 10, "aime24": 0}
    evaluation = {name: JsonlPrompts(str(DATA / f"{name}.jsonl.gz")).rows() for name in exact}
    by_letters = {letters(row.question) for row in training}
    for name, count in exact.items():
        assert sum(letters(row.question) in by_letters for row in evaluation[name]) == count
    of = {row.id: name for name, found in evaluation.items() for row in found}
    # Those that are equal letter by letter, and one in eight of the others to save time.
    known = {letters(row.question) for found in evaluation.values() for row in found}
    some = [row for i, row in enumerate(training) if i % 8 == 0 or letters(row.question) in known]
    kept, dropped = decontaminate(some, [row for found in evaluation.values() for row in found])
    assert len(kept) + len(dropped) == len(some)
    hit = {name: {d.other for d in dropped if of[d.other] == name} for name in exact}
    assert all(len(hit[name]) >= count for name, count in exact.items()), hit
    assert sum(map(len, hit.values())) > sum(exact.values()), "rewritten ones too"
    assert not hit["aime24"]
    again, none = decontaminate(kept, [row for found in evaluation.values() for row in found])
    assert again == kept
    assert not none


@needs_shared
def test_real_data_holds_what_its_readme_says():
    assert len(deduplicate(JsonlPrompts(str(DATA / "gsm8k_train.jsonl.gz")).rows())[1]) == 0
    dapo = JsonlPrompts(str(DATA / "dapo_17k.jsonl.gz"))
    assert all(d.reason == "duplicate" for d in deduplicate(dapo.rows())[1])


def source(name, count):
    return InMemoryPrompts([{"prompt": f"{name} {i}?", "answer": str(i)} for i in range(count)], name=name)


def test_a_mixture_keeps_every_row_and_names_its_source():
    mixed = MixedPrompts([source("a", 3), InMemoryPrompts([{"prompt": "x", "id": "7"}], name="b")], [3, 1])
    assert [(r.id, r.source) for r in mixed.rows()] == [("a/1", "a"), ("a/2", "a"), ("a/3", "a"), ("b/7", "b")]
    assert mixed.weights == {"a": 0.75, "b": 0.25}
    assert MixedPrompts([source("a", 3)]).weights is None


@pytest.mark.parametrize(
    ("sources", "weights", "what"),
    [
        ([], None, "no sources"),
        ([source("a", 1), source("a", 1)], None, "two sources are named 'a'"),
        ([source("a", 1)], [1, 2], "2 weights for 1 sources"),
        ([source("a", 1), source("b", 1)], [1, 0], "a weight is not above 0"),
        ([source("a", 1), source("b", 1)], [1, float("nan")], "a weight is not above 0"),
    ],
)
def test_bad_mixtures_are_refused(sources, weights, what):
    with pytest.raises(UserError, match=what) as caught:
        MixedPrompts(sources, weights)
    assert (caught.value.where or "").startswith("MixedPrompts.")
    assert caught.value.remedy


def test_chats_are_equal_if_every_turn_is():
    def row(number, *texts):
        roles = ("user",) if len(texts) == 1 else ("system", "user")
        messages = tuple({"role": r, "content": t} for r, t in zip(roles, texts, strict=True))
        return Row(f"r/{number}", texts[-1], "2", messages=messages)

    rows = [
        row(1, "add", "1+1"),
        row(2, "Add", "1+1"),
        row(3, "be brief", "1+1"),
        row(4, "1+1"),
        Row("r/5", "1+1", "2"),
    ]
    kept, dropped = deduplicate(rows)
    assert [r.id for r in kept] == ["r/1", "r/3", "r/4"]
    assert [(d.row.id, d.other) for d in dropped] == [("r/2", "r/1"), ("r/5", "r/4")]
