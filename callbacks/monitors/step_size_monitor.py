"""Watches how far the policy moves on a rollout, measured after its updates: the cause that comes before its signs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding, Severity
from lit_grpo.callbacks.diagnosis.kinds import LEARNING_RATE_TOO_HIGH, DiagnosisKind, FindingKind
from lit_grpo.callbacks.monitors.monitor import Monitor, positive
from lit_grpo.callbacks.monitors.sampled import REWARDS, reward_key

KEY = "policy/step_kl"
EARLY, GROWN = 8, 10.0
"""First rollouts of a run, and multiple of their median step from which on steps have grown."""
NOT_AT_ITS_BEST = 0.1
"""Share of the best mean of two rewards that the newest must lack for steps of any size to be critical."""
REMEDIES = (
    "lower the learning rate by the factor by which policy/step_kl is too large, or more",
    "take fewer updates on each rollout, or larger ones (data.prompts_per_rollout)",
    "lengthen the warm-up",
)


STILL = 1e-8
"""Divergence a rollout, in nats a token, below which a policy stands still: 1,000 such steps in one direction come to
0.01 nats, what ten healthy ones do."""
STILL_FOR = 10
"""Rollouts in a row."""
LITTLE_RATE = 1e-3
"""Share of the highest rate so far below which a schedule is at its beginning or end, and small steps are meant."""
POLICY_STILL = DiagnosisKind(
    "policy_still",
    "the policy does not move",
    "a learning rate that is far too low, weights that no gradient reaches, or steps that are scaled away",
    outlives_rollback=True,
)
REMEDIES_STILL = (
    "raise the learning rate",
    "check that the policy's weights need gradients, and that number format keeps such small steps",
    "look at max_grad_norm and at the optimizer's eps: both scale steps down",
)


class StepSizeMonitor(Monitor):
    """Monitor of ``policy/step_kl``, the divergence of the policy from itself over the updates of one rollout.

    It is in nats a token and needs no reward, so it tells a step that is too large at the first such rollout, on any
    model and objective. Finding: ``step_too_large``, a warning where ``window`` rollouts have a mean above ``large``
    and above ``share`` of the entropy, and a median above half of that (a mean alone follows the single tokens that a
    small model is sure of), or where one rollout is above twice ``huge``; critical where ``at_once`` rollouts in a row
    are above ``huge`` and the reward is not at its best. Steps that are ten times those of the first eight rollouts are
    ``step_growing`` instead: a symptom, for a rate that is too high is so from the beginning. ``policy_still``: ten
    rollouts in a row have moved it by less than 1e-8 nats a token, though steps were taken and the rate is not at the
    beginning or the end of its schedule.

    Recorded: Qwen2.5-Coder-0.5B on GSM8K has 2e-4 to 2e-3 in healthy runs (GRPO, DAPO, GSPO with four updates, PPO,
    LoRA, staleness 1), 0.01 to 0.1 at ten times the rate and 0.2 to 0.9 at thirty times. Character models that learn
    well have means of 2e-4 to 0.02. A model of random weights may move by 0.08, which is little of its entropy of 2.5
    nats.

    Args:
        large: mean over ``window`` rollouts above which steps are too large, in nats a token.
        share: share of ``policy/entropy`` that this mean must exceed as well, where the entropy is logged.
        window: rollouts of that mean.
        huge: bound of single rollouts in nats a token, beyond which a policy does not stay what it was.
        at_once: rollouts in a row above ``huge`` that are critical.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = (KEY, "policy/entropy", "optim/lr", *REWARDS)
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind("step_too_large", LEARNING_RATE_TOO_HIGH, 565, REMEDIES),
        FindingKind(
            "step_growing",
            LEARNING_RATE_TOO_HIGH,
            568,
            REMEDIES,
            title="updates have grown",
            likely_cause="a rate that is too high for what the policy has become, or whatever began before",
        ),
        FindingKind("policy_still", POLICY_STILL, 662, REMEDIES_STILL),
    )

    def __init__(
        self,
        large: float = 0.03,
        share: float = 0.1,
        window: int = 5,
        huge: float = 0.12,
        at_once: int = 3,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("StepSizeMonitor", large=large, share=share, window=window, huge=huge, at_once=at_once)
        self.large, self.share, self.window, self.huge, self.at_once = large, share, window, huge, at_once
        self.history.watch(KEY, early=EARLY)

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        # The last that was measured: where no group has an advantage no step is taken, and one that was too large and
        # left no reward behind is still what is wrong.
        now = self.history.last(KEY)
        if now is None:
            return
        yield from self._still(step)
        bound = max(self.large, self.share * (self.history.mean("policy/entropy", self.window) or 0.0))
        values = self.history.window(KEY, self.window)
        severity: Severity = "warning"
        if self.history.holds(KEY, self.at_once, lambda value: value > self.huge):
            values, bound = values[-self.at_once :], self.huge
            # Steps of any size are worth having while the reward is at its best. Recorded: SmolLM2 goes from 9 % to
            # 84 % of its sums right in three rollouts of 0.8 to 1.5 nats.
            key = reward_key(self.history)
            worse = not self.history.count(key) or self.history.lost(key, 2) > NOT_AT_ITS_BEST
            severity = "critical" if worse else "warning"
        elif now > max(2 * self.huge, bound):
            values, bound = values[-1:], 2 * self.huge
        elif len(values) < self.window or fmean(values) <= bound or median(values) <= bound / 2:
            return
        # A rate that is too high is so from its beginning. Steps that were small and have grown follow from something.
        early = self.history.early[KEY]
        grown = len(early) == EARLY and fmean(values) > GROWN * median(early)
        yield self.finding(
            "step_growing" if grown else "step_too_large",
            severity,
            f"the updates of a rollout move the policy by {fmean(values):.2g} nats a token",
            (KEY, len(values), fmean(values), bound),
            onset=self.history.began(KEY, lambda value: value > bound / 2, step),
        )

    def _still(self, step: int) -> Iterable[Finding]:
        if self.history.now(KEY, step) is None or not self.history.holds(KEY, STILL_FOR, lambda value: value < STILL):
            return
        rates = self.history.values["optim/lr"]
        if rates and min(rates[-STILL_FOR:]) < LITTLE_RATE * max(rates):
            return
        size = self.history.mean(KEY, STILL_FOR) or 0.0
        yield self.finding(
            "policy_still",
            "warning",
            f"the updates of a rollout move the policy by {size:.1g} nats a token: nothing can be learned like this",
            (KEY, STILL_FOR, size, STILL),
            onset=self.history.began(KEY, lambda value: value < STILL, step),
        )
