"""Metrics that tell a broken pipeline and a degenerate policy from a healthy run. They need no forward pass."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import correlation

import torch
from torch import Tensor

from lit_grpo.learner.metric_sums import Reduce, StepMetrics
from lit_grpo.objectives.tensors import masked
from lit_grpo.policy.optimizer.quantized_state import strided_sample
from lit_grpo.types import Experience, Rollout

LONG_ENOUGH = 8
"""Tokens that a completion needs to have its repetition counted: in a shorter one chance alone repeats."""
PREFIX = 16
"""Tokens at the beginning of completions among which a shared prefix is looked for."""
FEWEST_SETS = 4
"""Sets of completions of one prompt and one verdict from which on reward and length are compared."""
SAMPLED = 4096
"""Elements of each weight matrix that are sampled to measure its update."""


@torch.no_grad()
def add_audit_metrics(
    metrics: StepMetrics,
    batch: Rollout,
    experience: Experience,
    advantages: Tensor,
    ranks: int = 1,
    by_verdict: bool = False,
) -> None:
    """Add what a rollout and the tensors made from it say of each other; docs/metrics.md has the keys.

    Args:
        metrics: added to.
        batch: the rollout as it was sampled.
        experience: its tensors.
        advantages: advantages of its tokens, [N, T].
        ranks: number of processes, each with its own prompts of the rollout.
        by_verdict: whether advantages follow from which completions are correct and not from the total reward.
    """
    metrics.maximum("memory/peak_gib", peak_memory(experience.lengths.device))
    size, rewards = batch.group_size, batch.reward.tolist()
    generated = sum(len(c.token_ids) for c in batch.completions)
    metrics.add("sanity/missing_tokens_frac", generated - experience.lengths.sum(), generated)
    prompts = [p.id for p in batch.prompts for _ in range(size)]
    mixed_up = _completions_of_another_prompt(batch, experience.group_ids.tolist(), prompts)
    metrics.add("sanity/mixed_prompts_frac", mixed_up, len(prompts))
    mean = _mean_advantages(experience, advantages).tolist()
    scored = [True] * len(rewards) if batch.scored is None else batch.scored.tolist()
    equal, contradict, contradict_advantage = 0, 0, 0
    gap = 1e-3 * max(map(abs, mean), default=0.0)
    # A correct completion may have the smaller total reward, where other rewards outweigh the one that judges.
    # An objective that goes by verdicts has one of every scored completion (LitGRPO refuses others).
    quality = batch.correct.double().tolist() if by_verdict and batch.correct is not None else rewards
    distinct = inverted = mixed = 0
    for start in range(0, len(rewards), size):
        rows = [i for i in range(start, start + size) if scored[i]]
        same: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i in rows:
            same[batch.completions[i].token_ids].append(i)
        distinct += len(same)
        for group in same.values():
            for position, i in enumerate(group):
                for j in group[:position]:
                    equal += 1
                    contradict += rewards[i] != rewards[j]
                    contradict_advantage += not abs(mean[i] - mean[j]) <= gap
        ordered = _advantages_follow([quality[i] for i in rows], [mean[i] for i in rows]) if rows else None
        mixed += ordered is not None
        inverted += ordered is False
    # A completion that was judged twice is a pair of equal completions.
    changed, judged = batch.sums.get("sanity/rejudged_diff_frac", (0, 0))
    equal, contradict = equal + int(judged), contradict + int(changed)
    groups = len(batch.prompts)
    metrics.add("groups/distinct_frac", distinct, sum(scored))
    # Counts of the whole rollout: a sum over ranks is divided by their number, each having a weight of 1.
    metrics.add("groups/count", groups * ranks)
    metrics.add("groups/equal_pairs", equal * ranks)
    metrics.add("sanity/reward_contradiction_frac", contradict, equal)
    metrics.add("sanity/advantage_contradiction_frac", contradict_advantage, equal)
    metrics.add("sanity/inverted_advantage_frac", inverted, mixed)
    if batch.correct is not None:
        truncated = torch.tensor([c.truncated for c in batch.completions])
        with_verdict = torch.tensor(scored) if batch.judged is None else torch.tensor(scored) & batch.judged
        verdicts = [bool(c) if known else None for c, known in zip(batch.correct, with_verdict, strict=True)]
        tokens = [len(c.token_ids) for c in batch.completions]
        terms = [values.tolist() for values in batch.rewards.values()]
        metrics.add("groups/reward_length_corr", *reward_length_correlation(rewards, tokens, verdicts, size, terms))
        for name, chosen in (("correct", batch.correct & with_verdict), ("incorrect", ~batch.correct & with_verdict)):
            metrics.add(f"completions/{name}_truncated_frac", (truncated & chosen).sum(), chosen.sum())
    if experience.token_ids is not None:
        for name, values in repetition(experience.token_ids, experience.lengths).items():
            metrics.add(name, values.sum(), len(values))


def reward_length_correlation(
    rewards: Sequence[float],
    lengths: Sequence[float],
    verdicts: Sequence[bool | None],
    group_size: int,
    terms: Sequence[Sequence[float]] | None = None,
) -> tuple[float, int]:
    """Sum up how reward goes with length among completions of one prompt and one verdict.

    A reward that says no more than what is right is equal among them. One that pays for length grows with it. A form
    that is kept or not goes with length too, most often, and is no pay for it: such rewards take few values, so that
    only sets count in which the reward tells as many completions apart as their length does. The sum of a form and of a
    pay for brevity does so too, and grows with length where the form is the longer one; so one reward alone must grow
    with length. Where no completion is correct the verdict holds nothing equal, and a reward that pays for parts of an
    answer is no pay for its length.

    Args:
        rewards: total reward of each completion, groups after one another.
        lengths: tokens of each completion.
        verdicts: whether each completion is correct; None where nobody knows, which leaves it out.
        group_size: completions of each prompt.
        terms: each reward of each completion, of which ``rewards`` is the weighted sum; None: that is the only one.

    Returns:
        Sum of Pearson's correlations over the sets of completions of one prompt and one verdict that have at least
        three rewards, and as many as lengths; and the number of such sets. 0 and 0 where there are fewer than
        :data:`FEWEST_SETS`, for three completions alone go with one another by chance.
    """
    total, count = 0.0, 0
    if True not in verdicts:
        return 0.0, 0
    for start in range(0, len(rewards), group_size):
        for verdict in (True, False):
            chosen = [i for i in range(start, start + group_size) if verdicts[i] is verdict]
            paid, long = [rewards[i] for i in chosen], [float(lengths[i]) for i in chosen]
            if not all(map(math.isfinite, paid)):
                continue
            # Rewards are sums of float32: what differs by rounding is equal.
            scale = max(map(abs, paid), default=0.0) * 1e-5
            values = len({round(r / scale) for r in paid}) if scale else 0
            if values < 3 or not 1 < len(set(long)) <= values:
                continue
            alone = [correlation([term[i] for i in chosen], long) for term in terms or () if _grades(term, chosen)]
            if terms is not None and not alone:
                continue
            total, count = total + min([correlation(paid, long), max(alone, default=1.0)]), count + 1
    return (total, count) if count >= FEWEST_SETS else (0.0, 0)


def _grades(term: Sequence[float], chosen: Sequence[int]) -> bool:
    """Tell whether a reward gives some completions at least three different values."""
    values = [term[i] for i in chosen]
    return all(map(math.isfinite, values)) and len(set(values)) >= 3


def peak_memory(device: torch.device) -> float:
    """Return the peak memory so far in GiB: of tensors on a GPU, else of the whole process in main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    # Linux counts KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def add_direction(metrics: StepMetrics, token_weights: Tensor) -> None:
    """Add ``policy/upward_frac``: the share of what the loss does to log-probabilities that raises them.

    Args:
        metrics: added to.
        token_weights: dL/d(log-probability), [n, T], 0 outside the mask.
    """
    metrics.add("policy/upward_frac", -token_weights.clamp_max(0).sum(), token_weights.abs().sum())


def repetition(token_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """Measure how much completions of at least :data:`LONG_ENOUGH` tokens repeat themselves; one number each, [n].

    ``completions/repetition_frac``: share of 4-grams seen before in the same completion.
    ``completions/longest_run_frac``: share of the completion taken by the longest run of one token.
    ``completions/top_token_frac``: share of its most frequent token.

    Args:
        token_ids: [N, T] int64; what is past ``lengths`` is not read.
        lengths: tokens of each completion, [N].
    """
    chosen = lengths >= LONG_ENOUGH
    ids, n = token_ids[chosen].long(), lengths[chosen]
    if not len(ids):
        none = torch.zeros(0, dtype=torch.float64)
        return {
            "completions/repetition_frac": none,
            "completions/longest_run_frac": none,
            "completions/top_token_frac": none,
        }
    position = torch.arange(ids.shape[1], device=ids.device)
    # Every position pads with an id of its own, so that padding never equals anything.
    unique = (-1 - position).expand_as(ids)
    ids = torch.where(position < n[:, None], ids, unique)
    # One number for each 4-gram, a polynomial hash that wraps around in int64; cut to 62 bits it is never negative, and
    # so never one of the padding's own ids.
    code = torch.zeros_like(ids[:, 3:])
    for shift in range(4):
        code = code * 6364136223846793005 + ids[:, shift : shift + code.shape[1]]
    code = torch.where(position[3:] < n[:, None], code & (2**62 - 1), unique[:, 3:])
    ordered = code.sort(1).values
    again = (ordered[:, 1:] == ordered[:, :-1]).sum(1).double() / (n - 3)
    return {
        "completions/repetition_frac": again,
        "completions/longest_run_frac": _longest_run(ids) / n,
        "completions/top_token_frac": _longest_run(ids.sort(1).values) / n,
    }


def prefix_pushed_down(experience: Experience, pushes: Tensor) -> tuple[int, int]:
    """Count groups whose shared beginning is pushed down, and groups that share one.

    What the loss does to the log-probabilities of the tokens that completions share at their beginning, summed, is
    below 0 (GTPO, 2508.03772 Eq. 6): typical where correct completions are the longer ones and the loss divides by
    length.

    Args:
        experience: tensors of the completions, groups whole.
        pushes: weight by which the loss raises the log-probability of each token, -dL/d(log-probability), [N, P] for
            the first P tokens, at most :data:`PREFIX`; 0 where there is none.
    """
    assert experience.token_ids is not None
    lengths, weights = experience.lengths.tolist(), pushes.double().tolist()
    rows = experience.token_ids[:, : pushes.shape[1]].tolist()
    total: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
    size: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
    count: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
    for i, group in enumerate(experience.group_ids.tolist()):
        for t in range(min(lengths[i], pushes.shape[1])):
            prefix = group, tuple(rows[i][: t + 1])
            total[prefix] += weights[i][t]
            size[prefix] += abs(weights[i][t])
            count[prefix] += 1
    push: dict[int, float] = defaultdict(float)
    scale: dict[int, float] = defaultdict(float)
    for prefix, value in total.items():
        if count[prefix] > 1:
            push[prefix[0]] += value
            scale[prefix[0]] += size[prefix]
    # The weights are float32: terms that cancel leave a rounding error of this share of their size.
    return sum(value < -1e-5 * scale[group] for group, value in push.items()), len(push)


@torch.no_grad()
def update_size(optimizer: torch.optim.Optimizer, reduce: Reduce | None = None) -> float | None:
    """Return the norm of the last AdamW step over that of the weights it moved; None without a step, or without Adam.

    Measured on up to :data:`SAMPLED` elements of every matrix, or of this rank's shard of it. Call it before the
    schedule moves the learning rate on.

    Args:
        optimizer: has taken the step.
        reduce: sum over ranks that hold different shards.
    """
    # The step is computed again from Adam's moments: to compare weights before and after would take a copy of them.
    moved = weights = 0.0
    for group in optimizer.param_groups:
        known = [p for p in group["params"] if p.ndim >= 2 and "exp_avg_sq" in optimizer.state.get(p, {})]
        if not known:
            continue
        states = [optimizer.state[p] for p in known]
        step, (beta1, beta2) = float(states[0]["step"]), group["betas"]
        w, m, v = (
            _sampled(tensors) for tensors in (known, *([s[k] for s in states] for k in ("exp_avg", "exp_avg_sq")))
        )
        # Quantized to 0, a second moment says nothing of the step.
        seen = (v > 0) | (m == 0)
        w, m, v = w[seen], m[seen], v[seen]
        delta = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + group["eps"]) + group["weight_decay"] * w
        moved += float(group["lr"]) ** 2 * float(delta.square().sum())
        weights += float(w.square().sum())
    if reduce is not None:
        moved, weights = reduce(torch.tensor([moved, weights], dtype=torch.float64)).tolist()
    return (moved / weights) ** 0.5 if weights else None


@torch.no_grad()
def gradient_cosine(optimizer: torch.optim.Optimizer, reduce: Reduce | None = None) -> float | None:
    """Return the cosine of the gradient with Adam's running mean of those before; None without either.

    Call it before the step. It is measured as :func:`update_size` is. Below 0 the step undoes what the last ones did.

    Args:
        optimizer: is about to take the step.
        reduce: sum over ranks that hold different shards.
    """
    # Adam's mean and not the last gradient: that one would have to be kept, and to come back with a checkpoint.
    dot = new = old = 0.0
    for group in optimizer.param_groups:
        known = [
            p for p in group["params"] if p.ndim >= 2 and p.grad is not None and "exp_avg" in optimizer.state.get(p, {})
        ]
        if not known:
            continue
        g, m = _sampled([p.grad for p in known]), _sampled([optimizer.state[p]["exp_avg"] for p in known])
        dot, new, old = dot + float((g * m).sum()), new + float(g.square().sum()), old + float(m.square().sum())
    if reduce is not None:
        dot, new, old = reduce(torch.tensor([dot, new, old], dtype=torch.float64)).tolist()
    return dot / (new * old) ** 0.5 if new > 0 and old > 0 else None


def _sampled(tensors: Sequence[Tensor]) -> Tensor:
    parts = []
    for tensor in tensors:
        local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
        parts.append(strided_sample(local, max(1, local.numel() // SAMPLED)))
    return torch.cat(parts)


def _completions_of_another_prompt(batch: Rollout, group_ids: list[int], prompts: list[str]) -> int:
    """Count completions in a group whose first one has another prompt, or that answer another request."""
    first: dict[int, str] = {}
    count = 0
    for i, (group, prompt) in enumerate(zip(group_ids, prompts, strict=True)):
        wrong_group = first.setdefault(group, prompt) != prompt
        count += wrong_group or batch.completions[i].request != i // batch.group_size
    return count


def _mean_advantages(experience: Experience, advantages: Tensor) -> Tensor:
    """Return the mean advantage over the tokens of each completion, [N]; 0 for an empty one."""
    return masked(advantages.double(), experience.mask).sum(1) / experience.lengths.clamp_min(1)


def _advantages_follow(rewards: list[float], advantages: list[float]) -> bool | None:
    """Tell whether better completions have larger advantages on average; None where nothing differs."""
    middle = sum(rewards) / len(rewards)
    high = [a for r, a in zip(rewards, advantages, strict=True) if r > middle]
    low = [a for r, a in zip(rewards, advantages, strict=True) if r < middle]
    if not high or not low:
        return None
    gap = sum(high) / len(high) - sum(low) / len(low)
    return None if gap == 0 else gap > 0


def _longest_run(rows: Tensor) -> Tensor:
    """Return the length of the longest run of equal neighbours in each row, [n] float64."""
    position = torch.arange(rows.shape[1], device=rows.device)
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[:, 1:] = rows[:, 1:] != rows[:, :-1]
    begun = torch.where(starts, position, 0).cummax(1).values
    return (position - begun + 1).max(1).values.double()
