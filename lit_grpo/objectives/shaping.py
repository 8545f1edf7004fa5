"""Reward shaping: what is done to the rewards of a rollout before advantages are taken."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from lit_grpo.errors import UserError
from lit_grpo.objectives.part import Part, on_off
from lit_grpo.objectives.tensors import masked, token_mean
from lit_grpo.types import Experience
from lit_grpo.utils.bounds import Bound

SHORT_LIMIT = 256
"""Generation limit below which DAPO's penalty on overlong completions is likely to hit right answers; ours."""


@dataclass(frozen=True)
class Shaping(Part):
    """Changes to the reward, in this order: label noise, truncated completions, map, entropy reward, overlong."""

    label_noise: Annotated[float, Bound(least=0, most=1)] = 0.0
    """Share of completions whose label is flipped: correct ones count as incorrect and the other way round, and the
    value v of the reward that says so becomes low + high - v (1 - v for a reward from 0 to 1)."""
    label_noise_seed: Annotated[int, Bound(least=0)] = 0
    """Seed of the flipped labels."""
    truncated_reward: Literal["keep", "zero"] = "keep"
    """Reward of completions cut by the length limit: ``zero`` sets it to 0 (Dr. GRPO)."""
    reward_map: Literal["raw", "signed"] = "raw"
    """Map of the reward: ``signed`` is 2 r - 1, so that 0/1 becomes -1/+1 (DAPO)."""
    entropy_reward: bool = False
    """Reward -<H>_i of the old policy instead of the given rewards. RENT, 2505.22660."""
    invalid_entropy: Annotated[float | None, Bound(least=0)] = None
    """<H>_i of completions without a parsable answer (RENT's format variant: 7)."""
    overlong_penalty: bool = False
    """Soft penalty on the length of completions. DAPO, 2503.14476 Eq. 13."""
    overlong_max: Annotated[int, Bound(least=0)] = 0
    """L_max, the length at which the overlong penalty reaches -1; 0 takes the length limit of the run."""
    overlong_cache: Annotated[int, Bound(least=0)] = 0
    """L_cache, the length over which the overlong penalty grows; 0 takes a fifth of L_max (released: 4096 of 20480)."""

    def labels(self) -> dict[str, str]:
        return {
            "entropy_reward": on_off(self.entropy_reward),
            "overlong_penalty": on_off(self.overlong_penalty),
            "truncated_reward": self.truncated_reward,
            "label_noise": on_off(self.label_noise),
        }

    def idle(self, *, critic: bool) -> dict[str, str]:
        reasons: dict[str, str] = {}
        if not self.label_noise:
            reasons["label_noise_seed"] = "label_noise is 0"
        if not self.entropy_reward:
            reasons["invalid_entropy"] = "the reward is not the entropy"
        if not self.overlong_penalty:
            reasons |= dict.fromkeys(("overlong_max", "overlong_cache"), "overlong_penalty is off")
        return reasons

    def cautions(self, max_new_tokens: int) -> list[str]:
        """Return warnings, one sentence each, about settings that are allowed and yet hardly meant.

        Args:
            max_new_tokens: most tokens of a completion in the run.
        """
        # DAPO's shape is a cache of 4096 below a limit of 20480: right answers seldom end in it. Of a short limit they
        # do, and one that ends at the limit gets -1, as much as a wrong answer costs.
        if not self.overlong_penalty or self.overlong_max or max_new_tokens >= SHORT_LIMIT:
            return []
        cache = self.overlong_cache or max(max_new_tokens // 5, 1)
        return [
            f"overlong_penalty is for thousands of tokens: with max_new_tokens {max_new_tokens} it begins after "
            f"{max_new_tokens - cache} and is -1 at the limit, for right answers too. Set "
            "model.objective.overlong_penalty: false, or overlong_max and overlong_cache."
        ]

    @property
    def uses_correct(self) -> tuple[str, ...]:
        return ("label_noise",) if self.label_noise else ()

    @property
    def state_fields(self) -> frozenset[str]:
        return frozenset({"rollouts"} if self.label_noise else ())

    def base(self, exp: Experience, rewards: Tensor, rollout: int) -> Tensor:
        """Return the rewards before length penalties, [N]: with label noise, and 0 where truncated if so chosen."""
        if self.label_noise:
            rewards = flip_labels(rewards, self.flips(exp, rollout), exp.flipped_rewards)
        return masked(rewards, ~exp.truncated) if self.truncated_reward == "zero" else rewards

    def correct(self, exp: Experience, rollout: int) -> Tensor:
        """Return which completions count as correct, [N] bool: with label noise, and not truncated if so chosen."""
        correct = exp.rewards > 0 if exp.correct is None else exp.correct
        if self.label_noise:
            correct = correct ^ self.flips(exp, rollout)
        return correct & ~exp.truncated if self.truncated_reward == "zero" else correct

    def shape(self, exp: Experience, base: Tensor) -> Tensor:
        """Return the rewards that advantages are made from, [N], but for a KL term."""
        rewards = 2 * base - 1 if self.reward_map == "signed" else base
        if self.entropy_reward:
            rewards = -self._entropies(exp).to(base.dtype)
        if self.overlong_penalty:
            if self.overlong_max <= 0:
                raise UserError(
                    "the soft overlong penalty begins before the generation limit, which is not set",
                    where="model.objective.overlong_max",
                    remedy="give overlong_max and overlong_cache, or call Objective.for_run(max_new_tokens)",
                )
            cache = self.overlong_cache or max(self.overlong_max // 5, 1)
            rewards = rewards + soft_overlong(exp.lengths, self.overlong_max, cache).to(base.dtype)
        return rewards

    def bounds(self, low: float, high: float) -> tuple[float, float]:
        """Return the least and greatest shaped reward of rewards between ``low`` and ``high``, a KL term aside."""
        # Label noise stays within the range of the reward that it flips.
        if self.truncated_reward == "zero":
            low, high = min(low, 0.0), max(high, 0.0)
        if self.reward_map == "signed":
            low, high = 2 * low - 1, 2 * high - 1
        if self.entropy_reward:
            low, high = float("-inf"), 0.0
        return low - self.overlong_penalty, high

    def _entropies(self, exp: Experience) -> Tensor:
        if exp.entropy is None:
            raise UserError("an entropy reward needs the entropy before the first update, which is not known")
        entropy = token_mean(exp.entropy, exp.mask)
        if self.invalid_entropy is not None:
            if exp.invalid is None:
                raise UserError(
                    "invalid_entropy needs to know which completions have no parsable answer",
                    where="model.objective.invalid_entropy",
                )
            entropy = torch.where(exp.invalid, torch.full_like(entropy, self.invalid_entropy), entropy)
        return entropy

    def flips(self, exp: Experience, rollout: int) -> Tensor:
        """Choose the completions whose label is flipped, [N] bool."""
        # Hashed and not drawn: the choice depends on seed, rollout and the completion's own key alone, so every rank,
        # every minibatch and every resumed run flips the same. Completions are not counted by their prompt: a rollout
        # may hold a prompt twice, and a minibatch of it once.
        draws = []
        for key in self._keys(exp):
            text = f"{self.label_noise_seed}/{rollout}/{key}".encode()
            draws.append(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64)
        return torch.tensor(draws, dtype=torch.float64, device=exp.lengths.device) < self.label_noise

    def _keys(self, exp: Experience) -> list[int] | list[str]:
        if exp.sample_keys is not None:
            keys: list[int] = exp.sample_keys.tolist()
            return keys
        seen: Counter[int] = Counter()
        names = []
        for group in exp.group_ids.tolist():
            names.append(f"{group}/{seen[group]}")
            seen[group] += 1
        return names


def flip_labels(rewards: Tensor, flip: Tensor, flipped: Tensor | None = None) -> Tensor:
    """Return the rewards, [N], with those of the opposite verdict where ``flip``, [N] bool.

    Args:
        rewards: as given, [N].
        flip: completions whose label is flipped, [N] bool.
        flipped: rewards of the opposite verdict, [N]; None: 1 - r, which rewards of 0 and 1 ask for.
    """
    return torch.where(flip, 1 - rewards if flipped is None else flipped.to(rewards.dtype), rewards)


def soft_overlong(lengths: Tensor, max_tokens: int, cache: int) -> Tensor:
    """Return DAPO's penalty on lengths, [N] -> [N] float64. 2503.14476 Eq. 13.

    It is 0 up to L_max - L_cache, falls linearly, and is -1 from L_max on.
    """
    return ((max_tokens - cache - lengths.double()) / cache).clamp(-1, 0)
