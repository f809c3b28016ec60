import json
import os
import shutil
from typing import NamedTuple

import pytest

from fakes.folders import names_in
from stillroom.errors import InputError
from stillroom.export.folder import (
    MANIFEST,
    ExportManifest,
    check_output,
    export_folder,
    put_in_place,
    read_export,
    record_files,
    require_space,
)
from stillroom.files import FileLock, write_json


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def fill(folder, text):
    (folder / "sub").mkdir()
    (folder / "model.txt").write_text(text, encoding="utf-8")
    (folder / "sub" / "more.txt").write_text(text, encoding="utf-8")
    manifest = ExportManifest(
        format="merged",
        request={},
        run_id=None,
        method=None,
        step=None,
        base_model="base",
        precision="fp32",
        files=record_files(folder),
        stillroom_version="0",
        created_at="2026-11-20T10:00:00.000Z",
    )
    write_json(folder / MANIFEST, manifest)


@pytest.fixture
def runs(tmp_path):
    (tmp_path / "runs" / "export-1").mkdir(parents=True)
    (tmp_path / "runs" / "export-2").mkdir()
    return tmp_path / "runs"


def write(output, run, text="one"):
    with export_folder(output, run=run) as folder:
        fill(folder, text)


def said(output):
    return (output / "model.txt").read_text("utf-8")


def test_the_folder_appears_whole_also_in_place_of_an_empty_one(tmp_path, runs):
    output = tmp_path / "deep" / "er" / "out"
    write(output, runs / "export-1")
    assert said(output) == "one"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", runs / "export-1", "two")
    assert said(tmp_path / "empty") == "two"
    assert names_in(output.parent) == ["out"]


def test_a_folder_that_somebody_wrote_meanwhile_is_not_replaced(tmp_path, runs):
    output = tmp_path / "out"
    writing = export_folder(output, run=runs / "export-1")
    fill(writing.__enter__(), "one")
    output.mkdir()
    (output / "theirs.txt").touch()
    with pytest.raises(InputError):
        writing.__exit__(None, None, None)
    assert names_in(output) == ["theirs.txt"]
    assert names_in(tmp_path) == ["out", "runs"]


def test_a_failed_rename_brings_the_former_export_back(tmp_path, runs):
    output = tmp_path / "out"
    write(output, runs / "export-1")
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "cleared away", output, aside=tmp_path / ".out.replaced-export-2")
    assert said(output) == "one"
    assert names_in(tmp_path) == ["out", "runs"]


def test_what_a_killed_run_began_is_cleared_and_what_it_replaced_comes_back(tmp_path, runs):
    output = tmp_path / "out"
    write(output, runs / "export-1")
    # Killed between the two renames.
    output.rename(tmp_path / ".out.replaced-export-1")
    (tmp_path / ".out.partial-export-1").mkdir()
    (tmp_path / ".out.partial-gone").mkdir()
    (tmp_path / ".outer.partial-export-1").mkdir()
    with export_folder(output, run=runs / "export-2") as folder:
        assert said(output) == "one"
        fill(folder, "two")
    assert said(output) == "two"
    assert names_in(tmp_path) == [".outer.partial-export-1", "out", "runs"]


def test_what_a_living_run_writes_is_left_alone(tmp_path, runs):
    begun = tmp_path / ".out.partial-export-1"
    begun.mkdir()
    lock = FileLock(runs / "export-1" / "owner.lock")
    assert lock.try_acquire()
    write(tmp_path / "out", runs / "export-2")
    assert begun.is_dir()
    lock.release()


def test_only_an_export_as_it_was_written_may_be_replaced(tmp_path, runs):
    output = tmp_path / "out"
    write(output, runs / "export-1")
    check_output(output)
    (output / "sub" / "more.txt").write_text("two", encoding="utf-8")
    with pytest.raises(InputError, match=r"sub/more\.txt"):
        check_output(output)
    (output / "sub" / "more.txt").unlink()
    check_output(output)
    (output / "link").symlink_to(output / "model.txt")
    with pytest.raises(InputError, match="link"):
        check_output(output)
    (output / "link").unlink()
    (output / MANIFEST).write_text("{}", encoding="utf-8")
    assert read_export(output) is None
    with pytest.raises(InputError, match="is not an export"):
        check_output(output)


def test_a_large_file_is_told_by_its_size_alone(tmp_path, runs):
    output = tmp_path / "out"
    with export_folder(output, run=runs / "export-1") as folder:
        (folder / "model.txt").write_bytes(os.urandom(2 << 20))
        (folder / "more").mkdir()
        shutil.copy(folder / "model.txt", folder / "more")
        manifest = {"format": "merged", "request": {}, "run_id": None, "method": None,
                    "step": None, "base_model": "", "precision": "", "stillroom_version": "",
                    "created_at": "", "files": record_files(folder)}  # fmt: skip
        write_json(folder / MANIFEST, manifest)
    check_output(output)
    assert len(json.loads((output / MANIFEST).read_text("utf-8"))["files"]) == 2
    with (output / "model.txt").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(InputError, match=r"model\.txt"):
        check_output(output)


def test_a_disk_without_room_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, 5 * 10**9))
    require_space(tmp_path / "not" / "there", 4 * 10**9)
    with pytest.raises(InputError) as caught:
        require_space(tmp_path / "out", 16 * 10**9)
    assert "needs about 16.1 GB" in caught.value.problem
    assert "has 5.0 GB" in caught.value.problem
    assert "precision bf16" in caught.value.fix
