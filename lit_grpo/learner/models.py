"""How the models of a run are made: policy, critic and reference, whole or as this rank's shards of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from lit_grpo.distributed.sharding import ShardingConfig, make_sharded
from lit_grpo.distributed.strategy import compute_dtype_and_device, data_mesh
from lit_grpo.policy.config import CriticConfig, PolicyConfig
from lit_grpo.policy.critic import Critic, make_critic, make_head, model_settings
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.policy.model.load import load_model, resolve_backend

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.distributed.device_mesh import DeviceMesh

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class ModelFactory:
    """Makes the models of a run from their settings, each time with the weights from before training."""

    policy_config: PolicyConfig
    """Settings of the policy, as they were given."""
    critic_config: CriticConfig | None
    """Settings of the critic; None: there is none."""
    resolved_policy: PolicyConfig
    """Settings of the policy with everything left open decided, now that the devices are known."""
    dtype: torch.dtype | None
    """Number format of forward passes; None: that of the weights."""
    device: str
    """Type of the device of forward passes."""
    mesh: DeviceMesh | None
    """Devices over which models are sharded; None: each rank has them whole."""
    sharding: ShardingConfig

    @classmethod
    def for_run(
        cls,
        trainer: Trainer | None,
        policy: PolicyConfig,
        critic: CriticConfig | None,
        sharding: ShardingConfig,
        *,
        needs_score_norms: bool,
    ) -> ModelFactory:
        """Decide where and in which number format the models compute.

        Args:
            trainer: the run's trainer; None: there is no run, and models are whole, on the CPU.
            policy: settings of the policy.
            critic: settings of the critic; None: there is none.
            sharding: settings of the shards.
            needs_score_norms: whether the objective needs the gradient norm of single completions.

        Raises:
            UserError: the strategy or the precision of the trainer does not go with shards.
        """
        mesh = data_mesh(
            trainer, sharding, quantized=policy.quantization is not None, needs_score_norms=needs_score_norms
        )
        full_precision = policy.dtype == "float32" and policy.tiny is None
        dtype, device = compute_dtype_and_device(trainer, mesh, sharding, full_precision=full_precision)
        return cls(
            policy_config=policy,
            critic_config=critic,
            resolved_policy=resolve_backend(policy, dtype, device),
            dtype=dtype,
            device=device,
            mesh=mesh,
            sharding=sharding,
        )

    def make_policy(self) -> Policy:
        """Make the policy, with a value head where the critic shares its backbone. All ranks must call it."""
        return self._placed(partial(self._new_policy, self.critic_config))

    def make_critic(self) -> Critic:
        """Make a critic with a backbone of its own. All ranks must call it."""
        config = self.critic_config
        assert config is not None
        # From the settings as given: what is left open may be decided in another way for another model.
        model = resolve_backend(model_settings(self.policy_config, config), self.dtype, self.device)
        return self._placed(lambda: make_critic(model, config))

    def make_reference(self) -> Policy:
        """Make the policy as it was before training, whatever has been trained since; without gradient."""
        return self._placed(lambda: self._new_policy(None).requires_grad_(False))

    def _placed(self, make: Callable[[], Model]) -> Model:
        return make() if self.mesh is None else make_sharded(self.mesh, self.sharding, make)

    def _new_policy(self, critic: CriticConfig | None) -> Policy:
        model = load_model(self.resolved_policy)
        head = make_head(model, critic) if critic is not None and critic.backbone == "shared" else None
        return Policy(model, self.policy_config.logits_chunk, head)
