"""What the configurations of papers run with in tests: a tiny model in the place of the large one, a hub of a few rows.

The hub's rows have the columns that the data sets have on the hub, so that columns, filters and benchmarks of the
configurations are used as they stand. The model is one of two blocks with random weights, whose head is set so that it
answers ``<answer>1</answer>`` or ``<answer>2</answer>`` half of the time each: both signs of the reward exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lit_grpo.policy.model.char_tokenizer import char_tokenizer

LETTERS = "".join(chr(c) for c in range(32, 127)) + "\n"
MARKS = ("<|im_start|>", "<|im_end|>")
ANSWERS = ("<reasoning>r</reasoning><answer>1</answer>", "<reasoning>r</reasoning><answer>2</answer>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if date_string is defined %}{{ date_string }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Write the model and its tokenizer as a Hugging Face folder."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = char_tokenizer(LETTERS)
    tokenizer.add_tokens(list(ANSWERS))
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    tokenizer.chat_template = CHAT
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=40_000, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        # One direction that all embeddings share comes through to the head, which answers it with the wanted tokens.
        model.model.embed_tokens.weight[:, 0] += 8.0
        ids = tokenizer.get_vocab()
        wanted = [*(ids[answer] for answer in ANSWERS), ids[tokenizer.eos_token]]
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[wanted, 0] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SOLUTION = "It is \\boxed{1}."
ROWS: dict[str, list[dict[str, Any]]] = {
    "hkust-nlp/SimpleRL-Zoo-Data": [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"<|im_start|>user {n}<|im_end|>"}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"question": f"What is {n} to the power of 0?", "answer": "1", "index": n, "split": "train"},
        }
        for n in range(1, 33)
    ],
    "AI-MO/NuminaMath-1.5": [
        {
            "problem": f"What is {n} over {n}?",
            "solution": "One.",
            "answer": "1",
            "problem_type": "Algebra",
            "question_type": "proof" if n % 4 == 0 else "math-word-problem",
            "problem_is_valid": "Yes",
            "solution_is_valid": "Yes",
            "source": "cn_k12",
            "synthetic": False,
        }
        for n in range(1, 33)
    ],
    "open-r1/DAPO-Math-17k-Processed": [
        {
            "prompt": f"What is {n} - {n} + 1?",
            "solution": "1",
            "data_source": "math_dapo",
            "ability": "MATH",
            "source_prompt": [{"role": "user", "content": f"Solve this. The last line is Answer: $Answer. {n}-{n}+1?"}],
            "reward_model": {"ground_truth": "1", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": str(n)},
        }
        for n in range(1, 65)
    ],
    "allenai/Dolci-RL-Zero-Math-7B": [
        {"prompt": f"What is {n} * 1 / {n}?", "ground_truth": ["1"], "dataset": ["math"]} for n in range(1, 33)
    ],
    "openai/gsm8k": [
        {"question": f"What is {n + 1} - {n}?", "answer": f"{n + 1} - {n} = 1\n#### 1"} for n in range(32)
    ],
    "DigitalLearningGmbH/MATH-lighteval": [
        {"problem": f"What is ${n}^0$?", "solution": SOLUTION, "level": "Level 1", "type": "Algebra"}
        for n in range(1, 33)
    ],
    "HuggingFaceH4/aime_2024": [{"problem": "One?", "answer": "1", "solution": SOLUTION}],
    "math-ai/aime25": [{"problem": "One?", "answer": "1"}],
    "math-ai/amc23": [{"question": "One?", "answer": "1"}],
    "math-ai/minervamath": [{"question": "One?", "answer": "1"}],
    "HuggingFaceH4/MATH-500": [{"problem": "One?", "answer": "1", "solution": SOLUTION}],
    "Hothan/OlympiadBench": [{"question": "One?", "final_answer": ["1"]}],
    "realtreetune/college_math": [{"problem": "One?", "answer": "1"}],
    "MARIO-Math-Reasoning/Gaokao2023-Math-En": [{"question": "One?", "answer": "1"}],
}
"""Rows of each data set of the hub that a configuration names, with the columns that they have there."""


def load_dataset(dataset: str, config: str | None = None, **given: Any) -> Any:
    """Stand in for ``datasets.load_dataset``."""
    import datasets

    return datasets.Dataset.from_list(ROWS[dataset])
