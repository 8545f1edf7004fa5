"""The transformers engine: what it returns is what the model's own forward says of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lit_grpo.engines import RolloutEngine
from lit_grpo.engines.base import EngineError
from lit_grpo.engines.transformers.engine import TransformersEngine, draw
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.policy.model.load import load_model
from lit_grpo.types import Request, Sampling

END = 2


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = load_model(PolicyConfig(tiny=TinyModel(width=32, layers=2, heads=2)))
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    return model


REQUESTS = [
    Request(0, (3, 4, 5), (11, 12, 13)),
    Request(1, (6,), (21, 22, 23)),
    Request(2, (7, 8, 9, 10, 3), (31, 32, 33)),
]


def run(model, requests=REQUESTS, batch_size=64, **sampling):
    engine = TransformersEngine(model, [END], batch_size, tokenizer=char_tokenizer())
    engine.sync([], 5)
    out = list(engine.generate(requests, Sampling(**sampling)))
    return {(c.request, c.sample): c for c in out}


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3, 0.0])
def test_logprobs_are_those_of_a_plain_forward_pass(model, temperature):
    out = run(model, temperature=temperature, max_new_tokens=12)
    assert set(out) == {(r.index, s) for r in REQUESTS for s in range(3)}
    for (i, _), c in out.items():
        ids = torch.tensor([[*REQUESTS[i].token_ids, *c.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(REQUESTS[i].token_ids) - 1 : -1]
        logp = (logits / (temperature or 1.0)).log_softmax(1)
        expected = logp.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, rtol=1e-5, atol=1e-5)
        if temperature == 0.0:
            assert logits.argmax(1).tolist() == list(c.token_ids)


def test_end_token_is_kept_once_and_the_length_limit_is_marked(model):
    out = run(model, max_new_tokens=6)
    reasons = {c.finish_reason for c in out.values()}
    assert reasons == {"stop", "length"}, "the seeds above must show both"
    for c in out.values():
        assert c.policy_version == 5
        assert c.token_ids.count(END) == (c.finish_reason == "stop")
        assert (c.token_ids[-1] == END) == (c.finish_reason == "stop")
        assert len(c.token_ids) <= 6
        assert c.truncated == (len(c.token_ids) == 6 and END not in c.token_ids)


def test_a_completion_depends_on_its_seed_alone(model):
    together = run(model, max_new_tokens=10)
    small = run(model, max_new_tokens=10, batch_size=2)
    alone = run(model, [Request(0, REQUESTS[2].token_ids, (32,))], max_new_tokens=10)
    assert {k: c.token_ids for k, c in together.items()} == {k: c.token_ids for k, c in small.items()}
    assert alone[(0, 0)].token_ids == together[(2, 1)].token_ids
    other = run(model, [Request(0, REQUESTS[2].token_ids, (99,))], max_new_tokens=10)
    assert other[(0, 0)].token_ids != together[(2, 1)].token_ids


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(model, temperature):
    tokenizer = char_tokenizer()
    free = run(model, temperature=temperature, max_new_tokens=12)
    # One character a token; what is written in angle brackets stands in no string here.
    texts = {key: "".join(tokenizer.decode([i])[0] for i in c.token_ids) for key, c in free.items()}
    longest = max((text for text in texts.values() if "<" not in text), key=len)
    stop = (longest[3:5], longest[7:9])
    out = run(model, temperature=temperature, max_new_tokens=12, stop=stop)
    ended = 0
    for key, c in free.items():
        end = min((texts[key].find(s) + 2 for s in stop if s in texts[key]), default=None)
        expected = (c.token_ids[:end], c.finish_reason if end is None else "stop")
        assert (out[key].token_ids, out[key].finish_reason) == expected
        assert out[key].logprobs == pytest.approx(c.logprobs[:end], abs=1e-5)
        ended += end is not None
    assert ended
    # At the length limit, too, it is a stop.
    (key,) = [k for k, text in texts.items() if text == longest][:1]
    assert run(model, temperature=temperature, max_new_tokens=5, stop=stop[:1])[key].finish_reason == "stop"
    with pytest.raises(EngineError, match="needs the policy's tokenizer"):
        list(TransformersEngine(model, [END]).generate(REQUESTS, Sampling(stop=("1",))))


def test_it_is_a_rollout_engine(model):
    engine = TransformersEngine(model, [END])
    assert isinstance(engine, RolloutEngine)
    assert engine.policy_version == -1
    with pytest.raises(ValueError, match="batch_size"):
        TransformersEngine(model, [END], 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=12),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([1.0, 0.6]),
)
@example([-4.84e-9, 0.0, 1.0], 0.0, 0.5, 2, 1.0)
def test_draw_inverts_the_distribution_function(logits, uniform, temperature, top_k, top_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    tensor = torch.tensor([logits])
    ids, logprobs = draw(tensor, torch.tensor([uniform], dtype=torch.float64), sampling)
    probs = torch.softmax(tensor[0].double() / temperature, 0)
    order = probs.argsort(descending=True, stable=True)
    kept, mass = [], 0.0
    for rank, i in enumerate(order.tolist()):
        if (top_k and rank >= top_k) or mass >= top_p - 1e-9:
            break
        kept.append(i)
        mass += float(probs[i])
    # Of ids that float32 cannot tell apart either may be kept.
    seen = (tensor / temperature).log_softmax(1)[0].tolist()
    assert int(ids) in kept or abs(mass - top_p) < 1e-5 or len(set(seen)) < len(seen)
    if top_k == 0 and top_p == 1.0:
        below = float(probs[: int(ids)].sum())
        assert below - 1e-5 <= uniform <= below + float(probs[int(ids)]) + 1e-5
        assert float(logprobs) == pytest.approx(float(probs[int(ids)].log()), abs=1e-4)


def test_an_id_of_probability_zero_is_never_drawn():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")]]).repeat(3, 1)
    ids, logprobs = draw(logits, torch.tensor([0.0, 0.5, 1.0 - 2**-53], dtype=torch.float64), Sampling())
    assert set(ids.tolist()) <= {1, 3}
    assert torch.isfinite(logprobs).all()


def test_sampled_frequencies_match_the_probabilities(model):
    seeds = tuple(range(4000))
    out = run(model, [Request(0, (3, 4), seeds)], max_new_tokens=1, batch_size=4000)
    with torch.no_grad():
        probs = model(input_ids=torch.tensor([[3, 4]]), use_cache=False).logits[0, -1].softmax(0)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in out.values()]), minlength=len(probs))
    chi2 = float(((counts - 4000 * probs) ** 2 / (4000 * probs)).sum())
    assert chi2 < 40  # 99.9 % point of chi-square with 13 degrees of freedom is 34.5


def sampled(model, share, requests, **sampling):
    engine = TransformersEngine(model, [END])
    engine.shares_prompts = share
    engine.sync([], 0)
    return {(c.request, c.sample): c for c in engine.generate(requests, Sampling(**sampling))}


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_a_shared_cache_samples_what_copies_sample(heads):
    """Prompts of unequal lengths, completions that end early, more tokens than there is room for at first."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=512,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    draws = torch.Generator().manual_seed(0)
    requests = [
        Request(
            i,
            tuple(torch.randint(3, 40, (length,), generator=draws).tolist()),
            tuple(range(100 * i, 100 * i + samples)),
        )
        for i, (length, samples) in enumerate([(7, 5), (3, 1), (12, 4), (7, 2)])
    ]
    shared = sampled(model, True, requests, max_new_tokens=150)
    copies = sampled(model, False, requests, max_new_tokens=150)
    lengths = {len(c.token_ids) for c in copies.values()}
    assert len(lengths) > 4, "the case above must be mixed"
    assert max(lengths) > 64, "the case above must grow the room"
    assert {k: c.token_ids for k, c in shared.items()} == {k: c.token_ids for k, c in copies.items()}
    for key, completion in copies.items():
        torch.testing.assert_close(
            torch.tensor(shared[key].logprobs), torch.tensor(completion.logprobs), rtol=1e-5, atol=1e-5
        )
    assert model.config._attn_implementation == "sdpa", "the learner's attention is as before"
    engine = TransformersEngine(model, [END])
    list(engine.generate(requests, Sampling(max_new_tokens=1)))
    assert engine.shares_prompts


def test_a_model_with_a_sliding_window_gets_a_cache_row_for_every_sample():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=4,
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    out = run(model, max_new_tokens=8)
    for (i, _), c in out.items():
        ids = torch.tensor([[*REQUESTS[i].token_ids, *c.token_ids]])
        with torch.no_grad():
            logp = model(input_ids=ids, use_cache=False).logits[0, len(REQUESTS[i].token_ids) - 1 : -1].log_softmax(1)
        expected = logp.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, rtol=1e-5, atol=1e-5)


def test_a_model_that_decodes_otherwise_is_noticed(model, monkeypatch):
    from lit_grpo.engines.transformers import kv_cache as group_cache

    engine = TransformersEngine(model, [END])
    attend = group_cache.GroupCache.attend
    monkeypatch.setattr(group_cache.GroupCache, "attend", lambda self, *a, **k: 1.1 * attend(self, *a, **k))
    list(engine.generate(REQUESTS, Sampling(max_new_tokens=1)))
    assert engine.shares_prompts is False
