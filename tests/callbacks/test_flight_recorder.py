"""The flight recorder: what is in a record, what stays on disk, and what an alarm or a crash keeps."""

import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_grpo.callbacks.diagnosis.actions import FINDINGS_FILE
from lit_grpo.callbacks.flight_recorder import FlightRecorder
from lit_grpo.errors import UserError
from lit_grpo.learner.run_checks import check_staleness
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.run import flight
from lit_grpo.run.stop import request_stop
from tests import tiny


class Catch(pl.Callback):
    """Keeps batches, experiences and advantages, and does something at one step."""

    def __init__(self, at: int | None = None, do: Any = None) -> None:
        self.at, self.do = at, do
        self.seen: dict[int, Any] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen[batch_idx + 1] = (
            batch,
            pl_module.step_result.snapshot.experience,
            pl_module.step_result.snapshot.advantages,
        )
        if batch_idx + 1 == self.at:
            self.do(trainer)


def run(folder, recorder, *more, module=None, **changes):
    module = module or tiny.module()
    trainer = tiny.trainer(callbacks=[recorder, *more], default_root_dir=str(folder))
    trainer.fit(module, datamodule=tiny.data(**changes))
    return module


def steps(folder):
    return list(flight.recorded_steps(folder / flight.FOLDER))


def alarm(severity):
    def write(trainer):
        line = {
            "event": "diagnosis",
            "diagnosis": "C_NL",
            "severity": severity,
            "step": 3,
            "explanation": "entropy 0.3 → 1.9",
        }
        with (tmp(trainer) / FINDINGS_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")

    return write


def tmp(trainer):
    return Path(trainer.default_root_dir)


def test_a_record_holds_what_the_engine_drew_and_the_learner_made_of_it(tmp_path, monkeypatch):
    catch = Catch()
    # Two updates: old log-probabilities come from a pass of their own.
    module = tiny.module(objective=ObjectiveConfig(recipe="grpo"), updates_per_rollout=2)
    run(tmp_path, FlightRecorder(), catch, module=module, rollouts=2)
    batch, experience, advantages = catch.seen[2]
    record = flight.read_step(flight.step_file(tmp_path / flight.FOLDER, 2))
    assert (record.step, record.group_size, record.unfinished) == (2, 4, False)
    assert record.texts == batch.texts
    assert [p["question"] for p in record.prompts] == [p.question for p in batch.prompts]
    assert [tuple(row) for row in record.rows("tokens")] == [c.token_ids for c in batch.completions]
    assert record.tensors["reward"].tolist() == batch.reward.tolist()
    assert record.tensors["reward/even_reward"].tolist() == batch.rewards["even_reward"].tolist()
    for i, completion in enumerate(batch.completions):
        n = len(completion.token_ids)
        for name, whole in (
            ("learner_logprobs", experience.old_logprobs),
            ("entropy", experience.entropy),
            ("advantages", advantages),
        ):
            # Completions of a group with equal rewards may have gone through no pass: not a number on both sides.
            kept, made = torch.as_tensor(record.rows(name)[i]), whole[i, :n].float()
            torch.testing.assert_close(kept, made, rtol=0, atol=0, equal_nan=True, msg=name)
        assert record.rows("sampler_logprobs")[i].tolist() == pytest.approx(completion.logprobs)
        assert record.rows("mask")[i].all()
    texts = flight.read_token_texts(tmp_path / flight.FOLDER)
    drawn = {i for c in batch.completions for i in c.token_ids}
    assert {texts[i] for i in drawn} == {module.tokenizer.decode([i]) for i in drawn}


def test_a_module_that_leaves_nothing_is_recorded_as_far_as_the_rollout_goes(tmp_path, monkeypatch):
    module = tiny.module()
    leave = type(module)._log

    def forget(*args):
        leave(module, *args)
        module.step_result = None

    monkeypatch.setattr(module, "_log", forget)
    run(tmp_path, FlightRecorder(), module=module, rollouts=1)
    record = flight.read_step(flight.step_file(tmp_path / flight.FOLDER, 1))
    assert {"tokens", "sampler_logprobs", "reward"} <= set(record.tensors)
    assert not {"advantages", "mask", "entropy"} & set(record.tensors)


def test_the_ring_holds_the_last_steps_and_landmarks_of_the_whole_run(tmp_path):
    run(tmp_path, FlightRecorder(steps=3, landmarks=3), rollouts=14, prompts_per_rollout=1)
    assert steps(tmp_path) == [1, 5, 9, 12, 13, 14]


def test_no_landmarks(tmp_path):
    run(tmp_path, FlightRecorder(steps=2, landmarks=0), rollouts=4, prompts_per_rollout=1)
    assert steps(tmp_path) == [3, 4]


@pytest.mark.parametrize("severity", ["critical", "info"])
def test_an_alarm_keeps_what_the_ring_would_lose(tmp_path, severity):
    run(tmp_path, FlightRecorder(steps=2, landmarks=0), Catch(3, alarm(severity)), rollouts=8, prompts_per_rollout=1)
    kept = [path for path in (tmp_path / flight.FOLDER).iterdir() if path.is_dir()]
    if severity == "info":
        assert kept == []
        return
    (folder,) = kept
    assert folder.name == "C_NL-000003"
    assert list(flight.recorded_steps(folder)) == [2, 3], "kept before step 4, as a rollback would train on 2 again"
    assert json.loads((folder / flight.REASON_FILE).read_text())["explanation"] == "entropy 0.3 → 1.9"
    assert flight.read_step(flight.step_file(folder, 3)).step == 3
    assert flight.read_token_texts(folder)
    assert steps(tmp_path) == [7, 8]


class Cut(pl.Callback):
    """Takes the journal's lines away when training starts, as is done where a run begins anew in its own folder."""

    def on_train_start(self, trainer, pl_module):
        (tmp(trainer) / FINDINGS_FILE).write_text("")


def test_an_alarm_that_a_killed_process_had_told_already_is_kept_anew(tmp_path):
    for _ in range(2):
        (tmp_path / FINDINGS_FILE).write_text("x" * 400 + "\n")
        recorder = FlightRecorder()
        run(tmp_path, recorder, Cut(), Catch(3, alarm("critical")), rollouts=4, prompts_per_rollout=1)
        assert recorder.state_dict()["kept"] == ["C_NL-000003"]


def test_a_stop_is_kept(tmp_path):
    stop = Catch(2, lambda trainer: request_stop(trainer, "enough", "Catch"))
    run(tmp_path, FlightRecorder(), stop, rollouts=5)
    assert list(flight.recorded_steps(tmp_path / flight.FOLDER / "stop-000002")) == [1, 2]


def test_an_exception_inside_a_step_keeps_that_step_too(tmp_path, monkeypatch):
    module = tiny.module()
    log = type(module)._log

    def breaks(*args):
        if module.policy_version == 2:
            raise ZeroDivisionError("boom")
        log(module, *args)

    monkeypatch.setattr(module, "_log", breaks)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, FlightRecorder(), module=module)
    folder = tmp_path / flight.FOLDER / "exception-000002"
    assert list(flight.recorded_steps(folder)) == [1, 2]
    last = flight.read_step(flight.step_file(folder, 2))
    assert last.unfinished
    assert "advantages" in last.tensors
    assert "boom" in (folder / flight.REASON_FILE).read_text()


def test_a_step_that_breaks_off_before_the_learner_shows_no_older_numbers(tmp_path, monkeypatch):
    module = tiny.module()

    def breaks(batch, version, most):
        if version == 1:
            raise ZeroDivisionError("boom")
        return check_staleness(batch, version, most)

    monkeypatch.setattr("lit_grpo.module.check_staleness", breaks)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, FlightRecorder(), module=module)
    last = flight.read_step(flight.step_file(tmp_path / flight.FOLDER, 2))
    assert last.unfinished
    assert "advantages" not in last.tensors, "those of step 1 were taken for those of step 2"


def test_a_disk_that_refuses_never_stops_a_run(tmp_path, caplog):
    (tmp_path / flight.FOLDER).write_text("in the way")
    with caplog.at_level(logging.WARNING):
        module = run(tmp_path, FlightRecorder())
    assert module.policy_version == 3
    assert sum("flight recorder gives up" in message for message in caplog.messages) == 1


def test_some_groups_only(tmp_path):
    run(tmp_path, FlightRecorder(groups=2), rollouts=1)
    record = flight.read_step(flight.step_file(tmp_path / flight.FOLDER, 1))
    assert len(record.texts) == len(record.tensors["reward"]) == 8
    assert len(record.rows("advantages")) == 8


def test_a_torn_file_is_named(tmp_path):
    run(tmp_path, FlightRecorder(), rollouts=1)
    path = flight.step_file(tmp_path / flight.FOLDER, 1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is no flight record"):
        flight.read_step(path)


def test_state_survives(tmp_path):
    recorder = FlightRecorder(steps=1, landmarks=2)
    run(tmp_path, recorder, Catch(2, alarm("critical")), rollouts=6, prompts_per_rollout=1)
    state = recorder.state_dict()
    assert state["kept"]
    torch.save(state, tmp_path / "state.pt")
    again = FlightRecorder(steps=1, landmarks=2)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.state_dict() == state != FlightRecorder().state_dict()


@pytest.mark.parametrize("bad", [{"steps": 0}, {"groups": 0}, {"landmarks": -1}, {"dumps": -1}])
def test_bad_arguments(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        FlightRecorder(**bad)
