"""Our contestant: LitGRPO and RolloutDataModule in a Lightning Trainer, with a clock around their parts."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import lightning.pytorch as pl
import torch
from common import Clock, Talk, Work, by_gradient

import lit_grpo.datamodule
from lit_grpo import LitGRPO, RolloutDataModule
from lit_grpo.data import InMemoryPrompts
from lit_grpo.distributed.strategy import FSDP2Strategy
from lit_grpo.engines.config import EngineConfig
from lit_grpo.learner.engine_agreement import GuardConfig
from lit_grpo.learner.forward import ForwardRunner
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import OptimizerConfig, PolicyConfig
from lit_grpo.rewards import Reward
from lit_grpo.rollout import engine_start
from lit_grpo.types import Completion, Request, RewardInput, Rollout, Sampling


class WorkReward(Reward):
    """The reward that both contestants give."""

    def __init__(self, work: Work) -> None:
        super().__init__(name="work")
        self.work = work

    def score(self, batch: Sequence[RewardInput]) -> list[float]:
        # The producer scores whole groups.
        ids, texts = [x.completion.token_ids for x in batch], [x.text for x in batch]
        return self.work.reward(batch[0].prompt.question, ids, texts)


class Steps(pl.Callback):
    """Steps as they are asked for."""

    def __init__(self, work: Work, clock: Clock, talk: Talk) -> None:
        self.work, self.clock, self.talk = work, clock, talk

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        module, data = as_ours(pl_module), trainer.datamodule  # type: ignore[attr-defined]
        engine = data.producer.engine
        if "share_decoding_cache" in self.work.settings:
            engine.shares_prompts = self.work.settings["share_decoding_cache"]
        self.clock.wrap(module, "manual_backward", "backward")
        optimizers: Any = module.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            self.clock.wrap(optimizer, "step", "optimizer")
        sampled = engine.generate
        engine.generate = replayed(self.work, module.tokenizer, data)  # the first step's samples are given
        self._sampled = sampled
        self.clock.begin()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Rollout, batch_idx: int
    ) -> None:
        module = as_ours(pl_module)
        if not self.work.learner_only:
            trainer.datamodule.producer.engine.generate = self._sampled  # type: ignore[attr-defined]
        spent = self.clock.read()
        self.talk.say(
            **spent,
            samples=len(batch.completions) * trainer.world_size,
            tokens=sum(len(c.token_ids) for c in batch.completions) * trainer.world_size,
            prompt_tokens=sum(len(p.token_ids) for p in batch.prompts) * trainer.world_size,
            loss=module.step_metrics.get("loss"),
            grad_norm=module.step_metrics.get("optim/grad_norm"),
            reward=module.step_metrics.get("reward"),
            zero_gradient_groups=module.step_metrics.get("groups/zero_advantage_frac"),
        )
        if not self.talk.wait():
            trainer.should_stop = True
        self.clock.begin()


def as_ours(module: pl.LightningModule) -> LitGRPO:
    assert isinstance(module, LitGRPO)
    return module


def replayed(work: Work, tokenizer: Any, data: RolloutDataModule) -> Any:
    """An engine's ``generate`` that gives the samples of the first step."""
    known = {prompt.token_ids: prompt.question for prompt in data.train_prompts}

    def generate(requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        version = data.producer.engine.policy_version
        for request in requests:
            group = work.replay[work.questions.index(known[request.token_ids])]
            for i, ids in enumerate(group[: len(request.seeds)]):
                yield Completion(request.index, i, tuple(ids), tuple([float("nan")] * len(ids)), "stop", version)

    return generate


def main() -> None:
    work, talk, clock = Work.read(sys.argv[1]), Talk(), Clock()
    torch.set_num_threads(work.threads)
    settings = dict(work.settings)
    # Weights are float32 on both sides; shards are computed with in bfloat16.
    sharded = settings.get("strategy") == "fsdp" and torch.cuda.is_available()
    policy = {"path": work.model, "dtype": "float32" if sharded else work.dtype} | settings.get("policy", {})
    engine_start.make_engine = clock.makes_engine(engine_start.make_engine)  # type: ignore[attr-defined]
    ForwardRunner.loss = clock.timed(ForwardRunner.loss, by_gradient)  # type: ignore[method-assign]
    ForwardRunner.old_forward = clock.timed(ForwardRunner.old_forward, "other passes")  # type: ignore[method-assign]
    if work.exact_length:
        lit_grpo.datamodule.end_token_ids = lambda *_: ()  # type: ignore[assignment]
    produce = lit_grpo.datamodule.RolloutGenerator.generate

    def sampled(*args: Any, **kwargs: Any) -> Any:
        """CPU seconds of sampling, a generator that others work between."""
        made = produce(*args, **kwargs)
        step = clock.timed(lambda: next(made, None), "generate")
        return iter(step, None)

    lit_grpo.datamodule.RolloutGenerator.generate = sampled  # type: ignore[method-assign,assignment]
    score = lit_grpo.datamodule.RolloutGenerator._score

    def scored(*args: Any) -> Any:
        """In a thread of its own."""
        before = time.perf_counter(), time.thread_time()
        made = score(*args)
        clock.add("reward", time.perf_counter() - before[0], time.thread_time() - before[1])
        return made

    lit_grpo.datamodule.RolloutGenerator._score = scored  # type: ignore[method-assign]
    lit_grpo.datamodule.RolloutGenerator.sync = clock.timed(lit_grpo.datamodule.RolloutGenerator.sync, "sync")  # type: ignore
    module = LitGRPO(
        policy=PolicyConfig(**policy),
        # TRL's default loss: tokens of the whole step weigh alike, and 1e-4 is added to the standard deviation.
        objective=ObjectiveConfig(recipe="grpo", aggregation="token_mean", std_eps=1e-4),
        optimizer=OptimizerConfig(lr=work.lr, **settings.get("optimizer", {})),
        # The first step is replayed on both sides, and what is replayed has no log-probabilities of a sampler.
        **({"guards": GuardConfig(max_engine_gap=None)} | settings.get("model", {})),
    )
    rows = [{"prompt": q, "answer": a} for q, a in zip(work.questions, work.answers, strict=True)]
    data = RolloutDataModule(
        prompts=InMemoryPrompts(rows),
        rewards=[WorkReward(work)],
        group_size=work.group_size,
        prompts_per_rollout=len(rows),
        rollouts=10**6,
        sampling=Sampling(max_new_tokens=work.max_new_tokens),
        engine=EngineConfig(name=work.engine, **settings.get("engine", {})),  # type: ignore[arg-type]
    )
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=work.devices,
        strategy=FSDP2Strategy() if settings.get("strategy") == "fsdp" else settings.get("strategy", "auto"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Steps(work, clock, talk)],
    )
    pl.seed_everything(work.seed, verbose=False)
    trainer.fit(module, datamodule=data)


if __name__ == "__main__":
    main()
