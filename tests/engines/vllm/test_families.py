"""Families of models in vLLM beside a learner: scripts/vllm_families.py for some, and a run of one.

Those that vLLM serves by transformers' own class, mixtures of experts, weights with other names on disk, saved buffers.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_grpo.engines import EngineConfig
from lit_grpo.engines.vllm import weights
from lit_grpo.policy import PolicyConfig
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.types import Sampling
from scripts import vllm_families
from tests import tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="what is refused is the CPU build's"),
]


@pytest.mark.parametrize("family", ["smollm3", "qwen3_moe", "mixtral", "glm4_moe"])
def test_log_probabilities_are_exact_before_and_after_a_sync(family):
    row = vllm_families.row_of(family)
    assert (row.verdict, row.learner, row.reason) == ("exact", "as before", "")
    assert row.loaded is not None
    assert row.synced is not None
    assert max(row.loaded, row.synced) < 1e-4


def test_a_model_that_takes_no_weights_while_it_runs_is_refused():
    row = vllm_families.row_of("gpt_oss")
    assert row.verdict == "refused"
    assert "does not take model.layers.0.attn.sinks over into a running model" in row.reason


def test_a_model_whose_layers_hold_a_state_is_refused_by_that_name():
    row = vllm_families.row_of("lfm2")
    assert row.verdict == "refused"
    assert "does not serve a model whose layers hold a state" in row.reason


def test_experts_that_the_reload_leaves_unpacked_are_named_by_the_check_of_the_sync(monkeypatch):
    monkeypatch.setattr(weights, "_experts_packed_again", lambda model: contextlib.nullcontext())
    row = vllm_families.row_of("qwen3_moe")
    assert row.verdict == "refused"
    assert "the weights that the engine holds after a sync are not the learner's" in row.reason


def test_a_run_of_a_family_that_vllm_serves_by_transformers_class(tmp_path: Path):
    from transformers.models.smollm3.modeling_smollm3 import SmolLM3Model

    tokenizer = char_tokenizer("0123456789+=")
    model = vllm_families.make_model("smollm3")
    model.resize_token_embeddings(len(tokenizer))
    model.config.eos_token_id, model.config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = EngineConfig(name="vllm", max_num_seqs=32, args={"kv_cache_memory_bytes": 2**26})
    module: Any = tiny.module(policy=PolicyConfig(path=str(tmp_path)))
    recorder = tiny.Recorder()
    data = tiny.data(rollouts=2, engine=engine, sampling=Sampling(max_new_tokens=8))
    tiny.trainer(callbacks=[recorder]).fit(module, datamodule=data)
    assert module.optimizer_steps == 2
    gaps = [metrics["sampler_mismatch/logprob_abs_diff"] for metrics in recorder.metrics]
    assert max(gaps) < 1e-5
    assert module.sync_result.changed_gap < 1e-4 * module.sync_result.change
    assert SmolLM3Model.__call__ is nn.Module.__call__
