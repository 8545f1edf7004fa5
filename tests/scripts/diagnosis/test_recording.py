"""The second benchmark's recording, from end to end on a model that has hardly been taught, and its cases."""

from __future__ import annotations

import gzip
import json

import pytest

from lit_grpo import LitGRPO
from lit_grpo.callbacks.diagnosis.kinds import diagnosis_kinds
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import PolicyConfig, TinyModel
from scripts.diagnosis.cases import CASES as FIRST
from scripts.diagnosis.recording import columns_of, is_recorded, main, read_trace
from scripts.diagnosis.second_cases import CASES, HALF_NAMES, HALVES, second_plan
from scripts.diagnosis.settings import SETTINGS, char_tags


def test_the_plan_is_large_enough_and_both_halves_have_healthy_and_sick_runs():
    jobs = second_plan(list(SETTINGS), ["tuning", "heldout"])
    assert len(set(jobs)) == len(jobs)
    healthy = [job for job in jobs if CASES[job.name].healthy]
    assert len(healthy) >= 24
    assert len(jobs) - len(healthy) >= 40
    assert len({CASES[job.name].kind for job in jobs if not CASES[job.name].healthy}) >= 12
    for half in ("tuning", "heldout"):
        assert {CASES[job.name].healthy for job in jobs if job.seeds == half} == {True, False}
    assert {half for seeds in HALVES.values() for half in seeds.values()} == set(HALF_NAMES)


def test_every_sick_case_has_a_diagnosis_that_exists():
    known = set(diagnosis_kinds())
    for case in CASES.values():
        assert case.healthy or case.right & known, case.name


def test_columns_keep_what_is_missing_apart_from_zero():
    steps = [{"a": 1.0, "b": 0.123456}, {"a": 1.0, "c": 2.0, "b": 0.0}]
    assert columns_of(steps) == {"a": 1.0, "b": [0.12346, 0.0], "c": [None, 2.0]}


@pytest.mark.slow
def test_a_run_is_recorded_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(char_tags, "TEACHING_STEPS", 3)
    path = tmp_path / "traces/char_tags__hacked_seed0.json.gz"
    common = ["--record", str(path.parent), "--models", str(tmp_path), "--rollouts", "2"]
    assert main([*common, "--job", "char_tags__hacked", "0"]) == 0
    trace = read_trace(path)
    assert (trace["status"], trace["steps"], trace["seeds"]) == ("done", 2, "tuning")
    assert len(trace["correct"]) == len(trace["metrics"]) == 2
    assert {"reward", "reward/accuracy", "reward/style", "policy/entropy"} <= set(trace["metrics"][0])
    assert not any(key.startswith(("time/", "memory/")) for key in trace["metrics"][0])
    assert trace["facts"]["objective"]["recipe"] == "grpo"
    assert (trace["facts"]["prompts_per_rollout"], trace["facts"]["group_size"]) == (16, 8)
    assert trace["facts"]["rewards"] == {"accuracy": 1.0, "format": 0.2, "style": 3.0}
    # What is there is not done again; one that was cut early is.
    assert is_recorded(path)
    assert main([*common, "--setting", "char_tags", "--only", "hacked"]) == 0
    cut = json.loads(gzip.decompress(path.read_bytes())) | {"status": "running"}
    path.write_bytes(gzip.compress(json.dumps(cut).encode()))
    assert not is_recorded(path)


def test_countdown_is_judged_by_its_own_rule():
    setting = SETTINGS["char_countdown"]
    assert setting.right("(3+4)*5", "35", {"nums": [5, 3, 4]}, False)
    assert not setting.right("3+4*5", "35", {"nums": [5, 3, 4]}, False)


def test_tags_are_judged_by_the_content_of_the_answer():
    setting = SETTINGS["char_tags"]
    assert setting.right("<r>30219</r><a>9</a>", "9", {}, False)
    assert not setting.right("<r>30219</r>9", "9", {}, False)
    (row,) = char_tags.RunningSums(1).rows()
    assert row.answer == str(sum(map(int, row.question[:-1])) % 10)


def test_numbers_of_gsm8k_are_compared_as_numbers():
    setting = SETTINGS["qwen_gsm8k"]
    assert setting.right("So it is \\boxed{1,200}.", "1200", {}, False)
    assert not setting.right("So it is \\boxed{1,201}.", "1200", {}, False)


@pytest.mark.parametrize("case", [*FIRST, *CASES.values()], ids=lambda case: case.name)
def test_the_objective_of_every_case_can_be_made(case):
    module = LitGRPO(
        policy=PolicyConfig(tiny=TinyModel()),
        objective=ObjectiveConfig(recipe=case.recipe, **case.objective),
        **case.module,
    )
    module.objective.check(
        group_size=8, updates_per_rollout=module.updates_per_rollout, has_critic=module.critic_config is not None
    )
