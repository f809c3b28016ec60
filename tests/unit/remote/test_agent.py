"""What the program on the other machine does for a run: start it once, tell of it, delete it."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from stillroom.errors import EngineError
from stillroom.files import file_sha256
from stillroom.models import hash_cache
from stillroom.models.gguf.folder import cache_folder, more_space_fix
from stillroom.remote.agent import lifecycle, output_files
from stillroom.remote.agent.follow import follow
from stillroom.remote.agent.output_files import AppendedFiles, FinishedFiles, fetch
from stillroom.remote.agent.runs import AgentRun, StartRecord, agent_run
from stillroom.remote.agent.store import AgentFolder
from stillroom.remote.host import MachineGoneError
from stillroom.remote.records import (
    AppendedLines,
    CancelRequest,
    FetchRequest,
    FollowRequest,
    LaunchRequest,
    PathMapping,
    PlacedFile,
    RemoteFiles,
    RemoteState,
)
from stillroom.run_folder import FixedInput, RunRequest, RunState
from stillroom.teachers.run_limits import read_limits
from stillroom.types import RunKind, RunStatus

RUN = "score-abc"


@pytest.fixture
def there(tmp_path: Path) -> AgentFolder:
    root = tmp_path / "there"
    (root / "store").mkdir(parents=True)
    return AgentFolder(root)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the runs whose process would be started."""
    launched: list[Path] = []

    def launch(folder, workspace, **_: object) -> None:
        launched.append(folder.path)
        time.sleep(0.05)

    monkeypatch.setattr(lifecycle, "launch_run", launch)
    monkeypatch.setattr(os, "environ", {**os.environ})
    return launched


def started(there: AgentFolder, tmp_path: Path, **changes: object) -> LaunchRequest:
    source = tmp_path / "rows.jsonl"
    source.write_text("{}\n")
    sha256 = file_sha256(source)
    shutil.copy(source, there.store / sha256)
    request = RunRequest(
        kind=RunKind.SCORE,
        workspace="/home/me/project",
        request={"input": "/elsewhere/rows.jsonl"},
        inputs=[FixedInput(path="/elsewhere/rows.jsonl", stamp="home")],
    )
    run = LaunchRequest(
        run_id=RUN,
        files=[PlacedFile(remote_path="outside/0/rows.jsonl", sha256=sha256)],
        home_paths=[
            PathMapping(home_path="/elsewhere/rows.jsonl", remote_path="outside/0/rows.jsonl")
        ],
        home_root="/home/me/project",
        request=msgspec.json.encode(request),
        outputs=["out.jsonl"],
        max_hours=2.0,
        price_per_hour=3.0,
        budget_usd=5.0,
        spent_usd=0.5,
    )
    return msgspec.structs.replace(run, **changes)


def write_state(place: AgentRun, status: RunStatus) -> None:
    state = RunState(
        run_id=RUN, kind=RunKind.SCORE, status=status, created_at="2026-11-20T10:00:00Z"
    )
    place.folder.write(state)


def test_a_start_that_is_wished_for_by_many_at_once_starts_once(
    there: AgentFolder, tmp_path: Path, launches: list[Path]
) -> None:
    run = started(there, tmp_path)
    place = agent_run(there, RUN)

    def launch_and_begin(_: int) -> None:
        lifecycle.start(there, run)

    original = lifecycle.launch_run

    def launch(folder, workspace, **more: object) -> None:
        original(folder, workspace, **more)
        write_state(place, RunStatus.RUNNING)

    lifecycle.launch_run = launch
    try:
        with ThreadPoolExecutor(6) as callers:
            list(callers.map(launch_and_begin, range(6)))
    finally:
        lifecycle.launch_run = original
    assert launches == [place.folder.path]


def test_what_runs_convert_stays_in_the_machines_folder(
    there: AgentFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[dict[str, str]] = []
    monkeypatch.setattr(
        lifecycle, "launch_run", lambda *_, environment, **__: environments.append(environment)
    )
    monkeypatch.setattr(os, "environ", {**os.environ})
    lifecycle.start(there, started(there, tmp_path))

    [environment] = environments
    monkeypatch.setattr(os, "environ", environment)
    assert cache_folder().is_relative_to(there.root)
    assert "`folder:` in machines.yml" in more_space_fix()


def test_a_start_that_was_killed_before_the_process_began_is_finished_by_the_next(
    there: AgentFolder, tmp_path: Path, launches: list[Path]
) -> None:
    run = started(there, tmp_path)
    place = agent_run(there, RUN)
    place.base.mkdir(parents=True)
    (place.base / "outside" / "0").mkdir(parents=True)
    (place.base / "outside" / "0" / "rows.jsonl").write_text("half")
    lifecycle.start(there, run)
    assert (place.base / "outside/0/rows.jsonl").read_text() == "{}\n"
    # It was killed once more, with the run's folder written and no process begun.
    lifecycle.start(there, run)
    assert len(launches) == 2
    # While a process of it lives it holds the lock.
    keeper = place.keeper_lock()
    assert keeper.try_acquire()
    lifecycle.start(there, run)
    keeper.release()
    # Once it has begun it is never started again, however it ended.
    write_state(place, RunStatus.INTERRUPTED)
    lifecycle.start(there, run)
    assert len(launches) == 2


def test_the_request_there_names_the_workspace_there_and_the_same_files(
    there: AgentFolder, tmp_path: Path, launches: list[Path]
) -> None:
    lifecycle.start(there, started(there, tmp_path, run_files={"given_config.yml": b"a: 1\n"}))
    place = agent_run(there, RUN)
    request = place.folder.read_request()
    assert request.workspace == str(place.workspace)
    assert [each.path for each in request.inputs] == [str(place.base / "outside/0/rows.jsonl")]
    # The call's own words stay: they are recorded.
    assert request.request == {"input": "/elsewhere/rows.jsonl"}
    place.folder.check_inputs()
    assert (place.folder.path / "given_config.yml").read_bytes() == b"a: 1\n"
    limits = read_limits(place.folder.path)
    assert limits is not None
    assert (limits.hours, limits.budget_usd, limits.spent_usd) == (2.0, 5.0, 0.5)


@pytest.mark.parametrize("place", ["../up", "/etc/passwd", "workspace/../../x", "elsewhere/x"])
def test_nothing_is_placed_outside_of_the_runs_folder(
    there: AgentFolder, tmp_path: Path, launches: list[Path], place: str
) -> None:
    run = started(there, tmp_path)
    file = msgspec.structs.replace(run.files[0], remote_path=place)
    with pytest.raises(EngineError, match="which is in neither workspace"):
        lifecycle.start(there, msgspec.structs.replace(run, files=[file]))
    assert launches == []


@pytest.fixture
def place(there: AgentFolder) -> AgentRun:
    """A run that has begun, with an empty folder."""
    place = agent_run(there, RUN)
    place.folder.path.mkdir(parents=True)
    write_state(place, RunStatus.RUNNING)
    return place


def grown(files: AppendedFiles, *, is_last: bool = False) -> list[tuple[str, int, bytes]]:
    return [(g.path.rpartition("/")[2], g.offset, g.data) for g in files.updates(is_last=is_last)]


def test_only_whole_lines_are_told_and_each_once(place: AgentRun) -> None:
    files = AppendedFiles(place, {}, ["out.jsonl"])
    events = place.folder.events
    events.write_bytes(b"one\ntw")
    assert grown(files) == [("events.jsonl", 0, b"one\n")]
    assert grown(files) == []
    with events.open("ab") as stream:
        stream.write(b"o\nthree")
    assert grown(files) == [("events.jsonl", 4, b"two\n")]
    # A torn line of events is never told, the end of a log is.
    place.folder.log.write_bytes(b"log\nrest")
    assert grown(files, is_last=True) == [("log.txt", 0, b"log\n"), ("log.txt", 4, b"rest")]


def test_a_log_that_was_cut_anew_is_told_anew_even_to_a_later_connection(place: AgentRun) -> None:
    path = f"runs/{RUN}/log.txt"
    place.folder.log.write_bytes(b"first line\nsecond line\n")
    grown(AppendedFiles(place, {}, []))
    shorter = place.folder.path / ".log.txt.shorter"
    shorter.write_bytes(b"first\n[left out]\nand more than before\n")
    shorter.replace(place.folder.log)
    later = AppendedFiles(place, {path: 23}, [])
    assert grown(later) == [
        ("log.txt", 0, b""),
        ("log.txt", 0, b"first\n[left out]\nand more than before\n"),
    ]


def test_rows_and_their_journal_are_told_as_they_are_written(place: AgentRun) -> None:
    (place.workspace / ".out.jsonl").mkdir()
    (place.workspace / ".out.jsonl" / "settings.json").write_text("{}")
    (place.workspace / ".out.jsonl" / "journal.jsonl").write_text("{}\n")
    (place.workspace / "out.jsonl").write_text("{}\n{}\n")
    # They were sent with two rows, of which the first is known.
    files = AppendedFiles(place, {"out.jsonl": 3}, ["out.jsonl"])
    assert grown(files) == [("journal.jsonl", 0, b"{}\n"), ("out.jsonl", 3, b"{}\n")]


def listed(place: AgentRun, *, is_last: bool, **known: object) -> list[str]:
    finished = FinishedFiles(place, StartRecord(started_at=0.0, outputs=["out.jsonl"], **known))
    news = [each for each in finished.updates(is_last=is_last) if isinstance(each, RemoteFiles)]
    prefix = f"runs/{RUN}/"
    return [file.path.removeprefix(prefix) for each in news for file in each.files]


def test_checkpoints_are_told_whole_and_what_is_being_written_is_not(place: AgentRun) -> None:
    checkpoints = place.folder.path / "checkpoints"
    for name in ("step_000001", ".step_000002.partial", ".step_000000.going"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "model.safetensors").write_bytes(b"weights")
    (place.folder.path / "config.json").write_text("{}")
    (place.folder.path / "owner.lock").touch()
    (place.folder.path / "failures.jsonl").write_text("{}\n")
    (place.workspace / "out.jsonl").write_text("{}\n")
    during = ["checkpoints/step_000001/model.safetensors", "config.json"]
    assert listed(place, is_last=False) == during
    assert sorted(listed(place, is_last=True)) == [*during, "failures.jsonl", "out.jsonl"]


def test_the_answers_of_an_evaluation_that_did_not_finish_are_told_at_its_end(
    place: AgentRun,
) -> None:
    answers = ["answers-1/.main.jsonl/settings.json", "answers-1/main.jsonl"]
    for name in answers:
        (place.folder.path / name).parent.mkdir(exist_ok=True, parents=True)
        (place.folder.path / name).write_text("{}\n")
    assert listed(place, is_last=False) == []
    assert sorted(listed(place, is_last=True)) == answers


def test_what_was_sent_and_only_looks_like_an_output_is_not_told(place: AgentRun) -> None:
    (place.workspace / "out.yml").write_text("sent")
    (place.workspace / "out.jsonl").write_text("{}\n")
    placed = {"out.yml": file_sha256(place.workspace / "out.yml")}
    assert listed(place, is_last=True, placed=placed) == ["out.jsonl"]


def test_a_run_is_told_of_although_its_disk_is_full(
    there: AgentFolder, place: AgentRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.start_file.write_bytes(msgspec.json.encode(StartRecord(started_at=time.monotonic())))
    write_state(place, RunStatus.FAILED)
    place.folder.log.write_text("no space left on the disk\n")
    (place.folder.path / "config.json").write_text("{}")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_files, "write_json", full)
    monkeypatch.setattr(hash_cache, "write_json", full)
    news = list(follow(there, FollowRequest(RUN, {}), sleep=lambda _: None))
    assert [type(each) for each in news] == [RemoteState, AppendedLines, RemoteFiles]


def test_a_run_that_is_not_there_is_gone(there: AgentFolder) -> None:
    with pytest.raises(MachineGoneError, match="there is no run"):
        list(follow(there, FollowRequest(RUN, {})))
    with pytest.raises(MachineGoneError):
        lifecycle.cancel(there, CancelRequest(RUN))
    lifecycle.remove(there, RUN)


@pytest.mark.parametrize("path", ["../../secret", "/etc/passwd", "link", "gone"])
def test_no_file_outside_of_the_runs_workspace_is_read(
    there: AgentFolder, place: AgentRun, tmp_path: Path, path: str
) -> None:
    (place.workspace / "link").symlink_to(tmp_path)
    with pytest.raises(EngineError, match="no longer exists"):
        list(fetch(there, FetchRequest(RUN, path)))


def test_a_file_is_read_from_where_it_broke_off(there: AgentFolder, place: AgentRun) -> None:
    (place.workspace / "out.jsonl").write_bytes(b"0123456789")
    assert b"".join(fetch(there, FetchRequest(RUN, "out.jsonl", 4))) == b"456789"


def test_removing_a_run_leaves_nothing_of_it(there: AgentFolder, place: AgentRun) -> None:
    lifecycle.remove(there, RUN)
    assert list(there.runs.iterdir()) == []


@pytest.mark.parametrize(
    ("ended_at", "elapsed_s"), [("1970-01-01T01:06:40Z", 40.0), (None, 100.0), ("soon", 100.0)]
)
def test_the_time_of_a_run_that_has_ended_is_that_until_its_end(
    there: AgentFolder,
    place: AgentRun,
    monkeypatch: pytest.MonkeyPatch,
    ended_at: str | None,
    elapsed_s: float,
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 500.0)
    monkeypatch.setattr(time, "time", lambda: 4060.0)
    place.start_file.write_bytes(msgspec.json.encode(StartRecord(started_at=400.0)))
    write_state(place, RunStatus.SUCCEEDED)
    place.folder.write(msgspec.structs.replace(place.folder.read(), ended_at=ended_at))

    state, *_ = follow(there, FollowRequest(RUN, {}), sleep=lambda _: None)

    assert isinstance(state, RemoteState)
    assert state.elapsed_s == elapsed_s
