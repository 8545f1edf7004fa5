"""Compile the learner's passes before the first update, so that no step waits for the compiler.

A compiler makes code when a pass first runs in some form: with or without gradient, with or without entropies. Some
forms come late, as the pass over completions without gradient does with the first group of equal rewards; the step that
meets one first would wait many seconds for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

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
    runner: ForwardRunner, layout: Layout, passes: Passes, context: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Run each form of the passes on a few made-up tokens, one whenever the next item is asked for.

    All ranks must do so alike. Nothing of the run has changed after any of them, so that the models may be used for
    something else between two.

    Args:
        runner: the models.
        layout: layout of the micro-batches.
        passes: what the run does with the models.
        context: makes the context of the precision that the steps of the run compute in.
    """
    for lengths in (_first_lengths(runner), *_LENGTHS[1:]):
        for run in _forms(runner, _made_up(layout, lengths, runner.device), passes):
            random_state = rng.get_state()
            try:
                with context():
                    run()
            finally:
                runner.reshard()
                for model in (runner.policy, runner.critic):
                    if model is not None:
                        model.zero_grad(set_to_none=True)
                rng.set_state(random_state)
            yield


def _forms(runner: ForwardRunner, inputs: PolicyInput, passes: Passes) -> Iterator[Callable[[], object]]:
    """Yield a function for each form in which a run goes through its models; calling it is the pass."""
    wanted, temperature = passes.objective.loss_requires(), passes.temperature
    for with_gradient in (True, False) if passes.probes else (True,):
        yield partial(_loss_pass, runner, inputs, passes, "values" in wanted, "entropy" in wanted, with_gradient)
    if passes.needed & FROM_POLICY:
        before: EntropyMode = "detached" if "entropy" in passes.needed else "none"
        squares = "sum_squared_probs" in passes.needed
        yield partial(_without_gradient, runner.policy, inputs, temperature, before, squares=squares)
    if passes.measures_step:
        yield partial(_without_gradient, runner.policy, inputs, temperature, "none")
    if runner.reference is not None:
        yield partial(_without_gradient, runner.reference, inputs, temperature, "none")
    if passes.needed & {"values", "final_values"}:
        yield partial(_without_gradient, runner.values, inputs)


def _loss_pass(
    runner: ForwardRunner, inputs: PolicyInput, passes: Passes, values: bool, entropy: bool, with_gradient: bool
) -> None:
    """Go through the models as a loss does, and back where it has a gradient."""
    with torch.set_grad_enabled(with_gradient):
        total = runner.critic(inputs).sum() if runner.critic is not None and values else None
        mode: EntropyMode = "grad" if entropy else "detached"
        stats = runner.policy(inputs, passes.temperature, mode, values=runner.value_mode(values))
        loss = stats.logprobs.sum() + stats.entropy.sum() if entropy else stats.logprobs.sum()
        for part in (total, None if stats.values is None else stats.values.sum()):
            loss = loss if part is None else loss + part
        if with_gradient:
            loss.backward()


@torch.no_grad()
def _without_gradient(function: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    function(*args, **kwargs)


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
