"""A real vLLM server: what it samples is what was asked for, with the weights of the last sync, kill or no kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lit_grpo.engines import EngineError, ServerConfig
from lit_grpo.engines.base import RolloutEngine
from lit_grpo.engines.vllm_server.engine import VLLMServer
from lit_grpo.errors import UserError
from lit_grpo.types import Request, Sampling
from tests.engines.vllm.vllm_fixtures import (
    DTYPE,
    EOS,
    GAP,
    MAX_MODEL_LEN,
    ON_GPU,
    VOCABULARY,
    WRONG_WEIGHTS,
    check_stop_strings,
    greedy,
    largest_gap,
    make_model,
    requests,
    sampled,
    start_engine,
    stop_tokenizer,
)

pytestmark = pytest.mark.vllm
LONG = Sampling(temperature=2.0, max_new_tokens=100)


def weights(model: Any, without: str = "\0") -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in model.named_parameters() if not name.endswith(without))


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return [make_model(tied=True, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def engine(models: list[Any]) -> Iterator[VLLMServer]:
    engine = VLLMServer(
        models[0].config,
        ServerConfig(on_failure="recover"),
        end_token_ids=(EOS,),
        max_model_len=MAX_MODEL_LEN,
        dtype=DTYPE,
        max_num_seqs=64,
        gpu_memory_utilization=0.2,
        tokenizer=stop_tokenizer(),
    )
    yield engine
    engine.close()


def server_pids(engine: VLLMServer) -> list[int]:
    """The server and what it started, without its supervisor."""
    assert engine._process is not None
    group = engine._process._process.pid
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != group:
            try:
                if os.getpgid(int(path.name)) == group:
                    found.append(int(path.name))
            except ProcessLookupError:
                continue
    return sorted(found)


def test_greedy_after_sync_equals_a_fresh_engine(engine: VLLMServer, models: list[Any], tmp_path: Path) -> None:
    assert isinstance(engine, RolloutEngine)
    assert engine.policy_version == -1
    with pytest.raises(EngineError, match="must be given weights"):
        engine.generate(requests(1), Sampling())
    fresh = []
    for seed, model in enumerate(models):
        other = start_engine(tmp_path / str(seed), model)
        fresh.append(greedy(other))
        other.close()
    assert fresh[0] != fresh[1]
    for version, seed in enumerate([0, 1, 0]):
        engine.sync(weights(models[seed]), version)
        assert engine.policy_version == version
        assert greedy(engine) == fresh[seed]
        assert greedy(engine) == fresh[seed], "with the prompts' blocks cached"


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_are_the_learners_at_the_sampling_temperature(
    engine: VLLMServer, models: list[Any], temperature: float
) -> None:
    engine.sync(weights(models[1]), 4)
    asked = requests(4)
    completions = sampled(engine, asked, Sampling(temperature=temperature, max_new_tokens=24))
    assert {c.policy_version for c in completions} == {4}
    assert largest_gap(models[1], asked, completions, temperature) < GAP
    assert largest_gap(models[0], asked, completions, temperature) > WRONG_WEIGHTS
    assert largest_gap(models[1], asked, completions, temperature * (1.2 if ON_GPU else 1.001)) > GAP


def test_equal_seeds_give_equal_completions_and_others_differ(engine: VLLMServer, models: list[Any]) -> None:
    engine.sync(weights(models[0]), 5)
    sampling = Sampling(temperature=1.3, max_new_tokens=24)
    first = [c.token_ids for c in sampled(engine, requests(6), sampling)]
    assert [c.token_ids for c in sampled(engine, requests(6), sampling)] == first
    other = [c.token_ids for c in sampled(engine, requests(6, first_seed=500), sampling)]
    assert all(a != b for a, b in zip(first, other, strict=True))
    assert len(set(first)) == len(first)
    largest = sampled(engine, [Request(3, (5, 6, 7), (2**63 - 1, 2**63 - 2))], sampling)
    assert largest[0].token_ids != largest[1].token_ids


def test_an_end_token_is_kept_once_and_last(engine: VLLMServer) -> None:
    sampling = Sampling(temperature=2.0, max_new_tokens=24, stop_token_ids=(77,))
    completions = sampled(engine, requests(32), sampling)
    assert {c.finish_reason for c in completions} == {"stop", "length"}, "the test needs both endings"
    assert {c.token_ids[-1] for c in completions if not c.truncated} == {EOS, 77}
    for c in completions:
        assert len(c.token_ids) == len(c.logprobs)
        assert not {EOS, 77} & set(c.token_ids[:-1])
        assert c.truncated == (c.token_ids[-1] not in (EOS, 77))


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(
    engine: VLLMServer, models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.sync(weights(models[0]), 7)
    check_stop_strings(engine)
    # The server has ended them itself: what is cut off here is not sampled at all.
    cut_off = []
    inner = engine._completion

    def seen(request: Any, sample: int, answer: Any, stops: Any) -> Any:
        completion = inner(request, sample, answer, stops)
        cut_off.append(len(answer["choices"][0]["token_ids"]) - len(completion.token_ids))
        return completion

    monkeypatch.setattr(engine, "_completion", seen)
    check_stop_strings(engine)
    assert cut_off
    assert not any(cut_off)


def test_more_prompt_tokens_than_fit_into_a_step(engine: VLLMServer, models: list[Any]) -> None:
    # Splitting a prompt over two steps kills vLLM's CPU engine where requests have seeds.
    if engine.policy_version < 0:
        engine.sync(weights(models[0]), 6)
    prompts = [tuple((i * 31 + j * j) % 125 + 3 for j in range(170)) for i in range(60)]
    completions = sampled(engine, requests(1, prompts=prompts), Sampling(max_new_tokens=4))
    assert len(completions) == 60


def test_completions_come_as_they_finish(engine: VLLMServer) -> None:
    lengths = [len(c.token_ids) for c in engine.generate(requests(8), LONG)]
    # Not quite sorted: requests reach the server one after the other.
    assert sum(lengths[:8]) < sum(lengths[-8:])


id_sequences = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=100).map(tuple)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(prompts=st.lists(id_sequences, min_size=1, max_size=6), seed=st.integers(0, 2**63 - 1))
def test_ids_go_in_and_come_out_unchanged(
    engine: VLLMServer, models: list[Any], prompts: list[tuple[int, ...]], seed: int
) -> None:
    if engine.policy_version != 9:
        engine.sync(weights(models[0]), 9)
    seen: list[tuple[int, ...]] = []
    generate, complete = engine._http.generate, engine._completion

    def echoing(bodies: Any) -> Any:
        return generate({key: body | {"return_token_ids": True} for key, body in bodies.items()})

    def recording(request: Request, sample: int, answer: Any, stops: Any) -> Any:
        assert tuple(answer["prompt_token_ids"]) == request.token_ids
        seen.append(tuple(answer["choices"][0]["token_ids"]))
        return complete(request, sample, answer, stops)

    asked = [Request(i, prompt, (seed, seed ^ 1)) for i, prompt in enumerate(prompts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._http, "generate", echoing)
        patch.setattr(engine, "_completion", recording)
        completions = sampled(engine, asked, Sampling(temperature=1.0, max_new_tokens=6))
    assert sorted(seen) == sorted(c.token_ids for c in completions)
    # The server could echo ids and still compute with others: the log-probabilities say that it did not.
    assert largest_gap(models[0], asked, completions, 1.0) < 2 * GAP


def test_weights_that_do_not_fit_stop_sampling_until_a_good_sync(engine: VLLMServer, models: list[Any]) -> None:
    with pytest.raises(EngineError, match=r"version 1 cannot be loaded.*lack .*layers.0.self_attn.k_proj.weight"):
        engine.sync(weights(models[1], "layers.0.self_attn.k_proj.weight"), 1)
    assert engine.policy_version == -1
    with pytest.raises(EngineError, match="must be given weights"):
        engine.generate(requests(1), Sampling())
    engine.sync(weights(models[0]), 2)
    asked = requests(2)
    assert largest_gap(models[0], asked, sampled(engine, asked, Sampling(max_new_tokens=16)), 1.0) < GAP


def test_an_abandoned_generation_leaves_nothing_behind(engine: VLLMServer, models: list[Any]) -> None:
    running = engine.generate(requests(16), LONG)
    next(running)
    with pytest.raises(EngineError, match="running"):
        engine.sync(weights(models[1]), 3)
    running.close()  # type: ignore[attr-defined]
    engine.sync(weights(models[1]), 3)  # empties the prefix cache, which running samples would prevent
    asked = requests(2)
    assert largest_gap(models[1], asked, sampled(engine, asked, Sampling(max_new_tokens=16)), 1.0) < GAP


def test_a_server_of_another_model_is_refused(engine: VLLMServer, models: list[Any]) -> None:
    assert engine._process is not None
    url = ServerConfig(url=engine._process.url)
    with pytest.raises(UserError, match="the run needs 4000"):
        VLLMServer(models[0].config, url, end_token_ids=(EOS,), max_model_len=4000)
    larger = make_model(tied=True, seed=0).config
    larger.num_hidden_layers = 3
    with pytest.raises(UserError, match="another model"):
        VLLMServer(larger, url, end_token_ids=(EOS,), max_model_len=64)


def test_a_running_server_takes_weights_and_samples(engine: VLLMServer, models: list[Any]) -> None:
    assert engine._process is not None
    settings = ServerConfig(url=engine._process.url)
    guest = VLLMServer(models[0].config, settings, end_token_ids=(EOS,), max_model_len=MAX_MODEL_LEN)
    guest.sync(weights(models[0]), 0)
    asked = requests(2)
    assert largest_gap(models[0], asked, sampled(guest, asked, Sampling(max_new_tokens=16)), 1.0) < GAP
    guest.close()
    assert engine._reachable(), "a server that was not started here goes on"
    # The owner sees that these are not its weights, and loads its own again.
    completions = sampled(engine, asked, Sampling(max_new_tokens=16))
    assert largest_gap(models[1], asked, completions, 1.0) < GAP


@pytest.mark.parametrize("victim", ["server", "engine process"])
def test_a_server_killed_in_the_middle_comes_back(engine: VLLMServer, models: list[Any], victim: str) -> None:
    engine.sync(weights(models[1]), 20)
    asked = requests(16)
    undisturbed = sampled(engine, asked, LONG)
    running = engine.generate(asked, LONG)
    got = [next(running) for _ in range(3)]
    before = server_pids(engine)
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in before}
    os.kill(before[0] if victim == "server" else next(p for p in before if "EngineCore" in titles[p]), signal.SIGKILL)
    got += list(running)
    assert len({(c.request, c.sample) for c in got}) == len(got) == 64, "nothing lost, nothing twice"
    assert {c.policy_version for c in got} == {20}
    assert largest_gap(models[1], asked, got, 2.0) < GAP
    again = sorted(got, key=lambda c: (c.request, c.sample))
    assert [c.token_ids for c in again] == [c.token_ids for c in undisturbed]
    assert not set(before) & set(server_pids(engine))


def test_a_killed_server_stops_the_run_if_so_configured(engine: VLLMServer, models: list[Any]) -> None:
    engine.sync(weights(models[1]), 30)
    engine._settings.on_failure = "stop"
    try:
        # Far more than the server samples at once: when the first is there, others have not begun.
        running = engine.generate(requests(256), LONG)
        next(running)
        os.kill(server_pids(engine)[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="on_failure is stop"):
            list(running)
    finally:
        engine._settings.on_failure = "recover"
    engine.close()
    assert not engine._scratch.exists()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(requests(1), Sampling())


def test_a_server_that_does_not_start_says_why(models: list[Any]) -> None:
    with pytest.raises(UserError, match=r"no vLLM server can be started(.|\n)*enforce-eagr"):
        VLLMServer(
            models[0].config,
            ServerConfig(),
            end_token_ids=(EOS,),
            max_model_len=64,
            engine_args={"enforce_eagr": True},
        )
