"""Every way to lay out and compute a micro-batch gives the same log-probabilities, entropies and gradients.

The yardstick is the padded layout with all logits at once. Float32; figures may differ by rounding: log-probabilities
and entropies by 2e-5 absolute plus 1e-4 relative, entries of a gradient by 2e-6 of the largest one plus 1e-4.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lit_grpo.errors import UserError
from lit_grpo.policy import Layout, Policy, PolicyConfig, TinyModel, pack_rows
from lit_grpo.policy.forward.attention import NAMES, register
from lit_grpo.policy.forward.batching import cut
from lit_grpo.policy.forward.head import head_stats
from lit_grpo.policy.model import compiling
from lit_grpo.policy.model.load import checkpoint_blocks, load_model

WIDTH = 7
PADDED = Layout(pack=False, share=False)
LAYOUTS = {
    "padded": PADDED,
    "shared": Layout(pack=False, share=True),
    "packed": Layout(pack=True, share=False),
    "packed and shared": Layout(pack=True, share=True),
}


def llama(attention: str = "sdpa") -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    register()
    form: dict[str, Any] = {"attn_implementation": NAMES.get(attention, attention)}
    config = LlamaConfig(
        vocab_size=14, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
        **form,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def made(kind: str, attention: Any = "sdpa") -> Policy:
    """Weights far from the flat start, so that what is attended to matters."""
    torch.manual_seed(0)
    if kind == "llama":
        model = llama(attention)
    else:
        tiny = TinyModel(width=32, layers=2, heads=2, experts=4 if kind == "moe" else 0)
        model = load_model(PolicyConfig(tiny=tiny, attention=attention))
    policy = Policy(model)
    for parameter in policy.parameters():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return policy


@pytest.fixture(scope="module", params=["qwen2", "llama", "moe"])
def policy(request) -> Policy:
    return made(request.param)


def results(policy: Policy, batch: Any, entropy: Any = "grad", temperature: float = 0.9) -> list[torch.Tensor]:
    """Log-probabilities, entropies, and the gradient of an uneven sum of both."""
    policy.zero_grad()
    stats = policy(batch, temperature, entropy)
    total = (stats.logprobs * torch.arange(1.0, WIDTH + 1).to(stats.logprobs)).sum()
    if entropy == "grad":
        total = total + (stats.entropy * torch.linspace(1.0, 2.0, WIDTH).to(stats.entropy)).sum()
    total.backward()
    none = torch.zeros(0)
    gradient = torch.cat([none if p.grad is None else p.grad.flatten() for p in policy.parameters()])
    return [stats.logprobs.detach(), none if stats.entropy is None else stats.entropy.detach(), gradient]


def same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    *stats, gradient = zip(actual, expected, strict=True)
    for a, b in stats:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(*gradient, rtol=1e-4, atol=2e-6 * float(gradient[1].abs().max()))


# Groups of (prompt length, completion lengths): empty completions, one-token prompts, groups of one.
RAGGED = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, WIDTH), min_size=1, max_size=5)), min_size=1, max_size=4
)
FIXED = [(3, [2, 5, 0, 4]), (1, [1]), (6, [7, 7, 1]), (2, [0])]


def ids(groups: Any, seed: int = 0) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The prompt of each completion, and the completion. Prompts of one token are often equal across groups."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 12, (count,), generator=generator).tolist())

    prompts, completions = [], []
    for length, lengths in groups:
        prompt = draw(length)
        prompts += [prompt] * len(lengths)
        completions += [draw(n) for n in lengths]
    return prompts, completions


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "padded"])
def test_layouts_agree(policy, name):
    prompts, completions = ids(FIXED)
    expected = results(policy, PADDED.build(prompts, completions, width=WIDTH))
    same(results(policy, LAYOUTS[name].build(prompts, completions, width=WIDTH)), expected)


@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(RAGGED, st.sampled_from(["qwen2", "llama"]), st.sampled_from([0.7, 1.0]))
def test_layouts_agree_for_ragged_lengths(groups, kind, temperature):
    policy = POLICIES.setdefault(kind, made(kind))
    prompts, completions = ids(groups, seed=len(groups))
    expected = results(policy, PADDED.build(prompts, completions, width=WIDTH), temperature=temperature)
    for name in ("shared", "packed", "packed and shared"):
        batch = LAYOUTS[name].build(prompts, completions, width=WIDTH)
        same(results(policy, batch, temperature=temperature), expected)


POLICIES: dict[str, Policy] = {}


@pytest.mark.parametrize("share", [True, False])
def test_the_mask_of_a_packed_row_says_the_same_as_its_segments(share):
    """Attentions that know masks alone get one, squared in the row."""
    prompts, completions = ids(FIXED)
    batch = pack_rows(prompts, completions, width=WIDTH, share=share)
    same(results(made("llama", "eager"), batch), results(made("llama"), batch))


def varlen_by_hand(query, key, value, queries, keys, *_: Any, scale=None, window_size=None, enable_gqa=False):
    """What torch's kernel is documented to do with (-1, 0): causal, last query beside last key."""
    assert window_size == (-1, 0)
    out = []
    for k in range(len(queries) - 1):
        q = query[queries[k] : queries[k + 1]].transpose(0, 1)
        ks, vs = (x[keys[k] : keys[k + 1]].transpose(0, 1) for x in (key, value))
        more = ks.shape[1] - q.shape[1]
        sees = torch.ones(q.shape[1], ks.shape[1], dtype=torch.bool).tril(more)
        out.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, ks, vs, attn_mask=sees, scale=scale, enable_gqa=enable_gqa
            ).transpose(0, 1)
        )
    return torch.cat(out)


@pytest.mark.parametrize("share", [True, False])
def test_the_segments_given_to_variable_length_kernels(monkeypatch, share):
    """The kernel itself runs on CUDA alone: a stand-in with its documented meaning takes its place."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_hand)
    prompts, completions = ids(FIXED)
    batch = pack_rows(prompts, completions, width=WIDTH, share=share)
    same(results(made("llama", "varlen"), batch), results(made("llama"), batch))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen attention needs a CUDA GPU")
def test_variable_length_kernels_agree_with_padded_products():
    prompts, completions = ids(FIXED)
    batch = pack_rows(prompts, completions, width=WIDTH, device="cuda")
    found = [results(made("llama", name).to("cuda", torch.bfloat16), batch)[:2] for name in ("varlen", "sdpa")]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def test_a_packed_row_holds_no_padding_and_a_shared_prompt_once():
    prompts, completions = ids(FIXED)
    fed = [max(0, len(c) - 1) for c in completions]  # the last token of a completion predicts nothing
    shared = pack_rows(prompts, completions, width=WIDTH)
    assert shared.tokens == 3 + 1 + 6 + 2 + sum(fed)
    alone = pack_rows(prompts, completions, width=WIDTH, share=False)
    assert alone.tokens == sum(map(len, prompts)) + sum(fed)
    assert len(shared.target) == len(alone.target) == sum(map(len, completions))


@pytest.mark.parametrize(("chunk", "entropy"), [(1, "grad"), (5, "detached"), (5, "none")])
def test_the_chunk_of_the_head_changes_nothing(chunk, entropy):
    policy = made("llama")
    prompts, completions = ids(FIXED)
    batch = pack_rows(prompts, completions, width=WIDTH)
    policy.logits_chunk = 10**6
    expected = results(policy, batch, entropy)
    policy.logits_chunk = chunk
    same(results(policy, batch, entropy), expected)


class Wrapped(torch.nn.Linear):
    """A head of which nothing is known: an adapter, say."""


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", ["nothing", "weight", "hidden"])
def test_the_head_of_one_piece_agrees_with_autograd(monkeypatch, bias, frozen):
    """Chunk by chunk into one gradient, against checkpoints around each chunk and against everything at once."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    compiling.compiled.cache_clear()
    torch.manual_seed(0)
    data, target = torch.randn(7, 6), torch.randint(11, (7,))
    weights, found = torch.arange(1.0, 8.0), []
    for kind, chunk, compiled in (
        (torch.nn.Linear, 7, False), (Wrapped, 3, False), (torch.nn.Linear, 3, False), (torch.nn.Linear, 2, True),
    ):  # fmt: skip
        torch.manual_seed(1)
        head = kind(6, 11, bias=bias).requires_grad_(frozen != "weight")
        hidden = data.clone().requires_grad_(frozen != "hidden")
        logprobs, entropies, squares = head_stats(
            head, hidden, target, 0.8, entropy=True, entropy_gradient=True, squares=True, chunk=chunk, compiled=compiled
        )
        (logprobs * weights + entropies * weights.flip(0)).sum().backward()
        one_piece = type(logprobs.grad_fn).__name__ == "_ChunkedHeadBackward"
        assert one_piece == (kind is torch.nn.Linear and chunk < 7)
        gradients = [p.grad for p in (*head.parameters(), hidden) if p.requires_grad]
        assert all(g is not None for g in gradients)
        found.append([logprobs, entropies, squares, *gradients])
    compiling.compiled.cache_clear()
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Codes(torch.nn.Parameter):
    """A weight that is more than its numbers, as quantized ones are."""


def test_a_head_that_is_more_than_a_product_is_called_as_a_module():
    def stands(change: Any) -> bool:
        head = torch.nn.Linear(6, 11)
        called: list[int] = []
        change(head, called)
        hidden, target = torch.randn(7, 6, requires_grad=True), torch.randint(11, (7,))
        options: dict[str, Any] = {"entropy": False, "entropy_gradient": False, "squares": False}
        logprobs, _, _ = head_stats(head, hidden, target, 1.0, chunk=3, **options)
        logprobs.sum().backward()
        return bool(called) or type(logprobs.grad_fn).__name__ != "_ChunkedHeadBackward"

    def forward(head: Any, called: list[Any]) -> None:
        own = head.forward

        def replaced(hidden: Any) -> Any:
            called.append(1)
            return own(hidden)

        head.forward = replaced

    def weight(head: Any, called: list[Any]) -> None:
        head.weight = Codes(head.weight.detach())

    assert not stands(lambda head, called: None), "nothing is tested"
    assert stands(lambda head, called: head.register_forward_pre_hook(lambda *_: called.append(1)))
    assert stands(lambda head, called: head.register_forward_hook(lambda *_: called.append(1)))
    assert stands(lambda head, called: head.register_full_backward_pre_hook(lambda *_: called.append(1)))
    assert stands(lambda head, called: head.register_full_backward_hook(lambda *_: called.append(1)))
    assert stands(forward)
    assert stands(weight)
    with torch.autocast("cpu", torch.bfloat16):
        assert stands(lambda head, called: None)


@pytest.mark.parametrize(("kind", "name"), [("qwen2", "padded"), ("llama", "packed and shared"), ("moe", "packed")])
def test_gradient_checkpointing_changes_nothing(kind, name):
    prompts, completions = ids(FIXED)
    batch = LAYOUTS[name].build(prompts, completions, width=WIDTH)
    expected = results(made(kind), batch)
    saving = made(kind)
    checkpoint_blocks(saving.model)
    assert not saving.model.base_model.layers[0]._gradient_checkpointing_func.keywords["preserve_rng_state"], "time"
    runs: list[int] = []
    layer = saving.model.base_model.layers[0].self_attn
    layer.register_forward_pre_hook(lambda *_: runs.append(1))
    same(results(saving, batch), expected)
    assert len(runs) == 2, "the layer was not recomputed: nothing was tested"


@pytest.mark.parametrize(
    ("share", "recomputed"), [(1.0, [2, 2, 2]), (0.5, [2, 2, 1]), (0.3, [2, 1, 1]), (0.0, [1, 1, 1])]
)
def test_a_share_of_the_blocks_is_recomputed_the_first_ones(share, recomputed):
    prompts, completions = ids(FIXED)
    batch = LAYOUTS["packed and shared"].build(prompts, completions, width=WIDTH)
    shape = TinyModel(width=32, layers=3, heads=2)
    expected = results(Policy(load_model(PolicyConfig(tiny=shape))), batch)
    saving = Policy(load_model(PolicyConfig(tiny=shape, gradient_checkpointing=share)))
    runs: list[int] = []
    for number, layer in enumerate(saving.model.base_model.layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, number=number: runs.append(number))
    same(results(saving, batch), expected)
    assert [runs.count(number) for number in range(3)] == recomputed


def test_a_share_of_blocks_that_are_not_known_is_refused(monkeypatch):
    policy = made("qwen2")
    for part in policy.model.modules():
        monkeypatch.setattr(part, "_no_split_modules", None, raising=False)
    with pytest.raises(UserError, match="all of its blocks or of none") as error:
        checkpoint_blocks(policy.model, 0.5)
    assert error.value.where == "model.policy.gradient_checkpointing"


@pytest.mark.parametrize("noise", ["input_jitter_noise", "router_jitter_noise"])
def test_a_router_that_draws_numbers_draws_them_again_in_the_backward_pass(noise):
    from transformers import PhimoeConfig, PhimoeForCausalLM

    config = PhimoeConfig(
        vocab_size=14, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, **({"router_jitter_noise": 0.0} | {noise: 0.5}),
    )  # fmt: skip
    found = []
    for saving in (False, True):
        torch.manual_seed(0)
        policy = Policy(PhimoeForCausalLM(config))
        if saving:
            checkpoint_blocks(policy.model)
        policy.train()
        torch.manual_seed(1)
        found.append(results(policy, PADDED.build(*ids(FIXED), width=WIDTH)))
    same(*found)


# ------------------------------------------------------------------------------------------------------ micro-batches


@settings(max_examples=100, deadline=None, derandomize=True, phases=[Phase.generate])
@given(RAGGED, st.integers(1, 60), st.sampled_from([None, 1, 2, 5]), st.sampled_from(sorted(LAYOUTS)))
def test_micro_batches_hold_everything_once_within_the_budget(groups, tokens, size, name):
    prompts, completions = ids(groups)
    layout = LAYOUTS[name]
    parts = cut(layout, prompts, completions, tokens=tokens, size=size)
    assert sorted(i for part in parts for i in part) == list(range(len(prompts)))
    assert parts == cut(layout, prompts, completions, tokens=tokens, size=size)
    for part in parts:
        assert size is None or len(part) <= size
        batch = layout.build([prompts[i] for i in part], [completions[i] for i in part], width=WIDTH)
        assert batch.tokens <= tokens or len(part) == 1


def test_a_group_that_fits_stays_together_and_a_larger_one_is_cut():
    prompts, completions = ids([(5, [3, 3, 3]), (5, [3, 3, 3]), (5, [6] * 6)])
    parts = cut(Layout(), prompts, completions, tokens=22, size=None)
    assert [0, 1, 2, 3, 4, 5] in parts  # 2 x (5 + 3 x 2)
    assert sorted(len(p) for p in parts) == [3, 3, 6]  # 5 + 3 x 5


def test_without_a_bound_there_is_one_micro_batch():
    prompts, completions = ids(FIXED)
    for layout in LAYOUTS.values():
        assert len(cut(layout, prompts, completions, tokens=None)) == 1


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_head_computes_what_the_formulas_say(temperature):
    """Against autograd in float64, one logit being minus infinity."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(5, 11)
    logits[2, 4] = -torch.inf
    target = torch.tensor([0, 3, 10, 2, 2])
    mine, plain = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprobs, entropies, squares = head_stats(
        torch.nn.Identity(), mine, target, temperature, entropy=True, entropy_gradient=True, squares=True, chunk=5
    )
    logq, logp = (plain / temperature).log_softmax(1), plain.log_softmax(1)
    expected = logq.gather(1, target[:, None])[:, 0]
    finite = torch.where(logp.isneginf(), 0.0, logp)
    entropy = -(logp.exp() * finite).sum(1)
    for found, right in ((logprobs, expected), (entropies, entropy), (squares, logq.exp().square().sum(1))):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-6)
    weights = torch.arange(1.0, 6.0)
    (logprobs * weights + entropies * weights.flip(0)).sum().backward()
    (expected * weights + entropy * weights.flip(0)).sum().backward()
    assert mine.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(mine.grad.double(), plain.grad.nan_to_num(0.0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_compiled_blocks_change_nothing(monkeypatch):
    """Everything but the generation of code, which takes a minute on a CPU: tracing, and the graph that is run."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    prompts, completions = ids(FIXED)
    for checkpointing in (False, True):
        expected = made("qwen2")
        policy = made("qwen2")
        if checkpointing:
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            policy.model.train()
        compiling.compile_blocks(policy.model)
        assert compiling.is_compiled(policy.model)
        for name in ("packed and shared", "padded"):
            batch = LAYOUTS[name].build(prompts, completions, width=WIDTH)
            same(results(policy, batch), results(expected, batch))
        assert [n for n, _ in policy.named_parameters()] == [n for n, _ in expected.named_parameters()]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.slow
def test_what_is_compiled_of_the_head_agrees_with_the_plain_form(monkeypatch, temperature, entropy):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    compiling.compiled.cache_clear()
    torch.manual_seed(0)
    logits = (4 * torch.randn(7, 11)).requires_grad_()
    logits.data[0, 3] = float("-inf")
    target = torch.randint(4, 11, (7,))
    found: list[Any] = []
    for compiled in (False, True):
        logits.grad = None
        logprobs, entropies, squares = head_stats(
            torch.nn.Identity(), logits, target, temperature,
            entropy=True, entropy_gradient=entropy, squares=True, chunk=7, compiled=compiled,
        )  # fmt: skip
        weights = torch.arange(1.0, 8.0)
        (logprobs * weights).sum().add((entropies * weights).sum() if entropy else 0.0).backward()
        assert logits.grad is not None
        found.append((logprobs, entropies, squares, logits.grad.clone()))
    compiling.compiled.cache_clear()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
