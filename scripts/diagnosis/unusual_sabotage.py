"""What is unusual or wrong in the runs of :mod:`scripts.diagnosis.unusual_cases`, done from outside."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch

from lit_grpo.data import PromptSource, Row
from lit_grpo.engines.base import NamedWeights, RolloutEngine
from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.rewards.base import Reward
from lit_grpo.rollout.prompt_order import PromptOrder
from lit_grpo.types import Completion, Request, RewardInput, Sampling, Score
from lit_grpo.utils.random import derive_seed
from scripts.diagnosis.sabotage import AtTrainStart, Engine, Sabotage, WrappedReward

Change = Callable[[RewardInput, float], float]


class Together(Sabotage):
    """Several changes at once."""

    def __init__(self, *parts: Sabotage) -> None:
        super().__init__(max((part.start for part in parts), default=0))
        self.parts = parts

    def engine(self, engine: RolloutEngine) -> RolloutEngine:
        for part in self.parts:
            engine = part.engine(engine)
        return engine

    def rewards(self, rewards: list[Reward], seed: int) -> list[Reward]:
        for part in self.parts:
            rewards = part.rewards(rewards, seed)
        return rewards

    def callbacks(self, seed: int) -> list[pl.Callback]:
        return [callback for part in self.parts for callback in part.callbacks(seed)]


# --------------------------------------------------------------------------------------------------- rewards


class ChangedReward(Sabotage):
    """First reward whose values are changed, from the rollout ``start`` on.

    Args:
        change: new value, by completion and old value.
        start: rollouts trained on before it begins.
        threshold: value from which on a completion is correct; None: no reward says so. ``...``: as it was.
        values: least and greatest value; None: as it was.
    """

    def __init__(
        self, change: Change, start: int = 0, threshold: Any = ..., values: tuple[float, float] | None = None
    ) -> None:
        super().__init__(start)
        self.change, self.threshold, self.values = change, threshold, values

    def rewards(self, rewards: list[Reward], seed: int) -> list[Reward]:
        def change(item: RewardInput, value: float) -> float:
            return self.change(item, value) if item.completion.policy_version >= self.start else value

        changed = WrappedReward(rewards[0], change)
        changed.range = self.values or rewards[0].range
        changed.correct_threshold = rewards[0].correct_threshold if self.threshold is ... else self.threshold
        return [changed, *rewards[1:]]


class AddedReward(Sabotage):
    """Further reward, given as a function of text and number of tokens."""

    def __init__(self, value: Callable[[str, int], float], weight: float, name: str) -> None:
        super().__init__()
        self.value, self.weight, self.name = value, weight, name

    def rewards(self, rewards: list[Reward], seed: int) -> list[Reward]:
        return [*rewards, _TextReward(self.value, self.weight, self.name)]


class _TextReward(Reward):
    correct_threshold = None

    def __init__(self, value: Callable[[str, int], float], weight: float, name: str) -> None:
        super().__init__(weight, name)
        self.value = value

    def score(self, batch: Sequence[RewardInput]) -> list[Score]:
        return [Score(self.value(item.text, len(item.completion.token_ids))) for item in batch]


def share_of(item: RewardInput, salt: str) -> float:
    """Draw a number from 0 to 1 that depends on the prompt alone."""
    return derive_seed(salt, item.prompt.id) / 2**63


def of_text(item: RewardInput, salt: str) -> float:
    """Draw a number from 0 to 1 that depends on prompt and text."""
    return derive_seed(salt, item.prompt.id, item.text) / 2**63


def distance(item: RewardInput, value: float) -> float:
    """Score a sum by how near it is: 1 where it is right, 0 where it is 60 away or there is none."""
    found = re.search(r":(\d+)$", item.text)
    if found is None or item.prompt.answer is None:
        return 0.0
    return max(0.0, 1 - abs(int(found[1][:6]) - int(item.prompt.answer)) / 60)


# --------------------------------------------------------------------------------------------------- prompts


class WrongAnswers(PromptSource):
    """Questions of another source whose answers are dealt out anew."""

    def __init__(self, inner: PromptSource) -> None:
        self.inner, self.name = inner, inner.name

    def rows(self) -> Sequence[Row]:
        rows = self.inner.rows()
        return [replace(row, answer=rows[(k * 7 + 3) % len(rows)].answer) for k, row in enumerate(rows)]


class Named(PromptSource):
    """Source under another name."""

    def __init__(self, inner: PromptSource, name: str) -> None:
        self.inner, self.name = inner, name

    def rows(self) -> Sequence[Row]:
        return [replace(row, id=f"{self.name}/{k}", source="") for k, row in enumerate(self.inner.rows())]


class Staged(Sabotage):
    """Prompts that come in the order of two halves: the first half of the rows early, the second late.

    Args:
        hard: share of the second half by rollout.
        prompts: prompts of a rollout.
    """

    def __init__(self, hard: Callable[[int], float], prompts: int = 16) -> None:
        super().__init__()
        self.hard, self.prompts = hard, prompts

    def around_fit(self) -> AbstractContextManager[Any]:
        def staged(order: PromptOrder, position: int) -> int:
            draw = derive_seed("half", order.seed, position) / 2**63
            late = draw < self.hard(position // self.prompts)
            half = order.count // 2
            return half * late + derive_seed("row", order.seed, position) % half

        return mock.patch.object(PromptOrder, "__getitem__", staged)


# --------------------------------------------------------------------------------------------------- the engine


class ChangedSampling(Engine):
    """Engine that changes what it is asked for, or what it returns."""

    def __init__(
        self,
        inner: RolloutEngine,
        sampling: Callable[[Sampling], Sampling] = lambda sampling: sampling,
        request: Callable[[Request], Request] = lambda request: request,
        completions: Callable[[list[Completion]], list[Completion]] | None = None,
    ) -> None:
        super().__init__(inner)
        self.sampling, self.request, self.completions = sampling, request, completions

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        found = self.inner.generate([self.request(request) for request in requests], self.sampling(sampling))
        yield from found if self.completions is None else self.completions(list(found))


class OtherSampling(Sabotage):
    """Engine that samples otherwise than the learner believes; arguments are those of :class:`ChangedSampling`."""

    def __init__(self, start: int = 0, **changes: Any) -> None:
        super().__init__(start)
        self.changes = changes

    def engine(self, engine: RolloutEngine) -> RolloutEngine:
        return ChangedSampling(engine, **self.changes)


def swapped(completions: list[Completion]) -> list[Completion]:
    """Give every prompt the completions of the next one."""
    requests = sorted({completion.request for completion in completions})
    following = {request: requests[(k + 1) % len(requests)] for k, request in enumerate(requests)}
    return [replace(completion, request=following[completion.request]) for completion in completions]


class NoEnd(Sabotage):
    """Engine that does not know the model's end token."""

    def engine(self, engine: RolloutEngine) -> RolloutEngine:
        assert isinstance(engine, TransformersEngine)
        return TransformersEngine(engine.model, (), engine.batch_size, tokenizer=engine.tokenizer)


class StaleLayer(Sabotage):
    """Engine that gets new weights of all layers but one."""

    def __init__(self, layer: str = "layers.1.") -> None:
        super().__init__(start=1)
        self.layer = layer

    def engine(self, engine: RolloutEngine) -> RolloutEngine:
        return _StaleLayerEngine(engine, self.layer)


class _StaleLayerEngine(Engine):
    def __init__(self, inner: RolloutEngine, layer: str) -> None:
        assert isinstance(inner, TransformersEngine)
        super().__init__(TransformersEngine(copy.deepcopy(inner.model), inner.end_token_ids, inner.batch_size))
        self.layer = layer

    def sync(self, weights: NamedWeights, version: int) -> None:
        assert isinstance(self.inner, TransformersEngine)
        own = dict(self.inner.model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                if self.layer not in name:
                    own[name].copy_(tensor)
        self.inner.sync(iter(()), version)


# --------------------------------------------------------------------------------------------------- the learner


class NoGradients(Sabotage):
    """Weights whose gradients are 0, as where nothing that is trained reaches the loss."""

    def callbacks(self, seed: int) -> list[pl.Callback]:
        def change(module: Any) -> None:
            for weight in module.policy.parameters():
                if weight.requires_grad:
                    weight.register_hook(torch.zeros_like)

        return [AtTrainStart(change)]


class EachRollout(pl.Callback):
    """Callback that changes the module before each rollout."""

    def __init__(self, change: Callable[[pl.Trainer, Any, int], None]) -> None:
        self.change = change

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.change(trainer, pl_module, batch_idx)


class ChangedEachRollout(Sabotage):
    """Change of the module before each rollout."""

    def __init__(self, change: Callable[[pl.Trainer, Any, int], None], start: int = 0) -> None:
        super().__init__(start)
        self.change = change

    def callbacks(self, seed: int) -> list[pl.Callback]:
        return [EachRollout(self.change)]


def rate_times(factor: float, rollouts: range) -> Callable[[pl.Trainer, Any, int], None]:
    """Multiply the rate in some rollouts, as a schedule with a fault does."""

    def change(trainer: pl.Trainer, module: Any, index: int) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                if index == rollouts.start:
                    group["usual_lr"] = group["lr"]
                if index in rollouts:
                    group["lr"] = factor * group["usual_lr"]
                elif index == rollouts.stop:
                    group["lr"] = group["usual_lr"]

    return change


def growing_bonus(per_rollout: float) -> Callable[[pl.Trainer, Any, int], None]:
    """Raise the coefficient of the entropy bonus with each rollout."""

    def change(trainer: pl.Trainer, module: Any, index: int) -> None:
        if index:
            module.change_objective({"entropy_coef": per_rollout * index})

    return change
