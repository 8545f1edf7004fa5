"""Stop strings: the end that is found token by token is the first at which the whole text holds one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_grpo.cli.main import main
from lit_grpo.engines.base import EngineError
from lit_grpo.engines.stop_strings import StopStrings, stop_strings
from lit_grpo.errors import UserError
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.types import Rollout, Sampling
from tests import tiny

PIECES = ("<", "/", "answer", ">", ">\n", "</answer>", "a", "ns", "wer", " ", "\n", "x", "</", "7")


class Pieces:
    """A tokenizer whose tokens are these texts."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: list[int]) -> str:
        self.decoded += 1
        return "".join(PIECES[i] for i in ids)


def expected(tokenizer: Any, ids: list[int], stop: tuple[str, ...]) -> int | None:
    """The first number of tokens whose whole text holds a string."""
    return next(
        (n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in stop)),
        None,
    )


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=40),
    st.sampled_from([("</answer>",), ("\n\n",), ("swer", "7x"), ("> ",), ("x", "</answer>")]),
)
def test_the_end_is_that_of_the_whole_text(ids: list[int], stop: tuple[str, ...]) -> None:
    found = StopStrings(Pieces(), stop)
    end = expected(Pieces(), ids, stop)
    assert found.end(ids) == end
    one_by_one = [found.end(ids[: n + 1], start=n) for n in range(len(ids) if end is None else end)]
    assert one_by_one == [None] * (len(one_by_one) - 1) + [end] if one_by_one else end is None


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte-level tokenizer with merges and special tokens, as most models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<eos>", "</think>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    text = ["the answer is <answer>7</answer>\n\nso. 答案是七。 </answer>\n <reasoning>x</reasoning>"] * 20
    made.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", additional_special_tokens=["</think>"])


@pytest.mark.parametrize("stop", [("</answer>",), ("。",), ("七。 <",), ("</think>",), ("\n\n", "er>\n"), ("r",)])
def test_a_byte_level_tokenizer(tokenizer: Any, stop: tuple[str, ...]) -> None:
    generator, ends = random.Random(0), 0
    texts = [
        "the answer",
        "<answer>7</answer>\n\n",
        "答案是七。 </answer>",
        " </",
        "answer>",
        "</think>",
        "\n",
        "<eos>",
    ]
    for _ in range(200):
        ids = []
        for _ in range(generator.randrange(1, 8)):
            # Whole texts, and tokens at random: halves of characters, unfinished words.
            if generator.random() < 0.5:
                ids += tokenizer(generator.choice(texts))["input_ids"]
            else:
                ids.append(generator.randrange(len(tokenizer)))
        end = expected(tokenizer, ids, stop)
        assert StopStrings(tokenizer, stop).end(ids) == end
        ends += end is not None
    assert 20 < ends < 200, "the test needs both"


def test_most_tokens_are_decoded_once() -> None:
    tokenizer = Pieces()
    found = StopStrings(tokenizer, ("</answer>",))
    for _ in range(100):
        assert found.end([6, 7, 8, 11, 13]) is None
    assert tokenizer.decoded == 5


def test_what_is_no_list_of_texts_is_refused() -> None:
    for stop in ("</answer>", ("",), ("a", ""), (3,)):
        with pytest.raises(UserError, match="not a list of texts that hold something"):
            Sampling(stop=stop)  # type: ignore[arg-type]
    assert stop_strings(Sampling(), None) is None
    with pytest.raises(EngineError, match="needs the policy's tokenizer"):
        stop_strings(Sampling(stop=("a",)), None)


class Look(tiny.Recorder):
    """A recorder that a test can find: the command line makes it."""

    trained: Rollout
    evaluated: Rollout

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Rollout, batch_idx: int) -> None:
        Look.trained = batch

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Rollout, *_: Any) -> None:
        Look.evaluated = batch


RUN = """
seed_everything: 1
model: {policy: {tiny: {alphabet: "0123456789+=", layers: 1, width: 32, heads: 2}}, objective: {recipe: grpo}}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts, init_args: {digits: 1, n: 8}}
  val: {mine: {prompts: {class_path: lit_grpo.data.AdditionPrompts, init_args: {digits: 1, n: 8}}, samples: 4}}
  rewards: [{class_path: tests.tiny.EvenReward}]
  prompts_per_rollout: 8
  group_size: 8
  rollouts: 1
  sampling: {max_new_tokens: 20, stop: ["7", "=="]}
trainer: {accelerator: cpu, logger: false, enable_checkpointing: false, enable_progress_bar: false, max_epochs: 1,
          num_sanity_val_steps: 0, val_check_interval: 1,
          callbacks: [{class_path: tests.engines.test_stop_strings.Look}]}
"""


def test_training_and_evaluation_end_at_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    assert main(["fit", "--config", "run.yaml"]) == 0
    for batch in (Look.trained, Look.evaluated):
        found = 0
        for c in batch.completions:
            # Padding, which an untrained model samples too, comes between the two signs.
            text = str(char_tokenizer().decode(list(c.token_ids)))
            ends = text.endswith(("7", "=="))
            assert not any(string in text[:-1] for string in ("7", "==")), "nothing behind it"
            assert not ends or c.finish_reason == "stop"
            found += ends
        assert found > len(batch.texts) / 4
        assert any(text.endswith("7") for text in batch.texts), "the reward sees the string"


def test_the_preflight_takes_them_for_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    main(["check", "--no-step", "--config", "run.yaml"])
    out = capsys.readouterr().out
    assert "prompts and golds survive the tokenizer" in out
    assert "without an end token" not in out


@pytest.mark.parametrize("given", ['[""]', '["a", ""]'])
def test_an_empty_one_is_one_screen(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    assert main(["fit", "--config", "run.yaml", "--data.sampling.stop", given]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "not a list of texts that hold something" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("token", [-1, 14, 10**6])
@pytest.mark.parametrize("part", ["sampling", "eval_sampling"])
def test_ids_that_no_token_has_are_refused_before_a_model_is_made(token, part):
    settings: dict[str, Any] = {part: Sampling(max_new_tokens=5, stop_token_ids=(3, token))}
    if part == "eval_sampling":
        settings["val_prompts"] = tiny.AdditionPrompts(digits=1, n=4)
    module = tiny.module()
    with pytest.raises(
        UserError, match=f"stop_token_ids (holds|is) {token}, (and the tokenizer has 14 tokens|must be at least 0)"
    ):
        tiny.trainer().fit(module, datamodule=tiny.data(**settings))
    assert module.policy is None
