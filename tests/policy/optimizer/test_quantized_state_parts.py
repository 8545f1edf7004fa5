"""Steps of torchao in parts: the bits of its own whole step, in memory that does not grow with the weight."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_grpo.distributed import optimizer_state
from lit_grpo.errors import UserError
from lit_grpo.learner.rollout_metrics import update_size
from lit_grpo.policy import OptimizerConfig
from lit_grpo.policy.optimizer import quantized_state as lb
from lit_grpo.policy.optimizer.build import make_optimizer

adam: Any = pytest.importorskip("torchao.optim.adam", reason="extra `quantized` is not installed")
KINDS = ("AdamW8bit", "Adam8bit", "AdamW4bit", "AdamWFp8")
PART = 4096
SHAPES = {  # how many parts of 4096
    (64, 160): 3,  # rows do not end where blocks do
    (2, 64, 96): 3,  # experts
    (65, 151): 3,  # no multiple of a block: moments that are not quantized
    (8192,): 2,
    (4096,): 1,
    (5,): 1,
    (): 1,
    (0, 8): 0,  # an empty shard
}


@pytest.fixture(autouse=True)
def _in_small_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setattr(lb, "SLICE", PART)
    torch.compiler.set_stance("force_eager")  # for torchao's own step
    yield
    torch.compiler.set_stance("default")


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(weights: list[torch.Tensor], kind: str, **args: Any) -> Any:
    settings = OptimizerConfig(type=f"torchao.optim.{kind}", lr=1e-2, weight_decay=0.1, args=args)
    return make_optimizer(torch.nn.ParameterList([w.clone() for w in weights]), settings, 1)[0]


def parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def take(optimizer: Any, steps: range, step: Callable[[], Any]) -> None:
    for number in steps:
        for place, p in enumerate(parameters(optimizer)):
            p.grad = random(tuple(p.shape), p.dtype, 100 * number + place)
        for group in optimizer.param_groups:
            group["lr"].fill_(1e-2 / (1 + number))
        step()


def own_step(optimizer: Any) -> Callable[[], Any]:
    return lambda: type(optimizer).step(optimizer)


def assert_equal(one: Any, other: Any) -> None:
    for p, q in zip(parameters(one), parameters(other), strict=True):
        assert torch.equal(p, q)
        a, b = one.state[p], other.state[q]
        assert float(a["step"]) == float(b["step"])
        for name in ("exp_avg", "exp_avg_sq"):
            assert type(a[name]) is type(b[name])
            assert a[name].shape == b[name].shape == p.shape
            assert torch.equal(optimizer_state.full_tensor(a[name]), optimizer_state.full_tensor(b[name]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_are_the_whole_step_to_the_bit(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [random(shape, dtype, seed) for seed, shape in enumerate(SHAPES)] + [random((96, 64), dtype, 9).t()]
    mine, theirs = made(weights, kind), made(weights, kind)
    take(theirs, range(3), own_step(theirs))
    sizes: list[int] = []
    original = adam.single_param_adam
    with monkeypatch.context() as patch:

        def counted(p: torch.Tensor, *others: Any) -> None:
            sizes.append(p.numel())
            original(p, *others)

        counted.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        patch.setattr(adam, "single_param_adam", counted)
        take(mine, range(3), mine.step)
    assert_equal(mine, theirs)
    assert len(sizes) == 3 * (sum(SHAPES.values()) + 1), "one that is transposed stays whole"
    assert sorted(sizes)[-4] <= PART < sorted(sizes)[-3]


def test_other_block_sizes_are_not_cut() -> None:
    weights = [random((48, 320), torch.bfloat16, 0)]
    for size in (96, 5120):  # the second is larger than a part
        mine, theirs = made(weights, "AdamW8bit", block_size=size), made(weights, "AdamW8bit", block_size=size)
        take(theirs, range(2), own_step(theirs))
        take(mine, range(2), mine.step)
        assert_equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_saved_whole_and_goes_on_in_parts(kind: str) -> None:
    weights = [random(shape, torch.bfloat16, seed) for seed, shape in enumerate(SHAPES)]
    straight = made(weights, kind)
    take(straight, range(2), straight.step)
    again = made([p.detach() for p in parameters(straight)], kind)
    again.load_state_dict(optimizer_state.to_quantized(copy.deepcopy(optimizer_state.to_plain(straight.state_dict()))))
    for optimizer in (straight, again):
        take(optimizer, range(2, 4), optimizer.step)
    assert_equal(straight, again)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_quantized_in_parts_when_they_are_loaded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = made([random((64, 160), torch.bfloat16, 0)], kind)
    take(optimizer, range(2), optimizer.step)
    state = optimizer.state_dict()
    moments = {name: optimizer_state.full_tensor(value) * 1.01 for name, value in state["state"][0].items()}
    found = []
    for size in (PART, 2**24):
        monkeypatch.setattr(lb, "SLICE", size)
        optimizer.load_state_dict({"state": {0: moments}, "param_groups": state["param_groups"]})
        found.append(optimizer.state[parameters(optimizer)[0]]["exp_avg_sq"])
    assert optimizer_state.is_quantized(found[0])
    assert torch.equal(optimizer_state.full_tensor(found[0]), optimizer_state.full_tensor(found[1]))


def test_parts_round_by_random_numbers_of_their_own_that_the_seed_determines() -> None:
    def rounded(seed: int) -> torch.Tensor:
        optimizer = made([torch.ones(2, PART, dtype=torch.bfloat16)], "AdamW8bit", bf16_stochastic_round=True)
        (weight,) = parameters(optimizer)
        weight.grad = torch.ones_like(weight)
        optimizer.param_groups[0]["lr"].fill_(1e-3)
        with lb.rounding_seed(optimizer, seed):
            optimizer.step()
        return weight.detach()

    first, second = rounded(0)
    assert 0 < int((first == first[0]).sum()) < PART, "up or down by chance"
    assert not torch.equal(first, second)
    assert torch.equal(rounded(0)[1], second)
    assert not torch.equal(rounded(1)[1], second)


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that an operation returned, of four bytes a number or more."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(kind, torch.nn.Parameter) and kind is not torch.Tensor for kind in types):
            return NotImplemented  # a quantized tensor says itself what it does with its parts
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.element_size() >= 4:
            self.numbers = max(self.numbers, out.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_temporary_memory_does_not_grow_with_the_weight(kind: str) -> None:
    optimizer = made([random((64, 1000), torch.bfloat16, 0)], kind, bf16_stochastic_round=True)
    take(optimizer, range(1), optimizer.step)
    (weight,) = parameters(optimizer)
    with Largest() as seen:
        optimizer.step()
    assert PART <= seen.numbers <= 2 * PART, "4 bits are unpacked two at a time"
    with Largest() as seen:
        assert update_size(optimizer)
    assert PART <= seen.numbers <= 2 * PART
    with Largest() as seen:
        own_step(optimizer)()
    assert seen.numbers >= weight.numel(), "what is looked at can be seen"


@pytest.mark.parametrize("kind", KINDS)
def test_some_numbers_of_a_quantized_tensor(kind: str) -> None:
    optimizer = made([random((64, 160), torch.bfloat16, 0)], kind)
    take(optimizer, range(1), optimizer.step)
    (weight,) = parameters(optimizer)
    moment = optimizer.state[weight]["exp_avg"]
    for stride in (1, 2, 7, 5000, 20000):
        assert torch.equal(lb.strided_sample(moment, stride), optimizer_state.full_tensor(moment).flatten()[::stride])
    assert torch.equal(lb.strided_sample(weight.detach(), 7), weight.detach().flatten()[::7].float())


def test_hooks_closures_and_a_rate_that_is_no_tensor_are_taken() -> None:
    weights = [random((64, 160), torch.bfloat16, 0)]
    mine, theirs = made(weights, "AdamW8bit"), made(weights, "AdamW8bit")
    seen: list[str] = []
    mine.register_step_pre_hook(lambda *_: seen.append("before"))
    mine.register_step_post_hook(lambda *_: seen.append("after"))
    for optimizer in (mine, theirs):
        parameters(optimizer)[0].grad = random((64, 160), torch.bfloat16, 1)
    mine.param_groups[0]["lr"] = float(theirs.param_groups[0]["lr"])

    def closure() -> bool:
        seen.append("closure")
        return torch.is_grad_enabled()

    assert mine.step(closure) is True
    assert seen == ["before", "closure", "after"]
    own_step(theirs)()
    assert_equal(mine, theirs)


def test_what_torchao_cannot_do_and_a_torchao_that_is_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [random((64, 160), torch.bfloat16, 0)]
    with pytest.raises(UserError, match=r"second moments(.|\n)*leave amsgrad out"):
        made(weights, "AdamW8bit", amsgrad=True)
    monkeypatch.setattr(adam, "single_param_adam", lambda p, grad, mu, nu: None)
    with pytest.raises(UserError, match=r"p, grad, mu, nu(.|\n)*constraints.txt"):
        made(weights, "AdamW8bit")
