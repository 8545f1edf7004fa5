"""Supervised fine-tuning: the loss by hand, what is learned, and what is refused with the reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_grpo.cli.main import main
from lit_grpo.data import AdditionPrompts, InMemoryPrompts, JsonlPrompts
from lit_grpo.datamodule import RolloutDataModule
from lit_grpo.errors import UserError
from lit_grpo.evaluation import EvaluationSet
from lit_grpo.objectives import Objective, ObjectiveConfig
from lit_grpo.policy import OptimizerConfig, PolicyConfig, TinyModel
from lit_grpo.rewards import ExactMatch
from lit_grpo.rollout.supervised import DemonstrationFormat, encode_demonstrations
from lit_grpo.types import Experience, Prompt, Sampling
from tests import tiny

SFT = ObjectiveConfig(recipe="sft")


def test_the_loss_by_hand() -> None:
    """Mean over all tokens of both solutions of -log p: (0.5 + 1.0 + 0.1 + 0.2 + 0.3) / 5, whatever the rewards."""
    made = Objective.from_recipe("sft")
    logprobs = torch.tensor([[-0.5, -1.0, 9.0], [-0.1, -0.2, -0.3]], dtype=torch.float64, requires_grad=True)
    for rewards in ([1.0, 1.0], [0.0, -3.0]):
        experience = Experience(
            torch.tensor([2, 3]), torch.arange(2), torch.tensor(rewards), torch.zeros(2, dtype=torch.bool), width=3
        )
        out = made.loss(logprobs, made.plan(experience, *made.advantages(experience, made.new_state())))
        (gradient,) = torch.autograd.grad(out.loss, logprobs)
        assert float(out.loss) == pytest.approx(2.1 / 5)
        torch.testing.assert_close(gradient, -torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.float64) / 5)


def data(**changes: Any) -> RolloutDataModule:
    return tiny.data(**({"group_size": 1, "rewards": [ExactMatch()]} | changes))


@pytest.mark.slow
def test_it_learns_the_quickstarts_addition_and_starts_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("supervised fine-tuning samples nothing")

    alphabet = TinyModel(alphabet="0123456789+=", layers=2, width=64, heads=4)
    module = tiny.module(policy=PolicyConfig(tiny=alphabet), objective=SFT, optimizer=OptimizerConfig(lr=3e-3),
                         micro_batch_size=512)  # fmt: skip
    recorder = tiny.Recorder()
    with monkeypatch.context() as context:
        context.setattr("lit_grpo.rollout.engine_start.make_engine", refuse)
        settings: dict[str, Any] = {"rollouts": 150, "prompts_per_rollout": 100, "sampling": Sampling(max_new_tokens=3)}
        tiny.trainer(callbacks=[recorder]).fit(module, datamodule=data(**settings))
    assert recorder.metrics[0]["loss"] == pytest.approx(math.log(14), rel=0.2), "nearly uniform over the alphabet"
    assert not any(key.startswith(("reward", "groups/zero")) for key in recorder.metrics[-1])
    assert sorted(recorder.prompts[0]) == sorted(recorder.prompts[7]), "all 100 problems in each rollout"
    test = {"all": EvaluationSet(AdditionPrompts(digits=1))}
    (found,) = tiny.trainer().test(module, datamodule=data(test=test, **settings), verbose=False)
    assert found["test/all/pass@1"] > 0.9


def test_one_step_is_the_gradient_of_the_likelihood_without_the_prompt() -> None:
    """The module's loss is that of the model itself on question + answer + end of sequence, prompt left out."""
    module = tiny.module(objective=SFT)
    recorder = tiny.Recorder()
    source = InMemoryPrompts([{"prompt": "1+2=", "answer": "3"}, {"prompt": "5+5=", "answer": "10"}])
    trainer = tiny.trainer(callbacks=[recorder])
    trainer.fit(module, datamodule=data(prompts=source, prompts_per_rollout=2, rollouts=1))
    torch.manual_seed(0)
    fresh = tiny.module(objective=SFT)
    fresh.configure_model()
    assert fresh.policy is not None
    tokenizer, model = fresh.tokenizer, fresh.policy.model.eval()
    total, tokens = 0.0, 0
    for question, answer in (("1+2=", "3"), ("5+5=", "10")):
        prompt = tokenizer(question)["input_ids"]
        solution = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *solution]])).logits[0].log_softmax(-1)
        total -= sum(float(logits[len(prompt) - 1 + t, token]) for t, token in enumerate(solution))
        tokens += len(solution)
    assert recorder.metrics[0]["loss"] == pytest.approx(total / tokens, abs=1e-5)


class Letters:
    """A tokenizer of single characters."""

    eos_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}


def encoded(form: DemonstrationFormat, *prompts: Prompt, limit: int = 20) -> dict[str, str]:
    found = encode_demonstrations(form, prompts, Letters(), (7, 0), limit, {"p": "rows.jsonl:4"})
    return {key: "".join(map(chr, ids)) for key, ids in found.items()}


def test_what_is_taught() -> None:
    prompt = Prompt("p", "1+1", (1,), "2", extra={"solution": "1+1 is 2"})
    assert encoded(DemonstrationFormat(), prompt) == {"p": "2\0"}
    assert encoded(DemonstrationFormat(template=r"\boxed{{answer}}"), prompt) == {"p": "\\boxed{2}\0"}
    assert encoded(DemonstrationFormat(column="solution"), prompt) == {"p": "1+1 is 2\0"}
    long = Prompt("q", "", (1,), "2" * 30)
    assert encoded(DemonstrationFormat(on_long="drop"), prompt, long) == {"p": "2\0"}


GTPO = DemonstrationFormat(template="<reasoning>{solution}</reasoning>\n<answer>{answer}</answer>")


def test_a_template_of_solution_and_answer(tmp_path: Path) -> None:
    row = {"question": "48 and half of it?", "answer": "48/2 = 24\n48+24 = 1,072 {answer}\n#### 1,072"}
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(row))
    for settings in ({}, {"question_column": "question", "answer_pattern": r"####\s*(.+)"}):
        (read,) = JsonlPrompts(str(tmp_path / "gsm8k.jsonl"), **settings).rows()
        assert read.extra == {"solution": row["answer"]}, "the whole column is kept"
        assert read.answer == ("1,072" if settings else "1072")
        prompt = Prompt("p", read.question, (1,), read.answer, extra=read.extra)
        expected = f"<reasoning>48/2 = 24\n48+24 = 1,072 {{answer}}</reasoning>\n<answer>{read.answer}</answer>"
        assert GTPO.text(prompt, "") == expected
        assert DemonstrationFormat(column="solution").text(prompt, "") == row["answer"]
    prompt = Prompt("p", "", (1,), "2", extra={"steps": "1+1"})
    assert DemonstrationFormat("steps", "{solution} = {answer}").text(prompt, "") == "1+1 = 2"


def test_two_rollouts_from_gsm8ks_own_rows(tmp_path: Path) -> None:
    rows = [{"question": f"{i}+1=", "answer": f"{i}+1 is {i + 1}\n#### {i + 1}"} for i in range(5)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    alphabet = "0123456789+= \n<>/abcdefghijklmnopqrstuvwxyz"
    recorder, texts = tiny.Recorder(), []
    recorder.on_train_batch_start = lambda *args: texts.extend(args[2].texts)  # type: ignore[method-assign]
    settings: dict[str, Any] = {"rollouts": 2, "prompts_per_rollout": 5, "demonstrations": GTPO}
    source = JsonlPrompts(str(tmp_path / "gsm8k.jsonl"))
    module = tiny.module(policy=PolicyConfig(tiny=TinyModel(alphabet=alphabet)), objective=SFT)
    tiny.trainer(callbacks=[recorder]).fit(
        module, datamodule=data(prompts=source, sampling=Sampling(max_new_tokens=60), **settings)
    )
    assert len(recorder.metrics) == 2
    wanted = [f"<reasoning>{i}+1 is {i + 1}</reasoning>\n<answer>{i + 1}</answer>" for i in range(5)]
    assert sorted(texts) == sorted(wanted * 2)


def test_the_command_line_needs_no_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = {"question": "1+1=", "answer": "1+1=2\n#### 2"}
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(json.dumps(row) for _ in range(5)))
    alphabet = "0123456789+=<>/\n #abcdefghijklmnopqrstuvwxyz"
    settings = {
        "model": {"policy": {"tiny": {"alphabet": alphabet, "layers": 1, "width": 32}}, "objective": {"recipe": "sft"}},
        "data": {
            "prompts": {"class_path": "lit_grpo.data.JsonlPrompts", "init_args": {"path": "gsm8k.jsonl"}},
            "prompts_per_rollout": 5,
            "group_size": 1,
            "rollouts": 2,
            "demonstrations": {"template": GTPO.template},
            "sampling": {"max_new_tokens": 56},
        },
        "trainer": {"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["fit", "--config", "run.yaml"]) == 0
    assert main(["fit", "--config", "run.yaml", "--model.objective.recipe", "grpo"]) == 2, "this one scores"


def test_bad_solutions_are_refused_with_their_place() -> None:
    for form, prompt, match in (
        (DemonstrationFormat(), Prompt("p", "", (1,)), "row 'p' has no gold answer"),
        (DemonstrationFormat(column="soluton"), Prompt("p", "", (1,), "2", extra={"solution": "x"}), "'soluton'"),
        (DemonstrationFormat(column="solution"), Prompt("p", "", (1,), "2", extra={"solution": " "}), "no solution"),
        (DemonstrationFormat(), Prompt("p", "", (1,), "2" * 20), "has 21 tokens"),
    ):
        with pytest.raises(UserError, match=match) as caught:
            encoded(form, prompt)
        assert caught.value.where == "rows.jsonl:4"
    with pytest.raises(UserError, match="all 1 solutions"):
        encoded(DemonstrationFormat(on_long="drop"), Prompt("p", "", (1,), "2" * 20))
    with pytest.raises(UserError, match="every solution would be the same"):
        DemonstrationFormat(template="42")
    with pytest.raises(UserError, match="no place for the text of the column 'solution'"):
        DemonstrationFormat(column="solution", template="= {answer}")
    with pytest.raises(UserError, match="no column 'solution'"):
        encoded(DemonstrationFormat(template="{solution}"), Prompt("p", "", (1,), "2"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sampler_correction": "tis_token"}, "no mismatch"),
        ({"dynamic_sampling": True}, "no groups of samples"),
        ({"drop_zero_variance": True}, "no groups of samples"),
        ({"ratio": "token", "trust_region": "clip"}, "no old policy"),
        ({"advantage": "group_std"}, "every solution counts 1"),
        ({"keep_sign": "positives"}, "no rewards"),
        ({"reward_map": "signed"}, "no rewards to shape"),
        ({"overlong_penalty": True}, "no rewards to shape"),
        ({"label_noise": 0.1}, "no rewards to shape"),
        ({"nll_coef": 0.1}, "is that already"),
        ({"kl_coef": 0.1, "kl_placement": "reward"}, "KL term to go into"),
    ],
)
def test_what_is_about_samples_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Objective.from_recipe("sft", **changes)


def test_a_run_that_contradicts_it_is_refused() -> None:
    with pytest.raises(UserError, match="group_size is 4: nothing is sampled"):
        tiny.trainer().fit(tiny.module(objective=SFT), datamodule=data(group_size=4))
    with pytest.raises(UserError, match="nothing to sample ahead"):
        tiny.module(objective=SFT, max_staleness=1)
