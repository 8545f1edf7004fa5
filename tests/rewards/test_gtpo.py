"""GTPO's rewards as docs/rewards.md gives them: values of its table, prompt of its paper, and a run."""

from __future__ import annotations

import re

import pytest
import yaml

from lit_grpo.cli.main import main
from lit_grpo.commands.check.asked_form import asked_forms
from lit_grpo.commands.check.prompts import verifier
from lit_grpo.commands.score import read_rewards
from lit_grpo.data import InMemoryPrompts, PromptFormat
from lit_grpo.data.prompt_set import prepare
from lit_grpo.policy.model.char_tokenizer import char_tokenizer
from lit_grpo.rewards import primary_reward, score_all, total_range
from tests.paths import ROOT, SHARED

SECTION = (
    (ROOT / "docs/rewards.md").read_text(encoding="utf-8").partition("### GTPO's rewards\n")[2].partition("\n### ")[0]
)
PAPER, RELEASED = re.findall(r"```yaml\n(.*?)```", SECTION, re.DOTALL)
ROWS = re.findall(r"^\| `(.*?)` \| (\S+) \+ (\S+) \| (\S+) \+ (\S+) \|$", SECTION, re.MULTILINE)
SYSTEM = yaml.safe_load(PAPER)["data"]["format"]["system_prompt"]
ALPHABET = "".join(chr(c) for c in range(32, 127)) + "\n"


@pytest.fixture(params=["paper", "released"])
def rewards(request, tmp_path):
    (tmp_path / "run.yaml").write_text({"paper": PAPER, "released": RELEASED}[request.param])
    found, _ = read_rewards(str(tmp_path / "run.yaml"))
    yield request.param, found
    for reward in found:
        reward.close()


def test_the_values_of_the_table(rewards, reward_input):
    rule, parts = rewards
    batch = [reward_input(text, "4") for text, *_ in ROWS]
    scores = score_all(parts, batch)
    assert len(ROWS) == 7
    for i, (text, *values) in enumerate(ROWS):
        form, accuracy = map(float, values[:2] if rule == "paper" else values[2:])
        found = [part.weight * scores[part.name][i].value for part in parts]
        assert found == [form, accuracy], text
    assert total_range(parts) == (0.0, 20.0)
    primary = primary_reward(parts)
    assert primary is parts[1]
    # With the paper's rewards a right answer in tags is right, whatever the format; with the released ones it is not.
    correct = [primary.correct(score.value) for score in scores["accuracy"]]
    assert correct == [float(row[2 if rule == "paper" else 4]) == 10 for row in ROWS]


@pytest.mark.skipif(not (SHARED / "sources").exists(), reason="the sources are not beside the checkout")
def test_the_system_prompt_is_the_papers():
    box = (SHARED / "sources/S2_gtpo.txt").read_text(encoding="utf-8").partition("8.2 PROMPT")[2]
    printed = box.partition("Training Settings.")[0].replace("`", "").split()
    assert SYSTEM.split() == printed


def test_the_check_asks_in_the_form_of_the_prompt(rewards):
    _, parts = rewards
    tokenizer = char_tokenizer(ALPHABET)
    rows = [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(8)]
    form = PromptFormat(system_prompt=SYSTEM)
    prompts = prepare(InMemoryPrompts(rows), "data.prompts", form=form, tokenizer=tokenizer, rewards=parts).prompts
    assert asked_forms([SYSTEM])[0] == "<reasoning>{answer}</reasoning><answer>{answer}</answer>"
    (found,) = verifier(prompts, parts, tokenizer, None)
    assert (found.status, found.values["asked"], found.values["taken"], found.values["fooled"]) == ("pass", True, 8, 0)


@pytest.mark.slow
def test_a_run_with_the_papers_rewards(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gtpo.yaml").write_text(PAPER)
    shape = {"alphabet": ALPHABET, "width": 16, "layers": 1, "heads": 1, "max_position": 1024}
    settings = {
        "model": {"policy": {"tiny": shape}, "objective": {"recipe": "gtpo"}, "guards": {"max_truncated": None}},
        "data": {
            "prompts": {"class_path": "lit_grpo.data.AdditionPrompts", "init_args": {"digits": 1, "n": 12}},
            "prompts_per_rollout": 2, "group_size": 4, "rollouts": 2, "sampling": {"max_new_tokens": 4},
            "engine": {"name": "transformers"},
        },
        "trainer": {"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["fit", "--config", "run.yaml", "--config", "gtpo.yaml"]) == 0, capsys.readouterr().err
