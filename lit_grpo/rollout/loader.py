"""The loaders of rollouts: they choose the prompts of each, and make it before or beside the learner's last step."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_grpo.rollout.ahead import ProducedRollout, pack, unpack
from lit_grpo.rollout.curriculum import Curriculum
from lit_grpo.rollout.dynamic_sampling import (
    DynamicSampler,
    Gather,
    OnShort,
    SamplingResult,
    Tried,
    UniformBy,
    no_exchange,
    split_groups,
)
from lit_grpo.rollout.generator import RolloutGenerator, RolloutSource
from lit_grpo.rollout.prompt_order import Order, PromptCursor, make_order
from lit_grpo.rollout.prompt_order import PromptOrder as PromptOrder
from lit_grpo.types import Prompt, Rollout, Sampling
from lit_grpo.utils.threads import DaemonThreads


class RolloutLoader:
    """The train loader: sized, so that Lightning asks for rollout k only after the step on rollout k-1.

    Without ``__len__`` Lightning would fetch one batch ahead, sampled with weights one step old.

    With ``num_prefetch`` above 0 the next rollouts are sampled in a thread while the learner trains on this one.
    Weights go to the engine only between two steps, when the learner stands still, and no rollout is sampled with
    weights more than ``num_prefetch`` rollouts older than those it will train. A checkpoint holds what was sampled
    ahead, for which it waits, since the weights that sampled it are gone when the run is resumed.

    Args:
        source: makes the rollouts.
        prompts: all training prompts.
        count: number of rollouts in the run.
        prompts_per_rollout: prompts of each rollout, over all ranks.
        group_size: samples of each prompt.
        sampling: how to draw.
        rank: of this process.
        world_size: number of processes; divides ``prompts_per_rollout``.
        dynamic: go on sampling until all groups are mixed, see
            :class:`lit_grpo.rollout.dynamic_sampling.DynamicSampler`.
        uniform_by: with ``dynamic``: by what a group is uniform, and not mixed.
        max_rounds: with ``dynamic``: at most ``max_rounds * prompts_per_rollout`` prompts are tried.
        on_short: with ``dynamic``: what happens if they do not suffice.
        gather: exchange over ranks, needed by ``dynamic`` and ``curriculum``.
        weights: share of each source in the prompts; None: all are shuffled together.
        curriculum: passes over prompts that are too easy or too hard.
        num_prefetch: rollouts that may be sampled before their turn.
    """

    def __init__(
        self,
        source: RolloutSource,
        prompts: Sequence[Prompt],
        *,
        count: int,
        prompts_per_rollout: int,
        group_size: int,
        sampling: Sampling,
        rank: int = 0,
        world_size: int = 1,
        dynamic: bool = False,
        uniform_by: UniformBy = "reward",
        max_rounds: int = 10,
        on_short: OnShort = "fill",
        gather: Gather = no_exchange,
        weights: Mapping[str, float] | None = None,
        curriculum: Curriculum | None = None,
        num_prefetch: int = 0,
    ) -> None:
        self.source, self.prompts, self.count = source, prompts, count
        self.prompts_per_rollout, self.group_size, self.sampling = prompts_per_rollout, group_size, sampling
        self.rank, self.world_size = rank, world_size
        self.order: Order = make_order(prompts, source.seed, weights)
        self.curriculum = curriculum
        names = tuple(dict.fromkeys(prompt.source for prompt in prompts))
        self.sources = names if len(names) > 1 else ()
        self.gather = gather
        self.sampler: DynamicSampler | None = None
        if dynamic:
            if not isinstance(source, RolloutGenerator):
                raise ValueError("dynamic sampling needs a source that generates")
            self.sampler = DynamicSampler(
                source,
                sampling,
                group_size,
                prompts_per_rollout,
                rank=rank,
                world_size=world_size,
                gather=gather,
                uniform_by=uniform_by,
                max_rounds=max_rounds,
                on_short=on_short,
            )
        self.num_prefetch = num_prefetch
        self.next_rollout = 0
        self.produced = 0
        """Number of rollouts so far, in all epochs; ``next_rollout`` starts again with each epoch."""
        self.position = 0
        """Position in the order, over all ranks: prompts that were left out or passed over are behind it too."""
        self.skipped: Counter[str] = Counter()
        """How often dynamic sampling left out each prompt, by id."""
        self.tried: Tried = (0, 0)
        """Mixed groups and prompts of the last rollout, by which dynamic sampling foresees what the next takes."""
        self._restore_generation = 0
        """Number of ``load_state_dict`` calls so far: rollouts sampled before the last one are dropped."""
        self._ahead: deque[Future[ProducedRollout]] = deque()
        """Rollouts that are being sampled, or are, before their turn; the oldest first."""
        self._restored: list[ProducedRollout] = []
        """Those that the checkpoint loaded last holds."""
        self.patience: float | None = None
        """Seconds for which :meth:`state_dict` waits for what is being sampled, and then leaves it out; None: as long
        as it takes."""

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Rollout]:
        if self.next_rollout >= self.count:  # another epoch over the same number of rollouts
            self.next_rollout = 0
        for made in self._prefetched() if self.num_prefetch else self._one_by_one():
            # Before the yield: Lightning stops asking after the last item, so nothing behind it would run. All at once
            # and only here: a run cut in the middle of a rollout begins that rollout again.
            self.next_rollout += 1
            self.produced += 1
            self.position += made.prompts
            self.skipped.update(made.skipped)
            self.tried = made.tried
            if self.curriculum is not None:
                self.curriculum.update(made.outcomes)
            yield made.rollout

    def _one_by_one(self) -> Iterator[ProducedRollout]:
        while self.next_rollout < self.count:
            made = self._make(self.produced, self.position, self.curriculum, self.tried)
            self.source.sleep()
            yield made

    def _prefetched(self) -> Iterator[ProducedRollout]:
        """Yield rollouts in order; while the learner has one, the next ones are sampled in a thread."""
        waiting = self._ahead = deque()
        worker = DaemonThreads(1, "rollout")
        generation, index, end, seconds_sync = -1, 0, 0, 0.0
        # As of the last rollout made, not of the last one given out.
        rates, tried = self.curriculum, self.tried

        def make(which: int) -> ProducedRollout:
            # Position of the first prompt that no rollout has used; only the one worker thread touches it.
            nonlocal end, tried
            made = self._make(which, end, rates, tried, sync=False)
            end, tried = end + made.prompts, made.tried
            if rates is not None:
                rates.update(made.outcomes)
            return made

        def submit(steps_until_trained: int) -> None:
            nonlocal index, seconds_sync
            trained_at = self.source.policy.policy_version + steps_until_trained
            too_old = trained_at - self.source.policy_version > self.num_prefetch
            # The learner stands still here, so its weights may be read; but the engine must stand still too.
            if too_old or all(future.done() for future in waiting):
                wait(waiting)
                seconds_sync += self.source.sync()
            waiting.append(worker.submit(make, index))
            index += 1

        try:
            while self.next_rollout < self.count:
                if generation != self._restore_generation:
                    for future in waiting:
                        future.cancel()
                    wait(waiting)
                    waiting = self._ahead = deque()
                    generation, index, end = self._restore_generation, self.produced, self.position
                    rates, tried = None if self.curriculum is None else self.curriculum.copy(), self.tried
                    for done in self._restored:
                        waiting.append(_finished(done))
                        index, end, tried = index + 1, end + done.prompts, done.tried
                        if rates is not None:
                            rates.update(done.outcomes)
                    self._restored = []
                if not waiting:
                    submit(0)
                started = time.perf_counter()
                made = waiting.popleft().result()
                waited = time.perf_counter() - started
                while len(waiting) < self.num_prefetch and self.next_rollout + 1 + len(waiting) < self.count:
                    submit(1 + len(waiting))
                metrics = made.rollout.metrics | {"time/learner_idle": waited, "time/sync": seconds_sync}
                made = made._replace(rollout=replace(made.rollout, metrics=metrics))
                seconds_sync = 0.0
                yield made
        finally:
            worker.shutdown()

    def _make(
        self, index: int, position: int, rates: Curriculum | None, tried: Tried, sync: bool = True
    ) -> ProducedRollout:
        """Make this rank's part of rollout ``index``, from a position of the order on."""
        cursor = PromptCursor(self.order, position, rates.accepts if rates is not None else None)
        result = self._sample(lambda offset: self.prompts[cursor[offset]], index, sync, tried)
        outcomes: list[tuple[int, str, float]] = []
        metrics = dict(result.rollout.metrics)
        if rates is not None:
            outcomes = [one for of_rank in self.gather(rates.outcome(result.tried)) for one in of_rank]
            metrics |= rates.metrics()
            metrics["curriculum/passed_over"] = float(cursor.used(result.prompts) - result.prompts)
        rollout = replace(result.rollout, metrics=metrics, sources=self.sources)
        skipped = [self.prompts[cursor[offset]].id for offset in result.skipped]
        now_tried = (result.mixed, result.prompts) if self.sampler is not None else tried
        return ProducedRollout(rollout, cursor.used(result.prompts), skipped, outcomes, now_tried)

    def _sample(self, prompt_at: Callable[[int], Prompt], index: int, sync: bool, before: Tried) -> SamplingResult:
        if self.sampler is not None:
            return self.sampler.sample(prompt_at, index=index, sync=sync, before=before)
        share = self.prompts_per_rollout // self.world_size
        positions = range(self.rank * share, (self.rank + 1) * share)
        rollout = self.source.produce(
            [prompt_at(p) for p in positions],
            self.sampling,
            self.group_size,
            index=index,
            positions=positions,
            sync=sync,
        )
        return SamplingResult(rollout, self.prompts_per_rollout, [], split_groups(rollout, positions))

    def position_state(self) -> dict[str, Any]:
        """Return what tells whether the loader has moved on; unlike :meth:`state_dict`, at once."""
        return {"next_rollout": self.next_rollout, "produced": self.produced, "position": self.position}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on from. All ranks must call it where rollouts are sampled ahead."""
        # The position says which prompts were used, since their order derives from the seed.
        state = self.position_state() | {"skipped": dict(self.skipped)}
        if self.curriculum is not None:
            state["curriculum"] = self.curriculum.state_dict()
        if self.sampler is not None:
            state["tried"] = list(self.tried)
        if self.num_prefetch:
            # One rank writes the file for all.
            state["ahead"] = self.gather(self._sampled_ahead())
            state["made_with"] = self._identity()
        return state

    def _sampled_ahead(self) -> list[dict[str, Any]]:
        waiting = list(self._ahead)
        done, _ = wait(waiting, timeout=self.patience)
        index_of = {id(prompt): index for index, prompt in enumerate(self.prompts)}
        packed: list[dict[str, Any]] = []
        for future in waiting:
            # A gap would put a later rollout in the place of an earlier one; what failed is told where it is asked for.
            if future not in done or future.cancelled() or future.exception() is not None:
                break
            packed.append(pack(future.result(), index_of))
        return packed

    def _identity(self) -> dict[str, Any]:
        """Return what rollouts that are sampled ahead depend on besides the weights."""
        return {
            "group_size": self.group_size,
            "prompts_per_rollout": self.prompts_per_rollout,
            "sampling": {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.sampling).items()},
            "rewards": [[reward.name, reward.weight] for reward in getattr(self.source, "rewards", ())],
            "ranks": self.world_size,
            "dynamic": self.sampler is not None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_rollout, self.produced = state["next_rollout"], state["produced"]
        self.position = state["position"]
        self.skipped = Counter(state.get("skipped", {}))
        mixed, tried = state.get("tried", (0, 0))
        self.tried = mixed, tried
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state.get("curriculum", {}))
        self._restore_generation += 1
        self._restored, self._ahead = [], deque()
        ahead = state.get("ahead", [])
        if any(ahead) and self.num_prefetch and state["made_with"] == self._identity():
            # Every rank must take as many: they sample the following ones together.
            count = min(self.num_prefetch, *(len(of_rank) for of_rank in ahead))
            self._restored = [unpack(packed, self.prompts) for packed in ahead[self.rank][:count]]
            # Here too, for a run that is saved before it asks for the next rollout, as after a rollback.
            self._ahead.extend(map(_finished, self._restored))
        elif any(ahead):
            rank_zero_info(
                "What the checkpoint holds of rollouts sampled ahead is sampled anew: settings have changed."
            )


def _finished(made: ProducedRollout) -> Future[ProducedRollout]:
    future: Future[ProducedRollout] = Future()
    future.set_result(made)
    return future


class EvaluationLoader:
    """The loader of an evaluation: every prompt once, in order, with seeds that derive from the prompt's id.

    What is sampled therefore differs between two evaluations by the weights alone. All ranks make the same number of
    batches, since they gather the weights together; where there are fewer prompts, the last batch of a rank is empty.

    Args:
        producer: makes the rollouts.
        prompts: all prompts of the evaluation set.
        batch_prompts: prompts in each batch, on each rank.
        group_size: completions of each prompt.
        sampling: how to draw.
        rank: of this process.
        world_size: number of processes.
        purpose: keeps the random numbers of different evaluations apart.
        finish: returns a scored rollout with what the evaluation needs, given the seeds of its completions.
        sleeps: whether the engine may give its memory to others after the last batch.
    """

    def __init__(
        self,
        producer: RolloutGenerator,
        prompts: Sequence[Prompt],
        *,
        batch_prompts: int,
        group_size: int,
        sampling: Sampling,
        rank: int = 0,
        world_size: int = 1,
        purpose: str = "val",
        finish: Callable[[Rollout, list[int]], Rollout] | None = None,
        sleeps: bool = True,
    ) -> None:
        self.producer, self.sampling, self.group_size, self.purpose = producer, sampling, group_size, purpose
        self.finish, self.sleeps = finish, sleeps
        own = prompts[rank::world_size]
        count = -(-len(prompts) // (world_size * batch_prompts))
        self._batches = [own[i * batch_prompts : (i + 1) * batch_prompts] for i in range(count)]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Rollout]:
        for number, batch in enumerate(self._batches, 1):
            ids = [prompt.id for prompt in batch]
            rollout = self.producer.produce(
                batch, self.sampling, self.group_size, index=0, purpose=self.purpose, positions=ids
            )
            if self.finish is not None:
                rollout = self.finish(rollout, [seed for prompt in batch for seed in self._seeds(prompt)])
            if self.sleeps and number == len(self._batches):
                self.producer.sleep()
            yield rollout

    def _seeds(self, prompt: Prompt) -> tuple[int, ...]:
        return self.producer.request(0, prompt.id, prompt, self.group_size, 0, self.purpose).seeds


def evaluation_prompts(prompts_per_rollout: int, group_size: int, samples: int, world_size: int) -> int:
    """Return the evaluation prompts that a rank samples at once: as many completions as in training, or more.

    An engine's throughput grows with the completions that it has at once, and each batch waits for its longest.

    Args:
        prompts_per_rollout: training prompts of a rollout, over all ranks.
        group_size: completions of each training prompt.
        samples: completions of each evaluation prompt.
        world_size: number of ranks.
    """
    completions = prompts_per_rollout // world_size * group_size
    return max(prompts_per_rollout, -(-completions // samples))
