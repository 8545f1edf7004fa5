"""SmolLM2-135M-Instruct on one-digit sums, as configs/addition_smollm2_cpu.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.data import AdditionPrompts, PromptSource
from lit_grpo.policy import PolicyConfig
from lit_grpo.rewards import AdditionReward, Reward
from lit_grpo.rewards.addition import final_integer
from scripts.diagnosis.settings.setting import Setting


@dataclass(frozen=True)
class SmolSums(Setting):
    """The model lies in the folder ``smol/hf`` of the models' folder. Float32, on a GPU if there is one."""

    name: str = "smol_sums"
    lr: float = 1e-5
    max_new_tokens: int = 12
    jobs: int = 6

    def policy(self, models: Path) -> PolicyConfig:
        return PolicyConfig(path=str(models / "smol/hf"), attention="sdpa", compile=False, share_prompts=False)

    def source(self, held_out: bool = False) -> PromptSource:
        return AdditionPrompts(digits=1, template="What is {a} + {b}? Answer with just the number.")

    def rewards(self) -> list[Reward]:
        return [AdditionReward()]

    def right(self, text: str, answer: str, extra: dict[str, Any], truncated: bool) -> bool:
        return final_integer(text) == final_integer(answer)

    def trainer(self) -> dict[str, Any]:
        return {"accelerator": "auto", "devices": 1}
