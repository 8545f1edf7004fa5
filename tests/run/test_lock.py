"""The lock on a run's folder: refused while its process lives, taken over when it is dead."""

import multiprocessing
import os
import signal

import pytest

from lit_grpo.errors import UserError
from lit_grpo.run.lock import LOCK_FILE, FolderLock
from tests.waiting import wait_until


def hold(folder, ready):
    lock = FolderLock(folder)
    lock.take()
    ready.set()
    signal.pause()


@pytest.fixture
def other(tmp_path):
    """A process that holds the lock on ``tmp_path``."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready))
    process.start()
    wait_until(ready.is_set, "the other process has the lock")
    yield process
    process.kill()
    process.join()


def test_a_second_run_is_refused_and_the_first_is_named(tmp_path, other):
    with pytest.raises(UserError, match=f"another run is going on in this folder: process {other.pid} on "):
        FolderLock(tmp_path).take()


def test_the_lock_of_a_process_that_was_killed_is_taken_over(tmp_path, other):
    other.kill()
    other.join()
    assert (tmp_path / LOCK_FILE).exists(), "it had no chance to remove it"
    lock = FolderLock(tmp_path)
    lock.take()
    assert lock.held
    assert f'"pid": {os.getpid()}' in (tmp_path / LOCK_FILE).read_text()
    lock.release()
    assert not (tmp_path / LOCK_FILE).exists()


def test_two_runs_of_one_process_are_told_apart(tmp_path):
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()
    first.take()  # its own
    with pytest.raises(UserError, match=str(os.getpid())):
        second.take()
    first.release()
    second.take()
    second.release()


def test_a_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path):
    """Workers of rewards are forked from a run, and may outlive it by a moment."""
    context = multiprocessing.get_context("fork")
    lock = FolderLock(tmp_path)
    lock.take()
    child = context.Process(target=signal.pause)
    child.start()
    lock.release(leave_file=True)
    again = FolderLock(tmp_path)
    again.take()
    again.release()
    child.kill()
    child.join()


def test_a_link_in_its_place_is_not_written_through(tmp_path):
    target = tmp_path / "precious"
    target.write_text("kept")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / LOCK_FILE).symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        FolderLock(folder).take()
    assert target.read_text() == "kept"
