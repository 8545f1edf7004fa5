"""Problems that the package reasoning-gym generates: one source for all of its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.errors import UserError
from lit_grpo.utils.spelling import nearest

COLUMN = "reasoning_gym"
"""Column of a row that holds the task's name and its whole entry, for :class:`lit_grpo.rewards.ReasoningGymReward`."""


class ReasoningGymPrompts(PromptSource):
    """Problems of one task of reasoning-gym (extra ``reasoning-gym``), for ``lit_grpo.rewards.ReasoningGymReward``.

    Several tasks are several sources of a :class:`lit_grpo.data.MixedPrompts`.

    Args:
        task: name of the task, such as ``leg_counting``.
        n: number of problems.
        seed: seed of the problems; another one gives other problems.
        config: further settings of the task, for instance ``{min_animals: 3}``, which set its difficulty.
        name: name of the source; the task's name if left out. The ids are ``name/seed/number``.

    Raises:
        UserError: the package is missing, or has no such task or setting.
    """

    def __init__(
        self, task: str, n: int = 1000, seed: int = 0, config: dict[str, Any] | None = None, name: str | None = None
    ) -> None:
        if n < 1:
            raise UserError(f"n is {n}", where="ReasoningGymPrompts.n", remedy="draw at least 1 problem")
        self.task, self.n, self.seed, self.config, self.name = task, n, seed, dict(config or {}), name or task
        self._rows: list[Row] | None = None

    def rows(self) -> Sequence[Row]:
        if self._rows is None:
            data = self._dataset()
            self._rows = [self._row(number, data[number]) for number in range(self.n)]
        return self._rows

    def _dataset(self) -> Any:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise UserError(
                "the tasks of reasoning-gym need that package",
                where="ReasoningGymPrompts",
                remedy="pip install lit-grpo[reasoning-gym]",
            ) from error
        if self.task not in DATASETS:
            guess = nearest(self.task, DATASETS)
            raise UserError(
                f"reasoning-gym has no task {self.task!r}",
                where="ReasoningGymPrompts.task",
                remedy=f"did you mean {guess!r}?" if guess else f"it has {', '.join(sorted(DATASETS))}",
            )
        try:
            return reasoning_gym.create_dataset(self.task, size=self.n, seed=self.seed, **self.config)
        # The tasks check their settings with assert, and a dataclass refuses an unknown one with TypeError.
        except (TypeError, ValueError, AssertionError) as error:
            settings = [name for name in DATASETS[self.task][1].__dataclass_fields__ if name not in ("seed", "size")]
            raise UserError(
                f"the task {self.task} does not take {self.config}: {error}",
                where="ReasoningGymPrompts.config",
                remedy=f"its settings are {', '.join(settings)}",
            ) from error

    def _row(self, number: int, entry: dict[str, Any]) -> Row:
        identity = f"{self.name}/{self.seed}/{number}"
        extra = {COLUMN: {"task": self.task, "entry": entry}}
        answer = entry["answer"]
        return Row(identity, entry["question"], None if answer is None else str(answer), extra, where=identity)
