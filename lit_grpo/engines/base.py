"""The interface of rollout engines: prompts in, completions out as they finish, weights in when they changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

from torch import Tensor, nn

from lit_grpo.errors import EngineError as EngineError
from lit_grpo.types import Completion, Request, Sampling, WeightForm

NamedWeights = Iterable[tuple[str, Tensor]]
"""(transformers parameter name, full tensor), one at a time so that a sharded policy is gathered layer by layer."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples completions with the weights of one policy version.

    An engine knows nothing of rewards or groups. It returns ids exactly as they were drawn, with the log-probability
    that each had, and stamps the version of the weights that were loaded. The registry builds it by a classmethod
    ``from_context(context: EngineContext, **settings)``, see :class:`EngineClass`.
    """

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first sync."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield ``len(request.seeds)`` completions for every request, in any order, as they finish.

        Sampling begins when the first is asked for, with the weights that are loaded then.

        A completion ends with an end token, with the token that completes one of ``sampling.stop``
        (:mod:`lit_grpo.engines.stop_strings` finds it), or at the limit.

        Raises:
            EngineError: the engine cannot go on; no completion is lost or yielded twice before it.
        """
        ...

    def sync(self, weights: NamedWeights, version: int) -> None:
        """Load the weights of ``version`` and forget everything computed from older ones (prefix cache included)."""
        ...

    def close(self) -> None:
        """Free processes and memory. Safe to call twice."""
        ...


@runtime_checkable
class SleepingEngine(RolloutEngine, Protocol):
    """An engine that can hand its memory to the learner between rollouts; an optional capability."""

    def sleep(self, level: int) -> None:
        """Free memory until the next sync or generation: 1 keeps the weights in main memory, 2 drops them."""
        ...


@runtime_checkable
class AdapterEngine(RolloutEngine, Protocol):
    """An engine that can be given adapters by themselves; an optional capability."""

    @property
    def wanted_weights(self) -> WeightForm:
        """What the next sync must bring. The same on every rank, since all of them gather it."""
        ...


class WeightSource(Protocol):
    """Gives a policy's weights; one with adapters also takes the form that they are to have."""

    # Without the argument of EnginePolicy's: a learner of another project that has no adapters need not know of it.
    def named_weights(self) -> NamedWeights:
        """Yield the weights under their transformers names, adapters merged in."""
        ...


def weights_for(engine: RolloutEngine, source: WeightSource) -> NamedWeights:
    """Return the weights of ``source`` in the form that the engine wants in its next sync."""
    form = engine.wanted_weights if isinstance(engine, AdapterEngine) else "merged"
    return source.named_weights() if form == "merged" else cast(EnginePolicy, source).named_weights(form)


class RouterRecorder(Protocol):
    """Records which experts each token goes through in the model that it was made for."""

    def recorded(self) -> Tensor:
        """Return the experts of the tokens of the last forward pass, [tokens, layers, K]."""
        ...

    def remove(self) -> None:
        """Stop recording."""
        ...


class EnginePolicy(Protocol):
    """What an engine in the learner's process needs of the policy; :class:`lit_grpo.policy.Policy` is one."""

    # Not as it is: nn.Module's attributes are typed as tensors or modules, which hides the model's `config`.
    @property
    def model(self) -> Any:
        """The transformers model."""
        ...

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only a shard of the weights."""
        ...

    def without_adapters(self) -> nn.Module:
        """Return a whole model into which ``named_weights`` fit."""
        ...

    def record_router_outputs(self, model: nn.Module) -> RouterRecorder:
        """Record the routers of ``model``, which may be a copy of the policy's."""
        ...

    def named_weights(self, form: WeightForm = "merged") -> NamedWeights:
        """Yield the weights under their transformers names, adapters as ``form`` says.

        An adapter is ``<layer>.lora_A.weight`` [rank, in] and ``<layer>.lora_B.weight`` [out, rank], B multiplied by
        alpha / rank.
        """
        ...


@dataclass(frozen=True)
class EngineContext:
    """What a run tells an engine that is built for it."""

    policy: EnginePolicy
    policy_config: Any
    """The :class:`lit_grpo.policy.PolicyConfig` of the policy."""
    tokenizer: Any
    """To be saved beside the weights where an engine needs a folder; ids are never made from text in an engine."""
    end_token_ids: Sequence[int]
    """Ids that end a completion."""
    max_model_len: int
    """Longest prompt plus completion that the run will ask for, in tokens."""
    seed: int
    """Of the run. What is sampled depends on the seeds of the requests alone."""
    beside_learner: bool = False
    """True where the engine samples in a thread while the learner changes its weights."""
    wants_experts: bool = False
    """True where completions must say which experts their tokens went through (``routing_replay: sampler``)."""
    wants_stop_strings: bool = False
    """True where a sampling of the run ends completions by their text (``sampling.stop``)."""


class StartSeconds(NamedTuple):
    """How long an engine took to be ready."""

    taken: float
    """Seconds from its begin, which may have gone on beside the learner's start."""
    waited: float
    """Seconds of these in which nothing but the engine was waited for."""

    def __str__(self) -> str:
        waited = "all of which" if self.taken - self.waited < 0.05 else f"{self.waited:.1f} s of which"
        return f"the engine was ready after {self.taken:.1f} s, {waited} the learner waited"


class EngineStart(Protocol):
    """An engine of a run that is being started while the learner is made."""

    def build(self, context: EngineContext) -> None:
        """Go on as far as the learner is not disturbed, now that it is known what will be asked; returns at once.

        Args:
            context: of the run. Its policy may still be one without weights.
        """
        ...

    @property
    def ready(self) -> bool:
        """Whether :meth:`finish` would return or raise at once."""
        ...

    def finish(self, context: EngineContext) -> RolloutEngine:
        """Return the engine when it is ready, for the policy that is trained.

        Raises:
            UserError: what the engine refuses.
            EngineError: it does not start.
        """
        ...

    def close(self) -> None:
        """Give the start up, and leave nothing of it behind. Safe to call twice."""
        ...


class EngineClass(Protocol):
    """A class whose instances are engines, as the registry calls it."""

    def from_context(self, context: EngineContext, **settings: Any) -> RolloutEngine:
        """Build the engine of a run; ``settings`` are what the configuration says of it. A classmethod."""
        ...
