"""Functions of a user that give what is no reward, or one in an odd form; the text of the completion says which."""

from typing import Any

import torch

from lit_grpo.types import Score

RESULTS: dict[str, Any] = {
    "nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "3.5e38": 3.5e38, "1e16": 1e16,
    "10**400": 10**400, "none": None, "text": "good", "list": [1.0, 2.0], "dict": {"value": 1.0}, "complex": 1j,
    "tensor": torch.ones(3), "object": object(), "empty tuple": (), "long tuple": (1.0,) * 9,
    "details": Score(1.0, details={"a": float("nan")}), "details text": Score(1.0, details={"a": "x"}),  # type: ignore[dict-item]
}  # fmt: skip
"""What is no reward."""
GOOD: dict[str, Any] = {
    "int": 1, "bool": True, "one tensor": torch.ones(1), "half": torch.tensor(1.0, dtype=torch.bfloat16),
    "score": Score(1.0, no_answer=True, details={"a": 2}), "tuple": (1.0, False),
}  # fmt: skip
"""What is one, and 1."""


def gives(text: str) -> float:
    return {**RESULTS, **GOOD}.get(text, 1.0)


def a_tensor(texts: list[str]) -> torch.Tensor:
    return torch.ones(len(texts))
