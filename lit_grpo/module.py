"""LitGRPO: prepare a rollout, update the policy, log. Formulas live in objectives, sampling in engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_grpo.distributed import sharding as shards
from lit_grpo.distributed.sharding import ShardingConfig
from lit_grpo.distributed.strategy import computing, data_mesh
from lit_grpo.errors import UserError
from lit_grpo.evaluation.evaluator import EvaluationResult, Evaluator, records
from lit_grpo.learner import batch as shape
from lit_grpo.learner import checkpoint_state as run_state
from lit_grpo.learner import run_critic
from lit_grpo.learner.batch import make_experience
from lit_grpo.learner.engine_agreement import GuardConfig
from lit_grpo.learner.forward import Passes
from lit_grpo.learner.metric_sums import Reduce, StepMetrics, add_rollout_metrics
from lit_grpo.learner.optimizer_step import Updater, trained_models
from lit_grpo.learner.rollout_metrics import add_audit_metrics
from lit_grpo.learner.run_checks import (
    check_minibatches,
    check_objective,
    measure_initial_entropy,
    monte_carlo,
    resolve,
)
from lit_grpo.learner.run_critic import UNKNOWN, Range
from lit_grpo.objectives import ObjectiveConfig, diagnostics
from lit_grpo.objectives.objective import Objective
from lit_grpo.policy.config import CriticConfig, OptimizerConfig, PolicyConfig, ReferenceConfig
from lit_grpo.policy.critic import Critic, check_critic, check_vocabulary, make_critic, make_head, model_settings
from lit_grpo.policy.forward.batching import Layout, PolicyInput
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.policy.model.load import check_policy, check_replay, load_model, load_tokenizer, resolve_backend
from lit_grpo.policy.optimizer.build import check_optimizer, initialize_optimizer_state, make_optimizer
from lit_grpo.types import Experience, Rollout
from lit_grpo.utils import random as rng
from lit_grpo.utils.dataclasses import as_dataclass

__all__ = ["LitGRPO", "make_experience"]

SHOWN_IN_PROGRESS_BAR = ("reward", "entropy", "length")


class LitGRPO(pl.LightningModule):
    """Trains a language-model policy on rollouts. One Lightning batch is one rollout, whole groups, all its updates.

    Gradient clipping and accumulation are arguments here, not of the Trainer; a run is bounded by its rollouts
    (``RolloutDataModule(rollouts=...)``), not by ``max_steps``.

    Args:
        policy: the model that is trained.
        objective: the recipe and its overrides.
        optimizer: it and its schedule.
        reference: of objectives with a KL term to the policy before training.
        critic: of objectives with a value function; those get the default one if this is None.
        micro_batch_tokens: tokens in one forward and backward pass, prompts counted as often as they go through the
            model; None: no bound. Bounds memory, changes no gradient.
        micro_batch_size: completions in one forward and backward pass; None: no bound but that of tokens.
        probe_completions: completions without gradient (of equal rewards, filtered, ...) do not go through the model,
            but for this many of each optimizer step, chosen by chance, so that metrics over all completions stay
            without bias; None: all of them do.
        routing_replay: ``old``: in every update tokens go through the experts that the policy before the first update
            chose for them (mixture-of-experts models, several updates per rollout); ``sampler``: in the passes of the
            policy through those that the engine chose while sampling.
        updates_per_rollout: optimizer steps on each rollout.
        minibatch_prompts: prompts in each optimizer step (whole groups), over all ranks; None: all of the rollout's.
        max_grad_norm: the global gradient norm is clipped to this; None: no clipping.
        max_staleness: a batch sampled with weights more rollouts old than this is refused. 0: strictly on-policy; above
            0 the objective's ``sampler_correction`` is ``tis_token`` unless it is set.
        max_skipped_steps: the run stops after this many skipped optimizer steps (non-finite or vetoed) in a row.
        guards: what stops a run whose engine and learner disagree.
        sharding: how the models are split over ranks under ``trainer.strategy: fsdp``.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        objective: ObjectiveConfig = ObjectiveConfig(),  # noqa: B008 - immutable default, shown by --print_config
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
        reference: ReferenceConfig = ReferenceConfig(),  # noqa: B008
        critic: CriticConfig | None = None,
        micro_batch_tokens: int | None = 4096,
        micro_batch_size: int | None = None,
        probe_completions: int | None = 8,
        routing_replay: Literal["none", "old", "sampler"] = "none",
        updates_per_rollout: int = 1,
        minibatch_prompts: int | None = None,
        max_grad_norm: float | None = 1.0,
        max_staleness: int = 0,
        max_skipped_steps: int = 10,
        guards: GuardConfig = GuardConfig(),  # noqa: B008
        sharding: ShardingConfig = ShardingConfig(),  # noqa: B008
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy_config = as_dataclass(PolicyConfig, policy)
        self.objective_config = as_dataclass(ObjectiveConfig, objective)
        self.optimizer_config = as_dataclass(OptimizerConfig, optimizer)
        self.reference_config = as_dataclass(ReferenceConfig, reference)
        for name, value in (
            ("micro_batch_tokens", micro_batch_tokens),
            ("micro_batch_size", micro_batch_size),
            ("updates_per_rollout", updates_per_rollout),
            ("reference.refresh_every", self.reference_config.refresh_every),
        ):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}, must be at least 1", where=f"model.{name}")
        if probe_completions is not None and probe_completions < 0:
            raise UserError(f"probe_completions is {probe_completions}", where="model.probe_completions",
                            remedy="set it to 0 or more, or null for all")  # fmt: skip
        check_policy(self.policy_config)
        check_optimizer(self.optimizer_config)
        self.objective: Objective = resolve(self.objective_config, max_staleness)
        self.critic_config: CriticConfig | None = None if critic is None else as_dataclass(CriticConfig, critic)
        if self.critic_config is None and self.objective.advantage.critic:
            self.critic_config = CriticConfig()
            rank_zero_info(
                f"{self.objective.name} learns with a critic: model.critic is not set, so the default is used."
            )
        check_critic(self.policy_config, self.critic_config)
        self.micro_batch_tokens, self.micro_batch_size = micro_batch_tokens, micro_batch_size
        self.probe_completions, self.routing_replay = probe_completions, routing_replay
        self.layout = Layout(self.policy_config.pack, self.policy_config.share_prompts)
        self.updates_per_rollout, self.minibatch_prompts = updates_per_rollout, minibatch_prompts
        self.max_grad_norm = max_grad_norm
        self.max_staleness = max_staleness
        self.max_skipped_steps = max_skipped_steps
        self.guards: GuardConfig = as_dataclass(GuardConfig, guards)
        self.sharding_config: ShardingConfig = as_dataclass(ShardingConfig, sharding)
        self.save_hyperparameters(
            {
                "policy": asdict(self.policy_config),
                "objective": asdict(self.objective_config),
                "optimizer": asdict(self.optimizer_config),
                "reference": asdict(self.reference_config),
                "critic": None if self.critic_config is None else asdict(self.critic_config),
                "micro_batch_tokens": micro_batch_tokens,
                "micro_batch_size": micro_batch_size,
                "probe_completions": probe_completions,
                "routing_replay": routing_replay,
                "updates_per_rollout": updates_per_rollout,
                "minibatch_prompts": minibatch_prompts,
                "max_grad_norm": max_grad_norm,
                "max_staleness": max_staleness,
                "max_skipped_steps": max_skipped_steps,
                "guards": asdict(self.guards),
                "sharding": asdict(self.sharding_config),
            },
            logger=False,
        )
        self.resolved_policy_config = self.policy_config
        """The policy's configuration with ``attention`` and ``compile`` decided, once the devices are known."""
        self.policy: Policy | None = None
        self.critic: Critic | None = None
        self.reference: Policy | None = None
        """A reference that is refreshed: a submodule, so that checkpoints hold it."""
        self._frozen_reference: list[Policy] = []  # in a list, so that it is no submodule and checkpoints do not grow
        self.objective_state = self.objective.new_state()
        self.policy_version = 0
        """Rollouts trained on."""
        self._evaluator = Evaluator("val")
        self.evaluation: EvaluationResult | None = None
        """What the last evaluation found."""
        self._logged_keys: set[str] = set()
        self.step_metrics: dict[str, float] = {}
        """What the last rollout logged. Trainer.callback_metrics also keeps keys that only earlier rollouts had."""
        self.last_experience: Experience | None = None
        """Of the last rollout, for callbacks: tensors on the module's device."""
        self.last_advantages: Tensor | None = None
        """[N, T]."""
        self.last_logprobs: Tensor | None = None
        """Learner's, before the first update, [N, T]; NaN where it was not asked (without gradient and no probe), None
        where the first optimizer step is one of a part of the completions."""
        self.last_entropy: Tensor | None = None  # likewise
        self.optimizer_steps = self.critic_steps = 0
        """Of the policy, of the critic."""
        self.skipped_steps = self.empty_steps = self.skipped_in_a_row = 0
        self._planned_rollouts = 0
        self._run_shape: dict[str, Any] = {}
        self._tokenizer: Any = None
        self._restored_rng: dict[str, Any] | None = None
        self._make: Callable[[Callable[[], Any]], Any] = lambda make: make()
        """Makes a model, or the shards of one."""

    # ---------------------------------------------------------------------------------------------- set-up

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer; loading it reads no weights."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.policy_config)
        return self._tokenizer

    def prepare_for(
        self,
        *,
        rollouts: int,
        group_size: int,
        prompts_per_rollout: int,
        max_new_tokens: int,
        reward_range: Range = UNKNOWN,
    ) -> None:
        """Called by the data module in set-up, before the model is loaded: fit objective and schedule to the rollouts.

        Raises:
            UserError: the objective, the updates and the shape of the rollouts contradict each other.
        """
        self._planned_rollouts = rollouts
        self._run_shape = {
            "rollouts": rollouts,
            "group_size": group_size,
            "prompts_per_rollout": prompts_per_rollout,
            "max_new_tokens": max_new_tokens,
            "reward_range": reward_range,
        }
        self.objective = self.objective.for_run(max_new_tokens)
        self.objective.check(
            group_size=group_size,
            updates_per_rollout=self.updates_per_rollout,
            has_critic=self.critic_config is not None,
        )
        check_objective(self.objective, self.updates_per_rollout * self.objective.passes, self._warmup_rollouts)
        run_critic.check(self.critic_config, self.objective, rollouts, max_new_tokens, reward_range)
        self.objective_state = run_critic.with_range(self.objective, self.objective_state, reward_range)
        check_minibatches(prompts_per_rollout, self.minibatch_prompts, self.updates_per_rollout)

    def change_objective(self, changes: dict[str, Any]) -> None:
        """Go on with another objective, between two rollouts and on all ranks; histories that both have are kept.

        Args:
            changes: overrides of the present objective; with ``recipe`` that recipe, without the old overrides.

        Raises:
            UserError: the run does not fit it, or has not the reference model or critic that it needs.
        """
        before = self.objective_config, self.objective, self.objective_state
        try:
            old = ObjectiveConfig() if "recipe" in changes else self.objective_config
            self.objective_config = replace(old, **changes)
            self.objective = resolve(self.objective_config, self.max_staleness)
            if self._run_shape:
                self.prepare_for(**self._run_shape)
            if self._needs("ref_logprobs") and self.reference is None and not self._frozen_reference:
                raise UserError(f"{self.objective.name} needs a reference model, and this run has made none")
        except Exception:
            self.objective_config, self.objective, self.objective_state = before
            raise
        self.objective_state = self.objective.adopt_state(self.objective_state)

    def configure_model(self) -> None:
        if self.policy is not None:
            return
        if self.routing_replay != "none":
            check_replay(self.policy_config)
        if (config := self.critic_config) is not None:
            check_vocabulary(self.policy_config, config)
        mesh = data_mesh(self)
        self.resolved_policy_config = resolve_backend(self.policy_config, *(computes := computing(self, mesh)))
        self._make = (lambda make: make()) if mesh is None else partial(shards.make_sharded, mesh, self.sharding_config)
        self.policy = self._make(lambda: self._new_policy(config))
        if config is not None and self._policy.value_head is None:
            model = resolve_backend(model_settings(self.policy_config, config), *computes)
            self.critic = self._make(lambda: make_critic(model, config))
        if self._needs("ref_logprobs") and self.reference_config.refresh_every is not None:
            self.reference = self._initial_policy()

    def _initial_policy(self) -> Policy:
        """The policy before training, whatever has been trained or restored since; without gradient."""
        return cast(Policy, self._make(lambda: self._new_policy().requires_grad_(False)))

    def _new_policy(self, critic: CriticConfig | None = None) -> Policy:
        model = load_model(self.resolved_policy_config)
        head = make_head(model, critic) if critic is not None and critic.trunk == "shared" else None
        return Policy(model, self.policy_config.logits_chunk, head)

    def configure_optimizers(self) -> Any:
        # Not trainer.estimated_stepping_batches: it sets the loaders up before Lightning restores their state, and a
        # resumed run would then begin with its first prompts again.
        each = self.updates_per_rollout * self.objective.passes
        learning = max(0, self._planned_rollouts - self._warmup_rollouts)
        made = [make_optimizer(self._policy.model, self.optimizer_config, learning * each)]
        if self.critic_config is not None:
            critic = cast(torch.nn.Module, self.critic or self._policy.value_head)
            settings = self.critic_config.optimizer or self.optimizer_config
            made.append(make_optimizer(critic, settings, self._planned_rollouts * each, "model.critic.optimizer"))
        return tuple({"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}} for o, s in made)

    def on_fit_start(self) -> None:
        self._policy.verify_against_model_forward(self.layout, replay=self.routing_replay != "none")
        if self.critic is not None:
            self.critic.verify_against_model_forward(self.layout)
        if self._needs("ref_logprobs") and self.reference is None and not self._frozen_reference:
            reference = self._initial_policy()
            self._frozen_reference.append(reference if self.sharded else reference.to(self.device))
        if self.sharded:
            self.reshard()
            for optimizer in self.trainer.strategy.optimizers:
                initialize_optimizer_state(optimizer)
        if self.objective.trust_region.needs_router_scores and not self._policy.routes:
            rank_zero_warn("The model has no experts to route to: RSPO's router factor is 1 and it equals GMPO.")

    @property
    def sharded(self) -> bool:
        """Whether the models are in shards: all ranks must then make the same passes in the same order."""
        return shards.is_sharded(self._policy)

    def reshard(self) -> None:
        """See :func:`lit_grpo.distributed.sharding.reshard`."""
        shards.reshard(self._policy, self.critic, self.reference, *self._frozen_reference)

    @property
    def _policy(self) -> Policy:
        if self.policy is None:
            raise RuntimeError("the policy is made in configure_model, which has not run yet")
        return self.policy

    @property
    def _warmup_rollouts(self) -> int:
        return 0 if self.critic_config is None else self.critic_config.warmup_rollouts

    def _needs(self, name: str) -> bool:
        return name in self.objective.requires(self.updates_per_rollout)

    @property
    def reference_policy(self) -> Policy | None:
        """The policy that the KL penalty compares with, moving or frozen; None where the objective needs none."""
        return self.reference if self.reference is not None else next(iter(self._frozen_reference), None)

    @torch.no_grad()
    def measure_rollout(self, rollout: Rollout) -> Experience:
        """Return a rollout with its log-probabilities and entropies under the present weights, on the CPU."""
        experience = make_experience(rollout, self.device)
        self._passes.fill(rollout, experience, frozenset({"old_logprobs", "entropy"}))
        return experience.to("cpu")

    @property
    def _passes(self) -> Passes:
        reference = self.reference_policy
        replay = self.routing_replay == "old" and self.updates_per_rollout * self.objective.passes > 1
        most = partial(shards.largest_counts, device=self.device) if self.sharded else None
        return Passes(
            *(self._policy, reference, self.critic, self.micro_batches, self._inputs, replay, None, most, self.device),
            sampled=self.routing_replay == "sampler",
        )

    # ---------------------------------------------------------------------------------------------- one rollout

    def training_step(self, batch: Rollout, batch_idx: int) -> None:
        started, staleness = time.perf_counter(), self._check_staleness(batch)
        metrics = StepMetrics()
        add_rollout_metrics(metrics, batch)
        experience = make_experience(batch, self.device)
        needed, passes = self.objective.requires(self.updates_per_rollout), self._passes
        updater = Updater(self, passes)
        warmup = self.policy_version < self._warmup_rollouts
        objective = monte_carlo(self.objective) if warmup else self.objective
        if early := self.objective.requires(1):  # already advantages and plans are made from what a pass finds
            passes.fill(batch, experience, needed)
        advantages, self.objective_state = objective.advantages(experience, self.objective_state, self.reduce_or_none)
        self._merge_states()
        self.last_experience, self.last_advantages = experience, advantages
        add_audit_metrics(metrics, batch, experience, advantages, self.trainer.world_size)
        steps = updater.steps(batch, objective, experience, advantages, warmup)
        if not early:
            updater.prepare(batch, steps, needed)
        self.last_logprobs, self.last_entropy = experience.old_logprobs, experience.entropy
        for number, step in enumerate(steps):
            updater.step(batch, step, metrics, first_pass=number == 0)
        self._policy.stop_replay()
        run_critic.measure_after(self, self._passes, batch, objective, experience, metrics)
        # Counted here and not in a hook: callbacks that save the run do so before the module's hooks.
        self.policy_version += 1
        self._refresh_reference()
        self._log(batch, metrics, staleness, time.perf_counter() - started)

    @torch.no_grad()
    def _refresh_reference(self) -> None:
        every = self.reference_config.refresh_every
        if self.reference is not None and every is not None and self.policy_version % every == 0:
            self.reshard()
            for old, new in zip(self.reference.model.parameters(), self._policy.model.parameters(), strict=True):
                old.copy_(new)

    def _merge_states(self) -> None:
        """Ranks see different prompts; all keep the history of all."""
        # A property of the objective and not of the state: every rank must take part in the gather, or none.
        if self.trainer.world_size > 1 and self.objective.advantage.state_fields:
            states: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(states, self.objective_state)
            self.objective_state = self.objective.merge_states(states)

    def _check_staleness(self, batch: Rollout) -> int:
        staleness = self.policy_version - batch.policy_version
        if not 0 <= staleness <= self.max_staleness:
            raise RuntimeError(
                f"rollout {batch.index} was sampled with weights of version {batch.policy_version}, but the policy is "
                f"at version {self.policy_version}: {staleness} rollouts old, allowed are {self.max_staleness}. "
                "Lightning reads ahead of a loader without a length: use RolloutDataModule's loader or give yours one."
            )
        return staleness

    def _minibatches(self, batch: Rollout) -> Iterator[Tensor]:
        seed = rng.derive_seed("minibatches", self._seed, batch.index)
        trainer = self._trainer
        ranks = {} if trainer is None else {"rank": trainer.global_rank, "world_size": trainer.world_size}
        return shape.minibatches(batch, self.minibatch_prompts, self.updates_per_rollout, seed, **ranks)

    # ---------------------------------------------------------------------------------------------- forward

    def micro_batches(self, batch: Rollout, rows: Tensor) -> Iterator[Tensor]:
        limits = {"tokens": self.micro_batch_tokens, "size": self.micro_batch_size}
        return shape.micro_batches(batch, rows, self.layout, **limits)

    def _inputs(self, batch: Rollout, rows: Tensor) -> PolicyInput:
        return shape.policy_input(batch, rows, self.layout, device=self.device)

    # ---------------------------------------------------------------------------------------------- evaluation

    def on_validation_epoch_start(self) -> None:
        self._evaluator = Evaluator("val", self.device)

    def on_test_epoch_start(self) -> None:
        self._evaluator = Evaluator("test", self.device)

    def validation_step(self, batch: Rollout, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """``records``: one a completion, as in ``predict_step``."""
        return {"records": self._evaluator.update(batch)}

    test_step = validation_step

    def predict_step(self, batch: Rollout, batch_idx: int, dataloader_idx: int = 0) -> list[dict[str, Any]]:
        """One record a completion: prompt id, question, completion, rewards."""
        return records(batch)

    def on_validation_epoch_end(self) -> None:
        self.evaluation = self._evaluator.compute()
        self.log_dict(self.evaluation.metrics(), sync_dist=True)  # alike on all ranks already

    on_test_epoch_end = on_validation_epoch_end

    # ---------------------------------------------------------------------------------------------- logging

    def _log(self, batch: Rollout, metrics: StepMetrics, staleness: int, seconds: float) -> None:
        if many := self.trainer.world_size > 1:
            metrics.agree(self.trainer.world_size)
        values = metrics.compute(self.reduce_sum if many else None, self.reduce_max if many else None)
        values |= diagnostics.derive(values) | batch.metrics
        values |= {
            "optimizer_steps": float(self.optimizer_steps),
            "skipped_steps": float(self.skipped_steps),
            "empty_steps": float(self.empty_steps),
            "policy_version": float(self.policy_version),
            "staleness": float(staleness),
            "time/update": seconds,
        }
        for model in trained_models(self):
            values[f"{model.prefix}lr"] = float(model.optimizer.param_groups[0]["lr"])
        if self.critic_config is not None:
            values["critic/steps"] = float(self.critic_steps)
        if self.objective_state.initial_entropy is not None:
            values["entropy/initial"] = self.objective_state.initial_entropy
        if self.objective_state.beta is not None:
            values["kl/beta"] = self.objective_state.beta
        # Beside the learner's work, sampling costs only what the learner waits for it.
        parts = ("wait", "sync") if "time/wait" in batch.metrics else ("generate", "reward", "sync")
        busy = seconds + sum(batch.metrics.get(f"time/{part}", 0.0) for part in parts)
        values["tokens_per_second"] = batch.metrics.get("tokens", 0.0) / busy if busy > 0 else 0.0
        self.step_metrics = dict(values)
        self.objective_state = self.objective.end_of_rollout(self.objective_state, approx_kl=values.get("kl/old_k3"))
        # Lightning would log the last known value of a key again where this rollout has none.
        values |= dict.fromkeys(self._logged_keys - values.keys(), float("nan"))
        self._logged_keys |= values.keys()
        shown = {key: values.pop(key) for key in SHOWN_IN_PROGRESS_BAR if key in values}
        self.log_dict(shown, prog_bar=True, batch_size=1)
        self.log_dict(values, batch_size=1)

    @property
    def reduce_or_none(self) -> Reduce | None:
        return self.reduce_sum if self.trainer.world_size > 1 else None

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""
        return cast(Tensor, self.trainer.strategy.reduce(tensor.to(self.device), reduce_op="sum")).to(tensor.device)

    def reduce_max(self, tensor: Tensor) -> Tensor:
        return cast(Tensor, self.trainer.strategy.reduce(tensor.to(self.device), reduce_op="max")).to(tensor.device)

    # ---------------------------------------------------------------------------------------------- state

    @property
    def _seed(self) -> int:
        return rng.run_seed()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights for an engine: (transformers name, full tensor), one at a time."""
        return self._policy.named_weights()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        run_state.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._restored_rng = run_state.load(self, checkpoint)

    def on_train_start(self) -> None:
        # Not earlier: making the loaders' iterators draws random numbers.
        if self._restored_rng is not None:
            rng.set_state(self._restored_rng)
            self._restored_rng = None
        measure_initial_entropy(self)
