"""FSDP2 and DDP on two ranks take the steps of one process: losses, gradient norms, weights, rollout by rollout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from lit_grpo.distributed.sharding import ShardingConfig, reshard, shard
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, LoraConfig, PolicyConfig, ReferenceConfig, TinyModel
from tests import tiny
from tests.distributed.sharded import Unequal, fit, head
from tests.ranks import enter, on_two_ranks

pytestmark = pytest.mark.slow

MOE = TinyModel(width=16, layers=2, heads=2, experts=4, experts_per_token=2)
LORA = LoraConfig(rank=4, alpha=8.0)

# name -> (settings of the module, settings of the data)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Old log-probabilities, a reference that is never saved, an entropy bonus, two updates of each rollout.
    "frozen reference": (
        {
            "objective": ObjectiveConfig(kl_coef=0.1, entropy_coef=0.03),
            "updates_per_rollout": 2,
            "micro_batch_tokens": 20,
            "policy": PolicyConfig(tiny=tiny.TINY, gradient_checkpointing=True, logits_chunk=7),
        },
        {},
    ),
    # Some steps have none of a rank's prompts.
    "minibatches": ({"updates_per_rollout": 4, "minibatch_prompts": 1}, {"rollouts": 2}),
    # A critic that learns alone first, and a reference that becomes the policy of the moment.
    "critic": (
        {
            "objective": ObjectiveConfig(recipe="ppo", kl_coef=0.1, bootstrap_truncated=True),
            "critic": CriticConfig(warmup_rollouts=1),
            "reference": ReferenceConfig(refresh_every=1),
        },
        {"rollouts": 3},
    ),
    # The same on the policy's backbone: while it learns alone, the backbone has no backward pass.
    "shared backbone": (
        {
            "objective": ObjectiveConfig(recipe="ppo", kl_coef=0.1, bootstrap_truncated=True),
            "critic": CriticConfig(backbone="shared", warmup_rollouts=1, measure_every=1),
            "updates_per_rollout": 2,
        },
        {"rollouts": 3},
    ),
}
# One process fills a rollout up in another way than several do, so these two are compared with each other.
DYNAMIC = "dynamic sampling"
RUNS[DYNAMIC] = ({"objective": ObjectiveConfig(recipe="dapo")}, {"rollouts": 2})
# Under FSDP2 alone: DDP's way through these is that of the first two.
SHARDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two passes": ({"objective": ObjectiveConfig(recipe="lopti")}, {"rollouts": 2}),
    "adapters": ({"policy": PolicyConfig(tiny=tiny.TINY, lora=LORA)}, {"rollouts": 2}),
    "experts": ({"policy": PolicyConfig(tiny=MOE), "routing_replay": "old", "updates_per_rollout": 2}, {"rollouts": 2}),
    "offload": ({"sharding": ShardingConfig(cpu_offload=True, reshard_after_forward=False)}, {"rollouts": 2}),
}


def run(name: str, ranks: int, strategy: str) -> tuple[Any, Unequal]:
    settings, data = (RUNS | SHARDED)[name]
    module = tiny.module(**({"micro_batch_size": 3, "zero_advantage_samples": None} | settings))
    recorder = fit(module, tiny.data(**data), ranks=ranks, strategy=strategy)
    return module, recorder


def job(rank: int, folder: str) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for strategy, names in (("ddp", RUNS), ("fsdp", RUNS | SHARDED)):
        for name in names:
            enter(rank)
            module, recorder = run(name, 2, strategy)
            out[strategy, name] = seen(module, recorder) | {"sharded": module.sharded}
    out["sum"] = mean_gradient(rank)
    out["kept"] = [micro_batches(gives_back) for gives_back in (True, False)]
    return out


class Block(torch.nn.Linear):
    """One weight."""


class Blocks(torch.nn.Sequential):
    _no_split_modules = ("Block",)


def mean_gradient(rank: int) -> torch.Tensor:
    """Of the gradients 1 and 2**-9, whose sum takes more digits than bfloat16 has."""
    model = Blocks(Block(1, 2, bias=False))
    shard(model, init_device_mesh("cpu", (2,)), ShardingConfig(param_dtype="bfloat16"))
    model(torch.full((1, 1), (1.0, 2.0**-9)[rank], dtype=torch.bfloat16)).sum().backward()
    weight: Any = model.get_parameter("0.weight")
    gradient: torch.Tensor = weight.grad.full_tensor()
    return gradient


def micro_batches(gives_back: bool) -> dict[str, Any]:
    """Which weights of a block and of the root are whole after each of two micro-batches, and the sum of gradients."""
    model = Blocks(Block(1, 2, bias=False), torch.nn.Linear(2, 1, bias=False))
    names = ("0.weight", "1.weight")
    for name in names:
        torch.nn.init.ones_(model.get_parameter(name))
    config = ShardingConfig(reshard_after_forward=gives_back)
    shard(model, init_device_mesh("cpu", (2,)), config)
    weights: Any = dict(model.named_parameters())

    def whole() -> list[bool]:
        return [not hasattr(model.get_parameter(name), "to_local") for name in names]

    after = []
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        after.append(whole())
    reshard(model)
    return {"after": after, "resharded": whole(), "sum": [weights[n].grad.full_tensor().flatten() for n in names]}


@pytest.mark.parametrize("gives_back", [True, False])
def test_what_a_forward_pass_keeps_is_there_for_the_next_micro_batch(ranks: Any, gives_back: bool) -> None:
    for rank in ranks:
        found = rank["kept"][0 if gives_back else 1]
        assert found["after"] == [[not gives_back, True]] * 2
        assert found["resharded"] == [False, False]
        assert [gradient.tolist() for gradient in found["sum"]] == [[2.0, 2.0], [2.0, 2.0]]


def test_gradients_of_several_ranks_are_summed_in_float32(ranks: Any) -> None:
    for rank in ranks:
        assert rank["sum"].flatten().tolist() == [(1 + 2.0**-9) / 2] * 2


def seen(module: Any, recorder: Unequal) -> dict[str, Any]:
    return {
        "metrics": recorder.metrics,
        "ids": recorder.ids,
        "micro_batches": recorder.micro_batches,
        "lengths": recorder.lengths,
        "weights": tiny.weights(module),
        "head": None if module.critic_config is None else head(module),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return on_two_ranks(job, tmp_path_factory.mktemp("ranks"))


KEYS = (
    *(
        "loss",
        "optim/grad_norm",
        "critic/grad_norm",
        "reward",
        "completions/length",
        "policy/entropy",
        "policy/kl_ref_k3",
        "optim/update_to_weight_ratio",
    ),
    *("critic/explained_variance", "critic/error_sq_after", "policy/ratio_gap"),
)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", [*(name for name in RUNS if name != DYNAMIC), *SHARDED])
def test_two_ranks_take_the_steps_of_one_process(ranks: Any, strategy: str, name: str) -> None:
    if (strategy, name) not in ranks[0]:
        pytest.skip("only under fsdp")
    module, single = run(name, 1, "auto")
    first, second = ranks[0][strategy, name], ranks[1][strategy, name]
    assert first["sharded"] == (strategy == "fsdp")
    assert torch.equal(first["weights"], second["weights"]), "what engines are given is the same on every rank"
    for step, expected in enumerate(single.metrics):
        assert first["ids"][step] + second["ids"][step] == single.ids[step], "the same completions"
        for found in (first["metrics"][step], second["metrics"][step]):
            agree(found, expected)
    torch.testing.assert_close(first["weights"], tiny.weights(module), atol=1e-4, rtol=0)
    if first["head"] is not None:
        torch.testing.assert_close(first["head"], head(module), atol=1e-4, rtol=1e-4)
        assert first["head"].abs().max() > 0
    if name in ("frozen reference", "critic", "shared backbone"):  # the others' first loss is 0 by construction
        assert sum(abs(metrics["loss"]) for metrics in single.metrics) > 1e-3


def agree(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for key in KEYS:
        if key in expected:
            assert found[key] == pytest.approx(expected[key], abs=1e-4), key


def test_dynamic_sampling_is_that_of_ddp(ranks: Any) -> None:
    for rank in ranks:
        found, expected = rank["fsdp", DYNAMIC], rank["ddp", DYNAMIC]
        assert found["ids"] == expected["ids"]
        for a, b in zip(found["metrics"], expected["metrics"], strict=True):
            agree(a, b)
        torch.testing.assert_close(found["weights"], expected["weights"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_ranks_had_unequal_work(ranks: Any, strategy: str) -> None:
    both = [rank[strategy, name] for name in ("frozen reference", "minibatches") for rank in ranks]
    for first, second in (both[:2], both[2:]):
        assert first["lengths"] != second["lengths"]
        assert any(len(set(lengths)) > 1 for lengths in first["lengths"])
    assert both[2]["micro_batches"] != both[3]["micro_batches"]
    assert {0} < set(both[2]["micro_batches"]), "some steps had none of this rank's prompts"
