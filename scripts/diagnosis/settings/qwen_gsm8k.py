"""Qwen2.5-Coder-0.5B-Instruct on GSM8K, with vLLM in the same process, on a part of one GPU."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.data import JsonlPrompts, PromptFormat, PromptSource
from lit_grpo.distributed.strategy import FSDP2Strategy
from lit_grpo.engines import EngineConfig
from lit_grpo.policy import OptimizerConfig, PolicyConfig
from lit_grpo.policy.config import CriticConfig
from lit_grpo.rewards import MathReward, Reward
from lit_grpo.rewards.math.answer import final_answer
from scripts.diagnosis.settings.setting import Setting

QUESTIONS = "GSM8K_TRAIN"
"""Environment variable with the path of the questions, where they are not in ``../shared/data``."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class QwenGsm8k(Setting):
    """Weights in float32, passes in bfloat16, as in an ordinary run. The model lies in ``qwen05/hf``."""

    name: str = "qwen_gsm8k"
    lr: float = 2e-6
    max_new_tokens: int = 260
    jobs: int = 5

    def policy(self, models: Path) -> PolicyConfig:
        # Not compiled: with five runs on one machine the compiler would take longer than it saves in 60 rollouts.
        return PolicyConfig(path=str(models / "qwen05/hf"), attention="varlen", compile=False)

    def source(self, held_out: bool = False) -> PromptSource:
        return JsonlPrompts(path=os.environ.get(QUESTIONS, "../shared/data/gsm8k_train.jsonl.gz"))

    def rewards(self) -> list[Reward]:
        return [MathReward(workers=2)]

    def right(self, text: str, answer: str, extra: dict[str, Any], truncated: bool) -> bool:
        found = NUMBER.findall(final_answer(text, "other", truncated) or "")
        return bool(found) and float(found[-1].replace(",", "")) == float(answer.replace(",", ""))

    def engine(self) -> EngineConfig:
        args = {
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            # A fixed cache: measuring what is free fails while other runs on the card start and end.
            "kv_cache_memory_bytes": 2 << 30,
        }
        return EngineConfig(name="vllm", max_num_seqs=128, gpu_memory_utilization=0.1, args=args)

    def format(self) -> PromptFormat:
        question = "{question}\n\nThink step by step, and put the final number in \\boxed{}."
        return PromptFormat(question_format=question, max_prompt_tokens=300, on_long="drop")

    def trainer(self) -> dict[str, Any]:
        return {"accelerator": "gpu", "devices": 1, "strategy": FSDP2Strategy()}

    def module(self) -> dict[str, Any]:
        return {"micro_batch_tokens": 2048}

    def critic(self) -> CriticConfig | None:
        return CriticConfig(optimizer=OptimizerConfig(lr=1e-5, warmup_steps=5))
