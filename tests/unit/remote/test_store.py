"""Contents are sent once, go on where a connection broke, and count only when they are whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.hosts import blob_of, local_host
from stillroom.remote.agent.store import (
    AgentFolder,
    make_room,
    place_file,
    store_output,
    touch_blob,
)
from stillroom.remote.host import MachineError
from stillroom.remote.ssh.host import ChannelHost

MB = 1 << 20


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


@pytest.fixture
def host(there: Path) -> ChannelHost:
    return local_host(there)


def file_of(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def send_all(host: ChannelHost, *paths: Path) -> int:
    blobs = [blob_of(path) for path in paths]
    return sum(host.send(blobs, host.missing(blobs)))


def partial_of(there: Path, path: Path) -> Path:
    return there / "store" / f".{blob_of(path).sha256}.partial-sent"


def test_contents_are_sent_once_and_verified(tmp_path, there, host):
    files = [file_of(tmp_path, f"{i}", bytes([i]) * i * 1000) for i in range(3)]
    blobs = [blob_of(path) for path in files]

    assert host.missing(blobs) == {blob.sha256: 0 for blob in blobs}
    assert sum(host.send(blobs, {})) == 3000
    assert host.missing(blobs) == {}

    for blob, path in zip(blobs, files, strict=True):
        assert (there / "store" / blob.sha256).read_bytes() == path.read_bytes()
    assert sorted(p.name for p in (there / "store").iterdir()) == sorted(b.sha256 for b in blobs)
    assert there.stat().st_mode & 0o77 == 0


def test_more_files_than_answers_fit_into_a_pipe_are_sent_in_one_connection(tmp_path, there, host):
    files = [file_of(tmp_path, f"{i}", f"{i}".encode()) for i in range(500)]

    send_all(host, *files)

    assert len(list((there / "store").iterdir())) == 500


def test_a_broken_off_content_goes_on_where_it_broke(tmp_path, there, host):
    path = file_of(tmp_path, "model", bytes(range(256)) * (3 * MB // 256))
    blob = blob_of(path)
    sending = host.send([blob], {})
    next(sending)
    sending.close()

    missing = host.missing([blob])
    assert missing == {blob.sha256: MB}
    assert sum(host.send([blob], missing)) == 2 * MB
    assert (there / "store" / blob.sha256).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("partial", "num_sent"), [(b"wrong" * 100, 4500 + 5000), (b"wrong" * 2000, 5000)]
)
def test_wrong_bytes_of_an_earlier_connection_are_sent_again(
    tmp_path, there, host, partial, num_sent
):
    path = file_of(tmp_path, "model", b"right" * 1000)
    (there / "store").mkdir(parents=True)
    partial_of(there, path).write_bytes(partial)

    assert send_all(host, path) == num_sent
    assert (there / "store" / blob_of(path).sha256).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("now", [b"other", b"less"])
def test_a_file_that_has_changed_since_it_was_hashed_is_no_content(tmp_path, there, host, now):
    path = file_of(tmp_path, "rows", b"these")
    blob = blob_of(path)
    path.write_bytes(now)

    with pytest.raises(MachineError, match="has changed since this run was started"):
        list(host.send([blob], {}))
    assert not (there / "store" / blob.sha256).exists()


def test_a_stored_file_of_another_size_is_sent_again(tmp_path, there, host):
    path = file_of(tmp_path, "model", b"right")
    send_all(host, path)
    (there / "store" / blob_of(path).sha256).write_bytes(b"cut")

    assert send_all(host, path) == 5
    assert (there / "store" / blob_of(path).sha256).read_bytes() == b"right"


def test_a_folder_that_must_not_be_written_is_named_with_what_to_do(tmp_path):
    blocked = file_of(tmp_path, "file", b"")
    path = file_of(tmp_path, "rows", b"these")

    with pytest.raises(MachineError, match="this machine") as caught:
        list(local_host(blocked / "there").send([blob_of(path)], {}))
    assert str(blocked) in caught.value.problem


def test_what_programs_edit_in_place_is_copied_and_weights_are_not(tmp_path, there, host):
    weights = file_of(tmp_path, "model.safetensors", b"w" * MB)
    database = file_of(tmp_path, "shop.db", b"d" * MB)
    send_all(host, weights, database)
    here = AgentFolder(there)
    run = there / "runs" / "r1"

    for path in (weights, database):
        place_file(here, blob_of(path).sha256, run / path.name)
    (run / "shop.db").write_bytes(b"edited")

    assert host.missing([blob_of(weights), blob_of(database)]) == {}
    assert (run / "model.safetensors").stat().st_nlink == 2
    assert (run / "shop.db").stat().st_mode & 0o777 == 0o600


def test_an_output_that_a_later_run_reads_is_not_sent(tmp_path, there, host):
    made = there / "runs" / "r1" / "model.safetensors"
    made.parent.mkdir(parents=True)
    made.write_bytes(b"w" * MB)

    store_output(AgentFolder(there), made, blob_of(made).sha256)

    assert host.missing([blob_of(made)]) == {}


def test_what_no_run_uses_makes_room_the_longest_unused_first(tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    for name in ("a", "b", "used", "kept"):
        file_of(store, name, b"1234567890")
    (tmp_path / "run").hardlink_to(store / "used")
    now_s = max(path.stat().st_ctime for path in store.iterdir())

    def deleted(num_bytes: int, *, days: float) -> list[str]:
        return make_room(store, num_bytes, keep={"kept"}, now_s=now_s + days * 86400)

    assert deleted(1 << 60, days=0.5) == []  # It may be on its way to a run.
    assert deleted(10, days=3) == []
    touch_blob(store / "b")
    spec = sorted(("a", "b"), key=lambda name: (store / name).stat().st_ctime)
    assert deleted(1 << 60, days=3) == spec
    assert sorted(path.name for path in store.iterdir()) == ["kept", "used"]


def test_what_was_not_used_for_two_weeks_goes_although_there_is_room(tmp_path):
    file_of(tmp_path, "old", b"1")
    now_s = (tmp_path / "old").stat().st_ctime

    assert make_room(tmp_path, 0, keep=(), now_s=now_s + 13 * 86400) == []
    assert make_room(tmp_path, 0, keep=(), now_s=now_s + 15 * 86400) == ["old"]


def test_noting_a_use_leaves_the_time_of_change(tmp_path):
    path = file_of(tmp_path, "model", b"1")
    os.utime(path, (1, 1))
    before = path.stat()

    touch_blob(path)

    assert path.stat().st_mtime == 1
    assert path.stat().st_ctime_ns >= before.st_ctime_ns
    touch_blob(tmp_path / "gone")


def test_a_command_there_starts_without_large_libraries():
    program = (
        "import sys, stillroom.remote.agent.__main__, stillroom.remote.agent.store\n"
        "print({'pydantic', 'psutil', 'yaml', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout == "set()\n"
