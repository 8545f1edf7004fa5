"""What libraries say goes to a file, what lit-grpo and the person say is shown."""

import logging
import os
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

import pytest

from lit_grpo.terminal import library_output
from lit_grpo.terminal.library_output import LOG_FILE, current_output, library_output_to_file
from tests.paths import ROOT

SITE = sysconfig.get_path("purelib")


def record(name, level, text, path):
    logger = logging.getLogger(name)
    logger.handle(logger.makeRecord(name, level, path, 1, text, (), None))


def test_logs_are_told_apart_by_their_file(tmp_path, capsys):
    with library_output_to_file() as output:
        record("a_library_1", logging.INFO, "before the folder is known", f"{SITE}/a/b.py")
        output.open(tmp_path / LOG_FILE)
        logging.getLogger("a_library_1").addHandler(logging.StreamHandler(sys.stderr))
        logging.getLogger("a_library_1").propagate = False
        record("a_library_1.part", logging.WARNING, "a warning", f"{SITE}/a/b.py")
        record("a_library_1.part", logging.ERROR, "an error, hf_abcdefghijklmnopqrstuv", f"{SITE}/a/b.py")
        record("a_library_1", logging.DEBUG, "a detail", f"{SITE}/a/b.py")
        # Lightning's logger, called by lit-grpo.
        record("a_library_1", logging.INFO, "of ours", f"{ROOT}/lit_grpo/datamodule.py")
        logging.getLogger("mine_1").warning("of the person")
    # Once each, though the library has a handler of its own.
    assert capsys.readouterr().err.splitlines() == [
        "a_library_1: an error, hf_abcdefghijklmnopqrstuv", "of ours", "of the person",
    ]  # fmt: skip
    lines = (tmp_path / LOG_FILE).read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO a_library_1: before the folder is known",
        "WARNING a_library_1.part: a warning",
        "ERROR a_library_1.part: an error, **masked**",
    ]
    assert (tmp_path / LOG_FILE).stat().st_mode & 0o777 == 0o600


def test_a_table_that_was_asked_for_is_shown(tmp_path, capsys):
    with library_output_to_file() as output:
        output.open(tmp_path / LOG_FILE)
        record("lightning.rank_zero", logging.INFO, "a table", f"{SITE}/lightning/pytorch/profilers/profiler.py")
        record("lightning.rank_zero", logging.INFO, "a note", f"{SITE}/lightning/pytorch/trainer/setup.py")
    assert capsys.readouterr().err.splitlines() == ["lightning: a table"]
    assert (tmp_path / LOG_FILE).read_text().count("a ") == 2


def test_warnings_are_told_apart_by_their_file(tmp_path, capsys):
    with warnings.catch_warnings(), library_output_to_file() as output:
        warnings.simplefilter("always")
        warnings.warn_explicit("of torch", UserWarning, f"{SITE}/torch/x.py", 3)
        warnings.warn_explicit("of ours", UserWarning, f"{ROOT}/lit_grpo/x.py", 3)
        warnings.warn_explicit("of mine", UserWarning, "/home/me/reward.py", 3)
        assert len(output.unwritten()) == 1
        assert "UserWarning: of torch" in output.unwritten()[0]
    assert capsys.readouterr().err == "warning: of ours\n/home/me/reward.py:3: UserWarning: of mine\n"


def test_all_is_shown_where_it_is_asked_for(capsys):
    with warnings.catch_warnings(), library_output_to_file(logging.INFO) as output:
        warnings.simplefilter("always")
        record("a_library_2", logging.INFO, "hello", f"{SITE}/a/b.py")
        warnings.warn_explicit("of torch", UserWarning, f"{SITE}/torch/x.py", 3)
        assert len(output.unwritten()) == 2
    err = capsys.readouterr().err
    assert "a_library_2: hello" in err
    assert "of torch" in err


def test_everything_is_as_it_was_afterwards():
    before = (logging.getLoggerClass(), warnings.showwarning, list(logging.root.handlers), list(logging.root.filters))
    with library_output_to_file() as output:
        assert current_output() is output
    after = (logging.getLoggerClass(), warnings.showwarning, list(logging.root.handlers), list(logging.root.filters))
    assert before == after
    assert current_output() is None


def test_a_disk_that_refuses_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with library_output_to_file() as output:
        output.open(tmp_path / "file" / LOG_FILE)
        record("a_library_3", logging.INFO, "hello", f"{SITE}/a/b.py")
        assert output.path is None
        assert len(output.unwritten()) == 1


def test_long_messages_are_broken_between_words(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "40")
    text = library_output.in_paragraphs(
        "a long message of many words, which is wider than that\n  | a prompt", Terminal()
    )
    assert text.splitlines() == ["a long message of many words, which is", "  wider than that", "  | a prompt"]


def ours(line: str) -> bool:
    """Whether a line of a run of the tiny character model is one that lit-grpo writes."""
    begins = (
        "data.prompts: ", "prompts are made with ", "the first prompt ", "  | ", "  its answer: ",
        "checkpoints take about ", "the engine takes over weights: ", "warning at step ", "critical at step ",
        "rollout ", "Run ", "  reward ", "final reward ", "the engine was ready after ",
    )  # fmt: skip
    facts = (
        "recipe", "model", "batch", "memory", "engine", "rewards", "devices", "rollouts", "folder", "reward",
        "held out", "curves", "report", "checkpoint", "MLflow", "its page", "next",
    )  # fmt: skip
    return not line or line.startswith(begins) or line.startswith(tuple(f"  {fact}:" for fact in facts))


def run_and_read(tmp_path: Path, *arguments: str) -> tuple[list[str], str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LIT_GRPO", "PYTEST", "TORCH_CPP"))}
    ended = subprocess.run(
        [sys.executable, "-m", "lit_grpo.cli.main", "fit", *arguments],
        capture_output=True, text=True, cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (log,) = tmp_path.glob(f"runs/*/{LOG_FILE}")
    return [*ended.stdout.splitlines(), *ended.stderr.splitlines()], log.read_text()


@pytest.mark.slow
def test_no_line_of_a_run_is_a_librarys(tmp_path):
    lines, log = run_and_read(tmp_path, "--config", str(ROOT / "configs/quickstart.yaml"), "--data.rollouts", "2")
    assert [line for line in lines if not ours(line)] == []
    assert sum(line.startswith("rollout ") for line in lines) == 2
    # They have said something, and it is kept.
    assert "GPU available: False" in log


@pytest.mark.slow
def test_the_table_of_a_profiler_is_shown_at_the_end(tmp_path):
    lines, _ = run_and_read(
        tmp_path,
        "--config",
        str(ROOT / "configs/quickstart.yaml"),
        "--data.rollouts",
        "1",
        "--trainer.profiler",
        "simple",
    )
    table = [line for line in lines if line.startswith("|")]
    assert any("run_training_batch" in line for line in table)
    assert any("optimizer_step" in line for line in table)


@pytest.mark.slow
@pytest.mark.vllm
def test_no_line_of_a_run_with_vllm_is_a_librarys(tmp_path):
    model = ROOT / "models" / "SmolLM2-135M-Instruct"
    if not model.exists():
        pytest.skip("scripts/get_smollm2 has not been run")
    lines, log = run_and_read(
        tmp_path, "--config", str(ROOT / "configs/addition_smollm2_cpu.yaml"), "--model.policy.path", str(model),
        "--data.rollouts", "1", "--data.prompts_per_rollout", "2", "--trainer.enable_checkpointing", "false",
    )  # fmt: skip
    assert [line for line in lines if not ours(line)] == []
    assert "GPU available: False" in log
