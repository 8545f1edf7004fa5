"""Where a run is kept in MLflow, and the note that a run keeps in its folder."""

from __future__ import annotations

import logging
import shlex
import threading
from pathlib import Path

import pytest

from lit_grpo.errors import UserError
from lit_grpo.tracking import run_note
from lit_grpo.tracking.run_note import RUN_FILE, RunNote, read_note
from lit_grpo.tracking.store_address import StoreAddress
from tests.waiting import PATIENCE, wait_until


def test_an_address_that_was_given_goes_before_the_variable_and_the_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    own = StoreAddress.choose(tmp_path, None, None)
    assert own == StoreAddress(f"sqlite:///{tmp_path}/mlflow.db", (tmp_path / "artifacts").as_uri())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    assert StoreAddress.choose(tmp_path, None, None) == StoreAddress("http://server", None)
    assert StoreAddress.choose(tmp_path, "sqlite:///x.db", "s3://b") == StoreAddress("sqlite:///x.db", "s3://b")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    with pytest.raises(UserError, match="plain files") as error:
        StoreAddress.choose(tmp_path, None, None)
    assert error.value.where == "environment variable MLFLOW_TRACKING_URI"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(UserError, match="plain files") as error:
        StoreAddress.choose(tmp_path, "file:///home/me?password=hunter2", None)
    assert error.value.where == "RunLogger.tracking_uri"
    assert "hunter2" not in str(error.value)
    for name in ("databricks", "none"):
        assert StoreAddress.choose(tmp_path, name, None) == StoreAddress(name, None)


def test_the_way_to_a_run():
    store, server = StoreAddress("sqlite:///x.db", None), StoreAddress("https://me:secret@host/", None)
    assert store.page("run", "7") == "http://127.0.0.1:5000/#/experiments/7/runs/run/model-metrics"
    assert store.page("run", None) is None
    assert store.page(None, "7") is None
    assert server.page("run", "7") is None
    assert store.view_command("run") == "mlflow ui --backend-store-uri sqlite:///x.db"
    assert "secret" not in str(server.view_command("run"))
    assert str(server.view_command("run")).endswith("host/#/runs/run")
    assert StoreAddress("http://host", None).view_command(None) == "http://host/#/runs"
    database = StoreAddress("postgresql://me:secret@host/my runs", None)
    assert "secret" not in str(database.view_command("run"))
    assert shlex.split(str(database.view_command("run")))[-1].endswith("host/my runs")
    assert StoreAddress("none", None).view_command("run") is None


def note(folder: Path, *, held: bool = True) -> RunNote:
    return RunNote(lambda: folder, lambda: held, lambda: {"sent": 5})


def test_entries_are_added_to_those_that_are_there(tmp_path):
    run = note(tmp_path)
    run.update(run_id="a", ended=None)
    run.update(ended="FINISHED")
    assert run.read() == read_note(tmp_path) == {"sent": 5, "run_id": "a", "ended": "FINISHED"}
    assert (tmp_path / RUN_FILE).stat().st_mode & 0o077 == 0


def test_an_entry_of_the_moment_is_newer_than_the_note_and_a_given_one_than_both(tmp_path):
    note(tmp_path).update(sent=9)
    assert read_note(tmp_path) == {"sent": 9}
    note(tmp_path).update()
    assert read_note(tmp_path) == {"sent": 5}


def test_who_must_not_wait_for_the_disk_does_not_and_nothing_is_lost(tmp_path, monkeypatch):
    run, inside, go = note(tmp_path), threading.Event(), threading.Event()
    run.update(run_id="a", tags={"x": "0"})
    write = run_note.write_atomically

    def slowly(*args, **kwargs):
        inside.set()
        assert go.wait(PATIENCE)
        write(*args, **kwargs)

    monkeypatch.setattr(run_note, "write_atomically", slowly)
    run.update_behind(tags={"x": "1"})
    assert inside.wait(PATIENCE)
    # The disk is busy: the file is as it was, and whoever asks this process knows better.
    assert read_note(tmp_path)["tags"] == {"x": "0"}
    assert run.read() == {"sent": 5, "run_id": "a", "tags": {"x": "1"}}
    run.update_behind(tags={"x": "2"}, more=1)
    assert run.read()["tags"] == {"x": "2"}
    go.set()
    run.update(ended="FINISHED")
    assert run.read() == {"sent": 5, "run_id": "a", "ended": "FINISHED", "tags": {"x": "2"}, "more": 1}
    wait_until(lambda: read_note(tmp_path) == run.read(), "everything in the file")
    wait_until(lambda: all(thread.name != "run-note" for thread in threading.enumerate()), "the threads have ended")
    # What is written is not written over an entry that was given later.
    run.update(tags={"x": "3"})
    run.update()
    assert read_note(tmp_path)["tags"] == {"x": "3"}


def test_nothing_is_written_behind_a_run_that_another_process_goes_on_with(tmp_path):
    run = note(tmp_path, held=False)
    run.update_behind(tags={"x": "1"})
    wait_until(lambda: all(thread.name != "run-note" for thread in threading.enumerate()), "the thread has ended")
    assert read_note(tmp_path) == {}


def test_threads_that_write_at_once_lose_nothing(tmp_path, monkeypatch):
    """What one has read is not written any more once another has written."""
    run, inside, go = note(tmp_path), threading.Event(), threading.Event()
    write = run_note.write_atomically

    def slowly(*args, **kwargs):
        if not inside.is_set():
            inside.set()
            assert go.wait(PATIENCE)
        write(*args, **kwargs)

    monkeypatch.setattr(run_note, "write_atomically", slowly)
    first = threading.Thread(target=run.update, kwargs={"run_id": "a"})
    first.start()
    assert inside.wait(PATIENCE)
    second = threading.Thread(target=run.update, kwargs={"ended": "FINISHED"})
    second.start()
    # It waits for the first; without that it would be done by now.
    second.join(0.2)
    go.set()
    first.join()
    second.join()
    assert read_note(tmp_path) == {"sent": 5, "run_id": "a", "ended": "FINISHED"}


def test_a_folder_that_another_process_may_have_is_left_alone(tmp_path):
    note(tmp_path, held=False).update(ended="FAILED")
    assert not (tmp_path / RUN_FILE).exists()
    (tmp_path / RUN_FILE).write_text("half of a li")
    assert read_note(tmp_path) == {}
    (tmp_path / RUN_FILE).write_text('["no", "note"]')
    assert read_note(tmp_path) == {}


def test_a_disk_that_refuses_is_warned_of_once(tmp_path, caplog):
    run = note(tmp_path / "missing")
    (tmp_path / "missing").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        run.update(ended="FAILED")
        run.update(ended="FAILED")
    assert caplog.text.count("cannot be written") == 1
