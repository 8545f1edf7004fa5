"""What hosts exchange in a step, by formula: it is what a count of single transfers gives, and what the docs say."""

from __future__ import annotations

import re

import pytest

from scripts.scaling_gpu_cases import traffic
from scripts.scaling_gpu_cases.points import SHAPES
from scripts.scaling_gpu_cases.traffic import Work
from tests.paths import ROOT

CARDS = traffic.CARDS_OF_HOST


def units(work: Work) -> list[int]:
    """Weights of what is gathered at once: each block, and the rest."""
    of = work.of
    return [of.block_parameters // of.layers] * of.layers + [of.parameters - of.block_parameters]


def arrives(weights: int, size: int, hosts: int) -> float:
    """Bytes that come to host 0 when every one of its cards is given all shards, each of which crosses once."""
    cards = hosts * CARDS
    return sum(weights * size / cards for card in range(cards) if card // CARDS != 0)


@pytest.mark.parametrize("hosts", [1, 2, 8])
@pytest.mark.parametrize(("shape", "prompts"), [("qwen2-1.5b", 64), ("qwen2-1.5b", 4), ("qwen2-7b", 16)])
def test_the_formula_is_the_count_of_transfers(shape: str, prompts: float, hosts: int) -> None:
    work, learner, passes = Work(shape, prompts), 0.0, 0
    *blocks, rest = units(work)
    for _ in range(work.micro_batches):
        for _forward_and_backward in range(2):
            learner += sum(arrives(block, 2, hosts) for block in blocks)
            passes += len(blocks)
        learner += sum(arrives(unit, 4, hosts) for unit in (*blocks, rest))
        passes += len(blocks) + 1
    # Embedding and head stay gathered until the step is taken.
    learner += arrives(rest, 2, hosts)
    passes += 1
    whole = sum(arrives(unit, 2, hosts) for unit in (*blocks, rest))
    assert traffic.learner_bytes(work, hosts) == pytest.approx(learner + whole)
    assert traffic.sync_bytes(work, hosts) == pytest.approx(whole)
    # The pass that measures the step, and the sync, gather everything once.
    assert traffic.collectives(work) == passes + 2 * (len(blocks) + 1)


def test_one_host_has_nothing_to_exchange() -> None:
    work = Work("qwen2-1.5b", 64)
    assert traffic.learner_bytes(work, 1) == traffic.hybrid_bytes(work, 1) == traffic.sync_bytes(work, 1) == 0


@pytest.mark.parametrize("hosts", [2, 8, 64])
def test_a_ring_brings_all_but_one_shard_into_each_host(hosts: int) -> None:
    """N - 1 steps, in each of which one shard of 1/N comes over the one edge that leads into a host."""
    cards = hosts * CARDS
    by_ring = sum(1 / cards for _step in range(cards - 1))
    assert traffic.ring_factor(hosts) * traffic.crossing(hosts) == pytest.approx(by_ring)


def test_an_all_reduce_sends_each_sum_twice() -> None:
    """Ring of hosts, one ring for each card of a host: H - 1 steps to sum a shard and as many to hand it round."""
    hosts, work = 4, Work("qwen2-1.5b", 64)
    shard = work.of.parameters / CARDS
    sent = sum(2 * (hosts - 1) * shard / hosts * 4 for _card in range(CARDS))
    assert traffic.hybrid_bytes(work, hosts) == pytest.approx(sent)


def test_micro_batches_and_time_go_with_the_tokens() -> None:
    whole = Work("qwen2-1.5b", SHAPES["qwen2-1.5b"].prompts)
    assert whole.tokens == 64 * (111 + 8 * 256)
    # Seven groups of 2,159 tokens fit into 16,384, and a group is not divided: 56 completions, nine times, and eight.
    assert whole.micro_batches == 10
    assert whole.update_seconds == pytest.approx(traffic.MEASURED_UPDATE)
    assert Work("qwen2-1.5b", 16).update_seconds == pytest.approx(traffic.MEASURED_UPDATE / 4)
    # The same operations a second as at 1.5B, where they were measured.
    seven, head = Work("qwen2-7b", 16), 152064 * 3584
    flops = 6 * ((SHAPES["qwen2-7b"].parameters - 2 * head) * 16 * (111 + 2048) + head * 16 * 2048)
    assert seven.update_seconds == pytest.approx(flops / traffic.MEASURED_TFLOPS / 1e12)


def test_the_measured_figures_are_those_of_the_docs() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    row = re.search(r"\n\| ours by itself, the logits computed again \|(.*)\|\n", text)
    assert row is not None
    cells = [cell.strip() for cell in row[1].split("|")]
    assert float(cells[0]) == traffic.MEASURED_STEP
    assert float(cells[5]) == traffic.MEASURED_UPDATE
    peak = re.search(r"against (\d+) TFLOP/s, which this kind of card reaches", text)
    assert peak is not None
    assert round(float(cells[8].removesuffix("%")) / 100 * float(peak[1])) == traffic.MEASURED_TFLOPS


def test_the_table_of_the_docs_is_the_one_that_is_computed() -> None:
    text = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert traffic.table() in text
    # What the text beside it says.
    for hosts, words in ((2, "21 GB/s"), (64, "41 GB/s")):
        found = traffic.rate(traffic.learner_bytes(Work("qwen2-1.5b", 64), hosts), traffic.MEASURED_UPDATE)
        assert f"{found:.0f} GB/s" == words
        assert words in text
    for hosts, words in ((2, "39 GB/s"), (64, "42 GB/s")):
        found = traffic.rate(traffic.learner_bytes(Work("qwen2-1.5b", 64), hosts), traffic.MEASURED_UPDATE)
        assert f"{traffic.ring_factor(hosts) * found:.0f} GB/s" == words
        assert words in text
    whole = Work("qwen2-1.5b", 64)
    assert f"{1000 * whole.update_seconds / traffic.collectives(whole):.1f} ms are there for each collective" in text
    assert f"{2 * whole.of.block_parameters / whole.of.layers / 512 / 1e6:.2f} MB" in text
    one = Work("qwen2-1.5b", 1)
    assert f"{traffic.rate(traffic.learner_bytes(one, 8), one.update_seconds):.0f} GB/s" in text
    less = traffic.learner_bytes(whole, 8) / traffic.hybrid_bytes(whole, 8)
    assert f"{less:.1f} times less" in text
    assert f"micro-batch: {whole.micro_batches} of them in a step here" in " ".join(text.split())


def test_a_rank_without_a_prompt_is_refused() -> None:
    assert "refused" in traffic.row(Work("qwen2-1.5b", 0.5), 64, "x")
