"""What a run needs, told from its settings: sizes, sources, cards, memory and disk."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.commands.check import needs as module
from lit_grpo.commands.check.needs import needs, processes, size_of
from lit_grpo.commands.check.result import Result
from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy.config import (
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    QuantizationConfig,
    TinyModel,
)

SEVEN = PolicyConfig(path="somebody/Model-7B")
ADDITION = {"class_path": "lit_grpo.data.AdditionPrompts", "init_args": {"digits": 1}}


def settings(policy: PolicyConfig = SEVEN, **changes: Any) -> dict[str, Any]:
    """A configuration as it is parsed; ``model``, ``data`` and ``trainer`` of ``changes`` are laid over it."""
    made: dict[str, Any] = {
        "model": {
            "policy": asdict(policy), "objective": asdict(ObjectiveConfig()), "optimizer": asdict(OptimizerConfig()),
            "critic": None,
        },
        "data": {"prompts": ADDITION, "engine": {"name": "vllm", "args": {}}, "rollouts": 100},
        "trainer": {"devices": 1, "num_nodes": 1, "strategy": "auto", "accelerator": "auto"},
        "checkpoint": {"every_n_rollouts": 50, "keep_last": 2, "keep_best": 1, "dirpath": None},
    }  # fmt: skip
    for key, values in changes.items():
        made[key] = {**made[key], **values}
    return made


def lines(configuration: dict[str, Any]) -> dict[str, Result]:
    return {result.name: result for result in needs(configuration)}


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("Qwen/Qwen2.5-7B", 7e9),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1.5e9),
        ("Qwen/Qwen3-30B-A3B-Base", 30e9),
        ("meta-llama/Llama-3.1-8B-Instruct", 8e9),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 135e6),
        ("google/gemma-2-2b-it", 2e9),
        ("microsoft/phi-4", None),
        ("somebody/8Ball", None),
    ],
)
def test_the_size_of_a_model_by_its_name(path: str, parameters: float | None):
    assert size_of(PolicyConfig(path=path)).parameters == parameters


def test_the_size_of_a_model_that_is_here_is_counted(tmp_path: Path):
    from lit_grpo.policy.model.load import load_model

    tiny = PolicyConfig(tiny=TinyModel(layers=1, width=16, heads=2))
    model = load_model(tiny)
    size = size_of(tiny)
    assert (size.parameters, size.known_from) == (sum(p.numel() for p in model.parameters()), "by its configuration")
    model.save_pretrained(tmp_path / "99B")
    assert size_of(PolicyConfig(path=str(tmp_path / "99B"))).parameters == size.parameters, "not what its name says"


def test_weights_gradients_and_moments_over_the_cards():
    whole = lines(settings())["card memory"].values
    assert whole["policy"] == 7e9 * 16
    assert whole["per_card"] == 7e9 * 16 + 7e9 * 2
    shards = lines(settings(trainer={"devices": 8, "num_nodes": 2, "strategy": "fsdp"}))["card memory"].values
    assert shards["shards"] == 16
    assert shards["per_card"] == 7e9 + 7e9 * 2
    copies = lines(settings(trainer={"devices": 8}))["card memory"].values
    assert copies["per_card"] == whole["per_card"], "without fsdp each card has all of it"
    assert whole["engine_per_card"] == 7e9 * 2
    apart = lines(settings(data={"engine": {"name": "vllm", "cards": [1]}}))["card memory"].values
    assert apart["per_card"] == 7e9 * 16, "engines on cards of their own"
    assert "engine_per_card" not in lines(settings(data={"engine": {"name": "vllm_server"}}))["card memory"].values


def test_engines_on_cards_of_their_own_are_counted():
    four = {"devices": 4, "strategy": "fsdp"}
    engine: dict[str, Any] = {"name": "vllm", "processes": 2, "cards": [4, 5, 6, 7]}
    found = lines(settings(data={"engine": engine}, trainer=four))
    assert found["cards"].found.startswith("8 (trainer.strategy fsdp), 4 to learn and 4 for the engines; ")
    assert (found["cards"].values["cards"], found["cards"].values["engine_cards"]) == (8, 4)
    assert found["card memory"].values["engine_per_card"] == 7e9 * 2 * 2, "each process has all weights"
    assert found["card memory"].values["per_card"] == 7e9 * 2 * 2, "more than the learner's quarter, 28 GB"
    hosts = lines(settings(data={"engine": engine}, trainer=four | {"num_nodes": 2}))["cards"]
    assert hosts.found.startswith(
        "16, 8 on each of 2 machines (trainer.strategy fsdp), 4 to learn and 4 for the engines"
    )
    assert hosts.values["cards"] == 16
    servers = {"cards": [[4, 5], [6, 7]]}
    for args, share in (
        ({"tensor_parallel_size": 2}, 2),
        ({"tensor-parallel-size": 2}, 2),
        ({"data_parallel_size": 2}, 1),
    ):
        engine = {"name": "vllm_server", "server": servers, "args": args}
        found = lines(settings(data={"engine": engine}, trainer={"devices": 2, "strategy": "ddp"}))
        assert found["cards"].values["cards"] == 6
        assert found["card memory"].values["engine_per_card"] == 7e9 * 2 / share
        assert found["card memory"].values["per_card"] == 7e9 * 16


def test_ranks_of_a_server_that_are_no_number_are_refused():
    engine = {"name": "vllm_server", "server": {"cards": [[1]]}, "args": {"tensor_parallel_size": "two"}}
    with pytest.raises(UserError, match="tensor_parallel_size is 'two'"):
        needs(settings(data={"engine": engine}))


def test_several_processes_on_a_card_each_hold_the_weights():
    for number, times in ((3, 3), ("auto", 1)):
        engine = {"name": "vllm", "processes": number, "dtype": "float16"}
        values = lines(settings(data={"engine": engine}))["card memory"].values
        assert values["engine_per_card"] == 7e9 * 2 * times
        assert values["per_card"] == 7e9 * 16 + 7e9 * 2 * times


@pytest.mark.parametrize(("path", "card"), [("somebody/Model-0.5B", 24), ("somebody/Model-3B", 80), ("a/b-4B", 96)])
def test_the_smallest_card_with_room_for_activations_is_named(path: str, card: int):
    held = lines(settings(PolicyConfig(path=path)))["card memory"].values
    assert held["card_gb"] == card
    assert held["per_card"] <= 0.8 * card * 1e9


def test_what_else_is_held():
    eight_bits = asdict(OptimizerConfig(type="torchao.optim.AdamW8bit"))
    assert lines(settings(model={"optimizer": eight_bits}))["card memory"].values["policy"] == 7e9 * 10
    kl = asdict(ObjectiveConfig(kl_coef=0.1))
    assert lines(settings(model={"objective": kl}))["card memory"].values["reference"] == 7e9 * 4
    ppo = asdict(ObjectiveConfig(recipe="ppo"))
    assert lines(settings(model={"objective": ppo}))["card memory"].values["critic"] == 7e9 * 16
    half = asdict(CriticConfig(path="somebody/Critic-3.5B"))
    assert lines(settings(model={"objective": ppo, "critic": half}))["card memory"].values["critic"] == 3.5e9 * 16
    shared = asdict(CriticConfig(backbone="shared"))
    assert "critic" not in lines(settings(model={"objective": ppo, "critic": shared}))["card memory"].values
    four_bits = PolicyConfig(path="a/b-8B", lora=LoraConfig(), quantization=QuantizationConfig(double=False))
    found = lines(settings(four_bits, model={"objective": kl}))
    assert found["card memory"].values["policy"] == 8e9 * 4.5 / 8
    assert "reference" not in found["card memory"].values, "it is the policy without its adapters"
    assert "adapters alone" in found["disk"].found
    assert {"peft", "bitsandbytes", "vllm"} <= set(found["packages"].values["packages"])


def test_more_than_any_card_has_is_said():
    result = lines(settings(PolicyConfig(path="a/b-70B")))["card memory"]
    assert result.status == "warn"
    assert "trainer.strategy fsdp" in result.remedy


@pytest.mark.parametrize(
    ("trainer", "count"),
    [({"devices": 4}, 4), ({"devices": "2", "num_nodes": 3}, 6), ({"devices": [0, 3]}, 2), ({"devices": "auto"}, 1),
     ({"devices": -1}, 1), ({}, 1)],
)  # fmt: skip
def test_processes(trainer: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 0)
    assert processes(trainer) == count


def test_where_the_questions_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text("{}\n")
    sources = [
        {"class_path": "lit_grpo.data.JsonlPrompts", "init_args": {"path": "mine.jsonl"}},
        {"class_path": "HubPrompts", "init_args": {"dataset": "a/b", "data_files": "c/d.parquet"}},
    ]
    data = {
        "prompts": {"class_path": "lit_grpo.data.MixedPrompts", "init_args": {"sources": sources}},
        "val": {"math500": {"samples": 4}, "own": {"path": "yours.jsonl"}}, "val_prompts": "mine.jsonl",
        "test": {"aime24": {"prompts": {"class_path": "BenchmarkPrompts", "init_args": {"benchmark": "aime25"}}}},
    }  # fmt: skip
    told = [(r.name, r.status, r.found) for r in needs(settings(data=data)) if "set" in r.name or " " in r.name]
    found = [one for one in told if one[0] != "card memory"]
    assert found == [
        ("training data", "pass", "mine.jsonl"),
        ("training data", "warn", "a/b of the hub (c/d.parquet); not on this machine"),
        ("val math500", "warn", "HuggingFaceH4/MATH-500 of the hub (test, 500 questions); not on this machine"),
        ("val own", "warn", "yours.jsonl; not on this machine"),
        ("val set", "pass", "mine.jsonl"),
        ("test aime24", "warn", "math-ai/aime25 of the hub (test, 30 questions); not on this machine"),
    ]


def test_the_disk(tmp_path: Path):
    tiny = PolicyConfig(tiny=TinyModel(layers=1, width=16, heads=2))
    size = size_of(tiny).parameters
    assert size is not None
    result = lines(settings(tiny, checkpoint={"dirpath": str(tmp_path / "not/yet")}))["disk"]
    assert (result.status, result.values["checkpoint"], result.values["checkpoints"]) == ("pass", size * 12, 4)
    assert lines(settings(PolicyConfig(path="a/b-9000B")))["disk"].status == "warn"
    assert "no checkpoints" in lines(settings(trainer={"enable_checkpointing": False}))["disk"].found
