"""What goes wrong in the runs of the benchmark.

It is done from outside, by wrapping the engine, the reward or methods of the module, as a bug elsewhere would do it. No
monitor knows of it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch

from lit_grpo.engines.base import NamedWeights, RolloutEngine
from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.policy.forward.batching import PolicyInput
from lit_grpo.rewards.base import Reward
from lit_grpo.types import Completion, Experience, Request, RewardInput, Rollout, Sampling, Score
from lit_grpo.utils.random import derive_seed


class Sabotage:
    """Base that leaves a run as it is. Each kind overrides the methods where it interferes.

    Args:
        start: rollouts trained on before it begins.
    """

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def engine(self, engine: RolloutEngine) -> RolloutEngine:
        return engine

    def rewards(self, rewards: list[Reward], seed: int) -> list[Reward]:
        return rewards

    def around_fit(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def callbacks(self, seed: int) -> list[pl.Callback]:
        return []


# --------------------------------------------------------------------------------------------------- the engine


class Engine:
    """Engine that passes everything on to another."""

    def __init__(self, inner: RolloutEngine) -> None:
        self.inner = inner

    @property
    def policy_version(self) -> int:
        return self.inner.policy_version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        return self.inner.generate(requests, sampling)

    def sync(self, weights: NamedWeights, version: int) -> None:
        self.inner.sync(weights, version)

    def close(self) -> None:
        self.inner.close()


class StaleEngine(Engine):
    """Engine that takes the learner's weights only every ``every`` rollouts, and says that it always does."""

    def __init__(self, inner: TransformersEngine, every: int) -> None:
        super().__init__(TransformersEngine(copy.deepcopy(inner.model), inner.end_token_ids, inner.batch_size))
        self.every = every

    def sync(self, weights: NamedWeights, version: int) -> None:
        if version % self.every == 0:
            assert isinstance(self.inner, TransformersEngine)
            own = dict(self.inner.model.named_parameters())
            with torch.no_grad():
                for name, tensor in weights:
                    own[name].copy_(tensor)
        self.inner.sync(iter(()), version)


class SkippedSyncs(Engine):
    """Engine with weights of its own, of any kind, that takes new ones only every ``every`` rollouts, and denies it."""

    def __init__(self, inner: RolloutEngine, every: int) -> None:
        super().__init__(inner)
        self.every = every
        self.claimed = inner.policy_version

    @property
    def policy_version(self) -> int:
        return self.claimed

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        claimed = self.claimed
        for completion in self.inner.generate(requests, sampling):
            yield replace(completion, policy_version=claimed)

    def sync(self, weights: NamedWeights, version: int) -> None:
        if version % self.every == 0:
            self.inner.sync(weights, version)
        else:
            # Read to the end all the same, since sharded weights are gathered on the way.
            for _ in weights:
                pass
        self.claimed = version


class HotEngine(Engine):
    """Engine that samples at another temperature than it is asked to."""

    def __init__(self, inner: RolloutEngine, temperature: float) -> None:
        super().__init__(inner)
        self.temperature = temperature

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        return self.inner.generate(requests, replace(sampling, temperature=self.temperature))


class StaleWeights(Sabotage):
    """Weights of the engine that are up to ``every`` rollouts old."""

    def __init__(self, every: int) -> None:
        # The first rollout has the right weights.
        super().__init__(start=1)
        self.every = every

    def engine(self, engine: RolloutEngine) -> RolloutEngine:
        # This one samples with the learner's own weights, so it needs a copy to be stale.
        if isinstance(engine, TransformersEngine):
            return StaleEngine(engine, self.every)
        return SkippedSyncs(engine, self.every)


class OneSidedTemperature(Sabotage):
    """Sampling at a temperature that the learner does not know of."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def engine(self, engine: RolloutEngine) -> RolloutEngine:
        return HotEngine(engine, self.temperature)


# --------------------------------------------------------------------------------------------------- the reward


class WrappedReward(Reward):
    """Reward with the name and weight of another, whose scores it changes."""

    def __init__(self, inner: Reward, change: Callable[[RewardInput, float], float]) -> None:
        super().__init__(inner.weight, inner.name)
        self.inner, self.change, self.needs_answer = inner, change, inner.needs_answer

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        plain = [score[0] if isinstance(score, tuple) else score for score in self.inner.score(batch)]
        if None in plain:
            raise ValueError(f"{self.name} leaves completions out, and what is changed here are scores")
        return [Score(self.change(item, float(value or 0.0))) for item, value in zip(batch, plain, strict=True)]


class RewardNoise(Sabotage):
    """Wrong labels for a share of the completions; with ``coin`` these labels are coin tosses instead."""

    def __init__(self, share: float, coin: bool = False) -> None:
        super().__init__()
        self.share, self.coin = share, coin

    def rewards(self, rewards: list[Reward], seed: int) -> list[Reward]:
        judged: dict[tuple[str, int, int], int] = {}

        def change(item: RewardInput, value: float) -> float:
            # Not drawn from the text, so that equal completions are judged differently, as a broken verifier does, and
            # a completion that is judged again too.
            completion = item.completion
            key = (item.prompt.id, completion.policy_version, completion.sample)
            judged[key] = judged.get(key, 0) + 1
            times = () if judged[key] == 1 else (judged[key],)
            draw = derive_seed("noise", seed, *key, *times) / 2**63
            if self.coin:
                return float(draw < self.share / 2) if draw < self.share else value
            return 1.0 - value if draw < self.share else value

        return [WrappedReward(rewards[0], change), *rewards[1:]]


class BriefReward(Reward):
    """Reward for a completion that begins with the answer, right or not."""

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [Score(float(item.text.startswith(":"))) for item in batch]


class HackableFormat(Sabotage):
    """Second reward for a format in which this policy gets fewer sums right, paid for wrong answers too."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def rewards(self, rewards: list[Reward], seed: int) -> list[Reward]:
        return [*rewards, BriefReward(self.weight, "format")]


class PatternReward(Reward):
    """Reward for a completion that matches a pattern from its start, right or not."""

    correct_threshold = None

    def __init__(self, pattern: str, weight: float, name: str) -> None:
        super().__init__(weight, name)
        self.pattern = re.compile(pattern, re.DOTALL)

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [Score(float(self.pattern.match(item.text) is not None)) for item in batch]


class PaidForm(Sabotage):
    """Second reward for a form in which the policy gets less right, paid for wrong answers too."""

    def __init__(self, pattern: str, weight: float) -> None:
        super().__init__()
        self.pattern, self.weight = pattern, weight

    def rewards(self, rewards: list[Reward], seed: int) -> list[Reward]:
        return [*rewards, PatternReward(self.pattern, self.weight, "style")]


class BrevityReward(Reward):
    """Reward that falls from 1 for no token to 0 at ``limit`` tokens."""

    correct_threshold = None
    range = (0.0, 1.0)

    def __init__(self, limit: int, weight: float) -> None:
        super().__init__(weight, "brevity")
        self.limit = limit

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [Score(max(0.0, 1.0 - len(item.completion.token_ids) / self.limit)) for item in batch]


class PaidBrevity(Sabotage):
    """Second reward for short completions, which leave no room to work the answer out."""

    def __init__(self, limit: int, weight: float) -> None:
        super().__init__()
        self.limit, self.weight = limit, weight

    def rewards(self, rewards: list[Reward], seed: int) -> list[Reward]:
        return [*rewards, BrevityReward(self.limit, self.weight)]


class ConstantReward(Sabotage):
    """The same value from every reward, as questions give that nobody can answer (0) or that all are solved (1)."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def rewards(self, rewards: list[Reward], seed: int) -> list[Reward]:
        return [WrappedReward(reward, lambda item, value: self.value) for reward in rewards]


class PaidLength(Sabotage):
    """Reward that grows with length."""

    def __init__(self, per_token: float) -> None:
        super().__init__()
        self.per_token = per_token

    def rewards(self, rewards: list[Reward], seed: int) -> list[Reward]:
        def change(item: RewardInput, value: float) -> float:
            return value + self.per_token * len(item.completion.token_ids)

        return [WrappedReward(rewards[0], change), *rewards[1:]]


# --------------------------------------------------------------------------------------------------- the learner


class ChangedExperience(Sabotage):
    """Change of what the objective sees of a rollout."""

    def change(self, batch: Rollout, experience: Experience) -> Experience:
        raise NotImplementedError

    def around_fit(self) -> AbstractContextManager[Any]:
        from lit_grpo import module
        from lit_grpo.learner.batch import make_experience

        def changed(batch: Rollout, device: Any) -> Experience:
            return self.change(batch, make_experience(batch, device))

        return mock.patch.object(module, "make_experience", changed)


class DroppedEos(ChangedExperience):
    """End tokens that count as padding and have no loss."""

    def change(self, batch: Rollout, experience: Experience) -> Experience:
        return replace(experience, lengths=experience.lengths - (~experience.truncated).long())


class ShuffledGroups(ChangedExperience):
    """Group ids dealt out at random, so that groups mix prompts."""

    def change(self, batch: Rollout, experience: Experience) -> Experience:
        generator = torch.Generator().manual_seed(batch.index)
        order = torch.randperm(len(experience.group_ids), generator=generator)
        return replace(experience, group_ids=experience.group_ids[order])


class InvertedAdvantages(Sabotage):
    """Advantages with the wrong sign."""

    def around_fit(self) -> AbstractContextManager[Any]:
        from lit_grpo.objectives.objective import Objective

        advantages = Objective.advantages

        def inverted(*args: Any, **kwargs: Any) -> Any:
            values, state = advantages(*args, **kwargs)
            return -values, state

        return mock.patch.object(Objective, "advantages", inverted)


class AtTrainStart(pl.Callback):
    """Callback that changes the module once its own checks are done."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.change(pl_module)


class ShiftedLogprobs(Sabotage):
    """Log-probabilities that the learner takes from the position after the right one. It needs padded rows."""

    def callbacks(self, seed: int) -> list[pl.Callback]:
        def change(module: Any) -> None:
            forward = module.policy.forward

            def shifted(batch: PolicyInput, *args: Any, **kwargs: Any) -> Any:
                last = batch.input_ids.numel() - 1
                return forward(replace(batch, source=(batch.source + 1).clamp(max=last)), *args, **kwargs)

            module.policy.forward = shifted

        return [AtTrainStart(change)]


class BadValues(Sabotage):
    """Noise of this standard deviation on top of the values that the critic learns."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def callbacks(self, seed: int) -> list[pl.Callback]:
        generator = torch.Generator().manual_seed(seed)

        def change(module: Any) -> None:
            forward = module.critic.forward

            def noisy(batch: PolicyInput) -> torch.Tensor:
                values = forward(batch)
                noise = (self.noise * torch.randn(values.shape, generator=generator)).to(values)
                # Where there is no token the value is 0 and stays 0.
                return values + batch.scatter(noise[batch.row, batch.column])

            module.critic.forward = noisy

        return [AtTrainStart(change)]


class NanGradient(pl.Callback):
    """Callback that puts a NaN into one gradient in each of ``count`` rollouts."""

    def __init__(self, start: int, count: int) -> None:
        self.active = range(start, start + count)
        self.now = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        weight = next(pl_module.policy.parameters())
        weight.register_hook(lambda gradient: gradient * float("nan") if self.now else gradient)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Rollout, batch_idx: int) -> None:
        self.now = batch.index in self.active


class InjectedNan(Sabotage):
    """Gradient that is NaN for ``count`` rollouts."""

    def __init__(self, start: int, count: int) -> None:
        super().__init__(start)
        self.count = count

    def callbacks(self, seed: int) -> list[pl.Callback]:
        return [NanGradient(self.start, self.count)]


class NanLogprobGradient(Sabotage):
    """Gradient of the log-probabilities that is NaN for ``count`` rollouts; it works for sharded weights too."""

    def __init__(self, start: int, count: int) -> None:
        super().__init__(start)
        self.active = range(start, start + count)

    def callbacks(self, seed: int) -> list[pl.Callback]:
        def change(module: Any) -> None:
            forward = module.policy.forward

            def spoiled(*args: Any, **kwargs: Any) -> Any:
                out = forward(*args, **kwargs)
                if module.policy_version in self.active and out.logprobs.requires_grad:
                    out.logprobs.register_hook(lambda gradient: gradient * float("nan"))
                return out

            module.policy.forward = spoiled

        return [AtTrainStart(change)]
