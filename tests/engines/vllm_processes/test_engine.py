"""Two engine processes are one engine: the same tokens, the same weights, and no sample lost when one of them dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lit_grpo.engines.base import EngineError, RolloutEngine, SleepingEngine
from lit_grpo.engines.vllm_processes import engine as module
from lit_grpo.engines.vllm_server.weights import write_weights
from lit_grpo.errors import UserError
from lit_grpo.types import Completion, Request, Sampling
from tests.engines.vllm.vllm_fixtures import (
    GAP,
    MAX_MODEL_LEN,
    ON_GPU,
    PROMPTS,
    VOCABULARY,
    WRONG_WEIGHTS,
    check_stop_strings,
    largest_gap,
    make_model,
    requests,
    sampled,
    start_engine,
    stop_tokenizer,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.vllm
SAMPLING = Sampling(temperature=1.0, max_new_tokens=60)
SILENCE = 10.0
"""Seconds after which a process that does nothing hangs."""


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return [make_model(tied=True, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def pair_of_processes(tmp_path_factory: Any, models: Any) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("pair")
    pair = start_engine(
        folder, models[0], 2, policy_tokenizer=stop_tokenizer(), max_num_seqs=16, progress_seconds=SILENCE
    )
    yield pair
    pair.close()


@pytest.fixture
def pair(pair_of_processes: Any, models: Any) -> Any:
    """The two processes with the weights of the first model as version 0."""
    pair_of_processes.sync(models[0].named_parameters(), 0)
    return pair_of_processes


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Any, models: Any) -> Iterator[Any]:
    """An engine in this process."""
    engine = start_engine(tmp_path_factory.mktemp("alone"), models[0], max_num_seqs=16)
    engine.sync(models[0].named_parameters(), 0)
    yield engine
    engine.close()


def pids(pair: Any) -> list[int]:
    """The process of each engine, below its supervisor."""
    supervisors = [process._process.pid for process in pair._group._processes]
    return [int(Path(f"/proc/{pid}/task/{pid}/children").read_text()) for pid in supervisors]


def same(found: list[Completion], expected: list[Completion]) -> bool:
    # bfloat16 in batches of other sizes may draw other tokens.
    return ON_GPU or [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_it_is_an_engine(pair: Any) -> None:
    assert pair.processes == 2
    assert len(set(pids(pair))) == 2
    assert isinstance(pair, RolloutEngine)
    assert isinstance(pair, SleepingEngine)


def test_tokens_do_not_depend_on_the_number_of_processes(pair: Any, alone: Any, models: Any) -> None:
    """Neither with all at once, nor where groups wait for room, which is what 16 samples at once mean here."""
    for asked in (requests(4), requests(24), [Request(5, PROMPTS[0], tuple(range(50)))]):
        found = sampled(pair, asked, SAMPLING)
        expected = sampled(alone, asked, SAMPLING)
        assert same(found, expected)
        pairs = [ab for x, y in zip(found, expected, strict=True) for ab in zip(x.logprobs, y.logprobs, strict=True)]
        gap = max(abs(a - b) for a, b in pairs)
        assert gap < GAP
        assert largest_gap(models[0], asked, found, 1.0) < GAP
        assert {c.policy_version for c in found} == {0}


def test_both_processes_work_and_groups_stay_together(pair: Any) -> None:
    given: list[dict[int, int]] = [{}, {}]
    real = pair._shares.hand_out

    def noting() -> Any:
        news = real()
        for i, shares in news.items():
            for _, share in shares:
                given[i][share.request.index] = len(share.samples)
        return news

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair._shares, "hand_out", noting)
        sampled(pair, requests(4), SAMPLING)
    assert not given[0].keys() & given[1].keys()
    assert [sum(one.values()) for one in given] == [8, 8]


def test_the_check_of_the_first_sync_asks_every_process(pair: Any, models: Any) -> None:
    """One process with other weights than the rest must be found by 4 prompts of 4 samples."""
    pair.sync(models[1].named_parameters(), 1)
    write_weights(pair._group._files.folders[0], models[2].named_parameters(), None)
    pair._group._load_files([1], 1)
    asked = requests(4)
    found = sampled(pair, asked, Sampling(max_new_tokens=8))
    assert largest_gap(models[1], asked, found, 1.0) > WRONG_WEIGHTS
    gaps = [largest_gap(models[1], [r], [c for c in found if c.request == r.index], 1.0) for r in asked]
    assert sum(gap < GAP for gap in gaps) == 2


def test_completions_come_as_they_finish_and_generations_share_the_processes(pair: Any, models: Any) -> None:
    asked = requests(2), requests(3, first_seed=40)
    open_ones = [pair.generate(a, Sampling(max_new_tokens=24)) for a in asked]
    found: list[list[Any]] = [[next(open_ones[0])], [next(open_ones[1])]]
    for result, generation in zip(found, open_ones, strict=True):
        result.extend(generation)
    for result, a in zip(found, asked, strict=True):
        assert len({(c.request, c.sample) for c in result}) == len(result) == sum(len(r.seeds) for r in a)
        assert largest_gap(models[0], a, result, 1.0) < GAP


def test_an_abandoned_generation_leaves_nothing_behind(pair: Any, models: Any) -> None:
    expected = sampled(pair, requests(4), SAMPLING)
    abandoned = pair.generate(requests(16, first_seed=9), Sampling(temperature=2.0, max_new_tokens=100))
    next(abandoned)
    with pytest.raises(EngineError, match="running"):
        pair.sync(models[1].named_parameters(), 1)
    with pytest.raises(EngineError, match="running"):
        pair.sleep(1)
    assert pair.policy_version == 0
    abandoned.close()
    pair.generate(requests(4), SAMPLING)  # never started
    assert not any(pair._shares.given)
    pair.sync(models[0].named_parameters(), 0)
    assert sampled(pair, requests(4), SAMPLING) == expected


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(pair: Any) -> None:
    check_stop_strings(pair)


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ((), Sampling(max_new_tokens=8), "prompt 5 is empty"),
        (tuple([3] * 100), Sampling(max_new_tokens=100), f"max_model_len {MAX_MODEL_LEN}"),
        ((3, VOCABULARY), Sampling(max_new_tokens=8), "vocabulary of 128"),
        ((3,), Sampling(max_new_tokens=8, temperature=0.005), "temperature 0.005"),
    ],
)
def test_bad_requests_are_refused_at_the_call(pair: Any, prompt: Any, sampling: Sampling, words: str) -> None:
    with pytest.raises(UserError, match=words):
        pair.generate([Request(0, PROMPTS[0], (1,)), Request(5, prompt, (1,))], sampling)
    assert not pair._inboxes


# -------------------------------------------------------------------------------------------------- weights


def lacking(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((n, p) for n, p in model.named_parameters() if not n.endswith("layers.0.mlp.down_proj.weight"))


def broken_off(model: Any) -> Iterator[tuple[str, Tensor]]:
    for i, item in enumerate(model.named_parameters()):
        if i == 12:
            raise RuntimeError("the gather failed")
        yield item


@pytest.fixture(params=["files", "blocks"])
def either_way(request: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The pair, which is handed weights as on CPU, and block by block as on a card."""
    monkeypatch.setattr(pair._group, "_weight_files", request.param == "files")
    monkeypatch.setattr("lit_grpo.engines.vllm_processes.blocks.BLOCK_BYTES", 1000)
    return pair


def test_both_processes_follow_a_sync(either_way: Any, models: Any) -> None:
    for version, seed in enumerate([1, 2, 1], 5):
        either_way.sync(models[seed].named_parameters(), version)
        assert either_way.policy_version == version
        asked = requests(4)
        found = sampled(either_way, asked, Sampling(max_new_tokens=16))
        assert {c.policy_version for c in found} == {version}
        assert largest_gap(models[seed], asked, found, 1.0) < GAP


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (lacking, "version 1 cannot be loaded.* lack model.layers.0.mlp.down_proj.weight"),
        (broken_off, "the learner could not give the weights of version 1: the gather failed"),
    ],
    ids=["one is missing", "broken off"],
)
def test_weights_that_do_not_fit_stop_sampling_until_a_good_sync(
    either_way: Any, models: Any, stream: Any, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        either_way.sync(stream(models[1]), 1)
    assert either_way.policy_version == -1
    with pytest.raises(EngineError, match="must be given weights"):
        either_way.generate(requests(1), Sampling())
    either_way.sync(models[2].named_parameters(), 2)
    asked = requests(4)
    assert largest_gap(models[2], asked, sampled(either_way, asked, Sampling(max_new_tokens=16)), 1.0) < GAP


def test_a_version_counts_in_all_processes_or_in_none(pair: Any, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process takes the new weights, and the other cannot read them."""
    real = pair._group._processes[1].send
    monkeypatch.setattr(pair._group._processes[1], "send", lambda message: real((*message[:2], ["/nowhere"])))
    with pytest.raises(EngineError, match="no weights in /nowhere"):
        pair.sync(models[1].named_parameters(), 1)
    monkeypatch.undo()
    assert pair.policy_version == -1
    with pytest.raises(EngineError, match="must be given weights"):
        pair.generate(requests(1), Sampling())
    pair.sync(models[1].named_parameters(), 1)
    asked = requests(4)
    assert largest_gap(models[1], asked, sampled(pair, asked, Sampling(max_new_tokens=16)), 1.0) < GAP


@pytest.mark.skipif(ON_GPU, reason="there is no sleep mode on CPU")
def test_sleep_does_nothing_on_a_cpu(pair: Any) -> None:
    pair.sleep(2)
    assert pair.policy_version == 0
    assert len(sampled(pair, requests(2), SAMPLING)) == 8
    with pytest.raises(UserError, match="sleep level 3"):
        pair.sleep(3)


# -------------------------------------------------------------------------------------------------- failures


def test_a_process_that_dies_is_back_with_the_weights_and_nothing_is_lost(pair: Any, models: Any) -> None:
    pair.sync(models[1].named_parameters(), 3)
    asked = requests(24)
    expected = sampled(pair, asked, SAMPLING)
    before = pids(pair)
    found = []
    for number, completion in enumerate(pair.generate(asked, SAMPLING)):
        found.append(completion)
        if number == 5:
            os.kill(before[1], signal.SIGKILL)
    found.sort(key=lambda c: (c.request, c.sample))
    assert [(c.request, c.sample) for c in found] == [(c.request, c.sample) for c in expected]
    assert same(found, expected)
    assert {c.policy_version for c in found} == {3}
    assert largest_gap(models[1], asked, found, 1.0) < GAP
    after = pids(pair)
    assert after[0] == before[0]
    assert after[1] != before[1]
    wait_until(lambda: not Path(f"/proc/{before[1]}").exists(), "the dead process is buried")
    # And so is one that dies while nothing is asked of it, or during a sync.
    os.kill(after[0], signal.SIGKILL)
    pair.sync(models[2].named_parameters(), 4)
    found = sampled(pair, asked, SAMPLING)
    assert {c.policy_version for c in found} == {4}
    assert largest_gap(models[2], asked, found, 1.0) < GAP


def test_a_process_that_hangs_is_killed_and_nothing_is_lost(pair: Any, models: Any, caplog: Any) -> None:
    """It is stopped while it samples, and then while weights come."""
    asked = requests(24)
    expected = sampled(pair, asked, SAMPLING)
    before = pids(pair)
    found = []
    began = time.monotonic()
    for number, completion in enumerate(pair.generate(asked, SAMPLING)):
        found.append(completion)
        if number == 5:
            os.kill(before[1], signal.SIGSTOP)
    assert time.monotonic() - began > SILENCE
    assert same(sorted(found, key=lambda c: (c.request, c.sample)), expected)
    after = pids(pair)
    assert after[0] == before[0]
    assert after[1] != before[1]
    wait_until(lambda: not Path(f"/proc/{before[1]}").exists(), "the hung process is buried")
    assert "neither taken a step nor answered for 10 s (data.engine.progress_seconds)" in caplog.text
    os.kill(after[0], signal.SIGSTOP)
    pair.sync(models[2].named_parameters(), 4)
    assert pids(pair)[0] != after[0]
    found = sampled(pair, asked, SAMPLING)
    assert {c.policy_version for c in found} == {4}
    assert largest_gap(models[2], asked, found, 1.0) < GAP


def test_one_that_dies_without_files_gets_the_policys_weights(pair: Any, models: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pair._group, "_weight_files", False)
    monkeypatch.setattr(pair._group, "_current_weights", models[1].named_parameters)
    pair.sync(models[1].named_parameters(), 3)
    running = pair.generate(requests(24), SAMPLING)
    first = next(running)
    os.kill(pids(pair)[0], signal.SIGKILL)
    found = [first, *running]
    assert len(found) == 96
    assert largest_gap(models[1], requests(24), found, 1.0) < GAP
    if ON_GPU:
        return
    # Where the policy has moved on, another process would have to give them, which cannot where weights are packed.
    monkeypatch.setattr(pair._group, "_current_weights", None)
    running = pair.generate(requests(24), SAMPLING)
    next(running)
    os.kill(pids(pair)[0], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"version 3 cannot be loaded(.|\n)*packs its weights"):
        list(running)


def test_processes_that_die_again_and_again_end_the_run(pair: Any, models: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_grpo.engines.vllm_processes.group.RESTARTS", 0)
        running = pair.generate(requests(4), SAMPLING)
        os.kill(pids(pair)[0], signal.SIGKILL)
        with pytest.raises(EngineError, match=r"died or hung 1 times(.|\n)*log of the engine processes \(.*\.log\)"):
            list(running)
        with pytest.raises(EngineError, match="died again and again"):
            pair.generate(requests(1), SAMPLING)
    pair.sync(models[0].named_parameters(), 0)
    assert len(sampled(pair, requests(2), SAMPLING)) == 8


UNPACKED = """
import sys

# Not in what vLLM itself starts.
if "lit_grpo.engines.vllm_processes.worker" in sys.orig_argv:
    import torch
    import vllm.model_executor.layers.utils
    from lit_grpo.engines.vllm import weights

    def leave_unpacked(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = leave_unpacked
    weights._on_cuda = lambda: True
"""


@pytest.mark.skipif(ON_GPU, reason="makes a CPU engine keep its weights as a card's does")
def test_one_that_dies_gets_the_weights_of_another_where_the_policy_has_moved_on(
    tmp_path: Path, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text(UNPACKED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"))
    monkeypatch.setattr("lit_grpo.engines.vllm_processes.blocks.BLOCK_BYTES", 1000)
    pair = start_engine(tmp_path, models[0], 2, load_format="dummy", weight_files=False)
    try:
        pair.sync(models[1].named_parameters(), 3)
        asked = requests(24)
        expected = sampled(pair, asked, SAMPLING)
        running = pair.generate(asked, SAMPLING)
        first = next(running)
        os.kill(pids(pair)[0], signal.SIGKILL)
        found = sorted([first, *running], key=lambda c: (c.request, c.sample))
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]
        assert {c.policy_version for c in found} == {3}
        assert largest_gap(models[1], asked, found, 1.0) < GAP
        # Nobody has them any longer.
        running = pair.generate(asked, SAMPLING)
        next(running)
        for pid in pids(pair):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="all processes of vLLM died, and the weights of version 3 with them"):
            list(running)
    finally:
        pair.close()


def test_a_failure_inside_vllm_is_an_engine_error_and_the_process_goes_on(pair: Any, models: Any) -> None:
    running = pair.generate(requests(4), SAMPLING)
    shares = pair._shares
    with pytest.MonkeyPatch.context() as patch:
        # Past the check of this process: a request that vLLM itself refuses.
        patch.setattr(module, "check_requests", lambda *args, **kwargs: None)
        bad = pair.generate([Request(0, (3,) * 500, (1,))], SAMPLING)
    with pytest.raises(UserError, match="500 tokens"):
        list(bad)
    assert len(list(running)) == 16
    assert not any(shares.given)


def test_a_generation_that_begins_after_its_weights_are_gone_is_refused(pair: Any, models: Any) -> None:
    """Its processes are told nothing: one was once made to build a second engine beside its first."""
    before, late = pids(pair), pair.generate(requests(4), SAMPLING)
    expected = sampled(pair, requests(4), SAMPLING)
    lacking = [(name, p) for name, p in models[1].named_parameters() if "k_proj.weight" not in name]
    with pytest.raises(EngineError, match=r"lack .*k_proj\.weight"):
        pair.sync(lacking, 1)
    with pytest.raises(EngineError, match=r"must be given weights.*the sync of version 1 failed"):
        next(late)
    pair.sync(models[0].named_parameters(), 2)
    assert same(sampled(pair, requests(4), SAMPLING), expected)
    assert pids(pair) == before


# -------------------------------------------------------------------------------------------------- overlap


@pytest.mark.skipif(ON_GPU, reason="needs only cores")
def test_generation_goes_on_while_this_process_computes(pair: Any) -> None:
    """The engine has what it asked for when this process, which held its lock all the while, looks again."""
    asked = requests(4)
    list(pair.generate(asked, SAMPLING))
    needed, waited = [], []
    # The best of three: another process may take the core from under one of them.
    for _ in range(3):
        needed.append(clock(lambda: list(pair.generate(asked, SAMPLING))))
        running = pair.generate(asked, SAMPLING)
        found = [next(running)]
        end = time.monotonic() + 0.5 + 3 * needed[-1]
        while time.monotonic() < end:  # Python of this process alone
            pass
        began = time.perf_counter()
        found.extend(running)
        waited.append(time.perf_counter() - began)
        assert len(found) == 16
    assert min(waited) < min(needed) / 2


def test_a_thread_that_waits_for_the_engine_leaves_the_others_their_time(pair: Any) -> None:
    """As with ``max_staleness: 1``: a rollout thread waits, the learner computes."""
    alone = clock(lambda: busy(3_000_000))
    spent = []
    stop = threading.Event()

    def generate_on_and_on() -> None:
        while not stop.is_set():
            began = time.thread_time()
            list(pair.generate(requests(4), SAMPLING))
            spent.append(time.thread_time() - began)

    thread = threading.Thread(target=generate_on_and_on)
    thread.start()
    try:
        began = time.thread_time()
        clock(lambda: busy(3_000_000))
        own = time.thread_time() - began
    finally:
        stop.set()
        thread.join()
    assert own < 2 * alone + 1
    assert max(spent) < 0.5, "seconds of this process's time in a generation"


def busy(count: int) -> int:
    total = 0
    for i in range(count):
        total += i & 3
    return total


def clock(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


# -------------------------------------------------------------------------------------------------- start and end


def test_a_process_that_does_not_start_says_why(tmp_path: Path, models: Any) -> None:
    with pytest.raises(UserError, match=r"no engine argument enforce_eagr(.|\n)*did you mean enforce_eager"):
        start_engine(tmp_path, models[0], 2, enforce_eagr=True)


def test_closing_twice_is_safe_and_a_closed_engine_refuses(pair: Any, models: Any) -> None:
    """The last test of the module: it closes the engine of all others."""
    ids, scratch = pids(pair), pair._group._scratch
    log = pair._group._log.path
    running = pair.generate(requests(4), SAMPLING)
    next(running)
    # As a message does that names it.
    pair._group._log.tail()
    pair.close()
    pair.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ids), "the processes end")
    assert not scratch.exists()
    assert log.is_file()
    log.unlink()
    with pytest.raises(EngineError, match="closed"):
        list(running)
    with pytest.raises(EngineError, match="closed"):
        pair.generate(requests(1), SAMPLING)
    with pytest.raises(EngineError, match="closed"):
        pair.sync(models[1].named_parameters(), 1)
