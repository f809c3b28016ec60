import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.folders import names_in
from stillroom.files import (
    AppendLog,
    FileLock,
    LineWriter,
    atomic_output,
    canonical_json,
    content_hash,
    cut_torn_line,
    write_atomic,
)
from stillroom.lines import read_lines

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def shuffled(value: object) -> object:
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@pytest.mark.thorough
@given(JSON)
def test_a_hash_does_not_depend_on_the_order_of_keys(value: object) -> None:
    assert canonical_json(value) == canonical_json(shuffled(value))
    assert content_hash(value) == content_hash(shuffled(value))


def test_a_hash_is_the_same_on_every_machine() -> None:
    # Written down once: a change would make every file of every user look changed.
    assert content_hash({"b": [1, None, "ü"], "a": 0.5}) == "8f0475b7a94deaf8"


def test_different_values_hash_differently() -> None:
    values = [{"a": 1}, {"a": "1"}, {"a": [1]}, {"a": None}, {}, [], "", None, {"b": 1}]
    assert len({content_hash(value) for value in values}) == len(values)


def test_a_document_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.mkdir()

    with pytest.raises(OSError, match="taken"):
        write_atomic(path, b"new")

    assert names_in(tmp_path) == ["taken"]


def test_rows_appear_only_when_the_writing_is_over(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old\n", encoding="utf-8")

    with atomic_output(path) as rows:
        rows.write({"a": 1})
        rows.write_raw(b'{"a": 2}')
        assert path.read_text(encoding="utf-8") == "old\n"

    assert path.read_bytes() == b'{"a":1}\n{"a": 2}\n'
    assert rows.num_rows == 2
    assert names_in(tmp_path) == ["rows.jsonl"]


def test_few_of_what_rows_are_views_of_wait_in_memory(tmp_path: Path) -> None:
    sources = [bytes([65 + n]) * (256 << 10) for n in range(5)]

    with atomic_output(tmp_path / "rows.jsonl") as rows:
        for source in sources:
            rows.write_raw(memoryview(source)[:2], source=source)
            rows.write_raw(memoryview(source)[-1:], source=source)
        num_written = rows.num_bytes

    assert 0 < num_written < rows.num_bytes
    written = b"".join(2 * source[:1] + b"\n" + source[:1] + b"\n" for source in sources)
    assert (tmp_path / "rows.jsonl").read_bytes() == written


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_while_writing_leaves_the_old_rows(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old\n", encoding="utf-8")

    def write() -> None:
        with atomic_output(path) as rows:
            rows.write({"a": 1})
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text(encoding="utf-8") == "old\n"
    assert names_in(tmp_path) == ["rows.jsonl"]


def test_two_writers_of_one_file_do_not_mix_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    with atomic_output(path) as first, atomic_output(path) as second:
        for index in range(3):
            first.write({"first": index})
            second.write({"second": index})

    assert path.read_bytes() == b'{"first":0}\n{"first":1}\n{"first":2}\n'
    assert names_in(tmp_path) == ["rows.jsonl"]


def test_rows_that_were_appended_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"

    with AppendLog(path) as log:
        log.append({"a": 1})
        log.append({"a": 2}, durable=True)
        log.sync_soon()
        # A reader in another process sees a row as soon as it is appended.
        assert path.read_bytes() == b'{"a":1}\n{"a":2}\n'
    with AppendLog(path) as log:
        log.append({"a": 3})

    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n{"a":3}\n'


def test_what_the_disk_did_not_take_is_an_error_though_nobody_waited_for_it() -> None:
    # It takes every row, and can't be waited for.
    log = AppendLog(Path("/dev/null"))
    log.append({"a": 1})
    log.sync_soon()

    with pytest.raises(OSError, match="Invalid argument"):
        log.close()


def test_what_the_disk_did_not_take_of_many_rows_is_an_error() -> None:
    row = b"a" * (1 << 20)

    def write() -> None:
        with Path("/dev/null").open("wb", buffering=0) as stream, LineWriter(stream) as rows:
            for _ in range(66):
                rows.write_raw(row)

    with pytest.raises(OSError, match="Invalid argument"):
        write()


def test_a_log_that_is_removed_is_gone_before_it_is_closed(tmp_path: Path) -> None:
    with AppendLog(tmp_path / "log.jsonl") as log:
        log.append({"a": 1})
        log.remove()
        assert names_in(tmp_path) == []
    assert names_in(tmp_path) == []


def test_a_torn_last_line_is_cut_off_at_every_byte(tmp_path: Path) -> None:
    whole, torn = b'{"a":1}\n{"b":"x\xc3\xbc"}\n', b'{"c":[1,2,3]}\n'
    path = tmp_path / "log.jsonl"

    for length in range(len(torn)):
        path.write_bytes(whole + torn[:length])
        with AppendLog(path) as log:
            log.append({"d": 4})
        assert path.read_bytes() == whole + b'{"d":4}\n'


@given(st.binary(max_size=40), st.integers(0, 3))
def test_cutting_keeps_all_that_ends_with_a_newline(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, blocks: int
) -> None:
    # A tail of more than one block is looked through from its end.
    content += b"x" * (blocks << 16)
    path = tmp_path_factory.mktemp("cut") / "log.jsonl"
    path.write_bytes(content)
    keep = content.rfind(b"\n") + 1

    assert cut_torn_line(path) == len(content) - keep
    assert path.read_bytes() == content[:keep]
    assert cut_torn_line(path) == 0


def test_cutting_a_file_that_is_not_there_cuts_nothing(tmp_path: Path) -> None:
    assert cut_torn_line(tmp_path / "none") == 0
    assert not (tmp_path / "none").exists()


FULL_DISK = """
import pathlib, resource, signal, sys
from stillroom.files import AppendLog, atomic_output, write_atomic

folder = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
failed = 0
try:
    write_atomic(folder / "document", b"x" * 50_000)
except OSError:
    failed += 1
try:
    with atomic_output(folder / "rows.jsonl") as rows:
        for _ in range(1000):
            rows.write({"text": "x" * 100})
except OSError:
    failed += 1
try:
    with AppendLog(folder / "log.jsonl") as log:
        for index in range(1000):
            log.append({"index": index, "text": "x" * 100})
except OSError:
    failed += 1
sys.exit(failed)
"""


def test_a_full_disk_is_an_error_that_damages_no_file(tmp_path: Path) -> None:
    for name in ("document", "rows.jsonl"):
        (tmp_path / name).write_bytes(b"old\n")

    # A limit on the size of files stands for a disk that is full.
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    finished = subprocess.run(command, timeout=120, check=False)

    assert finished.returncode == 3
    assert (tmp_path / "document").read_bytes() == b"old\n"
    assert (tmp_path / "rows.jsonl").read_bytes() == b"old\n"
    assert names_in(tmp_path) == ["document", "log.jsonl", "rows.jsonl"]
    with AppendLog(tmp_path / "log.jsonl") as log:
        log.append({"index": -1})
    rows = [json.loads(line.data) for line in read_lines(tmp_path / "log.jsonl")]
    assert [row["index"] for row in rows] == [*range(len(rows) - 1), -1]
    assert len(rows) > 100


def test_only_one_holds_a_lock_until_it_is_released(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "new" / "lock"), FileLock(tmp_path / "new" / "lock")

    assert first.try_acquire()
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    first.release()
    assert second.try_acquire()
    assert not first.try_acquire()
    second.release()


def test_a_lock_is_waited_for_until_it_is_free_or_the_time_is_over(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.try_acquire()

    assert not second.acquire_within(0.0, sleep=lambda _: None)
    assert second.acquire_within(60.0, sleep=lambda _: first.release())
    second.release()
