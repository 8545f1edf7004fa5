"""The objectives alone, in a plain PyTorch loop: no Lightning, no engine, a policy that is one tensor of logits.

    python docs/examples/plain_loop.py

Objectives are pure functions of tensors: they fit into any trainer that has log-probabilities and rewards.
"""

import torch
from torch import Tensor

from lit_grpo.objectives import Objective
from lit_grpo.types import Experience

WORDS, GROUPS, SIZE = 8, 4, 6
"""Vocabulary, prompts and completions of each; a completion is three words."""


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return log pi of each drawn word, [N, 3]; the policy has one distribution for each of the three places."""
    return logits.log_softmax(-1).expand(len(ids), 3, WORDS).gather(2, ids[..., None])[..., 0]


def reward(ids: Tensor) -> Tensor:
    """Count the words that are 7, [N]."""
    return (ids == 7).float().sum(1)


def main(rollouts: int = 200, recipe: str = "grpo") -> float:
    """Train, and return the mean reward of the last rollout, which is 3 at best."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(3, WORDS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    objective = Objective.from_recipe(recipe).for_run(max_new_tokens=3)
    state, mean = objective.new_state(), 0.0
    for _ in range(rollouts):
        weights = logits.detach().softmax(-1)
        ids = torch.stack([torch.multinomial(w, GROUPS * SIZE, True, generator=generator) for w in weights], dim=1)
        experience = Experience(
            lengths=torch.full((GROUPS * SIZE,), 3),
            group_ids=torch.arange(GROUPS).repeat_interleave(SIZE),
            rewards=reward(ids),
            truncated=torch.zeros(GROUPS * SIZE, dtype=torch.bool),
        )
        advantages, state = objective.advantages(experience, state)
        plan = objective.plan(experience, advantages, state)
        optimizer.zero_grad()
        objective.loss(token_logprobs(logits, ids), plan).loss.backward()
        optimizer.step()
        mean = float(experience.rewards.mean())
    print(f"{objective.name}: reward {mean:.2f} of 3")
    return mean


if __name__ == "__main__":
    main()
