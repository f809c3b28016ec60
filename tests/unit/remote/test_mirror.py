"""The folder here of a run on another machine: its texts, its growing files, what comes back."""

import hashlib
import os
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from stillroom.files import write_json
from stillroom.remote.follower.download import Download, StoppedError
from stillroom.remote.follower.launcher import record_outputs
from stillroom.remote.follower.local_run import FollowRecord, read_record
from stillroom.remote.follower.mirror import Mirror, OutOfSyncError
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.machine import Machine, SshAddress
from stillroom.remote.records import (
    AppendedLines,
    JobSpec,
    PathMapping,
    PlacedFile,
    RemoteFile,
    RemoteState,
)
from stillroom.run_folder import RunFailure, RunFolder, RunRequest, RunState
from stillroom.types import RunKind, RunStatus

RUN = "sft-abc"
ROOT_THERE = "/root/.stillroom-remote/runs/sft-abc"
LOG, EVENTS = f"runs/{RUN}/log.txt", f"runs/{RUN}/events.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The folder here of a run that was started."""
    folder = RunFolder(tmp_path / "runs" / RUN)
    folder.path.mkdir(parents=True)
    request = RunRequest(kind=RunKind.SFT, workspace=str(tmp_path), request={})
    write_json(folder.request_file, request)
    folder.write(state(RunStatus.STARTING, created_at="2026-11-20T10:00:00.000Z"))
    return folder


def state(status: RunStatus, **fields: object) -> RunState:
    fields = {"created_at": "2026-11-20T12:00:00.000Z", **fields}
    return RunState(run_id=RUN, kind=RunKind.SFT, status=status, **fields)


def spec(*outputs: str) -> JobSpec:
    return JobSpec(
        machine=Machine(name="box", ssh=SshAddress(host="box")),
        files=[],
        home_paths=[PathMapping(home_path="/data/rows.jsonl", remote_path="outside/0/rows.jsonl")],
        outputs=list(outputs),
    )


def mirror_of(folder: RunFolder, *outputs: str) -> Mirror:
    root = Path(folder.read_request().workspace)
    return Mirror(folder, spec(*outputs), root, read_record(folder))


def there(state: RunState, **changes: object) -> RemoteState:
    import time

    news = RemoteState(
        run_json=msgspec.json.encode(state), elapsed_s=1.0, root=ROOT_THERE, clock=time.time()
    )
    return msgspec.structs.replace(news, **changes)


def test_a_state_names_the_paths_here_and_not_the_process_there(folder: RunFolder) -> None:
    mirror = mirror_of(folder)
    workspace = folder.read_request().workspace
    notes = [f"reads {ROOT_THERE}/outside/0/rows.jsonl", f"writes {ROOT_THERE}/workspace/a"]
    mirror.write_state(there(state(RunStatus.RUNNING, pid=7, process_start="x", notes=notes)))
    mirrored = folder.read()
    assert mirrored.notes == ["reads /data/rows.jsonl", f"writes {workspace}/a"]
    assert (mirrored.pid, mirrored.process_start) == (None, None)
    assert mirrored.created_at == "2026-11-20T10:00:00.000Z"


def test_a_run_that_has_ended_there_is_running_until_all_of_it_is_here(folder: RunFolder) -> None:
    mirror = mirror_of(folder)
    failure = RunFailure(problem="no", fix="cancel all other runs")
    mirror.write_state(
        there(state(RunStatus.FAILED, error=failure, ended_at="2026-11-20T12:30:00Z"))
    )
    assert folder.read().status is RunStatus.RUNNING
    assert folder.read().error is None
    assert mirror.final is not None
    assert mirror.final.status is RunStatus.FAILED
    # Its advice is text from others, so an agent gets it as part of the problem.
    assert mirror.final.error is not None
    assert mirror.final.error.problem == "no\nthe machine's advice: cancel all other runs"
    assert "cancel" not in mirror.final.error.fix


def test_a_machine_does_not_change_the_kind_of_a_run(folder: RunFolder) -> None:
    # By the kind of a run, remarks in its result are Stillroom's own and need no marks.
    mirror = mirror_of(folder)
    changed = msgspec.structs.replace(state(RunStatus.SUCCEEDED), kind=RunKind.IMPORT)
    mirror.write_state(there(changed))
    assert folder.read().kind is RunKind.SFT
    assert mirror.final is not None
    assert mirror.final.kind is RunKind.SFT


def test_times_of_a_clock_that_is_hours_off_are_shown_by_the_clock_here(folder: RunFolder) -> None:
    import time

    mirror = mirror_of(folder)
    started = state(RunStatus.RUNNING, started_at="2026-11-20T15:00:10.000Z")
    mirror.write_state(there(started, clock=time.time() + 3 * 3600))
    shown = folder.read().started_at
    assert shown is not None
    assert shown.startswith("2026-11-20T12:00:")


@pytest.mark.parametrize(
    ("moment", "clock"),
    [("0001-01-01T00:00:00Z", 1e10), ("9999-12-31T23:59:59Z", 0.0), ("noon", 0.0)],
)
def test_a_time_that_no_calendar_has_here_is_shown_as_it_came(
    folder: RunFolder, moment: str, clock: float
) -> None:
    mirror = mirror_of(folder)
    mirror.write_state(there(state(RunStatus.RUNNING, started_at=moment), clock=clock))
    assert folder.read().started_at == moment


def test_a_growing_file_is_written_once_although_followers_are_killed(folder: RunFolder) -> None:
    mirror = mirror_of(folder)
    mirror.write_state(there(state(RunStatus.RUNNING)))
    first = f"at {ROOT_THERE}/workspace/x\n".encode()
    mirror.append_lines(AppendedLines(path=LOG, offset=0, data=first))
    # Killed after the bytes were written, and before that was noted.
    with folder.log.open("ab") as stream:
        stream.write(b"secon")
    later = mirror_of(folder)
    assert later.seen == {LOG: len(first)}
    later.append_lines(AppendedLines(path=LOG, offset=len(first), data=b"second\n"))
    workspace = folder.read_request().workspace
    assert folder.log.read_text() == f"at {workspace}/x\nsecond\n"
    with pytest.raises(OutOfSyncError):
        later.append_lines(AppendedLines(path=LOG, offset=3, data=b"?\n"))
    # A log that was cut anew there begins anew here.
    later.append_lines(AppendedLines(path=LOG, offset=0, data=b""))
    later.append_lines(AppendedLines(path=LOG, offset=0, data=b"anew\n"))
    assert folder.log.read_text() == "anew\n"


def test_a_growing_file_that_was_cut_here_is_asked_for_anew(folder: RunFolder) -> None:
    mirror = mirror_of(folder)
    mirror.append_lines(AppendedLines(path=EVENTS, offset=0, data=b'{"a": 1}\n'))
    folder.events.write_bytes(b"")
    with pytest.raises(OutOfSyncError):
        mirror.append_lines(AppendedLines(path=EVENTS, offset=9, data=b'{"a": 2}\n'))
    assert mirror.seen == {}


@pytest.mark.parametrize("edit", [b"mine\n", b"row 1\nmine\n", b""])
def test_rows_that_somebody_changed_here_are_left_alone(folder: RunFolder, edit: bytes) -> None:
    rows = Path(folder.read_request().workspace) / "out.jsonl"
    mirror = mirror_of(folder, "out.jsonl")
    mirror.append_lines(AppendedLines(path="out.jsonl", offset=0, data=b"row 1\n"))
    assert rows.read_bytes() == b"row 1\n"
    rows.write_bytes(edit)
    mirror.append_lines(AppendedLines(path="out.jsonl", offset=6, data=b"row 2\n"))
    mirror.append_lines(AppendedLines(path="out.jsonl", offset=12, data=b"row 3\n"))
    assert rows.read_bytes() == edit


@pytest.mark.parametrize(
    "path", ["../x", "/etc/x", f"runs/{RUN}/run.json", "runs/other/log.txt", "rows.jsonl", ".git/x"]
)
def test_a_machine_writes_nothing_here_but_its_run_and_its_outputs(
    folder: RunFolder, path: str
) -> None:
    root = Path(folder.read_request().workspace)
    before = sorted(root.rglob("*"))
    mirror_of(folder, "out.jsonl").append_lines(AppendedLines(path=path, offset=0, data=b"x\n"))
    bring(folder, {path: b"x"}, outputs=["out.jsonl"])
    assert [p for p in sorted(root.rglob("*")) if p.name != "remote_files.json"] == before


class Source:
    """The files of a run on its machine, of which the connection may break."""

    def __init__(self, files: dict[str, bytes], *, break_after: int | None = None) -> None:
        self.files, self.left = files, break_after
        self.sent = 0
        self.fetched: list[tuple[str, int]] = []

    def fetch(self, path: str, offset: int) -> Generator[bytes]:
        self.fetched.append((path, offset))
        for begin in range(offset, len(self.files[path]), 4):
            if self.left is not None and self.sent >= self.left:
                self.left = None
                raise UnreachableError("it broke", "try again")
            block = self.files[path][begin : begin + 4]
            self.sent += len(block)
            yield block

    def list(self) -> list[RemoteFile]:
        return [
            RemoteFile(path=path, sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
            for path, data in self.files.items()
        ]


def brings(folder: RunFolder, source: Source, outputs: list[str]) -> Download:
    root = Path(folder.read_request().workspace)
    return Download(folder, root, outputs, read_record(folder), source.fetch)


def take(folder: RunFolder, source: Source, *outputs: str, is_last: bool = True) -> Download:
    """Downloads what a machine lists."""
    back = brings(folder, source, list(outputs))
    back.download_missing(source.list(), is_last=is_last, is_stopped=lambda: False)
    return back


def bring(
    folder: RunFolder, files: dict[str, bytes], *, outputs: list[str], is_last: bool = True
) -> Download:
    return take(folder, Source(files), *outputs, is_last=is_last)


def checkpoint(name: str, weights: bytes) -> dict[str, bytes]:
    prefix = f"runs/{RUN}/checkpoints/{name}"
    return {f"{prefix}/model.safetensors": weights, f"{prefix}/stillroom.json": b"{}"}


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in (folder.path / "checkpoints").iterdir())


def test_a_checkpoint_is_here_whole_or_not_at_all(folder: RunFolder) -> None:
    source = Source(checkpoint("step_1", b"0123456789"), break_after=8)
    with pytest.raises(UnreachableError):
        take(folder, source, is_last=False)
    assert list((folder.path / "checkpoints").glob("[!.]*")) == []

    take(folder, source, is_last=False)
    assert names(folder) == ["step_1"]
    weights = f"runs/{RUN}/checkpoints/step_1/model.safetensors"
    # What had come before the break was not asked for again.
    assert source.fetched[:2] == [(weights, 0), (weights, 8)]
    assert (folder.path / "checkpoints/step_1/model.safetensors").read_bytes() == b"0123456789"


def test_a_checkpoint_that_is_gone_there_stays_until_a_newer_one_is_here(folder: RunFolder) -> None:
    bring(folder, checkpoint("step_1", b"one"), outputs=[], is_last=False)
    bring(folder, {}, outputs=[], is_last=False)
    assert names(folder) == ["step_1"]
    bring(folder, checkpoint("step_2", b"two"), outputs=[], is_last=False)
    assert names(folder) == ["step_2"]
    bring(folder, checkpoint("final", b"two"), outputs=[], is_last=False)
    assert names(folder) == ["final"]


def test_the_same_content_is_fetched_once(folder: RunFolder) -> None:
    files = {**checkpoint("final", b"weights!"), **checkpoint("step_1", b"weights!")}
    source = Source(files)
    take(folder, source)
    assert source.sent == len(b"weights!") + len(b"{}")
    assert (folder.path / "checkpoints/step_1/model.safetensors").read_bytes() == b"weights!"
    again = Source(files)
    take(folder, again)
    assert again.fetched == []


def test_a_file_that_came_damaged_is_fetched_again_and_never_put_in_place(
    folder: RunFolder,
) -> None:
    class Damaged(Source):
        def fetch(self, path: str, offset: int) -> Generator[bytes]:
            self.fetched.append((path, offset))
            yield b"WRONG" if len(self.fetched) < num_damaged else self.files[path]

    num_damaged = 3
    source = Damaged({"out.jsonl": b"right"})
    take(folder, source, "out.jsonl")
    root = Path(folder.read_request().workspace)
    assert (root / "out.jsonl").read_bytes() == b"right"
    num_damaged = 99
    source = Damaged({"out.jsonl": b"newer"})
    with pytest.raises(MachineError, match="differs from the one its machine reported"):
        take(folder, source, "out.jsonl")
    assert (root / "out.jsonl").read_bytes() == b"right"


def test_what_somebody_wrote_here_meanwhile_is_not_replaced(folder: RunFolder) -> None:
    root = Path(folder.read_request().workspace)
    (root / "out.jsonl").write_bytes(b"before")
    record = FollowRecord()
    record_outputs(record, root, ["out.jsonl"], [])
    source = Source({"out.jsonl": b"result", "out.jsonl.manifest.json": b"{}"})

    def take() -> Download:
        back = Download(folder, root, ["out.jsonl"], record, source.fetch)
        back.download_missing(source.list(), is_last=True, is_stopped=lambda: False)
        return back

    # As it was at the start it may be replaced.
    assert take().conflicts == []
    assert (root / "out.jsonl").read_bytes() == b"result"
    (root / "out.jsonl").write_bytes(b"edited by hand")
    assert take().conflicts == ["out.jsonl"]
    assert (root / "out.jsonl").read_bytes() == b"edited by hand"
    assert (folder.path / "brought_back/out.jsonl").read_bytes() == b"result"
    # Also for a follower that comes later.
    assert take().conflicts == ["out.jsonl"]


def test_an_exported_folder_is_put_in_place_whole_and_an_older_one_file_by_file(
    folder: RunFolder,
) -> None:
    root = Path(folder.read_request().workspace)
    files = {"exports/a/model.gguf": b"0123456789", "exports/a/card.md": b"card"}
    source = Source(files, break_after=8)
    with pytest.raises(UnreachableError):
        take(folder, source, "exports/a")
    assert not (root / "exports/a").exists()
    take(folder, source, "exports/a")
    assert sorted(p.name for p in (root / "exports/a").iterdir()) == ["card.md", "model.gguf"]

    (root / "store").mkdir()
    (root / "store" / "mine").write_bytes(b"of another run")
    record = FollowRecord()
    record_outputs(record, root, ["store"], [])
    source = Source({"store/new": b"of this run"})
    back = Download(folder, root, ["store"], record, source.fetch)
    back.download_missing(source.list(), is_last=True, is_stopped=lambda: False)
    assert sorted(p.name for p in (root / "store").iterdir()) == ["mine", "new"]


def test_a_journal_that_the_run_has_deleted_is_deleted_here(folder: RunFolder) -> None:
    root = Path(folder.read_request().workspace)
    mirror = mirror_of(folder, "out.jsonl")
    (root / ".out.jsonl").mkdir()
    mirror.append_lines(AppendedLines(path=".out.jsonl/journal.jsonl", offset=0, data=b"{}\n"))
    mirror.append_lines(AppendedLines(path="out.jsonl", offset=0, data=b"{}\n"))
    bring(folder, {"out.jsonl": b"{}\n"}, outputs=["out.jsonl"], is_last=False)
    assert (root / ".out.jsonl/journal.jsonl").exists()
    bring(folder, {"out.jsonl": b"{}\n"}, outputs=["out.jsonl"])
    assert not (root / ".out.jsonl/journal.jsonl").exists()
    assert (root / "out.jsonl").read_bytes() == b"{}\n"


def test_a_machine_that_sends_more_bytes_than_it_said_is_cut_off(folder: RunFolder) -> None:
    class Endless(Source):
        def fetch(self, path: str, offset: int) -> Generator[bytes]:
            while True:
                self.sent += 1
                yield b"more"

    source = Endless({"out.jsonl": b"0123456789"})
    with pytest.raises(MachineError, match="has more bytes than its machine reported"):
        take(folder, source, "out.jsonl")
    assert source.sent == 3


@pytest.mark.parametrize("text", [b"{}", b"[" * 200_000, b'{"result": ' + b"[" * 200_000])
def test_a_state_that_cannot_be_read_changes_nothing_here(folder: RunFolder, text: bytes) -> None:
    before = folder.read()
    with pytest.raises(UnreachableError, match="box sent an invalid run state"):
        mirror_of(folder).write_state(there(before, run_json=text))
    assert folder.read() == before


def test_bringing_back_stops_in_the_middle_of_a_file(folder: RunFolder) -> None:
    source = Source({"out.jsonl": b"0123456789"})
    back = brings(folder, source, ["out.jsonl"])
    with pytest.raises(StoppedError):
        back.download_missing(source.list(), is_last=True, is_stopped=lambda: source.sent > 0)
    assert source.sent == 4


def test_a_full_disk_here_says_so_and_leaves_nothing_half(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source({"out.jsonl": b"0123456789"})
    back = brings(folder, source, ["out.jsonl"])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            back.download_missing(source.list(), is_last=True, is_stopped=lambda: False)
    root = Path(folder.read_request().workspace)
    assert not (root / "out.jsonl").exists()
    back.download_missing(source.list(), is_last=True, is_stopped=lambda: False)
    assert (root / "out.jsonl").read_bytes() == b"0123456789"


def test_what_was_sent_grows_from_where_it_is(folder: RunFolder) -> None:
    root = Path(folder.read_request().workspace)
    (root / "out.jsonl").write_bytes(b"row 1\n")
    record = FollowRecord()
    record_outputs(
        record, root, ["out.jsonl"], [PlacedFile(remote_path="workspace/out.jsonl", sha256="0")]
    )
    mirror = Mirror(folder, spec("out.jsonl"), root, record)
    assert mirror.seen == {"out.jsonl": 6}
    mirror.append_lines(AppendedLines(path="out.jsonl", offset=6, data=b"row 2\n"))
    assert (root / "out.jsonl").read_bytes() == b"row 1\nrow 2\n"
