"""The last values of some metrics, and the statistics of them that monitors need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean, median
from typing import Any

from lit_grpo.callbacks.monitors import statistics
from lit_grpo.callbacks.monitors.jump import AFTER, NEEDED, Jump, find_jump

REWARDS = ("sampling/reward", "reward")
"""Mean reward of everything that was sampled, where it is logged, and of what was trained on."""


class History:
    """The last ``length`` finite values of each of ``keys``, with the steps at which they were seen.

    Plain Python throughout: with at most 120 values a key, tensors would cost more than they save.

    Args:
        keys: metrics to remember; others are ignored.
        length: values to keep of each.
    """

    def __init__(self, keys: Iterable[str], length: int) -> None:
        self.length = length
        self.steps: dict[str, list[int]] = {key: [] for key in keys}
        self.values: dict[str, list[float]] = {key: [] for key in keys}
        self.early: dict[str, list[float]] = {}
        """The first values of a run, by key, for the keys that were watched with ``early``."""
        self._early_length: dict[str, int] = {}
        self.jump: Jump | None = None
        """The last jump of the reward that no update can have made; what came before it is forgotten."""
        if any(key in REWARDS for key in self.values):
            self._watch_for_jumps()

    def watch(self, key: str, early: int = 0) -> None:
        """Remember this key as well, and for good its first ``early`` values."""
        self.steps.setdefault(key, [])
        self.values.setdefault(key, [])
        if key in REWARDS:
            self._watch_for_jumps()
        if early:
            self.early.setdefault(key, [])
            self._early_length[key] = max(early, self._early_length.get(key, 0))

    def _watch_for_jumps(self) -> None:
        for name in NEEDED:
            self.steps.setdefault(name, [])
            self.values.setdefault(name, [])

    def push(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add what the step logged. A key it lacks, or has as NaN or infinity, keeps its history as it is."""
        for key, values in self.values.items():
            value = metrics.get(key)
            if value is not None and math.isfinite(value):
                values.append(float(value))
                self.steps[key].append(step)
                del values[: -self.length], self.steps[key][: -self.length]
                if len(self.early.get(key, ())) < self._early_length.get(key, 0):
                    self.early[key].append(float(value))
        self._forget_other_rewards(step)

    def _forget_other_rewards(self, step: int) -> None:
        """Forget the rewards from before a jump: they were of other prompts, or judged otherwise."""
        found = self._jump_of(AFTER, step)
        if found is None:
            return
        self.jump = found
        # Evaluations are judged by the same verifier.
        for name in [name for name in self.values if name.startswith(("reward", "sampling/reward", "val/reward"))]:
            old = len(self.values[name]) - len(self.steps_since(name, found.step + 1))
            del self.values[name][:old], self.steps[name][:old]

    def _jump_of(self, after: int, step: int) -> Jump | None:
        key = next((key for key in REWARDS if self.values.get(key)), None)
        if key is None or self.steps[key][-1] != step:
            return None
        others = {name: (self.steps[name], self.values[name]) for name in NEEDED}
        return find_jump(self.steps[key], self.values[key], others, after)

    def may_have_jumped(self, step: int) -> bool:
        """Tell whether the newest rewards look like a jump, which one or two more rollouts will show."""
        return any(self._jump_of(after, step) is not None for after in range(1, AFTER))

    def count(self, key: str) -> int:
        """Return the number of values of this key that are remembered."""
        return len(self.values[key])

    def last(self, key: str) -> float | None:
        """Return the newest value, or None."""
        values = self.values[key]
        return values[-1] if values else None

    def now(self, key: str, step: int) -> float | None:
        """Return the value of this very step, or None if it had none."""
        return self.values[key][-1] if self.steps[key] and self.steps[key][-1] == step else None

    def window(self, key: str, size: int, back: int = 0) -> list[float]:
        """Return the ``size`` values that end ``back`` values before the newest; fewer if there are fewer."""
        values = self.values[key]
        end = len(values) - back
        return values[max(0, end - size) : max(0, end)]

    def mean(self, key: str, size: int, back: int = 0) -> float | None:
        """Return the mean of a :meth:`window`; None if it is empty."""
        values = self.window(key, size, back)
        return fmean(values) if values else None

    def median(self, key: str, size: int, back: int = 0) -> float | None:
        """Return the median of a :meth:`window`; None if it is empty."""
        values = self.window(key, size, back)
        return median(values) if values else None

    def then_and_now(self, key: str, size: int, ago: int) -> tuple[float, float] | None:
        """Return the medians of the first and the last ``size`` of the newest ``ago`` values; else None."""
        values = self.window(key, ago)
        return (median(values[:size]), median(values[-size:])) if len(values) == ago else None

    def holds(self, key: str, size: int, test: Callable[[float], bool]) -> bool:
        """Tell whether the last ``size`` values are there and the test is true of each."""
        values = self.window(key, size)
        return len(values) == size and all(map(test, values))

    def began(self, key: str, test: Callable[[float], bool], default: int) -> int:
        """Find the step since which the test has been true of every value; ``default`` if the newest value fails it."""
        onset = default
        for step, value in zip(reversed(self.steps[key]), reversed(self.values[key]), strict=True):
            if not test(value):
                break
            onset = step
        return onset

    def steps_since(self, key: str, onset: int) -> list[int]:
        """Return the steps from ``onset`` on at which the key had a value."""
        return [step for step in self.steps[key] if step >= onset]

    def best(self, key: str, size: int) -> float | None:
        """Return the largest mean of ``size`` values in a row; None with fewer values."""
        values = self.values[key]
        if len(values) < size:
            return None
        return max(fmean(values[i : i + size]) for i in range(len(values) - size + 1))

    def lost(self, key: str, size: int) -> float:
        """Return the share of the best mean of ``size`` values that the newest lacks; 0 where that is unknown."""
        best, now = self.best(key, size), self.mean(key, size)
        if best is None or now is None:
            return 0.0
        found = statistics.Change(best, now, 0.0, 0, statistics.floor_of(self.values[key]))
        return found.share if now < best else 0.0

    def fall(self, key: str, recent: int = 3, before: int = 8) -> tuple[float, float]:
        """Measure how far the mean of the last ``recent`` values lies below the best of ``before`` in a row ahead.

        Returns:
            The fall as a share of that best, and in standard errors of the difference. (0, 0) with too few values.
        """
        found = statistics.fall(self.values[key], recent, before)
        return (found.share, found.errors) if found.errors > 0 else (0.0, 0.0)

    def errors_between(self, key: str, then: float, now: float, size: int = 3) -> float:
        """Return how many standard errors lie between two medians of ``size`` values each."""
        # The median's error is 1.25 times the mean's in large samples, 1.16 times with three values.
        error = statistics.noise(self.values[key]) * 1.2 * math.sqrt(2 / size)
        return abs(now - then) / error if error > 0 else 0.0 if now == then else math.inf

    def bound(self, key: str, size: int, run_length: float) -> float:
        """Return the standard errors that chance leaves once in ``run_length`` looks back over ``size`` values."""
        return statistics.bound(run_length, size, max(4, min(self.count(key), statistics.NEWEST) - 1))

    def completions(self) -> float | None:
        """Return how many completions the newest rollout sampled, from their tokens and mean length, or None."""
        tokens, length = (self.values.get(f"completions/{key}") for key in ("tokens", "length"))
        return tokens[-1] / length[-1] if tokens and length and length[-1] > 0 else None

    def rises(self, key: str, recent: int = 5, before: int = 15, errors: float = 3.0) -> bool:
        """Tell whether the mean of the last ``recent`` values lies above that of the ``before`` values ahead of them.

        It must do so beyond doubt, by more than ``errors`` standard errors. False with too few values.
        """
        values = self.values[key]
        end = len(values) - recent
        if end < recent:
            return False
        earlier = values[max(0, end - before) : end]
        error = statistics.noise(values) * math.sqrt(1 / recent + 1 / len(earlier))
        return fmean(values[end:]) - fmean(earlier) > errors * error

    def fallen(self, key: str, share: float = 0.15, errors: float = 4.0) -> bool:
        """Tell whether over ``share`` of the best is lost, by over ``errors`` standard errors; see :meth:`fall`."""
        lost, in_errors = self.fall(key)
        return lost > share and in_errors > errors

    def slope(self, key: str, size: int) -> float | None:
        """Return the least-squares slope per step over the last ``size`` values; None with fewer values."""
        values, steps = self.window(key, size), self.steps[key][-size:]
        if len(values) < size or size < 2:
            return None
        x, y = fmean(steps), fmean(values)
        spread = sum((s - x) ** 2 for s in steps)
        return sum((s - x) * (v - y) for s, v in zip(steps, values, strict=True)) / spread if spread else None

    def state_dict(self) -> dict[str, Any]:
        """Return the history as plain types."""
        state = {
            "steps": {key: list(value) for key, value in self.steps.items()},
            "values": {key: list(value) for key, value in self.values.items()},
        }
        if self.jump is not None:
            state["jump"] = list(self.jump)
        return state | ({"early": {key: list(value) for key, value in self.early.items()}} if self.early else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; a key that was not watched then starts with nothing."""
        for key in state["values"]:
            self.watch(key)
        for key in self.values:
            self.steps[key] = list(state["steps"].get(key, []))
            self.values[key] = list(state["values"].get(key, []))
        for key in self.early:
            self.early[key] = list(state.get("early", {}).get(key, []))
        self.jump = Jump(*state["jump"]) if "jump" in state else None
