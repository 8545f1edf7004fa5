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
from lit_grpo.learner.budget import GivesWay, MicroBatchBudget, remedies
from lit_grpo.learner.forward import ForwardRunner
from lit_grpo.policy.config import CriticConfig, PolicyConfig
from lit_grpo.policy.critic import Critic, check_vocabulary, make_critic, make_head, model_settings
from lit_grpo.policy.forward.batching import Layout, PolicyInput
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.policy.model.load import check_replay, load_model, resolve_backend
from lit_grpo.types import Rollout
from lit_grpo.utils.memory import screen_if_out_of_memory

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


class ModelFactory:
    """Makes the models of a run from their settings, each time with the weights from before training.

    Args:
        policy: settings of the policy.
        critic: settings of the critic; None: there is none.
        sharding_config: settings of the shards.
    """

    def __init__(self, policy: PolicyConfig, critic: CriticConfig | None, sharding_config: ShardingConfig) -> None:
        self.policy, self.critic, self.sharding_config = policy, critic, sharding_config
        self.resolved_policy = policy
        """The policy's settings with everything left open decided, once the models are loaded."""
        self._mesh: DeviceMesh | None = None
        """Devices over which models are sharded; None: each rank has them whole."""

    def load(self, trainer: Trainer | None, *, replay: bool, score_norms: bool, reference: bool) -> Models:
        """Load the models of a run, where and in the number format in which they compute. All ranks must call it.

        Args:
            trainer: the run's trainer; None: there is no run, and models are whole, on the CPU.
            replay: whether experts of the policy are to be replayed.
            score_norms: whether the objective needs the gradient norm of single completions.
            reference: whether a reference is loaded as well.

        Raises:
            UserError: settings contradict each other, or strategy and precision of the trainer do not go with shards.
            MemoryShortageError: the device has too little memory.
        """
        policy, critic = self.policy, self.critic
        if replay:
            check_replay(policy)
        if critic is not None:
            check_vocabulary(policy, critic)
        target = torch.device("cpu") if trainer is None else trainer.strategy.root_device
        few = remedies(target, activations=False)
        with screen_if_out_of_memory("loading the model", target, where="model.policy", remedies=few):
            config, quantized = self.sharding_config, policy.quantization is not None
            self._mesh = data_mesh(trainer, config, quantized=quantized, needs_score_norms=score_norms)
            full = policy.dtype == "float32" and policy.tiny is None
            dtype, device = compute_dtype_and_device(trainer, self._mesh, config, full_precision=full)
            self.resolved_policy = resolve_backend(policy, dtype, device)
            made, own_critic = self._placed(partial(self._new_policy, critic)), None
            if critic is not None and made.value_head is None:
                # From the settings as given: what is left open may be decided in another way for another model.
                model = resolve_backend(model_settings(policy, critic), dtype, device)
                own_critic = self._placed(partial(make_critic, model, critic))
            return Models(made, own_critic, self.make_reference() if reference else None)

    def make_reference(self, device: torch.device | None = None) -> Policy:
        """Make the policy as it was before training, whatever has been trained since; without gradient.

        Args:
            device: device that a whole model goes to; None: it stays where it is made.
        """
        made = self._placed(lambda: self._new_policy(None).requires_grad_(False))
        return made if device is None or self._mesh is not None else made.to(device)

    def _placed(self, make: Callable[[], Model]) -> Model:
        return make() if self._mesh is None else sharding.make_sharded(self._mesh, self.sharding_config, make)

    def _new_policy(self, critic: CriticConfig | None) -> Policy:
        model = load_model(self.resolved_policy)
        head = make_head(model, critic) if critic is not None and critic.backbone == "shared" else None
        return Policy(model, self.policy.logits_chunk, head)
