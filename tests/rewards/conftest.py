"""Completions to score, made without an engine."""

from collections.abc import Callable

import pytest

from lit_grpo.types import Completion, Prompt, RewardInput


@pytest.fixture(scope="session")
def reward_input() -> Callable[..., RewardInput]:
    """``reward_input(text, answer)``: what a reward sees of one completion."""

    def make(text: str, answer: str | None = None, truncated: bool = False, prompt_id: str = "p") -> RewardInput:
        completion = Completion(0, 0, (1,), (-0.1,), "length" if truncated else "stop", 0)
        return RewardInput(Prompt(prompt_id, "q", (1,), answer), completion, text)

    return make
