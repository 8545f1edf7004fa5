"""The monitors that come with lit-grpo. What is listed here is exported by lit_grpo.callbacks too."""

from lit_grpo.callbacks.monitors.collapse_detector import CollapseDetector
from lit_grpo.callbacks.monitors.conflict_monitor import ConflictMonitor
from lit_grpo.callbacks.monitors.critic_monitor import CriticMonitor
from lit_grpo.callbacks.monitors.entropy_monitor import EntropyMonitor
from lit_grpo.callbacks.monitors.gradient_norm_monitor import GradientNormMonitor
from lit_grpo.callbacks.monitors.kl_monitor import KLMonitor
from lit_grpo.callbacks.monitors.length_monitor import LengthMonitor
from lit_grpo.callbacks.monitors.mismatch_monitor import MismatchMonitor
from lit_grpo.callbacks.monitors.monitor import Monitor
from lit_grpo.callbacks.monitors.ratio_monitor import RatioMonitor
from lit_grpo.callbacks.monitors.reward_hacking_monitor import RewardHackingMonitor
from lit_grpo.callbacks.monitors.reward_monitor import RewardMonitor
from lit_grpo.callbacks.monitors.rules import RULES as RULES
from lit_grpo.callbacks.monitors.signal_monitor import SignalMonitor
from lit_grpo.callbacks.monitors.step_size_monitor import StepSizeMonitor
from lit_grpo.callbacks.monitors.threshold import ThresholdMonitor
from lit_grpo.callbacks.monitors.throughput_monitor import ThroughputMonitor

__all__ = [
    "CollapseDetector",
    "ConflictMonitor",
    "CriticMonitor",
    "EntropyMonitor",
    "GradientNormMonitor",
    "KLMonitor",
    "LengthMonitor",
    "MismatchMonitor",
    "RatioMonitor",
    "RewardHackingMonitor",
    "RewardMonitor",
    "SignalMonitor",
    "StepSizeMonitor",
    "ThresholdMonitor",
    "ThroughputMonitor",
]


def all_monitors() -> list[Monitor]:
    """Make one monitor of each class that comes with lit-grpo, with its defaults."""
    return [globals()[name]() for name in __all__]
