"""What goes between hosts in one step, by formula, beside the time that was measured for the same work on one card.

FSDP2 shards over all ranks. A host holds 1/H of every weight, so of whatever is gathered it must be sent the share
1 - 1/H at least, and of whatever is summed it must send as much: the least that any algorithm moves. A ring through all
N cards, which NCCL may choose, sends the share 1 - 1/N into each host. In a step embedding and head are gathered once,
and each micro-batch

* gathers the blocks twice, for forward and backward (2 bytes a weight);
* sums all gradients (4 bytes a weight), since FSDP2 sums in every backward pass;

then one pass measures the step, and the sync gathers all weights once for the engines. One more figure says what the
same design would move if weights were sharded within each host alone and gradients were summed over hosts once a step:
twice the gradients, as every all-reduce.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lit_grpo.policy.forward.batching import Layout, cut
from scripts.scaling_gpu_cases.points import SHAPES, Shape

CARDS_OF_HOST = 8
HOSTS = (2, 8, 64)
_GATHERED, _SUMMED = 2, 4
"""Bytes of a weight in bfloat16, and of a gradient in float32."""
_STATE = 12
"""Bytes of a weight in a checkpoint: itself and two moments, in float32."""
MEASURED_UPDATE = 2.81
"""Seconds of forward and backward for 64 x 8 x 256 tokens at 1.5B on one H200, without checkpointing, the logits
computed again (docs/performance.md, "On one GPU", the fifth time)."""
MEASURED_STEP = 4.99
"""Seconds of that step."""
MEASURED_TFLOPS = 451.0
"""Of forward and backward there, with which the time of another shape is computed."""


@dataclass(frozen=True)
class Work:
    """A step of so many prompts a card."""

    shape: str
    prompts: float
    """Of a card; below 1 none can be shared out."""

    @property
    def of(self) -> Shape:
        """Return the shape of the model."""
        return SHAPES[self.shape]

    @property
    def tokens(self) -> float:
        """Return what a rank feeds: prompts once, completions all."""
        return self.prompts * (self.of.prompt + self.of.group_size * self.of.completion)

    @property
    def micro_batches(self) -> int:
        """Return how many micro-batches a rank has, as the learner cuts them: a group is not divided where it fits."""
        group, completion = self.of.group_size, (0,) * self.of.completion
        prompts = [(number,) * self.of.prompt for number in range(math.ceil(self.prompts)) for _ in range(group)]
        return len(cut(Layout(), prompts, [completion] * len(prompts), tokens=self.of.micro_batch_tokens))

    @property
    def update_seconds(self) -> float:
        """Return the time of forward and backward on a card, if it computes as fast as was measured at 1.5B."""
        whole = Work("qwen2-1.5b", SHAPES["qwen2-1.5b"].prompts)
        if self.shape == whole.shape:
            return MEASURED_UPDATE * self.tokens / whole.tokens
        head = self.of.vocabulary * self.of.hidden
        completion = self.prompts * self.of.group_size * self.of.completion
        return 6 * (self.of.block_parameters * self.tokens + head * completion) / MEASURED_TFLOPS / 1e12


def crossing(hosts: int) -> float:
    """Return the share of gathered weights that a host does not hold."""
    return 1 - 1 / hosts


def learner_bytes(work: Work, hosts: int) -> float:
    """Return what a host receives (gathers) and sends (gradients) of all micro-batches, and of the pass after them."""
    blocks, rest = work.of.block_parameters, work.of.parameters - work.of.block_parameters
    each = _GATHERED * 2 * blocks + _SUMMED * (blocks + rest)
    return crossing(hosts) * (work.micro_batches * each + _GATHERED * (rest + work.of.parameters))


def ring_factor(hosts: int) -> float:
    """Return how many times the least a ring through all cards brings to a host."""
    return crossing(hosts * CARDS_OF_HOST) / crossing(hosts)


def hybrid_bytes(work: Work, hosts: int) -> float:
    """Return the same where each host holds all weights, and gradients are summed over hosts once a step."""
    return crossing(hosts) * 2 * _SUMMED * work.of.parameters


def sync_bytes(work: Work, hosts: int) -> float:
    """Return what a host receives to bring the weights to its engines."""
    return crossing(hosts) * _GATHERED * work.of.parameters


def collectives(work: Work) -> int:
    """Return how many gathers and sums a rank takes part in, one after another: blocks, and embedding and head."""
    units = work.of.layers + 1
    return work.micro_batches * (2 * (units - 1) + units) + 1 + units + units


def rate(count: float, seconds: float) -> float:
    """Return GB/s of a host."""
    return count / seconds / 1e9


HEAD = (
    *("step", "hosts", "cards", "prompts a card", "learner, GB", "sync, GB", "forward + backward, s"),
    *("GB/s for the learner", "GB/s for the sync", "ms a collective", "within hosts, GB", "checkpoint, GB a host"),
)


def table() -> str:
    """Return what a host moves in a step, in Markdown: the same work on every card, then one batch on all."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    for shape in ("qwen2-1.5b", "qwen2-7b"):
        for hosts in HOSTS:
            lines.append(row(Work(shape, SHAPES[shape].prompts), hosts, f"{shape}, the same work a card"))
    batch = SHAPES["qwen2-1.5b"].prompts
    for hosts in HOSTS:
        lines.append(
            row(Work("qwen2-1.5b", batch / hosts / CARDS_OF_HOST), hosts, f"qwen2-1.5b, {batch} prompts in all")
        )
    return "\n".join(lines)


def row(work: Work, hosts: int, title: str) -> str:
    """Return one line of the table."""
    cells = [title, str(hosts), str(hosts * CARDS_OF_HOST)]
    if work.prompts < 1:
        return "| " + " | ".join([*cells, f"{work.prompts:.3g}: refused", *["–"] * (len(HEAD) - 4)]) + " |"
    learner, sync = learner_bytes(work, hosts), sync_bytes(work, hosts)
    # As long as a step on one card, less what its forward and backward take: sampling shrinks with the prompts too.
    step = MEASURED_STEP / MEASURED_UPDATE * work.update_seconds
    cells += [
        f"{work.prompts:g}",
        f"{learner / 1e9:.1f}",
        f"{sync / 1e9:.2f}",
        f"{work.update_seconds:.2f}",
        f"{rate(learner, work.update_seconds):.1f}",
        f"{rate(sync, 0.05 * step):.1f}",
        f"{1000 * work.update_seconds / collectives(work):.2f}",
        f"{hybrid_bytes(work, hosts) / 1e9:.1f}",
        f"{_STATE * work.of.parameters / hosts / 1e9:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"
