"""The preflight from the command line: a table, an exit code, a file, and nothing else."""

import json
import re

import pytest

from lit_grpo.cli.main import main
from lit_grpo.rewards import Reward

CONFIG = """\
model:
  policy: {tiny: {layers: 1, width: 16, heads: 2}}
  optimizer: {lr: 1.0e-3}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts}
  rewards:
    - {class_path: tests.commands.check.test_command.Even}
    - {class_path: lit_grpo.rewards.ExactMatch, init_args: {weight: 0.1}}
  group_size: 4
  prompts_per_rollout: 4
  rollouts: 50
  sampling: {max_new_tokens: 4}
trainer:
  logger: {class_path: lit_grpo.tracking.RunLogger, init_args: {root: runs}}
  callbacks: [{class_path: lit_grpo.callbacks.FlightRecorder}]
"""


class Even(Reward):
    """Right about every second answer of an untrained model."""

    needs_answer = True
    right = 1.0

    def score(self, batch):
        return [
            self.right
            * float(x.text == x.prompt.answer or (x.completion.request >= 0 and sum(x.completion.token_ids) % 2))
            for x in batch
        ]


class Never(Even):
    right = 0.0


class Explodes(Reward):
    def score(self, batch):
        raise RuntimeError("no such verifier")


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path / "run.yaml"


def values_of(results, name):
    return next(check["values"] for check in results["checks"] if check["name"] == name)


def test_a_table_an_exit_code_a_file_and_nothing_else(config, capsys, tmp_path):
    code = main(["check", "--config", "run.yaml", "--prompts", "6", "--json", "out/check.json"])
    told = capsys.readouterr()
    results = json.loads((tmp_path / "out/check.json").read_text())
    status = {check["name"]: check["status"] for check in results["checks"]}
    assert {"template", "bos", "round trip", "signal", "spread", "rewards", "entropy", "truncation", "mismatch",
            "sync", "start", "memory", "time"} <= set(status)  # fmt: skip
    assert status["mismatch"] == status["spread"] == "pass"
    assert code == (0 if results["passed"] else 1)
    assert (results["config"], results["prompts"]) == (["run.yaml"], 6)
    lines = told.out.splitlines()
    assert max(map(len, lines)) <= 80
    first = values_of(results, "template")["rendered"]
    assert f"as the model reads it:\n  | {first}\n" in told.out
    assert re.search(r"^\d+ passed, \d+ warnings, \d+ failed$", told.out, re.MULTILINE)
    values = {check["name"]: check["values"] for check in results["checks"]}
    assert values["mismatch"]["logprob_abs_diff"] < 1e-5
    assert values["sync"]["changed_gap"] < 1e-5 < values["sync"]["change"]
    assert values["start"]["taken"] == values["start"]["waited"] > 0, "nothing of this engine starts beside the model"
    assert values["time"]["rollouts"] == 50
    assert values["memory"]["peak"] > values["memory"]["weights"] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run.yaml"], "a check leaves no run behind"


def test_nothing_to_learn_from_fails(config, capsys):
    config.write_text(CONFIG.replace("test_command.Even", "test_command.Never").replace("weight: 0.1", "weight: 0.0"))
    assert main(["check", "--config", "run.yaml", "--prompts", "2", "--no-step"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"✖ FAIL +signal", out)
    assert re.search(r"✖ FAIL +spread", out)
    assert "→ nothing is right, so nothing is reinforced" in out
    assert not re.search(r"(pass|warn|FAIL) +memory", out)


def test_a_reward_that_breaks_is_a_line_of_the_table(config, capsys):
    config.write_text(CONFIG.replace("test_command.Even", "test_command.Explodes"))
    assert main(["check", "--config", "run.yaml", "--prompts", "2", "--no-step"]) == 1
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "✖ FAIL sampling while sampling 2 prompts x 4 from the untouched model: RewardError" in out
    assert "no such verifier" in out
    assert "✔ pass template" in out, "what was found before stays"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--prompts", "0"], "--prompts is 0"), (["--prompts", "many"], "--prompts takes a whole number"),
     (["--gold-format", "x"], "--gold-format has no {answer}"), (["--data.group_sise", "4"], "data.group_size"),
     (["--config", "nowhere.yaml"], "there is no configuration file nowhere.yaml")],
)  # fmt: skip
def test_bad_input(config, capsys, arguments, said):
    assert main(["check", "--config", "run.yaml", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_what_needs_refuses_is_told_with_file_and_line(config, capsys):
    engine = "  engine: {name: vllm_server, args: {tensor_parallel_size: two}, server: {cards: [[1]]}}\n"
    lines = CONFIG.splitlines(keepends=True)
    data = next(i for i, line in enumerate(lines) if line.startswith("data:"))
    config.write_text("".join([*lines[: data + 1], engine, *lines[data + 1 :]]))
    assert main(["check", "--needs", "--config", "run.yaml"]) == 2
    shown = capsys.readouterr().err
    assert "tensor_parallel_size is 'two'" in shown
    assert f"run.yaml:{data + 2}" in shown


def test_supervised_fine_tuning_samples_nothing_to_look_at(config, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_grpo.rollout.engine_start.make_engine", None)
    given = ["--model.objective.recipe", "sft", "--data.group_size", "1", "--json", "check.json"]
    main(["check", "--config", "run.yaml", *given])
    names = {check["name"] for check in json.loads((tmp_path / "check.json").read_text())["checks"]}
    assert {"template", "memory", "time"} <= names
    assert not names & {"signal", "spread", "mismatch", "sampling"}
