"""LitGRPO: prepare a rollout, update the policy, log. Formulas live in objectives, sampling in engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor

from lit_grpo import rng
from lit_grpo.errors import StopRun, UserError
from lit_grpo.metrics import StepMetrics, add_rollout_metrics
from lit_grpo.objectives import ObjectiveConfig, diagnostics
from lit_grpo.objectives.objective import Objective, StepPlan
from lit_grpo.policy.batching import pad_rows, share_prompts
from lit_grpo.policy.config import OptimizerConfig, PolicyConfig
from lit_grpo.policy.load import check_policy, load_model, load_tokenizer
from lit_grpo.policy.optimizer import make_optimizer
from lit_grpo.policy.policy import EntropyMode, Policy, TokenStats
from lit_grpo.types import Experience, LossOutput, Rollout

SHOWN_IN_PROGRESS_BAR = ("reward", "entropy", "length")


class LitGRPO(pl.LightningModule):
    """Trains a language-model policy on rollouts. One Lightning batch is one rollout, whole groups, all its updates.

    Optimization is manual: gradient clipping and accumulation are arguments here, not of the Trainer. Bound a run by
    its number of rollouts (``RolloutDataModule(rollouts=...)``), not by ``max_steps``.

    Args:
        policy: the model that is trained.
        objective: the recipe and its overrides.
        optimizer: AdamW and its schedule.
        micro_batch_size: completions in one forward and backward pass. Bounds memory, changes no gradient.
        updates_per_rollout: optimizer steps on each rollout.
        minibatch_prompts: prompts in each optimizer step (whole groups); None: all of the rollout's.
        max_grad_norm: the global gradient norm is clipped to this; None: no clipping.
        max_staleness: a batch sampled with weights more rollouts old than this is refused. 0: strictly on-policy.
        max_skipped_steps: the run stops after this many non-finite optimizer steps in a row.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        objective: ObjectiveConfig = ObjectiveConfig(),  # noqa: B008 - immutable default, shown by --print_config
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008
        micro_batch_size: int = 16,
        updates_per_rollout: int = 1,
        minibatch_prompts: int | None = None,
        max_grad_norm: float | None = 1.0,
        max_staleness: int = 0,
        max_skipped_steps: int = 10,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy_config = _typed(PolicyConfig, policy)
        self.objective_config = _typed(ObjectiveConfig, objective)
        self.optimizer_config = _typed(OptimizerConfig, optimizer)
        for name, value in (("micro_batch_size", micro_batch_size), ("updates_per_rollout", updates_per_rollout)):
            if value < 1:
                raise UserError(f"{name} is {value}, must be at least 1", where=f"model.{name}")
        check_policy(self.policy_config)
        self.objective: Objective = self.objective_config.resolve()
        self.micro_batch_size = micro_batch_size
        self.updates_per_rollout = updates_per_rollout
        self.minibatch_prompts = minibatch_prompts
        self.max_grad_norm = max_grad_norm
        self.max_staleness = max_staleness
        self.max_skipped_steps = max_skipped_steps
        self.save_hyperparameters(
            {
                "policy": asdict(self.policy_config),
                "objective": asdict(self.objective_config),
                "optimizer": asdict(self.optimizer_config),
                "micro_batch_size": micro_batch_size,
                "updates_per_rollout": updates_per_rollout,
                "minibatch_prompts": minibatch_prompts,
                "max_grad_norm": max_grad_norm,
                "max_staleness": max_staleness,
                "max_skipped_steps": max_skipped_steps,
            },
            logger=False,
        )
        self.policy: Policy | None = None
        self.objective_state = self.objective.new_state()
        self.policy_version = 0
        """Rollouts trained on."""
        self.step_metrics: dict[str, float] = {}
        """What the last rollout logged. Trainer.callback_metrics also keeps keys that only earlier rollouts had."""
        self.optimizer_steps = 0
        self.skipped_steps = 0
        self.empty_steps = 0
        self._skipped_in_a_row = 0
        self._planned_rollouts = 0
        self._tokenizer: Any = None
        self._restored_rng: dict[str, Any] | None = None

    # ---------------------------------------------------------------------------------------------- set-up

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer; loading it reads no weights."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.policy_config)
        return self._tokenizer

    def prepare_for(self, *, rollouts: int, group_size: int, prompts_per_rollout: int, max_new_tokens: int) -> None:
        """Called by the data module in set-up, before the model is loaded: fit objective and schedule to the rollouts.

        Raises:
            UserError: the objective, the updates and the shape of the rollouts contradict each other.
        """
        self._planned_rollouts = rollouts
        self.objective = self.objective.for_run(max_new_tokens)
        self.objective.check(group_size=group_size, updates_per_rollout=self.updates_per_rollout, has_critic=False)
        size = self.minibatch_prompts or prompts_per_rollout
        if size < 1 or prompts_per_rollout % size:
            raise UserError(
                f"{prompts_per_rollout} prompts per rollout cannot be divided into minibatches of {size}",
                where="model.minibatch_prompts",
                remedy=f"choose a divisor of {prompts_per_rollout}",
            )
        parts = prompts_per_rollout // size
        if self.updates_per_rollout % parts:
            raise UserError(
                f"{self.updates_per_rollout} updates per rollout would use some of the {parts} minibatches "
                "more often than others",
                where="model.updates_per_rollout",
                remedy=f"choose a multiple of {parts}",
            )

    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = Policy(load_model(self.policy_config), self.policy_config.logits_chunk)

    def configure_optimizers(self) -> Any:
        assert self.policy is not None
        # Not trainer.estimated_stepping_batches: it sets the loaders up before Lightning restores their state, and a
        # resumed run would then begin with its first prompts again.
        steps = self._planned_rollouts * self.updates_per_rollout * self.objective.passes
        optimizer, scheduler = make_optimizer(self.policy, self.optimizer_config, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        self._policy.check(shared_prompts=self.policy_config.share_prompts)

    @property
    def _policy(self) -> Policy:
        if self.policy is None:
            raise RuntimeError("the policy is made in configure_model, which has not run yet")
        return self.policy

    # ---------------------------------------------------------------------------------------------- one rollout

    def training_step(self, batch: Rollout, batch_idx: int) -> None:
        started = time.perf_counter()
        staleness = self._check_staleness(batch)
        metrics = StepMetrics()
        add_rollout_metrics(metrics, batch)
        experience = make_experience(batch, self.device)
        experience = self._before_updates(batch, experience)
        reduce = self._reduce if self.trainer.world_size > 1 else None
        advantages = self.objective.advantages(experience, self.objective_state, reduce)
        for update, rows in enumerate(self._minibatches(batch)):
            for pass_index in range(self.objective.passes):
                first = update == 0 and pass_index == 0
                self._update(batch, experience, advantages, rows, pass_index, metrics, first_pass=first)
        # Counted here and not in a hook: callbacks that save the run do so before the module's hooks.
        self.policy_version += 1
        self._log(batch, metrics, staleness, time.perf_counter() - started)

    def _check_staleness(self, batch: Rollout) -> int:
        staleness = self.policy_version - batch.policy_version
        if not 0 <= staleness <= self.max_staleness:
            raise RuntimeError(
                f"rollout {batch.index} was sampled with weights of version {batch.policy_version}, but the policy is "
                f"at version {self.policy_version}: {staleness} rollouts old, allowed are {self.max_staleness}. "
                "Lightning reads ahead of a loader without a length: use RolloutDataModule's loader or give yours one."
            )
        return staleness

    def _before_updates(self, batch: Rollout, experience: Experience) -> Experience:
        """The no-gradient pass for what the objective must know before the first update, if anything."""
        needed = self.objective.requires(self.updates_per_rollout)
        unknown = needed - {"old_logprobs", "entropy"}
        if unknown:
            raise UserError(
                f"{self.objective.name} needs {', '.join(sorted(unknown))}, which this version does not compute",
                where="model.objective.recipe",
            )
        if not needed:
            return experience
        logprobs, entropies = [], []
        with torch.no_grad():
            for rows in self._micro_batches(batch, torch.arange(len(batch.completions))):
                stats = self._forward(batch, rows, "detached" if "entropy" in needed else "none")
                logprobs.append((rows, stats.logprobs))
                entropies.append((rows, stats.entropy))
        if "old_logprobs" in needed:
            experience.old_logprobs = _gather_rows(logprobs, experience)
        if "entropy" in needed:
            experience.entropy = _gather_rows(cast("list[tuple[Tensor, Tensor]]", entropies), experience)
        return experience

    def _minibatches(self, batch: Rollout) -> Iterator[Tensor]:
        """Completions of each optimizer step: whole groups, each group equally often, in a seeded order."""
        groups = len(batch.prompts)
        size = min(self.minibatch_prompts or groups, groups)
        generator = torch.Generator().manual_seed(rng.derive_seed("minibatches", self._seed, batch.index))
        done = 0
        while done < self.updates_per_rollout:
            order = torch.arange(groups) if size == groups else torch.randperm(groups, generator=generator)
            for start in range(0, groups, size):
                chosen = order[start : start + size].sort().values
                yield (chosen[:, None] * batch.group_size + torch.arange(batch.group_size)).flatten()
                done += 1

    def _update(
        self,
        batch: Rollout,
        experience: Experience,
        advantages: Tensor,
        rows: Tensor,
        pass_index: int,
        metrics: StepMetrics,
        *,
        first_pass: bool,
    ) -> None:
        """One optimizer step. Weights, optimizer and scheduler stay untouched if it is empty or not finite."""
        optimizer = cast("torch.optim.Optimizer", self.optimizers())
        reduce = self._reduce if self.trainer.world_size > 1 else None
        plan: StepPlan = self.objective.plan(
            experience.select(rows), advantages[rows], self.objective_state, reduce=reduce, pass_index=pass_index
        )
        if plan.empty:
            self.empty_steps += 1
            return
        optimizer.zero_grad()
        wants_entropy = "entropy" in self.objective.loss_requires()
        loss = torch.zeros((), dtype=torch.float64)
        active = plan.active.cpu()
        # Completions that the objective multiplies by zero need no gradient, only their place in the metrics.
        parts = [(c, True) for c in self._micro_batches(batch, rows[active])]
        parts += [(c, False) for c in self._micro_batches(batch, rows[~active])]
        for chosen, learns in parts:
            with torch.set_grad_enabled(learns):
                stats = self._forward(batch, chosen, "grad" if wants_entropy else "detached")
                part = plan.select(_positions(rows, chosen).to(self.device))
                out: LossOutput = self.objective.loss(stats.logprobs, part, entropy=stats.entropy)
            if learns:
                self.manual_backward(out.loss * self.trainer.world_size)
                loss += out.loss.detach().double().cpu()
            metrics.update(out.metrics, out.maxima)
            if first_pass and stats.entropy is not None:
                tokens = sum(len(batch.completions[i].token_ids) for i in chosen.tolist())
                metrics.add("entropy", stats.entropy.detach().sum(), tokens)
        norm = self._clip(optimizer)
        step_loss = self._reduce(loss)
        metrics.sums.pop("loss", None)
        metrics.add("loss", step_loss)
        metrics.maximum("grad_norm", norm)
        if not (torch.isfinite(norm) and torch.isfinite(step_loss)):
            self._skip(optimizer)
            return
        self._skipped_in_a_row = 0
        optimizer.step()
        cast("torch.optim.lr_scheduler.LRScheduler", self.lr_schedulers()).step()
        self.optimizer_steps += 1

    def _skip(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self.max_skipped_steps:
            raise StopRun(
                f"{self._skipped_in_a_row} optimizer steps in a row were skipped: loss or gradient not finite"
            )

    def _clip(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Global gradient norm before clipping."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        norm = cast(Any, norm).full_tensor() if hasattr(norm, "full_tensor") else norm
        return norm.detach().double().cpu()

    # ---------------------------------------------------------------------------------------------- forward

    def _micro_batches(self, batch: Rollout, rows: Tensor) -> Iterator[Tensor]:
        """Completions in an order that saves tokens, cut into micro-batches. Any order and cut gives the same sum."""
        if not len(rows):
            return

        def size(i: int) -> tuple[int, int]:
            group = i // batch.group_size
            prompt = len(batch.prompts[group].token_ids)
            if self.policy_config.share_prompts:  # the samples of a prompt stay together
                return prompt, group
            return prompt + len(batch.completions[i].token_ids), i

        yield from torch.tensor(sorted(rows.tolist(), key=size)).split(self.micro_batch_size)

    def _forward(self, batch: Rollout, rows: Tensor, entropy: EntropyMode) -> TokenStats:
        chosen = rows.tolist()
        build = share_prompts if self.policy_config.share_prompts else pad_rows
        inputs = build(
            [batch.prompts[i // batch.group_size].token_ids for i in chosen],
            [batch.completions[i].token_ids for i in chosen],
            width=max(len(c.token_ids) for c in batch.completions),
            device=self.device,
        )
        stats: TokenStats = self._policy(inputs, batch.temperature, entropy)
        return stats

    # ---------------------------------------------------------------------------------------------- evaluation

    def validation_step(self, batch: Rollout, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Rollout, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Rollout, batch_idx: int) -> list[dict[str, Any]]:
        """One record a completion: prompt id, question, completion, rewards."""
        return [
            {
                "id": batch.prompts[i // batch.group_size].id,
                "question": batch.prompts[i // batch.group_size].question,
                "completion": text,
                "finish_reason": batch.completions[i].finish_reason,
                "reward": float(batch.reward[i]),
                "rewards": {name: float(values[i]) for name, values in batch.rewards.items()},
            }
            for i, text in enumerate(batch.texts)
        ]

    def _evaluate(self, batch: Rollout, stage: str) -> None:
        metrics = StepMetrics()
        add_rollout_metrics(metrics, batch)
        for key in ("reward", "length", "truncated", *(f"reward/{name}" for name in batch.rewards)):
            total, count = metrics.sums[key]
            self.log(
                f"{stage}/{key}",
                float(total / count),
                batch_size=int(count),
                prog_bar=key == "reward",
                on_step=False,
                on_epoch=True,
                sync_dist=True,
            )

    # ---------------------------------------------------------------------------------------------- logging

    def _log(self, batch: Rollout, metrics: StepMetrics, staleness: int, seconds: float) -> None:
        many = self.trainer.world_size > 1
        values = metrics.compute(self._reduce if many else None, self._reduce_max if many else None)
        values |= diagnostics.derive(values) | batch.metrics
        values |= {
            "lr": cast("torch.optim.Optimizer", self.optimizers()).param_groups[0]["lr"],
            "optimizer_steps": float(self.optimizer_steps),
            "skipped_steps": float(self.skipped_steps),
            "empty_steps": float(self.empty_steps),
            "policy_version": float(self.policy_version),
            "staleness": float(staleness),
            "time/update": seconds,
        }
        busy = seconds + sum(batch.metrics.get(f"time/{part}", 0.0) for part in ("generate", "reward", "sync"))
        values["tokens_per_second"] = batch.metrics.get("tokens", 0.0) / busy if busy > 0 else 0.0
        self.step_metrics = dict(values)
        shown = {key: values.pop(key) for key in SHOWN_IN_PROGRESS_BAR if key in values}
        self.log_dict(shown, prog_bar=True, batch_size=1)
        self.log_dict(values, batch_size=1)

    def _reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks."""
        return cast(Tensor, self.trainer.strategy.reduce(tensor.to(self.device), reduce_op="sum")).to(tensor.device)

    def _reduce_max(self, tensor: Tensor) -> Tensor:
        return cast(Tensor, self.trainer.strategy.reduce(tensor.to(self.device), reduce_op="max")).to(tensor.device)

    # ---------------------------------------------------------------------------------------------- state

    @property
    def _seed(self) -> int:
        return rng.run_seed()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights for an engine: (transformers name, full tensor), one at a time."""
        return self._policy.named_weights()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lit_grpo"] = {
            "policy_version": self.policy_version,
            "optimizer_steps": self.optimizer_steps,
            "skipped_steps": self.skipped_steps,
            "empty_steps": self.empty_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
            "objective": self.objective_state,
            "rng": rng.get_state(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["lit_grpo"]
        self.policy_version = state["policy_version"]
        self.optimizer_steps = state["optimizer_steps"]
        self.skipped_steps = state["skipped_steps"]
        self.empty_steps = state["empty_steps"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        self.objective_state = state["objective"]
        self._restored_rng = state["rng"]

    def on_train_start(self) -> None:
        # Not earlier: making the loaders' iterators draws random numbers.
        if self._restored_rng is not None:
            rng.set_state(self._restored_rng)
            self._restored_rng = None


def make_experience(batch: Rollout, device: torch.device | str) -> Experience:
    """The tensors of a rollout that the objective looks at. Masks come from lengths, never from ids."""
    lengths = [len(c.token_ids) for c in batch.completions]
    count, width = len(lengths), max(lengths, default=0)
    ids = torch.tensor([[*c.token_ids, *([0] * (width - len(c.token_ids)))] for c in batch.completions])
    unknown = [float("nan")] * width
    sampled = torch.tensor([[*c.logprobs, *unknown[len(c.logprobs) :]] for c in batch.completions])
    return Experience(
        lengths=torch.tensor(lengths),
        group_ids=torch.arange(count) // batch.group_size,
        rewards=batch.reward.float(),
        truncated=torch.tensor([c.truncated for c in batch.completions]),
        width=width,
        token_ids=ids.view(count, width).long(),
        sampler_logprobs=sampled.view(count, width).float(),
        prompt_ids=[batch.prompts[i // batch.group_size].id for i in range(count)],
    ).to(device)


def _gather_rows(parts: list[tuple[Tensor, Tensor]], experience: Experience) -> Tensor:
    """[N, T] in the rollout's order from micro-batches of rows."""
    out = parts[0][1].new_zeros(len(experience.lengths), experience.width)
    for rows, values in parts:
        out[rows] = values
    return out


def _positions(rows: Tensor, chosen: Tensor) -> Tensor:
    """Where each of ``chosen`` stands in ``rows``."""
    order = rows.argsort()
    return order[torch.searchsorted(rows[order], chosen)]


def _typed(cls: type, value: Any) -> Any:
    """A dataclass from itself or from its plain form in a checkpoint."""
    if is_dataclass(value):
        return value
    from lit_grpo.plain import from_plain

    return from_plain(cls, value)
