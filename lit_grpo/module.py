"""LitGRPO: prepares a rollout, updates the policy, logs. Formulas live in objectives, sampling in engines.

prompts ─► RolloutDataModule ─► RolloutEngine.generate ─► rewards ─► Rollout
                 ▲                (transformers | vllm | vllm_server | yours)  │
 weights, version│                                                             ▼
optimizer step ◄── Objective.loss ◄── forward (log-probs, entropy, values) ◄── batch
      │
      └─► StepResult: metrics + a typed snapshot ─► callbacks: monitors ─► findings ─► diagnosis
                                                      ─► log | skip | adjust | stop | roll back
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from typing import Annotated, Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lit_grpo.context import LearnerRequirements, RunContext
from lit_grpo.distributed.gradients import GradientExchange
from lit_grpo.distributed.launcher import check_launcher
from lit_grpo.distributed.rank_callback import watch_ranks
from lit_grpo.distributed.reduction import RankReduction
from lit_grpo.distributed.sharding import ShardingConfig
from lit_grpo.errors import UserError
from lit_grpo.evaluation.module import EvaluatedModule
from lit_grpo.learner import batch as batches
from lit_grpo.learner.advantages import compute_advantages
from lit_grpo.learner.batch import make_experience
from lit_grpo.learner.budget import RAISE_AFTER, MicroBatchBudget, remedies
from lit_grpo.learner.checkpoint_state import LearnerState, check_fits, load_state, save_state
from lit_grpo.learner.compile_ahead import Passes, compile_ahead
from lit_grpo.learner.critic_metrics import critic_after_update
from lit_grpo.learner.description import batch_in_words, describe_models, memory_in_words
from lit_grpo.learner.engine_agreement import FirstUpdate, GuardConfig
from lit_grpo.learner.forward import ForwardResults, ForwardRunner, OptimizerStep
from lit_grpo.learner.initial_entropy import with_initial_entropy
from lit_grpo.learner.metric_sums import StepMetrics, add_rollout_metrics
from lit_grpo.learner.models import ModelFactory, Models
from lit_grpo.learner.optimizer_step import OptimizerStepper, StepCounters, make_bundles, make_steps
from lit_grpo.learner.rollout_metrics import add_audit_metrics
from lit_grpo.learner.rollout_report import report_rollout, state_after_rollout
from lit_grpo.learner.run_checks import (
    check_batch,
    check_batch_verdicts,
    check_minibatches,
    check_staleness,
    resolve_objective,
    warmup_rollouts,
    with_monte_carlo_returns,
)
from lit_grpo.learner.run_objective import RunObjective, RunShape
from lit_grpo.learner.step_size import measure_step
from lit_grpo.learner.sync_check import SyncResult, check_engine
from lit_grpo.learner.unscored import UnscoredRollouts
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.given import as_objective_config
from lit_grpo.objectives.objective import Objective
from lit_grpo.policy.config import CriticConfig, OptimizerConfig, PolicyConfig, ReferenceConfig
from lit_grpo.policy.critic import Critic, check_critic
from lit_grpo.policy.forward.batching import Layout, PolicyInput
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.policy.given import as_optimizer, as_policy
from lit_grpo.policy.model.load import check_policy, load_tokenizer
from lit_grpo.policy.optimizer.build import check_optimizer, initialize_optimizer_state, make_optimizer
from lit_grpo.trainer.connect import connect
from lit_grpo.trainer.refused import no_data_module, refuse_spawning
from lit_grpo.trainer.update_hooks import UpdateHooks
from lit_grpo.types import Experience, Rollout, RolloutSnapshot, StepResult, WeightForm
from lit_grpo.utils import random as rng
from lit_grpo.utils.arguments import explained
from lit_grpo.utils.bounds import Bound, check_arguments, check_fields
from lit_grpo.utils.dataclasses import from_arguments
from lit_grpo.utils.memory import screen_if_out_of_memory
from lit_grpo.utils.secrets import masked

__all__ = ["LitGRPO"]

log = logging.getLogger(__name__)

SHOWN_IN_PROGRESS_BAR = ("reward", "policy/entropy", "completions/length")


class LitGRPO(EvaluatedModule):
    """LightningModule that trains a language-model policy on rollouts.

    One Lightning batch is one rollout of whole groups, and ``training_step`` takes all of its optimizer steps.

    Gradient clipping and accumulation are arguments here, not of the Trainer; a run is bounded by its rollouts
    (``RolloutDataModule(rollouts=...)``), not by ``max_steps``.

    Args:
        policy: the model that is trained; in Python also its folder or name on the hub. There a dictionary may stand
            for each group of settings, the name of a recipe for the objective, and a function or class of your own for
            its import path.
        objective: the recipe and its overrides.
        optimizer: the policy's optimizer and its schedule.
        reference: the policy that KL terms of the objective compare with.
        critic: the value function; objectives that need one get the default if this is None.
        micro_batch_tokens: tokens in one forward and backward pass, prompts counted as often as they go through the
            model; None: no bound. Bounds memory, changes no gradient. Where memory runs out all the same, the optimizer
            step is done again with half as many, and so is all that follows.
        micro_batch_size: completions in one forward and backward pass; None: no bound but that of tokens.
        zero_advantage_samples: completions without gradient (of equal rewards, filtered, ...) that go through the model
            in each optimizer step all the same. They are chosen by chance and stand for the others, so that metrics
            over all completions stay unbiased; None: all of them go through.
        step_kl_samples: completions that go through the model once more after the last update, to measure how far the
            policy has moved (``policy/step_kl``); None: one of 32, at least 2; 0: not measured.
        routing_replay: which experts of a mixture-of-experts model every token goes through in an update. ``none``:
            those that its routers choose now; ``old``: those that the policy chose before the first update of the
            rollout; ``sampler``: in every pass of the policy those that the engine chose while sampling.
        updates_per_rollout: optimizer steps on each rollout.
        minibatch_prompts: prompts in each optimizer step (whole groups), over all ranks; None: all of the rollout's.
        max_grad_norm: the global gradient norm is clipped to this; None: no clipping.
        max_staleness: a batch sampled with weights more rollouts old than this is refused. 0: strictly on-policy; above
            0 the objective's ``sampler_correction`` is ``tis_token`` unless it is set.
        max_skipped_steps: the run stops after this many skipped optimizer steps (non-finite or vetoed) in a row.
        guards: bounds beyond which a run is stopped because its engine and learner disagree.
        sharding: how the models are split over ranks under ``trainer.strategy: fsdp``.
    """

    @explained("model", needed="policy='models/SmolLM2-135M-Instruct'")
    def __init__(
        self,
        policy: PolicyConfig,
        objective: ObjectiveConfig = ObjectiveConfig(),  # noqa: B008 - immutable default, shown by --print_config
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
        reference: ReferenceConfig = ReferenceConfig(),  # noqa: B008
        critic: CriticConfig | None = None,
        micro_batch_tokens: Annotated[int | None, Bound(least=1)] = 4096,
        micro_batch_size: Annotated[int | None, Bound(least=1)] = None,
        zero_advantage_samples: Annotated[int | None, Bound(least=0)] = 8,
        step_kl_samples: Annotated[int | None, Bound(least=0)] = None,
        routing_replay: Literal["none", "old", "sampler"] = "none",
        updates_per_rollout: Annotated[int, Bound(least=1)] = 1,
        minibatch_prompts: Annotated[int | None, Bound(least=1)] = None,
        max_grad_norm: Annotated[float | None, Bound(above=0)] = 1.0,
        max_staleness: Annotated[int, Bound(least=0)] = 0,
        max_skipped_steps: Annotated[int, Bound(least=1)] = 10,
        guards: GuardConfig = GuardConfig(),  # noqa: B008
        sharding: ShardingConfig = ShardingConfig(),  # noqa: B008
    ) -> None:
        super().__init__()
        # A batch takes several optimizer steps, each of which may be skipped; Lightning's own loop takes just one.
        self.automatic_optimization = False
        policy = as_policy(policy, "model.policy")
        objective = as_objective_config(objective, "model.objective")
        optimizer = as_optimizer(optimizer, "model.optimizer")
        reference = from_arguments(ReferenceConfig, reference, "model.reference")
        critic = None if critic is None else from_arguments(CriticConfig, critic, "model.critic")
        guards = from_arguments(GuardConfig, guards, "model.guards")
        sharding = from_arguments(ShardingConfig, sharding, "model.sharding")
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_arguments(LitGRPO.__init__, {k: v for k, v in arguments.items() if k != "objective"}, "model")
        self.policy_config, self.objective_config, self.optimizer_config = policy, objective, optimizer
        self.reference_config, self.critic_config = reference, critic
        self.guards, self.sharding_config = guards, sharding
        # Its numbers are overrides, of which each part of the objective knows the bounds.
        check_fields(objective, "model.objective", finite=False)
        check_policy(policy)
        check_optimizer(optimizer)
        self.objective: Objective = resolve_objective(objective, max_staleness)
        if self.critic_config is None and self.objective.advantage.critic:
            self.critic_config = CriticConfig()
            rank_zero_info(
                f"{self.objective.name} learns with a critic: model.critic is not set, so the default is used."
            )
        check_critic(policy, self.critic_config)
        self.micro_batch_tokens, self.micro_batch_size = micro_batch_tokens, micro_batch_size
        self.budget = MicroBatchBudget(micro_batch_tokens, micro_batch_size)
        """The bounds in force: those that were set, or less once memory has run out."""
        self.zero_advantage_samples, self.routing_replay = zero_advantage_samples, routing_replay
        self.step_kl_samples = step_kl_samples
        self.layout = Layout(self.policy_config.pack, self.policy_config.share_prompts)
        self.updates_per_rollout, self.minibatch_prompts = updates_per_rollout, minibatch_prompts
        self.max_grad_norm = max_grad_norm
        self.max_staleness = max_staleness
        self.max_skipped_steps = max_skipped_steps
        # The critic may have become the default one since. Without secrets, since a checkpoint may be handed on.
        arguments["critic"] = self.critic_config
        plain = {name: asdict(cast(Any, value)) if is_dataclass(value) else value for name, value in arguments.items()}
        self.save_hyperparameters(masked(plain), logger=False)
        self.policy: Policy | None = None
        self.critic: Critic | None = None
        self.reference: Policy | None = None
        """A reference that is refreshed: a submodule, so that checkpoints hold it. See :attr:`reference_policy`."""
        # In a list, so that it is no submodule: checkpoints must not grow by what can be loaded again.
        self._frozen_reference: list[Policy] = []
        self.objective_state = self.objective.new_state()
        self.policy_version = 0
        """Number of rollouts trained on."""
        self.counters = StepCounters()
        self.step_result: StepResult | None = None
        """The rollout under way or, between rollouts, the last one; for callbacks."""
        self._unscored_rollouts = UnscoredRollouts()
        self.sync_result: SyncResult | None = None
        """What the check of the engine's first sync found; None before it, and where nothing was checked."""
        self._step_metrics: dict[str, float] = {}
        self._logged_keys: set[str] = set()
        """Keys that any rollout has logged; one that lacks a key logs NaN under it."""
        self._context: RunContext | None = None
        self._uncompiled: Iterator[None] | None = None
        """Compiles a pass with each item; None: none is left."""
        self._seconds_compiling = 0.0
        self._tokenizer: Any = None
        self._restored_random_state: dict[str, Any] | None = None
        self._forward_runner: ForwardRunner | None = None
        self._optimizer_stepper: OptimizerStepper | None = None
        self._model_factory = ModelFactory(policy, self.critic_config, sharding)

    # ---------------------------------------------------------------------------------------------- set-up

    @pl.LightningModule.trainer.setter  # type: ignore[attr-defined]
    def trainer(self, trainer: pl.Trainer | None) -> None:
        # The first that the Trainer does with a module: before it looks for the checkpoint, and refuses what we would.
        pl.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        if trainer is not None:
            connect(trainer)

    def __getstate__(self) -> dict[str, Any]:
        refuse_spawning()
        # A copy (weight averaging makes one) has the weights and the settings, and no part in the run.
        nothing = {"_context": None, "_forward_runner": None, "_optimizer_stepper": None, "_uncompiled": None}
        return super().__getstate__() | nothing

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer; loading it reads no weights."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.policy_config)
        return self._tokenizer

    def requirements(self) -> LearnerRequirements:
        """Return what rollouts must hold, as the data module asks by :class:`lit_grpo.context.RolloutLearner`."""
        return LearnerRequirements(
            completions_from="dataset" if self.objective.demonstrations else "engine",
            dynamic_sampling=self.objective.dynamic_sampling,
            uniform_by=self.objective.filters.uniform_by,
            max_staleness=self.max_staleness,
            sampled_experts=self.routing_replay == "sampler",
            extracted_answers=self.objective.shaping.invalid_entropy is not None,
            engine_logprobs=self.guards.max_engine_gap is not None,
            check_sync=None if None in (self.guards.max_engine_gap, self.guards.max_sync_gap) else self._check_sync,
            finish_preparing=self._compile_rest,
        )

    def connect(self, context: RunContext) -> None:
        """Fit objective and schedule to the run. Called by the data module in set-up, before the model is loaded.

        Raises:
            UserError: the objective, the updates and the shape of the rollouts contradict each other.
        """
        shape = replace(self._run_shape, context=context)
        objective = shape.fit(self.objective, context)
        check_minibatches(context.prompts_per_rollout, self.minibatch_prompts, self.updates_per_rollout)
        self.objective_state = shape.with_rewards(objective, self.objective_state)
        self._context, self.objective = context, objective

    @property
    def _run_shape(self) -> RunShape:
        return RunShape(
            updates_per_rollout=self.updates_per_rollout,
            max_staleness=self.max_staleness,
            critic=self.critic_config,
            context=self._context,
            trained_rollouts=self.policy_version,
        )

    @property
    def _run_objective(self) -> RunObjective:
        return RunObjective(self.objective_config, self.objective, self.objective_state)

    def change_objective(self, changes: dict[str, Any]) -> None:
        """Go on with another objective, between two rollouts and on all ranks; histories that both have are kept.

        Args:
            changes: overrides of the present objective; with ``recipe`` that recipe, without the old overrides.

        Raises:
            UserError: the run does not fit it, or has not the reference model or critic that it needs. The run then
                goes on as it was.
        """
        # A refused change must leave no trace: everything is made first, and assigned in the last lines.
        other = self._run_objective.changed(changes, self._run_shape)
        if "ref_logprobs" in other.objective.requires(self.updates_per_rollout) and self.reference_policy is None:
            raise UserError(f"{other.objective.name} needs a reference model, and this run has made none")
        self.objective_config, self.objective, self.objective_state = other.config, other.objective, other.state
        # Both are made anew: whether experts are replayed depends on the passes of the objective.
        self._forward_runner = self._optimizer_stepper = None

    def can_change_objective(self, changes: dict[str, Any]) -> UserError | None:
        """Try :meth:`change_objective`, also before the models are made, and leave nothing behind.

        Returns:
            The error that it would end with; None if the run fits the other objective.
        """
        # What a change warns of is said when it is made.
        other = self._run_objective.try_changes(changes, self._run_shape)
        if isinstance(other, UserError):
            return other
        # Before the fit begins, the reference that the present objective needs is still to be made.
        has_reference = self.reference_policy is not None or self._needs("ref_logprobs")
        if "ref_logprobs" in other.objective.requires(self.updates_per_rollout) and not has_reference:
            return UserError(f"{other.objective.name} needs a reference model, and this run makes none")
        return None

    def changes_that_add(self, safeguard: str) -> dict[str, Any]:
        """Return the changes of the present objective that add a safeguard and keep everything else.

        Args:
            safeguard: one of :data:`lit_grpo.objectives.safeguards.Safeguard`.
        """
        return self._run_objective.changes_that_add(safeguard)

    def configure_callbacks(self) -> list[pl.Callback]:
        if self._trainer is not None:
            # The first hook of all commands, and the last one before processes that belong together meet.
            check_launcher(self._trainer)
            # Inserted and not returned: it must be the first to know of an exception; Lightning appends what it gets.
            watch_ranks(self._trainer, self.guards.max_rank_silence)
        return []

    def configure_model(self) -> None:
        # Lightning calls this hook at the start of every fit, validate and test; the models are made once.
        if self.policy is not None:
            return
        models = self._model_factory.load(
            # Not self.trainer: the property raises where there is none.
            self._trainer,
            replay=self.routing_replay != "none",
            score_norms=self._needs("score_sqnorm"),
            reference=self._needs("ref_logprobs") and self.reference_config.refresh_every is not None,
        )
        self.policy, self.critic, self.reference = models.policy, models.critic, models.reference

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the policy's model as transformers has it: ``module(input_ids).logits`` is [batch, tokens, vocabulary].

        Training goes other ways, which compute no logits of prompts.

        Raises:
            UserError: the model is not there yet.
        """
        if self.policy is None:
            raise UserError(
                "the policy's model is made when a Trainer sets the module up",
                where="LitGRPO.forward",
                remedy="call it after trainer.fit or trainer.validate, or on LitGRPO.load_from_checkpoint(PATH)",
            )
        return self.policy.model(*args, **kwargs)

    # Lightning asks the module for loaders where there is no data module that has them.

    def train_dataloader(self) -> Any:
        raise no_data_module("fit")

    def val_dataloader(self) -> Any:
        if self.trainer.state.fn == "validate":
            raise no_data_module("validate")
        # A fit needs no held-out questions, and nobody has to be warned of having none.
        warnings.filterwarnings("ignore", "Total length of `list` across ranks is zero")
        return []

    def test_dataloader(self) -> Any:
        raise no_data_module("test")

    def predict_dataloader(self) -> Any:
        raise no_data_module("predict")

    def configure_optimizers(self) -> Any:
        # Not trainer.estimated_stepping_batches: it sets the loaders up before Lightning restores their state, and a
        # resumed run would then begin with its first prompts again.
        steps_per_rollout = self.updates_per_rollout * self.objective.passes
        rollouts = 0 if self._context is None else self._context.rollouts
        # While the critic warms up the policy takes no steps, so its schedule is shorter than the critic's.
        policy_steps = max(0, rollouts - self._warmup_rollouts) * steps_per_rollout
        pairs = [make_optimizer(self._policy.model, self.optimizer_config, policy_steps)]
        if self.critic_config is not None:
            critic = cast(torch.nn.Module, self.critic or self._policy.value_head)
            settings = self.critic_config.optimizer or self.optimizer_config
            pairs.append(make_optimizer(critic, settings, rollouts * steps_per_rollout, "model.critic.optimizer"))
        return tuple({"optimizer": o, "lr_scheduler": {"scheduler": s, "interval": "step"}} for o, s in pairs)

    def on_fit_start(self) -> None:
        with screen_if_out_of_memory(
            "preparing the models", self.device, where="model", remedies=remedies(self.device, activations=False)
        ):
            self._models.verify_against_model_forward(self.layout, replay=self.routing_replay != "none")
            if self._needs("ref_logprobs") and self.reference_policy is None:
                self._frozen_reference.append(self._model_factory.make_reference(self.device))
        if self.sharded:
            self.reshard()
            # A checkpoint in shards needs optimizer states, also one that is saved before the first step.
            for optimizer in self.trainer.strategy.optimizers:
                initialize_optimizer_state(optimizer)
        if self.objective.trust_region.needs_router_scores and not self._policy.routes:
            rank_zero_warn("The model has no experts to route to: RSPO's router factor is 1 and it equals GMPO.")
        self._forward_runner = self._optimizer_stepper = None
        if self._policy.compiled:
            self._compile_ahead()

    def _compile_ahead(self) -> None:
        """Compile the passes until the engine is ready; the rest is compiled while it samples for the first time."""
        updates = self.updates_per_rollout * self.objective.passes
        passes = Passes(
            objective=self.objective,
            needed=self.objective.requires(self.updates_per_rollout) | ({"entropy"} if updates > 1 else set()),
            temperature=1.0 if self._context is None else self._context.temperature,
            probes=self.zero_advantage_samples != 0,
            measures_step=self.step_kl_samples != 0,
        )
        context = self.trainer.precision_plugin.train_step_context
        self._uncompiled = compile_ahead(self.forward_runner, self.layout, passes, context)
        self._seconds_compiling = 0.0
        self._compile_rest(lambda: self._context is not None and self._context.engine_waits())

    def _compile_rest(self, until: Callable[[], bool] = lambda: False) -> None:
        """Compile the passes that are not yet, one after the other; stop early where ``until`` says so."""
        if self._uncompiled is None:
            return
        started = time.perf_counter()
        while not until():
            if next(self._uncompiled, self) is self:
                self._uncompiled = None
                break
        self._seconds_compiling += time.perf_counter() - started
        if self._uncompiled is None:
            seconds = f"{self._seconds_compiling:.1f} s"
            rank_zero_info(f"compiled the learner's passes in {seconds}; the code is kept for other runs")

    @property
    def sharded(self) -> bool:
        """Whether the models are in shards. All ranks must then make the same forward passes in the same order."""
        return self._models.sharded

    def reshard(self) -> None:
        """Put gathered weights of all models back into shards, see :func:`lit_grpo.distributed.sharding.reshard`."""
        self._models.reshard()

    @property
    def reference_policy(self) -> Policy | None:
        """The policy that KL terms compare with, frozen or refreshed; None where the objective has none."""
        return self.reference if self.reference is not None else next(iter(self._frozen_reference), None)

    @property
    def _models(self) -> Models:
        return Models(self._policy, self.critic, self.reference_policy)

    @property
    def _policy(self) -> Policy:
        if self.policy is None:
            raise RuntimeError("the policy is made in configure_model, which has not run yet")
        return self.policy

    @property
    def _warmup_rollouts(self) -> int:
        return 0 if self.critic_config is None else warmup_rollouts(self.critic_config, self.objective)

    def _needs(self, name: str) -> bool:
        return name in self.objective.requires(self.updates_per_rollout)

    @property
    def forward_runner(self) -> ForwardRunner:
        """The models and the way a rollout goes through them, put together at first use, once the models are made."""
        if self._forward_runner is None:
            # A single update has nothing to replay: its experts are those of the old policy.
            single = self.updates_per_rollout * self.objective.passes == 1
            self._forward_runner = self._models.forward_runner(
                micro_batches=self.micro_batches,
                inputs=self.policy_inputs,
                routing_replay="none" if self.routing_replay == "old" and single else self.routing_replay,
                layout=self.layout,
                budget=self.budget,
                device=self.device,
            )
        return self._forward_runner

    @torch.no_grad()
    def measure_rollout(self, rollout: Rollout) -> Experience:
        """Return a rollout with its log-probabilities and entropies under the present weights, on the CPU."""
        experience = make_experience(rollout, self.device)
        results = self.forward_runner.old_forward(rollout, experience, frozenset({"old_logprobs", "entropy"}))
        return results.added_to(experience).to("cpu")

    def _check_sync(self, sync: Callable[[int], object], sample: Callable[[], Rollout]) -> None:
        """Check that an engine takes over the weights, as :class:`lit_grpo.context.LearnerRequirements` says."""
        self.sync_result = check_engine(
            self.forward_runner,
            sync=sync,
            sample=sample,
            version=self.policy_version,
            guards=self.guards,
            reduce=self.ranks.sum_or_none,
        )

    @property
    def _stepper(self) -> OptimizerStepper:
        if self._optimizer_stepper is None:
            hooks, critic = UpdateHooks(self.trainer, self), self.critic_config
            limits = [self.max_grad_norm] if critic is None else [self.max_grad_norm, critic.max_grad_norm]
            self._optimizer_stepper = OptimizerStepper(
                forward=self.forward_runner,
                bundles=make_bundles(self.optimizers(), self.lr_schedulers(), limits),
                counters=self.counters,
                backward=self.manual_backward,
                veto=hooks.veto,
                limit=hooks.limits,
                gradients=GradientExchange.of(self.trainer.strategy, self.trainer.world_size),
                reduce=self.ranks.sum_or_none,
                rank=self.global_rank,
                guards=self.guards,
                zero_advantage_samples=self.zero_advantage_samples,
                max_skipped_steps=self.max_skipped_steps,
                mends_lost_weights=hooks.mends_lost_weights,
            )
        return self._optimizer_stepper

    def describe_run(self) -> dict[str, str]:
        """Return what is trained and how, text by name, for whoever shows a run that begins."""
        context = self._context
        facts = {"recipe": self.objective.name}
        facts |= describe_models(self._policy.model, self.critic, self.policy_config.path)
        if context is not None:
            facts["batch"] = batch_in_words(
                context.prompts_per_rollout,
                context.group_size,
                self.updates_per_rollout * self.objective.passes,
                self.minibatch_prompts,
            )
        facts["memory"] = memory_in_words(self._models.all, self.optimizer_config)
        return facts

    # ---------------------------------------------------------------------------------------------- one rollout

    def training_step(self, batch: Rollout, batch_idx: int) -> dict[str, Tensor]:
        """Take all optimizer steps on one rollout: old forward, advantages, updates, report.

        Returns:
            The mean loss of the steps under ``loss``, for callbacks; 0 where there was nothing to learn from.
        """
        check_batch(batch)
        self._compile_rest()
        # What runs out in a micro-batch is mended below; the rest of a step has no smaller form.
        with screen_if_out_of_memory(
            "training on a rollout", self.device, where="model.micro_batch_tokens", remedies=remedies(self.device)
        ):
            self._train_on(batch)
        return {"loss": torch.tensor(self.step_metrics.get("loss", 0.0))}

    def _train_on(self, batch: Rollout) -> None:
        started = time.perf_counter()
        staleness = check_staleness(batch, self.policy_version, self.max_staleness)
        check_batch_verdicts(batch, self.objective)
        metrics = StepMetrics()
        add_rollout_metrics(metrics, batch, self.trainer.world_size)
        steps = self._prepare(batch, metrics)
        steps_before = self.optimizer_steps
        first_update = self._optimize(batch, steps, metrics)
        # The engine may sample from this very model, whose routers must then choose for themselves.
        self._policy.stop_replay()
        self._measure(steps[0], first_update, metrics, moved=self.optimizer_steps > steps_before)
        # Counted here and not in a hook: callbacks that save the run do so before the module's hooks.
        self.policy_version += 1
        every = self.reference_config.refresh_every
        if self.reference is not None and every is not None and self.policy_version % every == 0:
            self._models.refresh_reference()
        if self.ranks.several:
            self.budget.agree(self.ranks.max)
        self._log(batch, metrics, staleness, time.perf_counter() - started)
        if self.budget.end_rollout():
            rank_zero_info(
                f"memory has sufficed for {RAISE_AFTER} rollouts: micro-batches may have {self.budget.tokens:,} tokens "
                "again. Where it runs out once more, the smaller bound stays"
            )
        self._unscored_rollouts.check(batch.index, self.step_metrics)

    def _prepare(self, batch: Rollout, metrics: StepMetrics) -> list[OptimizerStep]:
        """Compute log-probabilities, values and advantages of a rollout, and list its optimizer steps in order."""
        experience, warmup = make_experience(batch, self.device), self.policy_version < self._warmup_rollouts
        objective = with_monte_carlo_returns(self.objective) if warmup else self.objective
        # Where a single update needs fields already, advantages and plans are made from them, so they come first, of
        # every completion. Otherwise what has no gradient is known before the forward pass, and is left out of it.
        needed, results = self.objective.requires(self.updates_per_rollout), ForwardResults()
        if self.updates_per_rollout * self.objective.passes > 1:
            # The entropy before the first update: later updates see tokens of the rollout only after weights changed.
            needed |= {"entropy"}
        advantages_need_forward = bool(self.objective.requires(1))
        if advantages_need_forward:
            results = self.forward_runner.old_forward(batch, experience, needed)
            experience = results.added_to(experience)
        advantages, self.objective_state = compute_advantages(
            objective, self.objective_state, batch, experience, self.ranks
        )
        self.step_result = StepResult(RolloutSnapshot(batch, experience, advantages))
        by_verdict = "advantage" in objective.uses_correct
        add_audit_metrics(metrics, batch, experience, advantages, self.trainer.world_size, by_verdict)
        steps = make_steps(
            self.minibatches(batch), objective, self.objective_state, experience, advantages, results, warmup=warmup
        )
        return steps if advantages_need_forward else self._stepper.old_forward(batch, steps, needed)

    def _optimize(self, batch: Rollout, steps: Sequence[OptimizerStep], metrics: StepMetrics) -> FirstUpdate:
        """Take the optimizer steps of a rollout, and keep in ``step_result`` its log-probabilities from before them.

        Returns those of the first step.
        """
        first_update = FirstUpdate(batch, steps[0].experience, steps[0].rows, self.policy_version)
        try:
            for number, step in enumerate(steps):
                self._stepper.step(batch, step, metrics, first_update if number == 0 else None)
        finally:
            # Also where a guard ends the run, so that the flight record holds what it found wrong.
            self.step_result = StepResult(first_update.rollout_snapshot(steps[0].advantages))
        return first_update

    def _measure(
        self, first_step: OptimizerStep, first_update: FirstUpdate, metrics: StepMetrics, *, moved: bool
    ) -> None:
        """Measure what the optimizer steps of a rollout did: how far the policy moved, what the critic learned."""
        batch, runner = first_update.batch, self.forward_runner
        if self.step_kl_samples != 0 and moved:
            seed = rng.derive_seed("step_kl", rng.run_seed(), batch.index)
            metrics.update(measure_step(runner, first_update, first_step.advantages, self.step_kl_samples, seed))
        config = self.critic_config
        if config is not None and config.measure_every and self.policy_version % config.measure_every == 0:
            objective, state, reduce = first_step.objective, self.objective_state, self.ranks.sum_or_none
            metrics.update(critic_after_update(runner, batch, objective, first_step.experience, state, reduce))

    def minibatches(self, batch: Rollout) -> Iterator[Tensor]:
        """Yield the completions of each optimizer step, see :func:`lit_grpo.learner.batch.minibatches`."""
        # Derived from the rollout and not drawn: every rank, and a run that was resumed, must cut it alike.
        seed = rng.derive_seed("minibatches", rng.run_seed(), batch.index)
        # Not self.trainer: the property raises where there is none.
        trainer = self._trainer
        ranks = {} if trainer is None else {"rank": trainer.global_rank, "world_size": trainer.world_size}
        return batches.minibatches(batch, self.minibatch_prompts, self.updates_per_rollout, seed, **ranks)

    def micro_batches(self, batch: Rollout, rows: Tensor) -> Iterator[Tensor]:
        """Cut some completions of a rollout into micro-batches."""
        limits = {"tokens": self.budget.tokens, "size": self.budget.size}
        return batches.micro_batches(batch, rows, self.layout, **limits)

    def policy_inputs(self, batch: Rollout, rows: Tensor) -> PolicyInput:
        """Make the model input of some completions of a rollout."""
        return batches.policy_input(batch, rows, self.layout, device=self.device)

    # ---------------------------------------------------------------------------------------------- logging

    def _log(self, batch: Rollout, metrics: StepMetrics, staleness: int, seconds: float) -> None:
        values = report_rollout(
            batch,
            metrics,
            ranks=self.ranks,
            counters=self.counters,
            bundles=self._stepper.bundles,
            budget=self.budget,
            state=self.objective_state,
            policy_version=self.policy_version,
            staleness=staleness,
            seconds=seconds,
        )
        self._step_metrics = dict(values)
        assert self.step_result is not None
        self.step_result = replace(self.step_result, metrics=self._step_metrics)
        self.objective_state = state_after_rollout(self.objective, self.objective_state, values, self.policy_version)
        # Lightning would log the last known value of a key again where this rollout has none.
        values |= dict.fromkeys(self._logged_keys - values.keys(), float("nan"))
        self._logged_keys |= values.keys()
        shown = {key: values.pop(key) for key in SHOWN_IN_PROGRESS_BAR if key in values}
        self.log_dict(shown, prog_bar=True, batch_size=1)
        self.log_dict(values, batch_size=1)

    @property
    def step_metrics(self) -> Mapping[str, float]:
        """Everything that the last rollout logged."""
        # Not Trainer.callback_metrics: that also keeps keys that only earlier rollouts had.
        return self._step_metrics

    @property
    def ranks(self) -> RankReduction:
        """Sums and maxima over the ranks of the run."""
        return RankReduction(self.trainer.strategy, self.device, self.trainer.world_size)

    # ---------------------------------------------------------------------------------------------- state

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy so far."""
        return self.counters.optimizer_steps

    @property
    def critic_steps(self) -> int:
        """Optimizer steps of the critic so far."""
        return self.counters.critic_steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps so far that were vetoed or not finite."""
        return self.counters.skipped_steps

    @property
    def clipped_steps(self) -> int:
        """Optimizer steps so far that were taken with a gradient clipped to a norm that a callback named."""
        return self.counters.clipped_steps

    @property
    def empty_steps(self) -> int:
        """Optimizer steps so far without anything to learn from."""
        return self.counters.empty_steps

    @property
    def skipped_in_a_row(self) -> int:
        """Skipped optimizer steps since the last that was taken."""
        return self.counters.skipped_in_a_row

    def named_weights(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights for an engine as (transformers name, full tensor), adapters as ``form`` says."""
        return self._policy.named_weights(form)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = LearnerState(
            policy_version=self.policy_version,
            counters=self.counters,
            objective=self.objective_state,
            best_held_out=self.best_held_out,
            logged_keys=self._logged_keys,
            budget=self.budget.state(),
        )
        save_state(checkpoint, state, world_size=self.trainer.world_size, sharded=self.sharded)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Not self.trainer: the property raises where there is none.
        fitting = self._trainer is not None and self._trainer.state.fn == "fit"
        check_fits(checkpoint, self.state_dict(), self.optimizer_config.type, fitting=fitting)
        loaded = load_state(checkpoint, fitting=fitting)
        state, before = loaded.state, checkpoint.get("hyper_parameters", {})
        self.policy_version, self.objective_state = state.policy_version, state.objective
        self.counters.restore(state.counters)
        if fitting:
            changed = before.get("objective") not in (None, self.hparams["objective"])
            self.objective_state = self._run_shape.resumed(self.objective, state.objective, changed=changed)
        # Who has set another bound since means that one.
        if before.get("micro_batch_tokens") == self.micro_batch_tokens and state.budget is not None:
            self.budget.restore(state.budget)
        self.best_held_out = {name: dict(rewards) for name, rewards in state.best_held_out.items()}
        self._logged_keys = set(state.logged_keys)
        self._restored_random_state = loaded.random

    def restore_random_state(self) -> None:
        """Set this rank's random state to that of the checkpoint loaded last; a second call for it does nothing."""
        if self._restored_random_state is not None:
            rng.set_state(self._restored_random_state)
            self._restored_random_state = None

    def on_train_start(self) -> None:
        # Not earlier: making the loaders' iterators draws random numbers.
        self.restore_random_state()
        if self.objective.initial_entropy_prompts and self.objective_state.initial_entropy is None:
            self.objective_state = with_initial_entropy(
                self.objective,
                self.objective_state,
                self.policy_version,
                self.forward_runner,
                None if self._context is None else self._context.initial_completions,
                self.ranks.sum,
            )
