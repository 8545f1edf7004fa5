"""Lightning callbacks: save, watch and stop a run. Import them as ``lit_grpo.callbacks``."""

from lit_grpo.callbacks import monitors
from lit_grpo.callbacks.diagnosis.diagnosis import Diagnosis, merge
from lit_grpo.callbacks.diagnosis.findings import Evidence, Finding
from lit_grpo.callbacks.diagnosis.kinds import DiagnosisKind, FindingKind
from lit_grpo.callbacks.diagnosis.remedies import Remedy
from lit_grpo.callbacks.flight_recorder import FlightRecorder
from lit_grpo.callbacks.health_monitor import HealthMonitor
from lit_grpo.callbacks.monitors import *  # noqa: F403
from lit_grpo.callbacks.monitors.monitor import Monitor
from lit_grpo.callbacks.monitors.threshold import Rule
from lit_grpo.callbacks.notify import Notify
from lit_grpo.callbacks.rollout_checkpoint import RolloutCheckpoint
from lit_grpo.run.stop import StopReason, request_stop, stop_reason

__all__ = [
    "Diagnosis",
    "DiagnosisKind",
    "Evidence",
    "Finding",
    "FindingKind",
    "FlightRecorder",
    "HealthMonitor",
    "Monitor",
    "Notify",
    "Remedy",
    "RolloutCheckpoint",
    "Rule",
    "StopReason",
    "merge",
    "request_stop",
    "stop_reason",
]
__all__ += monitors.__all__
