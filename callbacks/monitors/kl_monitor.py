"""Confirms late what entropy and reward have said early."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from lit_grpo.callbacks.diagnosis.findings import Finding
from lit_grpo.callbacks.monitors.monitor import Monitor, positive


class KLMonitor(Monitor):
    """KL to the reference, by k3. Never an alarm of its own.

    In the runs of 2508.03772 it stayed flat until rollout 1200 while the format was being lost from rollout 580 on. So
    the only finding is ``kl_late``, and only for information: KL has grown to ``growth`` times what it was ``window``
    rollouts ago, after entropy has moved by ``entropy`` and the reward has lost ``lost`` of its best.

    Args:
        growth: multiple. Ours.
        window: rollouts. Ours.
        entropy: share of the entropy ``window`` rollouts ago. Ours.
        lost: share of the best reward. Ours.
        smooth: rollouts of the medians.
        actions: see :class:`Monitor`.
    """

    keys: ClassVar[tuple[str, ...]] = ("kl/ref_k3", "entropy", "reward")

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
        if min(self.history.count("kl/ref_k3"), self.history.count("entropy")) < self.window:
            return
        back = self.window - self.smooth
        kl, kl_then = self.history.median("kl/ref_k3", self.smooth), self.history.median("kl/ref_k3", self.smooth, back)
        now, then = self.history.median("entropy", self.smooth), self.history.median("entropy", self.smooth, back)
        assert kl is not None
        assert kl_then is not None
        assert now is not None
        assert then is not None
        lost = self.history.lost("reward", self.smooth)
        if kl > self.growth * kl_then and abs(now - then) > self.entropy * then and lost > self.lost:
            yield self.finding(
                "kl_late",
                "info",
                "late confirmation: KL to the reference rises after entropy and reward have turned",
                ("kl/ref_k3", self.window, kl, self.growth * kl_then, kl_then),
                onset=step - self.window,
                remedies=("none of its own: see the entropy",),
            )
