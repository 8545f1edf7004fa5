"""Random rollouts with every field an objective can ask for, and objectives to run on them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lit_grpo.objectives import RECIPES, Objective, StepPlan
from lit_grpo.types import Experience, LossOutput
from tests.waiting import PATIENCE

LAYERS, EXPERTS = 2, 3
EXTRA: dict[str, tuple[str, dict[str, Any]]] = {
    "dapo_top_entropy_tis": ("dapo", {"top_entropy": 0.4, "sampler_correction": "tis_token"}),
    "dapo_top_entropy_kept": ("dapo", {"top_entropy": 0.4, "top_entropy_denominator": "kept"}),
    "grpo_kl": ("grpo", {"kl_coef": 0.1}),
    "grpo_mis_kept": ("grpo", {"sampler_correction": "mis_token", "sampler_denominator": "kept"}),
    "grpo_mask_truncated": ("grpo", {"mask_truncated": True, "aggregation": "token_mean_group"}),
    "gspo_tis": ("gspo", {"sampler_correction": "tis_token"}),
    "gmpo_mis": ("gmpo", {"sampler_correction": "mis_sequence"}),
    "rloo_product": ("rloo", {"ratio": "sequence_product"}),
    "gtpo_code": ("gtpo", {"aggregation": "conflict_tokens", "conflict_overlap": "product"}),
    "pl_pool": ("pl", {"set_scope": "batch"}),
    "bstar_token": ("reinforce_bstar", {"optimal_baseline_weights": "token_level"}),
    "bstar_given": ("reinforce_bstar", {"optimal_baseline_weights": "given"}),
    "bstar_logit": ("reinforce_bstar", {"optimal_baseline_weights": "logit"}),
    "grpo_noise": ("grpo", {"label_noise": 0.25}),
    "gtpo_negatives": ("gtpo", {"entropy_filter": "negatives", "entropy_threshold": 0.5}),
    "gtpo_always": ("gtpo", {"entropy_gate": float("inf"), "entropy_threshold": 0.7}),
    "lopti_joint": ("lopti", {"reweight_alpha": 0.3}),
}
NAMES = [*RECIPES, *EXTRA]


def objective(name: str) -> Objective:
    """A recipe, or one of EXTRA, ready for runs of at most 8 tokens."""
    recipe, changes = EXTRA.get(name, (name, {}))
    made = Objective.from_recipe(recipe, **changes).for_run(8)
    if made.entropy_signal.gated:
        made = replace(made, entropy_signal=replace(made.entropy_signal, initial_entropy=0.3))
    return made


@dataclass
class Forward:
    """What the current policy gives, [N, T] (and [N, T, layers, K])."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor
    router: Tensor

    def select(self, rows: Any) -> Forward:
        return Forward(*(getattr(self, f.name)[rows] for f in fields(self)))


def batch(seed: int, groups: int, size: int, width: int, *, old: bool = True) -> tuple[Experience, Forward]:
    """Float64 rollout with empty, truncated and uniform ones among it; NaN in the padding."""
    g = torch.Generator().manual_seed(seed)
    n = groups * size

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    lengths = torch.randint(0, width + 1, (n,), generator=g)
    mask = torch.arange(width)[None] < lengths[:, None]

    def junk(value: Tensor) -> Tensor:
        return value.masked_fill(~mask.reshape(n, width, *[1] * (value.ndim - 2)), float("nan"))

    before = -3 * rand(n, width) - 0.01
    router = -rand(n, width, LAYERS, EXPERTS) - 0.1
    exp = Experience(
        lengths=lengths,
        group_ids=torch.arange(n) // size,
        rewards=torch.randint(0, 2, (n,), generator=g).double(),
        truncated=rand(n) < 0.2,
        width=width,
        token_ids=torch.randint(0, 3, (n, width), generator=g),
        old_logprobs=junk(before) if old else None,
        sampler_logprobs=junk(before + 0.5 * (rand(n, width) - 0.5)),
        ref_logprobs=junk(before + rand(n, width) - 0.5),
        entropy=junk(rand(n, width)),
        values=junk(rand(n, width)),
        sum_squared_probs=junk(rand(n, width)),
        score_sqnorm=rand(n) + 0.1,
        router_logscores_old=junk(router) if old else None,
        invalid=rand(n) < 0.2,
        prompt_ids=[f"prompt-{i // size}" for i in range(n)],
    )
    moved = before + (rand(n, width) - 0.5)
    now = Forward(junk(moved), junk(rand(n, width)), junk(rand(n, width)), junk(router + 0.2 * rand(*router.shape)))
    return exp, now


def forward_loss(made: Objective, plan: StepPlan, now: Forward) -> tuple[LossOutput, Tensor]:
    """Loss of the rows, and its gradient by log-probability, [n, T]."""
    logprobs = now.logprobs.clone().requires_grad_()
    out = made.loss(logprobs, plan, entropy=now.entropy, values=now.values, router_logscores=now.router)
    (grad,) = torch.autograd.grad(out.loss, logprobs)
    return out, grad


def step(
    made: Objective,
    exp: Experience,
    now: Forward,
    *,
    reduce: Callable[[Tensor], Tensor] | None = None,
    pass_index: int = 0,
) -> tuple[Tensor, StepPlan, LossOutput, Tensor]:
    """One whole optimizer step: advantages, plan, loss, gradient."""
    state = made.new_state()
    advantages, state = made.advantages(exp, state, reduce)
    plan = made.plan(exp, advantages, state, reduce=reduce, pass_index=pass_index)
    out, grad = forward_loss(made, plan, now)
    return advantages, plan, out, grad


class Ranks:
    """Threads that sum tensors with each other, as processes would."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count)
        self.slots: list[Tensor | None] = [None] * count

    def run(self, work: Callable[[int, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
        """``work(rank, reduce)`` on every rank; the results in order."""
        results: list[Any] = [None] * self.count

        def go(rank: int) -> None:
            def reduce(value: Tensor) -> Tensor:
                self.slots[rank] = value
                self.barrier.wait(timeout=PATIENCE)
                total = torch.stack([s for s in self.slots if s is not None]).sum(0)
                self.barrier.wait(timeout=PATIENCE)
                return total

            try:
                results[rank] = work(rank, reduce)
            except BaseException as error:
                results[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=go, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
                raise result
        return results
