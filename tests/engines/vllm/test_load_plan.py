"""Loads that are repeated from a plan leave what the loader itself would have left, or are not repeated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lit_grpo.engines.vllm.load_plan import LoadNotes, LoadPlan

Stream = Iterator[tuple[str, Tensor]]
Loader = Callable[[nn.Module, Stream], None]


class Model(nn.Module):
    """Parameters as vLLM has them: one fused of three, one padded, one of experts, and a norm in another format."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.full((8, 4), torch.nan))
        self.embed = nn.Parameter(torch.full((8, 4), torch.nan))
        self.head = self.embed
        self.experts = nn.Parameter(torch.full((2, 3, 4), torch.nan))
        self.norm = nn.Parameter(torch.full((4,), torch.nan, dtype=torch.bfloat16))
        self.register_buffer("bias", torch.full((2,), torch.nan))


def weights(seed: int) -> dict[str, Tensor]:
    r = torch.Generator().manual_seed(seed)
    shapes = {"q": (4, 4), "k": (2, 4), "v": (2, 4), "embed": (6, 4), "norm": (4,), "bias": (2,), "e0": (3, 4),
              "e1": (3, 4)}  # fmt: skip
    return {name: torch.randn(shape, generator=r) for name, shape in shapes.items()}


def load(model: Any, stream: Stream) -> None:
    """Load as vLLM's loaders do."""
    for name, tensor in stream:
        if name in ("q", "k", "v"):
            start = {"q": 0, "k": 4, "v": 6}[name]
            model.qkv.data.narrow(0, start, len(tensor)).copy_(tensor)
        elif name == "embed":
            model.embed[:6].data.copy_(tensor)
            model.embed[6:].data.fill_(0)
        elif name.startswith("e"):
            model.experts.data[int(name[1])].copy_(tensor)
        else:
            getattr(model, name).data.copy_(tensor)


def noted(model: nn.Module, loader: Loader, came: Stream) -> LoadPlan:
    plan, notes = LoadPlan(), LoadNotes(model)
    with notes, torch.no_grad():
        loader(model, notes.watched(came))
    plan.take(notes, model)
    return plan


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("order", [sorted, lambda names: sorted(names, reverse=True)])
def test_a_repeated_load_leaves_what_the_loader_leaves(order: Any) -> None:
    model, other = Model(), Model()
    plan = noted(model, load, iter(weights(0).items()))
    assert plan.holds()
    assert not plan.useless
    new = weights(1)
    load(other, iter(new.items()))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(torch.nan)
    loaded: set[str] = set()
    # Weights may come in another order, and each may be a part of something larger.
    came = {name: torch.cat([torch.zeros(5), new[name].reshape(-1)])[5:].view(new[name].shape) for name in order(new)}
    assert plan.repeat(came.items(), loaded) is None
    assert_same(tensors(model), tensors(other))
    assert loaded == {"qkv", "embed", "experts", "norm"}
    assert plan.missing(dict.fromkeys(came, 1)) == []
    assert plan.missing({"q": 16}) == sorted(new.keys() - {"q"})


def test_nothing_of_the_weights_is_held() -> None:
    model = Model()
    plan = noted(model, load, iter(weights(0).items()))
    came = weights(1)
    plan.repeat(came.items(), set())
    before = tensors(model)
    for tensor in came.values():
        tensor.zero_()
    assert_same(tensors(model), before)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {**w, "other": torch.zeros(2)},
        lambda w: {**w, "v": w["v"].double()},
        lambda w: {**w, "v": w["v"].T.contiguous().T},
        lambda w: {**w, "v": w["v"][:1]},
    ],
    ids=["unknown", "format", "strides", "shape"],
)
def test_from_the_first_weight_of_another_form_on_the_rest_is_given_back(change: Any) -> None:
    model = Model()
    plan = noted(model, load, iter(weights(0).items()))
    new = change(weights(1))
    loaded: set[str] = set()
    rest = plan.repeat(iter(new.items()), loaded)
    assert rest is not None
    came = list(rest)
    first = "other" if "other" in new else "v"
    assert [name for name, _ in came] == list(new)[list(new).index(first) :]
    assert came[0][1] is new[first]
    assert "qkv" in loaded
    assert torch.equal(model.qkv[:6].detach(), torch.cat([new["q"], new["k"]]))


def fused_later(model: Any, stream: Stream) -> None:
    """As loaders do that collect the parts of a layer first."""
    load(model, iter(list(stream)))


def sliced(model: Any, stream: Stream) -> None:
    """A rank's share, cut out of the columns."""
    for name, tensor in stream:
        if name == "e0":
            model.experts.data[0].view(4, 3).copy_(tensor.narrow(1, 0, 4).T)
        else:
            load(model, iter([(name, tensor)]))


@pytest.mark.parametrize("loader", [fused_later, sliced])
def test_parts_turned_and_kept_back_are_repeated(loader: Loader) -> None:
    model, other = Model(), Model()
    plan = noted(model, loader, iter(weights(0).items()))
    assert plan.holds()
    new = weights(1)
    came = {
        name: torch.cat([torch.zeros(3), tensor.reshape(-1)])[3:].view(tensor.shape) for name, tensor in new.items()
    }
    plan.repeat(came.items(), set())
    loader(other, iter(new.items()))
    assert_same(tensors(model), tensors(other))


def test_weights_that_lie_in_one_block_are_told_apart() -> None:
    def block(seed: int) -> dict[str, Tensor]:
        own = weights(seed)
        whole, end = torch.cat([tensor.reshape(-1) for tensor in own.values()]), 0
        views = {}
        for name, tensor in own.items():
            views[name] = whole[end : end + tensor.numel()].view(tensor.shape)
            end += tensor.numel()
        return views

    model, other = Model(), Model()
    plan = noted(model, fused_later, iter(block(0).items()))
    assert plan.holds()
    assert plan.repeat(weights(1).items(), set()) is None
    load(other, iter(weights(1).items()))
    assert_same(tensors(model), tensors(other))


def scaled(model: Any, stream: Stream) -> None:
    load(model, stream)
    model.norm.data.mul_(2)


def shifted(model: Any, stream: Stream) -> None:
    load(model, ((name, tensor + 1 if name == "norm" else tensor) for name, tensor in stream))


def read_back(model: Any, stream: Stream) -> None:
    for name, tensor in stream:
        if name == "bias":
            model.bias.fill_(tensor[0].item())
        else:
            load(model, iter([(name, tensor)]))


def converted(model: Any, stream: Stream) -> None:
    load(model, ((name, tensor.bfloat16()) for name, tensor in stream))


def seen(model: Any, stream: Stream) -> None:
    """Bits taken for those of another format."""
    for name, tensor in stream:
        if name == "norm":
            model.norm.data.copy_(tensor.view(torch.bfloat16)[::2])
        else:
            load(model, iter([(name, tensor)]))


def incomplete(model: Any, stream: Stream) -> None:
    load(model, ((name, tensor) for name, tensor in stream if name != "k"))


def overlapping(model: Any, stream: Stream) -> None:
    for name, tensor in stream:
        load(model, iter([(name, tensor)]))
        if name == "k":
            model.qkv.data[5:7].copy_(tensor)


def columns(model: Any, stream: Stream) -> None:
    """Into a target whose first and last address do not tell what lies between."""
    for name, tensor in stream:
        if name == "q":
            model.qkv.data[:4, :2].copy_(tensor[:, :2])
            model.qkv.data[:4, 2:].copy_(tensor[:, 2:])
        else:
            load(model, iter([(name, tensor)]))


def every_seventh(model: Any, stream: Stream) -> None:
    """The first row and the last, and none between."""
    for name, tensor in stream:
        if name == "q":
            model.qkv.data[::7].copy_(tensor[:2])
        elif name not in ("k", "v"):
            load(model, iter([(name, tensor)]))


def every_seventh_filled(model: Any, stream: Stream) -> None:
    load(model, ((name, tensor) for name, tensor in stream if name not in ("q", "k", "v")))
    model.qkv.data[::7].zero_()


def half_twice(model: Any, stream: Stream) -> None:
    """As many elements as there are, of which half come twice and half not at all."""
    for name, tensor in stream:
        if name == "q":
            model.qkv.data[:4].copy_(tensor)
            model.qkv.data[:4].fill_(1)
        elif name not in ("k", "v"):
            load(model, iter([(name, tensor)]))


def columns_filled(model: Any, stream: Stream) -> None:
    load(model, stream)
    model.qkv.data[:, 0].zero_()


def with_a_constant(model: Any, stream: Stream) -> None:
    load(model, ((name, tensor) for name, tensor in stream if name != "bias"))
    model.bias.copy_(torch.ones(2))


def into_another(model: Any, stream: Stream) -> None:
    """By way of a tensor that is neither a weight nor the model's."""
    for name, tensor in stream:
        if name == "norm":
            between = torch.empty(4)
            between.copy_(tensor)
            model.norm.data.copy_(between)
        else:
            load(model, iter([(name, tensor)]))


NOT_COPIES = [scaled, shifted, read_back, converted, seen, incomplete, overlapping, columns, columns_filled,
              every_seventh, every_seventh_filled, half_twice, with_a_constant, into_another]  # fmt: skip


@pytest.mark.parametrize("loader", NOT_COPIES, ids=lambda f: f.__name__)
def test_a_loader_that_does_anything_else_is_not_repeated(loader: Loader) -> None:
    model = Model()
    plan = noted(model, loader, iter(weights(0).items()))
    assert plan.useless
    assert not plan.holds()


def test_a_weight_that_comes_twice_is_not_repeated() -> None:
    plan = noted(Model(), load, iter([*weights(0).items(), ("q", torch.zeros(4, 4))]))
    assert plan.useless
    assert not plan.holds()


def test_a_weight_that_lies_otherwise_than_it_reads_is_not_repeated() -> None:
    came = weights(0)
    came["v"] = came["v"].T.contiguous().T
    plan = noted(Model(), load, iter(came.items()))
    assert plan.useless
    assert not plan.holds()


def two_halves(model: Any, stream: Stream) -> None:
    for name, tensor in stream:
        model.a.data[{"x": slice(0, 3), "y": slice(3, 6)}[name]].copy_(tensor)


def test_what_the_stream_itself_computes_is_no_part_of_the_load() -> None:
    def merged(x: Tensor) -> Stream:
        yield "x", x
        # Of a weight that was given already, as adapters are added to it.
        yield "y", x * 2 + 1

    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(6, 3))
    plan = noted(model, two_halves, merged(torch.ones(3, 3)))
    assert plan.holds()
    plan.repeat(merged(torch.full((3, 3), 2.0)), set())
    assert model.a[:, 0].tolist() == [2.0] * 3 + [5.0] * 3


def test_a_weight_may_lie_where_one_lay_that_is_gone() -> None:
    # Of the third and the first, as an allocator gives it out once the first is gone.
    memory = [torch.zeros(6).numpy(), torch.zeros(6).numpy()]

    def gathered(value: float) -> Stream:
        for number, name in enumerate("xyz"):
            raw = memory[number % 2]
            raw[:] = value + number
            # A storage of its own at that address.
            yield name, torch.frombuffer(raw, dtype=torch.float32).view(2, 3)

    def loader(model: Any, stream: Stream) -> None:
        for name, tensor in stream:
            start = 2 * "xyz".index(name)
            model.a.data[start : start + 2].copy_(tensor)

    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(6, 3))
    plan = noted(model, loader, gathered(1.0))
    assert plan.holds()
    plan.repeat(gathered(3.0), set())
    assert model.a[:, 0].tolist() == [3.0, 3.0, 4.0, 4.0, 5.0, 5.0]


def test_a_plan_holds_no_longer_than_every_tensor_of_its_model_stays() -> None:
    for change in (
        lambda m: setattr(m, "norm", nn.Parameter(m.norm.data.clone())),
        lambda m: setattr(m.norm, "data", m.norm.data.clone()),
        lambda m: m.register_buffer("bias", m.bias.clone()),
    ):
        model = Model()
        plan = noted(model, load, iter(weights(0).items()))
        assert plan.holds()
        change(model)
        assert not plan.holds()


def kept_as_buffer(model: Any, tensor: Tensor) -> None:
    model.bias = tensor


def kept_besides(model: Any, tensor: Tensor) -> None:
    model.bias.data.copy_(tensor)
    model.scale = tensor


def kept_in_a_list(model: Any, tensor: Tensor) -> None:
    model.kept = [tensor]


def turned_by_a_view(model: Any, tensor: Tensor) -> None:
    model.bias.data.copy_(torch._neg_view(tensor))


@pytest.mark.parametrize("special", [kept_as_buffer, kept_besides, kept_in_a_list, turned_by_a_view])
def test_a_load_that_keeps_a_weight_or_turns_its_sign_is_not_repeated(special: Callable[[Any, Tensor], None]) -> None:
    def loader(model: nn.Module, stream: Stream) -> None:
        for name, tensor in stream:
            if name == "bias":
                special(model, tensor)
            else:
                load(model, iter([(name, tensor)]))

    came = weights(0)
    plan = noted(Model(), loader, iter(came.items()))
    assert not plan.holds()
    assert plan.useless


def test_an_empty_plan_holds_nothing() -> None:
    assert not LoadPlan().holds()


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, str, int, int, int]]:
    """Copies of rows, (parameter, weight or a fill, first row there, first row here, rows), that cover nearly all."""
    steps = []
    for name in "ab":
        cuts = sorted(draw(st.sets(st.integers(1, 5), max_size=3)))
        for start, end in itertools.pairwise([0, *cuts, 6]):
            count = end - start
            steps.append((name, draw(st.sampled_from("xy0")), start, draw(st.integers(0, 6 - count)), count))
    if draw(st.booleans()):
        extra = draw(st.sampled_from(steps))
        steps.insert(draw(st.integers(0, len(steps))), extra)
    elif draw(st.booleans()):
        steps.remove(draw(st.sampled_from(steps)))
    return draw(st.permutations(steps))


@settings(max_examples=200, deadline=None)
@given(programs())
def test_what_is_copied_once_to_everywhere_is_copied_again_and_nothing_else(steps: Any) -> None:
    model, other = nn.Module(), nn.Module()
    for one in (model, other):
        one.a, one.b = (nn.Parameter(torch.full((6, 3), torch.nan)) for _ in range(2))

    def loader(target: Any, stream: Stream) -> None:
        came = dict(stream)
        for name, source, start, first, count in steps:
            into = getattr(target, name).data[start : start + count]
            if source == "0":
                into.fill_(7.0)
            else:
                into.copy_(came[source][first : first + count])

    def two(seed: int) -> Stream:
        r = torch.Generator().manual_seed(seed)
        return iter([(name, torch.randn(6, 3, generator=r)) for name in "xy"])

    plan = noted(model, loader, two(0))
    covered = sorted((name, row) for name, _, start, _, count in steps for row in range(start, start + count))
    all_used = {"x", "y"} <= {source for _, source, *_ in steps}
    assert plan.holds() == (all_used and covered == [(name, row) for name in "ab" for row in range(6)])
    if plan.holds():
        plan.repeat(two(1), set())
        loader(other, two(1))
        assert_same(tensors(model), tensors(other))
