"""Each check on made-up rollouts and tokenizers: what passes, what does not, and what is said."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_grpo.commands.check import cost, prompts, rollout
from lit_grpo.commands.check.result import Result, percent
from lit_grpo.data import PromptFormat
from lit_grpo.data.doubts import Doubt, doubts_of
from lit_grpo.learner.batch import make_experience
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.rewards import AdditionReward, ExactMatch, FormatReward, MathReward, Reward
from lit_grpo.types import Completion, Prompt, Score
from tests import tiny


def scored(rewards: list[float], group_size: int = 4, **changes: Any):
    values = torch.tensor(rewards)
    made = tiny.rollout(rewards, changes.pop("lengths", [3] * len(rewards)), group_size, **changes)
    return replace(made, rewards={"right": values})


RIGHT = tiny.EvenReward(name="right")


@pytest.mark.parametrize(
    ("rewards", "status"),
    [([1, 0, 0, 0, 0, 0, 0, 0], "pass"), ([0] * 8, "fail"), ([1] * 8, "warn"), ([1] + [0] * 79, "warn")],
)
def test_signal(rewards, status):
    found = rollout.signal(scored([float(r) for r in rewards]), [RIGHT])
    assert found.status == status
    assert found.values["pass@1"] == pytest.approx(sum(rewards) / len(rewards))


def test_pass_at_k_is_exact():
    values = rollout.signal(scored([1.0, 1, 0, 0, 0, 0, 0, 0]), [RIGHT]).values
    # First prompt: 2 of 4 right. Two draws miss both with chance 1/6; the second prompt is never right.
    assert values == {"pass@1": 0.25, "pass@2": pytest.approx((5 / 6) / 2), "pass@4": 0.5}


@pytest.mark.parametrize(
    ("rewards", "status", "share"),
    [([1, 0, 0, 0, 1, 1, 0, 0], "pass", 1.0), ([1, 0, 0, 0] + [1] * 8, "warn", 1 / 3), ([1] * 8, "fail", 0.0)],
)
def test_spread(rewards, status, share):
    found = rollout.spread(scored([float(r) for r in rewards]), prompts_per_rollout=6)
    assert (found.status, found.values["share"]) == (status, pytest.approx(share))
    assert found.values["low"] <= share <= found.values["high"]
    assert f"about {6 * share:.1f} of 6 a rollout" in found.found


def test_spread_at_half_the_group_is_exact():
    values = rollout.spread(scored([1.0, 1, 0, 0]), 1).values
    assert values["share_at_half"] == pytest.approx(4 / 6)  # of the six pairs, four are mixed


def test_wilson():
    low, high = rollout.wilson(8, 10)  # 0.4902, 0.9433: Newcombe (1998), table I, method 3, without correction
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def experience(entropy: float = 0.5, gap: float = 0.0, sampler: float = -0.7):
    made = make_experience(scored([1.0, 0, 0, 0]), "cpu")
    shape = (4, 3)
    return replace(
        made,
        sampler_logprobs=torch.full(shape, sampler),
        old_logprobs=torch.full(shape, sampler + gap),
        entropy=torch.full(shape, entropy),
    )


@pytest.mark.parametrize(
    ("entropy", "status", "rule"), [(0.5, "pass", "filter"), (1.0, "pass", "no filter"), (0.05, "warn", "filter"),
                                    (5.0, "warn", "no filter")],
)  # fmt: skip
def test_entropy_rule(entropy, status, rule):
    found = rollout.initial_entropy(experience(entropy), vocabulary=1000)
    assert (found.status, found.values["rule"]) == (status, rule)
    assert found.values["initial_entropy"] == pytest.approx(entropy)


@pytest.mark.parametrize(
    ("gap", "bound", "status"), [(1e-5, 0.1, "pass"), (0.05, 0.1, "warn"), (0.2, 0.1, "fail"), (0.2, None, "warn"),
                                 (float("nan"), 0.1, "fail")],
)  # fmt: skip
def test_mismatch(gap, bound, status):
    found = rollout.mismatch(experience(gap=gap), bound)
    assert found.status == status
    if gap == gap:
        assert found.values["logprob_abs_diff"] == pytest.approx(gap, rel=1e-2)


def test_a_token_that_the_learner_holds_impossible_fails_whatever_the_mean():
    view = experience(sampler=-0.01)
    view.old_logprobs[0, 0] = -12.0
    found = rollout.mismatch(view, bound=100.0)
    assert found.status == "fail"
    assert "impossible" in found.found


def test_no_log_probabilities():
    view = experience()
    view.sampler_logprobs[:] = float("nan")
    assert rollout.mismatch(view, 0.1).status == "fail"
    assert rollout.mismatch(view, None).status == "warn"


@pytest.mark.parametrize(("cut", "most", "status"), [(0, 0.9, "pass"), (2, 0.9, "warn"), (4, 0.9, "fail")])
def test_truncation(cut, most, status):
    made = scored([0.0] * 4)
    completions = [Completion(0, i, (1, 2), (0.0, 0.0), "length" if i < cut else "stop", 0) for i in range(4)]
    made = replace(made, completions=completions)
    assert rollout.truncation(made, 2, most).status == status


@pytest.mark.parametrize(
    ("sums", "none", "status"), [({}, 0, "pass"), ({"reward_errors/failed_frac/right": (2, 4)}, 0, "fail"),
                                    ({"reward_errors/timeout_frac/right": (1, 100)}, 0, "warn"), ({}, 3, "warn")],
)  # fmt: skip
def test_rewards(sums, none, status):
    made = scored([1.0, 0, 0, 0], sums=sums, no_answer=torch.tensor([i < none for i in range(4)]))
    assert rollout.rewards(made, [RIGHT]).status == status


def test_the_pass_rate_is_that_of_the_verdicts_and_not_of_rewards_above_0():
    # Four wrong answers in the right form earn 10 each; partial credit is not a right answer either.
    formatted = replace(scored([10.0, 10, 10, 10]), correct=torch.tensor([False] * 4))
    found = rollout.signal(formatted, [FormatReward(weight=10.0), RIGHT])
    assert (found.status, found.values["pass@1"], found.found.split()[0]) == ("fail", 0.0, "right")
    without = rollout.signal(replace(scored([10.0, 10, 10, 10]), correct=None), [FormatReward()])
    assert (without.status, without.values) == ("warn", {})


def test_spread_at_half_the_group_counts_every_reward_apart():
    values = rollout.spread(scored([2.0, 2, 1, 0]), 1).values
    assert values["share_at_half"] == pytest.approx(5 / 6)  # of the six pairs, one is of equal rewards


# Prompts and tokenizer.


class Tokenizer:
    """Characters as ids, with what a real one may get wrong."""

    bos_token_id: int | None = 1
    eos_token_id = 2
    unk_token_id = 3
    chat_template: str | None = None

    def __init__(self, adds_bos: bool = True, **changes: Any) -> None:
        self.adds_bos = adds_bos
        vars(self).update(changes)

    def __call__(self, text, add_special_tokens=True):
        ids = [ord(c) if ord(c) < 128 else 3 for c in text]
        return {"input_ids": [1, *ids] if add_special_tokens and self.adds_bos else ids}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) if i > 3 else "" for i in ids)

    def __len__(self):
        return 128


def doubts(given: list[Prompt], tokenizer: Tokenizer) -> list[Doubt]:
    return doubts_of(given, PromptFormat(), tokenizer, [2])


def prompt(*ids: int, answer: str = "7", name: str = "p"):
    return Prompt(name, "3+4=", ids, answer)


@pytest.mark.parametrize(
    ("ids", "tokenizer", "status"),
    [((1, 50), Tokenizer(), "pass"), ((1, 1, 50), Tokenizer(), "fail"), ((50, 51), Tokenizer(), "warn"),
     ((50, 51), Tokenizer(adds_bos=False), "pass"), ((1, 50, 2), Tokenizer(), "fail"),
     # A token that also opens every message of a chat is no second one.
     ((1, 50, 1, 51), Tokenizer(), "pass"), ((50,), Tokenizer(bos_token_id=None), "pass")],
)  # fmt: skip
def test_special_tokens(ids, tokenizer, status):
    given = [prompt(1, 50), prompt(*ids)]
    assert prompts.special_tokens(given, tokenizer, [2], doubts(given, tokenizer)).status == status


def test_columns():
    line = "a.jsonl (verl): prompt from prompt (messages), answer from reward_model.ground_truth, 2 rows"
    two = [Prompt("a", "q", (1, 2), "1"), Prompt("b", "q", (1, 3), "2")]
    (found,) = prompts.columns([line], doubts(two, Tokenizer()))
    assert (found.status, found.found) == ("pass", line)
    assert prompts.columns([], doubts(two, Tokenizer())) == []
    same = [Prompt("a", "q", (1, 3), "1"), Prompt("b", "q", (1, 3), "2")]
    (found,) = prompts.columns([line], doubts(same, Tokenizer()))
    assert found.status == "warn"
    assert "all prompts are the same, with 2 answers" in found.found
    (found,) = prompts.columns([line], doubts([*same, Prompt("c", "r", (1, 5), "2")], Tokenizer()))
    assert "2 of 3 are the same, with 2 answers" in found.found


@pytest.mark.parametrize(
    ("form", "own", "status"), [("auto", None, "pass"), ("auto", "{{ x }}", "pass"), ("none", "{{ x }}", "warn")]
)
def test_template(form, own, status):
    found = prompts.template([prompt(1, 2)], PromptFormat(chat_template=form), Tokenizer(chat_template=own))
    assert found.status == status


def completions(*rows: tuple[tuple[int, ...], str, str]):
    made = scored([0.0] * len(rows), group_size=len(rows), lengths=[1] * len(rows))
    completions = [Completion(0, i, ids, (0.0,) * len(ids), why, 0) for i, (ids, why, _) in enumerate(rows)]  # type: ignore[arg-type]
    made = replace(made, completions=completions, texts=[text for _, _, text in rows])
    return made


GOOD: Any = ((55, 2), "stop", "7")


@pytest.mark.parametrize(
    ("given", "row", "status", "said"),
    [(prompt(1, 50), GOOD, "pass", "survive"), (prompt(1, 3), GOOD, "fail", "unknown tokens"),
     (prompt(1, 50, answer="½"), GOOD, "fail", "'½'"), (prompt(1, 50), ((55,), "stop", "7"), "fail", "without an end"),
     (prompt(1, 50), ((55,), "length", "7"), "pass", "survive"),
     (prompt(1, 50), ((999, 2), "stop", "7"), "fail", "ids"),
     (prompt(1, 50), ((55, 2), "stop", "8"), "pass", "50% of completions")],
)  # fmt: skip
def test_round_trip(given, row, status, said):
    found = prompts.round_trip([given], completions(GOOD, row), Tokenizer(), [2])
    assert found.status == status
    assert said in found.found


# The verifier.

GOLDS = [Prompt(f"p{i}", "", (1,), str(i)) for i in range(10)]


class Lenient(Reward):
    """Takes everything."""

    needs_answer = True

    def score(self, batch):
        return [Score(1.0) for _ in batch]


class Picky(ExactMatch):
    """Cannot read 4."""

    def score(self, batch):
        return [s if x.prompt.answer != "4" else Score(0.0) for s, x in zip(super().score(batch), batch, strict=True)]


class Odd(ExactMatch):
    """Wants its answers in a form of its own."""

    def __init__(self) -> None:
        super().__init__(pattern=r"<<(\d+)>>")


@pytest.mark.parametrize(
    ("reward", "form", "status", "said"),
    [(ExactMatch(), None, "pass", "all 10 golds as '{answer}'"), (AdditionReward(), None, "pass", "none of 10 wrong"),
     (ExactMatch(pattern=r"boxed{(\d+)}"), None, "pass", r"\\boxed{{answer}}"),
     (ExactMatch(pattern=r":(\d+)$"), None, "pass", ":{answer}"), (Lenient(), None, "fail", "10 of 10 wrong answers"),
     (Picky(), None, "fail", "9 of 10 golds; not that of 'p4': '4'"), (Odd(), None, "warn", "none of 10 golds"),
     (Odd(), "<<{answer}>>", "pass", "<<{answer}>>"), (Odd(), "{answer}", "fail", "none of 10 golds")],
)  # fmt: skip
def test_verifier(reward, form, status, said):
    (found,) = prompts.verifier(GOLDS, [reward, tiny.EvenReward()], Tokenizer(), form)
    assert found.status == status
    assert said in found.found


def test_a_form_that_the_model_cannot_write_is_passed_over():
    digits = char_tokenizer("0123456789:")
    (found,) = prompts.verifier(GOLDS, [ExactMatch(pattern=r":(\d+)$")], digits, None)
    assert found.values["format"] == ":{answer}"
    assert prompts.verifier(GOLDS, [Odd()], digits, None)[0].status == "warn"
    assert prompts.round_trip([prompt(1, answer="x")], completions(GOOD), digits, [2]).status == "fail"


def test_the_math_verifier():
    golds = [Prompt(a, "", (1,), a) for a in (r"\frac{1}{2}", "12", r"\sqrt{2}")]
    reward = MathReward(workers=1)
    try:
        (found,) = prompts.verifier(golds, [reward], Tokenizer(), None)
    finally:
        reward.close()
    assert found.status == "pass"


# Cost.


def policy(logits_chunk: int):
    model = torch.nn.Linear(100, 10, bias=False)
    model.logits_chunk = logits_chunk  # type: ignore[assignment]
    return model


def test_weights_count_each_tensor_once():
    trained, frozen = policy(1000), torch.nn.Linear(100, 10, bias=False).requires_grad_(False)
    found = cost.weight_bytes([trained, None, frozen, trained])
    assert found == {"weights": 8000, "gradients": 4000, "moments": 8000}


def test_logits_of_the_longest_pass():
    def logits(model: Any, tokens: int | None = 300, size: int | None = None) -> int:
        return cost.logits_bytes(model, 50, 1000, micro_batch_tokens=tokens, micro_batch_size=size)

    assert logits(policy(1000)) == 8 * 300 * 1000
    assert logits(policy(64)) == 8 * 64 * 1000
    assert logits(policy(1000), tokens=None, size=4) == 8 * 4 * 50 * 1000
    compiled = policy(64).bfloat16()
    compiled.compiled = True
    assert logits(compiled) == 4 * 64 * 1000


@pytest.mark.parametrize(
    ("room", "status"), [(2 * 10**6, "pass"), (1_050_000, "warn"), (900_000, "fail"), (None, "warn")]
)
def test_memory_is_scaled_to_the_length_limit(room, status):
    seen = cost.Memory(516_000, room, "of the card")
    static = cost.weight_bytes([policy(1000)])
    found = cost.memory_result(static, 12_000, seen, longest=40, limit=90, prompt=10, processes=1)
    assert found.values["logits_at_limit"] == 12_000
    assert found.values["expected_at_limit"] == 16_000 + 2 * 500_000
    assert found.status == status


def test_memory_of_this_machine():
    seen = cost.memory(torch.device("cpu"))
    assert 50 * 1024**2 < seen.peak < (seen.total or 1 << 60)


def test_time():
    metrics = {"time/sync": 0.0, "time/generate": 6.0, "time/reward": 0.001, "time/update": 2.0}
    found = cost.time_result(metrics, 900)
    assert found.found == (
        "8 s for the first rollout (sampling 75%, training 25%); 900 like it would take 2.0 h, "
        "later ones are mostly faster"
    )
    # Beside training, only what the learner waits counts.
    assert cost.time_result({**metrics, "time/learner_idle": 2.0}, 1).values["seconds"] == 4.0


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.0123, "12 ms"), (3.14159, "3.14 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_span(seconds, said):
    assert cost.span(seconds) == said


def test_result():
    assert [percent(v) for v in (0, 0.004, 0.5, 0.996, 1)] == ["0%", "0.4%", "50%", "99.6%", "100%"]
    with pytest.raises(ValueError, match="needs a remedy"):
        Result("x", "fail", "y")
