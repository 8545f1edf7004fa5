"""The math verifier against answers of every kind, hostile ones included."""

import asyncio
import concurrent.futures
import gzip
import json
import multiprocessing
import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lit_grpo.errors import UserError
from lit_grpo.rewards import MathReward
from lit_grpo.rewards.math.answer import final_answer, gold_answer
from lit_grpo.rewards.math.grade import grade, grade_quickly, kind_of
from lit_grpo.rewards.math.text import clean, parse_number
from lit_grpo.types import Score
from tests.paths import SHARED
from tests.rewards.isolation import pool_functions as work
from tests.rewards.math.more_verifier_cases import MORE
from tests.rewards.math.verifier_cases import CASES
from tests.waiting import PATIENCE, wait_until

LIMIT = 5.0
GRACE = PATIENCE
"""Seconds that a busy machine may add to a limit before a test calls it a hang (0.1 s on a quiet one)."""
AMPLE = 30.0
"""Limit where verdicts matter and nothing hangs: a busy machine must not turn a right answer into a wrong one."""

KNOWN_EXCEPTIONS: dict[str, str] = {}
"""Ids of the shared cases that are graded otherwise than the file expects, each with its reason."""

needs_cases = pytest.mark.skipif(
    not (SHARED / "verifier/cases.jsonl").exists(), reason="the shared verifier cases are not beside the checkout"
)
needs_data = pytest.mark.skipif(not (SHARED / "data").exists(), reason="the shared data is not beside the checkout")


def said(scores):
    """Scores without the seconds they took."""
    return [score._replace(seconds=0.0) for score in scores]


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathReward]:
    reward = MathReward(limit=AMPLE, workers=2)
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[MathReward]:
    reward = MathReward(limit=1.0, workers=2)
    yield reward
    reward.close()


@needs_cases
@pytest.mark.slow
def test_the_shared_cases_are_judged_as_expected():
    verifier = MathReward(limit=LIMIT, workers=2)
    cases = [json.loads(line) for line in (SHARED / "verifier/cases.jsonl").read_text("utf-8").splitlines()]
    verdicts = verifier.verify([c["gold"] for c in cases], [c["prediction"] for c in cases])
    verifier.close()
    wrong = {
        case["id"]: case["why"] for case, verdict in zip(cases, verdicts, strict=True)
        if verdict.correct != case["expected"]
    }  # fmt: skip
    assert wrong.keys() == KNOWN_EXCEPTIONS.keys(), wrong
    assert len(cases) == 141
    assert len(KNOWN_EXCEPTIONS) <= 3
    assert max(v.seconds for v in verdicts) < LIMIT + GRACE


def test_answers_in_many_ways_of_writing(verifier):
    verdicts = verifier.verify([gold for gold, _, _ in CASES], [text for _, text, _ in CASES])
    wrong = [
        (gold[:80], text[-80:], verdict)
        for (gold, text, right), verdict in zip(CASES, verdicts, strict=True)
        if verdict.correct != right or verdict.timed_out
    ]
    assert not wrong


@pytest.mark.slow
def test_more_answers_of_every_kind(verifier):
    verdicts = verifier.verify([gold for gold, _, _ in MORE], [text for _, text, _ in MORE])
    wrong = [(gold[:80], text[-80:], verdict) for (gold, text, right), verdict in zip(MORE, verdicts, strict=True)
             if verdict.correct != right or (verdict.timed_out and right)]  # fmt: skip
    assert not wrong
    assert len({(gold, text) for gold, text, _ in MORE}) == len(MORE) > 150


@needs_data
@pytest.mark.parametrize("name", sorted(p.name for p in (SHARED / "data").glob("*.gz")))
def test_golds_agree_with_themselves_and_not_with_others(verifier, name):
    with gzip.open(SHARED / "data" / name, "rt", encoding="utf-8") as lines:
        golds = [json.loads(line)["answer"] for line in lines]
    verdicts = verifier.verify(golds, [f"So it is \\boxed{{{gold}}}." for gold in golds])
    assert [gold for gold, v in zip(golds, verdicts, strict=True) if not v.correct] == []
    rng = random.Random(1)
    some = rng.sample(golds, min(40, len(golds)))
    others = [rng.choice([other for other in golds if other != gold]) for gold in some]
    # Two golds of a set may be equal in other words; plain numbers cannot.
    pairs = [(g, o) for g, o in zip(some, others, strict=True) if parse_number(clean(g)) and parse_number(clean(o))]
    pairs = [(g, o) for g, o in pairs if parse_number(clean(g)) != parse_number(clean(o))]
    verdicts = verifier.verify([g for g, _ in pairs], [f"\\boxed{{{o}}}" for _, o in pairs])
    assert [pair for pair, v in zip(pairs, verdicts, strict=True) if v.correct] == []


HOSTILE = {
    "tower": r"\boxed{10^{10^{10}}}",
    "tower of fives": r"\boxed{5^{5^{5^{5^{5}}}}}",
    "factorial": r"\boxed{(10^{9})!}",
    "digits": r"\boxed{" + "7" * 100_000 + "}",
    "digits in LaTeX": r"\boxed{\frac{" + "7" * 15_000 + "}{3}}",
    "long prose": "wait " * 200_000,
    "braces": r"\boxed{" + "{" * 1500 + "1" + "}" * 1500 + "}",
    "fractions": r"\boxed{" + r"\frac{1}{" * 400 + "2" + "}" * 400 + "}",
    "parentheses": r"\boxed{" + "(" * 8000 + "x" + ")" * 8000 + "}",
    "unclosed": r"\boxed{" * 100_000,
    "questions": "\nQuestion: " * 90_000,
    "anchors": "the answer to " * 70_000,
    "joined boxes": r"\boxed{1} or " * 70_000,
    "dollars": "$" * 1_000_000,
    "roots": r"\boxed{" + r"\sqrt{" * 300 + "2" + "}" * 300 + "}",
    "sum": r"\boxed{\sum_{k=1}^{10^{15}} \frac{\sin k}{k^3}}",
    "integral": r"\boxed{\int_0^1 \sin(x^x) e^{x^3} dx}",
    "equation": r"\boxed{x^{17} - \sin(x) e^x + y^{23} = \ln(xy)}",
    "null": "\\boxed{\x00\ud800}",
}


@pytest.mark.parametrize("gold", ["42", r"\frac{x^2+1}{3}"])
@pytest.mark.slow
def test_hostile_answers_cost_their_limit_at_most(impatient, gold):
    verdicts = impatient.verify([gold] * len(HOSTILE), list(HOSTILE.values()))
    assert not any(v.correct for v in verdicts)
    assert max(v.seconds for v in verdicts) < 1.0 + GRACE


@pytest.mark.slow
def test_a_timeout_is_a_wrong_answer_and_says_so(reward_input):
    reward = MathReward(limit=AMPLE / 10, workers=1)
    bad, good = reward_input(r"\boxed{9^{9^{9^{9}}}}", "1"), reward_input(r"\boxed{\frac{\sqrt{4}}{2}}", "1")
    scores = said(reward.score([bad, good]))
    reward.close()
    assert scores[0] == Score(0.0, timed_out=True)
    assert scores[1] == Score(1.0)


def test_a_crash_is_a_wrong_answer_and_says_so(reward_input, monkeypatch):
    reward = MathReward(limit=30.0, workers=1)
    item = reward_input(r"\boxed{\frac{\sqrt{4}}{2}}", "1")
    futures = []
    submit = reward._pool.submit

    def watched(items):
        found = submit(items)
        futures.extend(found)
        return found

    monkeypatch.setattr(reward._pool, "submit", watched)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        scores = threads.submit(reward.score, [reward_input(r"\boxed{9^{9^{9^{9}}}}", "1"), item])
        wait_until(lambda: len(futures) == 2 and reward._pool._workers, "a worker is at work")
        reward.close()  # the worker is killed from outside, as when memory runs out
        assert all(score == Score(0.0, failed=True) for score in said(scores.result(timeout=PATIENCE)))


def test_a_thousand_good_answers_at_once_have_no_false_zero(verifier, reward_input):
    scores = said(verifier.score([reward_input(rf"\boxed{{\frac{{{2 * n}}}{{2}}}}", str(n)) for n in range(1000)]))
    assert all(score == Score(1.0) for score in scores)


def test_from_threads_and_asyncio(verifier, reward_input):
    batch = [reward_input(r"\boxed{\sqrt{16}}", "4"), reward_input(r"\boxed{\sqrt{15}}", "4")]
    expected = [Score(1.0), Score(0.0)]

    async def main() -> list:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(None, verifier.score, batch) for _ in range(4)))

    assert [said(scores) for scores in asyncio.run(main())] == [expected] * 4
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert [said(scores) for scores in threads.map(verifier.score, [batch] * 4)] == [expected] * 4


@pytest.mark.slow
def test_from_a_spawned_process():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work.verify, args=(MathReward(limit=3.0, workers=1), queue), daemon=True)
    process.start()
    assert queue.get(timeout=PATIENCE) == [True, False]
    process.join(PATIENCE)


def test_plain_answers_start_no_worker(reward_input):
    reward = MathReward()
    assert [s.value for s in reward.score([reward_input("#### 42", "42"), reward_input(r"\boxed{1,000}", "1000")])] == [
        1.0,
        1.0,
    ]
    assert reward._pool._fork_server is None


def test_a_cut_off_completion_needs_an_explicit_answer(reward_input):
    reward = MathReward()
    cases = [("so he has 42", True), (r"\boxed{42} and then", True), ("so he has 42", False)]
    scores = reward.score([reward_input(text, "42", truncated=cut) for text, cut in cases])
    assert [s.value for s in scores] == [0.0, 1.0, 1.0]


def test_bad_arguments_are_refused():
    with pytest.raises(UserError, match="limit is 0"):
        MathReward(limit=0)
    with pytest.raises(UserError, match="workers is -1"):
        MathReward(workers=-1)


FRAGMENTS = st.sampled_from(
    r"""\boxed{ } { ( ) [ ] \{ \} $ $$ \( \) \[ \] #### answer is : , ; . = < > \le | % ^ _ \pm \cup \frac \frac12 \sqrt
    \text{ \begin{pmatrix} & \\ \end{pmatrix} \ldots \pi \infty \int \sum 1 12 3.5 1,000 -7 1/2 x y cm m or and not ½ ²
    √ ３ ° − “ 和 Question: ! ** \n \, \left( \right) \circ e^{i\pi} \emptyset f(x) \mid \in 1:2 12:00 123_5 B
    (C) <answer> </answer>""".split()  # noqa: SIM905 - a list of these would fill a page
)
TEXTS = st.lists(FRAGMENTS | st.text(max_size=4), max_size=25).map(lambda parts: " ".join(parts))


@example(gold="", text="° } } }")
@given(gold=TEXTS, text=TEXTS)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_reading_never_raises_and_always_agrees_with_itself(gold, text):
    answer = final_answer(text, kind_of(gold))
    verdict = grade_quickly(gold_answer(gold), answer or "")
    assert verdict in (True, False, None)
    assert verdict is not True or answer
    assert clean(clean(text)) == clean(clean(clean(text)))
    if clean(gold):
        assert grade_quickly(gold, gold) is True
        assert grade_quickly(gold, f"  {gold} ") is True


@given(pairs=st.lists(st.tuples(TEXTS, TEXTS), min_size=20, max_size=20))
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
def test_verifying_never_raises(impatient, pairs):
    verdicts = impatient.verify([g for g, _ in pairs], [f"\\boxed{{{t}}}" for _, t in pairs])
    assert len(verdicts) == len(pairs)
    assert not any(v.crashed for v in verdicts)
    assert max(v.seconds for v in verdicts) < 1.0 + GRACE


def test_mutated_answers_never_crash_a_worker(impatient):
    rng = random.Random(7)
    golds, texts = [], []
    for gold, text, _ in rng.sample(CASES, 80):
        place = rng.randrange(len(text) + 1)
        change = rng.choice(["{", "}", r"\frac", "^", ",", "=", "x", "!", text[:place], r"\sqrt{"])
        golds.append(gold)
        texts.append(text[:place] + change + text[place + rng.randrange(3) :])
    verdicts = impatient.verify(golds, texts)
    assert not any(v.crashed for v in verdicts)
    assert max(v.seconds for v in verdicts) < 1.0 + GRACE


def test_quick_verdicts_are_those_of_the_full_grading():
    """The written form may leave a verdict open, never contradict the one that the worker gives."""
    for gold, text, _ in CASES[::5]:
        answer = final_answer(text, kind_of(gold))
        quick = grade_quickly(gold_answer(gold), answer) if answer else None
        if answer and quick is not None:
            assert grade((gold_answer(gold), answer)) is quick
