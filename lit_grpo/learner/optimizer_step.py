"""Optimizer steps on one rollout: accumulate, clip, ask whoever may object, step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_grpo.distributed.sharding import dtype_of
from lit_grpo.errors import StopRun
from lit_grpo.learner import batch as shape
from lit_grpo.learner import engine_agreement as guards
from lit_grpo.learner.forward import OptimizerStep, Passes
from lit_grpo.learner.metric_sums import StepMetrics
from lit_grpo.learner.rollout_metrics import add_direction, update_size
from lit_grpo.policy.forward.attention import to_device
from lit_grpo.policy.optimizer.build import clip_gradients
from lit_grpo.policy.optimizer.quantized_state import rounding_seed
from lit_grpo.types import Experience, Rollout
from lit_grpo.utils import random as rng

_BUCKET = 16 * 1024**2
"""Numbers exchanged at once."""

if TYPE_CHECKING:
    from lit_grpo.module import LitGRPO
    from lit_grpo.objectives.objective import Objective, StepPlan


class Trained(NamedTuple):
    """A model that learns."""

    prefix: str
    """Of its metrics."""
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    max_grad_norm: float | None


def trained_models(module: LitGRPO) -> list[Trained]:
    """The policy, then the critic if there is one: each with its optimizer, schedule and clipping."""
    optimizers, schedulers = cast(Any, module.optimizers()), cast(Any, module.lr_schedulers())
    if module.critic_config is None:
        return [Trained("", optimizers, schedulers, module.max_grad_norm)]
    limits = (("", module.max_grad_norm), ("critic/", module.critic_config.max_grad_norm))
    return [Trained(prefix, o, s, limit) for (prefix, limit), o, s in zip(limits, optimizers, schedulers, strict=True)]


class Updater:
    """Takes the optimizer steps of one rollout for a :class:`lit_grpo.LitGRPO`.

    Args:
        module: holds the models, their optimizers and the counters.
        passes: how a rollout goes through the models.
    """

    def __init__(self, module: LitGRPO, passes: Passes) -> None:
        self.module, self.passes = module, passes

    def steps(
        self, batch: Rollout, objective: Objective, experience: Experience, advantages: torch.Tensor, warmup: bool
    ) -> list[OptimizerStep]:
        """All optimizer steps of a rollout, in order; the arguments are those of :class:`OptimizerStep`."""
        return [
            OptimizerStep(objective, experience, advantages, rows, pass_index, warmup, update)
            for update, rows in enumerate(self.module._minibatches(batch))
            for pass_index in range(objective.passes)
        ]

    def prepare(self, batch: Rollout, steps: list[OptimizerStep], needed: frozenset[str]) -> None:
        """Fill the fields ``needed`` of those completions alone that some step will look at.

        Only where neither advantages nor plans are made from these fields: what a step multiplies by zero is then
        known before the pass.
        """
        if not (needed or self.passes.replay or self.passes.sampled):
            return
        chosen: set[int] = set()
        for step in steps:
            active = self._plan(step).active.cpu()
            probed, _ = self._probe(batch, step, step.rows[~active])
            chosen.update(step.rows[active].tolist(), probed.tolist())
        rows = torch.tensor(sorted(chosen), dtype=torch.long)
        self.passes.fill(batch, steps[0].experience, needed, rows)

    def _plan(self, step: OptimizerStep) -> StepPlan:
        return step.objective.plan(
            step.experience.select(step.rows),
            step.advantages[step.rows],
            self.module.objective_state,
            reduce=self.module.reduce_or_none,
            pass_index=step.pass_index,
        )

    def step(self, batch: Rollout, step: OptimizerStep, metrics: StepMetrics, *, first_pass: bool) -> None:
        """One optimizer step. Weights, optimizers and schedulers stay untouched if it is empty, vetoed or not finite.

        Args:
            batch: the rollout.
            step: what of it is learned from, and how.
            metrics: of the rollout; added to.
            first_pass: no weight has changed since the rollout was prepared.

        Raises:
            StopRun: a guard found engine and learner to disagree, or too many steps in a row were skipped.
        """
        module, rows = self.module, step.rows
        plan = self._plan(step)
        models = trained_models(module)
        for model in models:
            model.optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64, device=module.device)  # nothing in the loop waits for a GPU
        guard = guards.FirstUpdate(batch, step.experience, module.policy_version) if first_pass else None
        seen_first: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        active = plan.active.cpu()
        # Completions that the objective multiplies by zero need no gradient, only their place in the metrics: a few of
        # them stand for all.
        probed, weights = self._probe(batch, step, rows[~active])
        learning = list(module.micro_batches(batch, rows[active]))
        for number, chosen in self.passes.aligned(learning, list(module.micro_batches(batch, probed))):
            learns = number == 0
            if chosen is None:  # another rank has more
                with torch.set_grad_enabled(learns):
                    nothing = self.passes.idle(step)
                if learns:
                    module.manual_backward(nothing)
                continue
            shares = None if learns else weights[shape.positions(probed, chosen)]
            with torch.set_grad_enabled(learns):
                part = plan.select(to_device(shape.positions(rows, chosen), module.device))
                out, stats = self.passes.loss(batch, step, chosen, part, metrics, shares)
            out.metrics.pop("filter/dropped", None)  # known of all, see below
            if learns:
                with self._own_gradients():
                    module.manual_backward(out.loss * module.trainer.world_size)
                loss += out.loss.detach().double()
            metrics.update(out.metrics, out.maxima)
            add_direction(metrics, out.token_weights)
            if guard is not None:
                seen_first.append((chosen, stats.logprobs.detach(), stats.entropy))
                guard.add(chosen, stats.logprobs)
                assert stats.entropy is not None
                tokens = torch.tensor([len(batch.completions[i].token_ids) for i in chosen.tolist()])
                each = torch.ones(len(chosen), dtype=torch.float64) if shares is None else shares
                entropies = stats.entropy.detach().sum(1) * to_device(each, module.device)
                metrics.add("entropy", entropies.sum(), (tokens * each).sum())
        metrics.add("filter/dropped", (~plan.kept).sum(), len(rows))
        self.passes.rest()  # before any weight changes
        if guard is not None:
            if len(rows) == len(batch.completions):
                self._keep(seen_first, len(rows))
            guard.check_truncation(module.guards)
            guard.check(module.guards, module.reduce_or_none, dtype_of(self.passes.policy))
        if plan.empty:
            module.empty_steps += 1
            metrics.add("loss", 0.0)
            metrics.maximum("grad_norm", 0.0)
            return
        if step.warmup:
            models = models[1:]
        for model in models:
            self._average_over_ranks(model.optimizer)
        norms = [clip_gradients(model.optimizer, model.max_grad_norm) for model in models]
        step_loss = module.reduce_sum(loss)
        metrics.sums.pop("loss", None)
        metrics.add("loss", step_loss)
        seen = {"loss": float(step_loss)}
        for model, norm in zip(models, norms, strict=True):
            metrics.maximum(f"{model.prefix}grad_norm", norm)
            seen[f"{model.prefix}grad_norm"] = float(norm)
        if not all(torch.isfinite(x) for x in (*norms, step_loss)):
            self._skip("loss or gradient not finite")
            return
        if objection := self._objection(seen):
            self._skip(objection)
            return
        module.skipped_in_a_row = 0
        reduce = module.reduce_sum if module.sharded else None
        taken = module.optimizer_steps, module.critic_steps
        for model in models:
            rank = module.global_rank if module.sharded else 0
            with rounding_seed(model.optimizer, rng.derive_seed("round", rng.run_seed(), model.prefix, *taken, rank)):
                model.optimizer.step()
            if (size := update_size(model.optimizer, reduce)) is not None:
                metrics.add(f"{model.prefix}update_size", size)
            model.scheduler.step()
        module.optimizer_steps += not step.warmup
        module.critic_steps += module.critic_config is not None

    def _probe(self, batch: Rollout, step: OptimizerStep, inactive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which completions without gradient go through the models, and how many each stands for in the metrics."""
        module = self.module
        seed = rng.derive_seed("probe", rng.run_seed(), batch.index, step.update, step.pass_index)
        return shape.probe(batch, inactive, module.probe_completions, seed)

    def _keep(self, parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], count: int) -> None:
        """What the learner said of each token before any weight changed, NaN where it was not asked."""
        if not parts:
            return
        nan = float("nan")
        if self.module.last_logprobs is None:
            logprobs = [(rows, values) for rows, values, _ in parts]
            self.module.last_logprobs = shape.gather_rows(logprobs, count, nan)
        entropies = [(rows, entropy.detach()) for rows, _, entropy in parts if entropy is not None]
        if len(entropies) == len(parts) and self.module.last_entropy is None:
            self.module.last_entropy = shape.gather_rows(entropies, count, nan)

    def _own_gradients(self) -> AbstractContextManager[Any]:
        """Keep DDP from exchanging gradients in a backward pass.

        Ranks may have different numbers of completions to learn from, even none, and DDP would wait for a backward pass
        that never comes.
        """
        strategy = self.module.trainer.strategy
        return strategy.block_backward_sync() if isinstance(strategy, DDPStrategy) else nullcontext()

    @torch.no_grad()
    def _average_over_ranks(self, optimizer: torch.optim.Optimizer) -> None:
        """Once for all micro-batches, what DDP does in each backward pass."""
        if not isinstance(self.module.trainer.strategy, DDPStrategy) or self.module.trainer.world_size == 1:
            return
        portion: list[torch.Tensor] = []
        size = 0
        weights = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for place, weight in enumerate(weights, 1):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            portion.append(weight.grad)
            size += weight.grad.numel()
            if place == len(weights) or size >= _BUCKET or weights[place].dtype != weight.dtype:
                flat = torch.cat([gradient.flatten() for gradient in portion])
                torch.distributed.all_reduce(flat)
                flat /= self.module.trainer.world_size
                for gradient, part in zip(portion, flat.split([g.numel() for g in portion]), strict=True):
                    gradient.copy_(part.view_as(gradient))
                portion, size = [], 0

    def _objection(self, metrics: dict[str, float]) -> str | None:
        """Why a callback wants this step to be left out.

        Asked for by the method ``veto_update(trainer, module, metrics) -> str | None`` of any callback. ``metrics``
        holds ``loss``, ``grad_norm`` and, with a critic, ``critic/grad_norm``: the same numbers on every rank, on which
        all ranks must decide alike.
        """
        trainer = self.module.trainer
        objections = [
            callback.veto_update(trainer, self.module, metrics)
            for callback in cast(Any, trainer).callbacks
            if hasattr(callback, "veto_update")
        ]  # all are asked: a monitor that keeps a history must see every step
        return next((text for text in objections if text), None)

    def _skip(self, reason: str) -> None:
        module = self.module
        for model in trained_models(module):
            model.optimizer.zero_grad()
        module.skipped_steps += 1
        module.skipped_in_a_row += 1
        if module.skipped_in_a_row >= module.max_skipped_steps:
            raise StopRun(f"{module.skipped_in_a_row} optimizer steps in a row were skipped: {reason}")
        rank_zero_warn(f"An optimizer step was skipped, weights and optimizer are as before: {reason}.")
