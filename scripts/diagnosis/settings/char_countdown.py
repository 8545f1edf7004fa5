"""The character model on countdown with two or three small numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.data import CountdownPrompts, PromptSource, Row
from lit_grpo.policy import PolicyConfig
from lit_grpo.rewards import CountdownReward, Reward
from lit_grpo.types import Completion, Prompt, RewardInput
from scripts.diagnosis.settings.setting import Setting
from scripts.diagnosis.settings.teaching import teach

ALPHABET = "0123456789[], :+-*/()"
HELD_OUT = 64
TEACHING_STEPS = 500


def taught(row: Row, rng: random.Random) -> str:
    """Draw an answer: the solution, the numbers under drawn operations, or too few of them."""
    draw, numbers = rng.random(), list(row.extra["nums"])
    if draw < 0.6:
        return str(row.extra["solution"]).replace(" ", "")
    rng.shuffle(numbers)
    if draw > 0.9:
        numbers.pop()
    text = str(numbers[0])
    for number in numbers[1:]:
        text += f"{rng.choice('+-*/')}{number}"
    return text


@dataclass(frozen=True)
class CharCountdown(Setting):
    """A 2-layer model of width 96 that begins with a share of right expressions between a fifth and three fifths."""

    name: str = "char_countdown"
    lr: float = 3e-4
    max_new_tokens: int = 24
    jobs: int = 14
    evaluate_every: int = 10

    def prepare(self, models: Path) -> None:
        if not (models / self.name / "config.json").exists():
            teach(models / self.name, ALPHABET, self.source().rows(), taught, steps=TEACHING_STEPS)

    def policy(self, models: Path) -> PolicyConfig:
        return PolicyConfig(path=str(models / self.name), share_prompts=False)

    def source(self, held_out: bool = False) -> PromptSource:
        n, skip = (HELD_OUT, 0) if held_out else (600, HELD_OUT)
        form = "{numbers}{target}:"
        return CountdownPrompts(n=n, skip=skip, numbers=[2, 3], largest=20, targets=[1, 60], template=form)

    def rewards(self) -> list[Reward]:
        return [CountdownReward()]

    def right(self, text: str, answer: str, extra: dict[str, Any], truncated: bool) -> bool:
        completion = Completion(0, 0, (), (), "length" if truncated else "stop", 0)
        item = RewardInput(Prompt("", "", (), answer, extra=extra), completion, text)
        return CountdownReward().score([item])[0].value == 1.0
