"""Checks of the data module's settings: what training cannot be done with, and what a stage needs."""

from __future__ import annotations

from collections.abc import Sequence

from lit_grpo.errors import UserError
from lit_grpo.rewards.base import Reward
from lit_grpo.types import Sampling


def check_training_sampling(sampling: Sampling) -> None:
    """Check that training completions are samples of the policy's whole distribution.

    Raises:
        UserError: they would all be the same, or those of another distribution.
    """
    if sampling.temperature <= 0:
        raise UserError(
            f"training at temperature {sampling.temperature} explores nothing: "
            "all completions of a group would be the same",
            where="data.sampling.temperature",
            remedy="set a temperature above 0, usually 1.0",
        )
    if sampling.top_p != 1.0 or sampling.top_k != 0:
        raise UserError(
            "training needs samples of the whole distribution: top_p and top_k change the probabilities "
            "that the learner compares with",
            where="data.sampling",
            remedy="set top_p: 1.0 and top_k: 0 (eval_sampling may use them)",
        )


def check_answers_are_extracted(rewards: Sequence[Reward]) -> None:
    """Check that a reward tells which completions hold no answer, for an objective that asks.

    Raises:
        UserError: none does.
    """
    if not any(reward.extracts_answer for reward in rewards):
        raise UserError(
            "no reward tells which completions have no parsable answer, which invalid_entropy needs",
            where="model.objective.invalid_entropy",
            remedy="use MathReward, ExactMatch with extract, or a reward of yours with extracts_answer = True; "
            "with weight 0 it changes nothing else",
        )


def check_engine_sleep(num_prefetch: int, sleep: int) -> None:
    """Check that an engine does not sleep while it samples.

    Args:
        num_prefetch: number of rollouts that are sampled before their turn.
        sleep: level at which the engine sleeps while the learner computes; 0: it does not.

    Raises:
        UserError: it would.
    """
    if num_prefetch and sleep:
        raise UserError(
            "an engine that samples beside the learner cannot sleep meanwhile",
            where="data.engine.sleep",
            remedy="set data.engine.sleep: 0, or model.max_staleness: 0",
        )


def check_prompts_per_rollout(prompts: int, world_size: int) -> None:
    """Check that every rank has equally many prompts of a rollout.

    Raises:
        UserError: the prompts cannot be shared out like this.
    """
    if prompts % world_size:
        raise UserError(
            f"{prompts} prompts per rollout cannot be shared out over {world_size} processes",
            where="data.prompts_per_rollout",
            remedy=f"choose a multiple of {world_size}",
        )


def no_training_prompts() -> UserError:
    """Return the error of a fit without questions to train on."""
    return UserError(
        "`fit` needs questions to train on, and data.prompts is not set",
        where="data.prompts",
        remedy="add `prompts: {class_path: lit_grpo.data.JsonlPrompts, init_args: {path: ...}}`",
    )


def no_evaluation_set(key: str, stage: str) -> UserError:
    """Return the error of an evaluation without questions.

    Args:
        key: ``val`` or ``test``.
        stage: stage of the Trainer.
    """
    return UserError(
        f"`{getattr(stage, 'value', stage)}` needs questions, and data.{key} names no set",
        where=f"data.{key}",
        remedy=f"a benchmark by name, `{key}: {{gsm8k: {{samples: 8}}}}`, or "
        f"`{key}: {{mine: {{path: questions.jsonl}}}}`",
    )
