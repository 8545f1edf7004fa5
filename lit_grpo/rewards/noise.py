"""Label noise: some verdicts of another reward are turned round."""

from __future__ import annotations

import hashlib

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.rewards.wrappers import WrappingReward
from lit_grpo.types import RewardInput, Score


class NoisyReward(WrappingReward):
    """Another reward of 0 to 1 whose value r becomes 1 - r with the given probability.

    Which ones are turned depends on the seed, prompt, sample, policy version and text alone: a repeated run turns the
    same. ``model.objective.label_noise`` does it to the total reward; this to one reward, whose clean value is logged
    as ``reward/<name>/inner``, so that progress can be seen through the noise. Use one of them. What is judged right in
    evaluation is the clean value: leave the noise out of the configuration there.

    Args:
        reward: the other.
        probability: of a flip, for each completion on its own.
        seed: of the flips.
        weight: factor in the total reward.
        name: key under which the reward is logged.

    Raises:
        UserError: ``probability`` is outside [0, 1], or the other reward is not one of 0 to 1.
    """

    range = (0.0, 1.0)

    def __init__(
        self, reward: Reward, probability: float, seed: int = 0, weight: float = 1.0, name: str | None = "noisy"
    ) -> None:
        super().__init__(reward, weight, name)
        if not 0 <= probability <= 1:
            raise UserError(f"probability is {probability}", where="NoisyReward.probability", remedy="give 0 to 1")
        if reward.range != (0.0, 1.0):
            raise UserError(
                f"{type(reward).__name__} has values from {reward.range[0]:g} to {reward.range[1]:g}",
                where="NoisyReward.reward",
                remedy="only a reward of 0 to 1 (its `range`) can be turned round",
            )
        self._probability, self._seed = probability, seed

    def change(self, item: RewardInput, score: Score) -> float:
        completion = item.completion
        place = f"{self._seed}/{item.prompt.id}/{completion.sample}/{completion.policy_version}/{item.text}"
        digest = hashlib.blake2b(place.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        flip = int.from_bytes(digest, "big") < self._probability * 2**64
        return 1 - score.value if flip else score.value
