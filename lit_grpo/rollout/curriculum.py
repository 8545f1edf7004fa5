"""Online filtering by difficulty: prompts that are solved, or out of reach, come up less often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward, primary_reward
from lit_grpo.rollout.dynamic_sampling import CandidateGroup
from lit_grpo.types import Prompt
from lit_grpo.utils.bounds import Bound, check_fields
from lit_grpo.utils.random import derive_seed

_RANGE = float(2**63)


@dataclass(frozen=True)
class CurriculumConfig:
    """Which prompts are worth sampling, by their running pass rate.

    A prompt whose rate has left the band is passed over, but for a share ``floor`` of the times its turn comes: what
    was too hard may have come into reach, and what was solved may have been forgotten.

    Attributes:
        above: the rate must be greater than this.
        below: and smaller than this. 0 and 1 pass over what was always right or always wrong so far.
        floor: share of the turns at which a prompt outside the band is sampled all the same; above 0, so that no
            prompt is ever given up.
        smoothing: weight of the newest visit in the running rate; 1: the last visit alone counts.
        min_visits: visits before a prompt can be passed over.
    """

    above: Annotated[float, Bound(least=0, most=1)] = 0.0
    below: Annotated[float, Bound(least=0, most=1)] = 1.0
    floor: Annotated[float, Bound(above=0, most=1)] = 0.1
    smoothing: Annotated[float, Bound(above=0, most=1)] = 0.5
    min_visits: Annotated[int, Bound(least=1)] = 1

    def __post_init__(self) -> None:
        check_fields(self, "data.curriculum")
        if not self.above < self.below:
            raise UserError(
                f"the band from {self.above} to {self.below} is no part of 0 to 1",
                where="data.curriculum",
                remedy="give 0 <= above < below <= 1",
            )


class Curriculum:
    """The running pass rate of every prompt, and whether its turn is taken.

    Args:
        config: the band of pass rates that are worth sampling.
        prompts: all prompts of the training set.
        rewards: rewards of the run; the primary one says which completions are right.
        seed: seed of the run.

    Raises:
        UserError: no reward says whether an answer is right.
    """

    def __init__(
        self, config: CurriculumConfig, prompts: Sequence[Prompt], rewards: Sequence[Reward], seed: int
    ) -> None:
        self.config, self.prompts, self.seed = config, prompts, seed
        self.rewards = rewards
        primary_reward_of(rewards, "data.curriculum")
        self.rates: dict[str, tuple[int, float]] = {}
        """Number of visits and running pass rate of each prompt, by its id."""

    def copy(self) -> Curriculum:
        """Another one with the same rates so far."""
        twin = Curriculum(self.config, self.prompts, self.rewards, self.seed)
        twin.rates = dict(self.rates)
        return twin

    def chance(self, prompt_id: str) -> float:
        """Return the probability that the prompt is sampled when its turn comes."""
        visits, rate = self.rates.get(prompt_id, (0, 0.0))
        inside = visits < self.config.min_visits or self.config.above < rate < self.config.below
        return 1.0 if inside else self.config.floor

    def accepts(self, number: int, position: int) -> bool:
        """Return whether prompt ``number`` is sampled at this position of the order."""
        # Drawn from seed and position alone: every rank decides the same, and so does a resumed run.
        chance = self.chance(self.prompts[number].id)
        return chance >= 1 or derive_seed("difficulty", self.seed, position) / _RANGE < chance

    def outcome(self, groups: Sequence[CandidateGroup]) -> list[tuple[int, str, float]]:
        """Return (position, prompt's id, share of right completions) of each group that has a verdict."""
        shares = [(group, pass_rate(group)) for group in groups]
        return [(group.position, group.prompt.id, share) for group, share in shares if share is not None]

    def update(self, outcomes: Sequence[tuple[int, str, float]]) -> None:
        """Update the rates by the outcomes of a rollout, those of all ranks."""
        # In the order of positions, so that the rates do not depend on which rank was first.
        for _, prompt_id, share in sorted(outcomes):
            visits, rate = self.rates.get(prompt_id, (0, share))
            self.rates[prompt_id] = (visits + 1, rate + self.config.smoothing * (share - rate))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the whole training set, the same on every rank."""
        known = [(visits, rate) for visits, rate in self.rates.values() if visits >= self.config.min_visits]
        found = {"curriculum/known_frac": len(known) / len(self.prompts)}
        if known:
            inside = sum(self.config.above < rate < self.config.below for _, rate in known)
            found["curriculum/in_band_frac"] = inside / len(known)
            found["curriculum/pass_rate"] = sum(rate for _, rate in known) / len(known)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {prompt_id: [visits, rate] for prompt_id, (visits, rate) in self.rates.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rates = {prompt_id: (int(visits), float(rate)) for prompt_id, (visits, rate) in state.items()}


def primary_reward_of(rewards: Sequence[Reward], where: str) -> Reward:
    """Return the reward that says which completions are right.

    Raises:
        UserError: no reward says so.
    """
    reward = primary_reward(rewards)
    if reward is None:
        raise UserError(
            "no reward says whether an answer is right, so no prompt has a pass rate",
            where=where,
            remedy="add one that does, for instance lit_grpo.rewards.MathReward; with weight 0 it changes nothing else",
        )
    return reward


def pass_rate(group: CandidateGroup) -> float | None:
    """Return the share of a group's completions that are correct, of those with a verdict; None where none has one.

    Raises:
        ValueError: no reward said which are.
    """
    if group.correct is None:
        raise ValueError("no reward says whether an answer is right, so no prompt has a pass rate")
    correct = group.correct if group.judged is None else group.correct[group.judged]
    return float(correct.double().mean()) if len(correct) else None
