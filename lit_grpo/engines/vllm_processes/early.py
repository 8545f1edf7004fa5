"""Engine processes that start while the learner is still made, since neither needs the other before the first sync.

Starting them takes as long as starting the learner: each imports vLLM, builds a model and captures graphs, and the
learner reads its data, loads its model and compiles its passes meanwhile. What is done when:

    configuration is checked     begin    processes are spawned and import vLLM           beside the learner
    prompts are read             build    engines are built, if nothing must be measured  beside the learner
    learner is ready             finish   the rest: on a card that was never measured, all of the building

What must not overlap, and why, is said in :meth:`lit_grpo.engines.vllm_processes.group.EngineGroup.build_ahead`. What
is measured on a card is kept for later runs (:mod:`lit_grpo.engines.vllm_processes.measured`), which then build beside
the learner too. On the command line processes are spawned earlier still
(:mod:`lit_grpo.engines.vllm_processes.reserve`).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch

from lit_grpo.engines.base import EngineContext
from lit_grpo.engines.config import VLLMEngineConfig
from lit_grpo.engines.vllm.settings import engine_options, model_config_of
from lit_grpo.engines.vllm.start import check_in_process
from lit_grpo.engines.vllm_processes import measured, reserve
from lit_grpo.engines.vllm_processes.engine import VLLMProcesses
from lit_grpo.engines.vllm_processes.group import EngineGroup
from lit_grpo.engines.vllm_processes.settings import card_of_rank, environment, per_process
from lit_grpo.engines.vllm_server.scratch import make_scratch_folder, remove_scratch_folder
from lit_grpo.types import WeightForm

log = logging.getLogger(__name__)


class EarlyProcesses:
    """Processes of an engine from their begin until it can be used; an :class:`lit_grpo.engines.base.EngineStart`.

    They start at once, as far as they can without knowing what will be asked of them.

    Args:
        context: of the run; of the policy no more is looked at than its configuration and the sizes of its weights.
        config: settings of the engine.
        processes: number of processes.

    Raises:
        UserError: vLLM is not installed, an option cannot be had with several processes, or there are not as many cards
            for engines as ranks.
    """

    def __init__(self, context: EngineContext, config: VLLMEngineConfig, processes: int) -> None:
        check_in_process()
        self._config, self._processes = config, processes
        self._inputs: dict[str, Any] | None = None
        """What the engines are built of; None: they are not yet."""
        self._key = ""
        """What a measurement of the card holds for; set when they are."""
        # On a card no weights go through files, and the policy need not even be outlined before processes are started.
        weight_bytes = 0 if torch.cuda.is_available() else _weight_bytes(context)
        card = card_of_rank(config.cards)
        ready = reserve.take(processes, environment(processes, card=card), weight_bytes)
        self._scratch = make_scratch_folder(None, weight_bytes) if ready is None else ready.scratch
        try:
            self._group = EngineGroup(
                processes,
                None,
                self._scratch,
                progress_seconds=config.progress_seconds,
                adapted=config.adapters == "hot",
                reserve=ready,
                card=card,
            )
            self._group.prepare_ahead()
        except BaseException:
            remove_scratch_folder(self._scratch)
            raise

    def build(self, context: EngineContext) -> None:
        """Begin to build the engines, as far as they need not measure the card; returns at once.

        Raises:
            UserError: an option cannot be had with several processes.
        """
        self._inputs = self._inputs_of(context)
        # It stays: a process that is started again reads it again.
        model_config_of(context).save_pretrained(self._scratch / "model")
        part = per_process(self._inputs["options"], self._processes)
        self._key = measured.key(self._inputs["model"], part, self._processes)
        tokenizer = context.tokenizer if context.wants_stop_strings else None
        self._group.build_ahead((str(self._scratch / "model"), part, tokenizer), measured.read(self._key))

    @property
    def ready(self) -> bool:
        """Whether the engines are built, or have failed."""
        return self._group.built_ahead

    def finish(self, context: EngineContext) -> VLLMProcesses:
        """Return the engine of a run, when its processes are ready; the learner must stand still until then.

        Raises:
            UserError: vLLM refuses an option.
            EngineError: a process does not start.
        """
        inputs = self._inputs_of(context)
        if self._inputs is not None and self._inputs != inputs:
            # A learner of another project may make something else of its settings than is read from them.
            log.info("The policy is not the one that the engine processes were begun for: they are started again.")
            self.close()
            return EarlyProcesses(context, self._config, self._processes).finish(context)
        policy, options = context.policy, inputs["options"]
        try:
            if self._inputs is None:
                self.build(context)
            # The learner stands still while an engine samples that is not beside it, so its weights are those of the
            # last sync. Gathering shards takes all ranks.
            still = not context.beside_learner and not policy.sharded
            form: WeightForm = "merged" if options["adapter_rank"] is None else "apart"
            engine = VLLMProcesses(
                self._scratch / "model",
                processes=self._processes,
                policy_tokenizer=context.tokenizer if context.wants_stop_strings else None,
                policy_model=policy.model,
                current_weights=partial(policy.named_weights, form) if still else None,
                group=self._group,
                **options,
            )
        except BaseException:
            self.close()
            raise
        measured.write(self._key, engine.cache_bytes)
        return engine

    def close(self) -> None:
        """End the processes, whatever they are doing. Safe to call twice, and after :meth:`finish`."""
        self._group.close()

    def _inputs_of(self, context: EngineContext) -> dict[str, Any]:
        """Return what the engines are built of."""
        return {"model": model_config_of(context).to_dict(), "options": engine_options(context, self._config)}


def _weight_bytes(context: EngineContext) -> int:
    """Return the size of the policy's weights in files."""
    # A quantized weight has the shape of what it stands for elsewhere.
    return sum(getattr(p, "quant_state", p).shape.numel() * 4 for p in context.policy.model.parameters())
