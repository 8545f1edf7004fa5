"""RolloutDataModule: takes prompts, gives rollouts."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_grpo.context import LearnerRequirements, RolloutLearner, RunContext, as_learner
from lit_grpo.data import BENCHMARKS, CleanConfig, PromptFormat, PromptSource
from lit_grpo.data.doubts import Doubt, doubts_of, shown_prompt
from lit_grpo.data.prompt_set import PromptSet, check_resumed, in_both, prepare, write_dropped
from lit_grpo.data.sources.given import as_source
from lit_grpo.engines import EngineContext, EngineStart, begin_engine, begins_early, check_engine, make_engine
from lit_grpo.engines.base import EnginePolicy, StartSeconds
from lit_grpo.engines.config import EngineConfig
from lit_grpo.engines.given import as_engine_config
from lit_grpo.errors import UserError
from lit_grpo.evaluation.grading import grade
from lit_grpo.evaluation.sets import EvaluationPart, EvaluationSet, ResolvedSet, resolve_sets
from lit_grpo.policy.model.load import end_token_ids, load_model_config
from lit_grpo.policy.outline import PolicyOutline
from lit_grpo.rewards import Reward, check_rewards, total_range
from lit_grpo.rewards.base import judges_of, primary_reward, weighted_range
from lit_grpo.rewards.combine import OnError
from lit_grpo.rewards.given import as_rewards
from lit_grpo.rollout.curriculum import Curriculum, CurriculumConfig, primary_reward_of
from lit_grpo.rollout.dynamic_sampling import OnShort, no_exchange
from lit_grpo.rollout.generator import ENGINE_REMEDIES, SYNC_PROMPTS, RolloutGenerator, RolloutSource
from lit_grpo.rollout.loader import EvaluationLoader, RolloutLoader
from lit_grpo.rollout.prompt_order import make_order
from lit_grpo.rollout.supervised import DemonstrationFormat, SupervisedSource, encode_demonstrations
from lit_grpo.types import Prompt, Rollout, Sampling
from lit_grpo.utils import random as rng
from lit_grpo.utils.arguments import explained
from lit_grpo.utils.bounds import Bound, check_arguments
from lit_grpo.utils.dataclasses import from_arguments
from lit_grpo.utils.memory import screen_if_out_of_memory

_SHOWN_CHARACTERS = 400
"""Most characters of the first prompt that a run shows at its beginning; ``lit-grpo check`` shows more."""
_LONG_START = 2.0
"""Seconds from which on it is said how long an engine took to be ready."""


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
        val, test = _evaluation_sets(val, "data.val"), _evaluation_sets(test, "data.test")
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
        self._sets: dict[str, PromptSet] = {}
        self._doubts: dict[str, list[Doubt]] = {}
        """What looks wrong with the prompts under each key."""
        self._hashed: tuple[Any, str] | None = None
        """The tokenizer whose words were hashed last, and their hash."""
        self._encoded_for: dict[str, Any] = {}
        """Template and vocabulary that the prompts under each key were encoded with."""
        self._producer: RolloutGenerator | None = None
        self._begun: tuple[EngineStart, PolicyOutline] | None = None
        """The engine that is being started while the model is made, and what it knows of the policy."""
        self._engine_began = 0.0
        self.engine_start: StartSeconds | None = None
        """How long the engine took to be ready; None: there is none yet."""
        self.other_prompts = False
        """Whether a resumed run may train on other prompts than it was saved with, from the same position on."""
        self.evaluations: dict[str, list[ResolvedSet]] = {}
        """The evaluation sets under ``val`` and ``test``, once they are set up."""
        self._check_arguments()

    def _check_arguments(self) -> None:
        if self.sampling.temperature <= 0:
            raise UserError(
                f"training at temperature {self.sampling.temperature} explores nothing: "
                "all completions of a group would be the same",
                where="data.sampling.temperature",
                remedy="set a temperature above 0, usually 1.0",
            )
        if self.sampling.top_p != 1.0 or self.sampling.top_k != 0:
            raise UserError(
                "training needs samples of the whole distribution: top_p and top_k change the probabilities "
                "that the learner compares with",
                where="data.sampling",
                remedy="set top_p: 1.0 and top_k: 0 (eval_sampling may use them)",
            )
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
        trainer, learner = self._current_trainer, self.learner
        # Supervised fine-tuning samples and scores nothing: without an evaluation it needs no engine and no rewards.
        if stage != "fit" or not self._supervised or self.val or self.val_prompts:
            check_rewards(self.rewards)
            check_engine(self.engine_config, self._needs_experts, self.learner.policy_config.lora)
            # Started this early, workers of the rewards load their libraries while the model and the engine load.
            for reward in self.rewards:
                reward.start()
        self._give_up_start()
        if stage == "fit":
            self._check_rewards_fit_the_objective()
            if self._num_prefetch and self.engine_config.sleep:
                raise UserError(
                    "an engine that samples beside the learner cannot sleep meanwhile",
                    where="data.engine.sleep",
                    remedy="set data.engine.sleep: 0, or model.max_staleness: 0",
                )
            primary = primary_reward(self.rewards)
            if (chosen := judges_of(self.rewards)) is not None:
                rank_zero_info(f"data.rewards: {chosen}.")
            learner.connect(
                RunContext(
                    rollouts=self.rollouts * max(1, trainer.max_epochs or 1),
                    group_size=self.group_size,
                    prompts_per_rollout=self.prompts_per_rollout,
                    max_new_tokens=self.sampling.max_new_tokens,
                    temperature=self.sampling.temperature,
                    reward_range=total_range(self.rewards),
                    primary_range=None if primary is None else weighted_range(primary),
                    initial_completions=self.initial_completions,
                )
            )
            if self.prompts_per_rollout % trainer.world_size:
                raise UserError(
                    f"{self.prompts_per_rollout} prompts per rollout cannot be shared out over "
                    f"{trainer.world_size} processes",
                    where="data.prompts_per_rollout",
                    remedy=f"choose a multiple of {trainer.world_size}",
                )
            self._resolve("val", self.val, self.val_prompts)
            if self.prompts is None:
                raise UserError(
                    "`fit` needs questions to train on, and data.prompts is not set",
                    where="data.prompts",
                    remedy="add `prompts: {class_path: lit_grpo.data.JsonlPrompts, init_args: {path: ...}}`",
                )
            # Supervised fine-tuning may never need its engine.
            if not self._supervised:
                self._begin_engine()
            self.prepare_train_prompts(self.prompts)
        elif stage == "validate":
            self._need(self._resolve("val", self.val, self.val_prompts), "val", stage)
        elif stage == "test":
            self._need(self._resolve("test", self.test, self.test_prompts), "test", stage)
        else:
            # Without any test set predict answers the questions of data.prompts.
            single = self.test_prompts if self.test or self.test_prompts else self.prompts
            self._need(self._resolve("test", self.test, single), "test", stage)
        if stage != "fit":
            self._begin_engine()
        for key, sets in self.evaluations.items():
            for one in sets:
                self._encode(f"{key}/{one.name}", one.source, one.where, one.format or self.format)
        if self._begun is not None:
            start, outline = self._begun
            start.build(self._engine_context(outline))
        self.log_prompt_report()

    @property
    def _supervised(self) -> bool:
        """Whether completions are the solutions of the data, for which no engine is started."""
        return self._requirements.completions_from == "dataset"

    def _check_rewards_fit_the_objective(self) -> None:
        if self._requirements.extracted_answers and not any(r.extracts_answer for r in self.rewards):
            raise UserError(
                "no reward tells which completions have no parsable answer, which invalid_entropy needs",
                where="model.objective.invalid_entropy",
                remedy="use MathReward, ExactMatch with extract, or a reward of yours with extracts_answer = True; "
                "with weight 0 it changes nothing else",
            )

    @property
    def _num_prefetch(self) -> int:
        """Number of rollouts that are sampled before their turn: the staleness that the learner allows."""
        return self._requirements.max_staleness if self._fitting else 0

    def _resolve(self, key: str, sets: dict[str, EvaluationSet], single: PromptSource | None) -> list[ResolvedSet]:
        primary = primary_reward(self.rewards)
        self.evaluations[key] = resolve_sets(
            key,
            sets,
            single,
            samples=self.eval_group_size,
            sampling=self.eval_sampling,
            training=self.sampling,
            selectors=[reward.name for reward in self.rewards],
            primary_reward=None if primary is None else primary.name,
        )
        return self.evaluations[key]

    def _need(self, sets: list[ResolvedSet], name: str, stage: str) -> None:
        if not sets:
            raise UserError(
                f"`{getattr(stage, 'value', stage)}` needs questions, and data.{name} names no set",
                where=f"data.{name}",
                remedy=f"a benchmark by name, `{name}: {{gsm8k: {{samples: 8}}}}`, or "
                f"`{name}: {{mine: {{path: questions.jsonl}}}}`",
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
        return dict(self._sets)

    @property
    def train_set(self) -> PromptSet:
        """The training prompts as token ids, with where they come from; once they are set up."""
        return self._sets["train"]

    @property
    def train_prompts(self) -> list[Prompt]:
        """The training prompts as token ids, once they are set up."""
        return self.train_set.prompts

    def prepare_train_prompts(self, source: PromptSource) -> None:
        """Prepare the training prompts once: read, check, clean and tokenise them; a second call changes nothing."""
        self._encode("train", source, "data.prompts", self.format)

    def _encode(self, key: str, source: PromptSource, where: str, form: PromptFormat) -> None:
        """Prepare the prompts of a source once (read, check, clean, tokenise), and keep them under ``key``.

        Once for each model: the ids of another vocabulary mean another text.
        """
        identity = (form.identity(self.learner.tokenizer), self._vocabulary, key == "train" and self._supervised)
        if self._encoded_for.get(key) == identity:
            return
        training = key == "train"
        found = prepare(
            source,
            where,
            form=form,
            tokenizer=self.learner.tokenizer,
            rewards=self.rewards,
            clean=self.clean if training else None,
            held_out=self._held_out() if training and self.clean.held_out else (),
        )
        self._check_lengths(found.prompts, found.locations, where)
        if training and len(found.prompts) < self.prompts_per_rollout:
            rank_zero_warn(
                f"{where}: there are {len(found.prompts)} prompts and data.prompts_per_rollout is "
                f"{self.prompts_per_rollout}, so that prompts come up several times in one rollout."
            )
        if training and self._supervised:
            tokenizer = self.learner.tokenizer
            ends = end_token_ids(self.learner.policy_config, tokenizer)
            limit = self.sampling.max_new_tokens
            self._solutions = encode_demonstrations(
                self.demonstrations, found.prompts, tokenizer, ends, limit, found.locations
            )
            # Prompts whose solution is too long got none, and are left out under that reason.
            found.keep(self._solutions, "with a solution that is too long")
        self._doubts[key] = doubts_of(found.prompts, form, self.learner.tokenizer, self._end_tokens)
        self._sets[key], self._encoded_for[key] = found, identity
        read = (source, *(self.clean.decontaminate if training else ()))
        for line in (*(line for one in read for line in one.columns_taken()), *found.summary_lines()):
            rank_zero_info(line)

    @property
    def _end_tokens(self) -> tuple[int, ...]:
        """Ids that end a training completion."""
        own = end_token_ids(self.learner.policy_config, self.learner.tokenizer)
        return (*own, *self.sampling.stop_token_ids)

    def _held_out(self) -> list[PromptSource]:
        """Return the sources of all evaluation sets, also of those that this stage does not use."""
        # _resolve keeps what it resolves, and what is kept is evaluated: this stage's own sets are put back.
        before = dict(self.evaluations)
        sets = [*self._resolve("val", self.val, self.val_prompts), *self._resolve("test", self.test, self.test_prompts)]
        self.evaluations = before
        return [one.source for one in sets]

    def log_prompt_report(self) -> None:
        """Log how the prompts are made and what looks wrong with them; write the questions that were left out."""
        tokenizer = self.learner.tokenizer
        rank_zero_info(f"prompts are made with {self.format.describe(tokenizer)}")
        for sentence in self.format.warnings(tokenizer):
            rank_zero_warn(f"data.format: {sentence}.")
        for key, one in self._sets.items():
            for doubt in self._doubts[key]:
                rank_zero_warn(f"{one.name}: {doubt.what}. Remedy: {doubt.remedy}.")
        if self._sets:
            first = self._sets.get("train") or next(iter(self._sets.values()))
            rank_zero_info(shown_prompt(first.prompts[0], tokenizer, _SHOWN_CHARACTERS))
        for key, held_out in self._sets.items() if "train" in self._sets else ():
            if key != "train" and (count := in_both(self._sets["train"].prompts, held_out.prompts)):
                rank_zero_info(
                    f"{count:,} training questions are also in {held_out.name}; data.clean: {{held_out: true}} "
                    "leaves them out"
                )
        if self.clean.dropped_file is not None and self._current_trainer.is_global_zero:
            write_dropped(list(self._sets.values()), self.clean.dropped_file)

    def state_dict(self) -> dict[str, Any]:
        """Return what the order of the prompts depends on, so that a resumed run can be held to it."""
        if "train" not in self._sets:
            return {}
        return {
            "format": self.format.identity(self.learner.tokenizer),
            # Ids of another vocabulary, of the same size, mean other text to the same weights.
            "vocabulary": self._vocabulary,
            "prompts": self.train_set.identity(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict and "train" in self._sets and self._fitting and not self.other_prompts:
            check_resumed(state_dict, self.state_dict())

    @property
    def _vocabulary(self) -> str:
        """Hash of the tokenizer's words with their ids."""
        tokenizer = self.learner.tokenizer
        # By the object, since one data module may be used with the models of several fits.
        if self._hashed is None or self._hashed[0] is not tokenizer:
            words = json.dumps(sorted(tokenizer.get_vocab().items()))
            self._hashed = tokenizer, hashlib.sha256(words.encode()).hexdigest()
        return self._hashed[1]

    def _check_lengths(self, prompts: Sequence[Prompt], places: Mapping[str, str], where: str) -> None:
        vocabulary = len(self.learner.tokenizer)
        for sampling in self._samplings:
            if beyond := [token for token in sampling.stop_token_ids if token >= vocabulary]:
                raise UserError(
                    f"stop_token_ids holds {beyond[0]}, and the tokenizer has {vocabulary} tokens",
                    where="data.sampling.stop_token_ids",
                    remedy=f"give ids below {vocabulary}, or texts with stop",
                )
        limit = getattr(load_model_config(self.learner.policy_config), "max_position_embeddings", None)
        if limit is None or not prompts:
            return
        longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
        # The largest limit of all ways of sampling, since they share one engine.
        new = self._max_new_tokens
        if len(longest.token_ids) + new > limit:
            raise UserError(
                f"the prompt of row {longest.id!r} has {len(longest.token_ids)} tokens; with {new} new tokens that is "
                f"more than the {limit} positions of the model",
                where=places.get(longest.id) or where,
                remedy="lower data.sampling.max_new_tokens"
                + (
                    f", or set data.format: {{max_prompt_tokens: {limit - new}, on_long: drop}}"
                    if limit - new > 0
                    else f" below {limit - len(longest.token_ids) + 1}"
                ),
            )

    def _begin_engine(self) -> None:
        """Begin to start the engine where that can go on beside the learner's own start."""
        if not begins_early(self.engine_config) or self._producer is not None:
            return
        outline, self._engine_began = PolicyOutline(self.learner.policy_config), time.monotonic()
        start = begin_engine(self.engine_config, self._engine_context(outline))
        self._begun = None if start is None else (start, outline)

    def _give_up_start(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[0].close()

    def on_exception(self, exception: BaseException) -> None:
        # An engine that is not ready yet is nobody's; one that is may still be in use by a thread.
        self._give_up_start()

    @property
    def producer(self) -> RolloutGenerator:
        """The generator of rollouts from engine and rewards, made when the first rollout is asked for."""
        # Not in setup: the engine is built from the policy, and Lightning lets the module make that after setup.
        if self._producer is None:
            learner, tokenizer, context = self.learner, self.learner.tokenizer, self.engine_context
            came = time.monotonic()
            with screen_if_out_of_memory(
                "starting the engine", self._target_device, where="data.engine", remedies=ENGINE_REMEDIES
            ):
                # Taken over: from here on a start that fails has closed itself.
                begun, self._begun = self._begun, None
                engine = make_engine(self.engine_config, context, None if begun is None else begun[0])
            ready = time.monotonic()
            self.engine_start = StartSeconds(ready - (came if begun is None else self._engine_began), ready - came)
            if self.engine_start.taken > _LONG_START:
                rank_zero_info(f"{self.engine_start}.")
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
                sync_prompts=self._shortest_prompts(SYNC_PROMPTS),
                longest_completion=self._max_new_tokens,
                on_phase=self._tell_phase,
            )
        return self._producer

    def describe_run(self) -> dict[str, str]:
        """Return where rollouts come from, text by name, for whoever shows a run that begins."""
        if self._supervised:
            return {"engine": "none: the completions are the solutions of the prompts"}
        config = self.engine_config
        engine = config.custom_engine or config.name
        if config.name.startswith("vllm") and config.custom_engine is None:
            engine += f", {config.dtype}" if config.dtype != "auto" else ""
            engine += f", {config.processes} processes" if config.processes != 1 else ""
        rewards = ", ".join(one.name + (f" x {one.weight:g}" if one.weight != 1 else "") for one in self.rewards)
        return {"engine": engine, "rewards": rewards}

    def _tell_phase(self, phase: str) -> None:
        # Any callback may have the hook, such as the progress display of the command line.
        for callback in getattr(self.trainer, "callbacks", ()):
            if hasattr(callback, "on_phase"):
                callback.on_phase(phase)

    @property
    def engine_context(self) -> EngineContext:
        """What an engine is built from in this stage."""
        return self._engine_context(self.learner.policy)

    def _engine_context(self, policy: EnginePolicy) -> EngineContext:
        learner = self.learner
        # Of no prompts yet where the engine is begun before they are read; it learns the longest when it is built.
        longest = max((len(prompt.token_ids) for one in self._sets.values() for prompt in one.prompts), default=0)
        return EngineContext(
            policy=policy,
            policy_config=learner.policy_config,
            tokenizer=learner.tokenizer,
            end_token_ids=end_token_ids(learner.policy_config, learner.tokenizer),
            max_model_len=longest + self._max_new_tokens,
            seed=rng.run_seed(),
            beside_learner=self._num_prefetch > 0,
            wants_experts=self._needs_experts,
            wants_stop_strings=any(sampling.stop for sampling in self._samplings),
        )

    def _shortest_prompts(self, count: int) -> list[Prompt]:
        """Return the shortest prompts of this stage, fewer than ``count`` if there are no more, none of them twice."""
        prompts = {prompt.token_ids: prompt for one in self._sets.values() for prompt in one.prompts}
        return [prompts[ids] for ids in sorted(prompts, key=lambda ids: (len(ids), ids))[:count]]

    def initial_completions(self, n_prompts: int) -> Rollout:
        """Sample completions of the first training prompts, for measurements of the untouched model.

        ``group_size`` samples of each of the first ``n_prompts`` prompts in the training order, or of all if there are
        fewer. Every rank makes all of them, and so measures the same.
        """
        # The purpose gives them random numbers of their own: training samples the same with and without them.
        prompts = self.train_prompts
        order = make_order(prompts, self.producer.seed, self.train_set.weights)
        chosen = [prompts[order[place]] for place in range(min(n_prompts, len(prompts)))]
        return self.producer.produce(chosen, self.sampling, self.group_size, index=0, purpose="initial")

    def teardown(self, stage: str) -> None:
        self._give_up_start()
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
            gather=_Gather() if self._current_trainer.world_size > 1 else no_exchange,
            weights=None if overfitted else self.train_set.weights,
            curriculum=self._make_curriculum(prompts),
            num_prefetch=self._num_prefetch,
        )

    def _overfitted(self) -> list[Prompt]:
        """Return the prompts that a run with ``trainer.overfit_batches`` stays with: those of its first rollouts."""
        batches = getattr(self._current_trainer, "overfit_batches", 0)
        # As Lightning reads it: a whole number counts batches, a fraction is a share of them.
        count = batches if isinstance(batches, int) else max(1, int(batches * self.rollouts))
        needed = min(count * self.prompts_per_rollout, len(self.train_prompts))
        order = make_order(self.train_prompts, rng.run_seed(), self.train_set.weights)
        return [self.train_prompts[number] for number in dict.fromkeys(order[place] for place in range(needed))]

    def _make_curriculum(self, prompts: list[Prompt]) -> Curriculum | None:
        if self.curriculum is None:
            return None
        return Curriculum(self.curriculum, prompts, self.rewards, self.producer.seed)

    def val_dataloader(self) -> list[EvaluationLoader]:
        return self._evaluation("val")

    def test_dataloader(self) -> list[EvaluationLoader]:
        return self._evaluation("test")

    def predict_dataloader(self) -> list[EvaluationLoader]:
        return self._evaluation("test")

    @property
    def _current_trainer(self) -> pl.Trainer:
        return cast(pl.Trainer, self.trainer)

    @property
    def _target_device(self) -> torch.device:
        return torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device

    def _evaluation(self, key: str) -> list[EvaluationLoader]:
        """Make one loader for each way of sampling each set."""
        pairs = [(one, part) for one in self.evaluations.get(key, []) for part in one.parts]
        return [
            EvaluationLoader(
                self.producer,
                self._sets[f"{key}/{one.name}"].prompts,
                batch_prompts=self._evaluation_prompts(part.samples),
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

    def _evaluation_prompts(self, samples: int) -> int:
        """Return the evaluation prompts that a rank samples at once: as many completions as in training, or more.

        An engine's throughput grows with the completions that it has at once, and each batch waits for its longest.
        """
        completions = self.prompts_per_rollout // self._current_trainer.world_size * self.group_size
        return max(self.prompts_per_rollout, -(-completions // samples))

    def _grade(self, part: EvaluationPart, rollout: Rollout, seeds: list[int]) -> Rollout:
        return replace(rollout, evaluation=grade(rollout, self.rewards, part, seeds))


def _evaluation_sets(given: Any, key: str) -> dict[str, EvaluationSet]:
    if given is not None and not isinstance(given, Mapping):
        kind = key.rpartition(".")[2]
        name = given if isinstance(given, str) and given in BENCHMARKS else None
        raise UserError(
            f"{kind} is a {type(given).__name__}, and sets of questions have names, under which they are logged",
            where=key,
            remedy=f"{kind}={{{name!r}: {{}}}}" if name else f"{kind}={{'mine': QUESTIONS}}",
        )
    return {str(name): _evaluation_set(one, f"{key}.{name}") for name, one in (given or {}).items()}


def _evaluation_set(given: Any, key: str) -> EvaluationSet:
    """Return an evaluation set, also where its settings or its questions alone are given in its place."""
    if isinstance(given, (EvaluationSet, dict)):
        made = from_arguments(EvaluationSet, given, key)
        return replace(made, prompts=as_source(made.prompts, f"{key}.prompts"))
    return EvaluationSet(prompts=as_source(given, key))


class _Gather:
    """Exchange of Python values over ranks, by gloo: every rank calls it and gets the values of all."""

    def __init__(self) -> None:
        # A process group of its own: a thread may use it beside the learner's collectives.
        self._group = torch.distributed.new_group(backend="gloo")

    def __call__(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in their order."""
        out: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(out, value, group=self._group)
        return out
