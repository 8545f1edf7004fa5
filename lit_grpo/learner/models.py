"""The models of a run, policy, critic and reference: how they are made, and what is done with all of them at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn

from lit_grpo.distributed import sharding
from lit_grpo.distributed.sharding import ShardingConfig
from lit_grpo.distributed.strategy import compute_dtype_and_device, data_mesh
from lit_grpo.learner.batch import policy_input
from lit_grpo.learner.budget import GivesWay, MicroBatchBudget
from lit_grpo.learner.forward import ForwardRunner
from lit_grpo.policy.config import CriticConfig, PolicyConfig
from lit_grpo.policy.critic import Critic, make_critic, make_head, model_settings
from lit_grpo.policy.forward.batching import Layout, PolicyInput
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.policy.model.load import load_model, resolve_backend
from lit_grpo.types import Rollout

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Models:
    """The models of a run as they are now, all of them whole or all in shards."""

    policy: Policy
    critic: Critic | None = None
    """A critic with a backbone of its own; None: there is none, or it is a head on the policy's."""
    reference: Policy | None = None
    """The policy that KL terms compare with; None: the objective has none."""

    @property
    def all(self) -> list[nn.Module]:
        """The models that there are."""
        return [model for model in (self.policy, self.critic, self.reference) if model is not None]

    @property
    def sharded(self) -> bool:
        """Whether the models are in shards. All ranks must then make the same forward passes in the same order."""
        return sharding.is_sharded(self.policy)

    def reshard(self) -> None:
        """Put gathered weights back into shards, see :func:`lit_grpo.distributed.sharding.reshard`."""
        sharding.reshard(*self.all)

    @torch.no_grad()
    def refresh_reference(self) -> None:
        """Make the reference the policy as it is now."""
        assert self.reference is not None
        # Shards are copied into shards: a weight that a forward pass left gathered has another shape.
        self.reshard()
        for old, new in zip(self.reference.model.parameters(), self.policy.model.parameters(), strict=True):
            old.copy_(new)

    def verify_against_model_forward(self, layout: Layout, *, replay: bool) -> None:
        """Compare the learner's passes with the models' own, on a few tokens.

        Args:
            layout: layout of micro-batches.
            replay: whether experts of the policy are to be replayed, which is tried too.

        Raises:
            UserError: a model cannot be trained in this layout.
        """
        self.policy.verify_against_model_forward(layout, replay=replay)
        if self.critic is not None:
            self.critic.verify_against_model_forward(layout)

    def forward_runner(
        self,
        *,
        micro_batches: Callable[[Rollout, Tensor], Iterator[Tensor]],
        inputs: Callable[[Rollout, Tensor], PolicyInput],
        routing_replay: Literal["none", "old", "sampler"],
        layout: Layout,
        budget: MicroBatchBudget,
        device: torch.device,
    ) -> ForwardRunner:
        """Put together how a rollout goes through the models, in smaller micro-batches where memory runs out.

        Args:
            micro_batches: cuts some completions of a rollout into micro-batches, as ``budget`` allows.
            inputs: makes the model input of some completions of a rollout.
            routing_replay: which experts an update uses, see :class:`lit_grpo.learner.forward.ForwardRunner`.
            layout: layout of micro-batches.
            budget: bound on micro-batches, which becomes smaller where memory runs out.
            device: device on which the models compute.
        """
        gives_way = GivesWay(
            budget=budget,
            tokens_of=lambda batch, rows: policy_input(batch, rows, layout, device="cpu").tokens,
            recover=partial(sharding.recover, *self.all),
            refuses=sharding.why_not_repeatable(self.policy),
            device=device,
            # Not of rank 0 alone: memory may run out on any.
            say=partial(log.warning, "%s"),
        )
        return ForwardRunner(
            policy=self.policy,
            reference=self.reference,
            critic=self.critic,
            micro_batches=micro_batches,
            inputs=inputs,
            routing_replay=routing_replay,
            max_over_ranks=partial(sharding.largest_counts, device=device) if self.sharded else None,
            device=device,
            gives_way=gives_way,
        )


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
    sharding_config: ShardingConfig
    """Settings of the shards."""

    @classmethod
    def for_run(
        cls,
        trainer: Trainer | None,
        policy: PolicyConfig,
        critic: CriticConfig | None,
        sharding_config: ShardingConfig,
        *,
        needs_score_norms: bool,
    ) -> ModelFactory:
        """Decide where and in which number format the models compute.

        Args:
            trainer: the run's trainer; None: there is no run, and models are whole, on the CPU.
            policy: settings of the policy.
            critic: settings of the critic; None: there is none.
            sharding_config: settings of the shards.
            needs_score_norms: whether the objective needs the gradient norm of single completions.

        Raises:
            UserError: the strategy or the precision of the trainer does not go with shards.
        """
        mesh = data_mesh(
            trainer, sharding_config, quantized=policy.quantization is not None, needs_score_norms=needs_score_norms
        )
        full_precision = policy.dtype == "float32" and policy.tiny is None
        dtype, device = compute_dtype_and_device(trainer, mesh, sharding_config, full_precision=full_precision)
        return cls(
            policy_config=policy,
            critic_config=critic,
            resolved_policy=resolve_backend(policy, dtype, device),
            dtype=dtype,
            device=device,
            mesh=mesh,
            sharding_config=sharding_config,
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
        return make() if self.mesh is None else sharding.make_sharded(self.mesh, self.sharding_config, make)

    def _new_policy(self, critic: CriticConfig | None) -> Policy:
        model = load_model(self.resolved_policy)
        head = make_head(model, critic) if critic is not None and critic.backbone == "shared" else None
        return Policy(model, self.policy_config.logits_chunk, head)
