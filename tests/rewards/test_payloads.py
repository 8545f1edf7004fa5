"""No reward runs what the model writes, but in the sandbox."""

import contextlib
import threading

import pytest

import lit_grpo.rewards as rewards
from lit_grpo.errors import UserError
from lit_grpo.rewards import Reward, score_all
from lit_grpo.rewards.isolation import sandbox
from lit_grpo.rewards.wrappers import SourceReward
from lit_grpo.types import Completion, Prompt, RewardInput
from tests.rewards.payloads import payloads, wrapped
from tests.rewards.test_judge import Server

MISSING = sandbox.check()
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=f"no sandbox here: {MISSING}")
LIMIT = 20.0

# Of each reward the arguments with which it looks at the most of a text, the gold, and the columns of the row.
CASES: dict[str, tuple[dict, str, dict]] = {
    "AdditionReward": ({}, "4", {}),
    "ChoiceReward": ({}, "A", {}),
    "CodeReward": ({"limit": 2.0, "workers": 2}, "4", {"tests": "assert True"}),
    "CosineReward": ({"reward": "MathReward", "max_tokens": 100}, "4", {}),
    "CountdownReward": ({}, "24", {"nums": [4, 6]}),
    "ExactMatch": ({"pattern": "<answer>(.*?)</answer>"}, "4", {}),
    "FormatReward": ({}, "4", {}),
    "FunctionReward": ({"function": "tests.rewards.user_functions.polite", "limit": LIMIT}, "4", {}),
    "GatedReward": ({"reward": "MathReward", "gate": "FormatReward"}, "4", {}),
    "JudgeReward": ({"model": "a-model", "limit": LIMIT, "retries": 0}, "4", {}),
    "LengthReward": ({"max_tokens": 100}, "4", {}),
    "MathReward": ({"limit": LIMIT, "workers": 1}, r"\frac{x^2}{2}", {}),
    "NumericReward": ({}, "4", {}),
    "RepetitionPenalty": ({}, "4", {}),
    "RewardBySource": ({"rewards": "MathReward"}, "4", {}),
}  # fmt: skip


def classes() -> set[str]:
    found = {name for name in rewards.__all__ if isinstance(getattr(rewards, name), type)}
    return {name for name in found if issubclass(getattr(rewards, name), Reward) and name != "Reward"}


def build(name: str, url: str = "") -> Reward:
    arguments = dict(CASES[name][0])
    for key, value in arguments.items():
        if key in ("reward", "gate"):
            arguments[key] = build(value)
    if name == "RewardBySource":
        arguments["rewards"] = [SourceReward(["s"], build("MathReward"))]
    return getattr(rewards, name)(**({"url": url} if name == "JudgeReward" else {}), **arguments)


def item(text: str, gold: str, extra: dict) -> RewardInput:
    return RewardInput(Prompt("p", "q", (1,), gold, "s", extra), Completion(0, 0, (1,), (0.0,), "stop", 0), text)


def test_every_reward_is_tried():
    # Tasks of reasoning-gym are tried one by one, below.
    assert classes() == {*CASES, "ReasoningGymReward"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_no_reward_runs_a_completion(name, tmp_path):
    if name == "CodeReward" and MISSING:
        pytest.skip(MISSING)
    marker = tmp_path / "marker"
    planted = [text for payload in payloads(marker) for text in wrapped(payload)]
    # A judge repeats what it was given, as its verdict and before it.
    server = Server(lambda prompt, mark, n: (200, f"{prompt}\n{mark}: {prompt[-400:-200]}\n{mark}: CORRECT"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    reward = build(name, server.url)
    try:
        batch = [item(text, *CASES[name][1:]) for text in planted]
        scores = score_all([reward], batch, "zero")[reward.name]
        with contextlib.suppress(UserError):
            reward.final_answers(batch)
    finally:
        reward.close()
        server.shutdown()
        server.server_close()
    assert len(scores) == len(planted)
    assert not marker.exists()


def test_the_payloads_would_work(tmp_path):
    """Run as what they are meant for, the first ones make the file: the tests here can fail."""
    marker = tmp_path / "marker"
    worked = 0
    for payload in payloads(marker):
        with contextlib.suppress(Exception):
            eval(payload)
        worked += marker.exists()
        marker.unlink(missing_ok=True)
    assert worked >= 5


def problems() -> list[tuple[str, dict]]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    # `composite` is made of other tasks and needs their names.
    tasks = sorted(set(DATASETS) - {"composite"})
    return [(task, reasoning_gym.create_dataset(task, size=1, seed=3)[0]) for task in tasks]


@needs_sandbox
@pytest.mark.slow
def test_no_task_of_reasoning_gym_runs_an_answer(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    monkeypatch.setenv("A_SECRET", "secret")
    marker = tmp_path / "marker"
    reward = rewards.ReasoningGymReward(limit=LIMIT)
    honest = []
    try:
        for task, entry in problems():
            extra = {"reasoning_gym": {"task": task, "entry": entry}}
            texts = [f"<answer>{payload}</answer>" for payload in payloads(marker)]
            texts.append("<answer>[0][int(__import__('os').environ['A_SECRET'] == 'secret')]</answer>")
            scores = reward.score([item(text, "", extra) for text in texts])
            assert not any(score.timed_out for score in scores), task
            assert not marker.exists(), task
            honest.append((task, reward.score([item(f"<answer>{entry['answer']}</answer>", "", extra)])[0].value))
    finally:
        reward.close()
    # The tasks' own answers earn what they did before: nothing is taken away from honest ones. Those below have no
    # answer of their own, or one in another form.
    own = {task for task, value in honest if value == 1.0}
    assert len(own) >= len(honest) - 8, sorted({task for task, _ in honest} - own)


@needs_sandbox
def test_what_an_answer_changes_is_gone_with_it():
    """An answer that could patch the scorer would make all later ones right."""
    from lit_grpo.rewards.isolation.confined_call import call_confined
    from lit_grpo.rewards.isolation.sandbox import Limits

    state = {"patched": False}

    def patch() -> float:
        state["patched"] = True
        return 1.0

    assert call_confined(patch, Limits(4 << 30, 20)) == 1.0
    assert call_confined(lambda: float(state["patched"]), Limits(4 << 30, 20)) == 0.0


def test_without_a_sandbox_the_reward_is_refused(monkeypatch):
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    monkeypatch.setattr(sandbox, "check", lambda: "no Landlock")
    with pytest.raises(UserError, match="no Landlock") as caught:
        rewards.ReasoningGymReward()
    assert "unprotected" in (caught.value.remedy or "")
    with pytest.warns(UserWarning, match="WITHOUT a whole sandbox"):
        rewards.ReasoningGymReward(unprotected=True).close()


def test_a_pattern_that_backtracks_costs_its_limit_alone():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    reward = rewards.ReasoningGymReward(pattern="(a+)+b", limit=0.2)
    score = reward.score([item("a" * 4000, "", {"reasoning_gym": {"task": "leg_counting", "entry": {}}})])[0]
    assert (score.timed_out, score.no_answer) == (True, True)
