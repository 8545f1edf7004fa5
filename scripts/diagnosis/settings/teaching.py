"""Warm start of a character model: supervised steps on answers of which some are right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lit_grpo.data import Row
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.policy.forward.batching import pad_rows
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.policy.model.load import load_model, load_tokenizer

INIT_SCALE = 2.5
"""Factor on the initial weight matrices: 0.02, transformers' default, is too small for width 96 and learns slowly."""


def teach(
    folder: Path,
    alphabet: str,
    rows: Sequence[Row],
    taught: Callable[[Row, random.Random], str],
    *,
    steps: int,
    batch: int = 144,
    lr: float = 3e-3,
    width: int = 96,
    max_position: int = 64,
    seed: int = 0,
) -> list[float]:
    """Train a 2-layer model and save it with its tokenizer in the folder; returns the losses, in nats a completion.

    Args:
        folder: a Hugging Face folder afterwards, for ``model.policy.path``.
        alphabet: characters that the model reads and writes.
        rows: questions.
        taught: draws an answer to a question.
        steps: supervised steps.
        batch: answers a step.
        lr: peak of the learning rate, which rises over 20 steps and then falls to 0.
        width: hidden size.
        max_position: longest question plus answer.
        seed: of weights and answers.
    """
    tiny = TinyModel(alphabet=alphabet, layers=2, width=width, heads=4, max_position=max_position, seed=seed)
    config = PolicyConfig(tiny=tiny)
    tokenizer, policy = load_tokenizer(config), Policy(load_model(config))
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.ndim == 2:
                weight.mul_(INIT_SCALE)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(seed)
    losses: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 20, 1 - step / steps)
        chosen = rng.choices(rows, k=batch)
        questions = [tokenizer(row.question)["input_ids"] for row in chosen]
        answers = [[*tokenizer(taught(row, rng))["input_ids"], tokenizer.eos_token_id] for row in chosen]
        padded = pad_rows(questions, answers, width=max(map(len, answers)))
        loss = -policy(padded, entropy="none").logprobs.sum() / batch
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    folder.mkdir(parents=True, exist_ok=True)
    policy.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return losses
