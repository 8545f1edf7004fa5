"""The preflight as a callback of a fit of one rollout, so that model, engine and step are those of the real run."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_grpo.commands.check import cost, engines, prompts, rollout
from lit_grpo.commands.check.result import Result
from lit_grpo.data.doubts import doubts_of
from lit_grpo.engines import make_engine
from lit_grpo.engines.base import weights_for
from lit_grpo.policy.config import PolicyConfig
from lit_grpo.policy.model.load import end_token_ids, load_model_config
from lit_grpo.types import Rollout

log = logging.getLogger(__name__)


class Preflight(Callback):
    """Callback that checks prompts and verifier, samples from the untouched model, and measures one training step.

    Nothing is written: no checkpoint, no run folder, no MLflow run.

    Args:
        prompts: number of training prompts to sample, ``data.group_size`` completions each.
        step: True to train on one rollout and measure it.
        gold_format: form in which the verifier wants an answer, with ``{answer}`` in it.

    Attributes:
        results: one line of the table for each check, in the order of the checks.
        activity: name of what is being done, for the message where it fails.
    """

    def __init__(self, prompts: int, step: bool = True, gold_format: str | None = None) -> None:
        self.prompts, self.step, self.gold_format = prompts, step, gold_format
        self.results: list[Result] = []
        self.activity = "setting up"
        self._longest = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module, data = cast(Any, pl_module), cast(Any, trainer).datamodule
        tokenizer = module.tokenizer
        ends = (*end_token_ids(module.policy_config, tokenizer), *data.sampling.stop_token_ids)
        encoded = data.train_prompts
        doubts = doubts_of(encoded, data.format, tokenizer, ends)
        self.results += [
            *prompts.columns(data.prompts.columns_taken(), doubts),
            prompts.template(encoded, data.format, tokenizer, doubts),
            prompts.special_tokens(encoded, tokenizer, ends, doubts),
        ]
        self._announce(trainer, "testing the verifier on the golds")
        self.results += prompts.verifier(encoded, data.rewards, tokenizer, self.gold_format)
        # Supervised fine-tuning samples nothing: there is neither signal nor engine to look at.
        if module.objective.demonstrations:
            trainer.should_stop = not self.step
            self._announce(trainer, "one training step")
            return
        count = min(self.prompts, len(encoded))
        self._announce(trainer, f"sampling {count} prompts x {data.group_size} from the untouched model")
        batch: Rollout = data.initial_completions(count)
        self._announce(trainer, "comparing with the learner")
        experience = module.measure_rollout(batch)
        self.results += [
            prompts.round_trip(encoded, batch, tokenizer, ends, data.sampling.stop),
            rollout.signal(batch, data.rewards),
            rollout.spread(batch, data.prompts_per_rollout),
            rollout.rewards(batch, data.rewards),
            rollout.initial_entropy(experience, self._vocabulary(module.policy_config)),
            rollout.truncation(batch, data.sampling.max_new_tokens, module.guards.max_truncated),
            rollout.mismatch(experience, module.guards.max_engine_gap),
            *([] if module.sync_result is None else [rollout.sync(module.sync_result)]),
            *([] if data.engine_start is None else [engines.start(data.engine_start)]),
        ]
        if not self.step or not any(c.token_ids for c in batch.completions):
            trainer.should_stop = True
            self._measure_engines(trainer, module, data)
            return
        self._announce(trainer, "one rollout and one training step")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._longest = max(len(c.token_ids) for c in batch.completions)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module, data = cast(Any, pl_module), cast(Any, trainer).datamodule
        limit = data.sampling.max_new_tokens
        logits = cost.logits_bytes(
            module.policy,
            limit,
            self._vocabulary(module.policy_config),
            micro_batch_tokens=module.micro_batch_tokens,
            micro_batch_size=module.micro_batch_size,
        )
        self.results += [
            cost.memory_result(
                cost.weight_bytes([module.policy, module.critic, module.reference_policy]),
                logits,
                cost.memory(pl_module.device),
                longest=self._longest,
                limit=limit,
                prompt=max(len(p.token_ids) for p in data.train_prompts),
                processes=trainer.world_size,
            ),
            cost.time_result(module.step_metrics, data.rollouts),
        ]
        # Last, since it takes the place of the engine that samples.
        if not module.objective.demonstrations:
            self._measure_engines(trainer, module, data)

    def _measure_engines(self, trainer: Trainer, module: Any, data: Any) -> None:
        """Measure with how many processes the engine samples fastest, where the configuration leaves it open."""
        if not engines.left_open(data.engine_config):
            return
        self._announce(trainer, f"sampling with {', '.join(map(str, engines.CANDIDATES))} engine processes")
        producer, context = data.producer, data.engine_context
        # Waits for a rollout that is being sampled beside the learner, too.
        producer.sync()
        count = max(1, min(len(data.train_prompts), data.prompts_per_rollout // trainer.world_size))
        asked = [
            producer.request(i, i, p, data.group_size, 0, "speed") for i, p in enumerate(data.train_prompts[:count])
        ]
        result = engines.measure(
            producer.engine,
            lambda processes: make_engine(replace(data.engine_config, processes=processes), context),
            lambda engine: engine.sync(weights_for(engine, module), module.policy_version),
            asked,
            data.sampling,
        )
        self.results.append(result)
        if trainer.is_global_zero and result.status == "pass":
            engines.keep(result, module.policy.model.config)

    def _announce(self, trainer: Trainer, activity: str) -> None:
        self.activity = activity
        log.debug("%s", activity)
        if trainer.is_global_zero:
            print(f"{activity} ...", file=sys.stderr, flush=True)

    @staticmethod
    def _vocabulary(config: PolicyConfig) -> int:
        return int(load_model_config(config).vocab_size)
