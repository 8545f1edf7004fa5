"""Compile the learner's passes before the first rollout, so that no step waits for the compiler.

A compiler makes code when a pass first runs in some form: with or without gradient, with or without entropies. Some
forms come late, as the pass over completions without gradient does with the first group of equal rewards; the step that
meets one first would wait many seconds for it.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from lit_grpo.learner.forward import FROM_POLICY, ForwardRunner
from lit_grpo.objectives.objective import Objective
from lit_grpo.policy.forward.batching import Layout, PolicyInput
from lit_grpo.policy.forward.policy import EntropyMode
from lit_grpo.utils import random as rng

_LENGTHS = ((3, 5, 9), (4, 270, 31, 2))
"""Completions of two micro-batches of different sizes: what is alike in both may be taken for a constant."""
_LONG = 256
"""Tokens of a completion where a micro-batch is to be large."""


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The forms in which a run's models are used."""

    objective: Objective
    needed: frozenset[str]
    """Fields that are computed before the updates of a rollout."""
    temperature: float
    """Sampling temperature; a number in compiled code."""
    probes: bool
    """Whether completions without gradient go through the models as well."""
    measures_step: bool
    """Whether log-probabilities are computed once more after the updates."""


def compile_ahead(
    runner: ForwardRunner, layout: Layout, passes: Passes, context: AbstractContextManager[object]
) -> float:
    """Run each form of the passes on a few made-up tokens; all ranks must call it. Nothing of the run changes.

    Args:
        runner: the models.
        layout: layout of the micro-batches.
        passes: what the run does with the models.
        context: of the precision that the steps of the run compute in.

    Returns:
        Seconds that it took.
    """
    started = time.perf_counter()
    random_state = rng.get_state()
    try:
        with context:
            for lengths in (_first_lengths(runner), *_LENGTHS[1:]):
                _run_all(runner, _made_up(layout, lengths, runner.device), passes)
    finally:
        runner.reshard()
        for model in (runner.policy, runner.critic):
            if model is not None:
                model.zero_grad(set_to_none=True)
        rng.set_state(random_state)
    return time.perf_counter() - started


def _run_all(runner: ForwardRunner, inputs: PolicyInput, passes: Passes) -> None:
    wanted = passes.objective.loss_requires()
    values = "values" in wanted
    entropy: EntropyMode = "grad" if "entropy" in wanted else "detached"
    for with_gradient in (True, False) if passes.probes else (True,):
        with torch.set_grad_enabled(with_gradient):
            total = runner.critic(inputs).sum() if runner.critic is not None and values else None
            stats = runner.policy(inputs, passes.temperature, entropy, values=runner.value_mode(values))
            loss = stats.logprobs.sum() if entropy == "detached" else stats.logprobs.sum() + stats.entropy.sum()
            for part in (total, None if stats.values is None else stats.values.sum()):
                loss = loss if part is None else loss + part
            if with_gradient:
                loss.backward()
    with torch.no_grad():
        if passes.needed & FROM_POLICY:
            before: EntropyMode = "detached" if "entropy" in passes.needed else "none"
            runner.policy(inputs, passes.temperature, before, squares="sum_squared_probs" in passes.needed)
        if passes.measures_step:
            runner.policy(inputs, passes.temperature, "none")
        if runner.reference is not None:
            runner.reference(inputs, passes.temperature, "none")
        if passes.needed & {"values", "final_values"}:
            runner.values(inputs)


def _first_lengths(runner: ForwardRunner) -> tuple[int, ...]:
    """Return the completions of the micro-batch that code is made for, in numbers that it then takes to vary."""
    if torch.device(runner.device).type != "cuda":
        return _LENGTHS[0]
    # How the sum over a vocabulary is divided among the parts of a card depends on the number of tokens that the
    # compiler sees first. A few would leave the run with code for a few: about one chunk of logits is what it has.
    return (_LONG,) * max(1, runner.policy.logits_chunk // _LONG) + (9,)


def _made_up(layout: Layout, lengths: tuple[int, ...], device: torch.device | str) -> PolicyInput:
    # Ids 0 and 1 are in every vocabulary. Two prompts, so that no size is the number of completions by chance.
    prompts = [(0, 1, 0, 1, 1)] * (len(lengths) - 1) + [(1, 0, 1)]
    completions = [tuple(k % 2 for k in range(length)) for length in lengths]
    return layout.build(prompts, completions, width=max(lengths), device=device)
