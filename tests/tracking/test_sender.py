"""The queue in front of the server, with a server that obeys the test."""

import json
import threading
import time

import pytest

from lit_grpo.tracking.sender import Refused, Sender
from lit_grpo.tracking.spool import Spool, read_lines, read_metrics
from tests.waiting import PATIENCE, wait_until


class FakeTarget:
    """Takes everything, unless told otherwise."""

    def __init__(self):
        self.steps, self.other, self.ended = [], [], []
        self.down = False
        self.refuse = set()
        self.hang = threading.Event()
        self.hang.set()

    def start(self):
        self.hang.wait()
        if self.down:
            raise ConnectionError("nobody there")

    def metrics(self, records):
        if self.down:
            raise ConnectionError("nobody there")
        if any(record["step"] in self.refuse for record in records):
            raise Refused("bad metric")
        self.steps += [record["step"] for record in records]

    def params(self, params):
        self.other.append(dict(params))

    def tags(self, tags):
        self.other.append(dict(tags))

    def remove_tags(self, names):
        self.other.append(list(names))

    def artifact(self, path, folder):
        self.other.append(path)

    def find(self, identity):
        return None

    def close_dead(self, run_id, status, reason):
        self.ended.append((run_id, status))

    def forget(self, step):
        self.steps = [s for s in self.steps if s < step]

    def inputs(self, datasets, model):
        self.other.append(dict(datasets))

    def end(self, status):
        self.ended.append(status)


@pytest.fixture
def setup(tmp_path):
    spool = Spool(tmp_path / "metrics.jsonl")
    target = FakeTarget()
    sender = Sender(target, spool.path)

    def write(*steps):
        for step in steps:
            sender.wrote(spool.append({"step": step, "wall_time": 0.0, "reward": 0.5}))

    return target, sender, write


def test_everything_arrives_once_and_the_status_comes_last(setup):
    target, sender, write = setup
    write(*range(250))
    sender.put(lambda t: t.params({"lr": "1"}))
    sender.end("FINISHED")
    assert sender.flush(PATIENCE)
    assert target.steps == list(range(250))
    assert target.other == [{"lr": "1"}]
    assert target.ended == ["FINISHED"]
    assert sender.unsent == 0
    assert sender.last_error == ""


@pytest.mark.parametrize("by", ["metrics", "a flush", "time"])
def test_a_run_that_starts_is_not_held_up_by_its_tracking(tmp_path, by):
    spool = Spool(tmp_path / "metrics.jsonl")
    target = FakeTarget()
    quiet = 0.3 if by == "time" else 600.0
    began = time.monotonic()
    sender = Sender(target, spool.path, quiet=quiet)
    sender.put(lambda t: t.params({"lr": "1"}))
    sender.wrote(0)
    if by != "time":
        time.sleep(0.1)
        assert target.other == []
    if by == "metrics":
        sender.wrote(spool.append({"step": 1, "wall_time": 0.0, "reward": 0.5}))
    if by == "a flush":
        assert sender.flush(PATIENCE)
    wait_until(lambda: target.other == [{"lr": "1"}], "the first record")
    if by == "time":
        assert time.monotonic() - began >= quiet
    # From then on as ever.
    sender.put(lambda t: t.params({"lr": "2"}))
    wait_until(lambda: len(target.other) == 2, "the second record")


def test_a_server_that_comes_back_gets_what_it_missed(setup):
    target, sender, write = setup
    write(0)
    assert sender.flush(PATIENCE)
    target.down = True
    write(1, 2, 3)
    assert not sender.flush(0.1)
    assert sender.unsent == 3
    target.down = False
    write(4)
    assert sender.flush(PATIENCE)  # at once, although the thread is in a pause
    assert target.steps == [0, 1, 2, 3, 4]
    assert sender.unsent == 0


def test_a_refused_line_costs_only_itself(setup):
    target, sender, write = setup
    target.refuse = {2}
    target.hang.clear()
    write(0, 1, 2, 3)
    target.hang.set()
    assert sender.flush(PATIENCE)
    assert target.steps == [0, 1, 3]
    assert sender.unsent == 1
    assert "bad metric" in sender.last_error


def test_a_job_that_can_never_work_does_not_block_the_rest(setup):
    target, sender, write = setup
    sender.put(lambda t: t.no_such_method())
    write(0)
    assert sender.flush(PATIENCE)
    assert target.steps == [0]
    assert sender.unsent == 1


def test_a_hanging_server_stops_nobody(setup):
    target, sender, write = setup
    target.hang.clear()
    write(*range(5))
    sender.end("FINISHED")
    assert not sender.flush(0.5)
    assert sender.unsent == 6  # five lines and the status
    target.hang.set()


def test_the_status_is_not_sent_before_the_metrics(setup):
    target, sender, write = setup
    target.down = True
    write(0)
    sender.end("FAILED")
    assert not sender.flush(0.1)
    target.down = False
    assert sender.flush(PATIENCE)
    assert target.steps == [0]
    assert target.ended == ["FAILED"]


def test_a_run_that_has_ended_is_not_opened_again_for_nothing(setup):
    target, sender, write = setup
    starts = []
    target.start = lambda: starts.append(1)
    write(0)
    sender.end("FINISHED")
    assert sender.flush(PATIENCE)
    count = len(starts)
    sender._requested += 1  # a flush that was asked for while the last round was under way
    with sender._changed:
        sender._changed.notify_all()
        sender._changed.wait_for(lambda: sender._finished == sender._requested, 10)
    assert len(starts) == count


def test_trouble_is_said_once(setup, caplog):
    target, sender, write = setup
    target.down = True
    for step in range(3):
        write(step)
        sender.flush(0.1)
    assert sum("could not be sent" in message for message in caplog.messages) == 1


def test_a_torn_last_line_is_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    spool = Spool(path)
    spool.append({"step": 0, "reward": 1.0})
    spool.close()
    with path.open("a") as file:
        file.write('{"step": 1, "rew')  # killed while writing
    assert [record["step"] for record, _ in read_lines(path)] == [0]
    spool = Spool(path)
    spool.append({"step": 1, "reward": 2.0})
    spool.append({"step": 2, "reward": float("nan")})
    assert [record["step"] for record, _ in read_lines(path)] == [0, 1, 2]


def test_read_metrics_merges_lines_and_lets_the_later_one_hold(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "reward": 1}, {"step": 1, "reward": 2}, {"step": 0, "val": 7}, {"step": 1, "reward": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(tmp_path) == [{"step": 0, "reward": 1, "val": 7}, {"step": 1, "reward": 3}]
