"""Ten files in the shapes that people post: each trains from five lines, and says what was taken from where."""

from __future__ import annotations

import gzip
import json
import logging
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
import torch

from lit_grpo.cli.main import main
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.policy.model.load import load_model
from lit_grpo.types import Prompt
from tests import tiny
from tests.paths import ROOT

ALPHABET = string.printable[:95] + "\n"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FIVE_LINES = """\
model: {{policy: {{path: {model}}}}}
data:
  prompts: {{class_path: lit_grpo.data.FilePrompts, init_args: {{path: {path}}}}}
  rewards: [{{class_path: lit_grpo.rewards.{reward}}}]
  rollouts: 2
"""
SMALL = (
    *("--model.micro_batch_size", "8", "--data.group_size", "2", "--data.prompts_per_rollout", "4"),
    *("--data.sampling.max_new_tokens", "4", "--trainer.accelerator", "cpu", "--trainer.logger", "false"),
    *("--trainer.enable_checkpointing", "false", "--trainer.enable_progress_bar", "false"),
    *("--trainer.callbacks", "tests.data.test_posted_shapes.Look"),
)


class Look(tiny.Recorder):
    """A recorder that a test can find: the command line makes it."""

    last: Look
    prompts_seen: list[Prompt]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        Look.last, self.prompts_seen = self, batch.prompts
        self.decoded = [pl_module.tokenizer.decode(p.token_ids) for p in batch.prompts]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "Add."}


def jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def json_gz(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "train.json.gz"
    path.write_bytes(gzip.compress(json.dumps(rows, indent=1).encode()))
    return str(path)


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def shards(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "data").mkdir()
    for i, part in enumerate((rows[:2], rows[2:])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), folder / "data" / f"train-{i}-of-2.parquet")
    (folder / "README.md").write_text("about the data")
    return str(folder)


def saved(folder: Path, rows: list[dict[str, Any]]) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


class Shape(NamedTuple):
    """Four rows as somebody publishes them, and what is to become of them."""

    write: Callable[[Path, list[dict[str, Any]]], str]
    row: Callable[[int], dict[str, Any]]
    reward: str
    said: str
    """What the run says of it."""
    shown: str
    """The first prompt as the model reads it."""
    golds: tuple[str, ...]
    """Golds of the first row."""


def code_tests(i: int) -> str:
    return json.dumps({"inputs": ["1\n", "2\n"], "outputs": [f"{1 + i}\n", f"{2 + i}\n"]})


SHAPES = {
    "TRL": Shape(
        jsonl,
        lambda i: {"prompt": [SYSTEM, user(f"{i}+1?")], "answer": str(i + 1), "solution": f"It is {i + 1}."},
        "MathReward",
        "(trl): prompt from prompt (messages), answer from answer, 4 rows",
        "<system>Add.;<user>0+1?;<assistant>",
        ("1",),
    ),
    "verl": Shape(
        parquet,
        lambda i: {
            "data_source": "sums",
            "prompt": [SYSTEM, user(f"{i}+1?")],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
            "extra_info": {"index": i, "split": "train"},
        },
        "MathReward",
        "(verl): prompt from prompt (messages), answer from reward_model.ground_truth, source from data_source, 4 rows",
        "<system>Add.;<user>0+1?;<assistant>",
        ("1",),
    ),
    "OpenRLHF": Shape(
        jsonl,
        lambda i: {"input": f"{i}+1?", "label": str(i + 1), "datasource": "sums"},
        "MathReward",
        "(openrlhf): prompt from input (text), answer from label, source from datasource, 4 rows",
        "<user>0+1?;<assistant>",
        ("1",),
    ),
    "open-instruct": Shape(
        saved,
        lambda i: {"messages": [user(f"{i}+1?")], "ground_truth": [str(i + 1)], "dataset": ["gsm8k"]},
        "MathReward",
        "(open_instruct): prompt from messages (messages), answer from ground_truth, source from dataset, 4 rows",
        "<user>0+1?;<assistant>",
        ("1",),
    ),
    "prime-rl": Shape(
        jsonl,
        lambda i: {
            "problem_id": f"sum_{i}",
            "task_type": "verifiable_math",
            "prompt": f"{i}+1?",
            "verification_info": json.dumps({"ground_truth": str(i + 1)}),
            "metadata": "{}",
        },
        "MathReward",
        "(prime): prompt from prompt (text), answer from verification_info.ground_truth, source from task_type, 4 rows",
        "<user>0+1?;<assistant>",
        ("1",),
    ),
    "GSM8K": Shape(
        json_gz,
        lambda i: {"question": f"{i}+1?", "answer": f"{i}+1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1},000"},
        "MathReward",
        "(gsm8k): prompt from question (text), answer from answer, behind ####, 4 rows",
        "<user>0+1?;<assistant>",
        ("1000",),
    ),
    "DeepMath": Shape(
        shards,
        lambda i: {
            "question": f"{i}+1?",
            "final_answer": rf"\dfrac{{{i + 1}}}{{2}}",
            "difficulty": 4.5,
            "topic": "Sums",
            "r1_solution_1": "so it is",
        },
        "MathReward",
        "(columns): prompt from question (text), answer from final_answer, 4 rows",
        "<user>0+1?;<assistant>",
        (r"\dfrac{1}{2}",),
    ),
    "Search-R1": Shape(
        parquet,
        lambda i: {
            "id": f"train_{i}",
            "question": f"{i}+1?",
            "golden_answers": [str(i + 1), "one more"],
            "data_source": "nq",
            "prompt": [user(f"Answer: {i}+1?")],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": [str(i + 1), "one more"]}},
            "extra_info": {"index": i},
        },
        "ExactMatch",
        "answer from reward_model.ground_truth (any of up to 2 is right), source from data_source, 4 rows",
        "<user>Answer: 0+1?;<assistant>",
        ("1", "one more"),
    ),
    "multiple choice": Shape(
        parquet,
        lambda i: {"question": f"{i}+1?", "subject": "sums", "choices": ["one", "two", "three", "four"], "answer": i},
        "ChoiceReward",
        "(choices): prompt from question (text), with the options from choices below it, answer from answer, as a "
        "letter, 4 rows",
        "<user>0+1?\nA. one\nB. two\nC. three\nD. four;<assistant>",
        ("A",),
    ),
    "code": Shape(
        parquet,
        lambda i: {
            "data_source": "taco",
            "prompt": [user(f"Read x, print x+{i}.")],
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": code_tests(i)},
            "extra_info": {"index": i},
        },
        "CodeReward",
        "(verl): prompt from prompt (messages), tests from reward_model.ground_truth (4 rows), source from data_source",
        "<user>Read x, print x+0.;<assistant>",
        (),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    load_model(PolicyConfig(tiny=TinyModel(alphabet=ALPHABET, layers=1, width=16, heads=2))).save_pretrained(folder)
    tokenizer = char_tokenizer(ALPHABET)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", SHAPES)
def test_a_posted_file_trains_from_five_lines(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = SHAPES[name]
    (tmp_path / "posted").mkdir()
    path = shape.write(tmp_path / "posted", [shape.row(i) for i in range(4)])
    lines = FIVE_LINES.format(model=model, path=path, reward=shape.reward)
    assert len(lines.splitlines()) == 5
    (tmp_path / "run.yaml").write_text(lines)
    with caplog.at_level(logging.INFO):
        assert main(["fit", "--config", "run.yaml", *SMALL]) == 0
    assert len(Look.last.metrics) == 2
    assert shape.said in caplog.text
    (first,) = [prompt for prompt in Look.last.prompts_seen if "0" in prompt.question or "x+0" in prompt.question]
    assert first.golds == shape.golds
    # transformers gives a folder of this architecture a splitter of its own, which this vocabulary has no spaces for.
    assert "".join(shape.shown.split()) in ["".join(text.split()) for text in Look.last.decoded]
    assert shape.shown.count("\n") == (4 if name == "multiple choice" else 0)
    # The run shows the first prompt as the model reads it, with its gold.
    shown = "".join(caplog.text.partition("the first prompt (")[2].split())
    assert (
        f"|{''.join(shape.shown.split())}itsanswer:{''.join((' or '.join(map(repr, shape.golds)) or 'none').split())}"
        in shown
    )
    if name == "code":
        assert first.extra["cases"] == [{"input": "1\n", "output": "1\n"}, {"input": "2\n", "output": "2\n"}]


def test_every_shape_stands_in_the_table_of_the_docs() -> None:
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    for name, shape in SHAPES.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        assert f"`{shape.reward}`" in line
