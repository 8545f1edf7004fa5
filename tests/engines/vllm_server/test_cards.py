"""Which cards the server of each rank has, and what is refused before anything is loaded. Without cards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.engines import EngineConfig, ServerConfig, check_engine
from lit_grpo.engines.vllm import installed
from lit_grpo.engines.vllm_processes.settings import check_ranks
from lit_grpo.engines.vllm_server import engine as vllm_server
from lit_grpo.engines.vllm_server.engine import VLLMServer
from lit_grpo.engines.vllm_server.process import server_of_rank
from lit_grpo.errors import UserError
from tests import tiny

VISIBLE = "CUDA_VISIBLE_DEVICES"
TWO = {"tensor_parallel_size": 2}


@pytest.fixture(autouse=True)
def eight_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: object())
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def engine(args: dict[str, Any] | None = None, **server: Any) -> EngineConfig:
    return EngineConfig(name="vllm_server", args=args or {}, server=ServerConfig(**server))


def learners(*numbers: int) -> list[torch.device]:
    return [torch.device("cuda", number) for number in numbers]


@pytest.mark.parametrize(("visible", "seen"), [(None, "6,7"), ("GPU-a,b, c,d,e,f,g,h", "g,h")])
def test_the_server_of_a_rank_sees_its_own_cards(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, seen: str
) -> None:
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    server = ServerConfig(cards=[[4, 5], [6, 7]], env={"A": "{rank}"})
    assert server_of_rank(server, 3, 4, place=1).env == {"A": "3", VISIBLE: seen}


def test_a_rank_takes_the_cards_of_its_place_on_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    names, found = ["a", "a", "b", "b"], []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda out, name: out.__setitem__(slice(None), names))
    monkeypatch.setattr(vllm_server, "model_config_of", lambda context: None)
    monkeypatch.setattr(vllm_server, "runs_own_code", lambda context: False)
    monkeypatch.setattr(VLLMServer, "__init__", lambda self, config, server, **more: found.append(server.env[VISIBLE]))
    policy = SimpleNamespace(model=torch.nn.Linear(1, 1))
    context: Any = SimpleNamespace(
        policy=policy, policy_config=SimpleNamespace(dtype="float32"), wants_stop_strings=False, end_token_ids=(1,),
        max_model_len=9, seed=0,
    )  # fmt: skip
    for rank in range(4):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        VLLMServer.from_context(context, args=TWO, server=ServerConfig(cards=[[4, 5], [6, 7]]))
    assert found == ["4,5", "6,7", "4,5", "6,7"]
    with pytest.raises(UserError, match="2 ranks train on this machine, and the cards of 1 servers"):
        VLLMServer.from_context(context, server=ServerConfig(cards=[[4]]))


@pytest.mark.parametrize(("cards", "args", "words"), [
    ([[4], [8]], {}, "no card 8: this process sees 8"),
    ([[4], [4]], {}, "a card twice"),
    ([], {}, "or none"),
    ([4, 5], {}, "no list of lists"),
    ([[4], [5]], TWO, r"spreads over 2 by data.engine.args, and \[4\]"),
    ([[4, 5]], {}, r"spreads over 1 by data.engine.args, and \[4, 5\]"),
    ([[2, 3], [4, 5, 6, 7]], {"tensor-parallel-size": 2, "data_parallel_size": 2}, r"over 4 by .* \[2, 3\]"),
    ([[4]], {"pipeline_parallel_size": "two"}, "pipeline_parallel_size is 'two'"),
])  # fmt: skip
def test_cards_that_a_server_cannot_have_are_refused(cards: Any, args: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_engine(engine(args, cards=cards))
    check_engine(engine(TWO, cards=[[4, 5], [6, 7]]))
    check_engine(engine(cards=[[4], [5]]))


def test_cards_are_named_in_one_place() -> None:
    with pytest.raises(UserError, match=r"so does CUDA_VISIBLE_DEVICES in server\.env"):
        check_engine(engine(cards=[[4]], env={VISIBLE: "4"}))


@pytest.mark.parametrize(("server", "where", "words"), [
    ({"cards": [[1], [2]]}, "cards", "card 1 is named for an engine, and rank 1 of this machine learns there"),
    ({"cards": [[2]]}, "cards", "2 ranks train on this machine, and the cards of 1 servers"),
    ({}, "cards", "all servers would start on the same cards: CUDA_VISIBLE_DEVICES is not set"),
    ({"env": {VISIBLE: "2,3"}}, "cards", "same cards: CUDA_VISIBLE_DEVICES is '2,3' for all"),
    ({"cards": [[2], [3]], "port": 65533}, "port", r"4 processes train(.|\n)*65532 at most"),
    ({"url": "http://h:8000"}, "url", r"4 processes train(.|\n)*put \{rank\}"),
])  # fmt: skip
def test_ranks_that_would_share_a_server_its_cards_or_ports(server: dict[str, Any], where: str, words: str) -> None:
    """Two ranks on each of two machines."""
    with pytest.raises(UserError, match=words) as told:
        check_ranks(engine(**server), learners(0, 1), 4)
    assert told.value.where == f"data.engine.server.{where}"


@pytest.mark.parametrize("server", [
    {"cards": [[2], [3]], "port": 65532}, {"env": {VISIBLE: "{rank}"}}, {"url": "http://h:800{rank}"},
])  # fmt: skip
def test_ranks_with_servers_of_their_own(server: dict[str, Any]) -> None:
    check_ranks(engine(**server), learners(0, 1), 4)


def test_ranks_that_may_share_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank alone on its machine shares its card with its server as it likes, and a CPU has no cards."""
    check_ranks(engine(), learners(0), 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_ranks(engine(), [torch.device("cpu")] * 2, 2)


def test_an_address_for_several_ranks_is_refused_before_prompts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer, data = tiny.trainer(), tiny.data(engine=engine(url="http://h:8000"))
    monkeypatch.setattr(data, "prepare_train_prompts", lambda source: pytest.fail("prompts were read"))
    monkeypatch.setattr(type(trainer), "world_size", property(lambda self: 2))
    with pytest.raises(UserError, match=r"2 processes train"):
        trainer.fit(tiny.module(), datamodule=data)
