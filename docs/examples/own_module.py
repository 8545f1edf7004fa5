"""RolloutDataModule with a LightningModule of your own: only the learning is not lit-grpo's.

    python docs/examples/own_module.py

This one learns by REINFORCE with the batch's mean as baseline. It keeps one optimizer and lets Lightning step it.
"""

from typing import Any

import lightning.pytorch as pl
import torch

from lit_grpo import RolloutDataModule
from lit_grpo.context import LearnerRequirements, RunContext
from lit_grpo.data import AdditionPrompts
from lit_grpo.policy import Policy, PolicyConfig, TinyModel
from lit_grpo.policy.model.load import load_model, load_tokenizer
from lit_grpo.rewards import ExactMatch
from lit_grpo.types import Rollout, Sampling


class Reinforce(pl.LightningModule):
    """What RolloutDataModule asks of a learner: ``lit_grpo.context.RolloutLearner``."""

    def __init__(self) -> None:
        super().__init__()
        self.policy_config = PolicyConfig(tiny=TinyModel())
        self.tokenizer = load_tokenizer(self.policy_config)
        self.policy = Policy(load_model(self.policy_config))
        self.policy_version = 0

    def requirements(self) -> LearnerRequirements:
        return LearnerRequirements()

    def connect(self, context: RunContext) -> None:
        print(f"{context.rollouts} rollouts of {context.prompts_per_rollout} x {context.group_size}")

    def named_weights(self) -> Any:
        return self.policy.named_weights()

    def training_step(self, batch: Rollout, batch_idx: int) -> torch.Tensor:
        advantages, losses = batch.reward - batch.reward.mean(), []
        for completion, advantage in zip(batch.completions, advantages, strict=True):
            prompt = batch.prompts[completion.request].token_ids
            ids = torch.tensor([[*prompt, *completion.token_ids]], device=self.device)
            logits = self.policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            losses.append(-advantage * logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).sum())
        self.log("reward", batch.reward.mean(), prog_bar=True)
        return torch.stack(losses).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        # The engine brings the weights of this version before it samples the next rollout.
        self.policy_version += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(rollouts: int = 10) -> Reinforce:
    """Train for some rollouts."""
    module = Reinforce()
    length = {"rollouts": rollouts, "prompts_per_rollout": 4, "group_size": 4, "sampling": Sampling(max_new_tokens=3)}
    data = RolloutDataModule(AdditionPrompts(digits=1), [ExactMatch()], **length)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(module, datamodule=data)
    return module


if __name__ == "__main__":
    main()
