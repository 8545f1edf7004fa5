"""Lightning callbacks: save, watch and stop a run. Import them as ``lit_grpo.callbacks``."""

from lit_grpo.callbacks.collapse_detector import CollapseDetector
from lit_grpo.callbacks.conflict_monitor import ConflictMonitor
from lit_grpo.callbacks.critic_monitor import CriticMonitor
from lit_grpo.callbacks.diagnosis import Diagnosis, DiagnosisName, merge
from lit_grpo.callbacks.entropy_monitor import EntropyMonitor
from lit_grpo.callbacks.findings import Evidence, Finding
from lit_grpo.callbacks.flight_recorder import FlightRecorder
from lit_grpo.callbacks.gradient_norm_monitor import GradientNormMonitor
from lit_grpo.callbacks.health_monitor import HealthMonitor
from lit_grpo.callbacks.kl_monitor import KLMonitor
from lit_grpo.callbacks.length_monitor import LengthMonitor
from lit_grpo.callbacks.mismatch_monitor import MismatchMonitor
from lit_grpo.callbacks.monitor import Monitor
from lit_grpo.callbacks.ratio_monitor import RatioMonitor
from lit_grpo.callbacks.remedies import Remedy
from lit_grpo.callbacks.repetition_monitor import RepetitionMonitor
from lit_grpo.callbacks.reward_hacking_monitor import RewardHackingMonitor
from lit_grpo.callbacks.rollout_checkpoint import RolloutCheckpoint
from lit_grpo.callbacks.signal_monitor import SignalMonitor
from lit_grpo.callbacks.stop import StopReason, request_stop, stop_reason
from lit_grpo.callbacks.throughput_monitor import ThroughputMonitor

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
