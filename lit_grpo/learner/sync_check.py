"""Check that an engine holds the learner's weights after a sync, before it samples a rollout.

An engine that is given weights and goes on with others samples from another policy, and nothing fails: rewards come
in, losses are finite, and what is learned is noise. So every weight is changed a little, the engine is given the
changed weights, samples a few tokens with them, and tells their log-probabilities; the learner computes its own. Then
the change is undone, and the engine is asked once more under the weights that the run begins with.

* An engine that loaded the same weights from a folder and ignores the sync agrees with the learner only before the
  change.
* One that takes the first sync alone, or keeps something that it made of the first weights, disagrees after it is
  undone.
* One that mixes weights up (transposed, another order, packed twice) disagrees both times.

How far apart the two may be follows from how far the change itself moves the learner's log-probabilities: rounding is a
small change of all weights too, so that the measure fits models of random weights, whose log-probabilities hardly move,
and trained ones alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lit_grpo.distributed.sharding import local, reshard
from lit_grpo.errors import StopRun
from lit_grpo.learner.batch import make_experience
from lit_grpo.learner.engine_agreement import GuardConfig
from lit_grpo.learner.forward import ForwardRunner
from lit_grpo.learner.metric_sums import Reduce
from lit_grpo.policy.model.compiling import eagerly
from lit_grpo.types import Rollout
from lit_grpo.utils import random as rng

CHANGED_VERSION = -2
"""Version of the changed weights: none that a run has, and older than all of them."""
_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16,
             torch.float16: torch.int16}  # fmt: skip
# The strongest bit (12 to 25 %) leaves SmolLM2-135M so far from a language model that the rounding of bfloat16 grows to
# 0.27 of the change; this one comes to 0.05, and the next, which moves less beside the same rounding, to 0.07.
_FLIPPED_BIT = 3
"""Which bit of the mantissa is flipped, counted from its strongest."""
ROUNDING = 1e-4
"""Nats that float32 on both sides may differ by, however little the change of the weights does."""
COARSE_ROUNDING = 5e-3
"""The same where a side may use a coarser format."""
FEW_TOKENS = 2.0
"""Factor on the bound of a whole rollout's mean, which is taken over far more tokens than the mean here."""

SYNC_CAUSES = (
    "the engine ignores its sync, or keeps what it made of earlier weights",
    "it takes weights under other names, in another order or transposed",
    "its build repacks some weights wrongly when they change (seen with mixtures of experts)",
    "its model is another than the learner's (rotary embeddings, windows, scaling)",
)


@dataclass(frozen=True)
class SyncResult:
    """What the check of an engine's first sync found, over all ranks."""

    changed_gap: float
    """Mean difference (nats) of log-probabilities between engine and learner, both with the changed weights."""
    gap: float
    """The same with the weights that the run begins with."""
    change: float
    """By how many nats the change of the weights moved the learner's log-probabilities, mean over the same tokens."""
    tokens: int
    """Tokens that were compared."""


@contextlib.contextmanager
def changed_weights(model: nn.Module) -> Iterator[None]:
    """Change every floating-point weight of a model by 6 to 12.5 % inside, and leave it as it was to the bit.

    A bit of each weight's mantissa is flipped, in place: no copy is made, shards are changed where they are, and the
    same flip undoes it. Zeros stay zeros but for a number too small to matter, and finite weights stay finite.
    Quantized weights stay as they are.
    """
    # A weight that a forward pass left gathered is not the one that the next forward pass reads.
    reshard(model)
    _flip(model)
    try:
        yield
    finally:
        reshard(model)
        _flip(model)


@torch.no_grad()
def _flip(model: nn.Module) -> None:
    # Tied weights are one parameter and come once.
    for parameter in model.parameters():
        weight = local(parameter.detach())
        # Quantized weights are of classes of their own, whose bits mean something else.
        if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in _INTEGERS or not weight.numel():
            continue
        bit = 1 << (_MANTISSA_BITS[weight.dtype] - _FLIPPED_BIT)
        weight.view(_INTEGERS[weight.dtype]).bitwise_xor_(bit)


def check_engine(
    runner: ForwardRunner,
    *,
    sync: Callable[[int], object],
    sample: Callable[[], Rollout],
    version: int,
    guards: GuardConfig,
    reduce: Reduce | None = None,
) -> SyncResult | None:
    """Check that an engine takes over the policy's weights, and say so; every rank calls it.

    Args:
        runner: the models of the run.
        sync: as of :func:`check_sync`.
        sample: as of :func:`check_sync`.
        version: of the present weights.
        guards: the bounds, none of which is None.
        reduce: sum over ranks; None for one process.

    Returns:
        What :func:`check_sync` found.

    Raises:
        StopRun: a gap is over its bound.
    """
    assert guards.max_sync_gap is not None
    assert guards.max_engine_gap is not None
    policy = runner.policy
    exact = torch.device(runner.device).type == "cpu" and policy.model.dtype in (torch.float32, torch.float64)
    # Dropout draws random numbers, and a run must not depend on whether it was checked.
    random_state = rng.get_state()
    try:
        found = check_sync(
            policy,
            sync=sync,
            sample=sample,
            logprobs=partial(_present_logprobs, runner),
            version=version,
            share=guards.max_sync_gap,
            largest_gap=guards.max_engine_gap,
            rounding=ROUNDING if exact else COARSE_ROUNDING,
            reduce=reduce,
        )
    finally:
        rng.set_state(random_state)
    if found is not None:
        rank_zero_info(
            f"the engine takes over weights: log-probabilities differ by {found.changed_gap:.2g} nats after a "
            f"change of {found.change:.2g} (and by {found.gap:.2g} after that was undone)"
        )
    return found


def _present_logprobs(runner: ForwardRunner, rollout: Rollout) -> Tensor:
    """Return the present log-probabilities of a rollout's tokens, [N, T], on the CPU."""
    # What is compiled must not depend on which form comes first: code that is kept is found by the sizes that the
    # compiler has seen, and these few tokens come before or after the passes that are compiled ahead.
    with eagerly() if runner.policy.compiled else contextlib.nullcontext():
        results = runner.old_forward(rollout, make_experience(rollout, runner.device), frozenset({"old_logprobs"}))
    # The engine may sample from this very model next.
    runner.policy.stop_replay()
    assert results.old_logprobs is not None
    return results.old_logprobs.cpu()


def check_sync(
    model: nn.Module,
    *,
    sync: Callable[[int], object],
    sample: Callable[[], Rollout],
    logprobs: Callable[[Rollout], Tensor],
    version: int,
    share: float,
    largest_gap: float,
    rounding: float = ROUNDING,
    reduce: Reduce | None = None,
) -> SyncResult | None:
    """Give an engine changed weights and then the present ones, and compare what it says of tokens each time.

    The engine holds the present weights afterwards. Every rank calls it.

    Args:
        model: the learner's model, whose weights are changed meanwhile.
        sync: brings the model's weights to the engine, as of a version.
        sample: has the engine sample a few completions at temperature 1, with their log-probabilities.
        logprobs: the learner's log-probabilities of completions, [N, T].
        version: of the present weights.
        share: bound on the mean gap, as a share of what the change of weights does to the log-probabilities.
        largest_gap: bound on the mean gap (nats) of a whole rollout under the present weights.
        rounding: nats that are always allowed.
        reduce: sum over ranks; None for one process.

    Returns:
        What was found; None where the engine gives no log-probabilities.

    Raises:
        StopRun: a gap is over its bound.
    """
    with changed_weights(model):
        sync(CHANGED_VERSION)
        first = sample()
        under_change = logprobs(first)
    before = logprobs(first)
    sync(version)
    second = sample()
    sums = torch.stack(
        [*_gap(first, under_change), *_gap(second, logprobs(second)), *_difference(first, under_change, before)]
    )
    sums = sums if reduce is None else reduce(sums)
    changed_total, changed_tokens, total, tokens, moved, moved_tokens = sums.tolist()
    if not changed_tokens or not tokens:
        return None
    found = SyncResult(
        changed_total / changed_tokens, total / tokens, moved / moved_tokens, int(changed_tokens + tokens)
    )
    bound = max(rounding, share * found.change)
    present_bound = min(bound, FEW_TOKENS * largest_gap)
    # Written so that NaN, which compares false, is over every bound.
    if not (found.changed_gap <= bound and found.gap <= present_bound):
        raise StopRun(_message(found, bound, present_bound), diagnosis="stale_or_mismatched_sampler")
    return found


def _message(found: SyncResult, bound: float, present_bound: float) -> str:
    causes = "; ".join(f"({i}) {cause}" for i, cause in enumerate(SYNC_CAUSES, 1))
    return (
        "the weights that the engine holds after a sync are not the learner's. Over a few sampled tokens their "
        f"log-probabilities differ by {found.changed_gap:.3g} nats on average after every weight was changed a little, "
        f"which itself moves them by {found.change:.3g}, and by {found.gap:.3g} after that was undone; allowed are "
        f"{bound:.2g} and {present_bound:.2g} (model.guards.max_sync_gap). No rollout was sampled with them. "
        f"Likely causes, in order: {causes}. "
        "data.engine.name: transformers samples with the learner's own weights."
    )


def _gap(rollout: Rollout, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the total gap between the engine's log-probabilities and ``logprobs``, [N, T], and the tokens in it."""
    total, count = 0.0, 0
    for completion, row in zip(rollout.completions, logprobs.double().cpu(), strict=True):
        # None at all, or NaN: the engine does not know them.
        said = torch.tensor(completion.logprobs, dtype=torch.float64)
        gaps = (row[: len(said)] - said).abs()[~said.isnan()]
        total, count = total + float(gaps.sum()), count + len(gaps)
    return torch.tensor(total, dtype=torch.float64), torch.tensor(count, dtype=torch.float64)


def _difference(rollout: Rollout, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the total difference of two log-probabilities of each sampled token, [N, T], and the tokens."""
    lengths = torch.tensor([len(c.token_ids) for c in rollout.completions])
    mask = torch.arange(one.shape[1])[None, :] < lengths[:, None]
    return (one.double() - other.double()).abs().cpu()[mask].sum(), mask.sum().double()
