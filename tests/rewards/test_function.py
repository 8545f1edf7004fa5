"""A user's function may hang, crash, leave or give nonsense: the run goes on, or ends with a message."""

import os
import threading
import time
import warnings

import pytest

from lit_grpo.errors import UserError
from lit_grpo.rewards import FunctionReward, Reward, RewardError, score_all
from lit_grpo.rewards.combine import final_answers
from lit_grpo.types import Completion, Prompt, RewardInput, Score
from tests.rewards import odd_results, user_functions

FAULTY = "tests.rewards.faulty_functions"
ODD = "tests.rewards.odd_results"
LIMIT = 1.0
ONE = ("sleeps", "spins", "deadlocks", "gives_way", "blocks")


def item(text="good", answer="4", **extra):
    return RewardInput(Prompt("p", "q", (1,), answer, "", extra), Completion(0, 0, (1,), (0.0,), "stop", 0), text)


def path_of(function):
    return f"{ODD if hasattr(odd_results, function) else FAULTY}.{function}"


def score(function, texts, on_error="zero", **arguments):
    reward = FunctionReward(path_of(function) if isinstance(function, str) else function, **arguments)
    try:
        return score_all([reward], [item(text) for text in texts], on_error)[reward.name]
    finally:
        reward.close()


def kinds(scores):
    return [(s.value, s.timed_out, s.failed) for s in scores]


FINE, LATE, FAILED = (1.0, False, False), (0.0, True, False), (0.0, False, True)


# Hangs.


@pytest.mark.slow
@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("function", [*ONE, "holds_the_lock"])
def test_one_that_hangs_costs_its_completion_alone(function, in_process):
    if in_process and function in ("holds_the_lock", "spins"):
        pytest.skip("nothing can be done about it in one process, as the documents say; and it would slow the others")
    scores = score(function, ["good", "bad", "good"], "raise", limit=LIMIT, in_process=in_process)
    assert kinds(scores) == [FINE, LATE, FINE]


@pytest.mark.slow
@pytest.mark.parametrize("in_process", [False, True])
@pytest.mark.parametrize("function", ["batch_sleeps", "batch_blocks"])
def test_a_batch_that_hangs_is_late_as_a_whole(function, in_process):
    assert kinds(score(function, ["good", "bad"], limit=LIMIT, in_process=in_process)) == [LATE, LATE]
    assert kinds(score(function, ["good", "good"], limit=30, in_process=in_process)) == [FINE, FINE]


def test_there_is_a_limit_unless_it_is_taken_away():
    assert FunctionReward(f"{FAULTY}.sleeps").score_limit is None
    reward = FunctionReward(f"{FAULTY}.sleeps", limit=None)
    with pytest.warns(UserWarning, match="has no limit: if tests.rewards.faulty_functions.sleeps hangs, the run waits"):
        reward.start()
    reward.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        default = FunctionReward(f"{FAULTY}.sleeps")
        default.start()
        default.close()


def test_running_in_the_training_process_is_said_at_the_start():
    with pytest.warns(UserWarning, match="runs in this process, each call given up after 60 s"):
        FunctionReward(f"{FAULTY}.sleeps", in_process=True).start()
    here = score_all([FunctionReward(f"{FAULTY}.process", in_process=True)], [item()])["process"][0].value
    there = score("process", ["good"])[0].value
    assert (here, there == here) == (os.getpid(), False)


def test_calls_that_go_on_hanging_in_this_process_are_not_made_for_ever():
    over = threading.Event()
    reward = FunctionReward(lambda text: over.wait(600) or 1.0, limit=0.01)
    batch = [item()] * 16
    try:
        assert all(score.timed_out for score in reward.score(batch))
        with pytest.raises(RuntimeError, match=r"16 calls of .* have not returned"):
            reward.score([item()])
    finally:
        over.set()


# Crashes.


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", r"KeyError: 'a missing key' at .*faulty_functions\.py:\d+"),
        ("exits", "SystemExit: 3"),
        ("interrupts", "KeyboardInterrupt"),
        ("dies", "ended its process"),
        ("kills", "ended its process"),
        ("recurses", "RecursionError"),
        ("raises_late", "ConnectionError: the server is away"),
        ("batch_dies", "ended its process"),
        ("batch_raises", "ValueError: a bad batch"),
    ],
)
def test_one_that_crashes_is_named_or_scored_0(function, words):
    scores = score(function, ["good", "bad", "good"])
    assert kinds(scores) == [FINE, FAILED, FINE]
    with pytest.raises(RewardError, match=words) as caught:
        score(function, ["good", "bad"], "raise")
    assert caught.value.sample == "bad"
    assert "data.on_reward_error: zero" in str(caught.value)


@pytest.mark.parametrize("function", ["raises", "exits", "interrupts", "recurses", "raises_late", "batch_raises"])
def test_in_process_too(function):
    assert kinds(score(function, ["good", "bad"], in_process=True)) == [FINE, FAILED]


def test_a_worker_that_died_is_replaced():
    reward = FunctionReward(f"{FAULTY}.dies", workers=1)
    try:
        for _ in range(3):
            assert kinds(score_all([reward], [item("bad"), item()], "zero")["dies"]) == [FAILED, FINE]
    finally:
        reward.close()


class Leaves(Reward):
    def score(self, batch):
        raise SystemExit(0)


class Hangs(Reward):
    score_limit = 0.1

    def __init__(self):
        super().__init__()
        self.calls, self.over = 0, threading.Event()

    def score(self, batch):
        self.calls += 1
        self.over.wait(600)
        return [1.0] * len(batch)

    def final_answers(self, batch):
        self.over.wait(600)


class OwnLimit(FunctionReward):
    def score(self, batch):
        return super().score(batch)


def test_a_reward_class_that_leaves_or_hangs():
    with pytest.raises(RewardError, match="raised SystemExit: 0"):
        score_all([Leaves()], [item()])
    assert kinds(score_all([Leaves()], [item()], "zero")["leaves"]) == [FAILED]
    reward = Hangs()
    began = time.monotonic()
    with pytest.raises(RewardError, match=r"has not returned in 0\.3 s"):
        score_all([reward], [item()] * 3)
    assert kinds(score_all([reward], [item()] * 3, "zero")["hangs"]) == [(0.0, True, True)] * 3
    # Not once more one by one, which would take as many times the limit.
    assert reward.calls == 2
    assert time.monotonic() - began < 60
    with pytest.raises(RewardError, match="gave no final answers: HungRewardError"):
        final_answers(reward, [item()])
    reward.over.set()
    # Who scores in a way of its own does not inherit that its parent bounds its work.
    assert OwnLimit.score_limit == Reward.score_limit == 60.0


# Results.


@pytest.fixture(scope="module", params=[False, True], ids=["processes of its own", "in process"])
def gives(request):
    """One for all results: starting its processes takes a second."""
    reward = FunctionReward(path_of("gives"), in_process=request.param)
    yield reward
    reward.close()


@pytest.mark.parametrize("what", sorted(odd_results.RESULTS))
def test_what_is_no_reward_is_shown(what, gives):
    scores = score_all([gives], [item("good"), item(what)], "zero")[gives.name]
    assert kinds(scores) == [FINE, FAILED]
    with pytest.raises(RewardError, match="gave ") as caught:
        score_all([gives], [item(what)], "raise")
    assert caught.value.sample == what


def test_what_is_a_reward_is_taken():
    texts = sorted(odd_results.GOOD)
    scores = dict(zip(texts, score("gives", texts, "raise"), strict=True))
    assert {text: s.value for text, s in scores.items()} == dict.fromkeys(texts, 1.0)
    assert (scores["score"].no_answer, scores["score"].details) == (True, {"a": 2.0})


def test_lists_of_the_wrong_kind():
    with pytest.raises(RewardError, match="gave 1 scores for 2 completions"):
        score("too_few", ["a", "b"])
    for function in ("no_list", "a_mapping"):
        with pytest.raises(RewardError, match="not a list of 1 numbers"):
            score(function, ["a", "b"], "raise")
    assert kinds(score("a_tensor", ["a", "b"], "raise")) == [FINE, FINE]
    assert len(score("large", ["a"] * 1000, "raise")) == 1000


def test_a_weight_that_makes_a_value_too_large():
    with pytest.raises(RewardError, match=r"beyond 1e\+15 \(weight 1e\+14\)"):
        score_all([FunctionReward(lambda text: 100.0, weight=1e14)], [item()])


# Functions that are given themselves.


def test_functions_given_in_python():
    reward = FunctionReward(user_functions.polite)
    assert reward.name == "polite"
    assert score_all([reward], [item("please")])["polite"][0].value == 1.0
    reward.close()
    here = FunctionReward(lambda text: float(os.getpid()))
    assert (here.name, score_all([here], [item()])["lambda"][0].value) == ("lambda", os.getpid())

    def local(texts, factor):
        return [factor * float(len(text)) for text in texts]

    named = FunctionReward(local, arguments={"factor": 2.0})
    assert [s.value for s in score_all([named], [item("ab"), item("")])["local"]] == [4.0, 0.0]

    def sleeps(text):
        time.sleep(600 if text == "bad" else 0)
        return 1.0

    assert kinds(score(sleeps, ["bad", "good"], limit=0.2)) == [LATE, FINE]


def test_whole_inputs_reach_a_worker_and_what_cannot_be_sent_is_said():
    assert [s.value for s in score("whole", ["a"], "raise")] == [1.0]
    reward = FunctionReward(f"{FAULTY}.two")
    with pytest.raises(RewardError, match="cannot be sent to a worker"):
        score_all([reward], [item(lock=threading.Lock())])


def test_what_a_function_prints_is_seen(capfd):
    score("prints", ["a"])
    captured = capfd.readouterr()
    assert "a word on the way" in captured.err
    assert not captured.out


def test_a_module_that_ends_or_fails_at_its_import_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text, words in (
        ("leaves_at_import", "import sys; sys.exit(0)", "importing leaves_at_import fails: SystemExit"),
        ("does_not_compile", "def f(:", "does_not_compile is no valid Python"),
        ("fails_at_import", "1 / 0", "importing fails_at_import fails: ZeroDivisionError"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(UserError, match=words):
            FunctionReward(f"{name}.f")


def test_arguments_that_make_no_sense():
    for arguments in ({"limit": 0}, {"limit": float("nan")}, {"workers": 0}, {"concurrency": 0}):
        with pytest.raises(UserError, match=f"{next(iter(arguments))} is"):
            FunctionReward(f"{FAULTY}.sleeps", **arguments)


def test_scores_keep_their_own_fields():
    scored = score("gives", ["score"], "raise")[0]
    assert scored == Score(1.0, no_answer=True, details={"a": 2.0}, seconds=scored.seconds)
    assert scored.seconds > 0
