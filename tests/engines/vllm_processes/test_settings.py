"""How many processes there are, and what each of them is given of what all may use."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.cli.main import main
from lit_grpo.engines import EngineConfig, EngineContext, check_engine
from lit_grpo.engines.config import VLLMEngineConfig
from lit_grpo.engines.vllm import installed
from lit_grpo.engines.vllm_processes import choose as choose_file
from lit_grpo.engines.vllm_processes.choose import (
    choose,
    measured_file,
    measured_key,
    read_measured,
    write_measured,
)
from lit_grpo.engines.vllm_processes.settings import card_of_rank, check_ranks, environment, per_process
from lit_grpo.errors import UserError
from lit_grpo.policy import PolicyConfig
from tests.paths import ROOT

GIB = 2**30


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def context(**changes: Any) -> EngineContext:
    policy: Any = SimpleNamespace(model=torch.nn.Linear(4, 4))
    policy.model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="tiny", hidden_size=4))
    return EngineContext(policy, PolicyConfig(), None, (1,), 64, 0, **changes)


def test_memory_and_samples_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    part = per_process({"gpu_memory_utilization": 0.6, "max_num_seqs": 512, "seed": 3}, 4)
    assert part == {"gpu_memory_utilization": pytest.approx(0.15), "max_num_seqs": 128, "seed": 3}
    assert per_process({"max_num_seqs": 10, "kv_cache_memory_bytes": 9 * GIB}, 3) == {
        "max_num_seqs": 4, "kv_cache_memory_bytes": 3 * GIB, "gpu_memory_utilization": pytest.approx(0.4 / 3),
    }  # fmt: skip


def test_more_processes_than_samples_at_once_are_refused() -> None:
    """Each would sample one, and all of them more than was allowed."""
    assert per_process({"max_num_seqs": 5}, 5)["max_num_seqs"] == 1
    with pytest.raises(UserError, match="5 processes are to sample 2 completions at once") as caught:
        per_process({"max_num_seqs": 2}, 5)
    assert caught.value.where == "data.engine.max_num_seqs"


def test_the_cache_on_a_cpu_is_divided_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert per_process({}, 2)["kv_cache_memory_bytes"] == GIB // 2
    assert per_process({"kv_cache_memory_bytes": 10}, 2)["kv_cache_memory_bytes"] == 5
    # vLLM lets the variable win, so the processes must not see it.
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "6")
    assert per_process({"kv_cache_memory_bytes": 10}, 3)["kv_cache_memory_bytes"] == 2 * GIB
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert environment(3) == {
        "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": None,
    }  # fmt: skip
    assert environment(16)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(("visible", "card"), [(None, "2"), ("4,5,6", "6"), ("GPU-a,GPU-b,GPU-c", "GPU-c")])
def test_processes_see_the_ranks_card_alone(monkeypatch: pytest.MonkeyPatch, visible: str | None, card: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment(2)["CUDA_VISIBLE_DEVICES"] == card


@pytest.mark.parametrize(("visible", "seen"), [(None, "5,2"), ("8,9,10,11,12,13", "13,10")])
def test_engines_on_another_card_see_it_first_and_the_learners_too(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment(2, card=5)["CUDA_VISIBLE_DEVICES"] == seen
    assert environment(2, card=2)["CUDA_VISIBLE_DEVICES"] == seen.split(",")[1], "its own card is seen once"


@pytest.mark.parametrize(("cards", "sleep", "words"), [
    ([0, 4], 0, "no card 4: this process sees 4"), ([1, 1], 0, "twice"), ([], 0, "or none"), ([1], 2, "nobody"),
])  # fmt: skip
def test_cards_that_cannot_be_had_are_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, cards: list[int], sleep: Any, words: str
) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UserError, match=words):
        check_engine(EngineConfig(name="vllm", cards=cards, sleep=sleep))
    check_engine(EngineConfig(name="vllm", cards=[2, 3]))


def test_each_rank_of_a_machine_has_the_card_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert card_of_rank(None) is None
    assert card_of_rank([3]) == 3, "a process alone"
    names = ["a", "a", "b", "b"]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda out, name: out.__setitem__(slice(None), names))
    found = []
    for rank in range(4):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        found.append(card_of_rank([2, 3]))
    assert found == [2, 3, 2, 3]
    with pytest.raises(UserError, match="2 ranks train on this machine, and 3 cards"):
        card_of_rank([2, 3, 4])


def test_cards_are_held_to_the_ranks_before_a_model_is_loaded() -> None:
    def ranks(*numbers: int) -> list[torch.device]:
        return [torch.device("cuda", number) for number in numbers]

    def told(words: str, cards: list[int], devices: list[torch.device]) -> None:
        with pytest.raises(UserError, match=words) as error:
            check_ranks(EngineConfig(name="vllm", cards=cards), devices, len(devices))
        assert error.value.where == "data.engine.cards"

    told("card 1 is named for an engine, and rank 1 of this machine learns there", [2, 1], ranks(0, 1))
    told("card 0 is named for an engine, and rank 1 of this machine learns there", [1, 0], ranks(2, 0))
    told("2 ranks train on this machine, and 1 cards", [2], ranks(0, 1))
    check_ranks(EngineConfig(name="vllm", cards=[2, 3]), ranks(0, 1), 4)
    check_ranks(EngineConfig(name="vllm", cards=[0, 1]), ranks(2, 3), 2)
    check_ranks(EngineConfig(name="vllm"), ranks(0, 1), 2)
    check_ranks(EngineConfig(name="transformers", cards=[0, 1]), ranks(0, 1), 2)


def test_engines_with_a_card_have_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(VLLMEngineConfig(cards=[1]), context())[:2] == (1, True)
    assert choose(VLLMEngineConfig(cards=[1], processes=3), context())[:2] == (3, True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose(VLLMEngineConfig(cards=[1], processes="auto"), context())[:2] == (1, True)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
def test_an_engine_of_a_rank_is_not_spread_over_cards(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nor over ranks, each of which has its own prompts."""
    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    for processes in (1, 2, "auto"):
        config = EngineConfig(name="vllm", processes=processes, args={name: 2})
        with pytest.raises(UserError, match=rf"args.{name}: 2(.|\n)*vllm_server(.|\n)*server.cards") as found:
            check_engine(config)
        assert found.value.where == f"data.engine.args.{name}"
        check_engine(EngineConfig(name="vllm", processes=processes, args={name: 1}))
    check_engine(EngineConfig(name="vllm_server", args={name: 2}))


def test_a_run_with_tensor_parallelism_in_its_ranks_takes_one_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    engine = ["--data.engine.name", "vllm", "--data.engine.args", '{"tensor_parallel_size": 2}']
    code = main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--trainer.accelerator", "cpu", *engine])
    shown = capsys.readouterr().err
    assert code == 2
    assert "args.tensor_parallel_size: 2" in shown
    assert "vllm_server" in shown
    assert len(shown.partition("lit-grpo fit: error")[2].splitlines()) < 10
    assert "Traceback" not in shown


@pytest.mark.parametrize("name", ["transformers", "vllm_server"])
def test_other_engines_have_no_processes(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    with pytest.warns(UserWarning, match=f"data.engine.processes has no effect(.|\n)*samples with {name}"):
        check_engine(EngineConfig(name=name, processes=2))


@pytest.mark.parametrize(("value", "words"), [
    ("0", "processes is 0, must be in"), ("-1", "processes is -1, must be in"),
    ("many", "Choose one of auto, a whole number"), ("1.5", "cannot be '1.5'"), ("null", "cannot be"),
])  # fmt: skip
def test_bad_numbers_take_one_screen(value: str, words: str, capsys: Any) -> None:
    code = main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--data.engine.processes", value])
    shown = capsys.readouterr().err
    assert code == 2
    assert words in shown
    assert "data.engine.processes" in shown
    assert len(shown.splitlines()) < 10
    assert "Traceback" not in shown


def test_a_set_number_is_taken() -> None:
    assert choose(VLLMEngineConfig(), context())[:2] == (1, False)
    assert choose(VLLMEngineConfig(processes=3), context())[:2] == (3, True)


def test_auto_is_one_process_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    choice = choose(VLLMEngineConfig(processes="auto"), context(beside_learner=True))
    assert choice[:2] == (1, False)
    assert "CPU" in choice.reason


def test_auto_is_one_process_on_a_card_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card 1")
    auto = VLLMEngineConfig(processes="auto")
    # Of its own, so that it starts beside the learner.
    assert choose(auto, context())[:2] == (1, True)
    assert choose(auto, context(beside_learner=True))[:2] == (1, True)
    monkeypatch.setattr(choose_file, "_several_ranks", lambda: True)
    assert choose(auto, context())[:2] == (1, False)
    assert choose(auto, context(beside_learner=True))[:2] == (1, True)
    assert "lit-grpo check" in choose(auto, context()).reason


def test_what_was_measured_on_a_card_goes_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    made = context()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card 1")
    auto = VLLMEngineConfig(processes="auto")
    assert choose(auto, made).processes == 1
    key = measured_key(made.policy.model.config, "Card 1")
    write_measured(key, 4, {1: 100.0, 2: 210.0, 4: 300.0})
    assert choose(auto, made)[:2] == (4, True)
    assert "measured" in choose(auto, made).reason
    few = VLLMEngineConfig(processes="auto", max_num_seqs=3)
    assert choose(few, made).processes == 3, "no more than sample at once, all of them together"
    write_measured("another", 1, {1: 5.0})
    assert read_measured(key) == 4, "measurements of other models and cards stay"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card 2")
    assert choose(auto, made).processes == 1
    # Engines are others since: what was measured of them says nothing.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card 1")
    monkeypatch.setattr(choose_file, "MEASUREMENT", 3)
    assert choose(auto, made).processes == 1


@pytest.mark.parametrize("text", ["", "[]", "{", '{"k": 3}', '{"k": {"processes": "two"}}', '{"k": {"processes": 0}}'])
def test_a_measurement_that_cannot_be_read_is_none(text: str) -> None:
    measured_file().parent.mkdir(parents=True)
    measured_file().write_text(text)
    assert read_measured("k") is None
    write_measured("k", 3, {3: 1.0})
    assert read_measured("k") == 3
    assert json.loads(measured_file().read_text())["k"]["tokens_per_second"] == {"3": 1.0}


def test_models_of_other_shapes_have_other_keys() -> None:
    from transformers import LlamaConfig

    keys = {measured_key(LlamaConfig(hidden_size=size, num_hidden_layers=n), "c") for size in (64, 128) for n in (2, 3)}
    assert len(keys) == 4


def test_a_cache_that_is_no_whole_number_is_refused(monkeypatch):
    """An engine takes no other either, and would say so with a traceback of its process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0.5")
    with pytest.raises(UserError, match="vLLM takes a whole number of gibibytes") as caught:
        per_process({}, 2)
    assert caught.value.where == "environment variable VLLM_CPU_KVCACHE_SPACE"
