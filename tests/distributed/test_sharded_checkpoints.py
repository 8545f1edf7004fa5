"""A sharded run is cut, goes on at another number of ranks, is rolled back, is exported; engines get whole weights."""

from __future__ import annotations

import copy
import shutil
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_grpo.callbacks import RolloutCheckpoint
from lit_grpo.callbacks.rollback import CheckpointRing, restore
from lit_grpo.callbacks.rollout_end import FIRST, RolloutEnd
from lit_grpo.commands.export import export
from lit_grpo.distributed.checkpoint import AnyCheckpointIO
from lit_grpo.distributed.sharding import ShardingConfig
from lit_grpo.distributed.strategy import FSDP2Strategy
from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, LoraConfig, PolicyConfig, ReferenceConfig
from lit_grpo.policy.model.load import load_model
from lit_grpo.policy.optimizer.build import initialize_optimizer_state
from lit_grpo.run.checkpoints import newest_whole
from lit_grpo.utils.integrity import DamagedError, check
from tests import tiny
from tests.distributed.sharded import Unequal, fit
from tests.ranks import enter, on_two_ranks

pytestmark = pytest.mark.slow


def module() -> Any:
    """Everything that a checkpoint can hold: two models with an optimizer each, and a reference that is refreshed."""
    return tiny.module(
        objective=ObjectiveConfig(recipe="ppo", kl_coef=0.1),
        critic=CriticConfig(warmup_rollouts=1),
        reference=ReferenceConfig(refresh_every=2),
        micro_batch_size=3,
        zero_advantage_samples=None,
    )


def part(
    folder: str, rollouts: int, *, ranks: int, strategy: str, resume: int | None = None, **changes: Any
) -> tuple[Any, Unequal]:
    """Train until ``rollouts``, from the beginning or from the checkpoint after ``resume``."""
    made = module()
    saver = RolloutCheckpoint(every_n_rollouts=1, keep_last=None, dirpath=f"{folder}/checkpoints")
    path = None if resume is None else f"{folder}/checkpoints/rollout-{resume:06d}.ckpt"
    # One question, so that a rank has none. Alone it is left out: metrics would wait for the other process here.
    asked = {"val_prompts": tiny.AdditionPrompts(digits=1, n=1)} if ranks == 2 else {}
    recorder = fit(
        made,
        tiny.data(rollouts=rollouts, **asked),
        ranks=ranks,
        strategy=strategy,
        callbacks=[saver],
        enable_checkpointing=True,
        default_root_dir=folder,
        ckpt_path=path,
        **changes,
    )
    return made, recorder


def job(rank: int, folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {}

    enter(rank)
    made, recorder = part(f"{folder}/whole", 4, ranks=2, strategy="fsdp")
    out["whole"] = recorder.metrics, recorder.ids, tiny.weights(made)
    before = made.policy
    made.configure_model()
    out["idempotent"] = made.policy is before
    out["gathered"] = gathered(made)
    out["rng"] = [s["torch"] for s in torch.load(f"{folder}/whole/checkpoints/last.ckpt/meta.pt")["lit_grpo"]["rng"]]

    enter(rank)
    part(f"{folder}/cut", 2, ranks=2, strategy="fsdp")
    if rank == 0:  # alone, without sharding: reads the folder, writes a file
        _, recorder = part(f"{folder}/cut", 3, ranks=1, strategy="auto", resume=2, plugins=[AnyCheckpointIO()])
        out["alone"] = recorder.metrics, recorder.ids
    torch.distributed.barrier()
    enter(rank)
    made, recorder = part(f"{folder}/cut", 4, ranks=2, strategy="fsdp", resume=3)
    out["again"] = recorder.metrics, recorder.ids, tiny.weights(made)

    enter(rank)
    back = Back(f"{folder}/ring")
    made = tiny.module(micro_batch_size=3)
    recorder = fit(made, tiny.data(rollouts=4), ranks=2, strategy="fsdp", callbacks=[back], default_root_dir=folder)
    out["rolled back"] = (
        [m["loss"] for m in recorder.metrics],
        [m["optim/grad_norm"] for m in recorder.metrics],
        recorder.ids,
    )

    enter(rank)
    adapted = tiny.module(
        policy=PolicyConfig(tiny=tiny.TINY, lora=LoraConfig(rank=4, alpha=8.0)),
        sharding=ShardingConfig(param_dtype="bfloat16"),
        updates_per_rollout=2,
    )
    saver, dtypes = RolloutCheckpoint(dirpath=f"{folder}/lora"), set()
    # From the first pass with real weights on: what the making of a model tries with stand-ins is no computation.
    hook = torch.nn.modules.module.register_module_forward_pre_hook
    note = lambda part, inputs: dtypes.add(inputs[0].dtype) if isinstance(part, torch.nn.Linear) else None  # noqa: E731
    watches: list[Any] = []
    watch = pl.callbacks.LambdaCallback(on_fit_start=lambda *_: watches.append(hook(note)))
    fit(adapted, tiny.data(rollouts=1), ranks=2, strategy="fsdp", callbacks=[saver, watch], enable_checkpointing=True)
    watches[0].remove()
    out["lora"] = gathered(adapted), dict(adapted.named_weights())
    out["dtypes"] = sorted(map(str, dtypes)), sorted({str(p.dtype) for p in adapted.parameters()})
    return out


class Back(tiny.Recorder):
    """After the third rollout, once, back to the second: the third comes again."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.ring, self.done = CheckpointRing(1, 5), False
        self.ring.folder = Path(folder)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        RolloutEnd.of(trainer).add(self.turn, FIRST)

    def turn(self, trainer: Any, pl_module: Any) -> None:
        if pl_module.policy_version == 2 and not self.done:
            self.ring.save(trainer, 2)
        if pl_module.policy_version == 3 and not self.done:
            self.done = True
            restore(trainer, pl_module, self.ring.path(2))


def gathered(made: Any) -> dict[str, Any]:
    """What engines are given, and how many whole tensors were alive at once on the way."""
    alive: list[weakref.ref[Any]] = []
    most, largest, names = 0, 0, []
    for name, tensor in made.named_weights():
        alive.append(weakref.ref(tensor))
        most = max(most, sum(ref() is not None for ref in alive))
        largest = max(largest, tensor.numel())
        names.append(name)
        del tensor
    own = max(p.numel() for p in made.policy.parameters())
    local = sum(p.to_local().numel() for p in made.policy.parameters())
    whole = sum(p.numel() for p in made.policy.parameters())
    return {"alive": most, "largest": largest, "of model": own, "names": names, "share": local / whole}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return on_two_ranks(job, folder)


KEYS = (
    "loss",
    "optim/grad_norm",
    "critic/grad_norm",
    "reward",
    "policy/entropy",
    "policy/kl_ref_k3",
    "rollout/policy_version",
    "optim/steps",
)


def agree(found: dict[str, float], expected: dict[str, float]) -> None:
    for key in KEYS:
        assert found[key] == pytest.approx(expected[key], abs=1e-4), key


def test_two_ranks_then_one_then_two_go_on_as_the_unbroken_run(ranks: Any) -> None:
    whole, _, weights = ranks[0]["whole"]
    (alone,), alone_ids = ranks[0]["alone"]
    agree(alone, whole[2])
    assert alone_ids[0] == ranks[0]["whole"][1][2] + ranks[1]["whole"][1][2]
    for rank in ranks:
        (again,), again_ids, again_weights = rank["again"]
        agree(again, whole[3])
        assert again_ids[0] == rank["whole"][1][3]
        torch.testing.assert_close(again_weights, weights, atol=1e-4, rtol=0)
    assert whole[2]["critic/grad_norm"] > 0
    assert whole[2]["optim/grad_norm"] > 0


def test_every_rank_keeps_its_random_state(ranks: Any) -> None:
    assert all(len(rank["rng"]) == 2 for rank in ranks)


def test_weights_are_held_in_float32_and_computed_with_in_bfloat16(ranks: Any) -> None:
    assert all(rank["dtypes"] == (["torch.bfloat16"], ["torch.float32"]) for rank in ranks)


def test_configure_model_does_nothing_twice(ranks: Any) -> None:
    assert all(rank["idempotent"] for rank in ranks)


def test_a_rollback_repeats_the_rollout_it_gave_up(ranks: Any) -> None:
    for rank in ranks:
        losses, norms, ids = rank["rolled back"]
        assert len(losses) == 5
        assert (losses[3], norms[3], ids[3]) == (losses[2], norms[2], ids[2])
        assert norms[4] != norms[3]


def test_weights_are_gathered_one_at_a_time_and_alike_on_all_ranks(ranks: Any) -> None:
    for key in (lambda rank: rank["gathered"], lambda rank: rank["lora"][0]):
        first, second = map(key, ranks)
        assert first["names"] == second["names"]
        assert not any(".lora_" in name or name == "lm_head.weight" for name in first["names"])
        for found in (first, second):
            assert found["alive"] == 1
            assert found["largest"] == found["of model"]
            assert found["share"] < 0.6


@pytest.mark.parametrize("name", ["whole/checkpoints/last.ckpt", "lora/last.ckpt"])
def test_a_folder_of_shards_is_exported(ranks: Any, folder: Path, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    export(folder / name, tmp_path / "out")
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    if name.startswith("lora"):
        expected = ranks[0]["lora"][1]
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, expected[key])
    else:
        vector = torch.cat([tensor.flatten() for tensor in found.values()])
        assert torch.equal(vector, ranks[0]["whole"][2])


def test_a_state_made_before_the_first_step_counts_as_no_step() -> None:
    model = load_model(PolicyConfig(tiny=tiny.TINY))
    other = copy.deepcopy(model)
    ends = []
    for begin, one in ((True, model), (False, other)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2, weight_decay=0.1)
        if begin:
            initialize_optimizer_state(optimizer)
            assert optimizer.state
        one(torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
        optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in one.parameters()]))
    assert torch.equal(*ends)


def test_what_shards_cannot_do_is_refused_before_a_model_is_made() -> None:
    every_norm = ObjectiveConfig(advantage="bstar", optimal_baseline_weights="given")
    try:
        for settings, objective, words in (
            ({}, every_norm, "gradient norm of every single completion"),
            ({"precision": "bf16-true"}, ObjectiveConfig(), "precision is bf16-true"),
        ):
            made = tiny.module(objective=objective)
            with pytest.raises(UserError, match=words):
                tiny.trainer(devices=1, strategy=FSDP2Strategy(), **settings).fit(made, datamodule=tiny.data())
            assert made.policy is None
    finally:
        torch.distributed.destroy_process_group()


def test_a_folder_of_shards_is_sealed_and_damage_to_any_of_its_files_is_found(
    ranks: Any, folder: Path, tmp_path: Path
) -> None:
    source = (folder / "whole" / "checkpoints" / "last.ckpt").resolve()
    assert check(source)
    files = sorted(path.name for path in source.iterdir())
    assert "seal.json" in files
    assert len(files) >= 5, "shards of two ranks, two files of what they are, and the seal"
    for name in files:
        copy_of = tmp_path / f"{name} changed"
        shutil.copytree(source, copy_of)
        content = bytearray((copy_of / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy_of / name).write_bytes(content)
        with pytest.raises(DamagedError):
            check(copy_of)
        if name != "seal.json":
            (copy_of / name).unlink()
            with pytest.raises(DamagedError, match="is missing"):
                check(copy_of)
    assert newest_whole(source) is not None
