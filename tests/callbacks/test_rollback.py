"""After a rollback the run is the run that would have been resumed from that checkpoint with the same remedy."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch

from lit_grpo.callbacks import HealthMonitor, RolloutCheckpoint, checkpoint_writer, stop_reason
from lit_grpo.callbacks.checkpoint_writer import CheckpointWriter
from lit_grpo.callbacks.diagnosis.actions import read_journal
from lit_grpo.callbacks.diagnosis.remedies import Remedy
from lit_grpo.callbacks.monitors import GradientNormMonitor
from lit_grpo.callbacks.monitors.monitor import Monitor
from lit_grpo.callbacks.rollback import CheckpointRing, restore
from lit_grpo.callbacks.rollout_end import FIRST, RolloutEnd
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import CriticConfig, OptimizerConfig
from tests import tiny
from tests.waiting import PATIENCE

ROLLOUTS = 9
SAMPLED = (
    "reward",
    "policy/entropy",
    "loss",
    "optim/grad_norm",
    "optim/lr",
    "completions/length",
    "rollout/policy_version",
    "optim/steps",
    "optim/update_to_weight_ratio",
)


class Alarm(Monitor):
    """Critical when a step moves the weights too far or they are no numbers; says it began at ``onset``."""

    keys = ("optim/update_to_weight_ratio", "reward")

    def __init__(self, bound: float = 0.5, onset: int | None = None, kind: str = "gradient_spikes") -> None:
        super().__init__()
        self.bound, self.onset, self.kind = bound, onset, kind

    def check(self, step: int, metrics: Mapping[str, float]) -> Any:
        if metrics.get("optim/update_to_weight_ratio", 0.0) > self.bound or not math.isfinite(
            metrics["policy/entropy"]
        ):
            onset = step if self.onset is None else self.onset
            yield self.finding(
                self.kind,
                "critical",
                "kicked",
                ("optim/update_to_weight_ratio", 1, metrics.get("optim/update_to_weight_ratio", 0.0), self.bound),
                onset=onset,
            )


class Kick(pl.Callback):
    """Breaks the run while the learning rate is still what it was: once a remedy has lowered it, it holds its peace."""

    survives_rollback = True

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how = at, how

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        group = trainer.optimizers[0].param_groups[0]
        if batch_idx == self.at and group["lr"] == 1e-2:
            if self.how == "nan":
                with torch.no_grad():
                    next(pl_module.parameters()).fill_(float("nan"))
            else:
                group["lr"] = 50.0


class Remedied(pl.Callback):
    """The same remedy for a run that is resumed."""

    def __init__(self, remedy: Remedy) -> None:
        self.remedy = remedy

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.remedy.apply(trainer, pl_module)


class Keep(pl.Callback):
    """Copies a checkpoint of the ring before it is pruned."""

    def __init__(self, source: Path, target: Path) -> None:
        self.source, self.target = source, target

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.source.exists() and not self.target.exists():
            self.target.write_bytes(self.source.read_bytes())


def fit(
    folder: Path, *callbacks: pl.Callback, ckpt_path: str | None = None, rollouts: int = ROLLOUTS, **changes: Any
) -> Any:
    torch.manual_seed(7)
    pl.seed_everything(7, verbose=False)
    module = tiny.module(
        optimizer=OptimizerConfig(lr=1e-2), guards={"max_engine_gap": None, "max_ratio_gap": None}, **changes
    )
    recorder = tiny.Recorder()
    trainer = tiny.trainer(
        callbacks=[*callbacks, recorder],
        default_root_dir=str(folder),
        enable_checkpointing=any(isinstance(c, RolloutCheckpoint) for c in callbacks),
    )
    trainer.fit(module, datamodule=tiny.data(rollouts=rollouts), ckpt_path=ckpt_path)
    return module, recorder, trainer


def health(**changes: Any) -> HealthMonitor:
    settings: dict[str, Any] = {
        "monitors": [Alarm()],
        "actions": {"critical": "rollback"},
        "remedies": {"learning_rate_too_high": Remedy(0.5)},
        "checkpoint_every": 2,
    }
    return HealthMonitor(**(settings | changes))


PLAIN: dict[str, Any] = {}
SHARED_TRUNK = {
    "objective": ObjectiveConfig(recipe="ppo"),
    "critic": CriticConfig(backbone="shared", warmup_rollouts=1),
}


@pytest.mark.parametrize(
    ("how", "remedy", "settings"),
    [
        ("learning rate", Remedy(0.5), PLAIN),
        ("learning rate", Remedy(0.25, {"recipe": "dr_grpo"}), PLAIN),
        ("learning rate, once", Remedy(1.0, {"entropy_coef": 0.02}), PLAIN),
        ("nan", Remedy(0.5), PLAIN),
        ("learning rate", Remedy(0.5), SHARED_TRUNK),
    ],
)
@pytest.mark.slow
def test_a_run_that_went_back_equals_one_resumed_from_there(tmp_path, how, remedy, settings):
    kick = KickOnce(5) if how.endswith("once") else Kick(5, how)
    kept = tmp_path / "kept.ckpt"
    watcher = health(remedies={"learning_rate_too_high": remedy})
    broken, recorded, trainer = fit(
        tmp_path, kick, watcher, Keep(tmp_path / "rollback" / "rollout-000004.ckpt", kept), **settings
    )
    assert watcher.targets == [4]
    assert broken.policy_version == ROLLOUTS, "the number of rollouts of the run still holds"
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == ROLLOUTS
    assert torch.isfinite(tiny.weights(broken)).all()

    resumed, wanted, _ = fit(tmp_path / "resumed", Remedied(remedy), ckpt_path=str(kept), **settings)
    for name, weight in broken.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name
    count = ROLLOUTS - 4
    assert len(wanted.metrics) == count
    assert recorded.ids[-count:] == wanted.ids
    assert recorded.prompts[-count:] == wanted.prompts
    assert recorded.versions[-count:] == wanted.versions
    for got, want in zip(recorded.metrics[-count:], wanted.metrics, strict=True):
        assert {k: got.get(k) for k in SAMPLED} == {k: want.get(k) for k in SAMPLED}
    assert recorded.metrics[4]["rollout/policy_version"] == 5
    lr = {m["rollout/policy_version"]: m["optim/lr"] for m in recorded.metrics[-count:]}
    assert set(lr.values()) == {1e-2 * remedy.lr_scale}


class KickOnce(Kick):
    """Breaks the run once."""

    def __init__(self, at: int) -> None:
        super().__init__(at, "learning rate")
        self.done = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.done and batch_idx == self.at:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            self.done = True


def test_onset_decides_how_far_back(tmp_path):
    watcher = health(monitors=[Alarm(onset=4)])
    fit(tmp_path, Kick(6, "learning rate"), watcher)
    assert watcher.targets == [2]
    events = [line for line in read_journal(tmp_path / "findings.jsonl") if line["event"] == "rollback"]
    assert [(e["step"], e["target"], e["diagnosis"]) for e in events] == [(7, 2, "learning_rate_too_high")]
    assert events[0]["remedy"] == {"lr_scale": 0.5, "objective": {}}


def test_no_loops_the_budget_ends_in_a_stop(tmp_path):
    class Always(Kick):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                trainer.optimizers[0].param_groups[0]["lr"] = 50.0

    watcher = health()
    _, recorder, trainer = fit(tmp_path, Always(5, ""), watcher)
    assert watcher.targets == [4, 2], "the second goes back further"
    reason = stop_reason(trainer)
    assert reason is not None
    assert "all 2 rollbacks are spent" in reason.reason
    assert reason.step == 6
    assert len(recorder.metrics) == 6 + 2 + 4


def test_plumbing_is_not_mended_by_going_back(tmp_path):
    watcher = health(monitors=[Alarm(kind="sampler_mismatch")])
    _, _, trainer = fit(tmp_path, Kick(5, "learning rate"), watcher)
    assert watcher.targets == []
    reason = stop_reason(trainer)
    assert reason is not None
    assert "going back would not mend it" in reason.reason


class LosesCheckpoints(pl.Callback):
    """Forgets what could be gone back to, as where a run goes on without the folder that it began in."""

    def __init__(self, watcher: HealthMonitor) -> None:
        self.watcher = watcher

    def on_train_batch_start(self, *_: Any) -> None:
        self.watcher.ring.saved = []


def test_without_a_checkpoint_from_before_it_stops(tmp_path):
    watcher = health(monitors=[Alarm(onset=0)])
    _, _, trainer = fit(tmp_path, LosesCheckpoints(watcher), Kick(5, "learning rate"), watcher)
    assert watcher.targets == []
    reason = stop_reason(trainer)
    assert reason is not None
    # A window that reaches back to before the first rollout begins with it.
    assert "no checkpoint from before rollout 1" in reason.reason


def test_back_to_the_very_start(tmp_path):
    watcher = health(monitors=[Alarm(onset=1)])
    module, recorder, trainer = fit(tmp_path, Kick(3, "learning rate"), watcher)
    assert watcher.targets == [0]
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == ROLLOUTS
    assert module.policy_version == ROLLOUTS
    assert recorder.ids[4] == recorder.ids[0]
    assert len(recorder.metrics) == 4 + ROLLOUTS


def test_a_second_return_keeps_what_the_first_has_lowered(tmp_path):
    """Otherwise the run would go wrong again just as it did: the checkpoint is from before both remedies."""

    class Twice(Kick):
        def __init__(self) -> None:
            super().__init__(3, "")
            self.rates: list[float] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            group = trainer.optimizers[0].param_groups[0]
            if batch_idx == 0:
                self.rates.append(group["lr"])
            if batch_idx == self.at and len(self.rates) < 3:
                group["lr"] = 50.0

    kick, watcher = Twice(), health(monitors=[Alarm(onset=1)])
    fit(tmp_path, kick, watcher)
    assert watcher.targets == [0, 0]
    assert kick.rates == pytest.approx([1e-2, 5e-3, 2.5e-3])


def test_the_ring_is_pruned_and_gone_at_the_end(tmp_path):
    class Look(pl.Callback):
        seen: ClassVar[list[list[str]]] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            # What is written behind the training may be under way.
            CheckpointWriter.finish_of(trainer)
            self.seen.append(sorted(p.name for p in (tmp_path / "rollback").iterdir()))

    look = Look()
    fit(tmp_path, health(checkpoints=2), look)
    assert look.seen[0] == ["rollout-000000.ckpt"]
    assert look.seen[-1] == ["rollout-000000.ckpt", "rollout-000006.ckpt", "rollout-000008.ckpt"]
    assert not (tmp_path / "rollback").exists()


def test_nothing_is_saved_for_those_who_never_go_back(tmp_path):
    fit(tmp_path, health(actions={"critical": "stop"}), rollouts=3)
    assert not (tmp_path / "rollback").exists()


@pytest.mark.slow
def test_the_runs_own_checkpoints_follow_and_a_resumed_run_keeps_the_remedy(tmp_path):
    folder = tmp_path / "checkpoints"
    remedy = Remedy(0.5, {"recipe": "dr_grpo"})
    watcher = health(remedies={"learning_rate_too_high": remedy})
    own = RolloutCheckpoint(every_n_rollouts=1, keep_last=3, dirpath=str(folder))

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            if watcher.targets and pl_module.policy_version == 7:
                trainer.should_stop = True

    whole, _, _ = fit(tmp_path / "whole", Kick(5, "learning rate"), health(remedies={"learning_rate_too_high": remedy}))
    fit(tmp_path, Kick(5, "learning rate"), watcher, Stop(), own)
    assert (folder / "last.ckpt").resolve().name == "rollout-000007.ckpt"

    again = health(remedies={"learning_rate_too_high": remedy})
    resumed, _, _ = fit(tmp_path, again, ckpt_path=str(folder / "last.ckpt"))
    assert again.targets == [4]
    assert resumed.objective.name == "dr_grpo"
    assert torch.equal(tiny.weights(resumed), tiny.weights(whole))


def test_adjust_changes_the_run_and_goes_on(tmp_path):
    watcher = health(actions={"critical": "adjust"})
    _, recorder, _ = fit(tmp_path, KickOnce(5), watcher)
    assert watcher.adjusted == ["learning_rate_too_high"]
    assert recorder.metrics[-1]["optim/lr"] == 5e-3
    assert len(recorder.metrics) == ROLLOUTS


def test_what_a_rollback_leaves_behind_is_over_and_is_told_again_if_it_returns(tmp_path):
    class Always(Kick):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                trainer.optimizers[0].param_groups[0]["lr"] = 50.0

    told = tmp_path / "told"
    command = [
        sys.executable,
        "-c",
        f"open({str(told)!r}, 'a').write(__import__('os').environ['LIT_GRPO_ACTION'] + ' ')",
    ]
    fit(tmp_path, Always(5, ""), health(notify={"command": command, "timeout": PATIENCE}))
    events = [e for e in read_journal(tmp_path / "findings.jsonl") if e["event"] in ("diagnosis", "rollback", "over")]
    assert [e["event"] for e in events] == ["diagnosis", "rollback", "over"] * 2 + ["diagnosis"]
    assert [(e["step"], e["diagnosis"], e["raised"]) for e in events if e["event"] == "over"] == [
        (5, "learning_rate_too_high", 6),
        (3, "learning_rate_too_high", 6),
    ]
    assert told.read_text().split() == ["rollback", "rollback", "stop"]


def test_a_spike_is_clipped_before_the_step(tmp_path):
    monitor = GradientNormMonitor(warmup=3, clip=1.0 + 1e-9)
    watcher = health(monitors=[monitor], actions={"critical": "log"})
    module, recorder, _ = fit(tmp_path, watcher)
    assert module.clipped_steps >= 1
    assert module.skipped_steps == 0
    clipped = [line for line in read_journal(tmp_path / "findings.jsonl") if line["event"] == "clipped_step"]
    assert len(clipped) == module.clipped_steps == recorder.metrics[-1]["optim/clipped_steps"]
    norm, limit = map(float, clipped[0]["reason"].removeprefix("optim/grad_norm ").split(" to "))
    assert norm == pytest.approx(recorder.metrics[clipped[0]["step"] - 1]["optim/grad_norm"], rel=1e-2)
    assert limit < norm
    assert module.optimizer_steps + module.empty_steps == ROLLOUTS


class Steep(pl.Callback):
    """From one rollout on, the gradient of every step is as much larger as rewards are that are paid thirtyfold."""

    def __init__(self, at: int, factor: float) -> None:
        self.at, self.factor, self.hooks = at, factor, []  # type: ignore[var-annotated]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at:
            for weight in pl_module.parameters():
                self.hooks.append(weight.register_hook(lambda gradient: gradient * self.factor))


def test_a_norm_that_jumps_and_stays_does_not_end_the_run(tmp_path):
    """The veto kept the policy where it was, so that the next gradient was as large: exit 3 after ten of them."""
    watcher = health(monitors=[GradientNormMonitor(warmup=4)], actions={"critical": "log"})
    rows = 24
    module, recorder, _ = fit(tmp_path, Steep(8, 1e4), watcher, rollouts=rows, max_grad_norm=None, max_skipped_steps=3)
    assert len(recorder.metrics) == rows
    assert module.skipped_steps == 0
    assert module.optimizer_steps + module.empty_steps == rows
    clipped = [e["step"] for e in read_journal(tmp_path / "findings.jsonl") if e["event"] == "clipped_step"]
    assert clipped[:3] == [9, 10, 11]
    assert 12 not in clipped, "then it is the new normal"
    sizes = [m["optim/update_to_weight_ratio"] for m in recorder.metrics if "optim/update_to_weight_ratio" in m]
    assert max(sizes[8:11]) <= 1.5 * max(sizes[:8]), "steps that are clipped are of the usual size"


def test_remedies_that_change_nothing_are_refused():
    with pytest.raises(ValueError, match="changes nothing"):
        Remedy(1.0)
    with pytest.raises(ValueError, match=r"Remedy\.lr_scale"):
        Remedy(2.0)


def test_a_restored_checkpoint_may_still_be_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written behind the training, slowly, and gone back to before anybody has waited for it."""
    write = checkpoint_writer.write_content
    looked_for = threading.Event()

    def slow(*arguments: Any) -> None:
        assert looked_for.wait(PATIENCE)
        time.sleep(1.0)
        write(*arguments)

    class Back(pl.Callback):
        versions: ClassVar[list[int]] = []

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.ring = CheckpointRing(1, 5)
            self.ring.folder = tmp_path / "ring"
            RolloutEnd.of(trainer).add(self.turn, FIRST)

        def turn(self, trainer: Any, pl_module: Any) -> None:
            self.versions.append(pl_module.policy_version)
            if self.versions == [1, 2]:
                self.ring.save(trainer, 2)
                assert not self.ring.path(2).exists()
                looked_for.set()
                restore(trainer, pl_module, self.ring.path(2))

    monkeypatch.setattr(checkpoint_writer, "write_content", slow)
    back = Back()
    tiny.trainer(callbacks=[back], default_root_dir=str(tmp_path)).fit(tiny.module(), datamodule=tiny.data(rollouts=3))
    assert back.versions == [1, 2, 3]
