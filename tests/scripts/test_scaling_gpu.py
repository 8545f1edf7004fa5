"""The scaling of a step over cards: what is planned, calculated, kept for the next call and written; one run of it."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_grpo.cli.main import main as lit_grpo
from lit_grpo.errors import UserError
from scripts import scaling_gpu
from scripts.scaling_gpu_cases import files, runs
from scripts.scaling_gpu_cases.measure import efficiency, figures, recorded, reward_after
from scripts.scaling_gpu_cases.points import SERIES, SHAPES, Point, plan
from scripts.scaling_gpu_cases.results import Results
from scripts.scaling_gpu_cases.reward import EvenShare
from scripts.scaling_gpu_cases.table import goals, page, plot
from tests.waiting import wait_until

CPU = {"card": "a CPU", "cards": 4, "on_cards": False, "engine": "transformers", "software": "s", "peak_tflops": None}
CARDS = CPU | {"card": "H200", "cards": 8, "on_cards": True, "engine": "vllm", "peak_tflops": 989.0}
BIG = Point("qwen2-1.5b", 2, 128)


# ---------------------------------------------------------------------------------------------------- the plan


@pytest.mark.parametrize(("shape", "billions"), [("qwen2-1.5b", 1.54), ("qwen2-7b", 7.61)])
def test_a_shape_has_the_weights_of_its_name(shape: str, billions: float) -> None:
    assert SHAPES[shape].parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_the_parameters_are_those_of_the_model_that_is_written(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = files.prepare("tiny", tmp_path)
    shape = SHAPES["tiny"]
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    assert sum(p.numel() for p in model.parameters() if p.ndim == 2) == shape.parameters
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    rows = [json.loads(line)["prompt"] for line in (place / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == files.PROMPTS
    assert {len(tokenizer(row)["input_ids"]) for row in rows[:50]} == {shape.prompt}
    assert len(tokenizer) == shape.vocabulary
    assert all(tokenizer.decode([i]) for i in range(shape.vocabulary)), "every id has a text"
    written = (place / "model" / "config.json").stat().st_mtime_ns
    files.prepare("tiny", tmp_path)
    assert (place / "model" / "config.json").stat().st_mtime_ns == written, "made once"


def test_the_plan_has_the_work_of_every_series() -> None:
    found = plan(["qwen2-1.5b", "qwen2-7b"], [1, 2, 4, 8], SERIES, 2, 5, True)
    work = {(series, p.shape, p.cards, p.prompts) for series, p in found if series in ("weak", "strong")}
    assert {x for x in work if x[0] == "weak"} == {
        ("weak", shape, n, count * n) for shape, count in (("qwen2-1.5b", 64), ("qwen2-7b", 16)) for n in (1, 2, 4, 8)
    }
    assert {x for x in work if x[0] == "strong"} == {("strong", "qwen2-1.5b", n, 64) for n in (1, 2, 4, 8)}
    split = [p for _, p in found if p.layout == "split"]
    assert [(p.shape, p.ranks, p.staleness, p.prompts) for p in split] == [("qwen2-1.5b", 4, 1, 512)]
    assert [p.processes for series, p in found if series == "processes"] == [1, 2, 3]
    assert found[0][1].cards == 1, "what the others are compared with comes first"
    assert found[1][1].cards == 8
    points = [p for _, p in found]
    assert len({p.name for p in points}) == len(set(points)), "a name stands for one point"


def test_a_cpu_has_no_engines_of_their_own() -> None:
    found = plan(["tiny"], [1, 2, 4], SERIES, 2, 5, False)
    assert {p.layout for _, p in found} == {"colocated"}
    assert {p.processes for _, p in found} == {1}
    assert {series for series, _ in found} == {"weak", "strong", "layouts"}


def test_what_fits_no_card_is_seen_before() -> None:
    assert Point("qwen2-7b", 1, 16).need_gib() > 7.6e9 * 18 / 2**30
    assert Point("qwen2-7b", 2, 32).need_gib() < 139
    assert Point("qwen2-1.5b", 1, 64).need_gib() < 80
    assert Point("qwen2-7b", 8, 128, layout="split").need_gib() < Point("qwen2-7b", 8, 128).need_gib()


def test_half_of_the_cards_are_the_engines() -> None:
    split = replace(BIG, cards=8, prompts=512, layout="split", staleness=1)
    settings = files.engine_settings(split, on_cards=True, engine="vllm")
    assert settings["cards"] == [4, 5, 6, 7]
    assert settings["max_num_seqs"] == 128 * 8, "a rank samples for two cards"
    assert files.configuration(split, Path("m"), Path("r"), on_cards=True, engine="vllm")["trainer"]["devices"] == 4
    assert "cards" not in files.engine_settings(BIG, on_cards=True, engine="vllm")


@pytest.mark.parametrize("layout", ["colocated", "split"])
def test_the_configuration_is_one_of_lit_grpo(layout: Any, tmp_path: Path, capsys: Any) -> None:
    place, point = files.prepare("tiny", tmp_path), Point("tiny", 2, 8, layout=layout, staleness=1)
    settings = files.configuration(point, place, tmp_path / "run", on_cards=True, engine="vllm")
    settings["trainer"]["accelerator"] = "cpu"
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(settings))
    assert lit_grpo(["fit", "--config", str(path), "--print_config"]) == 0
    assert "max_staleness: 1" in capsys.readouterr().out


def test_the_reward_is_the_share_of_even_ids() -> None:
    batch: Any = [SimpleNamespace(completion=SimpleNamespace(token_ids=ids)) for ids in ((2, 4, 5, 7), (), (1,), (8,))]
    assert EvenShare().score(batch) == [0.5, 0.0, 0.0, 1.0]


# ---------------------------------------------------------------------------------------------------- figures


def row(number: int, wall: float, **changes: float) -> dict[str, float]:
    base = {
        "wall_time": wall, "completions/tokens": 1000.0, "reward": 0.5 + number / 100, "memory/peak_gib": 3.0 + number,
        "time/generate": 2.0, "time/reward": 0.1, "time/sync": 0.2, "time/update": 1.5, "loss": 0.1,
        "optim/grad_norm": 2.0,
    }  # fmt: skip
    return base | changes


ROWS = [row(i, wall) for i, wall in enumerate([100.0, 150.0, 154.0, 159.0, 163.0])]


def test_figures_are_those_of_the_measured_steps(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    config = {
        "hidden_size": shape.hidden, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "num_hidden_layers": shape.layers, "intermediate_size": shape.intermediate, "vocab_size": shape.vocabulary,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = figures(Point("tiny", 2, 8, steps=3, warmup=2), ROWS, tmp_path, peak_tflops=1e-3)
    assert found["step"] == 4.0, "the median of 4, 5 and 4; the 50 seconds are the warm-up's"
    assert found["tokens_per_second"] == 250.0
    assert found["sync_share"] == pytest.approx(0.2 / 4)
    assert found["peak_gib"] == 7.0
    assert "learner_idle" not in found
    # Forward and backward are 6 operations for each weight and token; a prompt is fed once, and only the head of
    # completion tokens is computed.
    head = shape.vocabulary * shape.hidden
    flops = 6 * ((shape.parameters - head) * (1000 + 8 * shape.prompt) + head * 1000)
    assert found["tflops"] == pytest.approx(flops / 1.5 / 1e12 / 2)
    assert found["mfu"] == pytest.approx(flops / 1.5 / 2 / 1e9)


def test_half_of_the_cards_learn_and_count_for_the_mfu(tmp_path: Path) -> None:
    place = files.prepare("tiny", tmp_path) / "model"
    both, half = (
        figures(Point("tiny", 4, 8, steps=3, layout=layout), ROWS, place, 1e-3) for layout in ("colocated", "split")
    )
    assert half["mfu"] == pytest.approx(2 * both["mfu"])


def made(point: Point, rate: float, **changes: Any) -> dict[str, Any]:
    found = {
        "step": 10.0, "tokens": 100.0, "tokens_per_second": rate, "peak_gib": 5.0, "rewards": [0.4, 0.5, 0.6],
        "elapsed": [0.0, 10.0, 20.0], "generate": 4.0, "reward": 0.1, "sync": 0.3, "update": 5.0, "sync_share": 0.03,
        "tflops": 400.0, "mfu": 0.46, "seconds": 90.0, "card_gib": 60.0,
    }  # fmt: skip
    return recorded(point, **(found | changes))


def test_efficiency_of_weak_and_of_strong_scaling() -> None:
    one, four = made(Point("tiny", 1, 4), 100.0), made(Point("tiny", 4, 16), 340.0)
    assert efficiency(four, one) == pytest.approx(0.85)
    assert efficiency(one, one) == 1.0
    # 64 prompts took 10 s on one card, and on four 4 s: a speed-up of 2.5.
    assert efficiency(made(Point("tiny", 4, 4), 250.0), one) == pytest.approx(2.5 / 4)


def test_rewards_are_compared_after_equal_time() -> None:
    record = made(BIG, 1.0)
    assert [reward_after(record, seconds) for seconds in (-1.0, 0.0, 9.9, 10.0, 99.0)] == [None, 0.4, 0.4, 0.5, 0.6]


# ---------------------------------------------------------------------------------------------------- going on


def test_what_was_measured_is_there_for_the_next_call(tmp_path: Path) -> None:
    path, other = tmp_path / "results.json", replace(BIG, cards=4)
    first = Results(path, CPU)
    first.add(BIG, made(BIG, 100.0))
    first.add(other, recorded(other, failure="out of memory"))
    again = Results(path, CPU)
    assert again.has(BIG)
    assert again.good(BIG) == first.records[BIG.name]
    assert again.has(other), "tried in vain: not again"
    assert again.good(other) is None
    assert not again.has(replace(BIG, steps=20))
    again.drop_failures()
    assert again.has(BIG)
    assert not again.has(other)


def test_a_point_that_is_cut_twice_takes_too_long(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", CPU)
    cut = recorded(BIG, failure="it was not done after 9 s", cut=True)
    results.add(BIG, cut)
    assert not Results(tmp_path / "results.json", CPU).has(BIG)
    results.add(BIG, cut)
    assert Results(tmp_path / "results.json", CPU).has(BIG)


def test_the_time_of_a_point_is_estimated_by_its_steps(tmp_path: Path) -> None:
    results, long = Results(tmp_path / "results.json", CPU), replace(BIG, steps=20)
    unknown = results.expected_seconds(BIG)
    results.add(replace(BIG, shape="tiny"), made(replace(BIG, shape="tiny"), 1.0, seconds=1.0))
    assert results.expected_seconds(BIG) == unknown > 60, "of its shape nothing is known"
    results.add(long, made(long, 100.0, seconds=300.0))
    assert results.expected_seconds(long) == pytest.approx(1.1 * 300)
    assert results.expected_seconds(BIG) == pytest.approx(1.1 * (300 - 15 * 10.0))


def test_figures_of_another_card_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    Results(path, CPU).write()
    with pytest.raises(UserError, match="H200"):
        Results(path, CARDS)
    path.write_text('{"machine": ')
    with pytest.raises(UserError, match="cannot be read"):
        Results(path, CPU)


def test_a_call_begins_nothing_that_would_not_end(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The second call runs what the first has left, and the third nothing."""
    clock, ran = [0.0], list[str]()

    def measure(point: Point, here: Any, args: Any, budget: float, started: float) -> dict[str, Any]:
        ran.append(point.name)
        clock[0] += 60.0
        return made(point, 100.0 * point.cards, seconds=60.0)

    monkeypatch.setattr(scaling_gpu, "measure", measure)
    monkeypatch.setattr(scaling_gpu.time, "monotonic", lambda: clock[0])
    command = ["--shapes", "tiny", "--cards", "1", "2", "4", "--series", "weak", "--out", str(tmp_path)]
    assert scaling_gpu.main([*command, "--budget-seconds", "140"]) == scaling_gpu.LEFT
    # 60 and 66 expected; after the second 20 are left.
    assert [name.split(", ")[1] for name in ran] == ["1 cards", "4 cards"]
    assert "1 of 3 points are left" in capsys.readouterr().out
    assert scaling_gpu.main([*command, "--budget-seconds", "140"]) == 0
    assert [name.split(", ")[1] for name in ran] == ["1 cards", "4 cards", "2 cards"]
    assert scaling_gpu.main(command) == 0
    assert len(ran) == 3
    assert "| tiny | 4 | 16 |" in (tmp_path / "scaling.md").read_text()
    assert (tmp_path / "scaling.png").stat().st_size < 60_000


def test_a_run_that_takes_too_long_is_ended_with_its_ranks(tmp_path: Path, monkeypatch: Any) -> None:
    stubborn = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); "
        # In one write: without a buffer a number and the end of its line are two, between which the other's may come.
        "os.write(1, f'{os.getpid()}\\n'.encode()); time.sleep(600)"
    )
    monkeypatch.setattr(runs, "command", lambda *_: [sys.executable, "-c", stubborn])
    monkeypatch.setattr(runs, "_GRACE_SECONDS", 0.5)
    log = tmp_path / "run" / "log.txt"

    def clock() -> float:
        # The time is over when both have said who they are, however long they take to start.
        return 2.0 * (log.is_file() and log.read_text().count("\n") == 2)

    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    outcome = runs.run(
        Point("tiny", 1, 4),
        tmp_path,
        tmp_path / "run",
        seconds=2.0,
        on_cards=False,
        engine="vllm",
        launcher="lightning",
    )
    assert outcome.cut
    assert "2 s" in str(outcome.failure)
    ids = [int(word) for word in log.read_text().split()]
    assert len(ids) == 2
    wait_until(lambda: not any(_alive(pid) for pid in ids), "the end of both")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_why_a_run_failed_is_said_in_few_words(tmp_path: Path, monkeypatch: Any) -> None:
    told = "x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n"
    assert runs.reason(told, 1) == "out of memory: torch.OutOfMemoryError: CUDA out of memory. Tried"
    screen = "  memory ran out while the update of rollout 3 was computed. GPU 0 holds 139 GiB.\n"
    assert runs.reason(told + screen, 1).startswith("out of memory: memory ran out while the update")
    assert runs.reason("\n".join(map(str, range(100))), 2).splitlines()[-1] == "99"
    assert len(runs.reason("\n".join(map(str, range(100))), 2).splitlines()) < 20
    monkeypatch.setattr(
        runs, "command", lambda *_: [sys.executable, "-c", "print('no such model'); raise SystemExit(2)"]
    )
    outcome = runs.run(
        Point("tiny", 1, 4),
        tmp_path,
        tmp_path / "run",
        seconds=60.0,
        on_cards=False,
        engine="vllm",
        launcher="torchrun",
    )
    assert outcome.failure == "exit code 2: no such model"
    assert not outcome.cut


def test_a_line_that_was_cut_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert runs.read_metrics(path) == []
    path.write_text(json.dumps(row(0, 1.0)) + '\n{"val/reward": 1.0}\n{"time/update": 1.')
    assert len(runs.read_metrics(path)) == 1


def test_torchrun_starts_the_ranks_where_there_are_several(tmp_path: Path) -> None:
    two, one = (runs.command(Point("tiny", n, 4), [tmp_path / "c"], "torchrun") for n in (2, 1))
    assert "--nproc-per-node=2" in two
    assert "torch.distributed.run" not in one
    plain = runs.command(Point("tiny", 2, 4), [Path("c"), Path("d")], "lightning")
    assert plain[1:] == ["-m", "lit_grpo", "fit", "--config", "c", "--config", "d"]


# ---------------------------------------------------------------------------------------------------- the page


def test_the_page_says_what_was_reached_and_what_was_not(tmp_path: Path) -> None:
    planned = plan(["qwen2-1.5b", "qwen2-7b"], [1, 2, 4, 8], SERIES, 2, 5, True)
    results = Results(tmp_path / "results.json", CARDS)
    for series, point in planned:
        if point.shape == "qwen2-1.5b" and series in ("weak", "layouts"):
            rate = {1: 100.0, 2: 190.0, 4: 342.0, 8: 592.0}[point.cards]
            results.add(point, made(point, rate, sync_share=0.06 if point.cards == 8 else 0.03))
    seven = next(p for _, p in planned if p.shape == "qwen2-7b" and p.cards == 8)
    results.add(seven, made(seven, 50.0))
    one = next(p for _, p in planned if p.shape == "qwen2-7b" and p.cards == 1)
    results.add(one, recorded(one, failure="not run: it needs 156 GiB a card, of 140"))
    text = page(results, planned)
    lines = text.splitlines()
    weak = [line for line in lines if line.startswith("| qwen2-1.5b | ")]
    assert weak[0].endswith("| 100% |")
    assert [cell.strip() for cell in weak[2].split("|")[2:5]] == ["4", "256", "10.00"]
    assert weak[2].endswith("| 86% |")
    assert "| qwen2-1.5b, 4 learn, 4 sample, staleness 1 | 8 |" in text
    assert "0.400 | 0.600 | 0.600 (20 s) |" in text
    assert f"- {one.name}: not run: it needs 156 GiB a card, of 140" in lines
    assert any(line.endswith("not run yet") for line in lines)
    told = goals(results, planned)
    assert "weak scaling of qwen2-1.5b from 1 to 4 cards 86%, at least 85%: reached" in told
    assert "weak scaling of qwen2-1.5b from 1 to 8 cards 74%, at least 75%: not reached" in told
    assert "sync of qwen2-1.5b on 8 cards 6.0% of the step, at most 5%: not reached" in told
    assert "MFU of qwen2-7b on 8 cards 46.0%, at least 45%: reached" in told
    assert not any("weak scaling of qwen2-7b" in line for line in told), "nothing to compare it with"
    assert plot(results, planned, tmp_path / "plot.png")


def test_without_figures_there_is_nothing_to_draw(tmp_path: Path) -> None:
    planned = plan(["tiny"], [1], ["weak"], 1, 5, False)
    assert not plot(Results(tmp_path / "results.json", CPU), planned, tmp_path / "plot.png")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks stand for cards")
def test_one_and_two_ranks_are_measured_and_not_again(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Left by a launcher: with it Lightning starts no second rank, and the first waits for that.
    monkeypatch.setenv("LOCAL_RANK", "0")
    command = ["--shapes", "tiny", "--cards", "1", "2", "--series", "weak", "--steps", "1", "--out", str(tmp_path)]
    assert scaling_gpu.main(command) == 0
    shown = capfd.readouterr().out
    assert "| tiny | 2 | 8 |" in shown
    records = json.loads((tmp_path / "results.json").read_text())["points"]
    assert [record["cards"] for record in records.values()] == [1, 2]
    for record in records.values():
        # 4 prompts x 4 completions of at most 8 tokens a rank.
        assert 0 < record["tokens"] <= 128 * record["cards"]
        assert record["step"] >= record["generate"] > 0
        assert record["tflops"] > 0
    (tmp_path / "last_run").rename(tmp_path / "seen")
    assert scaling_gpu.main(command) == 0
    assert not (tmp_path / "last_run").exists(), "nothing was run again"
