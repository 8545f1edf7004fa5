"""Every callback's state survives save, new instance, load, in the form that checkpoints can hold."""

import pytest
import torch

from lit_grpo import callbacks
from lit_grpo.callbacks import HealthMonitor, RolloutCheckpoint, monitors
from lit_grpo.tracking import RunSummary
from tests.tracking.stand_in import StandIn, StandInLoader, make_trainer


def plain(callback):
    """What a callback knows, without what Lightning or a running fit hangs on it."""
    return callback.state_dict()


CALLBACKS = [RolloutCheckpoint, RunSummary, HealthMonitor]
CALLBACKS += [getattr(callbacks, name) for name in monitors.__all__]


@pytest.mark.parametrize("make", CALLBACKS, ids=lambda make: make.__name__)
def test_state_survives(tmp_path, make, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = make()
    fresh = plain(make())
    make_trainer(False, [callback], default_root_dir=str(tmp_path)).fit(StandIn(), StandInLoader(3))
    state = plain(callback)
    assert state != fresh, "the run left no state: this test would prove nothing"

    torch.save(state, tmp_path / "state.pt")
    again = make()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert plain(again) == state
