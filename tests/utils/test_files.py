"""A file or folder is replaced whole or not at all, links are replaced and never written through."""

import os
from pathlib import Path

import pytest
import torch

from lit_grpo.run import flight
from lit_grpo.utils.files import link_atomically, move_into_place, remove, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("content", "on_disk"), [("größer\r\n", "größer\r\n".encode()), (b"\x00\xff", b"\x00\xff")])
def test_text_and_bytes_replace_what_was_there(tmp_path, content, on_disk):
    path = tmp_path / "a.txt"
    for _ in range(2):
        write_atomically(path, content)
        assert path.read_bytes() == on_disk
    assert names(tmp_path) == ["a.txt"]
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_disk_that_refuses_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken):
    def refuse(*_: object) -> None:
        raise OSError("no space left on device")

    path = tmp_path / "a.txt"
    write_atomically(path, "old")
    monkeypatch.setattr(*((os, "fsync") if broken == "fsync" else (Path, "replace")), refuse)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert (path.read_text(), names(tmp_path)) == ("old", ["a.txt"])


def test_the_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    path, seen = tmp_path / "a.txt", []
    fsync = os.fsync

    def watched(file: int) -> None:
        seen.append(path.exists())
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched)
    write_atomically(path, "new")
    assert seen == [False, True]  # the file, then its folder


def test_what_comes_in_every_step_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    def waited(_: int) -> None:
        pytest.fail("a step waited for the disk")

    monkeypatch.setattr(os, "fsync", waited)
    path = tmp_path / "a.txt"
    for content in ("old", "new"):
        write_atomically(path, content, to_disk=False)
        assert (path.read_text(), names(tmp_path)) == (content, ["a.txt"])
    record = flight.step_file(tmp_path, 3)
    flight.write_step(record, {"ids": torch.arange(3)}, {"step": 3})
    assert record.is_file()


def test_a_link_is_replaced_and_what_it_leads_to_is_left_alone(tmp_path):
    other, path = tmp_path / "other", tmp_path / "a.txt"
    other.write_text("theirs")
    path.symlink_to(other)
    write_atomically(path, "ours")
    assert (other.read_text(), path.read_text(), path.is_symlink()) == ("theirs", "ours", False)


def test_folders_are_replaced_as_a_whole(tmp_path):
    for text in ("one", "two"):
        fresh = tmp_path / "fresh"
        fresh.mkdir()
        (fresh / text).write_text(text)
        move_into_place(fresh, tmp_path / "model")
        assert (names(tmp_path), names(tmp_path / "model")) == (["model"], [text])


def test_a_folder_that_cannot_be_replaced_comes_back(tmp_path, monkeypatch):
    rename = Path.rename
    fresh, model = tmp_path / "fresh", tmp_path / "model"
    for folder in (fresh, model):
        folder.mkdir()
        (folder / f"of {folder.name}").write_text("")

    def refuse(self: Path, target: Path) -> Path:
        if self == fresh:
            raise OSError("no space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="no space"):
        move_into_place(fresh, model)
    assert (names(tmp_path), names(model)) == (["fresh", "model"], ["of model"])


def test_links_move_on_and_folders_give_way(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        link_atomically(tmp_path / "last", tmp_path / name)
        assert (tmp_path / "last").readlink() == Path(name)
    remove(tmp_path / "last")
    assert names(tmp_path) == ["a", "b"]
    (tmp_path / "last").mkdir()
    (tmp_path / "last" / "file").write_text("")
    link_atomically(tmp_path / "last", tmp_path / "b")
    assert (tmp_path / "last").is_symlink()
    remove(tmp_path / "last")
    remove(tmp_path / "last")


def test_without_symbolic_links_a_hard_one_serves(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise NotImplementedError("no links here")

    (tmp_path / "a").write_text("a")
    monkeypatch.setattr(Path, "symlink_to", refuse)
    link_atomically(tmp_path / "last", tmp_path / "a")
    assert (tmp_path / "last").samefile(tmp_path / "a")
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(OSError, match="no links here"):
        link_atomically(tmp_path / "last", tmp_path / "a")
    assert (tmp_path / "last").samefile(tmp_path / "a")
