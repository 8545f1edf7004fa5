"""Checks that engine and learner agree before the first update of every rollout.

Always on: they cost nearly nothing, and a disagreement spoils everything that follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lit_grpo.errors import StopRun
from lit_grpo.learner.batch import gather_rows
from lit_grpo.learner.metric_sums import Reduce
from lit_grpo.objectives.tensors import masked
from lit_grpo.policy.forward.attention import to_device
from lit_grpo.types import Experience, Rollout, RolloutSnapshot
from lit_grpo.utils.bounds import Bound

# Rounding alone gives about 1e-6 in float32 and 1e-2 in bfloat16.
RATIO_GAP = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Bound on mean |ratio - 1| before the first update, by the learner's number format; 2e-2 for any other."""

ENGINE_CAUSES = (
    "the engine does not hold the learner's weights (a sync that failed or was skipped)",
    "temperature, top_p or top_k applied on one side only",
    "prompt ids that differ (template, BOS, truncation)",
    "a number format of the engine too coarse for the model (engine.dtype)",
    "dropout active in the learner",
)
LEARNER_CAUSES = (
    "dropout active in the learner",
    "weights changed between the two passes",
    "temperature applied in one pass only",
    "kernels that differ between the passes",
)


@dataclass
class GuardConfig:
    r"""Bounds beyond which a run stops or warns; null switches one off.

    The log-probabilities that the engine gives are checked besides: with ``max_engine_gap`` every sampled token must
    have one, and with and without it infinite ones stop the run.

    Attributes:
        max_engine_gap: mean difference (nats) between the log-probabilities that engine and learner give the same
            sampled tokens under the same weights. Float32 on both sides gives about 1e-5, bfloat16 rollouts 1e-2.
        max_sync_gap: the same difference for a few tokens after the engine's first sync, under weights that were all
            changed a little for it and then as they are, as a share of what that change does to the learner's
            log-probabilities. An engine in bfloat16 gives up to 0.05 in the place of 1e-6, a single layer that was
            not taken over 0.37, and an ignored sync 1; one that quantizes its weights needs more, say 0.5. Not checked
            where ``max_engine_gap`` is null.
        max_ratio_gap: mean \|ratio - 1\| before the first update of a rollout, where old log-probabilities come from
            a pass of their own; ``auto``: 1e-3 in float32, 2e-2 in bfloat16.
        max_truncated: share of completions cut by the length limit in the first rollout; above it the run warns.
        max_rank_silence: seconds without a sign of life after which one of several processes counts as lost, and the
            others end. Signs come from a thread of their own, however long a step takes.
    """

    max_engine_gap: Annotated[float | None, Bound(above=0)] = 0.1
    max_sync_gap: Annotated[float | None, Bound(above=0, most=1)] = 0.2
    max_ratio_gap: Annotated[float | Literal["auto"] | None, Bound(above=0)] = "auto"
    max_truncated: Annotated[float | None, Bound(least=0, most=1)] = 0.9
    max_rank_silence: Annotated[float | None, Bound(least=1)] = 40.0


class FirstUpdate:
    """The learner's log-probabilities and entropies of a rollout before any weight has changed.

    They are compared with the engine's log-probabilities and with the old ones of a pass before the updates.

    Args:
        batch: the rollout.
        experience: its tensors.
        rows: completions of the first optimizer step.
        version: version of the learner's weights. Tokens drawn from older weights are not compared with the engine's
            log-probabilities.
    """

    def __init__(self, batch: Rollout, experience: Experience, rows: Tensor, version: int) -> None:
        self.batch, self.experience, self.rows = batch, experience, rows
        self.fresh = torch.tensor([c.policy_version == version for c in batch.completions])
        self.sums = torch.zeros(6, dtype=torch.float64, device=experience.lengths.device)
        """Total gap to the engine and its tokens, total gap of the ratio from 1 and its tokens, tokens whose
        log-probability in the engine is infinite, and tokens for which it is unknown, [6]."""
        self._micro_batches: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._multiplicities: list[Tensor] = []

    @torch.no_grad()
    def add(self, rows: Tensor, logprobs: Tensor, entropy: Tensor | None, multiplicity: Tensor | None = None) -> None:
        """Compare the learner's log-probabilities, [n, T], of completions ``rows``, [n], and keep them.

        ``multiplicity`` is the number of completions that each of them stands for, [n]; None: itself alone.
        """
        self._micro_batches.append((rows, logprobs.detach(), None if entropy is None else entropy.detach()))
        self._multiplicities.append(
            torch.ones(len(rows), dtype=torch.float64) if multiplicity is None else multiplicity
        )
        experience = self.experience
        index = to_device(rows, logprobs.device)
        mask = experience.mask[index]
        sampled, old = experience.sampler_logprobs, experience.old_logprobs
        if sampled is not None:
            known = mask & sampled[index].isfinite() & to_device(self.fresh[rows], mask.device)[:, None]
            # Completions of older weights are left out: there a gap is no fault.
            gap = (logprobs.detach().float() - sampled[index]).abs()
            self.sums[0] += masked(gap, known).double().sum()
            self.sums[1] += known.sum()
            self.sums[4] += (mask & sampled[index].isinf()).sum()
            self.sums[5] += (mask & sampled[index].isnan()).sum()
        if old is not None:
            gap = ((logprobs.detach() - old[index]).exp() - 1).abs()
            self.sums[2] += masked(gap, mask).double().sum()
            self.sums[3] += mask.sum()

    def snapshot(self) -> tuple[Tensor, int]:
        """Return what has been added so far, for :meth:`restore`."""
        return self.sums.clone(), len(self._micro_batches)

    def restore(self, snapshot: tuple[Tensor, int]) -> None:
        """Forget what was added after a :meth:`snapshot`."""
        sums, count = snapshot
        self.sums = sums.clone()
        del self._micro_batches[count:], self._multiplicities[count:]

    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the completions that the step looked at, [n], how many each stands for, [n], and log-probabilities.

        The latter are [N, T], NaN for all other completions.
        """
        if not self._micro_batches:
            none = torch.zeros(0, dtype=torch.float64)
            return none.long(), none, self.experience.lengths.new_zeros(len(self.batch.completions), 0).double()
        rows = torch.cat([rows for rows, _, _ in self._micro_batches])
        known = [(rows, logprobs) for rows, logprobs, _ in self._micro_batches]
        return rows, torch.cat(self._multiplicities), gather_rows(known, len(self.batch.completions), float("nan"))

    def logprobs(self) -> Tensor | None:
        """Return the log-probabilities of the whole rollout, [N, T], NaN for completions that were left out.

        None where the step looked at a part of the rollout only, or at nothing.
        """
        return self._gathered([(rows, logprobs) for rows, logprobs, _ in self._micro_batches])

    def entropy(self) -> Tensor | None:
        """Return the entropies of the whole rollout in nats, [N, T]; NaN and None as in :meth:`logprobs`."""
        known = [(rows, entropy) for rows, _, entropy in self._micro_batches if entropy is not None]
        return self._gathered(known) if len(known) == len(self._micro_batches) else None

    def rollout_snapshot(self, advantages: Tensor) -> RolloutSnapshot:
        """Return the rollout for callbacks, with its log-probabilities and entropies from before the first update."""
        experience = self.experience
        return RolloutSnapshot(
            self.batch,
            experience,
            advantages,
            self.logprobs() if experience.old_logprobs is None else experience.old_logprobs,
            self.entropy() if experience.entropy is None else experience.entropy,
        )

    def _gathered(self, micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor | None:
        count = len(self.batch.completions)
        # Completions that no reward scored are in no step.
        whole = count if self.batch.scored is None else int(self.batch.scored.sum())
        if not micro_batches or len(self.rows) < whole:
            return None
        return gather_rows(micro_batches, count, float("nan"))

    def check(
        self,
        config: GuardConfig,
        reduce: Reduce | None,
        dtype: torch.dtype = torch.float32,
        *,
        says: bool = True,
    ) -> None:
        """Compare the gaps with their bounds, with the same outcome on every rank.

        Args:
            config: the bounds.
            reduce: sum over ranks; None for one process.
            dtype: number format of the learner.
            says: warn in the first rollout if its sampler gave no log-probabilities.

        Raises:
            StopRun: a gap is over its bound; the message names likely causes in order.
        """
        # The first line of a step that waits for a GPU.
        sums = self.sums if reduce is None else reduce(self.sums)
        engine, engine_tokens, ratio, ratio_tokens, infinite, unknown = sums.tolist()
        if infinite:
            raise StopRun(
                f"the log-probabilities of {infinite:.0f} sampled tokens of rollout {self.batch.index + 1} are "
                "infinite, which no token that was sampled can have: the engine's weights or logits are not finite, or "
                "it reports the probabilities of another distribution",
                diagnosis="stale_or_mismatched_sampler",
            )
        if unknown and not engine_tokens and not self.batch.index and config.max_engine_gap is not None and says:
            rank_zero_warn(
                "The rollouts have no log-probabilities of their sampler, so model.guards.max_engine_gap cannot tell "
                "whether they are samples of the policy."
            )
        if config.max_engine_gap is not None and engine_tokens:
            mean = engine / engine_tokens
            # Written so that NaN, which compares false, is over every bound; likewise below.
            if not mean <= config.max_engine_gap:
                raise StopRun(
                    f"engine and learner disagree in rollout {self.batch.index + 1}: their log-probabilities of the "
                    f"{engine_tokens:.0f} sampled tokens differ by {mean:.3g} nats on average, allowed are "
                    f"{config.max_engine_gap:g} (model.guards.max_engine_gap). {likely_causes(ENGINE_CAUSES)}",
                    diagnosis="stale_or_mismatched_sampler",
                )
        bound = config.max_ratio_gap
        if bound == "auto":
            bound = RATIO_GAP.get(dtype, 2e-2)
        if bound is not None and ratio_tokens:
            mean = ratio / ratio_tokens
            if not mean <= float(bound):
                raise StopRun(
                    f"the ratio before the first update of rollout {self.batch.index + 1} is not 1: mean |ratio - 1| "
                    f"is {mean:.3g}, allowed are {float(bound):g} (model.guards.max_ratio_gap). "
                    f"{likely_causes(LEARNER_CAUSES)}",
                    diagnosis="plumbing_ratio",
                )

    def check_truncation(self, config: GuardConfig) -> None:
        """Warn when nearly nothing of the first rollout came to an end."""
        if config.max_truncated is None or self.batch.index:
            return
        share = sum(c.truncated for c in self.batch.completions) / max(1, len(self.batch.completions))
        if share > config.max_truncated:
            rank_zero_warn(
                f"{share:.0%} of the first completions were cut by the length limit before they ended: raise "
                "data.sampling.max_new_tokens, check that the model knows the end token (engine and tokenizer), or use "
                "its chat template (data.format.chat_template)."
            )


def likely_causes(causes: tuple[str, ...]) -> str:
    """Return one sentence that names causes, the likeliest first."""
    return "Likely causes, in order: " + "; ".join(f"({i}) {cause}" for i, cause in enumerate(causes, 1)) + "."
