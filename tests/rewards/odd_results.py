# mypy: disable-error-code="arg-type"
"""Functions of a user that give what is no reward, or one in an odd form; the text of the completion says which."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from lit_grpo.types import Score

RESULTS: dict[str, Any] = {
    "nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "3.5e38": 3.5e38, "1e16": 1e16,
    "10**400": 10**400, "text": "good", "list": [1.0, 2.0], "dict": {"value": 1.0}, "complex": 1j,
    "tensor": torch.ones(3), "object": object(), "empty tuple": (), "long tuple": (1.0,) * 9,
    "tuple": (1.0, False), "tuple with a reason": (0.5, "why"), "tuple with figures": (1.0, {"acc": 1}),
    "number as text": "1.0", "bytes": b"1", "numpy array": np.ones(2), "numpy text": np.str_("1"),
    "numpy complex": np.complex64(1),
    "tensor of complex": torch.ones((), dtype=torch.complex64), "empty tensor": torch.ones(0), "list of one": [1.0],
    "decimal nan": Decimal("nan"), "numpy nan": np.float32("nan"), "tensor nan": torch.tensor(float("nan")),
    "score of text": Score("1"), "score of a tuple": Score((1.0, 2.0)), "score with a reason": Score(1.0, "why"),
    "score with a number as flag": Score(1.0, 1), "score with listed details": Score(1.0, details=["a"]),
    "details": Score(1.0, details={"a": float("nan")}), "details text": Score(1.0, details={"a": "x"}),  # type: ignore[dict-item]
}  # fmt: skip
"""What is no reward."""
GOOD: dict[str, Any] = {
    "int": 1, "bool": True, "one tensor": torch.ones(1), "half": torch.tensor(1.0, dtype=torch.bfloat16),
    "score": Score(1.0, no_answer=True, details={"a": 2}), "numpy": np.float32(1), "numpy bool": np.bool_(True),
    "numpy integer": np.int64(1), "array of one": np.ones(1), "array without axes": np.array(1.0),
    "true tensor": torch.tensor(True),
    "tensor without axes": torch.tensor(1.0), "needs grad": torch.ones((), requires_grad=True), "decimal": Decimal(1),
    "fraction": Fraction(1), "numpy flag": Score(1.0, no_answer=np.bool_(True), details={"a": 2}),
}  # fmt: skip
"""What is one, and 1."""


def gives(text: str) -> float:
    return {**RESULTS, **GOOD}.get(text, 1.0)


def a_tensor(texts: list[str]) -> torch.Tensor:
    return torch.ones(len(texts))
