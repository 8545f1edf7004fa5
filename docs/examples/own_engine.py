"""A rollout engine of your own, by class path: whatever can sample and say the log-probability of what it drew.

    python docs/examples/own_engine.py

In a configuration it is ``data.engine: {custom_engine: own_engine.PlainEngine}``. A run compares the log-probabilities
that an engine gives with the learner's, so one that is wrong is found in the first rollout.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from lit_grpo import LitGRPO, RolloutDataModule
from lit_grpo.data import AdditionPrompts
from lit_grpo.engines import EngineConfig
from lit_grpo.engines.base import EngineContext, NamedWeights
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.rewards import ExactMatch
from lit_grpo.types import Completion, Request, Sampling


class PlainEngine:
    """Samples one completion after the other from a copy of the policy, without a cache."""

    def __init__(self, model: Any, end_token_ids: Sequence[int]) -> None:
        self.model, self.end, self.policy_version = model, set(end_token_ids), -1

    @classmethod
    def from_context(cls, context: EngineContext) -> "PlainEngine":
        return cls(context.policy.without_adapters(), context.end_token_ids)

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        for request in requests:
            for number, seed in enumerate(request.seeds):
                generator, ids, drawn = torch.Generator().manual_seed(seed), list(request.token_ids), []
                while len(drawn) < sampling.max_new_tokens and (not drawn or drawn[-1][0] not in self.end):
                    logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
                    logprobs = (logits / sampling.temperature).log_softmax(-1)
                    token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
                    drawn.append((token, float(logprobs[token])))
                    ids.append(token)
                reason = "stop" if drawn[-1][0] in self.end else "length"
                tokens, chances = zip(*drawn, strict=True)
                yield Completion(request.index, number, tokens, chances, reason, self.policy_version)

    def sync(self, weights: NamedWeights, version: int) -> None:
        self.model.load_state_dict(dict(weights), strict=False)
        self.policy_version = version

    def close(self) -> None:
        self.model = None


def main(rollouts: int = 2) -> LitGRPO:
    """Train for some rollouts with it."""
    engine = EngineConfig(custom_engine=f"{__name__}.PlainEngine")
    length = {"rollouts": rollouts, "prompts_per_rollout": 4, "group_size": 4, "sampling": Sampling(max_new_tokens=3)}
    data = RolloutDataModule(AdditionPrompts(digits=1), [ExactMatch()], engine=engine, **length)
    module = LitGRPO(policy=PolicyConfig(tiny=TinyModel()))
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(module, datamodule=data)
    print(f"log-probabilities differ by {module.step_metrics['sampler_mismatch/logprob_abs_diff']:.1e} nats")
    return module


if __name__ == "__main__":
    main()
