"""GRPO in one file, to be read from top to bottom: a tiny random model learns to add digits below 5 from reward alone.

    python docs/reference_grpo.py

Per rollout: sample G completions of each of some prompts, score them, compare each with the mean of its own group, and
push the better ones up and the worse ones down. Nothing else is needed; the library does the same, faster and safer.
``lit_grpo: ...`` beside a line names what does it there.

    A_i = (r_i - mean_g r) / (std_g r + 1e-6)
    L   = -1/N sum_i 1/n_i sum_t min(rho A, clip(rho, 1 - low, 1 + high) A),   rho = pi / pi_old
        + beta 1/N sum_i 1/n_i sum_t (exp(lp_ref - lp) - (lp_ref - lp) - 1)
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

CHARACTERS = "0123456789+="
END = len(CHARACTERS)  # one more id ends a completion


@dataclass
class Sample:
    """One completion: the ids that were fed and drawn, and its reward."""

    prompt: list[int]
    completion: list[int]
    reward: float = 0.0


@dataclass
class Settings:
    """Everything that can be turned."""

    prompts: int = 16  # per rollout
    group_size: int = 16  # G
    updates: int = 1  # optimizer steps on each rollout
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0  # beta; needs a reference model
    max_new_tokens: int = 2
    lr: float = 1e-3
    max_grad_norm: float = 1.0


def make_model(seed: int = 0) -> LlamaForCausalLM:
    """Two layers with random weights; no dropout, so that pi / pi_old is 1 before the first update."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(CHARACTERS) + 1,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=END,
        )
    )


@torch.no_grad()
def sample(model: LlamaForCausalLM, prompts: list[list[int]], settings: Settings) -> list[Sample]:
    """Draw G completions of each prompt at temperature 1 from the full distribution; prompts are equally long."""
    # lit_grpo: RolloutEngine.generate of engines.base
    repeated = [prompt for prompt in prompts for _ in range(settings.group_size)]
    ids = torch.tensor(repeated)
    for _ in range(settings.max_new_tokens):
        probabilities = model(ids).logits[:, -1].float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1)], dim=1)
    drawn = ids[:, len(prompts[0]) :].tolist()
    return [Sample(prompt, until_end(row)) for prompt, row in zip(repeated, drawn, strict=True)]


def encode(text: str) -> list[int]:
    """One id a character."""
    return [CHARACTERS.index(c) for c in text]


def until_end(ids: list[int]) -> list[int]:
    """Everything up to the first end id, which belongs to the completion."""
    return ids[: ids.index(END) + 1] if END in ids else ids


def token_logprobs(model: LlamaForCausalLM, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Log-probability of each completion token under the model, and the mask of real tokens; [N, T] both.

    Rows are [prompt, completion, padding]. The logits at position p speak of the token at p + 1.
    """
    # lit_grpo: policy.forward.batching lays the rows out without padding
    longest = max(len(s.prompt) + len(s.completion) for s in samples)
    ids = torch.full((len(samples), longest), END)
    attention = torch.zeros(len(samples), longest, dtype=torch.long)
    width = max(len(s.completion) for s in samples)
    place = torch.zeros(len(samples), width, dtype=torch.long)  # where each completion token stands in its row
    # Made from lengths, never from ids: the end id may be the padding id too. lit_grpo: types.Experience.mask
    mask = torch.zeros(len(samples), width, dtype=torch.bool)
    for i, s in enumerate(samples):
        row = s.prompt + s.completion
        ids[i, : len(row)] = torch.tensor(row)
        attention[i, : len(row)] = 1
        place[i, : len(s.completion)] = torch.arange(len(s.prompt), len(row))
        mask[i, : len(s.completion)] = True
    logits = model(ids, attention_mask=attention).logits.float()
    # lit_grpo: policy.forward.head.head_stats, a chunk of tokens at a time
    every = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]  # [N, S - 1]
    return every.gather(1, (place - 1).clamp_min(0)), mask


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """(r - mean) / (std + 1e-6) inside each group, [N]; exactly 0 where all rewards of a group are equal."""
    groups = rewards.view(-1, group_size)  # lit_grpo: objectives.tensors.Groups
    centred = groups - groups.mean(1, keepdim=True)
    scaled = centred / (groups.std(1, keepdim=True) + 1e-6)  # lit_grpo: objectives.advantages.GroupStd
    uniform = (groups == groups[:, :1]).all(1, keepdim=True)  # lit_grpo: Groups.uniform
    return torch.where(uniform, torch.zeros_like(scaled), scaled).flatten()


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the completions (empty ones left out) of the mean over their tokens."""
    lengths = mask.sum(1)  # lit_grpo: objectives.aggregation.SeqMean, as a weight of each token
    means = torch.where(mask, values, 0.0).sum(1) / lengths.clamp_min(1)
    return means.sum() / (lengths > 0).sum().clamp_min(1)


def grpo_loss(
    logprobs: Tensor, old: Tensor, ref: Tensor | None, advantages: Tensor, mask: Tensor, settings: Settings
) -> Tensor:
    """The loss of one update, over all completions at once."""
    ratio = (logprobs - old).exp()  # lit_grpo: objectives.ratios.importance_ratio
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    a = advantages[:, None]
    loss = -sequence_mean(torch.minimum(ratio * a, clipped * a), mask)  # lit_grpo: objectives.trust_regions.Clip
    if ref is not None:
        difference = ref - logprobs  # lit_grpo: objectives.regularizers.kl_to_reference
        loss = loss + settings.kl_coef * sequence_mean(difference.exp() - difference - 1, mask)
    return loss


def train_on(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    samples: list[Sample],
    settings: Settings,
    reference: LlamaForCausalLM | None = None,
) -> list[float]:
    """All updates on one rollout of whole groups, in order; the loss of each."""
    # lit_grpo: Objective.advantages
    advantages = group_advantages(torch.tensor([s.reward for s in samples]), settings.group_size)
    with torch.no_grad():
        old, _ = token_logprobs(model, samples)  # before the first update
        ref = token_logprobs(reference, samples)[0] if reference is not None and settings.kl_coef else None
    losses = []
    for _ in range(settings.updates):
        logprobs, mask = token_logprobs(model, samples)
        # lit_grpo: Objective.plan and Objective.loss
        loss = grpo_loss(logprobs, old, ref, advantages, mask, settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        if advantages.any() or ref is not None:  # a step with zero gradient would still move the weights
            optimizer.step()
        losses.append(loss.item())  # the rest of this loop in lit_grpo: learner.optimizer_step
    return losses


def main() -> None:
    """Train for some rollouts and print the mean reward."""
    settings = Settings()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    rng = random.Random(0)
    for rollout in range(150):
        problems = [(rng.randrange(5), rng.randrange(5)) for _ in range(settings.prompts)]
        samples = sample(model, [encode(f"{a}+{b}=") for a, b in problems], settings)
        for i, s in enumerate(samples):
            a, b = problems[i // settings.group_size]
            s.reward = float(s.completion == [*encode(str(a + b)), END])
        (loss,) = train_on(model, optimizer, samples, settings)
        if rollout % 10 == 0:
            print(f"rollout {rollout:3d}  reward {sum(s.reward for s in samples) / len(samples):.3f}  loss {loss:+.4f}")


if __name__ == "__main__":
    main()
