"""The phases that add up to the learner's time, and that every part of the program means the same ones."""

from lit_grpo.callbacks.monitors.throughput_monitor import ThroughputMonitor
from lit_grpo.run.phases import PHASES, learner_phases


def test_one_process_spends_all_phases_that_were_logged():
    logged = set(PHASES) - {"time/learner_idle"}
    assert list(learner_phases(logged)) == [key for key in PHASES if key != "time/learner_idle"]
    assert list(learner_phases({"time/update", "reward"})) == ["time/update"]


def test_beside_sampling_only_the_wait_counts():
    assert list(learner_phases(PHASES)) == ["time/sync", "time/learner_idle", "time/update"]


def test_the_throughput_monitor_watches_them():
    assert set(PHASES) < set(ThroughputMonitor.keys)
