"""Engine processes that are started from the text of a configuration are taken over by the run, or end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.cli import engine_ahead, training
from lit_grpo.cli.config_files import read_layers
from lit_grpo.engines.vllm_processes import cards as cards_module
from lit_grpo.engines.vllm_processes import reserve as module
from lit_grpo.engines.vllm_processes.cards import cards_of_driver
from lit_grpo.engines.vllm_processes.group import EngineGroup
from lit_grpo.engines.vllm_processes.reserve import Reserve, begin, take
from lit_grpo.engines.vllm_processes.settings import environment
from lit_grpo.engines.vllm_server.launch import LAUNCHER_VARIABLES
from tests.engines.vllm_processes.test_process import alive, below
from tests.paths import ROOT
from tests.waiting import wait_until

NEW = pytest.MonkeyPatch


@pytest.fixture
def started(monkeypatch: NEW) -> Iterator[list[int]]:
    """The numbers of processes that were begun, none of which is really started."""
    found: list[int] = []
    monkeypatch.setattr(Reserve, "start", lambda self: found.append(len(self._processes)))
    monkeypatch.setattr(module, "vllm_is_installed", lambda: True)
    monkeypatch.setattr(module, "_reserves", [])
    # As on a machine without a card, whatever this one has.
    monkeypatch.setattr(cards_module, "_DEVICES", Path("/proc/self/fdinfo"))
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield found
    for left in module._reserves:
        left.close()


def test_what_was_begun_is_taken_over_once(started: list[int]) -> None:
    begin(2)
    begin(2)
    assert started == [2]
    scratch = module._reserves[0].scratch
    taken = take(2, environment(2), 100)
    assert taken is not None
    assert taken.scratch == scratch
    assert take(2, environment(2), 100) is None
    taken.close()
    assert not scratch.exists()


@pytest.mark.parametrize("what", ["number", "threads", "variable", "room"])
def test_processes_that_are_not_the_right_ones_end(started: list[int], what: str, monkeypatch: NEW) -> None:
    begin(2)
    (reserve,) = module._reserves
    if what == "variable":
        monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "another")
    env = environment(2) | ({"OMP_NUM_THREADS": "77"} if what == "threads" else {})
    assert take(3 if what == "number" else 2, env, 2**60 if what == "room" else 0) is None
    assert not reserve.scratch.exists()
    assert module._reserves == []


def test_variables_of_the_learner_do_not_matter(started: list[int], monkeypatch: NEW) -> None:
    begin(2)
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    monkeypatch.setenv("MLFLOW_RUN_ID", "5")
    taken = take(2, environment(2), 0)
    assert taken is not None
    taken.close()


@pytest.mark.parametrize("what", ["rank", "cards", "vLLM"])
def test_nothing_is_begun_where_the_card_is_not_known_or_there_is_no_vllm(
    started: list[int], what: str, monkeypatch: NEW
) -> None:
    if what == "rank":
        monkeypatch.setenv("LOCAL_RANK", "0")
    if what == "cards":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if what == "vLLM":
        monkeypatch.setattr(module, "vllm_is_installed", lambda: False)
    begin(2)
    assert started == []


VLLM = "data: {engine: {name: vllm, processes: 3}}"


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (VLLM, [], [3]),
        (VLLM, ["--data.engine.processes", "2"], [2]),
        (VLLM, ["--data.engine.processes=auto"], []),
        (VLLM, ["--data.engine.name=transformers"], []),
        (VLLM, ["--print_config"], []),
        (VLLM, ["--model.objective.recipe=sft"], []),
        ("data: {engine: {name: vllm}}", [], []),
        ("data: {engine: {name: vllm, processes: 1}}", [], []),
        ("data: {engine: {name: vllm, processes: 5000}}", [], []),
        ("data: {engine: {name: vllm, processes: true}}", [], []),
        ("data: {engine: {processes: 4}}", ["--data.engine.name", "vllm"], [4]),
        ("data: {engine: {name: vllm, processes: 2, custom_engine: mine.Engine}}", [], []),
        ("model: {max_staleness: 1}", [], []),
    ],
)
def test_the_text_of_the_configuration_says_what_is_started(
    started: list[int], tmp_path: Path, text: str, words: list[str], expected: list[int]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    argv = ["--config", str(file), *words]
    engine_ahead.start_ahead("fit", argv, read_layers(argv, "fit"))
    assert started == expected


@pytest.mark.parametrize("card", [True, False])
def test_on_a_card_auto_is_most_likely_one(started: list[int], tmp_path: Path, monkeypatch: NEW, card: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    file = tmp_path / "run.yaml"
    file.write_text(VLLM)
    argv = ["--config", str(file), "--data.engine.processes", "auto"]
    engine_ahead.start_ahead("fit", argv, read_layers(argv, "fit"))
    assert started == ([1] if card else [])


def driver(folder: Path, monkeypatch: NEW, *files: str) -> None:
    for name in files:
        (folder / name).touch()
    monkeypatch.setattr(cards_module, "_DEVICES", folder)


@pytest.mark.parametrize(
    ("files", "visible", "expected"),
    [
        (["nvidia0"], None, 1),
        (["nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps"], None, 1),
        (["nvidia0", "nvidia1"], None, 2),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0", "nvidia1"], "GPU-5f, GPU-6a", 2),
        (["nvidia0", "nvidia1"], "", 0),
        (["nvidia0"], "-1", 0),
        (["nvidia0"], "0,1", 1),
        ([], "0", 0),
        (["null"], None, 0),
    ],
)
def test_cards_are_counted_without_cuda(
    tmp_path: Path, monkeypatch: NEW, files: list[str], visible: str | None, expected: int
) -> None:
    driver(tmp_path, monkeypatch, *files)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cards_of_driver() == expected


@pytest.mark.parametrize("visible", [None, "7"])
def test_on_one_card_of_the_driver_the_process_has_the_environment_of_the_run(
    started: list[int], tmp_path: Path, monkeypatch: NEW, visible: str | None
) -> None:
    driver(tmp_path, monkeypatch, "nvidia0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    begin(None)
    assert started == [1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    taken = take(1, environment(1), 0)
    assert taken is not None
    taken.close()


def test_a_card_that_torch_cannot_use_was_a_wrong_guess(started: list[int], tmp_path: Path, monkeypatch: NEW) -> None:
    driver(tmp_path, monkeypatch, "nvidia0")
    begin(2)
    assert started == [2]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert take(2, environment(2), 0) is None
    assert module._reserves == []


def test_of_several_cards_of_the_driver_none_is_guessed(started: list[int], tmp_path: Path, monkeypatch: NEW) -> None:
    driver(tmp_path, monkeypatch, "nvidia0", "nvidia1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    begin(None)
    begin(2)
    assert started == []


def test_processes_are_started_before_anything_that_takes_a_second(tmp_path: Path, monkeypatch: NEW) -> None:
    done: list[str] = []
    monkeypatch.setattr(training, "start_ahead", lambda *args: done.append("processes"))
    monkeypatch.setattr(training, "_hide_progress_bars", lambda: done.append("transformers"))
    monkeypatch.delenv("LIT_GRPO_LOG", raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    (tmp_path / "run.yaml").write_text(VLLM)
    training.read_configuration("fit", ["--config", str(tmp_path / "run.yaml")], start_engine=True)
    assert done == ["processes", "transformers"]


def test_nothing_heavy_is_imported_before_processes_are_started() -> None:
    script = (
        "import sys; import lit_grpo.cli.training, lit_grpo.engines.vllm_processes.reserve; "
        "print(sorted({'torch', 'numpy', 'transformers', 'lightning', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_group_takes_over_those_that_run_and_starts_those_that_do_not(tmp_path: Path, monkeypatch: NEW) -> None:
    (tmp_path / "scratch").mkdir()
    reserve = Reserve(2, {}, tmp_path / "scratch")
    group: Any = EngineGroup(2, None, reserve.scratch, progress_seconds=60.0, reserve=reserve)
    first, second = group._processes
    try:
        first.start()
        # The worker's own import of vLLM is not what this is about.
        monkeypatch.setattr(group, "_reply", lambda *args, **kwargs: [])
        pid = first._process.pid
        group._prepare(range(2))
        assert first._process.pid == pid
        assert second.running
        assert [process.patience for process in (first, second)] == [60.0, 60.0]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not first.running, "its end")
        group._prepare([0])
        assert first.running
    finally:
        group.close()
    assert not first.running
    assert not (tmp_path / "scratch").exists()


CONFIG = """
model: {{policy: {{tiny: {{layers: 2, width: 64, heads: 2}}}}}}
data:
  prompts: {{class_path: lit_grpo.data.AdditionPrompts, init_args: {{digits: 1}}}}
  rewards: [{{class_path: tests.tiny.EvenReward}}]
  group_size: 4
  prompts_per_rollout: 4
  rollouts: {rollouts}
  sampling: {{max_new_tokens: 8}}
  engine: {{name: vllm, processes: 2, max_num_seqs: 8, args: {{kv_cache_memory_bytes: 67108864}}}}
trainer: {{accelerator: cpu, logger: {{class_path: lit_grpo.tracking.RunLogger, init_args: {{run_dir: {folder},
  tracking_uri: none}}}}}}
"""


def by_itself() -> dict[str, str]:
    """The environment of a run of one process: an engine that another test has made leaves it one of several."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}


def begun_by(pid: int) -> list[int]:
    """Two engines and their supervisors, once all four are there."""
    found = []
    # Others come and go meanwhile.
    with contextlib.suppress(OSError):
        for one in below(pid):
            if b"vllm_processes.worker" in Path(f"/proc/{one}/cmdline").read_bytes():
                found.append(one)
        return found if len(found) == 4 else []
    return []


@pytest.mark.vllm
def test_a_run_takes_over_what_was_started_from_its_text(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path / "run", rollouts=1))
    with (tmp_path / "shown").open("w") as shown:
        run = subprocess.Popen(
            [sys.executable, "-m", "lit_grpo.cli.main", "fit", "--config", str(tmp_path / "run.yaml")],
            cwd=ROOT, stdout=shown, stderr=shown, env=by_itself() | {"LIT_GRPO_LOG": "debug"},
        )  # fmt: skip
    early = wait_until(lambda: begun_by(run.pid), "its processes")
    said = (tmp_path / "shown").read_text()
    assert "building trainer" not in said, "they are there before anything is built"
    seen = set(early)

    def over() -> bool:
        seen.update(begun_by(run.pid))
        return run.poll() is not None

    wait_until(over, "the run's end", seconds=300)
    assert run.returncode == 0, (tmp_path / "shown").read_text()
    assert seen == set(early), "no others were started"
    wait_until(lambda: not any(map(alive, early)), "their end")


@pytest.mark.vllm
def test_a_configuration_that_turns_out_to_be_wrong_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path / "run", rollouts=-1))
    run = subprocess.Popen(
        [sys.executable, "-m", "lit_grpo.cli.main", "fit", "--config", str(tmp_path / "run.yaml")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=by_itself(),
    )  # fmt: skip
    early = wait_until(lambda: begun_by(run.pid), "its processes")
    _, shown = run.communicate(timeout=180)
    assert run.returncode == 2
    assert "rollouts is -1" in shown
    wait_until(lambda: not any(map(alive, early)), "their end")
