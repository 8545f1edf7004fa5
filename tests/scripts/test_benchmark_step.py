"""The step benchmark runs, in a tiny form, and what it counts is right."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import benchmark_step
from scripts.step_benchmark.common import Clock, Work

pytestmark = pytest.mark.slow

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:?+=<>\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a random model and a tokenizer of single characters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lit_grpo.policy.model.char_tokenizer import char_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = char_tokenizer(ALPHABET)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"What is {i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_runs_and_prints_one_table(model, data, tmp_path):
    out = tmp_path / "steps.json"
    command = [sys.executable, "scripts/benchmark_step.py", "--model", str(model), "--data", str(data)]
    size = ["--prompts", "2", "--group-size", "4", "--max-new-tokens", "6", "--steps", "2", "--json", str(out)]
    root = Path(benchmark_step.ROOT)
    done = subprocess.run([*command, *size], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert len({line.count("|") for line in table}) == 1
    [entry] = json.loads(out.read_text())
    assert entry["name"] == "ours"
    assert len(entry["steps"]) == 2
    for step in entry["steps"]:
        assert (step["samples"], step["tokens"], step["reward"]) == (8, 48, 0.5), "exact lengths, half of each group"
        assert step["zero_gradient_groups"] == 0
        assert step["grad_norm"] > 0
        for phase in ("generate", "reward", "forward", "backward", "optimizer"):
            assert step["phases"][phase][0] > 0, phase
        parts = sum(wall for phase, (wall, _) in step["phases"].items() if phase != "reward")  # beside generation
        assert parts <= step["wall"]


def arguments(**changes):
    settings = {"prompts": 3, "group_size": 4, "max_new_tokens": 9, "data": None}
    return argparse.Namespace(**(settings | changes))


def test_given_samples_are_whole_groups_of_unequal_lengths(model):
    groups = benchmark_step.given_samples(model, [f"{i}{i + 1} is a text" for i in range(8)], arguments())
    assert [len(group) for group in groups] == [4, 4, 4]
    assert {len(ids) for ids in groups[0]} == {9, 6, 8, 5}
    assert len({tuple(ids[:5]) for ids in groups[0]}) == 4


def test_flops_are_those_of_the_weights(model):
    """6 for each weight and token, the embedding left out, the head for completion tokens alone."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model)
    weights = sum(p.numel() for name, p in net.named_parameters() if p.ndim == 2 and "embed" not in name)
    head = net.get_output_embeddings().weight.numel()
    work = Work(str(model), [], [], 4, 9, True, "half", "float32", "transformers", 4, 1, 1e-6, [])
    step = {"tokens": 70, "prompt_tokens": 30}
    assert benchmark_step.learner_flops(work, step, shared=True) == 6 * (weights * 100 + head * 70)
    assert benchmark_step.learner_flops(work, step, shared=False) == 6 * (weights * (70 + 4 * 30) + head * 70)


def test_rewards_depend_on_ids_alone_and_leave_no_group_out():
    work = Work("", ["2+3?", "7+8?"], ["5", "1,015"], 4, 9, True, "half", "float32", "transformers", 4, 1, 1e-6, [])
    group = [[1, 2], [5], [4, 4, 4], [9]]
    rewards = work.reward("2+3?", group, [""] * 4)
    assert sorted(rewards) == [0.0, 0.0, 1.0, 1.0]
    turned = work.reward("7+8?", group[::-1], ["x"] * 4)
    assert turned[::-1] == rewards, "neither text nor place counts"
    work.rewards = "answer"
    texts = ["it is 5", "5 or 6", "The answer is 5.", "none"]
    assert work.reward("2+3?", group, texts) == [1.0, 0.0, 1.0, 0.0]
    assert work.reward("7+8?", group[:1], ["1015"]) == [1.0]


def test_savings_name_settings_that_exist():
    """A renamed setting would silently drop a row of the table."""
    missing = [name for name, settings in benchmark_step.SAVINGS.items() if not benchmark_step.applies(settings)]
    assert not missing


def test_clock_adds_up_calls():
    clock = Clock()
    wait = clock.timed(lambda: sum(range(20_000)), "busy")
    wait()
    wait()
    clock.timed(lambda: None, lambda: None)()
    spent = clock.read()
    assert set(spent["phases"]) == {"busy"}
    assert 0 < spent["phases"]["busy"][0] <= spent["wall"]


def test_a_contestant_that_dies_is_quoted(tmp_path):
    work = Work("no/such/folder", ["?"], ["1"], 2, 4, True, "half", "float32", "transformers", 2, 1, 1e-6, [])
    (tmp_path / "dies.py").write_text("import sys; print('some talk'); sys.exit('it broke')")
    with pytest.raises(SystemExit, match=r"dying ended with code 1:\nsome talk\nit broke"):
        _ = benchmark_step.Contestant(sys.executable, str(tmp_path / "dies.py"), work, tmp_path, "dying").first
