"""Dynamic sampling: sample prompts until a rollout is full of mixed groups, and drop the rest.

A group is mixed if it holds correct and incorrect completions (DAPO, 2503.14476 Eq. 11), or if its total rewards differ
(Olmo 3): the objective's ``uniform_by`` says which. Either goes by what the rewards gave, before the objective shapes
it (label noise, length penalty, map): that is what can be known before the learner has seen the rollout. What shaping
makes uniform, the objective's own filter drops. Completions that no reward scored count in neither: a group with fewer
than two others is uniform.

One algorithm serves any number of ranks. Every rank samples its part of the positions, and after each group the ranks
exchange which groups are mixed, so that all of them take the same decisions from the same facts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_grpo.errors import StopRun
from lit_grpo.rollout.generator import Begun, RolloutGenerator, Scored
from lit_grpo.types import Completion, Prompt, Rollout, Sampling

OnShort = Literal["fill", "error"]
UniformBy = Literal["reward", "correct"]
"""By what groups are uniform: equal total rewards, or all completions correct or none."""
Gather = Callable[[Any], list[Any]]
"""Exchanges a value between the ranks and returns those of all, by rank."""

# A score is read when so many later groups have been sampled. Nearly always it is ready by then, and the moment depends
# on the order of sampling alone, not on how fast a reward was: what is asked for next, and with it the batches of an
# engine in this process, are the same in every run.
MAX_PENDING_SCORES = 4
MOST_AT_ONCE = 3
"""At most this many times the prompts of a rollout are asked for at once, as long as little is known."""
# A prompt too few costs the time of a whole completion, sampled while the engine is empty otherwise; one too many is
# cancelled. So as many are asked for as suffice nearly always, and more where that has become a matter of chance.
SURE, DOUBTFUL = 2.0, 1.0
"""Standard deviations below the expected number of mixed groups: what is counted on of prompts that are asked for, and
of those that are under way."""

Tried = tuple[int, int]
"""Mixed groups, and the prompts that gave them."""


def no_exchange(value: Any) -> list[Any]:
    """Return the value of the only rank: the :data:`Gather` of a run of one process."""
    return [value]


class GlooExchange:
    """The :data:`Gather` of several ranks, by gloo: every rank calls it and gets the values of all."""

    def __init__(self) -> None:
        # A process group of its own: a thread may use it beside the learner's collectives.
        self._group = torch.distributed.new_group(backend="gloo")

    def __call__(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        out: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(out, value, group=self._group)
        return out


@dataclass(frozen=True)
class CandidateGroup:
    """All completions of one prompt, scored."""

    position: int
    """How many prompts after the start of the rollout, over all ranks."""
    prompt: Prompt
    completions: list[Completion]
    texts: list[str]
    rewards: dict[str, Tensor]
    """Each reward by name, [G]."""
    reward: Tensor
    """Weighted sum, [G]."""
    no_answer: Tensor | None
    """Completions without a parsable answer, [G]; None where no reward looks for one."""
    correct: Tensor | None
    """Correct completions, [G] bool; None where no reward says what is right."""
    judged: Tensor | None
    """``judged`` of the rollout, [G]."""
    flipped_reward: Tensor | None
    """``flipped_reward`` of the rollout, [G]."""


@dataclass(frozen=True)
class SamplingResult:
    """This rank's part of a full rollout, and how many prompts the rollout took over all ranks."""

    rollout: Rollout
    prompts: int
    skipped: list[int]
    """Positions of the prompts whose groups were uniform and left out, over all ranks."""
    tried: list[CandidateGroup]
    """All groups of those prompts that this rank sampled, left out or not."""
    mixed: int = 0
    """Number of mixed groups of those prompts, over all ranks; 0 without dynamic sampling."""


class DynamicSampler:
    """Makes rollouts of the first prompts, in their order, whose groups are mixed.

    As many prompts are given to the engine at once as will nearly always do, by the share of mixed groups in this
    rollout so far and in the one before it. As soon as it is doubtful that those under way will do, more are given to
    it, and what is no longer needed is cancelled. "First" is by the prompts' order and not by who finished first, which
    would favour short completions. Prompts behind the last one chosen count as not used, whatever was sampled for them,
    and begin the next rollout.

    The rollout does not depend on the number of ranks: seeds derive from positions, and which groups are chosen follows
    from the positions and rewards alone. A rank with more than its share of them hands whole groups to one with fewer.

    Args:
        generator: engine and rewards.
        sampling: how to draw.
        group_size: samples of each prompt.
        groups: of the whole rollout, over all ranks; a multiple of ``world_size``.
        rank: of this process.
        world_size: number of processes.
        gather: exchange between them.
        uniform_by: ``reward``: a group is uniform if its total rewards are equal; ``correct``: if all its completions
            are correct, or none.
        max_rounds: at most ``max_rounds * groups`` prompts are tried.
        on_short: what happens if they do not suffice: uniform groups, which have no gradient, fill the rollout up, with
            a warning (``fill``), or the run ends (``error``).
    """

    def __init__(
        self,
        generator: RolloutGenerator,
        sampling: Sampling,
        group_size: int,
        groups: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        gather: Gather = no_exchange,
        uniform_by: UniformBy = "reward",
        max_rounds: int = 10,
        on_short: OnShort = "fill",
    ) -> None:
        self.generator, self.sampling, self.group_size, self.groups = generator, sampling, group_size, groups
        self.rank, self.world_size, self.gather = rank, world_size, gather
        self.max_prompts, self.on_short, self.uniform_by = max_rounds * groups, on_short, uniform_by

    def sample(
        self, prompt_at: Callable[[int], Prompt], *, index: int, sync: bool = True, before: Tried = (0, 0)
    ) -> SamplingResult:
        """Make rollout ``index``.

        Args:
            prompt_at: the prompt so many positions after the start of the rollout.
            index: number of the rollout, part of every seed.
            sync: bring the engine's weights up to date first.
            before: mixed groups and prompts of the rollout before this one, of all ranks; two zeros: there was none.

        Raises:
            StopRun: too few mixed groups with ``on_short="error"``; not a single one with ``fill``.
        """
        seconds_sync = self.generator.sync() if sync else 0.0
        started = time.perf_counter()
        stream = _GroupStream(self.generator, prompt_at, self.sampling, self.group_size, index)
        # Whether the group at each position is mixed, over all ranks.
        mixed_at: dict[int, bool] = {}
        # The share of its completions that are correct; None where no reward says what is right.
        right_at: dict[int, float | None] = {}
        results: dict[int, Scored] = {}
        totals: list[float] = []
        # Of the first `known_until` positions the outcome is known without a gap.
        asked, rounds, known_until = 0, 0, 0
        try:
            while sum(mixed_at[p] for p in range(known_until)) < self.groups:
                more = self._more(mixed_at, asked, before)
                if more > 0:
                    stream.add([p for p in range(asked, asked + more) if p % self.world_size == self.rank])
                    asked, rounds = asked + more, rounds + 1
                scored_group = stream.next()
                outcome = None
                if scored_group is not None:
                    position, result = scored_group
                    results[position] = result
                    totals += [total for total in self.generator.totals(result) if not math.isnan(total)]
                    prompt = prompt_at(position)
                    correct = self.generator.correct(prompt, result)
                    outcome = position, self._is_mixed(prompt, result), _share(correct)
                # One exchange for each group, and not one for each round: a rank never runs its engine dry while it
                # waits for the last long completion of another's round.
                outcomes = [one for one in self.gather(outcome) if one is not None]
                if not outcomes and asked >= self.max_prompts:
                    break
                mixed_at |= {position: mixed for position, mixed, _ in outcomes}
                right_at |= {position: right for position, _, right in outcomes}
                while known_until in mixed_at:
                    known_until += 1
        finally:
            stream.close()
        times = {"sync": seconds_sync, "generate": time.perf_counter() - started, "reward": 0.0}

        # Behind the first position that is not known yet nothing counts, or the order of finishing would choose.
        known = {position: mixed_at[position] for position in range(known_until)}
        mixed = sum(known.values())
        chosen = choose_groups(known, self.groups, rounds, self.on_short, self.uniform_by)
        used = chosen[-1] + 1 if mixed >= self.groups else known_until
        order = sorted(results)
        sampled = self.generator.build_rollout(
            [prompt_at(p) for p in order],
            [stream.completions[p] for p in order],
            [results[p] for p in order],
            self.sampling,
            index,
            times,
            self.group_size,
            order,
        )
        candidates = {group.position: group for group in split_groups(sampled, order)}
        totals_of_ranks = self.gather((sum(totals), len(totals)))
        # Of the prompts that the rollout took, apart from the mixed groups that it keeps.
        right = [value for position in range(used) if (value := right_at[position]) is not None]
        verdicts = (
            {}
            if not right
            else {
                "sampling/all_correct_frac": sum(value == 1 for value in right) / len(right),
                "sampling/all_wrong_frac": sum(value == 0 for value in right) / len(right),
            }
        )
        scored = sum(number for _, number in totals_of_ranks)
        # Where nothing was scored there is no mean.
        mean = {} if not scored else {"sampling/reward": sum(total for total, _ in totals_of_ranks) / scored}
        metrics = (
            sampled.metrics
            | verdicts
            | mean
            | {
                "sampling/rounds": float(rounds),
                "sampling/prompts": float(used),
                "sampling/kept": float(min(mixed, self.groups)),
                "sampling/surplus": float(sum(mixed_at.values()) - min(mixed, self.groups)),
                "sampling/short": float(max(0, self.groups - mixed)),
                "sampling/cancelled": float(asked - len(mixed_at)),
            }
        )
        share = self._share(candidates, chosen)
        return SamplingResult(
            join_groups(share, sampled, metrics),
            used,
            [p for p in range(used) if not mixed_at[p] and p not in chosen],
            [candidates[p] for p in order if p < used],
            sum(mixed_at[p] for p in range(used)),
        )

    def _is_mixed(self, prompt: Prompt, result: Scored) -> bool:
        totals = self.generator.totals(result)
        values: Sequence[float | bool | None] | None = totals
        if self.uniform_by == "correct":
            values = self.generator.correct(prompt, result)
        if values is None:
            raise ValueError("no reward says what is correct, so groups cannot be told by it")
        pairs = zip(values, totals, strict=True)
        known = [value for value, total in pairs if value is not None and not math.isnan(total)]
        return any(value != known[0] for value in known)

    def _more(self, mixed_at: dict[int, bool], asked: int, before: Tried) -> int:
        """Return how many further prompts to ask for now."""
        mixed, scored = sum(mixed_at.values()), len(mixed_at)
        under_way, seen = asked - scored, scored + before[1]
        if asked >= self.max_prompts:
            return 0
        # A share seen in a few groups means little, so half a rollout is waited for.
        if under_way and seen < self.groups // 2:
            return 0
        share = (mixed + before[0]) / seen if seen else 1.0
        missing = self.groups - mixed
        if under_way and at_least(under_way, share, DOUBTFUL) >= missing:
            return 0
        most = self.max_prompts if seen >= self.groups else MOST_AT_ONCE * self.groups
        wanted = prompts_to_ask(missing, share, max(most, missing)) - under_way
        return min(self.max_prompts - asked, max(0, wanted))

    def _share(self, candidates: dict[int, CandidateGroup], chosen: Sequence[int]) -> list[CandidateGroup]:
        """Return this rank's groups of the rollout: as many as on every rank, its own as far as possible."""
        own = [position for position in chosen if position in candidates]
        size = len(chosen) // self.world_size
        kept, spare = own[:size], own[size:]
        kept_of_rank: list[int] = self.gather(len(kept))
        pool = [group for given in self.gather([candidates[p] for p in spare]) for group in given]
        start = sum(size - count for count in kept_of_rank[: self.rank])
        received = pool[start : start + size - len(kept)]
        return sorted([candidates[p] for p in kept] + received, key=lambda group: group.position)


class _GroupStream:
    """A stream of whole groups, in the order in which they were sampled; prompts can be added at any time."""

    def __init__(
        self,
        generator: RolloutGenerator,
        prompt_at: Callable[[int], Prompt],
        sampling: Sampling,
        group_size: int,
        index: int,
    ) -> None:
        self.generator, self.prompt_at, self.sampling = generator, prompt_at, sampling
        self.group_size, self.index = group_size, index
        self.completions: dict[int, list[Completion]] = {}
        self._incomplete: dict[int, list[tuple[Completion, Future[Begun] | None]]] = {}
        self._generations: deque[Iterator[Completion]] = deque()
        self._scores: deque[tuple[int, Future[Scored]]] = deque()

    def add(self, positions: Sequence[int]) -> None:
        """Ask for the prompts at these positions too."""
        if not positions:
            return
        make = self.generator.request
        requests = [make(p, p, self.prompt_at(p), self.group_size, self.index) for p in positions]
        self._incomplete |= {position: [] for position in positions}
        self._generations.append(self.generator.generate(requests, self.sampling))

    def next(self) -> tuple[int, Scored] | None:
        """Return position and scores of the next group; None if nothing is under way."""
        while self._generations and len(self._scores) <= MAX_PENDING_SCORES:
            completion = next(self._generations[0], None)
            if completion is None:
                self._generations.popleft()
                continue
            self._generations.rotate(-1)
            position, generator = completion.request, self.generator
            prompt, parts = self.prompt_at(position), self._incomplete[position]
            parts.append((completion, generator.begin_score(prompt, completion)))
            if len(parts) == self.group_size:
                del self._incomplete[position]
                parts.sort(key=lambda part: part[0].sample)
                group = self.completions[position] = [one for one, _ in parts]
                again = generator.judges_twice(self.index, position)
                scores = generator.score_group(prompt, group, again, [begun for _, begun in parts])
                self._scores.append((position, scores))
        if not self._scores:
            if self._incomplete:
                raise RuntimeError(f"the engine ended with {len(self._incomplete)} groups incomplete")
            return None
        position, future = self._scores.popleft()
        return position, future.result()

    def close(self) -> None:
        """Cancel what is under way."""
        for generation in self._generations:
            # An iterator by its type, a generator in fact.
            generation.close()  # type: ignore[attr-defined]
        for _, future in self._scores:
            future.cancel()


def at_least(prompts: int, share: float, deviations: float) -> float:
    """Return the mixed groups of prompts that can be counted on: the mean of a binomial, less standard deviations."""
    return prompts * share - deviations * math.sqrt(prompts * share * (1 - share))


def prompts_to_ask(missing: int, share: float, most: int) -> int:
    """Return the fewest prompts of which ``missing`` mixed groups can be counted on, or ``most``.

    Args:
        missing: mixed groups that are wanted.
        share: of the prompts that give a mixed group.
        most: bound of the result; at least ``missing``.
    """
    # What can be counted on is below zero for few prompts, and grows with their number from there on.
    low, high = missing, most
    while low < high:
        middle = (low + high) // 2
        if at_least(middle, share, SURE) >= missing:
            high = middle
        else:
            low = middle + 1
    return low


def choose_groups(
    mixed_at: dict[int, bool], groups: int, rounds: int, on_short: OnShort, uniform_by: UniformBy = "reward"
) -> list[int]:
    """Return the positions of the groups of the rollout, in order.

    Raises:
        StopRun: see :meth:`DynamicSampler.sample`.
    """
    mixed = sum(mixed_at.values())
    good = sorted(position for position, is_mixed in mixed_at.items() if is_mixed)[:groups]
    if mixed >= groups:
        return good
    with_what = "unequal rewards" if uniform_by == "reward" else "correct and incorrect completions"
    what = f"{len(mixed_at)} prompts in {rounds} rounds gave {mixed} of {groups} groups with {with_what}"
    if on_short == "error" or not mixed:
        raise StopRun(f"dynamic sampling: {what}; the prompts are solved, far too hard, or their rewards are broken")
    rank_zero_warn(
        f"dynamic sampling: {what}. The rollout is filled up with uniform groups, which the objective drops "
        "(sampling/short counts them). Raise data.max_sampling_rounds, or choose prompts of another difficulty."
    )
    uniform = sorted(position for position, is_mixed in mixed_at.items() if not is_mixed)
    return sorted(good + uniform[: groups - mixed])


def split_groups(rollout: Rollout, positions: Sequence[int]) -> list[CandidateGroup]:
    """Return the groups of a rollout, at these positions."""
    size = rollout.group_size
    return [
        CandidateGroup(
            position,
            prompt,
            rollout.completions[g * size : (g + 1) * size],
            rollout.texts[g * size : (g + 1) * size],
            {name: values[g * size : (g + 1) * size] for name, values in rollout.rewards.items()},
            rollout.reward[g * size : (g + 1) * size],
            None if rollout.no_answer is None else rollout.no_answer[g * size : (g + 1) * size],
            None if rollout.correct is None else rollout.correct[g * size : (g + 1) * size],
            None if rollout.judged is None else rollout.judged[g * size : (g + 1) * size],
            None if rollout.flipped_reward is None else rollout.flipped_reward[g * size : (g + 1) * size],
        )
        for g, (position, prompt) in enumerate(zip(positions, rollout.prompts, strict=True))
    ]


def join_groups(groups: Sequence[CandidateGroup], like: Rollout, metrics: dict[str, float]) -> Rollout:
    """Return one rollout of whole groups; its completions are numbered anew."""
    return replace(
        like,
        prompts=[group.prompt for group in groups],
        completions=[replace(c, request=g) for g, group in enumerate(groups) for c in group.completions],
        texts=[text for group in groups for text in group.texts],
        rewards={name: torch.cat([group.rewards[name] for group in groups]) for name in like.rewards},
        reward=torch.cat([group.reward for group in groups]),
        correct=_joined(group.correct for group in groups),
        judged=_joined_judged(groups),
        flipped_reward=_joined(group.flipped_reward for group in groups),
        positions=tuple(group.position for group in groups),
        no_answer=_joined(group.no_answer for group in groups),
        metrics=metrics,
    )


def _joined(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Join what every group has, [G] each; None where a group lacks it."""
    known = list(parts)
    tensors = [part for part in known if part is not None]
    return torch.cat(tensors) if tensors and len(tensors) == len(known) else None


def _joined_judged(groups: Sequence[CandidateGroup]) -> Tensor | None:
    """Join ``judged``: a group without it, which may be another rank's, has a verdict on every completion."""
    if all(group.judged is None for group in groups):
        return None
    whole = [torch.ones(len(group.completions), dtype=torch.bool) for group in groups]
    return torch.cat([one if group.judged is None else group.judged for group, one in zip(groups, whole, strict=True)])


def _share(correct: Sequence[bool | None] | None) -> float | None:
    """Return the share of a group's verdicts that are right; None where there is none."""
    known = [right for right in correct or () if right is not None]
    return sum(known) / len(known) if known else None
