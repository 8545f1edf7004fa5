"""Promises about splits: micro-batches, order, padding, ranks. Every recipe, random rollouts, NaN in the padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_grpo.types import Experience
from tests.objectives.random_batches import NAMES, Forward, Ranks, batch, forward_loss, objective, step

SEEDS = st.integers(0, 10_000)
FEW = settings(max_examples=2, deadline=None)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(seed=SEEDS, old=st.booleans())
def test_micro_batches_order_and_padding(name: str, seed: int, old: bool) -> None:
    made = objective(name)
    exp, now = batch(seed, groups=3, size=3, width=4, old=old or "old_logprobs" in made.requires(1))
    for pass_index in range(made.passes):
        _, plan, out, grad = step(made, exp, now, pass_index=pass_index)
        assert torch.isfinite(out.loss)
        assert torch.isfinite(grad).all()
        assert torch.equal(grad, out.token_weights)

        # Any split, in any order, each micro-batch padded to its own longest completion.
        order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
        total, pieces = torch.zeros((), dtype=torch.float64), torch.zeros_like(grad)
        counted = torch.zeros((), dtype=torch.float64)
        for rows in order.split([1, 3, 5]):
            width = max(int(exp.lengths[rows].max()), 1)
            small = now.select(rows)
            trimmed = Forward(*(getattr(small, f)[:, :width] for f in ("logprobs", "entropy", "values", "router")))
            part, part_grad = forward_loss(made, plan.select(rows), trimmed)
            total = total + part.loss.detach()
            counted = counted + part.metrics["loss/policy"].weight
            pieces[rows, :width] = part_grad
        same(total, out.loss.detach())
        same(pieces, grad)
        assert float(counted) == pytest.approx(0.0 if plan.empty else 1.0)

        # What the plan calls inactive may be left out.
        rows = plan.active.nonzero()[:, 0]
        if len(rows):
            part, part_grad = forward_loss(made, plan.select(rows), now.select(rows))
            same(part.loss, out.loss)
            same(part_grad, grad[rows])
        assert not grad[~plan.active].any()


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(seed=SEEDS)
def test_order_of_completions(name: str, seed: int) -> None:
    made = objective(name)
    exp, now = batch(seed, groups=3, size=3, width=4)
    advantages, _, out, grad = step(made, exp, now)
    generator = torch.Generator().manual_seed(seed)
    if made.shaping.label_noise:  # flips belong to a place in the group: only whole groups move
        order = (torch.randperm(3, generator=generator)[:, None] * 3 + torch.arange(3)).flatten()
    else:
        order = torch.randperm(9, generator=generator)
    moved_advantages, _, moved, moved_grad = step(made, exp.select(order), now.select(order))
    torch.testing.assert_close(moved_advantages, advantages[order], rtol=1e-9, atol=1e-12, equal_nan=True)
    same(moved.loss, out.loss)
    same(moved_grad, grad[order])


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(seed=SEEDS)
def test_ranks(name: str, seed: int) -> None:
    made = objective(name)
    exp, now = batch(seed, groups=3, size=3, width=4)
    _, plan, out, grad = step(made, exp, now)
    shares = [torch.arange(0, 6), torch.arange(6, 9)]  # uneven on purpose

    def work(rank, reduce):
        return step(made, exp.select(shares[rank]), now.select(shares[rank]), reduce=reduce)

    results = Ranks(2).run(work)
    same(torch.stack([r[2].loss.detach() for r in results]).sum(), out.loss.detach())
    same(torch.cat([r[3] for r in results]), grad)
    assert all(r[1].empty == plan.empty for r in results)
    for key, (total, weight) in out.metrics.items():
        if not key.startswith(("loss/", "critic/value_")):
            for field, want in (("total", total), ("weight", weight)):
                pieces = [torch.as_tensor(getattr(r[2].metrics[key], field)) for r in results]
                same(torch.stack(pieces).sum(0), torch.as_tensor(want))


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(seed=SEEDS)
def test_wider_padding(name: str, seed: int) -> None:
    made = objective(name)
    exp, now = batch(seed, groups=2, size=3, width=4)
    _, _, out, grad = step(made, exp, now)

    def wide(value: torch.Tensor) -> torch.Tensor:
        tail = value.new_full((value.shape[0], 3, *value.shape[2:]), float("nan") if value.is_floating_point() else 0)
        return torch.cat([value, tail], dim=1)

    changed = {
        k: wide(v) for k, v in vars(exp).items() if isinstance(v, torch.Tensor) and v.ndim >= 2
    }  # fmt: skip
    wider = Experience(**{**vars(exp), **changed, "width": 7})
    forward = Forward(*(wide(getattr(now, f)) for f in ("logprobs", "entropy", "values", "router")))
    _, _, padded, padded_grad = step(made, wider, forward)
    same(padded.loss, out.loss)
    same(padded_grad[:, :4], grad)
    assert not padded_grad[:, 4:].any()


def test_no_grad_forward_still_tells_token_weights() -> None:
    made = objective("grpo")
    exp, now = batch(3, groups=2, size=3, width=4)
    _, plan, out, _ = step(made, exp, now)
    with torch.no_grad():
        dry = made.loss(now.logprobs, plan)
    assert not dry.loss.requires_grad
    assert torch.equal(dry.token_weights, out.token_weights)
