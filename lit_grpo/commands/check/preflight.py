"""The preflight itself: it rides on a fit of one rollout, so model, engine and step are those of the real run."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_grpo.commands.check import cost, prompts, rollout
from lit_grpo.commands.check.result import Result
from lit_grpo.learner.batch import make_experience
from lit_grpo.policy.model.load import end_token_ids, load_model_config
from lit_grpo.types import Experience, Rollout


class Preflight(Callback):
    """Looks at prompts and verifier, samples from the untouched model, and measures one training step.

    Nothing is written: no checkpoint, no run folder, no MLflow run.

    Args:
        prompts: training prompts to sample, ``data.group_size`` completions each.
        step: train on one rollout and measure it.
        gold_format: how the verifier wants an answer, with ``{answer}`` in it.
    """

    def __init__(self, prompts: int, step: bool = True, gold_format: str | None = None) -> None:
        self.prompts, self.step, self.gold_format = prompts, step, gold_format
        self.results: list[Result] = []
        self._longest = 0
        self.at = "setting up"
        """What is being done, for the message where it fails."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module, data = cast(Any, pl_module), cast(Any, trainer).datamodule
        tokenizer = module.tokenizer
        ends = (*end_token_ids(module.policy_config, tokenizer), *data.sampling.stop_token_ids)
        encoded = data.train_prompts
        self.results += [
            prompts.template(encoded, data.format, tokenizer),
            prompts.special_tokens(encoded, tokenizer, ends),
        ]
        self._say(trainer, "testing the verifier on the golds")
        self.results += prompts.verifier(encoded, data.rewards, tokenizer, self.gold_format)
        if module.objective.demonstrations:  # nothing is sampled: neither signal nor engine to look at
            trainer.should_stop = not self.step
            self._say(trainer, "one training step")
            return
        count = min(self.prompts, len(encoded))
        self._say(trainer, f"sampling {count} prompts x {data.group_size} from the untouched model")
        batch: Rollout = data.initial_completions(count)
        self._say(trainer, "comparing with the learner")
        experience = learner_view(module, batch)
        known = rollout.correct_by(data.rewards)
        self.results += [
            prompts.round_trip(encoded, batch, tokenizer, ends),
            rollout.signal(batch, known),
            rollout.spread(batch, known, data.prompts_per_rollout),
            rollout.rewards(batch, data.rewards),
            rollout.initial_entropy(experience, _vocabulary(module)),
            rollout.truncation(batch, data.sampling.max_new_tokens, module.guards.max_truncated),
            rollout.mismatch(experience, module.guards.max_engine_gap),
        ]
        if not self.step or not any(c.token_ids for c in batch.completions):
            trainer.should_stop = True
            return
        self._say(trainer, "one rollout and one training step")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._longest = max(len(c.token_ids) for c in batch.completions)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module, data = cast(Any, pl_module), cast(Any, trainer).datamodule
        self.results += [
            cost.memory_result(
                module,
                cost.memory(pl_module.device),
                longest=self._longest,
                limit=data.sampling.max_new_tokens,
                prompt=max(len(p.token_ids) for p in data.train_prompts),
                vocabulary=_vocabulary(module),
                cards=trainer.world_size,
            ),
            cost.time_result(module.step_metrics, data.rollouts),
        ]

    def _say(self, trainer: Trainer, what: str) -> None:
        self.at = what
        if trainer.is_global_zero:
            print(f"{what} ...", file=sys.stderr, flush=True)


@torch.no_grad()
def learner_view(module: Any, batch: Rollout) -> Experience:
    """The rollout with the learner's log-probabilities and entropies, on the CPU: the passes that training makes."""
    experience = make_experience(batch, module.device)
    results = module.forward_runner.old_forward(batch, experience, frozenset({"old_logprobs", "entropy"}))
    added: Experience = results.added_to(experience)
    return added.to("cpu")


def _vocabulary(module: Any) -> int:
    return int(load_model_config(module.policy_config).vocab_size)
