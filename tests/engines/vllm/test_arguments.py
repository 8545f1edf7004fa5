"""Which arguments of vLLM a configuration may give: none that makes another number of what is sampled."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

from lit_grpo.engines.config import EngineConfig
from lit_grpo.engines.registry import check_engine
from lit_grpo.engines.vllm import installed
from lit_grpo.engines.vllm.arguments import check_arguments, check_server_arguments
from lit_grpo.engines.vllm.engine import VLLMEngine
from lit_grpo.engines.vllm_processes.engine import VLLMProcesses
from lit_grpo.engines.vllm_processes.settings import per_process
from lit_grpo.engines.vllm_server.process import default_engine_args
from lit_grpo.errors import UserError

BOTH = pytest.mark.parametrize("check", [check_arguments, check_server_arguments], ids=["vllm", "vllm_server"])
# What tells nothing of how tokens are drawn or what weights are, so that each run may choose.
FREE = {
    "enforce_eager": True,
    "block_size": 16,
    "enable_prefix_caching": False,
    "async_scheduling": True,
    "max_num_batched_tokens": 4096,
    "kv_cache_memory_bytes": 2**26,
    "kv_cache_dtype": "fp8",
    "quantization": "fp8",
    "attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 1},
    "seed": 3,
}


@BOTH
def test_what_changes_no_number_is_left_to_each_run(check: Any) -> None:
    check(FREE)
    check(dict.fromkeys(("tensor_parallel_size", "data_parallel_size"), 1))
    check({"kv_cache_memory_bytes": None})


@BOTH
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("logprobs_mode", "raw_logprobs", "after temperature, top_p and top_k"),
        ("generation_config", "auto", "as data.sampling says"),
        ("override_generation_config", {"repetition_penalty": 1.2}, "as data.sampling says"),
        ("logits_processors", ["mine.Processor"], "as data.sampling says"),
        ("load_format", "auto", "with each sync"),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}, "a draft proposed"),
        ("tokenizer", "somebody/else", "come as ids"),
        ("watermark_config", {"key": 1}, "as data.sampling says"),
        ("kv_offloading_size", 4.0, "of older weights"),
    ],
)
def test_what_would_change_what_is_sampled_is_refused(check: Any, name: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as found:
        check({**FREE, name: value})
    assert found.value.where == f"data.engine.args.{name}"
    assert found.value.remedy == "leave it out"


@BOTH
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("max_num_seqs", "data.engine.max_num_seqs"),
        ("dtype", "data.engine.dtype"),
        ("model", "model.policy.path"),
        ("trust_remote_code", "model.policy.model_args: {trust_remote_code: true}"),
        ("hf_overrides", "model.policy.model_args"),
    ],
)
def test_what_has_a_place_of_its_own_is_refused_beside_it(check: Any, name: str, place: str) -> None:
    with pytest.raises(UserError, match="a place of its own") as found:
        check({name: None})
    assert found.value.remedy == f"say it there: {place}"


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("logprobs-mode", "logprobs_mode is not to be chosen"),
        ("logprobs-mod", "logprobs_mode is not to be chosen"),
        ("generation_con", "generation_config is not to be chosen"),
        ("speculative-config.method", "speculative_config is not to be chosen"),
        ("override_generation_config.top_p", "override_generation_config is not to be chosen"),
        ("config", "one by one"),
        ("disable_log_stats", "does not hang"),
        ("enable_lora", "merged into them"),
        ("device_ids", "has a place of its own"),
    ],
)
def test_an_option_of_vllm_serve_may_be_written_as_its_command_line_takes_it(written: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as found:
        check_server_arguments({written: "x"})
    assert found.value.where == f"data.engine.args.{written}"


@pytest.mark.vllm
def test_no_option_that_is_left_to_each_run_is_the_beginning_of_another() -> None:
    from vllm import EngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    known = {field.name for cls in (EngineArgs, FrontendArgs) for field in fields(cls)}
    assert len(known) > 200
    for check in (check_arguments, check_server_arguments):
        for name in sorted(known):
            with contextlib.suppress(UserError), not_another(name):
                check({name: None})


@contextlib.contextmanager
def not_another(name: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if not str(error).startswith(f"{name} "):
            raise AssertionError(f"{name} is taken for another: {error}") from error
        raise


def test_adapters_have_a_place_where_they_can_be_had() -> None:
    with pytest.raises(UserError, match="a place of its own") as found:
        check_arguments({"enable_lora": True})
    assert found.value.remedy == "say it there: data.engine.adapters: hot, with model.policy.lora"


def test_no_argument_of_the_classes_here_is_taken_for_one_of_vllm() -> None:
    """``end_token_ids`` in a configuration once ended completions at other tokens than the policy's, silently."""
    free = {"tensor_parallel_size", "enable_prefix_caching", "seed"}
    for engine in (VLLMEngine, VLLMProcesses):
        for name, parameter in inspect.signature(engine.__init__).parameters.items():
            if name == "self" or parameter.kind is parameter.VAR_KEYWORD or name in free:
                continue
            with pytest.raises(UserError, match=r"a place of its own|not to be chosen"):
                check_arguments({name: 1})


def test_what_a_server_is_started_with_for_its_numbers_is_not_to_be_chosen() -> None:
    speed = {
        "disable_uvicorn_access_log",
        "enforce_eager",
        "block_size",
        "enable_chunked_prefill",
        "compilation_config",
    }
    for name in default_engine_args().keys() - speed:
        with pytest.raises(UserError, match="not to be chosen"):
            check_server_arguments({name: "x"})


@pytest.mark.parametrize("size", ["1GiB", 1e9, 0, True, -1])
def test_a_cache_of_no_size_is_refused(size: Any) -> None:
    for check in (check_arguments, lambda args: per_process(args, 2)):
        with pytest.raises(UserError, match="a whole number") as found:
            check({"kv_cache_memory_bytes": size})
        assert found.value.where == "data.engine.args.kv_cache_memory_bytes"


def test_prompts_are_not_split_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="the first long prompt"):
        check_arguments({"enable_chunked_prefill": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_arguments({"enable_chunked_prefill": True})


@pytest.mark.parametrize("name", ["vllm", "vllm_server"])
def test_it_is_known_before_a_model_is_loaded_and_without_vllm(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="after temperature"):
        check_engine(EngineConfig(name=name, args={"logprobs_mode": "raw_logprobs"}))
    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    check_engine(EngineConfig(name=name, args=FREE))
