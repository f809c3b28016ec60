import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from fakes.folders import names_in
from stillroom.errors import DataError, InputError
from stillroom.lineage import pending_manifest_path, read_manifest
from stillroom.outputs import (
    OutputLock,
    check_page,
    check_replaceable,
    check_unlocked,
    marked_page,
    new_output,
    output_lock,
)


class Request(BaseModel):
    overwrite: bool = False


def write(path: Path, row: int, *side: Path, overwrite: bool = False) -> None:
    with new_output(path, *side, operation="x", overwrite=overwrite) as output:
        output.rows.write(row)
        for writer in output.side.values():
            writer.write([row])
        output.record(inputs=[], request=Request(), counts={"rows": 1})


def test_what_we_wrote_is_replaced_and_what_was_edited_since_is_not(tmp_path: Path) -> None:
    path, side = tmp_path / "out.jsonl", tmp_path / "out.jsonl.dropped"

    write(path, 1, side)
    write(path, 2, side)
    assert (path.read_bytes(), side.read_bytes()) == (b"2\n", b"[2]\n")
    assert names_in(tmp_path) == ["out.jsonl", "out.jsonl.dropped", "out.jsonl.manifest.json"]

    for edited in (path, side):
        kept = edited.read_bytes()
        edited.write_bytes(b"9\n")
        with pytest.raises(
            InputError, match=f"{edited} exists, but stillroom did not write it"
        ) as caught:
            write(path, 3, side)
        assert "overwrite: true (--overwrite)" in caught.value.fix
        assert edited.read_bytes() == b"9\n"
        edited.write_bytes(kept)

    path.write_bytes(b"9\n")
    write(path, 4, side, overwrite=True)
    assert (path.read_bytes(), side.read_bytes()) == (b"4\n", b"[4]\n")


@pytest.mark.parametrize("name", ["rewards.py", "prompts.jsonl"])
def test_a_users_own_file_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"by hand")

    with pytest.raises(InputError, match="stillroom did not write it"):
        write(tmp_path / name, 1)

    assert (tmp_path / name).read_bytes() == b"by hand"
    assert names_in(tmp_path) == [name]


def test_a_file_whose_manifest_is_somebody_elses_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "out.manifest.json").write_bytes(b'{"by": "hand"}')

    with pytest.raises(DataError, match="is damaged"):
        write(tmp_path / "out", 1)

    assert names_in(tmp_path) == ["out.manifest.json"]


def test_an_empty_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").touch()

    write(tmp_path / "out.jsonl", 1)

    assert (tmp_path / "out.jsonl").read_bytes() == b"1\n"


KILLED = """
import os, pathlib, signal, sys
from stillroom import outputs
from stillroom.places import RealFolder

path, num_renames = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rename, Request = RealFolder.rename, outputs.ReplacingRequest

def rename_or_die(folder, *names):
    global num_renames
    if num_renames == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    num_renames -= 1
    rename(folder, *names)

RealFolder.rename = rename_or_die
side = path.with_name(path.name + ".dropped")
with outputs.new_output(path, side, operation="x", overwrite=False) as output:
    output.rows.write(2)
    output.side[side].write([2])
    output.record(inputs=[], request=Request(), counts={"rows": 2})
"""


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("num_renames", range(5))
def test_after_a_kill_at_any_rename_the_same_command_goes_on(
    tmp_path: Path, num_renames: int, has_old: bool
) -> None:
    path, side = tmp_path / "out.jsonl", tmp_path / "out.jsonl.dropped"
    if has_old:
        write(path, 1, side)

    command = [sys.executable, "-c", KILLED, str(path), str(num_renames)]
    finished = subprocess.run(command, timeout=60, check=False)

    assert finished.returncode == (-signal.SIGKILL if num_renames < 4 else 0)
    old = b"1\n" if has_old else None
    content = path.read_bytes() if path.exists() else None
    assert content == (b"2\n" if num_renames >= 3 else old)
    manifest = read_manifest(path) if path.exists() else None
    assert manifest is None or manifest.counts["rows"] == int(path.read_bytes())
    write(path, 3, side)
    assert path.read_bytes() == b"3\n"
    assert names_in(tmp_path) == ["out.jsonl", "out.jsonl.dropped", "out.jsonl.manifest.json"]


def test_a_lock_names_its_holder_and_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    with output_lock(path, "filter_dataset", run_id="score-1"):
        for take in (lambda: OutputLock(path).acquire("other"), lambda: check_unlocked(path)):
            with pytest.raises(InputError, match="being written by filter_dataset") as caught:
                take()
            assert f"process {os.getpid()}" in caught.value.problem
            assert "run score-1" in caught.value.problem
    check_unlocked(path)
    with output_lock(path, "other"):
        pass
    assert names_in(tmp_path) == []


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    code = (
        "import os, pathlib, sys\n"
        "from stillroom.outputs import OutputLock\n"
        "OutputLock(pathlib.Path(sys.argv[1])).acquire('x')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert names_in(tmp_path) == [".out.jsonl.lock"]

    check_unlocked(path)
    write(path, 1)

    assert names_in(tmp_path) == ["out.jsonl", "out.jsonl.manifest.json"]


def test_a_page_is_ours_as_long_as_nobody_edits_it(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    check_page(page, overwrite=False)
    page.write_bytes(marked_page("<html>\udc80</html>"))
    check_page(page, overwrite=False)

    for other in (page.read_bytes().replace(b"html", b"HTML"), b"<html>by hand</html>"):
        page.write_bytes(other)
        with pytest.raises(InputError, match="did not write it"):
            check_page(page, overwrite=False)
        check_page(page, overwrite=True)


def test_a_file_beside_an_output_of_an_older_version_is_ours(tmp_path: Path) -> None:
    path, side = tmp_path / "out.jsonl", tmp_path / "out.jsonl.dropped"
    write(path, 1, side)
    manifest = tmp_path / "out.jsonl.manifest.json"
    document = json.loads(manifest.read_bytes())
    manifest.write_text(json.dumps({**document, "side": []}), encoding="utf-8")

    check_replaceable(path, side, overwrite=False)

    assert not pending_manifest_path(path).exists()
