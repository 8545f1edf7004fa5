"""The methods that lit-grpo adds to a vLLM server's workers: say what they serve, and load weights from files.

The server loads the class with ``--worker-extension-cls lit_grpo.engines.vllm_server.worker.WeightLoader``, and its
methods are called through ``/collective_rpc``. None of them raises: an exception would reach the caller as a bare
"internal error".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

EXTENSION = "lit_grpo.engines.vllm_server.worker.WeightLoader"
SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Configuration entries in which a served model must equal the policy."""


ALTERING = ("speculative_config", "watermark_config", "kv_transfer_config")
"""Parts of vLLM's configuration that make other ids or log-probabilities than the policy's, where there are any."""


class WeightLoader:
    """Mixed into vLLM's worker class."""

    vllm_config: Any

    def lit_grpo_facts(self) -> dict[str, Any]:
        """Return what decides whether a run can use this server."""
        config = self.vllm_config
        model = config.model_config
        text = model.hf_config.get_text_config()
        return {
            "architectures": list(model.hf_config.architectures or []),
            "shape": {name: getattr(text, name) for name in SHAPE if hasattr(text, name)},
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": int(model.max_model_len),
            "logprobs_mode": str(getattr(model.logprobs_mode, "value", model.logprobs_mode)),
            "generation_config": str(model.generation_config),
            "device": str(config.device_config.device_type),
            "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "altering": [
                *(name for name in ALTERING if getattr(config, name, None) is not None),
                *(["logits_processors"] if getattr(model, "logits_processors", None) else []),
            ],
        }

    def lit_grpo_load_weights(self, folder: str) -> dict[str, str]:
        """Replace every weight by those in the ``*.safetensors`` files of ``folder``.

        Returns:
            ``{}``, or ``{"error": message}``; the model then holds a mixture and must not be used before a load that
            succeeds.
        """
        from lit_grpo.engines.vllm.weights import reload_weights
        from lit_grpo.engines.vllm_server.weights import read_weights

        try:
            reload_weights(self.get_model(), self.vllm_config, read_weights(Path(folder)))  # type: ignore[attr-defined]
            _synchronize_device()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {}


def _synchronize_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
