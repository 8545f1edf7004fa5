"""Builds what ``fit`` would build, and lets it sample every training prompt once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from lightning.pytorch import Callback, Trainer

from lit_grpo.cli.building import BuildingCLI
from lit_grpo.cli.layers import Layer
from lit_grpo.commands.filter.journal import Journal, Rate, all_rates_paths, rates_path, weights_identity
from lit_grpo.commands.filter.options import Options
from lit_grpo.commands.filter.progress import Progress
from lit_grpo.datamodule import RolloutDataModule
from lit_grpo.engines import check_engine
from lit_grpo.errors import UserError
from lit_grpo.rollout.curriculum import judge_of, pass_rate
from lit_grpo.rollout.generator import RolloutProducer
from lit_grpo.rollout.refill import split
from lit_grpo.types import Prompt, Rollout, Sampling
from lit_grpo.utils import random as rng


class FilterData(RolloutDataModule):
    """The run's data; what is sampled is the training prompts that have no pass rate yet."""

    options: Options
    rewards_config: Any = None
    """As written in the configuration."""

    def setup(self, stage: str) -> None:
        check_engine(self.engine_config)
        judge_of(self.rewards, "data.rewards")
        if self.prompts is None:
            raise UserError(
                "there are no prompts to filter, data.prompts is not set",
                where="data.prompts",
                remedy="add `prompts: {class_path: lit_grpo.data.JsonlPrompts, init_args: {path: ...}}`",
            )
        self.prepare_train_prompts(self.prompts)
        self.log_prompt_report()
        self.samples = self.options.samples or self.group_size
        self._open()

    def _open(self) -> None:
        """Read what earlier attempts found. Before any rank writes: Lightning waits for all after the set-up."""
        settings = self._settings()
        assert self.trainer is not None
        self.journal = Journal(rates_path(self.options.output, self.trainer.global_rank), settings)
        self.known = {r.id: r for path in all_rates_paths(self.options.output) for r in Journal(path, settings).read()}
        self.journal.read()

    def _settings(self) -> dict[str, Any]:
        """All that decides what a pass rate means."""
        learner = self.learner
        policy = learner.policy_config
        return {
            "model.policy": asdict(policy),
            "weights": weights_identity([policy.path, self.options.ckpt_path]),
            "ckpt_path": self.options.ckpt_path,
            "data.prompts": self.train_set.identity(),
            "data.format": self.format.identity(learner.tokenizer),
            "data.sampling": asdict(self.sampling),
            "data.rewards": self.rewards_config,
            "data.engine.name": self.engine_config.name,
            "--samples": self.samples,
            "seed_everything": rng.run_seed(),
        }

    def predict_dataloader(self) -> Any:
        trainer = self.trainer
        assert trainer is not None
        waiting = [(place, p) for place, p in enumerate(self.train_prompts) if p.id not in self.known]
        return Once(
            self.producer,
            waiting[trainer.global_rank :: trainer.world_size],
            batch=self.options.batch or self.prompts_per_rollout,
            samples=self.samples,
            sampling=self.sampling,
        )

    def rates(self, batch: Rollout) -> list[Rate]:
        """What a rollout says of its prompts."""
        judge, size = judge_of(self.rewards, "data.rewards"), batch.group_size
        found = []
        for group in split(batch, range(len(batch.prompts))):
            share = pass_rate(judge, group)
            found.append(
                Rate(
                    group.prompt.id,
                    size,
                    round(share * size),
                    share,
                    float(group.reward.double().mean()),
                    sum(c.truncated for c in group.completions) / size,
                )
            )
        return found


class Once:
    """Each of some prompts once, with seeds that depend on its place among all of them and on nothing else."""

    def __init__(
        self,
        producer: RolloutProducer,
        prompts: Sequence[tuple[int, Prompt]],
        *,
        batch: int,
        samples: int,
        sampling: Sampling,
    ) -> None:
        self.producer, self.samples, self.sampling = producer, samples, sampling
        self._batches = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Rollout]:
        for batch in self._batches:
            yield self.producer.produce(
                [prompt for _, prompt in batch],
                self.sampling,
                self.samples,
                index=0,
                purpose="filter",
                places=[place for place, _ in batch],
            )


class RateWriter(Callback):
    """Writes the pass rates of each batch as soon as they are known, and says how far it is."""

    def __init__(self, data: FilterData) -> None:
        self.data = data
        self.progress: Progress | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: Any) -> None:
        total, done = len(self.data.train_prompts), len(self.data.known)
        self.progress = Progress(total, done, trainer.world_size) if trainer.is_global_zero else None

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Rollout, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        found = self.data.rates(batch)
        self.data.journal.append(found)
        if self.progress is not None:
            self.progress.add(found)

    def on_predict_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.progress is not None:
            self.progress.end()
        trainer.strategy.barrier("filter")


def run_filter(options: Options, argv: Sequence[str], layers: Sequence[Layer]) -> tuple[Trainer, FilterData]:
    """Sample what has no pass rate yet, with the model, data and strategy of ``lit-grpo fit``.

    Args:
        options: of the filter.
        argv: what ``fit`` would get.
        layers: the configuration files, already read.
    """
    cli = BuildingCLI(argv, layers, datamodule_class=FilterData)
    data, given = cli.datamodule, cli.config["fit"]
    assert isinstance(data, FilterData)
    options.ckpt_path = given.get("ckpt_path")
    data.options = options
    data.rewards_config = [r.as_dict() if hasattr(r, "as_dict") else r for r in given["data"]["rewards"]]
    cli.trainer.callbacks.append(RateWriter(data))  # type: ignore[attr-defined]
    cli.trainer.predict(
        cli.model, datamodule=data, return_predictions=False, ckpt_path=options.ckpt_path, weights_only=True
    )
    return cli.trainer, data
