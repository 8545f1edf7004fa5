"""What PPO and VAPO train, held to loops over completions and tokens; critics with a backbone of their own and
shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_grpo.learner import batch as shape
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, LoraConfig, OptimizerConfig, PolicyConfig
from lit_grpo.utils import random as rng
from tests import tiny
from tests.learner.helpers import Given, Watch, rollout, vector
from tests.learner.reference_ppo import Reference, Settings

RATE, CRITIC_RATE = 2e-3, 5e-3
EPS = 1e-4
"""So large that AdamW does not make steps out of the rounding errors of gradients near 0."""


def start(module: Any) -> None:
    """Models, with the value head off its flat start."""
    module.configure_model()
    head = module.policy.value_head if module.critic is None else module.critic.head
    torch.manual_seed(0)
    with torch.no_grad():
        head.weight.normal_(std=0.2)
        head.bias.fill_(0.1)


def compare(objective: ObjectiveConfig, settings: Settings, rollouts: int = 2, **critic: Any) -> Any:
    """Train both and hold every weight of the one to the other's."""
    updates, size = 4, 1
    backbone: Any = "shared" if settings.shared else "separate"
    config = CriticConfig(
        backbone=backbone, detach=settings.detach, optimizer=OptimizerConfig(lr=CRITIC_RATE, eps=EPS), **critic
    )
    module: Any = tiny.module(
        objective=objective,
        critic=config,
        optimizer=OptimizerConfig(lr=RATE, eps=EPS),
        updates_per_rollout=updates,
        minibatch_prompts=size,
        micro_batch_size=3,
    )
    batches = [replace(cut_by_the_limit(rollout(seed=k)), index=k) for k in range(rollouts)]
    module.connect(tiny.context(rollouts))
    start(module)
    reference, watch = Reference(module, settings, RATE, CRITIC_RATE, EPS), Watch()
    before = tiny.weights(module)
    tiny.trainer(callbacks=[watch]).fit(module, Given(*batches))
    for place, batch in enumerate(batches):
        warmup = place < (config.warmup_rollouts or 0)
        reference.prepare(batch, warmup)
        seed = rng.derive_seed("minibatches", rng.run_seed(), batch.index)
        for rows in shape.minibatches(batch, size, updates, seed):
            reference.update(batch, rows.tolist(), warmup)
    for found, expected in ((module.policy.model, reference.model), (critic_of(module), reference.head)):
        for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4, msg=_named(name))
    if not settings.shared:
        torch.testing.assert_close(vector(module.critic.base), vector(reference.backbone), atol=2e-5, rtol=1e-4)
    assert not torch.equal(before, tiny.weights(module))
    return watch


def cut_by_the_limit(batch: Any) -> Any:
    """The rollout with every second completion, and the longest, cut by the length limit."""
    cut = [replace(c, finish_reason="length") if i % 2 or i == 7 else c for i, c in enumerate(batch.completions)]
    return replace(batch, completions=cut)


def _named(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def critic_of(module: Any) -> Any:
    return module.policy.value_head if module.critic is None else module.critic.head


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gae": ({"recipe": "ppo", "gae_lambda": 0.7, "gae_gamma": 0.9}, {"lam": 0.7, "gamma": 0.9}, {}),
    "value_clip": ({"recipe": "ppo", "value_clip": 0.01, "value_coef": 0.5},
                   {"value_clip": 0.01, "value_coef": 0.5}, {}),
    "bounded": ({"recipe": "ppo"}, {"low": -0.5, "high": 2.0},
                {"bounded": True, "value_low": -0.5, "value_high": 2.0}),
    "bootstrap": ({"recipe": "ppo", "gae_lambda": 0.7, "gae_gamma": 0.9, "bootstrap_truncated": True},
                  {"lam": 0.7, "gamma": 0.9, "bootstrap": True}, {}),
    "bootstrap_shared_bounded": ({"recipe": "vapo", "length_alpha": 0.5, "bootstrap_truncated": True},
                                 {"length_alpha": 0.5, "whiten": False, "clip_high": 0.28, "nll": 0.1,
                                  "value_clip": 0.0, "shared": True, "bootstrap": True, "low": -0.5, "high": 2.0},
                                 {"warmup_rollouts": 1, "bounded": True, "value_low": -0.5, "value_high": 2.0}),
    "shared": ({"recipe": "ppo", "gae_lambda": 0.7, "value_coef": 0.3},
               {"lam": 0.7, "value_coef": 0.3, "shared": True}, {}),
    "detached": ({"recipe": "ppo"}, {"shared": True, "detach": True}, {}),
    "warmup": ({"recipe": "ppo", "gae_lambda": 0.5}, {"lam": 0.5}, {"warmup_rollouts": 1}),
    "vapo": ({"recipe": "vapo", "length_alpha": 0.5},
             {"length_alpha": 0.5, "whiten": False, "clip_high": 0.28, "nll": 0.1, "value_clip": 0.0},
             {"warmup_rollouts": 0}),
    "vapo_shared_warmup": ({"recipe": "vapo", "length_alpha": 0.5},
                           {"length_alpha": 0.5, "whiten": False, "clip_high": 0.28, "nll": 0.1, "value_clip": 0.0,
                            "shared": True}, {"warmup_rollouts": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_loops(case: str) -> None:
    objective, settings, critic = CASES[case]
    compare(ObjectiveConfig(**objective), Settings(**settings), **critic)


@pytest.mark.parametrize("layout", [{}, {"pack": False}, {"pack": False, "share_prompts": False}])
def test_the_value_after_the_last_token_is_that_of_the_text_alone(layout: dict[str, Any]) -> None:
    module: Any = tiny.module(
        objective=ObjectiveConfig(recipe="ppo", bootstrap_truncated=True),
        policy=PolicyConfig(tiny=tiny.TINY, **layout),
        micro_batch_size=3,
    )
    start(module)
    batch = cut_by_the_limit(rollout())
    reference = Reference(module, Settings(), RATE, CRITIC_RATE, EPS)
    want = [reference.value_after(batch, i) if c.truncated else 0.0 for i, c in enumerate(batch.completions)]
    assert sum(c.truncated for c in batch.completions) == 4
    torch.testing.assert_close(module.forward_runner.final_values(batch), torch.tensor(want), atol=1e-5, rtol=1e-5)
    whole = replace(batch, completions=[replace(c, finish_reason="stop") for c in batch.completions])
    assert module.forward_runner.final_values(whole).tolist() == [0.0] * 8


def shared(**changes: Any) -> CriticConfig:
    settings: dict[str, Any] = {"backbone": "shared", "optimizer": OptimizerConfig(lr=1e-2)} | changes
    return CriticConfig(**settings)


def train(batches: Any, objective: Any = "ppo", **changes: Any) -> tuple[Any, Watch]:
    module: Any = tiny.module(objective=ObjectiveConfig(recipe=objective), **changes)
    watch = Watch()
    module.connect(tiny.context(len(batches)))
    start(module)
    tiny.trainer(callbacks=[watch]).fit(module, Given(*batches))
    return module, watch


def test_values_and_log_probabilities_of_a_shared_trunk_come_from_one_pass() -> None:
    passes: list[bool] = []

    class Count(tiny.pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            base = pl_module.policy.model.base_model
            self.handle = base.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))

    module: Any = tiny.module(objective=ObjectiveConfig(recipe="ppo"), critic=shared(measure_every=0))
    module.connect(tiny.context(1))
    tiny.trainer(callbacks=[Count()]).fit(module, Given(rollout()))
    assert passes.count(True) == 1, "the loss needs one pass for both"


@pytest.mark.parametrize("share", [True, False])
def test_a_shared_trunk_values_the_state_before_each_token(share: bool) -> None:
    batch = rollout(lengths=[3, 0, 5, 2, 4, 4, 1, 6])
    module: Any = tiny.module(
        objective=ObjectiveConfig(recipe="ppo"),
        critic=shared(),
        policy=PolicyConfig(tiny=tiny.TINY, share_prompts=share),
    )
    start(module)
    inputs = module.policy_inputs(batch, torch.arange(8))
    alone, stats = module.policy.values(inputs), module.policy(inputs, values="backbone")
    torch.testing.assert_close(alone, stats.values)
    for i, completion in enumerate(batch.completions):
        prompt = batch.prompts[i // 4].token_ids
        for t in range(len(completion.token_ids)):
            ids = torch.tensor([[*prompt, *completion.token_ids[:t]]])
            state = module.policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, -1:]
            assert float(alone[i, t]) == pytest.approx(float(module.policy.value_head(state)), abs=1e-4)


def test_the_value_loss_reaches_a_shared_trunk_unless_it_is_detached() -> None:
    batch = rollout(rewards=[1.0] * 8)
    none: dict[str, Any] = {"whiten": False, "gae_lambda": 1.0}
    moved = {}
    for name, config in (("joined", shared()), ("detached", shared(detach=True))):
        module: Any = tiny.module(objective=ObjectiveConfig(recipe="ppo", **none), critic=config)
        start(module)
        rows = torch.arange(8)
        module.policy(
            module.policy_inputs(batch, rows), values="head" if config.detach else "backbone"
        ).values.sum().backward()
        backbone = [p.grad for p in module.policy.model.base_model.parameters()]
        moved[name] = any(g is not None and bool(g.abs().sum() > 0) for g in backbone)
        assert module.policy.value_head.weight.grad.abs().sum() > 0
    assert moved == {"joined": True, "detached": False}


def test_neither_engines_nor_exports_see_the_value_head(tmp_path: Any) -> None:
    from lit_grpo.callbacks import RolloutCheckpoint
    from lit_grpo.commands.export import export

    module: Any = tiny.module(objective=ObjectiveConfig(recipe="ppo"), critic=shared())
    checkpoint = RolloutCheckpoint(dirpath=str(tmp_path))
    tiny.trainer(callbacks=[checkpoint], enable_checkpointing=True).fit(module, datamodule=tiny.data(rollouts=1))
    plain: Any = tiny.module()
    plain.configure_model()
    assert [name for name, _ in module.named_weights()] == [name for name, _ in plain.named_weights()]
    export(tmp_path / "last.ckpt", tmp_path / "model")
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = dict(module.named_weights())
    for name, weight in loaded.named_parameters():
        assert "value" not in name
        assert torch.equal(weight, expected[name])
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert {"policy.value_head.weight", "policy.value_head.bias"} <= content["state_dict"].keys()
    assert len(content["optimizer_states"]) == 2


def test_adapters_and_a_value_head_are_all_that_learns() -> None:
    pytest.importorskip("peft")
    policy = PolicyConfig(tiny=tiny.TINY, lora=LoraConfig(rank=2, alpha=4.0))
    same = [rollout(seed=0) for _ in range(3)]
    module, watch = train(same, policy=policy, critic=shared(warmup_rollouts=1, measure_every=1))
    fresh: Any = tiny.module(policy=policy)
    fresh.configure_model()
    for (name, new), (_, old) in zip(
        module.policy.model.named_parameters(), fresh.policy.model.named_parameters(), strict=True
    ):
        assert torch.equal(new, old) != ("lora_B" in name or "lora_A" in name), name
    assert torch.equal(watch.policy[0], tiny.weights(fresh)), "warm-up leaves the adapters alone"
    assert watch.metrics[0]["critic/explained_variance_after"] > watch.metrics[0]["critic/explained_variance"]
    held = [len([p for g in o.param_groups for p in g["params"]]) for o in module.optimizers()]
    assert held[1] == 2


def test_a_refreshed_reference_has_no_value_head() -> None:
    from lit_grpo.policy import ReferenceConfig

    objective = ObjectiveConfig(recipe="ppo", kl_coef=0.1, kl_placement="loss")
    module: Any = tiny.module(objective=objective, critic=shared(), reference=ReferenceConfig(refresh_every=1))
    module.connect(tiny.context(2))
    tiny.trainer().fit(module, Given(rollout(), rollout(seed=1)))
    assert module.reference.value_head is None
    for old, new in zip(module.reference.model.parameters(), module.policy.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_critic_of_another_model_is_held_to_the_layout_of_the_rows() -> None:
    from lit_grpo.errors import UserError
    from lit_grpo.policy import TinyModel
    from lit_grpo.policy.forward.batching import Layout

    other = CriticConfig(tiny=TinyModel(width=16, layers=1, heads=2, seed=5))
    module, watch = train([rollout(), rollout(seed=1)], critic=other)
    assert module.critic.base.config.hidden_size == 16
    assert not torch.equal(watch.critic[0], watch.critic[1])
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.critic.base.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # so that tokens see much of each other
    module.critic.verify_against_model_forward(Layout())
    forward = module.critic.base.forward

    def deaf(attention_mask: Any = None, segments: Any = None, **given: Any) -> Any:
        return forward(**given)  # as a model that does not keep to its mask

    module.critic.base.forward = deaf
    module.critic.verify_against_model_forward(Layout(pack=False, share=False))
    with pytest.raises(UserError, match="cannot be trained like this"):
        module.critic.verify_against_model_forward(Layout())
