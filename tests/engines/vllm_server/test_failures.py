"""What VLLMServer does when the server fails, against a stand-in that fails on demand. No vLLM needed."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from lit_grpo.engines import EngineConfig, EngineError, ServerConfig, check_engine
from lit_grpo.engines.vllm import installed
from lit_grpo.engines.vllm_server import engine as vllm_server
from lit_grpo.engines.vllm_server import process as vllm_server_process
from lit_grpo.engines.vllm_server.checks import HAND_COMMAND
from lit_grpo.engines.vllm_server.client import metric
from lit_grpo.engines.vllm_server.engine import VLLMServer
from lit_grpo.engines.vllm_server.worker import EXTENSION
from lit_grpo.errors import UserError
from lit_grpo.types import Request, Sampling
from tests.engines.vllm.vllm_fixtures import stop_tokenizer
from tests.engines.vllm_server.stand_in_server import ModelConfig, StandIn, answer_ids
from tests.paths import ROOT
from tests.waiting import PATIENCE

ASKED = [Request(4, (3, 4, 5), (10, 11, 12)), Request(7, (6, 7), (20, 21, 22))]
SEEDS = {(r.index, s): seed for r in ASKED for s, seed in enumerate(r.seeds)}
SAMPLING = Sampling(max_new_tokens=5)


@pytest.fixture
def server() -> Iterator[StandIn]:
    stand_in = StandIn()
    yield stand_in
    stand_in.die()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "_FIRST_PAUSE_SECONDS", 0.01)


def engine_for(server: StandIn, max_model_len: int = 100, model: Any = None, **settings: Any) -> VLLMServer:
    chosen: dict[str, Any] = {"progress_seconds": 0.5, "wait_seconds": 5.0, "url": server.url} | settings
    model = model or ModelConfig()
    return VLLMServer(model, ServerConfig(**chosen), end_token_ids=(1,), max_model_len=max_model_len)


@pytest.fixture
def engine(server: StandIn, request: pytest.FixtureRequest) -> Iterator[VLLMServer]:
    engine = engine_for(server, on_failure=getattr(request, "param", "stop"))
    engine.sync(weights(2.0), 5)
    yield engine
    engine.close()


both = pytest.mark.parametrize("engine", ["stop", "recover"], indirect=True)
stop = pytest.mark.parametrize("engine", ["stop"], indirect=True)
recover = pytest.mark.parametrize("engine", ["recover"], indirect=True)


def weights(value: float) -> Iterator[tuple[str, torch.Tensor]]:
    yield "w", torch.full((2,), value)


def check_all(completions: list[Any], total: float = 4.0, version: int = 5) -> None:
    """Every sample once, from the right seed and the right weights."""
    assert sorted((c.request, c.sample) for c in completions) == sorted(SEEDS)
    for c in completions:
        assert list(c.token_ids) == answer_ids(SEEDS[c.request, c.sample], str(total))
        assert c.policy_version == version
        assert c.logprobs == (-0.5,) * len(c.token_ids)


@both
def test_samples_come_with_their_version(engine: VLLMServer, server: StandIn) -> None:
    check_all(list(engine.generate(ASKED, SAMPLING)))
    engine.sync(weights(3.0), 6)
    check_all(list(engine.generate(ASKED, SAMPLING)), total=6.0, version=6)
    assert len(server.asked) == 2 * len(SEEDS)
    assert engine.policy_version == 6


def test_what_a_server_samples_behind_a_stop_string_is_cut_off(server: StandIn) -> None:
    """A server without a tokenizer, started by hand, samples on."""
    settings = ServerConfig(url=server.url, progress_seconds=0.5)
    model: Any = ModelConfig()
    engine = VLLMServer(model, settings, end_token_ids=(1,), max_model_len=100, tokenizer=stop_tokenizer())
    engine.sync(weights(2.0), 5)
    longest = answer_ids(11, "4.0")
    assert len(longest) == 3
    asked, string = [Request(0, (3, 4, 5), (11,))], stop_tokenizer().decode(longest[:2])
    (completion,) = engine.generate(asked, Sampling(max_new_tokens=5, stop=(string,)))
    assert (completion.token_ids, completion.logprobs) == (tuple(longest[:2]), (-0.5, -0.5))
    assert completion.finish_reason == "stop"
    assert server.parameters["stop"] == [string]
    assert server.parameters["include_stop_str_in_output"]
    assert server.parameters["detokenize"]
    list(engine.generate(asked, SAMPLING))
    assert "stop" not in server.parameters
    assert not server.parameters["detokenize"]
    engine.close()


def test_nothing_is_sampled_before_the_first_sync(server: StandIn) -> None:
    engine = engine_for(server)
    with pytest.raises(EngineError, match="must be given weights"):
        engine.generate(ASKED, SAMPLING)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(ASKED, SAMPLING)


def test_a_generation_that_begins_after_its_weights_are_gone_is_refused(server: StandIn) -> None:
    engine = engine_for(server)
    engine.sync(weights(2.0), 5)
    asked, closed = engine.generate(ASKED, SAMPLING), engine.generate(ASKED, SAMPLING)
    with pytest.raises(EngineError):
        engine.sync(broken_off(), 6)
    with pytest.raises(EngineError, match="the sync of version 6 failed"):
        next(asked)
    engine.sync(weights(2.0), 7)
    check_all(list(engine.generate(ASKED, SAMPLING)), version=7)
    engine.close()
    with pytest.raises(EngineError, match="the engine is closed"):
        next(closed)


def broken_off() -> Iterator[tuple[str, torch.Tensor]]:
    yield "w", torch.full((2,), 3.0)
    raise EngineError("the stream broke off")


@both
def test_a_passing_failure_costs_nothing(engine: VLLMServer, server: StandIn) -> None:
    failing = {11, 20}

    async def behave(seed: int) -> None:
        if seed in failing:
            failing.discard(seed)
            raise web.HTTPServiceUnavailable

    server.behave = behave  # type: ignore[method-assign]
    check_all(list(engine.generate(ASKED, SAMPLING)))
    assert not failing
    assert len(server.loads) == 1, "the weights were there all the time"


def changed(right: Any, **entries: Any) -> Any:
    (choice,) = right["choices"]
    return right | {"choices": [choice | entries]}


def with_logprob(right: Any, value: Any) -> Any:
    (choice,) = right["choices"]
    content = [entry | {"logprob": value} for entry in choice["logprobs"]["content"]]
    return changed(right, logprobs={"content": content})


def with_id(right: Any, token: Any) -> Any:
    return changed(right, token_ids=[token], logprobs={"content": [{"token_id": token, "logprob": -0.5}]})


WRONG: dict[str, tuple[Any, str]] = {
    "no object": (lambda right: [], "cannot be read"),
    "nothing": (lambda right: None, "cannot be read"),
    "empty": (lambda right: {}, "cannot be read"),
    "two choices": (lambda right: right | {"choices": right["choices"] * 2}, "cannot be read"),
    "no ids": (lambda right: changed(right, token_ids=None), "cannot be read"),
    "no entries": (lambda right: changed(right, logprobs={"content": 7}), "cannot be read"),
    "NaN": (lambda right: with_logprob(right, float("nan")), "log-probability nan"),
    "-inf": (lambda right: with_logprob(right, float("-inf")), "log-probability -inf"),
    "null": (lambda right: with_logprob(right, None), "no numbers"),
    "text": (lambda right: with_logprob(right, "-0.5"), "no numbers"),
    "id of no token": (lambda right: with_id(right, 128), "id 128 at place 0, outside"),
    "negative id": (lambda right: with_id(right, -1), "id -1 at place 0, outside"),
    "id that is text": (lambda right: with_id(right, "5"), "outside the policy"),
    "aborted": (lambda right: changed(right, finish_reason="abort"), "with 'abort'"),
}


@stop
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_asked_for_again(engine: VLLMServer, server: StandIn, name: str) -> None:
    wrong, failing = WRONG[name][0], {11, 20}

    def answer(seed: int, right: Any) -> Any:
        if seed not in failing:
            return right
        failing.discard(seed)
        return wrong(right)

    server.answer = answer  # type: ignore[method-assign]
    check_all(list(engine.generate(ASKED, SAMPLING)))
    assert not failing


@stop
@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_goes_on_answering_wrongly_ends_the_run(engine: VLLMServer, server: StandIn, name: str) -> None:
    wrong, message = WRONG[name]
    server.answer = lambda seed, right: wrong(right) if seed == 21 else right  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=f"failed 4 times: .*{message}"):
        list(engine.generate(ASKED, SAMPLING))
    assert server.asked.count(21) == 4


@both
def test_attempts_are_bounded(engine: VLLMServer, server: StandIn) -> None:
    async def behave(seed: int) -> None:
        if seed == 21:
            raise web.HTTPInternalServerError

    server.behave = behave  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"failed 4 times: .*status 500"):
        list(engine.generate(ASKED, SAMPLING))
    assert server.asked.count(21) == 4


@both
def test_a_refusal_is_not_tried_again(engine: VLLMServer, server: StandIn) -> None:
    async def behave(seed: int) -> None:
        raise web.HTTPBadRequest(text="no such thing")

    server.behave = behave  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=r"refuses a request: .*no such thing"):
        list(engine.generate(ASKED, SAMPLING))
    assert len(server.asked) <= len(SEEDS)


def dies_after(server: StandIn, answers: int) -> threading.Event:
    """The server answers so many generations and holds back the rest until it dies; set once it holds them."""
    holding, given = threading.Event(), [0]

    async def behave(seed: int) -> None:
        given[0] += 1
        if given[0] > answers:
            if given[0] == len(SEEDS):
                holding.set()
            await asyncio.sleep(60)

    server.behave = behave  # type: ignore[method-assign]
    return holding


def kill_in_the_middle(engine: VLLMServer, server: StandIn) -> tuple[list[Any], Iterator[Any]]:
    holding = dies_after(server, 2)
    running = engine.generate(ASKED, SAMPLING)
    got = [next(running), next(running)]
    assert holding.wait(PATIENCE)
    server.die()

    async def behave(seed: int) -> None:
        return None

    server.behave = behave  # type: ignore[method-assign]
    return got, running


@stop
def test_a_dead_server_stops_the_generation(engine: VLLMServer, server: StandIn) -> None:
    got, running = kill_in_the_middle(engine, server)
    with pytest.raises(EngineError, match="failed 4 times"):
        next(running)
    assert len(got) == 2
    server.rise()
    with pytest.raises(EngineError, match="lost its weights"):
        list(engine.generate(ASKED, SAMPLING))


@recover
def test_after_the_server_is_back_only_missing_samples_are_asked_for(
    engine: VLLMServer, server: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    got, running = kill_in_the_middle(engine, server)
    before = len(server.asked)
    threading.Timer(0.5, server.rise).start()
    check_all(got + list(running))
    delivered = {SEEDS[c.request, c.sample] for c in got}
    assert sorted(server.asked[before:]) == sorted(set(SEEDS.values()) - delivered)
    assert len(server.loads) == 2, "the same weights, without the learner"
    assert "is back with the weights of version 5" in caplog.text, "a person is told"


@recover
def test_a_server_that_stays_away_ends_the_wait(engine: VLLMServer, server: StandIn) -> None:
    engine._settings.wait_seconds = 0.3
    _, running = kill_in_the_middle(engine, server)
    with pytest.raises(EngineError, match="did not come back within"):
        next(running)
    server.rise()


@recover
def test_base_weights_after_a_quiet_restart_are_never_delivered(engine: VLLMServer, server: StandIn) -> None:
    list(engine.generate(ASKED, SAMPLING))
    server.version, server.weights = "default", "base"  # between two generations
    check_all(list(engine.generate(ASKED, SAMPLING)))
    swapped: list[int] = []

    async def behave(seed: int) -> None:
        if not swapped:  # in the middle of one
            swapped.append(seed)
            server.version, server.weights = "default", "base"

    server.behave = behave  # type: ignore[method-assign]
    check_all(list(engine.generate(ASKED, SAMPLING)))
    assert swapped


@stop
def test_base_weights_after_a_quiet_restart_stop_the_run(engine: VLLMServer, server: StandIn) -> None:
    server.version, server.weights = "default", "base"
    with pytest.raises(EngineError, match=r"lost its weights.*on_failure is stop"):
        list(engine.generate(ASKED, SAMPLING))
    engine.sync(weights(1.0), 6)  # new weights are as good there as anywhere
    check_all(list(engine.generate(ASKED, SAMPLING)), total=2.0, version=6)


@both
def test_weights_of_another_run_are_not_taken_for_ones_own(engine: VLLMServer, server: StandIn) -> None:
    other = engine_for(server)
    other.sync(weights(9.0), 5)
    if engine._settings.on_failure == "stop":
        with pytest.raises(EngineError, match="lost its weights"):
            list(engine.generate(ASKED, SAMPLING))
    else:
        check_all(list(engine.generate(ASKED, SAMPLING)))
    other.close()


@both
def test_a_request_that_never_ends_is_given_up(engine: VLLMServer, server: StandIn) -> None:
    hung: list[int] = []

    async def behave(seed: int) -> None:
        if seed == 22 and not hung:
            hung.append(seed)
            await asyncio.Event().wait()

    server.behave = behave  # type: ignore[method-assign]
    check_all(list(engine.generate(ASKED, SAMPLING)))
    assert server.asked.count(22) == 2
    assert hung


@both
def test_slow_is_not_hung(engine: VLLMServer, server: StandIn) -> None:
    async def behave(seed: int) -> None:
        for _ in range(10):  # 1 s, with tokens coming
            await asyncio.sleep(0.1)
            server.tokens += 1

    server.behave = behave  # type: ignore[method-assign]
    check_all(list(engine.generate(ASKED, SAMPLING)))
    assert len(server.asked) == len(SEEDS)


def test_a_metric_is_summed_over_its_labels() -> None:
    text = """# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="of a folder"} 5.0
vllm:generation_tokens_total{engine="1",model_name="of a folder"} 7.0
vllm:generation_tokens_created{engine="0",model_name="of a folder"} 1.7e9
"""
    assert metric(text, "vllm:generation_tokens_total") == 12.0
    assert math.isnan(metric(text, "vllm:generation_tokens"))
    assert math.isnan(metric("<html>Not Found</html>", "vllm:generation_tokens_total"))


@both
def test_a_server_that_dies_before_a_sync(engine: VLLMServer, server: StandIn) -> None:
    server.die()
    if engine._settings.on_failure == "stop":
        with pytest.raises(EngineError, match=r"version 6 cannot be loaded.*failed 4 times"):
            engine.sync(weights(3.0), 6)
        assert engine.policy_version == -1
        server.rise()
    else:
        threading.Timer(0.3, server.rise).start()
    engine.sync(weights(3.0), 6)
    check_all(list(engine.generate(ASKED, SAMPLING)), total=6.0, version=6)


@both
def test_weights_that_do_not_fit_stop_sampling_until_a_good_sync(engine: VLLMServer, server: StandIn) -> None:
    server.load_error = "ValueError: no such layer"
    with pytest.raises(EngineError, match=r"version 6 cannot be loaded.*no such layer"):
        engine.sync(weights(3.0), 6)
    assert len(server.loads) == 2
    with pytest.raises(EngineError, match="must be given weights"):
        engine.generate(ASKED, SAMPLING)
    server.load_error = None

    def broken_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(3.0)
        raise RuntimeError("the gather failed")

    with pytest.raises(EngineError, match="the gather failed"):
        engine.sync(broken_off(), 6)
    engine.sync(weights(3.0), 7)
    check_all(list(engine.generate(ASKED, SAMPLING)), total=6.0, version=7)


@both
def test_a_sync_waits_for_running_samples(engine: VLLMServer) -> None:
    running = engine.generate(ASKED, SAMPLING)
    next(running)
    with pytest.raises(EngineError, match="running"):
        engine.sync(weights(3.0), 6)
    running.close()  # type: ignore[attr-defined]
    engine.sync(weights(3.0), 6)


@both
def test_a_server_that_adds_a_token_to_the_prompt_is_found_out(engine: VLLMServer, server: StandIn) -> None:
    server.added_tokens = 1
    with pytest.raises(EngineError, match="adds or drops tokens"):
        list(engine.generate(ASKED, SAMPLING))


def test_what_a_server_lacks_is_named(server: StandIn) -> None:
    def told(words: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=words):
            engine_for(server, **changes).close()

    told("another model: its num_hidden_layers is 2, the policy's is 3", model=ModelConfig(num_hidden_layers=3))
    told(r"max_model_len is 192, the run needs 193(.|\n)*--max-model-len 193", max_model_len=193)
    server.facts["logprobs_mode"] = "raw_logprobs"
    told("--logprobs-mode processed_logprobs")
    server.facts["logprobs_mode"] = "processed_logprobs"
    server.facts["altering"] = ["speculative_config"]
    told("start it without --speculative-config")
    server.facts["altering"] = []
    server.facts["chunked_prefill"] = True
    told("--no-enable-chunked-prefill")
    server.facts["device"] = "cuda"
    engine_for(server).close()
    server.tells_versions = False
    told("vLLM 0.32 or newer")
    server.scale_out = False
    told("--enable-scale-out")
    server.extension = False
    told("--worker-extension-cls")
    server.dev_mode = False
    told("VLLM_SERVER_DEV_MODE=1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        told("no vLLM server answers at", url=f"http://127.0.0.1:{free.getsockname()[1]}")


class Own:
    """The stand-in as a server that the engine has started."""

    running = True

    def __init__(self, url: str) -> None:
        self.url, self.ended = url, False

    def start(self, seconds: float, ready: Any) -> None:
        assert ready()

    def log_tail(self) -> str:
        return "The end of its log: head_dim=8"

    def close(self) -> None:
        self.ended = True


@pytest.mark.parametrize("fault", ["extension", "scale_out", "max_model_len"])
def test_a_server_of_ones_own_that_fails_its_check_shows_its_log(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """And nothing about how a server is started by hand."""
    own, model = Own(server.url), ModelConfig()
    monkeypatch.setattr(ModelConfig, "save_pretrained", lambda self, path: None, raising=False)
    monkeypatch.setattr(vllm_server, "ServerProcess", lambda *args, **settings: own)
    if fault != "max_model_len":
        setattr(server, fault, False)
    with pytest.raises(UserError) as told:
        VLLMServer(model, ServerConfig(), end_token_ids=(1,), max_model_len=193 if fault == "max_model_len" else 9)
    words = {
        "extension": "status 500: no attribute",
        "scale_out": "status 403",
        "max_model_len": "is 192, the run needs",
    }
    assert words[fault] in told.value.what
    assert "head_dim=8" in told.value.what
    assert told.value.where == "data.engine"
    assert "vllm serve" not in str(told.value)
    assert own.ended


@pytest.mark.parametrize(
    ("settings", "args", "words"),
    [
        ({"url": "localhost:8000"}, {}, "no address of a server"),
        ({"url": "http://localhost:8000", "port": 8000}, {}, "server.port is for a server that is started here"),
        ({"url": "http://localhost:8000", "cards": [[1]]}, {}, "server.cards is for a server that is started here"),
        ({"url": "http://localhost:8000"}, {"seed": 1}, "args is for a server that is started here"),
        ({"retries": -1}, {}, "retries is -1"),
        ({"progress_seconds": 0.0}, {}, "progress_seconds is 0"),
        ({}, {}, "not installed"),
    ],
)
def test_wrong_settings_are_named_before_a_model_is_loaded(
    settings: Any, args: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=words):
        check_engine(EngineConfig(name="vllm_server", args=args, server=ServerConfig(**settings)))
    check_engine(EngineConfig(name="vllm_server", server=ServerConfig(url="http://localhost:8000")))


def test_a_port_in_use_is_named_before_anything_starts(
    server: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make(port: int) -> None:
        vllm_server_process.ServerProcess(tmp_path, port=port, engine_args={}, env={}, scratch=tmp_path)

    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=f"port {server.port} is in use"):
        make(server.port)
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"not installed(.|\n)*lit-grpo\[vllm\](.|\n)*server.url"):
        make(0)


def test_the_documented_command_is_the_one_that_works() -> None:
    text = (ROOT / "docs" / "rollouts.md").read_text()
    for word in HAND_COMMAND.replace("MODEL", "models/SmolLM2-135M-Instruct").split():
        assert word in text, word
    by_hand = vllm_server_process._as_options(vllm_server_process.default_engine_args())
    for flag in ("--enable-scale-out", "--skip-tokenizer-init", EXTENSION, "processed_logprobs", "--generation-config"):
        assert flag in by_hand
        assert flag in HAND_COMMAND


@recover
def test_open_generations_recover_each_for_itself(engine: VLLMServer, server: StandIn) -> None:
    got, first = kill_in_the_middle(engine, server)
    second = engine.generate(ASKED, SAMPLING)
    threading.Timer(0.3, server.rise).start()
    found: tuple[list[Any], list[Any]] = (got, [])
    for _ in range(2):  # in turn, as active sampling does
        found[1].append(next(second))
        found[0].append(next(first))
    check_all(found[0] + list(first))
    check_all(found[1] + list(second))
    engine.sync(weights(3.0), 6)


def test_files_go_with_an_engine_that_nobody_closed(server: StandIn) -> None:
    engine = engine_for(server)
    engine.sync(weights(1.0), 0)
    scratch = engine._scratch
    assert scratch.exists()
    del engine
    gc.collect()
    assert not scratch.exists()
