"""Rollouts by generation: the engine samples, whole groups are scored meanwhile, and all is put together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_grpo.engines.base import EngineError, NamedWeights, RolloutEngine, SleepingEngine, weights_for
from lit_grpo.engines.completion_checks import GUARD, check_completion
from lit_grpo.rewards.base import Reward, flipped_totals, verdicts, weighted_sums
from lit_grpo.rewards.combine import OnError, judge_again, score_all
from lit_grpo.types import Completion, Prompt, Request, RewardInput, Rollout, Sampling, Score
from lit_grpo.utils.memory import is_out_of_memory, message_of, out_of_memory_error
from lit_grpo.utils.random import derive_seed
from lit_grpo.utils.text import completion_text
from lit_grpo.utils.threads import DaemonThreads, beside, call_within

log = logging.getLogger(__name__)

_SCORING_THREADS = 4
# They wait for the processes of a reward, of which there may be some more than groups are scored at a time.
_BEGINNING_THREADS = 16
_CLOSING_SECONDS = 5.0

SYNC_PROMPTS, SYNC_SAMPLES, SYNC_TOKENS = 4, 4, 8
"""Prompts, samples of each, and tokens of each sample, in the check of an engine's first sync."""
SyncCheck = Callable[[Callable[[int], object], Callable[[], Rollout]], None]

ENGINE_REMEDIES = (
    "ask for a share of the card that is free (data.engine.gpu_memory_utilization), or for a larger one if the cache "
    "finds no room beside the weights; of the transformers engine lower data.engine.batch_size",
    "lower data.sampling.max_new_tokens",
    "leave the learner less: a lower model.micro_batch_tokens, or data.engine.sleep: 1",
)
"""What a person may do where memory runs out as an engine starts or samples, the most likely first."""
REJUDGED = "sanity/rejudged_diff_frac"


class Scored(NamedTuple):
    """A group after its rewards."""

    texts: list[str]
    scores: dict[str, list[Score]]
    """Scores of its completions under each reward's name."""
    rejudged: tuple[int, int] = (0, 0)
    """Completions whose second verdict is another than the first, and those that got a second one."""


class Begun(NamedTuple):
    """A completion that has ended, and what is known of it before its group is whole."""

    text: str
    scores: dict[str, list[Score]]
    """Its score under the name of each reward that is :attr:`lit_grpo.rewards.Reward.by_completion`."""


class Cancelled(Exception):  # noqa: N818 - it is an order, not an error
    """The generator was closed while a rollout was being made in another thread."""


class PolicySource(Protocol):
    """The policy that the engine samples from: :class:`lit_grpo.LitGRPO`, or anything with these two members."""

    policy_version: int
    """Number of training steps that the weights have behind them."""

    def named_weights(self) -> NamedWeights:
        """Yield the weights under their transformers names, adapters merged in.

        Where the engine wants them otherwise a :class:`lit_grpo.types.WeightForm` is given.
        """
        ...


class RolloutSource(Protocol):
    """The maker of the train loader's rollouts: a generator, or the solutions of the data."""

    seed: int
    """Seed of the run; the order of prompts derives from it."""
    policy: PolicySource

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next rollout is made with, unless it is synced first."""
        ...

    def produce(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        group_size: int,
        *,
        index: int,
        purpose: str = "train",
        positions: Sequence[int | str] | None = None,
        sync: bool = True,
    ) -> Rollout:
        """Make rollout ``index`` of ``group_size`` completions of every prompt."""
        ...

    def sync(self) -> float:
        """Bring the weights up to date and return the seconds that it took."""
        ...

    def sleep(self) -> None:
        """Free the memory that the learner may use until the next rollout."""
        ...


class RolloutGenerator:
    """A source of rollouts that samples completions of prompts and scores them: in whole groups, or one by one.

    Args:
        engine: samples; its weights are brought up to date before every rollout.
        policy: gives the weights.
        tokenizer: decodes each completion once, for the rewards.
        end_token_ids: ids that end a completion, and are no part of its text.
        rewards: the rewards, named and weighted.
        seed: seed of the run. The seeds of a completion derive from (seed, purpose, rollout, position, sample).
        on_reward_error: ``raise`` or ``zero``, see :func:`lit_grpo.rewards.score_all`.
        retries: how often sampling is tried again when memory ran out. Only what has not been delivered is asked
            for, with the seeds it had, in ever smaller portions: half as many samples at once each time.
        rejudge_every: one training group of so many is judged a second time; 0: none.
        sleep_level: how deep the engine sleeps between rollouts, see
            :meth:`lit_grpo.engines.vllm.engine.VLLMEngine.sleep`; 0: it does not.
        vocab_size: number of ids that the policy knows; an engine that gives another ends the run. None: not known.
        needs_logprobs: whether an engine that gives no log-probabilities ends the run.
        check_sync: checks that the engine takes over weights, before its first use, see
            :attr:`lit_grpo.context.LearnerRequirements.check_sync`; None: nothing does.
        sync_prompts: what the engine samples from in that check, a few tokens each.
        longest_completion: most tokens that the engine can add to any prompt.
        on_phase: is told what begins: ``sync``, ``generate`` or ``rewards``; from the thread in which it does.
        meanwhile: done once, while :meth:`produce` first waits for completions in the main thread; for an engine that
            takes none of this process's time. None: nothing is.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        policy: PolicySource,
        tokenizer: Any,
        rewards: Sequence[Reward],
        seed: int,
        on_reward_error: OnError = "raise",
        end_token_ids: Sequence[int] = (),
        retries: int = 2,
        rejudge_every: int = 0,
        sleep_level: int = 0,
        vocab_size: int | None = None,
        needs_logprobs: bool = False,
        check_sync: SyncCheck | None = None,
        sync_prompts: Sequence[Prompt] = (),
        longest_completion: int = SYNC_TOKENS,
        on_phase: Callable[[str], None] = lambda phase: None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self.on_phase, self._meanwhile = on_phase, meanwhile
        self._check_sync, self._sync_prompts = check_sync, list(sync_prompts)
        self._sync_tokens = min(SYNC_TOKENS, longest_completion)
        self.vocab_size, self.needs_logprobs = vocab_size, needs_logprobs
        self._said_unknown = self._said_first = False
        self._last_came = 0.0
        """When the engine gave its last completion."""
        self._said_skipped: set[str] = set()
        self.engine, self.policy, self.tokenizer = engine, policy, tokenizer
        self.end_token_ids = frozenset(end_token_ids)
        self.rewards, self.seed, self.on_reward_error = list(rewards), seed, on_reward_error
        self._early = [reward for reward in self.rewards if reward.by_completion]
        self._late = [reward for reward in self.rewards if not reward.by_completion]
        self.retries, self.rejudge_every, self.sleep_level = retries, rejudge_every, sleep_level
        if sleep_level and not isinstance(engine, SleepingEngine):
            raise ValueError(f"{type(engine).__name__} cannot sleep")
        # Reentrant, since one thread may have several generations open.
        self._engine_lock = threading.RLock()
        """Held while the engine samples or its weights change: training rollouts may be made in another thread."""
        self._closing = threading.Event()
        self._scorers = DaemonThreads(_SCORING_THREADS, "reward")
        self._beginners = DaemonThreads(_BEGINNING_THREADS, "completion")

    def produce(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        group_size: int,
        *,
        index: int,
        purpose: str = "train",
        positions: Sequence[int | str] | None = None,
        sync: bool = True,
    ) -> Rollout:
        """Sample ``group_size`` completions of every prompt, and score them.

        Args:
            prompts: the prompt of each group.
            sampling: how to draw.
            group_size: samples of each prompt.
            index: number of the rollout; part of every seed.
            purpose: keeps the random numbers of training and evaluation apart.
            positions: position of each prompt among those of all ranks (in evaluation its id), part of its seeds, so
                that what is sampled does not depend on how prompts are spread over ranks; None: 0, 1, 2, ...
            sync: bring the engine's weights up to date first. False in a thread beside the learner, which may be
                changing them.

        Raises:
            EngineError: the engine failed and went on failing.
        """
        positions = range(len(prompts)) if positions is None else positions
        seconds_sync = self.sync() if sync else 0.0
        requests = [
            self.request(i, position, prompt, group_size, index, purpose)
            for i, (position, prompt) in enumerate(zip(positions, prompts, strict=True))
        ]
        started = time.perf_counter()
        groups: list[list[Completion | None]] = [[None] * group_size for _ in prompts]
        missing = [group_size] * len(prompts)
        begun: list[list[Future[Begun] | None]] = [[None] * group_size for _ in prompts]
        scores: list[Future[Scored] | None] = [None] * len(prompts)
        for completion in self._beside_work(self.generate(requests, sampling)):
            i = completion.request
            groups[i][completion.sample] = completion
            begun[i][completion.sample] = self.begin_score(prompts[i], completion)
            missing[i] -= 1
            # Whole groups are scored while the engine goes on.
            if not missing[i]:
                again = purpose == "train" and self.judges_twice(index, positions[i])
                scores[i] = self.score_group(prompts[i], [c for c in groups[i] if c is not None], again, begun[i])
        if any(missing):
            raise EngineError(f"the engine ended with {sum(missing)} completions missing")
        taken = time.perf_counter()
        self.on_phase("rewards")
        results = [future.result() for future in scores if future is not None]
        # The first ones of a run may have been taken long after they came.
        generating = self._last_came - started if prompts else 0.0

        times = {"sync": seconds_sync, "generate": generating, "reward": time.perf_counter() - taken}
        whole = [[c for c in group if c is not None] for group in groups]
        return self.build_rollout(prompts, whole, results, sampling, index, times, group_size, positions)

    def _beside_work(self, completions: Iterator[Completion]) -> Iterator[Completion]:
        """Yield completions, the first ones of all after what is to be done meanwhile."""
        meanwhile, in_main_thread = self._meanwhile, threading.current_thread() is threading.main_thread()
        if meanwhile is not None and in_main_thread:
            self._meanwhile = None
            completions = beside(completions, meanwhile)
        return completions

    def request(
        self, number: int, position: int | str, prompt: Prompt, group_size: int, index: int, purpose: str = "train"
    ) -> Request:
        """Return what the engine is asked for one prompt; seeds derive from its position in the rollout."""
        seeds = (derive_seed(self.seed, purpose, index, position, sample) for sample in range(group_size))
        return Request(number, prompt.token_ids, tuple(seeds))

    def judges_twice(self, index: int, position: int | str) -> bool:
        """Tell whether the training group at a position of a rollout is judged a second time."""
        # By chance and not by counting, so that it depends on nothing that a resumed run would have to know.
        every = self.rejudge_every
        return every > 0 and derive_seed(self.seed, "rejudge", index, position) % every == 0

    def begin_score(self, prompt: Prompt, completion: Completion) -> Future[Begun] | None:
        """Score a completion in another thread by the rewards that need not wait for its group; None: none is such."""
        return self._beginners.submit(self._begin_score, prompt, completion) if self._early else None

    def score_group(
        self,
        prompt: Prompt,
        group: list[Completion],
        again: bool = False,
        begun: Sequence[Future[Begun] | None] = (),
    ) -> Future[Scored]:
        """Decode and score a whole group in another thread, while the engine goes on.

        Args:
            prompt: of the group.
            group: its completions, in the order of their samples.
            again: judge it twice.
            begun: what :meth:`begin_score` gave for each of them; empty: it was not called.
        """
        return self._scorers.submit(self._score, prompt, group, again, [one for one in begun if one is not None])

    def totals(self, result: Scored) -> list[float]:
        """Return the weighted sum of the rewards of each completion of a group; NaN where nothing scored it."""
        return weighted_sums(self.rewards, result.scores)

    def correct(self, prompt: Prompt, result: Scored) -> list[bool | None] | None:
        """Say which completions of a group are correct, see :func:`lit_grpo.rewards.base.verdicts`."""
        return verdicts(self.rewards, result.scores, [prompt.source] * len(result.texts))

    def build_rollout(
        self,
        prompts: Sequence[Prompt],
        groups: Sequence[Sequence[Completion]],
        results: Sequence[Scored],
        sampling: Sampling,
        index: int,
        times: dict[str, float],
        group_size: int,
        positions: Sequence[int | str] = (),
    ) -> Rollout:
        """Build a rollout of whole, scored groups, one for each prompt."""
        completions = [c for group in groups for c in group]
        scores = {r.name: [s for result in results for s in result.scores[r.name]] for r in self.rewards}
        sources = [prompt.source for prompt in prompts for _ in range(group_size)]
        correct, flipped = verdicts(self.rewards, scores, sources), flipped_totals(self.rewards, scores, sources)
        rewards, total, sums = self._combine(scores)
        self._say_skipped(scores, prompts, group_size)
        if judged := sum(result.rejudged[1] for result in results):
            sums[REJUDGED] = sum(result.rejudged[0] for result in results), judged
        return Rollout(
            index=index,
            prompts=list(prompts),
            completions=completions,
            texts=[text for result in results for text in result.texts],
            rewards=rewards,
            reward=total,
            correct=None if correct is None else torch.tensor([bool(right) for right in correct], dtype=torch.bool),
            judged=None if correct is None or None not in correct else torch.tensor([c is not None for c in correct]),
            flipped_reward=None if flipped is None else torch.tensor(flipped, dtype=torch.float32),
            positions=tuple(positions),
            no_answer=self._without_answer(scores),
            group_size=group_size,
            temperature=sampling.temperature or 1.0,
            sampled_tokens=sum(len(c.token_ids) for c in completions),
            sums=sums,
            metrics={f"time/{part}": seconds for part, seconds in times.items()},
        )

    @property
    def policy_version(self) -> int:
        """Version of the weights in the engine."""
        return self.engine.policy_version

    def sync(self) -> float:
        """Bring the engine's weights up to date and return the seconds that it took."""
        started = time.perf_counter()
        self.on_phase("sync")
        with self._engine_lock:
            if self._check_sync is not None and self._sync_prompts:
                self._check_sync(self._sync_as_of, self._sample_a_little)
                # Not before: what is known of an engine that failed is that it failed.
                self._check_sync = None
                # The check is no part of what a sync takes.
                started = time.perf_counter()
            if self.engine.policy_version != self.policy.policy_version:
                self._sync_as_of(self.policy.policy_version)
        return time.perf_counter() - started

    def _sync_as_of(self, version: int) -> None:
        self.engine.sync(weights_for(self.engine, self.policy), version)

    def _sample_a_little(self) -> Rollout:
        """Have the engine sample the beginnings of a few completions at temperature 1; they have no rewards."""
        prompts, group_size = self._sync_prompts, SYNC_SAMPLES
        # The purpose gives them seeds of their own: a run samples the same with and without them.
        requests = [self.request(i, i, prompt, group_size, 0, "sync") for i, prompt in enumerate(prompts)]
        sampling = Sampling(temperature=1.0, max_new_tokens=self._sync_tokens)
        completions = sorted(self.generate(requests, sampling), key=lambda c: (c.request, c.sample))
        return Rollout(
            index=0,
            prompts=prompts,
            completions=completions,
            texts=[""] * len(completions),
            rewards={},
            reward=torch.zeros(len(completions)),
            group_size=group_size,
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield every sample once, also where the engine has to be asked again after a failure."""
        missing = {(request.index, sample) for request in requests for sample in range(len(request.seeds))}
        self.on_phase("generate")
        with self._engine_lock:
            for attempt in range(self.retries + 1):
                portion = max(1, len(missing) >> attempt)
                try:
                    for part, samples in _portions(requests, missing, portion):
                        for completion in self.engine.generate(part, sampling):
                            if self._closing.is_set():
                                raise Cancelled
                            self._check(completion, part, sampling)
                            # A portion numbers its samples anew; the rollout wants their own numbers.
                            request, sample = completion.request, samples[completion.request][completion.sample]
                            if (request, sample) not in missing:
                                raise EngineError(f"the engine gave sample {sample} of request {request} twice")
                            missing.discard((request, sample))
                            self._note_came()
                            yield completion if completion.sample == sample else replace(completion, sample=sample)
                    return
                except EngineError as error:
                    if attempt == self.retries or not error.transient:
                        if not is_out_of_memory(error):
                            raise
                        raise out_of_memory_error(
                            f"sampling {portion} completions at once, the fewest that were tried",
                            "cuda" if torch.cuda.is_available() else "cpu",
                            message_of(error),
                            where="data.engine",
                            remedies=ENGINE_REMEDIES,
                        ) from error
                    rank_zero_warn(
                        f"The engine failed ({error}); trying again for the {len(missing)} samples that are missing, "
                        f"{max(1, len(missing) >> (attempt + 1))} at a time."
                    )

    def _note_came(self) -> None:
        self._last_came = time.perf_counter()
        if self._check_sync is None and not self._said_first:
            self._said_first = True
            # scripts/benchmark_start.py reads it.
            log.debug("the first completion has come")

    def _check(self, completion: Completion, requests: Sequence[Request], sampling: Sampling) -> None:
        """Check what the engine gave, and say once if it gives no log-probabilities."""
        check_completion(completion, requests, sampling, vocab_size=self.vocab_size, needs_logprobs=self.needs_logprobs)
        if completion.token_ids and not completion.logprobs and not self._said_unknown:
            self._said_unknown = True
            rank_zero_warn(
                "The engine gives no log-probabilities, so nothing can tell whether it samples from the policy, and no "
                f"correction for its differences is possible ({GUARD} is null)."
            )

    def sleep(self) -> None:
        """Let an engine that can sleep give its memory to the learner until it is asked again."""
        if self.sleep_level and isinstance(self.engine, SleepingEngine):
            with self._engine_lock:
                self.engine.sleep(self.sleep_level)

    def _begin_score(self, prompt: Prompt, completion: Completion) -> Begun:
        text = completion_text(self.tokenizer, completion.token_ids, self.end_token_ids)
        item = RewardInput(prompt, completion, text)
        return Begun(text, score_all(self._early, [item], self.on_reward_error))

    def _score(
        self, prompt: Prompt, group: list[Completion], again: bool, begun: Sequence[Future[Begun]] = ()
    ) -> Scored:
        ended = [one.result() for one in begun]
        texts = [one.text for one in ended] or [
            completion_text(self.tokenizer, c.token_ids, self.end_token_ids) for c in group
        ]
        items = [RewardInput(prompt, c, text) for c, text in zip(group, texts, strict=True)]
        asked = self._late if ended else self.rewards
        scores = score_all(asked, items, self.on_reward_error) if asked else {}
        for reward in self._early if ended else ():
            scores[reward.name] = [score for one in ended for score in one.scores[reward.name]]
        rejudged = judge_again(self.rewards, items, scores, self.on_reward_error) if again else (0, 0)
        return Scored(texts, scores, rejudged)

    def _combine(
        self, scores_by_name: dict[str, list[Score]]
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, tuple[float, float]]]:
        """Return the rewards by name [N], their weighted sum [N], and sums of time-outs, failures and details."""
        rewards: dict[str, Tensor] = {}
        sums: dict[str, tuple[float, float]] = {}
        total = torch.tensor(weighted_sums(self.rewards, scores_by_name), dtype=torch.float64)
        sums["completions/unscored_frac"] = int(total.isnan().sum()), len(total)
        for reward in self.rewards:
            scores = scores_by_name[reward.name]
            rewards[reward.name] = torch.tensor([score.value for score in scores], dtype=torch.float64).float()
            sums[f"reward_errors/timeout_frac/{reward.name}"] = sum(s.timed_out for s in scores), len(scores)
            # Otherwise a failure ends the run.
            if self.on_reward_error == "zero":
                sums[f"reward_errors/failed_frac/{reward.name}"] = sum(s.failed for s in scores), len(scores)
            for key in {key for score in scores for key in score.details or ()}:
                figures = [score.details[key] for score in scores if score.details and key in score.details]
                sums[f"reward/{reward.name}/{key}"] = sum(figures), len(figures)
        return rewards, total.float(), sums

    def _say_skipped(self, scores: dict[str, list[Score]], prompts: Sequence[Prompt], group_size: int) -> None:
        """Say once of each reward that it gave None: what is meant so is fine, and a forgotten return is not."""
        for name in scores.keys() - self._said_skipped:
            first = next((i for i, score in enumerate(scores[name]) if score.skipped), None)
            if first is None:
                continue
            self._said_skipped.add(name)
            rank_zero_warn(
                f"The reward {name!r} gave None for a completion of prompt {prompts[first // group_size].id!r}, which "
                "leaves it to the other rewards. A completion that none of them scores is left out of training: "
                "completions/unscored_frac counts them. If that is not meant, a return is missing in the reward."
            )

    def _without_answer(self, scores: dict[str, list[Score]]) -> Tensor | None:
        """Return the completions in which no reward found an answer, [N] bool; None if no reward looks for one."""
        looking = [reward.name for reward in self.rewards if reward.extracts_answer]
        if not looking:
            return None
        # One that gave None has not looked; what nobody looked at is not said to be without an answer.
        looked = torch.tensor([[not score.skipped for score in scores[name]] for name in looking], dtype=torch.bool)
        has_answer = torch.tensor([[not score.no_answer for score in scores[name]] for name in looking])
        return ~(has_answer & looked).any(0) & looked.any(0)

    def close(self) -> None:
        """Free engine, rewards and threads."""
        self._closing.set()
        self._beginners.shutdown()
        self._scorers.shutdown()
        # A thread that samples leaves at its next completion, and frees the lock; one that hangs never does.
        if self._engine_lock.acquire(timeout=_CLOSING_SECONDS):
            try:
                self.engine.close()
            finally:
                self._engine_lock.release()
        else:
            rank_zero_warn(f"The engine is still busy after {_CLOSING_SECONDS:g} s, and is left as it is.")
        for reward in self.rewards:
            try:
                call_within(_CLOSING_SECONDS, reward.close, name=f"close-{reward.name}")
            except TimeoutError:
                rank_zero_warn(f"The reward {reward.name!r} has not closed in {_CLOSING_SECONDS:g} s, and is left.")


def _portions(
    requests: Sequence[Request], missing: set[tuple[int, int]], size: int
) -> Iterator[tuple[list[Request], dict[int, list[int]]]]:
    """Yield requests for at most ``size`` missing samples at once, and of each request the samples that it asks for."""
    jobs = [(r, s) for r in requests for s in range(len(r.seeds)) if (r.index, s) in missing]
    for start in range(0, len(jobs), size):
        samples: dict[int, list[int]] = {}
        chosen: dict[int, Request] = {}
        for request, sample in jobs[start : start + size]:
            samples.setdefault(request.index, []).append(sample)
            chosen[request.index] = request
        parts = [replace(r, seeds=tuple(r.seeds[s] for s in samples[i])) for i, r in chosen.items()]
        yield parts, samples
