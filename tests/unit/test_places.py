import os
from pathlib import Path

import pytest

from fakes.folders import names_in
from stillroom.errors import InputError
from stillroom.files import AppendLog, FileLock, atomic_output, cut_torn_line, write_atomic
from stillroom.places import make_folder, open_real, real_folder, rename_folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that nothing may be written to, with a file that nothing may change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_bytes(b"{}\ntorn")
    return folder


def append(path: Path) -> None:
    with AppendLog(path) as log:
        log.append({"a": 1})


def write_rows(path: Path) -> None:
    with atomic_output(path) as rows:
        rows.write({"a": 1})


WRITERS = {
    "document": lambda path: write_atomic(path, b"x"),
    "rows": write_rows,
    "log": append,
    "lock": lambda path: FileLock(path).try_acquire(),
    "cut": cut_torn_line,
    "folder": make_folder,
}


# Cutting needs a file, and there is none in a folder that is not there.
BELOW_A_LINK = [("link/file", name) for name in WRITERS]
BELOW_A_LINK += [("link/deep/file", name) for name in WRITERS if name != "cut"]


@pytest.mark.parametrize(("place", "name"), BELOW_A_LINK)
def test_nothing_is_written_below_a_link(tmp_path: Path, outside: Path, place, name) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside)

    with pytest.raises(InputError, match="link is a symbolic link"):
        WRITERS[name](root / place)

    assert names_in(outside) == ["file"]
    assert (outside / "file").read_bytes() == b"{}\ntorn"


@pytest.mark.parametrize("name", ["log", "lock", "cut"])
def test_no_file_that_is_a_link_is_written(tmp_path: Path, outside: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(outside / "file")

    with pytest.raises(InputError, match="link is a symbolic link"):
        WRITERS[name](tmp_path / "link")

    assert (outside / "file").read_bytes() == b"{}\ntorn"


@pytest.mark.parametrize("name", ["document", "rows"])
def test_a_file_that_is_a_link_is_replaced_and_not_what_it_leads_to(
    tmp_path: Path, outside: Path, name: str
) -> None:
    (tmp_path / "link").symlink_to(outside / "file")

    WRITERS[name](tmp_path / "link")

    assert not (tmp_path / "link").is_symlink()
    assert (outside / "file").read_bytes() == b"{}\ntorn"


def test_a_folder_that_is_swapped_for_a_link_while_rows_are_written_gets_none(
    tmp_path: Path, outside: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    with atomic_output(folder / "rows.jsonl") as rows:
        rows.write({"a": 1})
        folder.rename(tmp_path / "moved")
        folder.symlink_to(outside)

    assert names_in(outside) == ["file"]
    assert (tmp_path / "moved" / "rows.jsonl").read_bytes() == b'{"a":1}\n'


def test_a_folder_that_is_swapped_for_a_link_is_not_put_in_place(
    tmp_path: Path, outside: Path
) -> None:
    make_folder(tmp_path / "partial")
    (tmp_path / "partial").rmdir()
    (tmp_path / "partial").symlink_to(outside)

    with pytest.raises(InputError, match="partial is a symbolic link"):
        rename_folder(tmp_path / "partial", tmp_path / "whole")

    assert not (tmp_path / "whole").exists()


def test_other_errors_keep_their_kind_and_name_the_whole_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(NotADirectoryError, match=str(tmp_path / "file")):
        real_folder(tmp_path / "file" / "deep")
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "none")):
        real_folder(tmp_path / "none", create=False)
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "none")):
        open_real(tmp_path / "none", os.O_RDWR)


def num_descriptors() -> int:
    listed = Path("/proc/self/fd")
    return sum(1 for _ in listed.iterdir()) if listed.exists() else 0


def test_folders_are_made_and_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = num_descriptors()
    for number in range(50):
        make_folder(tmp_path / "a" / "b" / str(number))
        os.close(open_real(tmp_path / "a" / "file", os.O_WRONLY | os.O_CREAT))

    assert len(names_in(tmp_path / "a" / "b")) == 50
    assert num_descriptors() == before
