"""Every block of README.md, CONTRIBUTING.md and docs is run, read by what reads it, or marked with a reason."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.docs import configurations, parsing
from tests.docs.blocks import (
    CONSOLE,
    JSON,
    LANGUAGES,
    PYTHON,
    SHELL,
    TEXT,
    YAML,
    Block,
    all_blocks,
    blocks_of,
    inline_commands,
    pages,
)
from tests.docs.blocks import blocks as blocks_on
from tests.docs.typed import RUN, Typed, make_folder, ready_environment, type_blocks
from tests.paths import ROOT
from tests.report.made_up_run import make_run

BLOCKS = all_blocks()
UNMARKED = [block for block in BLOCKS if block.mark is None]
TYPED_PAGES = sorted({block.page for block in UNMARKED if block.language in (SHELL, CONSOLE)})
RUNNING_PAGES = sorted(
    {block.page for block in UNMARKED if any(rule.begins in block.typed for rule in RUN)} & set(TYPED_PAGES)
)
"""The others have commands that need a card, a network or an hour; these are only parsed."""
STATED = ROOT / "CONTRIBUTING.md"
"""The page that states how many blocks there are."""


def named(language: str | tuple[str, ...]) -> list[Block]:
    return [block for block in UNMARKED if block.language in (language if isinstance(language, tuple) else (language,))]


# What there is.


def test_every_block_says_what_it_is():
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


def test_every_mark_has_a_reason():
    assert [str(block) for block in BLOCKS if block.mark is not None and len(block.mark.split()) < 2] == []


def test_every_mark_stands_above_a_block():
    # One in backticks is about marks.
    marks = sum(len(re.findall(r"(?<!`)<!-- not run:", (ROOT / page).read_text(encoding="utf-8"))) for page in pages())
    assert marks == sum(block.mark is not None for block in BLOCKS)


def test_a_block_is_found_with_its_mark_and_without_its_indentation():
    text = "a\n<!-- not run: needs a card -->\n```bash\n# x\n```\n\n- b\n\n  ~~~yaml\n  c:\n    d: 1\n  ~~~\n"
    first, second = blocks_of("p.md", text)
    assert (first.mark, first.line, first.text) == ("needs a card", 3, "# x\n")
    assert (second.mark, second.language, second.text) == (None, "yaml", "c:\n  d: 1\n")
    with pytest.raises(ValueError, match=r"p\.md:1: the block is not closed"):
        blocks_of("p.md", "```\nx\n")


# Python, JSON, YAML.


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder ``models`` with a tiny model under the name that the pages use."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from lit_grpo.policy.model.char_tokenizer import char_tokenizer

    folder = tmp_path_factory.mktemp("models")
    config = LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "SmolLM2-135M-Instruct")
    char_tokenizer().save_pretrained(folder / "SmolLM2-135M-Instruct")
    return folder


def run_python(page: str, folder: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks of one page one after the other, as a person would who types them into one session."""
    make_run(folder / "runs" / "nl", steps=60, planned=60)
    (folder / "models").symlink_to(models)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "documented"}
    for block in blocks_on(page):
        if block.language == PYTHON and block.mark is None:
            # As many empty lines as stand above it, so that an error names its line in the page.
            exec(compile("\n" * block.line + block.text, page, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in named(PYTHON)}))
def test_the_python_of_a_page_runs(page: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_python(page, tmp_path, models, monkeypatch)


@pytest.mark.parametrize("block", named(JSON), ids=str)
def test_json_is_json(block: Block):
    for line in block.text.splitlines():
        assert isinstance(json.loads(line), dict)


@pytest.fixture(scope="module")
def fit_parser() -> Any:
    from lit_grpo.cli.lightning_cli import build_parser

    return build_parser("fit")


@pytest.mark.parametrize("block", named(YAML), ids=str)
def test_yaml_is_a_configuration(
    block: Block, fit_parser: Any, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "models").symlink_to(models)
    configurations.read(fit_parser, block, tmp_path)


def test_yaml_that_is_no_configuration_is_noticed(fit_parser: Any, tmp_path: Path):
    with pytest.raises(ValueError, match="where fruit belong"):
        configurations.read(fit_parser, Block("p.md", 1, YAML, "fruit: 1\n"), tmp_path)
    with pytest.raises(Exception, match="clip_hihg"):
        configurations.read(fit_parser, Block("README.md", 1, YAML, "model: {objective: {clip_hihg: 1}}\n"), tmp_path)


# Commands.


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> list[Typed]:
    """Every command of every page, as bash passes it on; nothing is run."""
    found: list[Typed] = []
    for page in TYPED_PAGES:
        folder = tmp_path_factory.mktemp("page")
        make_folder(folder)
        prepare(folder, None)
        found += type_blocks(to_type(page), folder)
    return found


def to_type(page: str) -> list[Block]:
    return [block for block in UNMARKED if block.page == page and block.language in (SHELL, CONSOLE)]


def prepare(folder: Path, run: Path | None) -> None:
    """Put there what the pages speak of: runs, and questions to score; and the project of ``lit-grpo init``."""
    runs = folder / "runs"
    for name in ("nl", "grpo", "dapo"):
        make_run(runs / name, steps=60, planned=60)
    if run is not None:
        (runs / "NAME").symlink_to(run)
    (folder / "pairs.jsonl").write_text('{"prediction": "It is \\\\boxed{4}.", "answer": "4"}\n')
    subprocess.run(["gzip", "-k", "pairs.jsonl"], cwd=folder, check=True)
    shutil.copy(ROOT / "configs/quickstart.yaml", folder / "run.yaml")
    (folder / "reward.yaml").write_text("rewards: [{class_path: lit_grpo.rewards.ExactMatch}]\n")


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of two rollouts, which the pages call ``runs/NAME``."""
    from lit_grpo.cli.main import main

    folder = tmp_path_factory.mktemp("run")
    given = f"--config {ROOT}/configs/quickstart.yaml --data.rollouts 2 --trainer.logger.run_dir {folder}/NAME"
    assert main(["fit", *given.split(), "--trainer.logger.tracking_uri", "none"]) == 0
    (folder / "NAME/checkpoints/rollout-000040.ckpt").symlink_to("rollout-000002.ckpt")
    return folder / "NAME"


@pytest.mark.slow
def test_every_command_is_understood(typed: list[Typed], short_run: Path, tmp_path: Path, monkeypatch):
    prepare(tmp_path, short_run)
    make_folder(tmp_path)
    write_project(tmp_path, monkeypatch)
    wrong = []
    for command in typed:
        try:
            parsing.understand(Typed(command.block, command.words, tmp_path))
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{command}: {error!r}")
    assert wrong == []


def write_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_grpo.cli.main import main

    monkeypatch.chdir(folder)
    assert main(["init", "my_project"]) == 0
    for path in (folder / "my_project").iterdir():
        if path.name not in ("README.md",):
            (folder / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    "words",
    ["lit-grpo fit --config configs/quickstart.yaml --data.rolouts 2", "lit-grpo fitt", "scripts/nothing",
     "python scripts/scaling.py --jbs 2", "lit-grpo report", "pip install -e .[nothing]", "docker run x",
     "lit-grpo fit --config configs/nothing.yaml", "scripts/get_gsm8k --fast"],
)  # fmt: skip
def test_a_command_that_is_wrong_is_noticed(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_folder(tmp_path)
    with pytest.raises((Exception, pytest.fail.Exception)):
        parsing.understand(Typed("p.md:1", tuple(words.split()), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING_PAGES)
def test_the_commands_of_a_page_run(page: str, short_run: Path, tmp_path: Path, empty_mlflow_store: Path, monkeypatch):
    make_folder(tmp_path)
    prepare(tmp_path, short_run)
    # A store whose tables are there already: making them takes longer than a short run.
    shutil.copy(empty_mlflow_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("LIT_GRPO_VENV", str(ready_environment(tmp_path)))
    type_blocks(to_type(page), tmp_path, real=True)


@pytest.mark.parametrize("page", pages())
def test_a_command_in_a_sentence_names_what_there_is(page: str):
    for command in inline_commands(page):
        parsing.check_inline(command)


def test_a_wrong_command_in_a_sentence_is_noticed():
    for text in ("lit-grpo reprot", "lit-grpo export --chekpoint x", "scripts/nothing.py", "scripts/scaling.py --jbs"):
        with pytest.raises(AssertionError, match="no"):
            parsing.check_inline(text)


# How many.


def counts(commands: list[Typed]) -> str:
    """Make the sentence that states the numbers."""
    languages = Counter(block.language for block in UNMARKED)
    ran = sum(command.runs for command in commands)
    return (
        f"Of the {len(BLOCKS)} blocks in README.md, CONTRIBUTING.md and docs {languages[PYTHON]} are Python and run, "
        f"{languages[YAML]} are YAML and read by the parser of `lit-grpo fit`, which builds the classes they name, "
        f"{sum(languages[name] for name in JSON)} are JSON and read, {languages[TEXT]} are text, and "
        f"{languages[SHELL] + languages[CONSOLE]} hold {len(commands)} commands: {ran} are run, "
        f"{len(commands) - ran} are parsed by their own programs. "
        f"{marked(len(BLOCKS) - len(UNMARKED))}"
    )


def marked(number: int) -> str:
    return (
        "1 is marked as not run, with its reason."
        if number == 1
        else (f"{number} are marked as not run, each with its reason.")
    )


def test_the_numbers_are_stated(typed: list[Typed]):
    text = re.sub(r"\s+", " ", STATED.read_text(encoding="utf-8"))
    assert counts(typed) in text, counts(typed)
