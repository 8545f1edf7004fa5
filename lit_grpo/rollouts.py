"""Make rollouts: ask the engine, score completions while others are still being sampled, put groups together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from lit_grpo.engines.base import NamedWeights, RolloutEngine
from lit_grpo.refill import Gather, OnShort, alone, refill
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.scoring import OnError, score_all
from lit_grpo.rng import derive_seed
from lit_grpo.types import Completion, Prompt, Request, RewardInput, Rollout, Sampling, Score

_SCORING_THREADS = 4


class PolicySource(Protocol):
    """Where the engine's weights come from: :class:`lit_grpo.LitGRPO`, or anything with these two."""

    policy_version: int

    def named_weights(self) -> NamedWeights: ...


class RolloutProducer:
    """Turns prompts into scored rollouts of whole groups.

    Args:
        engine: samples; its weights are brought up to date before every rollout.
        policy: where the weights come from.
        tokenizer: decodes each completion once, for the rewards.
        rewards: named and weighted.
        seed: of the run. The seeds of a completion derive from (seed, purpose, rollout, place of the prompt, sample).
        on_reward_error: ``raise`` or ``zero``, see :func:`lit_grpo.rewards.score_all`.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        policy: PolicySource,
        tokenizer: Any,
        rewards: Sequence[Reward],
        seed: int,
        on_reward_error: OnError = "raise",
    ) -> None:
        self.engine, self.policy, self.tokenizer = engine, policy, tokenizer
        self.rewards, self.seed, self.on_reward_error = list(rewards), seed, on_reward_error
        self._scorers = ThreadPoolExecutor(_SCORING_THREADS, thread_name_prefix="reward")

    def produce(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        group_size: int,
        *,
        index: int,
        purpose: str = "train",
        places: Sequence[int] | None = None,
    ) -> Rollout:
        """Sample ``group_size`` completions of every prompt with the policy's present weights, and score them.

        Args:
            prompts: one a group.
            sampling: how to draw.
            group_size: samples of each prompt.
            index: number of the rollout; part of every seed.
            purpose: keeps the random numbers of training and evaluation apart.
            places: place of each prompt among those of all ranks, part of its seeds, so that what is sampled does not
                depend on how prompts are spread over ranks; None: 0, 1, 2, ...
        """
        places = range(len(prompts)) if places is None else places
        seconds_sync = self._sync()
        requests = [
            Request(
                i,
                prompt.token_ids,
                tuple(derive_seed(self.seed, purpose, index, place, s) for s in range(group_size)),
            )
            for i, (place, prompt) in enumerate(zip(places, prompts, strict=True))
        ]
        started = time.perf_counter()
        groups: list[list[Completion | None]] = [[None] * group_size for _ in prompts]
        missing = [group_size] * len(prompts)
        scores: list[Future[tuple[list[str], dict[str, list[Score]]]] | None] = [None] * len(prompts)
        for completion in self.engine.generate(requests, sampling):
            i = completion.request
            if groups[i][completion.sample] is not None:
                raise RuntimeError(f"the engine gave sample {completion.sample} of request {i} twice")
            groups[i][completion.sample] = completion
            missing[i] -= 1
            if not missing[i]:  # a whole group: score it while the engine goes on
                scores[i] = self._scorers.submit(self._score, prompts[i], [c for c in groups[i] if c is not None])
        if any(missing):
            raise RuntimeError(f"the engine ended with {sum(missing)} completions missing")
        sampled = time.perf_counter()
        results = [future.result() for future in scores if future is not None]
        rewarded = time.perf_counter()

        completions = [c for group in groups for c in group if c is not None]
        tokens = sum(len(c.token_ids) for c in completions)
        rewards, total, metrics = self._combine([by_name for _, by_name in results])
        metrics |= {
            "time/sync": seconds_sync,
            "time/generate": sampled - started,
            "time/reward": rewarded - sampled,
            "tokens": float(tokens),
        }
        return Rollout(
            index=index,
            prompts=list(prompts),
            completions=completions,
            texts=[text for texts, _ in results for text in texts],
            rewards=rewards,
            reward=total,
            group_size=group_size,
            temperature=sampling.temperature or 1.0,
            metrics=metrics,
        )

    def _sync(self) -> float:
        """Bring the engine's weights up to date; seconds it took."""
        started = time.perf_counter()
        if self.engine.policy_version != self.policy.policy_version:
            self.engine.sync(self.policy.named_weights(), self.policy.policy_version)
        return time.perf_counter() - started

    def _score(self, prompt: Prompt, group: list[Completion]) -> tuple[list[str], dict[str, list[Score]]]:
        texts = [self.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in group]
        items = [RewardInput(prompt, c, text) for c, text in zip(group, texts, strict=True)]
        return texts, score_all(self.rewards, items, self.on_reward_error)

    def _combine(self, groups: list[dict[str, list[Score]]]) -> tuple[dict[str, Tensor], Tensor, dict[str, float]]:
        """Rewards by name [N], their weighted sum [N], and what is logged of time-outs and failures."""
        rewards: dict[str, Tensor] = {}
        metrics: dict[str, float] = {}
        total = torch.zeros(sum(len(group[self.rewards[0].name]) for group in groups), dtype=torch.float64)
        for reward in self.rewards:
            scores = [score for group in groups for score in group[reward.name]]
            values = torch.tensor([score.value for score in scores], dtype=torch.float64)
            rewards[reward.name] = values.float()
            total += reward.weight * values
            metrics[f"timeouts/{reward.name}"] = sum(s.timed_out for s in scores) / max(1, len(scores))
            if failed := sum(s.failed for s in scores):
                metrics[f"failed/{reward.name}"] = failed / len(scores)
        return rewards, total.float(), metrics

    def close(self) -> None:
        """Free engine, rewards and threads."""
        self._scorers.shutdown(wait=False, cancel_futures=True)
        self.engine.close()
        for reward in self.rewards:
            reward.close()


class PromptOrder:
    """An endless, seeded order over ``count`` prompts: each epoch is another permutation, position alone is state."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed
        self._epoch = -1
        self._order: list[int] = []

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self.count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed("prompts", self.seed, epoch))
            self._order, self._epoch = torch.randperm(self.count, generator=generator).tolist(), epoch
        return self._order[place]


class RolloutLoader:
    """The train loader: sized, so that Lightning asks for rollout k only after the step on rollout k-1.

    Without ``__len__`` Lightning would fetch one batch ahead, sampled with weights one step old.

    Args:
        producer: makes the rollouts.
        prompts: all training prompts.
        count: rollouts in the run.
        prompts_per_rollout: over all ranks.
        group_size: samples of each prompt.
        sampling: how to draw.
        rank: of this process.
        world_size: number of processes; divides ``prompts_per_rollout``.
        dynamic: go on sampling until all groups have unequal rewards, see :func:`lit_grpo.refill.refill`.
        max_rounds: bound on the rounds of that.
        on_short: what happens then.
        gather: exchange over ranks, needed by ``dynamic`` only.
    """

    def __init__(
        self,
        producer: RolloutProducer,
        prompts: Sequence[Prompt],
        *,
        count: int,
        prompts_per_rollout: int,
        group_size: int,
        sampling: Sampling,
        rank: int = 0,
        world_size: int = 1,
        dynamic: bool = False,
        max_rounds: int = 10,
        on_short: OnShort = "fill",
        gather: Gather = alone,
    ) -> None:
        self.producer, self.prompts, self.count = producer, prompts, count
        self.prompts_per_rollout, self.group_size, self.sampling = prompts_per_rollout, group_size, sampling
        self.rank, self.world_size = rank, world_size
        self.order = PromptOrder(len(prompts), producer.seed)
        self.dynamic, self.max_rounds, self.on_short, self.gather = dynamic, max_rounds, on_short, gather
        self.next_rollout = 0
        self.produced = 0
        """Rollouts of all epochs; ``next_rollout`` starts again with each."""
        self.position = 0
        """Prompts taken from the order, over all ranks: those skipped by dynamic sampling too."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Rollout]:
        if self.next_rollout >= self.count:  # another epoch over the same number of rollouts
            self.next_rollout = 0
        while self.next_rollout < self.count:
            rollout, taken = self._next()
            # Before the yield: Lightning stops asking after the last item, so nothing behind it would run. All at once
            # and only here: a run cut in the middle of a rollout begins that rollout again.
            self.next_rollout += 1
            self.produced += 1
            self.position += taken
            yield rollout

    def _next(self) -> tuple[Rollout, int]:
        """This rank's part of the next rollout, and how many prompts all ranks took for it."""
        if self.dynamic:
            done = refill(
                self._sample,
                groups=self.prompts_per_rollout,
                rank=self.rank,
                world_size=self.world_size,
                gather=self.gather,
                max_rounds=self.max_rounds,
                on_short=self.on_short,
            )
            return done.rollout, done.prompts
        share = self.prompts_per_rollout // self.world_size
        return self._sample(range(self.rank * share, (self.rank + 1) * share)), self.prompts_per_rollout

    def _sample(self, places: Sequence[int]) -> Rollout:
        """A rollout of the prompts at these places after the loader's position."""
        chosen = [self.prompts[self.order[self.position + place]] for place in places]
        return self.producer.produce(chosen, self.sampling, self.group_size, index=self.produced, places=places)

    def state_dict(self) -> dict[str, int]:
        return {"next_rollout": self.next_rollout, "produced": self.produced, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next_rollout, self.produced = state["next_rollout"], state["produced"]
        self.position = state["position"]


class EvaluationLoader:
    """Every prompt once, in order, with seeds that are the same at each evaluation."""

    def __init__(
        self,
        producer: RolloutProducer,
        prompts: Sequence[Prompt],
        *,
        batch_prompts: int,
        group_size: int,
        sampling: Sampling,
        rank: int = 0,
        world_size: int = 1,
        purpose: str = "val",
    ) -> None:
        self.producer, self.sampling, self.group_size, self.purpose = producer, sampling, group_size, purpose
        places = range(rank, len(prompts), world_size)
        self._batches = [
            [(place, prompts[place]) for place in places[start : start + batch_prompts]]
            for start in range(0, len(places), batch_prompts)
        ]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Rollout]:
        for batch in self._batches:
            yield self.producer.produce(
                [prompt for _, prompt in batch],
                self.sampling,
                self.group_size,
                index=0,
                purpose=self.purpose,
                places=[place for place, _ in batch],
            )
