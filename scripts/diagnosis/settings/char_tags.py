"""The character model on running sums, with reasoning and answer in tags, and two rewards."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.data import PromptSource, Row
from lit_grpo.policy import PolicyConfig
from lit_grpo.rewards import ExactMatch, FormatReward, Reward
from scripts.diagnosis.settings.setting import Setting
from scripts.diagnosis.settings.teaching import teach

ALPHABET = "0123456789=<>/ra"
ANSWER = r"<a>(\d)</a>"
DIGITS = 5
HELD_OUT = 64
TEACHING_STEPS = 400


class RunningSums(PromptSource):
    """Questions such as ``37294=``: the last digit of the sum of the digits; ``chain`` holds all running sums.

    Args:
        n: number of questions, all different.
        skip: number of questions left out, the first that are drawn.
    """

    def __init__(self, n: int, skip: int = 0) -> None:
        self.n, self.skip, self.name = n, skip, "running_sums"

    def rows(self) -> Sequence[Row]:
        drawn = random.Random(0).sample(range(10**DIGITS), self.skip + self.n)[self.skip :]
        return [self._row(f"{number:0{DIGITS}d}") for number in drawn]

    def _row(self, digits: str) -> Row:
        sums = [sum(map(int, digits[: k + 1])) % 10 for k in range(DIGITS)]
        chain = "".join(map(str, sums))
        return Row(f"{self.name}/{digits}", f"{digits}=", chain[-1], {"chain": chain}, where=digits)


def taught(row: Row, rng: random.Random) -> str:
    """Draw an answer: worked out (half), with a slip, without reasoning, or with a tag left out."""
    chain, draw = str(row.extra["chain"]), rng.random()
    if draw < 0.55:
        return f"<r>{chain}</r><a>{chain[-1]}</a>"
    if draw < 0.70:
        at, wrong = rng.randrange(DIGITS), str(rng.randrange(10))
        return f"<r>{chain[:at]}{wrong}{chain[at + 1 :]}</r><a>{wrong if at == DIGITS - 1 else rng.randrange(10)}</a>"
    if draw < 0.85:
        return f"<a>{rng.choice(row.question[:DIGITS])}</a>"
    return rng.choice((f"<r>{chain}<a>{chain[-1]}</a>", f"<r>{chain}</r>{chain[-1]}", f"<r>{chain}</r><a>{chain[-1]}"))


@dataclass(frozen=True)
class CharTags(Setting):
    """A 2-layer model of width 96; accuracy is judged by what the answer's tag holds, and the form pays 0.2."""

    name: str = "char_tags"
    lr: float = 3e-4
    max_new_tokens: int = 40
    jobs: int = 14
    evaluate_every: int = 10

    def prepare(self, models: Path) -> None:
        if not (models / self.name / "config.json").exists():
            teach(models / self.name, ALPHABET, self.source().rows(), taught, steps=TEACHING_STEPS)

    def policy(self, models: Path) -> PolicyConfig:
        return PolicyConfig(path=str(models / self.name), share_prompts=False)

    def source(self, held_out: bool = False) -> PromptSource:
        return RunningSums(HELD_OUT) if held_out else RunningSums(4000, skip=HELD_OUT)

    def rewards(self) -> list[Reward]:
        return [ExactMatch(pattern=ANSWER, name="accuracy"), FormatReward(["r", "a"], 1.0, 0.0, weight=0.2)]

    def right(self, text: str, answer: str, extra: dict[str, Any], truncated: bool) -> bool:
        found = re.findall(ANSWER, text)
        return bool(found) and found[-1] == answer
