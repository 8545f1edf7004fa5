"""What all settings share: how a case becomes a module, its data and a trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo import LitGRPO
from lit_grpo.data import PromptFormat, PromptSource
from lit_grpo.engines import EngineConfig
from lit_grpo.evaluation.sets import EvaluationSet
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import OptimizerConfig, PolicyConfig
from lit_grpo.policy.config import CriticConfig, LoraConfig
from lit_grpo.rewards import Reward
from lit_grpo.types import Rollout, Sampling
from scripts.diagnosis.sabotage import Sabotage
from scripts.diagnosis.training import NO_GUARDS, SabotagedData

if TYPE_CHECKING:
    from scripts.diagnosis.second_cases import SecondCase


@dataclass(frozen=True)
class Setting:
    """A model and a task. A subclass fills in the values and says what the methods return.

    Attributes:
        name: of the setting.
        lr: learning rate at which ``grpo`` with one update learns well.
        prompts: prompts of each rollout.
        group_size: completions of each prompt.
        max_new_tokens: longest completion.
        rollouts: length of a run.
        jobs: runs that one machine takes side by side, on the device that the setting is for.
        evaluate_every: rollouts from one evaluation to the next; 0: none.
    """

    name: str = ""
    lr: float = 0.0
    prompts: int = 16
    group_size: int = 8
    max_new_tokens: int = 24
    rollouts: int = 60
    jobs: int = 1
    evaluate_every: int = 0

    # What differs from setting to setting.

    def prepare(self, models: Path) -> None:
        """Make what runs begin from, unless it is there."""

    def policy(self, models: Path) -> PolicyConfig:
        """Return the policy that runs begin with."""
        raise NotImplementedError

    def source(self, held_out: bool = False) -> PromptSource:
        """Return the training questions, or those that are held out."""
        raise NotImplementedError

    def rewards(self) -> list[Reward]:
        """Return the rewards of an undisturbed run, the one that says what is right first."""
        raise NotImplementedError

    def right(self, text: str, answer: str, extra: dict[str, Any], truncated: bool) -> bool:
        """Say whether a completion has the right answer, whatever the rewards of the run say."""
        raise NotImplementedError

    def engine(self) -> EngineConfig:
        return EngineConfig(name="transformers", batch_size=512)

    def format(self) -> PromptFormat:
        return PromptFormat()

    def trainer(self) -> dict[str, Any]:
        """Return arguments of the Trainer."""
        return {"accelerator": "cpu"}

    def module(self) -> dict[str, Any]:
        """Return further arguments of the module."""
        return {"micro_batch_size": self.prompts * self.group_size}

    def critic(self) -> CriticConfig | None:
        """Return the critic of runs with one; None: the default."""
        return None

    # What is the same everywhere.

    def correct_share(self, batch: Rollout) -> float:
        """Compute the share of completions with the right answer."""
        found = 0
        for i, (text, completion) in enumerate(zip(batch.texts, batch.completions, strict=True)):
            prompt = batch.prompts[i // batch.group_size]
            found += self.right(text, prompt.answer or "", dict(prompt.extra), completion.truncated)
        return found / max(1, len(batch.texts))

    def build(
        self, case: SecondCase, sabotage: Sabotage, models: Path, seed: int, rollouts: int
    ) -> tuple[LitGRPO, SabotagedData]:
        """Make the module and the data of a run."""
        arguments = self.module() | case.module
        if "ppo" in case.recipe and (critic := self.critic()) is not None:
            arguments["critic"] = critic
        policy = self.policy(models)
        if case.lora:
            policy = replace(policy, lora=LoraConfig(rank=16, alpha=32.0))
        module = LitGRPO(
            policy=policy,
            objective=ObjectiveConfig(recipe=case.recipe, **case.objective),  # type: ignore[arg-type]
            optimizer=OptimizerConfig(lr=case.lr, warmup_steps=case.warmup_steps),
            guards=NO_GUARDS,
            # A run of which every step is left out is still to be seen to its end.
            max_skipped_steps=10_000,
            **arguments,
        )
        limit = case.max_new_tokens or self.max_new_tokens
        val = {"held_out": EvaluationSet(prompts=self.source(held_out=True), samples=1, sampling=Sampling(
            max_new_tokens=limit))} if self.evaluate_every else {}  # fmt: skip
        data = SabotagedData(
            sabotage,
            prompts=self.source(),
            rewards=sabotage.rewards(self.rewards(), seed),
            group_size=self.group_size,
            prompts_per_rollout=self.prompts,
            rollouts=rollouts,
            sampling=Sampling(max_new_tokens=limit),
            engine=self.engine(),
            format=self.format(),
            val=val,
        )
        return module, data
