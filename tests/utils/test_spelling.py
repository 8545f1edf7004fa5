"""What is suggested for an unknown name is really near it, and the nearest comes first."""

from __future__ import annotations

import pytest

from lit_grpo.utils.spelling import near_files, near_names, nearest

RECIPES = ["ppo", "grpo", "dr_grpo", "gspo", "dapo", "vapo", "rloo", "cispo"]


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("gpro", RECIPES, "grpo"),
        ("dappo", RECIPES, "dapo"),
        ("drgrpo", RECIPES, "dr_grpo"),
        ("DAPO", RECIPES, "dapo"),
        ("grop", RECIPES, "grpo"),
        ("vlm", ["transformers", "vllm", "vllm_server"], "vllm"),
        ("vllm-server", ["transformers", "vllm", "vllm_server"], "vllm_server"),
        ("lrr", ["lr", "type"], "lr"),
        ("fti", ["fit", "filter", "test"], "fit"),
        ("bf16", ["float16", "float32", "bfloat16"], "bfloat16"),
        ("max_tokens", ["stop", "max_new_tokens"], "max_new_tokens"),
        ("max_epoch", ["min_epochs", "max_epochs", "max_steps"], "max_epochs"),
        ("group", ["rollouts", "group_size"], "group_size"),
        ("ExactMtch", ["MathReward", "ExactMatch"], "ExactMatch"),
        ("Jsonl", ["CsvPrompts", "JsonlPrompts"], "JsonlPrompts"),
        ("model.optimizer.lrr", ["model.optimizer.lr", "model.optimizer.type"], "model.optimizer.lr"),
    ],
)
def test_what_was_meant_is_found(word: str, known: list[str], meant: str) -> None:
    assert nearest(word, known) == meant


@pytest.mark.parametrize(
    ("word", "known"),
    [
        ("gsm8", ["tags", "two_form", "countdown"]),
        ("task", ["tags", "rate", "mask_it"][:1]),
        ("solution", ["question", "prompt"]),
        ("a", ["b", "c"]),
        ("seed", ["root", "tags"]),
        ("data.lr", ["data.val", "data.test"]),
        ("LIT_GRPO_FIT__DATA__LR", ["LIT_GRPO_FIT__DATA__VAL"]),
        ("2026-11-29_10-12-13", ["2025-01-02_20-48-56"]),
        ("", ["a"]),
        ("--", ["a"]),
    ],
)
def test_what_is_not_near_is_not_suggested(word: str, known: list[str]) -> None:
    assert nearest(word, known) is None


def test_several_are_named_only_if_they_are_equally_near():
    assert near_names("xpo", ["ppo", "grpo", "dpo"]) == ["ppo", "dpo"]
    assert near_names("dappo", RECIPES) == ["dapo"]
    assert near_names("clip", ["clip_low", "clip_high", "flip"]) == ["flip"]
    assert near_names("clip", ["clip_low", "clip_high", "flip"], slips_only=True) == ["flip"]
    assert near_names("micro", ["micro_batch_tokens"], slips_only=True) == []


def test_files_are_compared_without_their_endings():
    assert near_files("gsm8.yaml", ["tags.yaml", "two_form.yaml"]) == []
    assert near_files("gsm8.yaml", ["tags.yaml", "gsm8k.yaml"]) == ["gsm8k.yaml"]
    assert near_files("data.jsn", ["data.csv", "data.json", "date.txt"]) == ["data.json"]


def test_a_swap_of_neighbours_is_nearer_than_another_letter():
    assert near_names("frist", ["fritz", "first"]) == ["first"]
