#!/usr/bin/env python
"""Write the model that configs/two_form_addition.yaml starts from: a small one that answers about half of the sums.

    python scripts/warm_start_two_form_addition.py models/two_form_addition

A 2-layer model with a character tokenizer is taught answers for at most 260 supervised steps, seeded, in about half a
minute on one core. Half are in the long form. The short ones are given as somebody in a hurry gives them: the
carry is forgotten, so they are right where there is none. That makes a policy on which every known way to learn and to
collapse is open: the long form is worth learning, the short one is quick, certain and often enough right to be
reinforced. The teaching ends (some seeds learn faster than others, so by its loss) long before the long form is
learned: reinforcement learning needs right and wrong answers.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_grpo.data import Row

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

STEPS, BATCH, LR = 260, 144, 3e-3
LONG_SHARE = 0.5
END_LOSS = 0.125
"""Nats a token at which it ends, mean of ten steps; the choice between the forms alone is 0.085."""
INIT_SCALE = 2.5
"""Factor on the initial weight matrices: 0.02, transformers' default, is too small for width 96 and learns slowly."""


def warm_start(folder: Path, *, seed: int = 0, steps: int = STEPS) -> list[float]:
    """Train and save model and tokenizer in the folder; returns the losses, in nats a token.

    Args:
        folder: a Hugging Face folder afterwards, for ``model.policy.path``.
        seed: of the initial weights and of the problems.
        steps: supervised steps at most.
    """
    import torch

    from lit_grpo.data import TwoFormAddition
    from lit_grpo.data.sources.two_form_addition import ALPHABET
    from lit_grpo.policy import PolicyConfig, TinyModel
    from lit_grpo.policy.forward.batching import pad_rows
    from lit_grpo.policy.forward.policy import Policy
    from lit_grpo.policy.model.load import load_model, load_tokenizer

    config = PolicyConfig(tiny=TinyModel(alphabet=ALPHABET, layers=2, width=96, heads=4, seed=seed))
    tokenizer = load_tokenizer(config)
    policy = Policy(load_model(config))
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.ndim == 2:
                weight.mul_(INIT_SCALE)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(seed)
    rows = TwoFormAddition().rows()
    losses: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * min((step + 1) / 20, 1 - step / STEPS)
        chosen = rng.choices(rows, k=BATCH)
        prompts = [tokenizer(row.question)["input_ids"] for row in chosen]
        answers = [[*tokenizer(taught(row, rng))["input_ids"], tokenizer.eos_token_id] for row in chosen]
        batch = pad_rows(prompts, answers, width=max(map(len, answers)))
        logprobs = policy(batch, entropy="none").logprobs  # [n, T], 0 where there is no token
        loss = -logprobs.sum() / len(batch.target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if len(losses) >= 10 and sum(losses[-10:]) / 10 < END_LOSS:
            break
    folder.mkdir(parents=True, exist_ok=True)
    policy.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return losses


def taught(row: Row, rng: random.Random) -> str:
    """An answer to learn: the long form, or the short one with the carry forgotten (``:32`` for 27 and 15)."""
    if rng.random() < LONG_SHARE:
        return str(row.extra["long"])
    a, b = row.extra["operands"]
    return f":{a // 10 + b // 10}{(a + b) % 10}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args(argv)
    losses = warm_start(args.folder, seed=args.seed, steps=args.steps)
    print(f"{args.folder}: loss {losses[-1]:.3f} nats a token after {len(losses)} steps")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
