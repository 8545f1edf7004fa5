"""The text that rewards see is what the policy wrote, but for the token that ended it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from lit_grpo.commands.check.prompts import verifier
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.rewards import ExactMatch, FormatReward
from lit_grpo.rollout.generator import RolloutGenerator
from lit_grpo.types import Completion, Prompt
from lit_grpo.utils.text import completion_text
from tests import tiny

WORDS = ["<unk>", "<eos>", "<think>", "</think>", "<answer>", "</answer>", "<end of turn>", *"0123456789+= ", "<pad>"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One whose tags are special tokens, as those of many models that reason."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>", pad_token="<pad>")
    made.add_special_tokens({"additional_special_tokens": WORDS[2:7]})
    return made


def ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("<think>2+2</think><answer>4</answer><eos>", "<think>2+2</think><answer>4</answer>"),
        ("<answer>4</answer><end of turn>", "<answer>4</answer>"),
        ("<answer>4</answer>", "<answer>4</answer>"),
        ("4<eos><eos>", "4<eos>"),
        ("<pad>4<pad><eos>", "4"),
        ("<eos>", ""),
        ("", ""),
    ],
)
def test_tags_stay_and_the_end_goes(tokenizer, written, seen):
    text = completion_text(tokenizer, ids(tokenizer, written), (1, 6))
    assert text.replace(" ", "") == seen


class Unused:
    policy_version = 0

    def close(self) -> None:
        pass


def test_rewards_see_tags_that_are_special_tokens(tokenizer):
    rewards = [ExactMatch(pattern="<answer>(.*?)</answer>"), FormatReward()]
    generator = RolloutGenerator(Unused(), Unused(), tokenizer, rewards, 0, end_token_ids=(1,))  # type: ignore[arg-type]
    prompt = Prompt("p", "2+2=", ids(tokenizer, "2+2="), "4")
    good, bad = (ids(tokenizer, text) for text in ("<think>2+2</think> <answer>4</answer><eos>", "4<eos>"))
    group = [Completion(0, k, one, (0.0,) * len(one), "stop", 0) for k, one in enumerate((good, bad))]
    scored = generator.score_group(prompt, group).result()
    assert [score.value for score in scored.scores["exact_match"]] == [1.0, 0.0]
    assert [score.value > 0 for score in scored.scores[rewards[1].name]] == [True, False]
    generator.close()


def test_the_preflight_asks_the_verifier_with_what_the_policy_can_write(tokenizer):
    prompts = [Prompt(f"p{n}", f"{n}+1=", ids(tokenizer, f"{n}+1="), str(n + 1)) for n in range(5)]
    (result,) = verifier(
        prompts, [ExactMatch(pattern="<answer>(.*?)</answer>")], tokenizer, "<answer>{answer}</answer>"
    )
    assert result.status == "pass"
    # A tokenizer that does not know the tags writes something else in their place.
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(["<unk>", "<eos>", *"0123456789+="])}, "<unk>"))
    words.pre_tokenizer = Split("", "isolated")
    poor = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    (result,) = verifier(prompts, [ExactMatch(pattern="<answer>(.*?)</answer>")], poor, "<answer>{answer}</answer>")
    assert result.status == "fail"


def test_a_data_module_encodes_its_prompts_anew_for_another_model():
    """The ids of the first model's vocabulary mean other characters to the second."""
    data = tiny.data(rollouts=1)
    shape: dict[str, Any] = {"width": 32, "layers": 1, "heads": 2}
    seen = []
    for alphabet in ("0123456789+= ", "+0123456789 ="):
        module = tiny.module(policy=PolicyConfig(tiny=TinyModel(alphabet=alphabet, **shape)))
        trainer = tiny.trainer()
        trainer.fit(module, datamodule=data)
        prompt = data.train_prompts[0]
        seen.append(prompt.token_ids)
        assert module.tokenizer.decode(prompt.token_ids) == prompt.question
    assert seen[0] != seen[1]
