"""When a call is on the disk, and what is there after a fault."""

import os
import shutil
import threading
from queue import SimpleQueue

import pytest

from fakes.raw_endpoint import RawEndpoint, json_reply
from fakes.recording import CHAT, RawClient, calls_in, recording, request
from stillroom.errors import InputError
from stillroom.recording.journal import CallJournal, journals_in


def written(journal, *lines):
    """Appends lines one by one, and returns the outcome of each."""
    outcomes = SimpleQueue()
    return [journal.append(line, outcomes.put) or outcomes.get(timeout=10) for line in lines]


@pytest.fixture
def held_sync(monkeypatch):
    """Holds each sync of a journal back until the second event is set; the first says it began."""
    syncs, began, go_on = [], threading.Event(), threading.Event()

    def sync(handle: int) -> None:
        syncs.append(os.fstat(handle).st_size)
        began.set()
        go_on.wait(10)

    monkeypatch.setattr("stillroom.recording.journal._sync", sync)
    return syncs, began, go_on


def test_calls_that_wait_together_share_one_sync(tmp_path, held_sync):
    syncs, began, go_on = held_sync
    journal, outcomes = CallJournal(tmp_path), []
    for number in range(100):
        journal.append(b"%d\n" % number, outcomes.append)
        assert began.wait(10)
    assert outcomes == []
    go_on.set()
    journal.close()
    assert len(syncs) == 2
    assert outcomes == [None] * 100
    assert journal.path.read_bytes().split() == [b"%d" % n for n in range(100)]


def test_no_client_sees_the_end_of_a_reply_before_the_call_is_synced(tmp_path, held_sync):
    _, began, go_on = held_sync
    with (
        RawEndpoint(lambda _: json_reply(b'"whole"')) as endpoint,
        recording(tmp_path, endpoint.url) as url,
        RawClient(url) as client,
    ):
        client.send("POST", CHAT, b"{}")
        assert began.wait(10)
        client.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.socket.recv(1)
        go_on.set()
        client.socket.settimeout(10)
        assert client.socket.recv(1 << 16).endswith(b'"whole"')


def test_a_torn_last_line_is_cut_off_at_the_next_start(tmp_path):
    (tmp_path / "calls-0001.jsonl").write_bytes(b"a\nb\nc")
    journal = CallJournal(tmp_path)
    assert journal.num_cut == 1
    written(journal, b"d\n")
    journal.close()
    assert journal.path.read_bytes() == b"a\nb\nd\n"
    assert journal.path.stat().st_mode & 0o077 == 0


def test_a_full_journal_is_followed_by_the_next(tmp_path):
    journal = CallJournal(tmp_path, rotate_at=10)
    written(journal, *[b"%d-----\n" % number for number in range(5)])
    journal.close()
    assert [path.name for path in journals_in(tmp_path)] == [
        "calls-0001.jsonl", "calls-0002.jsonl", "calls-0003.jsonl",
    ]  # fmt: skip
    text = b"".join(path.read_bytes() for path in journals_in(tmp_path))
    assert text == b"".join(b"%d-----\n" % number for number in range(5))
    again = CallJournal(tmp_path, rotate_at=10)
    again.close()
    assert again.path.name == "calls-0003.jsonl"


def test_a_second_recorder_is_kept_out_of_the_folder(tmp_path):
    journal = CallJournal(tmp_path)
    with pytest.raises(InputError, match=r"another `stillroom record` is writing to"):
        CallJournal(tmp_path)
    journal.close()
    CallJournal(tmp_path).close()


def _is_broken_off(url) -> bool:
    try:
        return request(url, "POST", CHAT, b"{}").head == b""
    except ConnectionError:
        return True


def test_a_call_of_which_no_line_can_be_made_is_broken_off_and_costs_no_other(
    tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise ValueError("this one")

    with (
        RawEndpoint(lambda _: json_reply(b'"x"')) as endpoint,
        recording(tmp_path, endpoint.url) as url,
    ):
        with monkeypatch.context() as patch:
            patch.setattr("stillroom.recording.capture.encode_call", fail)
            assert _is_broken_off(url)
        assert request(url, "POST", CHAT, b"{}").body == b'"x"'
    assert "a call was not recorded and its reply was aborted: this one" in capsys.readouterr().err
    assert len(calls_in(tmp_path)) == 1


def test_on_a_full_disk_replies_break_off_and_no_further_call_is_paid_for(
    tmp_path, monkeypatch, capsys
):
    """Half of a line reaches the disk before it is full."""
    write, is_full = os.write, True

    def fill(handle: int, data) -> int:
        if not is_full or os.fstat(handle).st_size > 1 << 40:
            return write(handle, data)
        if len(data) > 100 and os.fstat(handle).st_size == 0:
            return write(handle, bytes(data[:100]))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stillroom.recording.journal.os.write", fill)
    with (
        RawEndpoint(lambda _: json_reply(b'"x"')) as endpoint,
        recording(tmp_path, endpoint.url) as url,
    ):
        assert _is_broken_off(url)
        assert (tmp_path / "calls-0001.jsonl").read_bytes() == b""
        refused = request(url, "POST", CHAT, b"{}")
        assert refused.status == 503
        assert b"free space on the disk" in refused.body
        assert len(endpoint.requests) == 1
        is_full = False
        assert request(url, "POST", CHAT, b"{}").body == b'"x"'
        assert len(calls_in(tmp_path)) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_a_journal_that_was_deleted_is_begun_anew(tmp_path):
    journal = CallJournal(tmp_path / "traces")
    assert written(journal, b"1\n") == [None]
    shutil.rmtree(tmp_path / "traces")
    assert written(journal, b"2\n") == [None]
    journal.close()
    assert journal.path.read_bytes() == b"2\n"


def test_a_next_journal_that_cannot_be_opened_costs_no_file_that_is_open(tmp_path, monkeypatch):
    journal = CallJournal(tmp_path, rotate_at=1)
    assert written(journal, b"1\n") == [None]

    def fail(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("stillroom.recording.journal.open_real", fail)
        assert written(journal, b"2\n") != [None]
        assert not journal.can_write()
    assert journal.can_write()
    assert written(journal, b"3\n") == [None]
    journal.close()
    assert b"".join(path.read_bytes() for path in journals_in(tmp_path)) == b"1\n3\n"
