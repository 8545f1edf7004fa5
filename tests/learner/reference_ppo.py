"""PPO and VAPO written with loops over completions and tokens, to hold the trained thing to; uses nothing of ours but
the models' weights.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch

from lit_grpo.types import Rollout


@dataclass
class Settings:
    """What the reference can do; names follow the papers."""

    gamma: float = 1.0
    lam: float = 1.0
    length_alpha: float | None = None
    """VAPO: the policy's lambda is 1 - 1/(alpha n), the critic's 1."""
    whiten: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.2
    value_coef: float = 1.0
    value_clip: float = 0.5
    nll: float = 0.0
    low: float | None = None
    high: float | None = None
    """Bounds of the value head."""
    shared: bool = False
    detach: bool = False
    bootstrap: bool = False
    """V after the last token of a truncated completion is the critic's, not 0."""


class Reference:
    """One policy and one critic, trained with AdamW on the same rollouts as the module whose weights it starts with."""

    def __init__(
        self, module: Any, settings: Settings, lr: float, critic_lr: float, eps: float, limit: float = 1.0
    ) -> None:
        self.s, self.limit = settings, limit
        self.model = copy.deepcopy(module.policy.model)
        self.head = copy.deepcopy(module.policy.value_head if settings.shared else module.critic.head)
        self.backbone = self.model.base_model if settings.shared else copy.deepcopy(module.critic.base)
        own = [] if settings.shared else list(self.backbone.parameters())
        self.groups = [list(self.model.parameters()), [*own, *self.head.parameters()]]
        self.optimizers = [
            torch.optim.AdamW(group, lr=rate, betas=(0.9, 0.95), eps=eps, weight_decay=0.0)
            for group, rate in zip(self.groups, (lr, critic_lr), strict=True)
        ]

    def look(self, batch: Rollout, i: int, cut: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Log-probability and value of every token of completion i, each from a forward pass of its own."""
        prompt, answer = batch.prompts[i // batch.group_size].token_ids, batch.completions[i].token_ids
        logprobs, values = [], []
        for t, token in enumerate(answer):
            ids = torch.tensor([[*prompt, *answer[:t]]])
            logits = self.model(input_ids=ids, use_cache=False).logits[0, -1].double()
            logprobs.append(logits[token] - logits.logsumexp(0))
            state = self.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
            state = state.detach() if cut else state
            value = (self.head.weight[0] * state).sum() + self.head.bias[0]
            if self.s.low is not None and self.s.high is not None:
                value = self.s.low + (self.s.high - self.s.low) / (1 + (-value).exp())
            values.append(value.double())
        return logprobs, values

    @torch.no_grad()
    def value_after(self, batch: Rollout, i: int) -> float:
        """Value of the text of completion i as far as it goes."""
        ids = torch.tensor([[*batch.prompts[i // batch.group_size].token_ids, *batch.completions[i].token_ids]])
        state = self.backbone(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
        value = float((self.head.weight[0] * state).sum() + self.head.bias[0])
        if self.s.low is None or self.s.high is None:
            return value
        return self.s.low + (self.s.high - self.s.low) / (1 + math.exp(-value))

    def prepare(self, batch: Rollout, warmup: bool) -> None:
        """Old log-probabilities and values, advantages and returns."""
        s = self.s
        self.old: list[list[float]] = []
        self.old_values: list[list[float]] = []
        self.advantages: list[list[float]] = []
        self.returns: list[list[float]] = []
        for i in range(len(batch.completions)):
            with torch.no_grad():
                logprobs, values = self.look(batch, i, False)
            v = [float(x) for x in values]
            n, reward = len(v), float(batch.reward[i])
            end = self.value_after(batch, i) if s.bootstrap and batch.completions[i].finish_reason == "length" else 0.0
            lam = s.lam if s.length_alpha is None else min(1.0, max(0.0, 1 - 1 / (s.length_alpha * n)))
            target_lam = s.lam if s.length_alpha is None else 1.0
            if warmup:
                lam = target_lam = 1.0
            found = {}
            for name, value_of_lambda in (("policy", lam), ("critic", target_lam)):
                advantage = [0.0] * n
                for t in range(n):
                    for k in range(t, n):  # A_t = sum_k (gamma lambda)^(k-t) delta_k
                        after = v[k + 1] if k + 1 < n else end
                        delta = (reward if k == n - 1 else 0.0) + s.gamma * after - v[k]
                        advantage[t] += (s.gamma * value_of_lambda) ** (k - t) * delta
                found[name] = advantage
            self.old.append([float(x) for x in logprobs])
            self.old_values.append(v)
            self.advantages.append(found["policy"])
            self.returns.append([a + b for a, b in zip(found["critic"], v, strict=True)])
        if s.whiten:
            flat = [a for row in self.advantages for a in row]
            mean = sum(flat) / len(flat)
            deviation = math.sqrt(sum((a - mean) ** 2 for a in flat) / len(flat))
            self.advantages = [[(a - mean) / deviation for a in row] for row in self.advantages]

    def update(self, batch: Rollout, rows: list[int], warmup: bool) -> None:
        """One optimizer step on some completions."""
        s = self.s
        assert batch.correct is not None
        correct = batch.correct.tolist()
        tokens = sum(len(self.old[i]) for i in rows)
        right = sum(len(self.old[i]) for i in rows if correct[i])
        loss = torch.zeros((), dtype=torch.float64)
        for i in rows:
            logprobs, values = self.look(batch, i, s.detach or (s.shared and warmup))
            for t, (logprob, value) in enumerate(zip(logprobs, values, strict=True)):
                if not warmup:
                    ratio, a = (logprob - self.old[i][t]).exp(), self.advantages[i][t]
                    bounded = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
                    loss = loss - torch.minimum(ratio * a, bounded * a) / tokens
                    if correct[i]:
                        loss = loss - s.nll * logprob / right
                error = (value - self.returns[i][t]) ** 2
                if s.value_clip:
                    old = self.old_values[i][t]
                    error = torch.maximum(error, (value.clamp(old - s.value_clip, old + s.value_clip)
                                                  - self.returns[i][t]) ** 2)  # fmt: skip
                loss = loss + s.value_coef * error / 2 / tokens
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for place, (group, optimizer) in enumerate(zip(self.groups, self.optimizers, strict=True)):
            if place == 0 and warmup:
                continue
            norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in group if p.grad is not None))
            for p in group:
                if p.grad is not None and norm > self.limit:
                    p.grad.mul_(self.limit / norm)
            optimizer.step()
