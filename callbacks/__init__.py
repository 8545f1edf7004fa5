"""Lightning callbacks: save, watch and stop a run. Import them as ``lit_grpo.callbacks``."""

from lit_grpo.callbacks.diagnosis.diagnosis import Diagnosis, DiagnosisName, merge
from lit_grpo.callbacks.diagnosis.findings import Evidence, Finding
from lit_grpo.callbacks.diagnosis.remedies import Remedy
from lit_grpo.callbacks.flight_recorder import FlightRecorder
from lit_grpo.callbacks.health_monitor import HealthMonitor
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
from lit_grpo.callbacks.monitors.repetition_monitor import RepetitionMonitor
from lit_grpo.callbacks.monitors.reward_hacking_monitor import RewardHackingMonitor
from lit_grpo.callbacks.monitors.signal_monitor import SignalMonitor
from lit_grpo.callbacks.monitors.throughput_monitor import ThroughputMonitor
from lit_grpo.callbacks.rollout_checkpoint import RolloutCheckpoint
from lit_grpo.run.stop import StopReason, request_stop, stop_reason

__all__ = [
    "CollapseDetector",
    "ConflictMonitor",
    "CriticMonitor",
    "Diagnosis",
    "DiagnosisName",
    "EntropyMonitor",
    "Evidence",
    "Finding",
    "FlightRecorder",
    "GradientNormMonitor",
    "HealthMonitor",
    "KLMonitor",
    "LengthMonitor",
    "MismatchMonitor",
    "Monitor",
    "RatioMonitor",
    "Remedy",
    "RepetitionMonitor",
    "RewardHackingMonitor",
    "RolloutCheckpoint",
    "SignalMonitor",
    "StopReason",
    "ThroughputMonitor",
    "merge",
    "request_stop",
    "stop_reason",
]
