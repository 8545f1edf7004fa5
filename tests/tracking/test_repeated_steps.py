"""Lines of steps that are made again: kept, or replaced in the file and taken back from MLflow, whatever interrupts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.tracking.repeated_steps import RepeatedSteps, forget_job
from lit_grpo.tracking.run_note import RunNote, read_note
from lit_grpo.tracking.spool import Spool, read_lines
from tests.waiting import PATIENCE


class Queue:
    """Stands in for the sender: notes what it is told, and does the jobs when it is told to."""

    def __init__(self) -> None:
        self.length: int | None = None
        self.offset: int | None = None
        self.jobs: list[Any] = []

    def wrote(self, length: int) -> None:
        self.length = length

    def replace_from(self, offset: int, job: Any) -> None:
        self.offset = offset
        self.jobs.append(job)


class Store:
    """Stands in for MLflow: notes from which steps on it was told to forget."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def forget(self, step: int) -> None:
        self.forgotten.append(step)


def line(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "wall_time": 0.0, **({"reward": step / 10} | values)}


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """The file of a run that died after step 5."""
    made = Spool(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        made.append(line(step))
    return made


def note_of(folder: Path) -> RunNote:
    return RunNote(lambda: folder, lambda: True, dict)


def starts(spool: Spool) -> dict[int, int]:
    """Offset that the line of each step begins at."""
    ends = [end for _, end in read_lines(spool.path)]
    return {record["step"]: start for (record, _), start in zip(read_lines(spool.path), [0, *ends], strict=False)}


def steps(spool: Spool) -> list[int]:
    return [record["step"] for record, _ in read_lines(spool.path)]


def test_nothing_is_sent_of_what_may_be_replaced_and_each_line_once_it_is_confirmed(spool: Spool) -> None:
    queue, at = Queue(), starts(spool)
    repeated = RepeatedSteps(3, spool, queue, note_of(spool.path.parent))  # type: ignore[arg-type]
    assert queue.length == at[3]
    assert not repeated.over
    assert not repeated.is_new(line(3))
    assert queue.length == at[4]
    assert not repeated.is_new(line(4, wall_time=9.0))
    assert not repeated.over
    assert not repeated.is_new(line(5))
    assert queue.length == spool.path.stat().st_size
    assert repeated.over
    assert repeated.is_new(line(5))
    assert repeated.is_new(line(6))
    assert steps(spool) == [1, 2, 3, 4, 5]
    assert not queue.jobs


def test_a_line_that_says_something_else_replaces_all_from_its_own_on(spool: Spool) -> None:
    queue, at, store, note = Queue(), starts(spool), Store(), note_of(spool.path.parent)
    repeated = RepeatedSteps(3, spool, queue, note)  # type: ignore[arg-type]
    assert not repeated.is_new(line(3))
    assert repeated.is_new(line(4, reward=7.0))
    assert repeated.over
    assert steps(spool) == [1, 2, 3]
    assert queue.offset == at[4]
    assert note.read()["forget"] == 4
    queue.jobs[0](store)
    assert store.forgotten == [4]
    assert note.read()["forget"] is None


def test_after_a_replacement_a_rollback_writes_what_it_makes_again(spool: Spool) -> None:
    """Its lines are new ones of this process, also where an earlier process left an equal one."""
    queue = Queue()
    repeated = RepeatedSteps(3, spool, queue, note_of(spool.path.parent))  # type: ignore[arg-type]
    assert repeated.is_new(line(4, reward=7.0))
    assert steps(spool) == [1, 2, 3]
    length = queue.length
    assert repeated.is_new(line(3))
    assert queue.length == length
    assert len(queue.jobs) == 1


def test_a_line_of_another_kind_replaces_nothing(spool: Spool) -> None:
    queue = Queue()
    repeated = RepeatedSteps(4, spool, queue, note_of(spool.path.parent))  # type: ignore[arg-type]
    assert repeated.is_new({"step": 4, "wall_time": 0.0, "val/reward": 1.0})
    assert not repeated.over
    assert steps(spool) == [1, 2, 3, 4, 5]
    assert not queue.jobs


def test_without_earlier_lines_everything_is_new(spool: Spool) -> None:
    queue = Queue()
    repeated = RepeatedSteps(6, spool, queue, note_of(spool.path.parent))  # type: ignore[arg-type]
    assert repeated.over
    assert repeated.is_new(line(6))
    assert queue.length == spool.path.stat().st_size


@pytest.mark.parametrize(("pending", "expected"), [(0, 0), (2, 2), (5, 4), (None, 4)])
def test_what_an_earlier_process_had_to_take_back_is_not_forgotten(
    spool: Spool, pending: int | None, expected: int
) -> None:
    queue, store, note = Queue(), Store(), note_of(spool.path.parent)
    note.update(forget=pending)
    assert RepeatedSteps(4, spool, queue, note).is_new(line(4, reward=7.0))  # type: ignore[arg-type]
    assert note.read()["forget"] == expected
    queue.jobs[0](store)
    assert store.forgotten == [expected]


def test_a_job_that_is_done_takes_no_other_off_the_note(tmp_path: Path) -> None:
    """An earlier process left one, and this one has to take back more before that was done."""
    store: Any = Store()
    note = note_of(tmp_path)
    earlier = forget_job(6, note)
    note.update(forget=4)
    earlier(store)
    assert read_note(tmp_path)["forget"] == 4
    forget_job(4, note)(store)
    assert read_note(tmp_path)["forget"] is None


def test_a_sender_that_is_faster_than_the_note_leaves_nothing_to_forget(spool: Spool) -> None:
    """Else the next process would remove from MLflow what this one has sent."""
    done, store, note = threading.Event(), Store(), note_of(spool.path.parent)
    update = note.update

    def late(**entries: Any) -> None:
        if entries.get("forget") is not None:
            done.wait(0.3)
        update(**entries)

    note.update = late  # type: ignore[method-assign]

    class AtOnce(Queue):
        def replace_from(self, offset: int, job: Any) -> None:
            def work() -> None:
                job(store)
                done.set()

            threading.Thread(target=work, daemon=True).start()

    assert RepeatedSteps(4, spool, AtOnce(), note).is_new(line(4, reward=7.0))  # type: ignore[arg-type]
    assert done.wait(PATIENCE)
    assert store.forgotten == [4]
    assert note.read()["forget"] is None
