"""One pass over the training prompts: build what ``fit`` would build, sample each prompt once, write its pass rate."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast

from lightning.pytorch import Callback, Trainer

from lit_grpo.cli.config_files import Layer
from lit_grpo.cli.lightning_cli import BuildOnlyCLI
from lit_grpo.commands.filter.options import Options
from lit_grpo.commands.filter.progress import FilterProgress
from lit_grpo.commands.filter.rate_journal import Rate, RateJournal, all_rates_paths, rates_path, weights_identity
from lit_grpo.datamodule import RolloutDataModule
from lit_grpo.engines import check_engine
from lit_grpo.errors import UserError
from lit_grpo.rollout.curriculum import pass_rate, primary_reward_of
from lit_grpo.rollout.dynamic_sampling import split_groups
from lit_grpo.rollout.generator import RolloutGenerator
from lit_grpo.types import Prompt, Rollout, Sampling
from lit_grpo.utils import random as rng

log = logging.getLogger(__name__)


class FilterData(RolloutDataModule):
    """Data module of a run that samples the training prompts which have no pass rate yet, each once.

    Attributes:
        options: options of the command.
        rewards_config: rewards as the configuration writes them, for comparison with an earlier attempt's.
        samples: number of completions of each prompt.
        journal: file that this rank appends to.
        known: pass rates of earlier attempts, by prompt id.
    """

    options: Options
    rewards_config: Any = None

    def setup(self, stage: str) -> None:
        check_engine(self.engine_config, lora=cast(Any, self.trainer).lightning_module.policy_config.lora)
        primary_reward_of(self.rewards, "data.rewards")
        if self.prompts is None:
            raise UserError(
                "there are no prompts to filter, data.prompts is not set",
                where="data.prompts",
                remedy="add `prompts: {class_path: lit_grpo.data.JsonlPrompts, init_args: {path: ...}}`",
            )
        self.prepare_train_prompts(self.prompts)
        self.log_prompt_report()
        self.samples = self.options.samples or self.group_size
        self._read_journals()

    def _read_journals(self) -> None:
        # Every rank reads the files of all ranks here, in the set-up, since Lightning lets none of them begin to
        # sample (and write) before all have left it.
        settings = self._settings()
        output = self.options.output
        self.journal = RateJournal(rates_path(output, cast(Trainer, self.trainer).global_rank), settings)
        files = (RateJournal(path, settings) for path in all_rates_paths(output))
        self.known = {rate.id: rate for file in files for rate in file.read()}
        self.journal.read()

    def _settings(self) -> dict[str, Any]:
        """Collect all that decides what a pass rate means."""
        policy = cast(Any, self.trainer).lightning_module.policy_config
        identity = self.state_dict()
        return {
            "model.policy": asdict(policy),
            "weights": weights_identity([policy.path, self.options.ckpt_path]),
            "ckpt_path": self.options.ckpt_path,
            "data.prompts": identity["prompts"],
            "data.format": identity["format"],
            "data.sampling": asdict(self.sampling),
            "data.rewards": self.rewards_config,
            "data.engine.name": self.engine_config.custom_engine or self.engine_config.name,
            "--samples": self.samples,
            "seed_everything": rng.run_seed(),
        }

    def predict_dataloader(self) -> Any:
        trainer = cast(Trainer, self.trainer)
        # Positions are those among all prompts, so that a resumed run draws with the seeds of an unbroken one.
        unsampled = [(position, p) for position, p in enumerate(self.train_prompts) if p.id not in self.known]
        return SinglePassSampler(
            self.producer,
            unsampled[trainer.global_rank :: trainer.world_size],
            batch=self.options.batch or self.prompts_per_rollout,
            samples=self.samples,
            sampling=self.sampling,
        )

    def rates(self, rollout: Rollout) -> list[Rate]:
        """Return the pass rates of a rollout's prompts, of the completions with a verdict.

        Raises:
            UserError: none of a prompt's has one.
        """
        size = rollout.group_size
        rates = []
        for group in split_groups(rollout, range(len(rollout.prompts))):
            share = pass_rate(group)
            if share is None:
                skipped = [repr(name) for name, values in group.rewards.items() if bool(values.isnan().all())]
                raise UserError(
                    f"prompt {group.prompt.id!r} has no pass rate: {' and '.join(skipped)} gave None for all {size} of "
                    "its completions",
                    where="data.rewards",
                    remedy="have a reward that says what is right score it, or leave it out of the prompts; the pass "
                    "rates so far are kept",
                )
            judged = size if group.judged is None else int(group.judged.sum())
            rates.append(
                Rate(
                    group.prompt.id,
                    judged,
                    # The share came from whole completions, so rounding undoes the division exactly.
                    round(share * judged),
                    share,
                    # Of the scored ones; NaN, which Python's JSON can hold, where the verdict pays nothing and what
                    # pays gave None.
                    float(group.reward.double().nanmean()),
                    sum(c.truncated for c in group.completions) / size,
                )
            )
        return rates


class SinglePassSampler:
    """Loader that samples each prompt once, with a seed that depends on its position among all prompts only.

    Args:
        producer: generator of rollouts, with the engine and the rewards.
        prompts: (position among all prompts, prompt) of this rank's share.
        batch: number of prompts sampled at once.
        samples: number of completions of each prompt.
        sampling: how completions are drawn.
    """

    def __init__(
        self,
        producer: RolloutGenerator,
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
        for number, batch in enumerate(self._batches, start=1):
            log.debug("sampling batch %d of %d", number, len(self._batches))
            yield self.producer.produce(
                [prompt for _, prompt in batch],
                self.sampling,
                self.samples,
                index=0,
                purpose="filter",
                positions=[position for position, _ in batch],
            )


class RateWriter(Callback):
    """Callback that writes the pass rates of each batch as soon as they are known, and reports progress."""

    def __init__(self, data: FilterData) -> None:
        self.data = data
        self.progress: FilterProgress | None = None

    def on_predict_start(self, trainer: Trainer, pl_module: Any) -> None:
        total, done = len(self.data.train_prompts), len(self.data.known)
        self.progress = FilterProgress(total, done, trainer.world_size) if trainer.is_global_zero else None

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Rollout, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        rates = self.data.rates(batch)
        self.data.journal.append(rates)
        if self.progress is not None:
            self.progress.add(rates)

    def on_predict_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.progress is not None:
            self.progress.end()
        # Rank 0 reads the files of all ranks next.
        trainer.strategy.barrier("filter")


def run_filter(options: Options, argv: Sequence[str], layers: Sequence[Layer]) -> tuple[Trainer, FilterData]:
    """Sample what has no pass rate yet, with the model, data and strategy of ``lit-grpo fit``.

    Args:
        options: options of the filter; ``ckpt_path`` is filled in.
        argv: the arguments that ``fit`` would get.
        layers: the configuration files, already read.
    """
    cli = BuildOnlyCLI(argv, layers, datamodule_class=FilterData)
    data, config = cli.datamodule, cli.config["fit"]
    assert isinstance(data, FilterData)
    options.ckpt_path = config.get("ckpt_path")
    data.options = options
    data.rewards_config = [r.as_dict() if hasattr(r, "as_dict") else r for r in config["data"]["rewards"]]
    cli.trainer.callbacks.append(RateWriter(data))  # type: ignore[attr-defined]
    # weights_only: a checkpoint from elsewhere must not run code. Predictions are written as they come, not collected.
    cli.trainer.predict(
        cli.model, datamodule=data, return_predictions=False, ckpt_path=options.ckpt_path, weights_only=True
    )
    return cli.trainer, data
