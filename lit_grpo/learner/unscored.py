"""Rollouts of which no reward scored a single completion: one is said, and a run that has nothing else is ended."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_grpo.errors import StopRun

UNSCORED_ROLLOUTS = 3
"""Rollouts without any score at the beginning of a run, after which it ends: what never scores is a fault."""


class UnscoredRollouts:
    """Counts rollouts without any score since the run, or its last start, began.

    It goes by the share over all ranks, so that all decide alike: a rank's own few groups may well have no score. It
    sees training alone, for a set that is evaluated may have rows that nobody can judge.
    """

    def __init__(self) -> None:
        self._so_far: int | None = 0
        """None once anything was scored: a later rollout without a score is chance, or the judge's bad hour."""

    def check(self, index: int, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a rollout.

        Args:
            index: number of the rollout, from 0; messages count from 1, as every curve does.
            metrics: means over all ranks; ``completions/unscored_frac`` is absent where no reward is asked.

        Raises:
            StopRun: nothing was scored in any of the first :data:`UNSCORED_ROLLOUTS` rollouts.
        """
        if metrics.get("completions/unscored_frac", 0.0) < 1.0:
            self._so_far = None
            return
        rank_zero_warn(
            f"Rollout {index + 1}: every reward gave None for all of its completions, so it teaches nothing."
        )
        if self._so_far is None:
            return
        self._so_far += 1
        if self._so_far >= UNSCORED_ROLLOUTS:
            raise StopRun(
                f"the rewards gave None for every completion of the first {UNSCORED_ROLLOUTS} rollouts: a `return` is "
                "missing in them, or they leave everything out",
                diagnosis="verifier_failure",
            )
