"""The values that go round one reinforcement-learning step, in the order in which they appear.

``Prompt`` -> ``Request`` -> ``Completion`` -> ``Rollout`` -> ``Experience`` -> ``LossOutput`` -> ``StepResult``

Shapes: N completions in a rollout (whole groups, ``N = groups * group_size``), T tokens of the longest completion.
Times are seconds, entropies and log-probabilities are nats.
"""

# This file imports torch alone besides the errors, and that only where tensors are made: commands that score ready
# texts must start at once.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from lit_grpo.errors import UserError
from lit_grpo.utils.bounds import Bound

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
Message = Mapping[str, Any]
"""One turn of a chat: ``role``, ``content`` (text), and whatever else the chat template reads."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, already turned into the ids that every engine and the learner use."""

    id: str
    """Identity of the prompt, stable over runs and unique in its source; its history is kept under it."""
    question: str
    """The text as the source writes it, without chat template; of a chat, the text of the last user message."""
    token_ids: tuple[int, ...]
    """Ids that are fed to the model: the template is applied once, and nothing encodes them again."""
    answer: str | None = None
    """Gold answer, or None where a reward needs none."""
    source: str = ""
    """Name of the data set."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row, for rewards that need them."""
    messages: tuple[Message, ...] | None = None
    """The turns of the chat where the source has them; None where it has a text."""
    other_answers: tuple[str, ...] = ()
    """Further gold answers, any of which is as right as ``answer``. A reward that compares with the gold is asked once
    for each, as ``answer``, and its best score counts (:func:`lit_grpo.rewards.base.score_within`)."""

    @property
    def golds(self) -> tuple[str, ...]:
        """All gold answers, any of which is right; empty where there is none."""
        return () if self.answer is None else (self.answer, *self.other_answers)

    @property
    def answer_column(self) -> str | list[str] | None:
        """The gold as the column of a row says it: one text, or a list of those that are right."""
        return list(self.golds) if self.other_answers else self.answer


@dataclass(frozen=True, slots=True)
class Request:
    """A request to an engine for ``len(seeds)`` samples of one prompt."""

    index: int
    """Position of the prompt in the rollout; comes back in every completion."""
    token_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One non-negative seed below 2**63 per sample. Equal seeds, weights and engine give equal tokens."""


WeightForm = Literal["merged", "apart", "adapters"]
"""What a stream of a policy's weights holds: its weights with adapters ``merged`` in; the weights below the adapters
first and then, ``apart``, the adapters; or the ``adapters`` alone. Without adapters there is the first form alone."""


# No slots: jsonargparse reads the defaults from __dict__.
@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. Training needs the full support: ``top_p = 1`` and ``top_k = 0``."""

    temperature: Annotated[float, Bound(least=0)] = 1.0
    """Divides the logits before a token is drawn; 0 means greedy."""
    max_new_tokens: Annotated[int, Bound(least=1, most=10_000_000)] = 1024
    """Most tokens of a completion, its end included; what would be longer is cut, as a rule before its answer."""
    top_p: Annotated[float, Bound(above=0, most=1)] = 1.0
    """Share of the probability that is drawn from: the fewest likeliest tokens that hold it; 1 means all tokens."""
    top_k: Annotated[int, Bound(least=0)] = 0
    """Number of likeliest tokens to draw from; 0 means all tokens."""
    stop_token_ids: Annotated[tuple[int, ...], Bound(least=0)] = ()
    """Ids that end a completion. The id itself is part of the completion."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion: with the token that completes the first of them, which is part of it. Special
    tokens count as the text that they are written as."""

    def __post_init__(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise UserError(
                f"stop is {stop!r}, not a list of texts that hold something",
                where="sampling.stop",
                remedy='write a list, as stop: ["</answer>"]',
            )


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer, as the engine sampled it."""

    request: int
    """``index`` of the :class:`Request` that it answers."""
    sample: int
    """Number of the sample among those of its request, from 0."""
    token_ids: tuple[int, ...]
    """Sampled ids, the end-of-sequence id included if it was drawn. May be empty."""
    logprobs: tuple[float, ...]
    """Log-probability of each id under the distribution it was drawn from (temperature applied)."""
    finish_reason: FinishReason
    policy_version: int
    """Number of rollouts the sampling weights had been trained on."""
    # Left out of ==, which tensors answer for each element and not once.
    experts: Tensor | None = field(default=None, compare=False, repr=False)
    """Experts that each token went through, prompt first, [prompt + generated - 1, layers, K] int16. The last token was
    never fed to the model, so it has none. None unless ``routing_replay: sampler`` asks for them."""

    @property
    def truncated(self) -> bool:
        """True where the length limit cut the completion before an end token."""
        return self.finish_reason == "length"


class Score(NamedTuple):
    """Verdict of one reward on one completion."""

    value: float
    """What the completion gets, before the reward's weight; NaN where it is ``skipped``, and nowhere else."""
    timed_out: bool = False
    """The reward ran out of its time on this completion."""
    failed: bool = False
    """The reward raised, crashed or gave no finite number, and ``value`` is 0 because the run was told to go on."""
    no_answer: bool = False
    """The completion holds nothing that could be an answer."""
    details: Mapping[str, float] | None = None
    """Further values of this completion; their means are logged as ``reward/<name>/<key>``."""
    seconds: float = 0.0
    """Time spent on this completion alone, where the reward measures it."""
    skipped: bool = False
    """The reward gave None: it leaves this completion to the other rewards, or out where none of them scores it."""


@dataclass(frozen=True, slots=True)
class RewardInput:
    """One completion as a reward sees it."""

    prompt: Prompt
    completion: Completion
    text: str
    """The completion, decoded once, special tokens left out."""


@dataclass(frozen=True)
class Rollout:
    """One Lightning batch: whole groups, in order (completion ``i`` belongs to group ``i // group_size``)."""

    index: int
    """Number of the rollout in the run, from 0; 0 in an evaluation."""
    prompts: list[Prompt]
    """The prompt of each group."""
    completions: list[Completion]
    texts: list[str]
    rewards: dict[str, Tensor]
    """Each reward by name, before its weight, [N]; NaN where it gave None."""
    reward: Tensor
    """Weighted sum of the rewards, [N] float32; NaN for a completion that is left out, which no reward scored."""
    group_size: int
    temperature: Annotated[float, Bound(least=0)] = 1.0
    """Temperature of the sampler. The learner computes its log-probabilities at the same one."""
    correct: Tensor | None = None
    """What the primary reward says of each completion (:meth:`lit_grpo.rewards.Reward.correct`), [N] bool; None where
    no reward says what is right, and for demonstrations."""
    judged: Tensor | None = None
    """Completions that ``correct`` says anything of, [N] bool: of the others every reward that could gave None, and
    what stands there is not read. None: all."""
    flipped_reward: Tensor | None = None
    """``reward`` if the primary reward had said the opposite: its value v is low + high - v within its range, and the
    other rewards are as they are, [N] float32. None where no reward says what is right, or its range is not finite."""
    no_answer: Tensor | None = None
    """Completions without a parsable answer, [N] bool; None where no reward looks for one."""
    positions: tuple[int | str, ...] = ()
    """Position of each prompt among those of all ranks, unique in the rollout; empty: 0, 1, 2, ..."""
    sampled_tokens: int | None = None
    """Generated tokens of everything that this rank sampled for the rollout; None: those of its completions."""
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Means that are logged, as (total, number) by logged name, so that they add over ranks: what rewards say besides
    their values, over everything that this rank sampled for the rollout."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Times and counters of the rollout, already under their logged names; counters are those of all ranks."""
    # An object, and not its class: types import nothing of the package, and only the evaluator looks inside.
    evaluation: object = None
    """Grades of an evaluation's batch, a :class:`lit_grpo.evaluation.grading.Graded`; None in training."""
    sources: tuple[str, ...] = ()
    """Names of all data sets that the run mixes; empty if there is one."""

    def __post_init__(self) -> None:
        if len(self.completions) != len(self.prompts) * self.group_size:
            raise ValueError(
                f"a rollout holds whole groups: {len(self.prompts)} prompts x {self.group_size} samples, "
                f"but {len(self.completions)} completions"
            )
        for name in ("correct", "judged", "flipped_reward"):
            value = getattr(self, name)
            if value is not None and len(value) != len(self.completions):
                raise ValueError(f"{name} has {len(value)} entries for {len(self.completions)} completions")

    @property
    def scored(self) -> Tensor | None:
        """The completions that have a reward, [N] bool; None where all have."""
        # A reward that gives NaN ends the run or gets 0, so that NaN has this meaning alone.
        unscored = self.reward.isnan()
        return ~unscored if bool(unscored.any()) else None

    @property
    def policy_version(self) -> int:
        """Version of the weights that sampled the oldest completion."""
        return min(c.policy_version for c in self.completions)

    def to(self, device: Any, **_: Any) -> Rollout:
        """Return the rollout itself, so that Lightning does not move it to a device."""
        # The ragged ids are Python data; the training step makes its tensors on the device.
        return self


@dataclass(frozen=True)
class Experience:
    """The tensors that an objective is computed from: [N, T] right-padded or [N] vectors, None where not known.

    A forward pass before the first update adds what the objective asks for (``Objective.requires``) by
    ``dataclasses.replace``. Positions at or past ``lengths`` hold junk, which may be NaN, and are never read.
    """

    lengths: Tensor
    """Generated tokens in the loss, end-of-sequence included, [N] int64."""
    group_ids: Tensor
    """Number of each completion's group, equal for the samples of one prompt, [N] int64."""
    rewards: Tensor
    """Total reward of each completion before any shaping, [N] float."""
    truncated: Tensor
    """Completions that the length limit cut, [N] bool."""
    width: int = 0
    """T, the number of columns; if left 0, that of the first [N, T] tensor, or else the longest completion."""
    correct: Tensor | None = None
    """What the primary reward says of each completion, before label noise, [N] bool. None: no reward says what is
    right; an objective that asks for it all the same takes rewards above 0 for correct."""
    flipped_rewards: Tensor | None = None
    """``rewards`` if the primary reward had said the opposite (label noise), [N] float. None: 1 - ``rewards``."""
    sample_keys: Tensor | None = None
    """A number that tells each completion from all others of the rollout, on any rank and in any selection of rows, [N]
    int64. None: group and place in the group do."""
    token_ids: Tensor | None = None
    """Generated ids, [N, T] int64."""
    old_logprobs: Tensor | None = None
    """Log-probabilities by the learner before the first update of this rollout. None: there is one update, and the
    ratio is pi / stop_gradient(pi)."""
    sampler_logprobs: Tensor | None = None
    """Log-probabilities by the engine at the moment of drawing; not finite where they are not known."""
    ref_logprobs: Tensor | None = None
    """Log-probabilities by the reference policy."""
    entropy: Tensor | None = None
    """Entropy of the full next-token distribution before the first update."""
    values: Tensor | None = None
    """Critic's value of the state before each token."""
    final_values: Tensor | None = None
    """Critic's value of the state after the last token of truncated completions, [N]; 0 or NaN for the others."""
    sum_squared_probs: Tensor | None = None
    """Sum over the vocabulary of pi squared, before the first update."""
    score_sqnorm: Tensor | None = None
    """Squared norm of the gradient of log pi(o|q), [N]."""
    router_logscores_old: Tensor | None = None
    """Log-scores of the experts that were active, old policy, [N, T, layers, K]."""
    router_experts_old: Tensor | None = None
    """The experts that were active, [N, T, layers, K] int64."""
    invalid: Tensor | None = None
    """Completions without a parsable answer, [N] bool (RENT)."""
    prompt_ids: Sequence[str] | None = None
    """Prompt identity of each completion, N strings, for methods that keep a history per prompt."""

    def __post_init__(self) -> None:
        from torch import Tensor

        if self.width:
            return
        values = (getattr(self, item.name) for item in fields(self))
        widths = [value.shape[1] for value in values if isinstance(value, Tensor) and value.ndim == 2]
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        # A frozen dataclass refuses plain assignment even here.
        object.__setattr__(self, "width", next((width for width in widths if width), longest))

    @property
    def mask(self) -> Tensor:
        """[N, T] bool: the generated tokens."""
        import torch

        # Made from lengths and never from ids: the padding id may be one that the policy generates.
        return torch.arange(self.width, device=self.lengths.device)[None, :] < self.lengths[:, None]

    def select(self, rows: Tensor | Sequence[int]) -> Experience:
        """Return the experience of some completions, in the order of ``rows``, T columns wide as before."""
        import torch

        index = torch.as_tensor(rows, device=self.lengths.device)
        changed: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, torch.Tensor):
                changed[item.name] = value[index]
        if self.prompt_ids is not None:
            changed["prompt_ids"] = [self.prompt_ids[i] for i in index.tolist()]
        return replace(self, **changed)

    def to(self, device: Any, **_: Any) -> Experience:
        """Return a copy with every tensor on ``device``."""
        from torch import Tensor

        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


class Sum(NamedTuple):
    """A mean before its division: totals and weights are added over micro-batches and ranks, then divided once."""

    total: Tensor
    weight: Tensor
    """The denominator: number of tokens, completions or groups."""


@dataclass
class LossOutput:
    """Loss of one micro-batch: its share of the whole optimizer step's loss, so that shares simply add up."""

    loss: Tensor
    """Scalar with gradient."""
    token_weights: Tensor
    """dL/d(log-probability) actually applied to each token, [n, T], detached; 0 outside the mask."""
    metrics: dict[str, Sum]
    """Step metrics as sums, by logged name."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """Step metrics that combine by maximum."""


@dataclass(frozen=True)
class RolloutSnapshot:
    """One rollout as the learner saw it, for callbacks; tensors lie on the module's device."""

    rollout: Rollout
    experience: Experience
    advantages: Tensor
    """Advantage of each token, [N, T]."""
    logprobs: Tensor | None = None
    """Log-probabilities by the learner before the first update, [N, T]. NaN for a completion that did not go through
    the model (no gradient, and not among the probes). None where no pass covered the whole rollout before an update."""
    entropy: Tensor | None = None
    """Entropies of that pass in nats, [N, T]; NaN and None mean what they mean for ``logprobs``."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of a training step, which callbacks read."""

    snapshot: RolloutSnapshot
    metrics: Mapping[str, float] | None = None
    """Everything logged for this rollout; None while its optimizer steps are under way."""
