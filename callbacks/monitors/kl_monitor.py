"""Watches the KL divergence from the reference, which confirms late what entropy and reward say early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.diagnosis.kinds import DiagnosisKind, FindingKind
from lit_grpo.callbacks.monitors.monitor import Monitor, positive
from lit_grpo.callbacks.monitors.sampled import REWARDS, reward_key


class KLMonitor(Monitor):
    """Monitor of the KL divergence from the reference, by the k3 estimator, which confirms and never raises an alarm.

    In the runs of 2508.03772 it stayed flat until rollout 1200 while the format was being lost from rollout 580 on. So
    the only finding is ``kl_late``, and only for information: KL has grown to ``growth`` times what it was ``window``
    rollouts ago, after entropy has moved by ``entropy`` and the reward has lost ``lost`` of its best.

    Args:
        growth: multiple of the KL ``window`` rollouts ago above which it has grown.
        window: rollouts over which KL and entropy are compared.
        entropy: share of the entropy ``window`` rollouts ago by which it must have moved.
        lost: share of the best reward that must be lost.
        smooth: rollouts that each median is taken over.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = ("policy/kl_ref_k3", "policy/entropy", *REWARDS)
    findings: ClassVar[tuple[FindingKind, ...]] = (
        FindingKind(
            "kl_late",
            DiagnosisKind("kl_drift", "far from the reference", "the policy has moved; a late sign"),
            rank=750,
            remedies=("none of its own: see the entropy",),
        ),
    )

    def __init__(
        self,
        growth: float = 2.0,
        window: int = 20,
        entropy: float = 0.3,
        lost: float = 0.1,
        smooth: int = 5,
        actions: dict[str, str] | None = None,
    ) -> None:
        super().__init__(actions)
        positive("KLMonitor", growth=growth, window=window, smooth=smooth)
        self.growth, self.window, self.entropy, self.lost, self.smooth = growth, window, entropy, lost, smooth

    def check(self, step: int, metrics: Mapping[str, float]) -> Iterable[Finding]:
        kl = self.history.then_and_now("policy/kl_ref_k3", self.smooth, self.window)
        entropy = self.history.then_and_now("policy/entropy", self.smooth, self.window)
        if kl is None or entropy is None or kl[1] <= self.growth * kl[0]:
            return
        moved = abs(entropy[1] - entropy[0]) > self.entropy * entropy[0]
        if moved and self.history.lost(reward_key(self.history), self.smooth) > self.lost:
            yield self.finding(
                "kl_late",
                "info",
                "late confirmation: KL to the reference rises after entropy and reward have turned",
                ("policy/kl_ref_k3", self.window, kl[1], self.growth * kl[0], kl[0]),
                onset=step - self.window,
            )
