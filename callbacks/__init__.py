"""Lightning callbacks: save, watch and stop a run. Import them as ``lit_grpo.callbacks``."""

from lit_grpo.callbacks.flight_recorder import FlightRecorder
from lit_grpo.callbacks.health_monitor import HealthMonitor
from lit_grpo.callbacks.rollout_checkpoint import RolloutCheckpoint
from lit_grpo.callbacks.stop import StopReason, request_stop, stop_reason

__all__ = ["FlightRecorder", "HealthMonitor", "RolloutCheckpoint", "StopReason", "request_stop", "stop_reason"]
