"""RolloutDataModule: takes prompts, gives rollouts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_grpo.context import LearnerRequirements, RolloutLearner, RunContext, as_learner
from lit_grpo.data import CleanConfig, PromptFormat, PromptSource
from lit_grpo.data.prompt_set import PromptSet, check_resumed, prepare, write_dropped
from lit_grpo.data.prompt_sets import TRAIN, PromptSets, check_lengths
from lit_grpo.data.sources.given import as_source
from lit_grpo.engines import EngineContext, check_engine
from lit_grpo.engines.base import EnginePolicy, StartSeconds
from lit_grpo.engines.config import EngineConfig
from lit_grpo.engines.given import as_engine_config
from lit_grpo.engines.vllm_processes.settings import check_ranks
from lit_grpo.evaluation.given import as_evaluation_sets
from lit_grpo.evaluation.grading import grade
from lit_grpo.evaluation.sets import EvaluationPart, EvaluationSet, ResolvedSet, resolve_sets
from lit_grpo.policy.model.load import end_token_ids, load_model_config
from lit_grpo.policy.outline import PolicyOutline
from lit_grpo.rewards import Reward, check_rewards, total_range
from lit_grpo.rewards.base import judges_of, primary_reward, weighted_range
from lit_grpo.rewards.combine import OnError
from lit_grpo.rewards.given import as_rewards
from lit_grpo.rollout.curriculum import Curriculum, CurriculumConfig, primary_reward_of
from lit_grpo.rollout.dynamic_sampling import GlooExchange, OnShort, no_exchange
from lit_grpo.rollout.engine_start import EngineStarter
from lit_grpo.rollout.generator import SYNC_PROMPTS, RolloutGenerator, RolloutSource
from lit_grpo.rollout.loader import EvaluationLoader, RolloutLoader, evaluation_prompts
from lit_grpo.rollout.prompt_order import first_drawn
from lit_grpo.rollout.setting_checks import (
    check_answers_are_extracted,
    check_engine_sleep,
    check_prompts_per_rollout,
    check_training_sampling,
    no_evaluation_set,
    no_training_prompts,
)
from lit_grpo.rollout.supervised import DemonstrationFormat, SupervisedSource, encode_demonstrations
from lit_grpo.types import Prompt, Rollout, Sampling
from lit_grpo.utils import random as rng
from lit_grpo.utils.arguments import explained
from lit_grpo.utils.bounds import Bound, check_arguments
from lit_grpo.utils.dataclasses import from_arguments


class RolloutDataModule(pl.LightningDataModule):
    """Data module that makes the rollouts of :class:`lit_grpo.LitGRPO` from prompts, an engine and rewards.

    Each rollout is sampled with the weights that the previous step left, unless the module allows ``max_staleness``.
    Data, rewards and limits are checked in ``setup``, before any model is loaded.

    Args:
        prompts: source of the training questions, or the path of a file or folder of them; ``validate`` and ``test``
            need none. In Python it may also be rows or columns, a data set of the package datasets or of torch, or a
            table of pandas, polars or pyarrow; a dictionary may stand for each group of settings, and a path or data
            for an evaluation set: ``sampling={"max_new_tokens": 64}``, ``val={"mine": rows}``.
        rewards: score the completions; the total is their weighted sum. In Python a function, or the import path of
            one, may stand for a reward.
        group_size: completions of each prompt (G).
        prompts_per_rollout: prompts of each rollout, over all ranks.
        rollouts: length of the run.
        engine: the engine that samples, and its settings; in Python also its name, or the class of one of your own.
        sampling: how training completions are drawn.
        format: how a question becomes token ids.
        clean: training questions that are left out: duplicates, questions of evaluation sets.
        curriculum: how training questions that are solved or out of reach come up less often; None: all equally often.
        val: sets of held-out questions by name, for ``validate`` and during ``fit``: ``{gsm8k: {samples: 8}}``.
        test: sets of held-out questions by name, for ``test`` and ``predict``.
        val_prompts: source of one more set beside ``val``, named after its source:
            ``{class_path: lit_grpo.data.JsonlPrompts, ...}``.
        test_prompts: source of one more set beside ``test``, named after its source.
        eval_sampling: how evaluation completions are drawn; None: greedily where a prompt gets one, as in training
            where it gets several.
        eval_group_size: completions of each evaluation prompt, in sets that name no number of samples.
        demonstrations: the solutions that supervised fine-tuning (``objective: {recipe: sft}``) teaches.
        on_reward_error: a reward that raises or gives NaN stops the run (``raise``) or scores 0 and is counted.
        rejudge_every: one training group of so many is judged a second time, and a reward that changes its verdict is
            noticed (``sanity/reward_contradiction_frac``); 0: none. Rewards that are not
            :attr:`lit_grpo.rewards.Reward.deterministic` are left out.
        max_sampling_rounds: objectives with dynamic sampling (``dapo``, ``olmo3``) go on sampling prompts until all
            groups of a rollout are mixed (``uniform_by``), at most this many times (one process: at most this many
            times the prompts of a rollout; what is no longer needed is cancelled).
        on_incomplete_rollout: what happens where so many rounds are not enough: uniform groups, which have no gradient,
            fill the rollout up, with a warning and ``sampling/short`` (``fill``), or the run ends (``error``). Without
            a single mixed group it ends in any case.
    """

    @explained("data")
    def __init__(
        self,
        prompts: PromptSource | str | None = None,
        rewards: list[Reward] | None = None,
        group_size: Annotated[int, Bound(least=1, most=1_000_000)] = 8,
        prompts_per_rollout: Annotated[int, Bound(least=1, most=1_000_000)] = 16,
        rollouts: Annotated[int, Bound(least=1, most=1_000_000_000)] = 100,
        engine: EngineConfig = EngineConfig(),  # noqa: B008 - shown by --print_config
        sampling: Sampling = Sampling(),  # noqa: B008
        format: PromptFormat = PromptFormat(),  # noqa: B008
        clean: CleanConfig = CleanConfig(),  # noqa: B008
        curriculum: CurriculumConfig | None = None,
        val: dict[str, EvaluationSet] | None = None,
        test: dict[str, EvaluationSet] | None = None,
        val_prompts: PromptSource | str | None = None,
        test_prompts: PromptSource | str | None = None,
        eval_sampling: Sampling | None = None,
        eval_group_size: Annotated[int, Bound(least=1)] = 1,
        demonstrations: DemonstrationFormat = DemonstrationFormat(),  # noqa: B008
        on_reward_error: OnError = "raise",
        rejudge_every: Annotated[int, Bound(least=0)] = 32,
        max_sampling_rounds: Annotated[int, Bound(least=1)] = 10,
        on_incomplete_rollout: OnShort = "fill",
    ) -> None:
        super().__init__()
        # In Python a dictionary may stand for settings, and rows or a path for a source.
        engine = as_engine_config(engine, "data.engine")
        sampling = from_arguments(Sampling, sampling, "data.sampling")
        format = from_arguments(PromptFormat, format, "data.format")
        clean = from_arguments(CleanConfig, clean, "data.clean")
        demonstrations = from_arguments(DemonstrationFormat, demonstrations, "data.demonstrations")
        if curriculum is not None:
            curriculum = from_arguments(CurriculumConfig, curriculum, "data.curriculum")
        if eval_sampling is not None:
            eval_sampling = from_arguments(Sampling, eval_sampling, "data.eval_sampling")
        val, test = as_evaluation_sets(val, "data.val"), as_evaluation_sets(test, "data.test")
        check_arguments(RolloutDataModule.__init__, locals(), "data")
        prompts = as_source(prompts, "data.prompts")
        val_prompts = as_source(val_prompts, "data.val_prompts")
        test_prompts = as_source(test_prompts, "data.test_prompts")
        self.prompts, self.engine_config, self.format = prompts, engine, format
        self.rewards = as_rewards(rewards, "data.rewards")
        self.group_size, self.prompts_per_rollout, self.rollouts = group_size, prompts_per_rollout, rollouts
        self.sampling, self.clean, self.curriculum = sampling, clean, curriculum
        self.val, self.test = val, test
        self.val_prompts, self.test_prompts = val_prompts, test_prompts
        self.eval_sampling, self.eval_group_size = eval_sampling, eval_group_size
        self.demonstrations = demonstrations
        self._solutions: dict[str, tuple[int, ...]] = {}
        """Token ids of the solution that is taught, by prompt id; empty unless the objective learns demonstrations."""
        self.on_reward_error, self.rejudge_every = on_reward_error, rejudge_every
        self.max_sampling_rounds, self.on_incomplete_rollout = max_sampling_rounds, on_incomplete_rollout
        self._prompt_sets = PromptSets()
        self._producer: RolloutGenerator | None = None
        self.engine_starter = EngineStarter(engine)
        self.other_prompts = False
        """Whether a resumed run may train on other prompts than it was saved with, from the same position on."""
        self._longest_allowed: int | None = None
        """Prompts are at most so long by the settings, where an engine does not wait until they are read."""
        self.evaluations: dict[str, list[ResolvedSet]] = {}
        """The evaluation sets under ``val`` and ``test``, once they are set up."""
        check_training_sampling(sampling)
        # Whether any is needed is known when there is an objective: supervised fine-tuning learns without.
        if self.rewards:
            check_rewards(self.rewards)
        if self.curriculum is not None:
            primary_reward_of(self.rewards, "data.curriculum")

    # ---------------------------------------------------------------------------------------------- set-up

    @property
    def learner(self) -> RolloutLearner:
        """The module that learns from the rollouts.

        Raises:
            UserError: the trainer's module lacks a method that learning from rollouts needs.
        """
        if self.trainer is None:
            raise RuntimeError("RolloutDataModule works inside a Trainer: trainer.fit(module, datamodule=data)")
        return as_learner(self.trainer.lightning_module)

    @property
    def _requirements(self) -> LearnerRequirements:
        return self.learner.requirements()

    @property
    def _fitting(self) -> bool:
        return self._current_trainer.state.fn == "fit"

    @property
    def _needs_experts(self) -> bool:
        """Whether completions must say which experts their tokens went through."""
        return self._fitting and self._requirements.sampled_experts

    def setup(self, stage: str) -> None:
        # Supervised fine-tuning samples and scores nothing: without an evaluation it needs no engine and no rewards.
        if stage != "fit" or not self._supervised or self.val or self.val_prompts:
            check_rewards(self.rewards)
            check_engine(self.engine_config, self._needs_experts, self.learner.policy_config.lora)
            strategy = self._current_trainer.strategy
            devices = getattr(strategy, "parallel_devices", None) or [strategy.root_device]
            check_ranks(self.engine_config, devices, self._current_trainer.world_size)
            # Started this early, workers of the rewards load their libraries while the model and the engine load.
            for reward in self.rewards:
                reward.start()
        self.engine_starter.give_up()
        self._longest_allowed = None
        if stage == "fit":
            self._set_up_training()
        elif stage == "validate":
            self._set_up_evaluation("val", self._resolved("val"), stage)
        else:
            # Without any test set predict answers the questions of data.prompts.
            without = stage != "test" and not (self.test or self.test_prompts)
            self._set_up_evaluation("test", self._resolved("test", self.prompts if without else None), stage)
        for key, sets in self.evaluations.items():
            for one in sets:
                self._encode(f"{key}/{one.name}", one.source, one.where, one.format or self.format)
        self.engine_starter.build(self._engine_context)
        self.log_prompt_report()

    def _set_up_training(self) -> None:
        """Tell the learner the shape of the run, begin the engine, and prepare the training prompts."""
        trainer, requirements = self._current_trainer, self._requirements
        if requirements.extracted_answers:
            check_answers_are_extracted(self.rewards)
        check_engine_sleep(self._num_prefetch, self.engine_config.sleep)
        primary = primary_reward(self.rewards)
        if (chosen := judges_of(self.rewards)) is not None:
            rank_zero_info(f"data.rewards: {chosen}.")
        self.learner.connect(
            RunContext(
                rollouts=self.rollouts * max(1, trainer.max_epochs or 1),
                group_size=self.group_size,
                prompts_per_rollout=self.prompts_per_rollout,
                max_new_tokens=self.sampling.max_new_tokens,
                temperature=self.sampling.temperature,
                reward_range=total_range(self.rewards),
                primary_range=None if primary is None else weighted_range(primary),
                initial_completions=self.initial_completions,
                # Ranks go through the models together, and would not all see it at the same time.
                engine_waits=lambda: trainer.world_size == 1 and self.engine_starter.ready,
            )
        )
        check_prompts_per_rollout(self.prompts_per_rollout, trainer.world_size)
        self.evaluations["val"] = self._resolved("val")
        if self.prompts is None:
            raise no_training_prompts()
        # Supervised fine-tuning may never need its engine.
        if not self._supervised:
            self._begin_engine()
        self.prepare_train_prompts(self.prompts)

    def _set_up_evaluation(self, key: str, sets: list[ResolvedSet], stage: str) -> None:
        """Take the sets that a stage evaluates, and begin the engine."""
        self.evaluations[key] = sets
        if not sets:
            raise no_evaluation_set(key, stage)
        self._begin_engine()

    @property
    def _supervised(self) -> bool:
        """Whether completions are the solutions of the data, for which no engine is started."""
        return self._requirements.completions_from == "dataset"

    @property
    def _num_prefetch(self) -> int:
        """Number of rollouts that are sampled before their turn: the staleness that the learner allows."""
        return self._requirements.max_staleness if self._fitting else 0

    def _resolved(self, key: Literal["val", "test"], single: PromptSource | None = None) -> list[ResolvedSet]:
        """Return the evaluation sets under a key; ``single``: source of one more set, instead of ``KEY_prompts``."""
        sets, own = (self.val, self.val_prompts) if key == "val" else (self.test, self.test_prompts)
        primary = primary_reward(self.rewards)
        return resolve_sets(
            key,
            sets,
            own if single is None else single,
            samples=self.eval_group_size,
            sampling=self.eval_sampling,
            training=self.sampling,
            selectors=[reward.name for reward in self.rewards],
            primary_reward=None if primary is None else primary.name,
        )

    @property
    def _max_new_tokens(self) -> int:
        """The largest limit of new tokens, of training and of all evaluations."""
        return max(sampling.max_new_tokens for sampling in self._samplings)

    @property
    def _samplings(self) -> list[Sampling]:
        """All ways in which completions are drawn, in training and in all evaluations."""
        parts = [part for sets in self.evaluations.values() for one in sets for part in one.parts]
        return [self.sampling, *(part.sampling for part in parts)]

    def prompt_sets(self) -> dict[str, PromptSet]:
        """Return the prompts of this stage by the name of their set, once they are set up: ``train``, ``val/NAME``."""
        return dict(self._prompt_sets.sets)

    @property
    def train_set(self) -> PromptSet:
        """The training prompts as token ids, with where they come from; once they are set up."""
        return self._prompt_sets.sets[TRAIN]

    @property
    def train_prompts(self) -> list[Prompt]:
        """The training prompts as token ids, once they are set up."""
        return self.train_set.prompts

    def prepare_train_prompts(self, source: PromptSource) -> None:
        """Prepare the training prompts once: read, check, clean and tokenise them; a second call changes nothing."""
        self._encode(TRAIN, source, "data.prompts", self.format)

    def _encode(self, key: str, source: PromptSource, where: str, form: PromptFormat) -> None:
        """Prepare the prompts of a source once (read, check, clean, tokenise), and keep them under ``key``.

        Once for each model: the ids of another vocabulary mean another text.
        """
        tokenizer, training = self.learner.tokenizer, key == TRAIN
        taught = training and self._supervised
        if self._prompt_sets.holds(key, form, tokenizer, taught=taught):
            return
        held_out: list[PromptSource] = []
        if training and self.clean.held_out:
            # Of all evaluation sets, also those that this stage does not use.
            held_out = [one.source for one in (*self._resolved("val"), *self._resolved("test"))]
        found = prepare(
            source,
            where,
            form=form,
            tokenizer=tokenizer,
            rewards=self.rewards,
            clean=self.clean if training else None,
            held_out=held_out,
        )
        check_lengths(
            found,
            where,
            self._samplings,
            vocabulary=len(tokenizer),
            positions=getattr(load_model_config(self.learner.policy_config), "max_position_embeddings", None),
        )
        if training and len(found.prompts) < self.prompts_per_rollout:
            rank_zero_warn(
                f"{where}: the number of prompts is {len(found.prompts)} and data.prompts_per_rollout is "
                f"{self.prompts_per_rollout}, so that prompts come up several times in one rollout."
            )
        ends = end_token_ids(self.learner.policy_config, tokenizer)
        if taught:
            limit = self.sampling.max_new_tokens
            self._solutions = encode_demonstrations(
                self.demonstrations, found.prompts, tokenizer, ends, limit, found.locations
            )
            # Prompts whose solution is too long got none, and are left out under that reason.
            found.keep(self._solutions, "with a solution that is too long")
        ends = (*ends, *self.sampling.stop_token_ids)
        self._prompt_sets.put(key, found, form, tokenizer, ends, taught=taught)
        read = (source, *(self.clean.decontaminate if training else ()))
        for line in (*(line for one in read for line in one.columns_taken()), *found.summary_lines()):
            rank_zero_info(line)

    def log_prompt_report(self) -> None:
        """Log how the prompts are made and what looks wrong with them; write the questions that were left out."""
        for remark in self._prompt_sets.report(self.format, self.learner.tokenizer):
            (rank_zero_warn if remark.warns else rank_zero_info)(remark.text)
        if self.clean.dropped_file is not None and self._current_trainer.is_global_zero:
            write_dropped(list(self._prompt_sets.sets.values()), self.clean.dropped_file)

    def state_dict(self) -> dict[str, Any]:
        """Return what the order of the prompts depends on, so that a resumed run can be held to it."""
        if TRAIN not in self._prompt_sets.sets:
            return {}
        return self._prompt_sets.identity(self.format, self.learner.tokenizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict and TRAIN in self._prompt_sets.sets and self._fitting and not self.other_prompts:
            check_resumed(state_dict, self.state_dict())

    def _begin_engine(self) -> None:
        """Begin to start the engine where that can go on beside the learner's own start."""
        if self._producer is None:
            config = self.learner.policy_config
            self.engine_starter.begin(lambda: PolicyOutline(config), self._engine_context)
            if self.engine_starter.begun is not None:
                self._longest_allowed = self._prompt_limit()
                if self._longest_allowed is not None:
                    self.engine_starter.build(self._engine_context)

    def on_exception(self, exception: BaseException) -> None:
        # An engine that is not ready yet is nobody's; one that is may still be in use by a thread.
        self.engine_starter.give_up()

    @property
    def producer(self) -> RolloutGenerator:
        """The generator of rollouts from engine and rewards, made when the first rollout is asked for."""
        # Not in setup: the engine is built from the policy, and Lightning lets the module make that after setup.
        if self._producer is None:
            learner, tokenizer, context = self.learner, self.learner.tokenizer, self.engine_context
            elsewhere = self.engine_starter.begun is not None
            engine = self.engine_starter.finish(context, self._current_trainer.strategy.root_device)
            self._producer = RolloutGenerator(
                engine,
                learner,
                tokenizer,
                self.rewards,
                rng.run_seed(),
                self.on_reward_error,
                end_token_ids=(*context.end_token_ids, *(i for one in self._samplings for i in one.stop_token_ids)),
                rejudge_every=self.rejudge_every,
                sleep_level=self.engine_config.sleep,
                vocab_size=getattr(load_model_config(learner.policy_config).get_text_config(), "vocab_size", None),
                needs_logprobs=self._fitting and self._requirements.engine_logprobs,
                check_sync=self._requirements.check_sync,
                sync_prompts=self._prompt_sets.shortest(SYNC_PROMPTS),
                longest_completion=self._max_new_tokens,
                on_phase=self._tell_phase,
                meanwhile=self._requirements.finish_preparing if elsewhere else None,
            )
        return self._producer

    def describe_run(self) -> dict[str, str]:
        """Return where rollouts come from, text by name, for whoever shows a run that begins."""
        if self._supervised:
            return {"engine": "none: the completions are the solutions of the prompts"}
        rewards = ", ".join(one.name + (f" x {one.weight:g}" if one.weight != 1 else "") for one in self.rewards)
        return {"engine": self.engine_config.in_words(), "rewards": rewards}

    def _tell_phase(self, phase: str) -> None:
        # Any callback may have the hook, such as the progress display of the command line.
        for callback in getattr(self.trainer, "callbacks", ()):
            if hasattr(callback, "on_phase"):
                callback.on_phase(phase)

    @property
    def engine_start(self) -> StartSeconds | None:
        """How long the engine took to be ready; None: there is none yet."""
        return self.engine_starter.seconds

    @property
    def engine_context(self) -> EngineContext:
        """What an engine is built from in this stage."""
        return self._engine_context(self.learner.policy)

    def _prompt_limit(self) -> int | None:
        """Return the longest prompt that the settings of this stage allow; None: they do not say, or it has no room."""
        evaluated = (one.format or self.format for sets in self.evaluations.values() for one in sets)
        limits = [form.max_prompt_tokens for form in (self.format, *evaluated)]
        known = [limit for limit in limits if limit is not None]
        if len(known) < len(limits):
            return None
        positions = getattr(load_model_config(self.learner.policy_config), "max_position_embeddings", None)
        return max(known) if positions is None or max(known) + self._max_new_tokens <= positions else None

    def _engine_context(self, policy: EnginePolicy) -> EngineContext:
        learner = self.learner
        # Of no prompts yet where the engine is begun before they are read; it learns the longest when it is built.
        return EngineContext(
            policy=policy,
            policy_config=learner.policy_config,
            tokenizer=learner.tokenizer,
            end_token_ids=end_token_ids(learner.policy_config, learner.tokenizer),
            max_model_len=(self._longest_allowed or self._prompt_sets.longest) + self._max_new_tokens,
            seed=rng.run_seed(),
            beside_learner=self._num_prefetch > 0,
            wants_experts=self._needs_experts,
            wants_stop_strings=any(sampling.stop for sampling in self._samplings),
        )

    def initial_completions(self, n_prompts: int) -> Rollout:
        """Sample completions of the first training prompts, for measurements of the untouched model.

        ``group_size`` samples of each of the first ``n_prompts`` prompts in the training order, or of all if there are
        fewer. Every rank makes all of them, and so measures the same.
        """
        # The purpose gives them random numbers of their own: training samples the same with and without them.
        prompts = self.train_prompts
        first = first_drawn(prompts, self.producer.seed, self.train_set.weights, n_prompts)
        chosen = [prompts[number] for number in first]
        return self.producer.produce(chosen, self.sampling, self.group_size, index=0, purpose="initial")

    def teardown(self, stage: str) -> None:
        self.engine_starter.give_up()
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    # ---------------------------------------------------------------------------------------------- loaders

    def train_dataloader(self) -> RolloutLoader:
        learner = self.learner
        source: RolloutSource = (
            SupervisedSource(
                self._solutions,
                learner,
                learner.tokenizer,
                rng.run_seed(),
                end_token_ids(learner.policy_config, learner.tokenizer),
            )
            if self._supervised
            else self.producer
        )
        overfitted = bool(getattr(self._current_trainer, "overfit_batches", 0))
        prompts = self._overfitted() if overfitted else self.train_prompts
        curriculum = None
        if self.curriculum is not None:
            curriculum = Curriculum(self.curriculum, prompts, self.rewards, self.producer.seed)
        return RolloutLoader(
            source,
            prompts,
            count=self.rollouts,
            prompts_per_rollout=self.prompts_per_rollout,
            group_size=self.group_size,
            sampling=self.sampling,
            rank=self._current_trainer.global_rank,
            world_size=self._current_trainer.world_size,
            dynamic=self._requirements.dynamic_sampling,
            uniform_by=self._requirements.uniform_by,
            max_rounds=self.max_sampling_rounds,
            on_short=self.on_incomplete_rollout,
            gather=GlooExchange() if self._current_trainer.world_size > 1 else no_exchange,
            weights=None if overfitted else self.train_set.weights,
            curriculum=curriculum,
            num_prefetch=self._num_prefetch,
        )

    def _overfitted(self) -> list[Prompt]:
        """Return the prompts that a run with ``trainer.overfit_batches`` stays with: those of its first rollouts."""
        batches = getattr(self._current_trainer, "overfit_batches", 0)
        # As Lightning reads it: a whole number counts batches, a fraction is a share of them.
        count = batches if isinstance(batches, int) else max(1, int(batches * self.rollouts))
        prompts, weights = self.train_prompts, self.train_set.weights
        first = first_drawn(prompts, rng.run_seed(), weights, count * self.prompts_per_rollout)
        return [prompts[number] for number in dict.fromkeys(first)]

    def val_dataloader(self) -> list[EvaluationLoader]:
        return self._evaluation("val")

    def test_dataloader(self) -> list[EvaluationLoader]:
        return self._evaluation("test")

    def predict_dataloader(self) -> list[EvaluationLoader]:
        return self._evaluation("test")

    @property
    def _current_trainer(self) -> pl.Trainer:
        return cast(pl.Trainer, self.trainer)

    def _evaluation(self, key: str) -> list[EvaluationLoader]:
        """Make one loader for each way of sampling each set."""
        pairs = [(one, part) for one in self.evaluations.get(key, []) for part in one.parts]
        return [
            EvaluationLoader(
                self.producer,
                self._prompt_sets.sets[f"{key}/{one.name}"].prompts,
                batch_prompts=evaluation_prompts(
                    self.prompts_per_rollout, self.group_size, part.samples, self._current_trainer.world_size
                ),
                group_size=part.samples,
                sampling=part.sampling,
                rank=self._current_trainer.global_rank,
                world_size=self._current_trainer.world_size,
                purpose=f"evaluation/{one.name}",
                finish=partial(self._grade, part),
                # The next set is sampled at once: only after the last does anybody else need the memory.
                sleeps=number == len(pairs),
            )
            for number, (one, part) in enumerate(pairs, 1)
        ]

    def _grade(self, part: EvaluationPart, rollout: Rollout, seeds: list[int]) -> Rollout:
        return replace(rollout, evaluation=grade(rollout, self.rewards, part, seeds))
