"""Dynamic sampling: go on sampling prompts until a rollout is full of groups whose rewards differ.

DAPO, 2503.14476 Eq. 11: a group of equal rewards has no advantage, so it is replaced. Told by the weighted sum of the
rewards as they were given, before the objective shapes it (label noise, length penalty, map): that is what can be
known before the learner has seen the rollout. What shaping makes uniform, the objective's own filter drops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_grpo.errors import StopRun
from lit_grpo.types import Completion, Prompt, Rollout

OnShort = Literal["fill", "error"]
Sample = Callable[[Sequence[int]], Rollout]
"""Sample and score the prompts at these places after the start of the rollout."""
Gather = Callable[[Any], list[Any]]
"""What every rank gave, by rank."""

MOST_AT_ONCE = 3
"""A round samples at most this many times the prompts of a rollout."""


@dataclass
class Group:
    """All completions of one prompt."""

    place: int
    """How many prompts after the start of the rollout, over all ranks."""
    prompt: Prompt
    completions: list[Completion]
    texts: list[str]
    rewards: dict[str, Tensor]
    reward: Tensor
    """[G]."""
    no_answer: Tensor | None
    """[G]."""

    @property
    def mixed(self) -> bool:
        """Whether the rewards differ."""
        return bool((self.reward != self.reward[0]).any())


@dataclass
class Refilled:
    """A full rollout and how many prompts it took, over all ranks."""

    rollout: Rollout
    prompts: int
    skipped: list[int]
    """Places of the prompts whose groups had equal rewards and were left out, over all ranks."""
    tried: list[Group]
    """All groups of those prompts that this rank sampled, left out or not."""


def alone(value: Any) -> list[Any]:
    """The :data:`Gather` of one process."""
    return [value]


def refill(
    sample: Sample,
    *,
    groups: int,
    rank: int = 0,
    world_size: int = 1,
    gather: Gather = alone,
    max_rounds: int = 10,
    on_short: OnShort = "fill",
) -> Refilled:
    """Sample in rounds until ``groups`` mixed groups are there; the first of them make the rollout.

    All ranks sample slices of the same window of prompts, tell each other which groups are mixed, and so choose the
    same ones, whatever their number; a rank with more than its share hands whole groups to one with fewer. Mixed groups
    beyond the rollout are dropped, since they would be stale in the next.

    Args:
        sample: samples this rank's prompts.
        groups: of the whole rollout, over all ranks; a multiple of ``world_size``.
        rank: of this process.
        world_size: number of processes.
        gather: exchange over them.
        max_rounds: bound on the rounds.
        on_short: after the last round uniform groups, which have no gradient, fill the rollout up, with a warning
            (``fill``), or the run ends (``error``).

    Raises:
        StopRun: still too few mixed groups after the last round with ``error``; not a single one with ``fill``.
    """
    own: dict[int, Group] = {}
    flags: dict[int, bool] = {}  # of every prompt so far, over all ranks: mixed or not
    parts: list[Rollout] = []
    rounds, mixed = 0, 0
    while mixed < groups and rounds < max_rounds:
        start, count = len(flags), ask(groups, mixed, len(flags))
        places = range(start, start + count)[rank::world_size]
        found: list[Group] = []
        if places:
            parts.append(sample(places))
            found = split(parts[-1], places)
        for told in gather({group.place: group.mixed for group in found}):
            flags |= told
        own |= {group.place: group for group in found}
        mixed, rounds = sum(flags.values()), rounds + 1
    chosen = choose(flags, groups, mixed, rounds, on_short)
    share = _share(own, chosen, rank, world_size, gather)
    rewards = gather((sum(float(p.reward.double().sum()) for p in parts), sum(len(p.reward) for p in parts)))
    metrics = _add_up(parts) | {
        "sampling/rounds": float(rounds),
        "sampling/prompts": float(len(flags)),
        "sampling/kept": float(min(mixed, groups)),
        "sampling/surplus": float(max(0, mixed - groups)),
        "sampling/short": float(max(0, groups - mixed)),
        "sampling/reward": sum(total for total, _ in rewards) / sum(count for _, count in rewards),
    }
    skipped = [place for place, is_mixed in flags.items() if not is_mixed and place not in chosen]
    return Refilled(join(share, parts[0], metrics), len(flags), sorted(skipped), [own[place] for place in sorted(own)])


def ask(groups: int, mixed: int, asked: int) -> int:
    """Prompts of the next round: those missing over the share of mixed groups so far."""
    missing = groups - mixed
    expected = missing if not asked else math.ceil(missing * asked / max(1, mixed))
    return max(missing, min(expected, MOST_AT_ONCE * groups))


def choose(flags: dict[int, bool], groups: int, mixed: int, rounds: int, on_short: OnShort) -> list[int]:
    """Places of the groups of the rollout, in order."""
    good = sorted(place for place, is_mixed in flags.items() if is_mixed)[:groups]
    if mixed >= groups:
        return good
    what = f"{len(flags)} prompts in {rounds} rounds gave {mixed} of {groups} groups with unequal rewards"
    if on_short == "error" or not mixed:
        raise StopRun(f"dynamic sampling: {what}; the prompts are solved, far too hard, or their rewards are broken")
    rank_zero_warn(
        f"dynamic sampling: {what}. The rollout is filled up with groups of equal rewards, which teach nothing "
        "(sampling/short counts them). Raise data.max_generation_rounds, or choose prompts of another difficulty."
    )
    uniform = sorted(place for place, is_mixed in flags.items() if not is_mixed)
    return sorted(good + uniform[: groups - mixed])


def _share(own: dict[int, Group], chosen: Sequence[int], rank: int, world_size: int, gather: Gather) -> list[Group]:
    """This rank's groups: equally many on each, its own as far as possible."""
    mine = [place for place in chosen if place in own]
    size = len(chosen) // world_size
    kept, spare = mine[:size], mine[size:]
    if world_size > 1:
        held: list[int] = gather(len(kept))
        pool = [group for given in gather([own[place] for place in spare]) for group in given]
        before = sum(size - count for count in held[:rank])
        received = pool[before : before + size - len(kept)]
        return sorted([own[place] for place in kept] + received, key=lambda group: group.place)
    return [own[place] for place in kept]


def split(rollout: Rollout, places: Sequence[int]) -> list[Group]:
    """The groups of a rollout."""
    size = rollout.group_size
    return [
        Group(
            place,
            prompt,
            rollout.completions[g * size : (g + 1) * size],
            rollout.texts[g * size : (g + 1) * size],
            {name: values[g * size : (g + 1) * size] for name, values in rollout.rewards.items()},
            rollout.reward[g * size : (g + 1) * size],
            None if rollout.no_answer is None else rollout.no_answer[g * size : (g + 1) * size],
        )
        for g, (place, prompt) in enumerate(zip(places, rollout.prompts, strict=True))
    ]


def join(groups: Sequence[Group], like: Rollout, metrics: dict[str, float]) -> Rollout:
    """One rollout of whole groups; its completions are numbered anew."""
    return replace(
        like,
        prompts=[group.prompt for group in groups],
        completions=[replace(c, request=g) for g, group in enumerate(groups) for c in group.completions],
        texts=[text for group in groups for text in group.texts],
        rewards={name: torch.cat([group.rewards[name] for group in groups]) for name in like.rewards},
        reward=torch.cat([group.reward for group in groups]),
        no_answer=None
        if like.no_answer is None
        else torch.cat([group.no_answer for group in groups if group.no_answer is not None]),
        metrics=metrics,
    )


def _add_up(parts: Sequence[Rollout]) -> dict[str, float]:
    """Metrics of all rounds of this rank: seconds and tokens in total, shares (time-outs, failures) as means."""
    total = sum(len(part.completions) for part in parts)
    out: dict[str, float] = {}
    for part in parts:
        for key, value in part.metrics.items():
            weight = 1.0 if key == "tokens" or key.startswith("time/") else len(part.completions) / total
            out[key] = out.get(key, 0.0) + weight * value
    return out
