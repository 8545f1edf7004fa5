"""Monitors in a Lightning project that is not ours: automatic optimization, a plain loader, two logged keys."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lit_grpo.callbacks import EntropyMonitor, Finding, GradientNormMonitor, stop_reason
from lit_grpo.callbacks.diagnosis.actions import read_journal
from lit_grpo.callbacks.monitors.monitor import read_metrics
from tests.tiny import kept_in


class Classifier(pl.LightningModule):
    """Somebody's classifier, which logs two of the documented keys; its learning rate is kicked at batch 30."""

    def __init__(self, kicked: bool) -> None:
        super().__init__()
        self.kicked = kicked
        self.layer = torch.nn.Linear(4, 3)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.layer(batch[0]) * (200.0 if self.kicked and batch_idx >= 30 else 1.0)
        entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
        self.log("policy/entropy", entropy)
        return torch.nn.functional.cross_entropy(logits, batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]))
        self.log("optim/grad_norm", norm)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder, *, kicked):
    pl.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(480, 4), torch.randint(0, 3, (480,)))
    monitors: list[pl.Callback] = [EntropyMonitor(), GradientNormMonitor(actions={"critical": "stop"})]
    trainer = pl.Trainer(
        max_epochs=1,
        min_epochs=0,
        accelerator="cpu",
        callbacks=monitors,
        logger=kept_in(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(Classifier(kicked), DataLoader(data, batch_size=8))
    return trainer, monitors


def test_two_monitors_stop_a_run_whose_gradients_explode(tmp_path):
    trainer, monitors = fit(tmp_path, kicked=True)
    reason = stop_reason(trainer)
    assert reason is not None
    assert reason.monitor == "GradientNormMonitor"
    assert 31 <= reason.step <= 33
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == reason.step
    assert monitors[0].initial_entropy is not None
    lines = read_journal(tmp_path / "findings.jsonl")
    found = [Finding.from_dict(line) for line in lines if line["event"] == "finding"]
    assert {f.kind for f in found} == {"gradient_spikes"}
    assert found[0].onset == 31
    assert [line["action"] for line in lines if line["event"] == "diagnosis"] == ["log", "stop"]


def test_they_are_silent_on_a_sound_run(tmp_path):
    trainer, _ = fit(tmp_path, kicked=False)
    assert stop_reason(trainer) is None
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 60
    assert not (tmp_path / "findings.jsonl").exists()


def test_all_ranks_see_the_numbers_of_rank_0():
    class Strategy:
        def broadcast(self, value: dict[str, float]) -> dict[str, float]:
            return {"policy/entropy": 1.0}

    class Trainer:
        world_size, strategy = 2, Strategy()
        callback_metrics = {"policy/entropy": torch.tensor(7.0)}  # noqa: RUF012

    trainer, module = Trainer(), torch.nn.Linear(1, 1)
    assert read_metrics(trainer, module) == {"policy/entropy": 1.0}  # type: ignore[arg-type]
    trainer.world_size = 1
    assert read_metrics(trainer, module) == {"policy/entropy": 7.0}  # type: ignore[arg-type]
