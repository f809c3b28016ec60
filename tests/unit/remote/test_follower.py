"""The course of a run elsewhere with a machine that a test scripts, step by step."""

import hashlib
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from stillroom.errors import EngineError
from stillroom.files import read_json
from stillroom.outputs import OutputHeldError, check_unlocked
from stillroom.remote.follower import local_run
from stillroom.remote.follower.follower import Backoff, Follower
from stillroom.remote.follower.local_run import read_record, write_record
from stillroom.remote.host import (
    AccessDeniedError,
    MachineError,
    MachineGoneError,
    UnreachableError,
)
from stillroom.remote.known_machines import load_probe, save_probe
from stillroom.remote.machine import (
    Access,
    HfJobsFlavor,
    Machine,
    SkyPilotCluster,
    SshAddress,
)
from stillroom.remote.records import (
    Blob,
    JobSpec,
    LaunchRequest,
    MachineFacts,
    RemoteFile,
    RemoteFiles,
    RemoteState,
    RunUpdate,
)
from stillroom.run_folder import VIEW_FILE, NewRun, RemoteView, RunFolder, RunState, create_run
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus

SILENT = UnreachableError("box does not answer", "it is retried")
GONE = MachineGoneError("box was taken back", "take another")
FULL = MachineError("its disk is full", "free some space there")
DENIED = AccessDeniedError("no access to keys.yml", "give it access")

SSH: dict[str, Access] = {"ssh": SshAddress(host="b")}
SKY: dict[str, Access] = {"skypilot": SkyPilotCluster(resources={})}
JOB: dict[str, Access] = {"hf_jobs": HfJobsFlavor(flavor="a10g-large")}


@dataclass
class ScriptedHost:
    """A machine that answers each call with the next of what a test gives for it, then well."""

    answers: dict[str, list[Exception]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    price: float | None = None
    status: RunStatus = RunStatus.SUCCEEDED
    on_call: Callable[[str], None] = lambda _: None
    started: list[LaunchRequest] = field(default_factory=list)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        self.on_call(name)
        if self.answers.get(name):
            raise self.answers[name].pop(0)

    def provision(self) -> None:
        self._call("provision")

    def price_per_hour(self) -> float | None:
        return self.price

    def facts(self) -> MachineFacts:
        raise FULL

    def prepare(self, spec: JobSpec, report: Callable[[str], None]) -> None:
        self._call("prepare")

    def missing(self, blobs: Sequence[Blob]) -> dict[str, int]:
        self._call("missing")
        return {}

    def send(self, blobs: Sequence[Blob], have: Mapping[str, int]) -> Iterator[int]:
        raise AssertionError("nothing is missing")

    def start(self, run: LaunchRequest) -> None:
        self.started.append(run)
        self._call("start")

    def follow(self, run_id: str, seen: Mapping[str, int]) -> Generator[RunUpdate]:
        self._call("follow")
        state = RunState(
            run_id=run_id, kind=RunKind.SFT, status=self.status, created_at="2026-11-20T10:00:00Z"
        )
        yield RemoteState(
            run_json=msgspec.json.encode(state), elapsed_s=36.0, root="/there", clock=time.time()
        )
        yield RemoteFiles(files=[], is_last=True)

    def fetch(self, run_id: str, path: str, offset: int) -> Generator[bytes]:
        raise AssertionError("there are no files")

    def cancel(self, run_id: str, *, kill: bool) -> None:
        self._call("cancel")

    def remove(self, run_id: str) -> None:
        self._call("remove")

    def release(self) -> None:
        self._call("release")

    def close(self) -> None:
        self.calls.append("close")


WHOLE = ["provision", "prepare", "missing", "start", "follow", "remove", "release", "close"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create_run(Workspace(tmp_path), RunKind.SFT, {}, NewRun(notes=["a note"]))


def follow(
    folder: RunFolder,
    host: ScriptedHost,
    *,
    access: dict[str, Access] = SSH,
    sleep: Callable[[float], None] = lambda _: None,
    **spec: object,
) -> RunState:
    """Follows the run to its end, without waits."""
    machine = Machine(name="box", max_hours=2.0, **access)
    wanted = JobSpec(machine=machine, files=[], home_paths=[], **spec)
    clock = iter(range(0, 10**9, 600))
    follower = Follower(
        folder,
        wanted,
        host,  # type: ignore[arg-type]
        {},
        sleep=sleep,
        clock=lambda: next(clock),
        backoff=Backoff(max_s=0.0),
    )
    follower.run()
    return folder.read()


def view(folder: RunFolder) -> RemoteView:
    return read_json(folder.path / VIEW_FILE, RemoteView)


def test_each_step_is_taken_once(folder: RunFolder) -> None:
    host = ScriptedHost()
    assert follow(folder, host).status is RunStatus.SUCCEEDED
    assert host.calls == WHOLE
    assert host.started[0].notes == ["a note"]


def test_an_output_may_be_written_again_while_the_machine_is_cleaned_up(
    folder: RunFolder, tmp_path: Path
) -> None:
    refused: list[OutputHeldError] = []

    class Cleaned(ScriptedHost):
        def remove(self, run_id: str) -> None:
            try:
                check_unlocked(tmp_path / "out.jsonl")
            except OutputHeldError as error:
                refused.append(error)
            super().remove(run_id)

    host = Cleaned()
    assert follow(folder, host, outputs=["out.jsonl"]).status is RunStatus.SUCCEEDED
    assert refused == []
    assert host.calls == WHOLE
    assert view(folder).phase == "over"


@pytest.mark.parametrize("step", ["provision", "prepare", "missing", "start", "follow", "remove"])
def test_a_step_that_could_not_reach_the_machine_is_taken_again(
    folder: RunFolder, step: str
) -> None:
    host = ScriptedHost({step: [SILENT, SILENT, SILENT]})
    assert follow(folder, host).status is RunStatus.SUCCEEDED
    assert host.calls.count(step) == 4
    # From the start's confirmation on, nothing of what was before is done again.
    assert host.calls.count("provision") == (1 if step in ("follow", "remove") else 4)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("provision", FULL),
        ("prepare", FULL),
        ("missing", FULL),
        ("start", GONE),
        ("start", DENIED),
    ],
)
def test_what_waiting_does_not_fix_ends_a_run_that_has_not_begun(
    folder: RunFolder, step: str, error: EngineError
) -> None:
    host = ScriptedHost({step: [error]})
    state = follow(folder, host)
    assert state.status is RunStatus.FAILED
    assert state.error is not None
    assert error.problem in state.error.problem
    assert error.fix in state.error.fix
    assert host.calls[-2:] == ["release", "close"]


@pytest.mark.parametrize("step", ["start", "follow"])
def test_what_a_user_has_to_mend_is_no_end_of_a_run_that_may_have_begun(
    folder: RunFolder, step: str
) -> None:
    seen: list[tuple[RunStatus, str | None]] = []
    host = ScriptedHost({step: [FULL, FULL]})
    host.on_call = lambda name: (
        seen.append((folder.read().status, view(folder).problem)) if name == step else None
    )
    assert follow(folder, host).status is RunStatus.SUCCEEDED
    assert {status for status, _ in seen} == {RunStatus.STARTING}
    assert seen[-1][1] == str(FULL)
    assert view(folder).problem is None


def test_a_machine_that_was_taken_back_leaves_the_run_to_go_on_elsewhere(
    folder: RunFolder,
) -> None:
    checkpoint = folder.path / "checkpoints" / "step_000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / "training_state.json").write_text("{}")
    state = follow(folder, ScriptedHost({"follow": [GONE]}), access=SKY)
    assert state.status is RunStatus.INTERRUPTED
    assert state.error is not None
    assert f"start_training(resume={folder.run_id}) resumes at step_000003" in state.error.fix


@pytest.mark.parametrize("error", [SILENT, GONE, FULL])
def test_a_machine_of_ours_is_put_down_although_nothing_can_be_removed_there(
    folder: RunFolder, error: Exception
) -> None:
    host = ScriptedHost({"remove": [error], "release": [SILENT]})
    assert follow(folder, host, access=SKY).status is RunStatus.SUCCEEDED
    assert host.calls[-5:] == ["remove", "release", "remove", "release", "close"]


def test_a_machine_that_never_answers_again_has_stopped_the_run_by_itself(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = ScriptedHost({"follow": [SILENT] * 99, "remove": [GONE]})
    now = time.time
    # Three and a half hours pass, of which the run may take two.
    host.on_call = lambda name: (
        monkeypatch.setattr(time, "time", lambda: now() + 3.5 * 3600) if name == "follow" else None
    )
    state = follow(folder, host)
    assert state.status is RunStatus.INTERRUPTED
    assert state.error is not None
    assert "box has not answered for 4 hours" in state.error.problem
    # It was tried for an hour at least, as the clock here may have been set.
    assert host.calls.count("follow") >= 6


def test_a_cancel_that_comes_while_a_step_is_taken_stops_before_the_next(
    folder: RunFolder,
) -> None:
    for step in ("provision", "prepare", "missing"):
        host = ScriptedHost()
        folder = create_run(Workspace(folder.path.parents[1]), RunKind.SFT, {})
        host.on_call = lambda name, folder=folder, step=step: (
            folder.ask_to_cancel() if name == step else None
        )
        assert follow(folder, host).status is RunStatus.CANCELLED
        assert "start" not in host.calls
        assert "release" in host.calls


def test_a_start_that_never_arrived_is_cancelled_without_one(folder: RunFolder) -> None:
    host = ScriptedHost({"start": [SILENT], "follow": [GONE]})
    host.on_call = lambda name: folder.ask_to_cancel() if name == "start" else None
    assert follow(folder, host).status is RunStatus.CANCELLED
    assert host.calls.count("start") == 1


def test_a_run_that_somebody_deletes_here_is_ended_there(folder: RunFolder) -> None:
    host = ScriptedHost({"cancel": [SILENT], "remove": [GONE]})
    host.on_call = lambda name: shutil.rmtree(folder.path) if name == "follow" else None
    with pytest.raises(FileNotFoundError):
        follow(folder, host, access=SKY)
    assert host.calls[-5:] == ["cancel", "cancel", "remove", "release", "close"]
    assert not folder.path.exists()


def test_what_the_machine_cost_before_the_start_counts(folder: RunFolder) -> None:
    record = read_record(folder)
    record.used_since = time.time() - 1800
    write_record(folder, record)
    host = ScriptedHost(price=4.0)
    assert follow(folder, host, budget_usd=10.0).status is RunStatus.SUCCEEDED
    assert host.started[0].spent_usd == pytest.approx(2.0, abs=0.01)
    assert host.started[0].price_per_hour == 4.0
    # Half an hour, and the 36 s that the machine says: $2.04.
    assert view(folder).machine_usd == pytest.approx(2.04, abs=0.02)


def test_a_budget_that_the_way_there_has_used_up_starts_nothing(folder: RunFolder) -> None:
    record = read_record(folder)
    record.used_since = time.time() - 3600
    write_record(folder, record)
    host = ScriptedHost(price=4.0)
    state = follow(folder, host, budget_usd=3.0)
    assert state.status is RunStatus.FAILED
    assert state.error is not None
    assert "cost $4.00 before the run started" in state.error.problem
    assert host.started == []


def test_a_fault_of_ours_is_shown_and_changes_nothing_of_what_is_true(folder: RunFolder) -> None:
    host = ScriptedHost({"follow": [KeyError("lamp")]})
    assert follow(folder, host).status is RunStatus.SUCCEEDED
    assert host.calls.count("follow") == 2


def test_waits_between_tries_grow_and_end_after_a_connection_that_held() -> None:
    backoff = Backoff(draw=lambda: 1.0)
    waits = [backoff.next_s() for _ in range(62)]
    assert waits[:5] == [1, 2, 4, 5, 5]
    assert waits[59:] == [5, 30, 30]
    backoff.record_connected(12.0)
    assert [backoff.next_s() for _ in range(3)] == [0, 1, 2]
    backoff.record_connected(3.0)
    assert backoff.next_s() == 4
    assert 0.5 <= Backoff().next_s() <= 1.0


def test_waits_between_tries_do_not_grow_without_end() -> None:
    backoff = Backoff(draw=lambda: 1.0)
    assert [backoff.next_s() for _ in range(1100)][-1] == 30


def test_a_budget_needs_a_price(folder: RunFolder) -> None:
    host = ScriptedHost()
    state = follow(folder, host, access=SKY, budget_usd=5.0)
    assert state.error is not None
    assert "lists no price" in state.error.problem
    assert "price_per_hour" in state.error.fix
    assert host.calls == ["provision", "release", "close"]


def test_a_job_costs_nothing_before_its_run_is_started(folder: RunFolder) -> None:
    follow(folder, ScriptedHost({"start": [GONE]}, price=2.0), access=JOB)
    assert read_record(folder).used_since is None
    assert view(folder).machine_usd == 0


def test_a_cluster_costs_from_the_moment_it_is_requested(folder: RunFolder) -> None:
    seen: list[float | None] = []
    host = ScriptedHost({"start": [GONE]})
    # What it has cost by now is known to whoever follows the run next.
    host.on_call = lambda _: seen.append(read_record(folder).used_since)
    follow(folder, host, access=SKY)
    assert host.calls[0] == "provision"
    assert seen[0] is not None


@pytest.mark.parametrize("step", ["provision", "prepare"])
def test_the_meter_moves_while_a_machine_is_provisioned_and_installs(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    now, minutes = time.time, iter(range(1, 1000))
    seen: list[float] = []
    contacts: list[str | None] = []

    class Installing(ScriptedHost):
        def prepare(self, spec: JobSpec, report: Callable[[str], None]) -> None:
            for _ in range(3 * (step == "prepare")):
                a_minute_passes()
                report("")

    def a_minute_passes() -> None:
        seen.append(view(folder).machine_usd or 0.0)
        contacts.append(view(folder).last_contact)
        passed_s = 60.0 * next(minutes)
        monkeypatch.setattr(time, "time", lambda: now() + passed_s)

    monkeypatch.setattr(local_run, "_WRITE_VIEW_EVERY_S", 0.0)
    monkeypatch.setattr(local_run, "now", lambda: f"{time.time():.3f}")
    record = read_record(folder)
    record.price_per_hour = 6.0
    write_record(folder, record)
    host = Installing({"provision": [SILENT] * 3 if step == "provision" else []}, price=6.0)
    host.on_call = lambda name: (
        a_minute_passes() if name == step == "provision" and host.calls != ["provision"] else None
    )
    follow(folder, host, access=SKY)
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert len(steps) >= 2
    # Six dollars an hour are ten cents a minute.
    assert steps == pytest.approx([0.1] * len(steps), abs=0.01)
    # Each word of an installation is a contact; a cluster that does not come up gives none.
    assert len(set(contacts)) == (len(contacts) if step == "prepare" else 1)


@pytest.mark.parametrize("has_answered", [False, True])
def test_the_meter_moves_while_the_machine_of_a_run_does_not_answer(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, has_answered: bool
) -> None:
    wall, monotonic, passed_s = time.time, time.monotonic, [0.0]
    seen: list[RemoteView] = []

    class Silent(ScriptedHost):
        def follow(self, run_id: str, seen: Mapping[str, int]) -> Generator[RunUpdate]:
            if has_answered and "follow" not in self.calls:
                state = msgspec.structs.replace(folder.read(), status=RunStatus.RUNNING)
                yield RemoteState(
                    run_json=msgspec.json.encode(state), elapsed_s=36.0, root="/there", clock=wall()
                )
            yield from super().follow(run_id, seen)

    def an_hour_passes(name: str) -> None:
        if name == "follow":
            seen.append(view(folder))
            passed_s[0] += 3600.0

    monkeypatch.setattr(time, "time", lambda: wall() + passed_s[0])
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed_s[0])
    host = Silent({"follow": [SILENT] * 4}, price=6.0)
    host.on_call = an_hour_passes

    follow(folder, host)

    assert [one.problem for one in seen] == [None, *[str(SILENT)] * 4]
    assert len({one.last_contact for one in seen}) == 1
    costs = [one.machine_usd or 0.0 for one in seen[1:]]
    steps = [after - before for before, after in itertools.pairwise(costs)]
    assert steps == pytest.approx([6.0] * 3, abs=0.01)
    # The machine's own clock replaces the estimate: 36 s, and what preparing took.
    assert view(folder).machine_usd == pytest.approx(0.06, abs=0.02)


@pytest.mark.parametrize(("access", "is_rented"), [(SSH, False), (SKY, True)])
def test_the_cost_of_a_run_stands_still_once_it_has_ended_on_its_machine(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    access: dict[str, Access],
    is_rented: bool,
) -> None:
    wall, monotonic, passed_s = time.time, time.monotonic, [0.0]
    seen: list[RemoteView] = []

    def an_hour_passes(name: str) -> None:
        if name in ("remove", "release"):
            seen.append(view(folder))
            passed_s[0] += 3600.0

    monkeypatch.setattr(time, "time", lambda: wall() + passed_s[0])
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed_s[0])
    record = read_record(folder)
    record.price_per_hour = 6.0
    write_record(folder, record)
    host = ScriptedHost({"remove": [SILENT]}, price=6.0)
    host.on_call = an_hour_passes

    follow(folder, host, access=access)

    # 36 s at $6 an hour, and what preparing took.
    last = view(folder)
    assert len(seen) == 4
    assert {one.machine_usd for one in seen} == {last.machine_usd}
    assert last.machine_usd == pytest.approx(0.06, abs=0.02)
    if is_rented:
        assert last.release_usd == pytest.approx(4 * 6.0, abs=0.1)
    else:
        assert last.release_usd is None


@pytest.mark.parametrize(("known", "is_asked"), [(None, True), ("", True), ("0.1.0", False)])
def test_a_machine_that_had_nothing_installed_is_looked_at_again_once_it_has(
    folder: RunFolder, known: str | None, is_asked: bool
) -> None:
    machine = Machine(name="box", max_hours=2.0, **SSH)
    workspace = Workspace(folder.path.parents[1])
    before = MachineFacts(system="Linux", num_processors=4, stillroom_version=known or None)
    if known is not None:
        save_probe(workspace, machine, before, None)

    class Installed(ScriptedHost):
        def facts(self) -> MachineFacts:
            self.calls.append("facts")
            return MachineFacts(system="Linux", num_processors=4, stillroom_version="0.1.0")

    host = Installed()
    follow(folder, host)

    assert ("facts" in host.calls) == is_asked
    found = load_probe(workspace, machine)
    assert found is not None
    assert found.facts.stillroom_version == "0.1.0"


def test_a_download_that_stalls_is_no_contact_with_the_machine(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "_WRITE_VIEW_EVERY_S", 0.0)
    data = b"some notes"
    path = f"runs/{folder.run_id}/notes.md"
    file = RemoteFile(path=path, sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
    is_begun, is_stalled, is_resumed = threading.Event(), threading.Event(), threading.Event()
    contacts: list[float | None] = []

    class Stalling(ScriptedHost):
        def follow(self, run_id: str, seen: Mapping[str, int]) -> Generator[RunUpdate]:
            state, _ = super().follow(run_id, seen)
            yield state
            yield RemoteFiles(files=[file], is_last=True)

        def fetch(self, run_id: str, path: str, offset: int) -> Generator[bytes]:
            assert is_begun.wait(60.0)
            yield data[:4]
            is_stalled.set()
            assert is_resumed.wait(60.0)
            yield data[4:]

    def sleep(_seconds: float) -> None:
        time.sleep(0.001)
        is_begun.set()
        if is_stalled.is_set():
            contacts.append(read_record(folder).contact_at)
        if len(contacts) == 20:
            is_resumed.set()

    assert follow(folder, Stalling(), sleep=sleep).status is RunStatus.SUCCEEDED
    # The bytes that came before it stalled are one contact.
    assert len(set(contacts[:20])) <= 2
