"""A run in a job of Hugging Face: all of it comes over a bucket, and no job stays up."""

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fakes.hub import FLAVOR, PRICE, ScriptedHub, refusal
from fakes.moments import KilledError, Moments
from stillroom.errors import EngineError
from stillroom.remote.host import MachineError, MachineGoneError, UnreachableError
from stillroom.remote.machine import HfJobsFlavor, Machine
from stillroom.remote.providers import hf_jobs
from stillroom.remote.providers.hf_bucket import (
    BUCKET_VARIABLE,
    RUN_VARIABLE,
    SECRETS_VARIABLE,
    START_VARIABLE,
    Bucket,
    RunPaths,
    code_path,
    content_path,
)
from stillroom.remote.providers.hf_calls import time_limit
from stillroom.remote.providers.hf_job_program import JobProgram
from stillroom.remote.providers.hf_jobs import HfJobsHost, release_job
from stillroom.remote.providers.provision_log import ProvisionLog
from stillroom.remote.records import (
    AppendedLines,
    Blob,
    Heartbeat,
    JobSpec,
    LaunchRequest,
    PlacedFile,
    RemoteFile,
    RemoteFiles,
    RemoteState,
    RunUpdate,
)
from stillroom.remote.ssh.bootstrap import code_hash

MACHINE = Machine(name="hf", hf_jobs=HfJobsFlavor(flavor=FLAVOR, timeout="2h"))
ROWS = b'{"prompt": "?"}\n' * 100
CHECKPOINT = b"weights" * 50
SECRET = "sk-teacher-0123456789"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Inner:
    """The job's own machine: takes the contents, and tells what a run would."""

    def __init__(self, root: Path, news: Sequence[RunUpdate] | EngineError) -> None:
        self._root, self._news = root, news
        self.contents: dict[str, bytes] = {}
        self.started: list[LaunchRequest] = []
        self.cancelled: list[bool] = []

    def prepare(self, spec: JobSpec, report: Callable[[str], None]) -> None:
        report("installing")

    def missing(self, blobs: Sequence[Blob]) -> dict[str, int]:
        return {blob.sha256: 0 for blob in blobs if blob.sha256 not in self.contents}

    def send(self, blobs: Sequence[Blob], have: Mapping[str, int]) -> Iterator[int]:
        for blob in blobs:
            data = Path(blob.source).read_bytes()
            assert sha256(data) == blob.sha256
            self.contents[blob.sha256] = data
            yield len(data)

    def start(self, run: LaunchRequest) -> None:
        self.started.append(run)

    def follow(self, run_id: str, seen: Mapping[str, int]) -> Iterator[RunUpdate]:
        if isinstance(self._news, EngineError):
            raise self._news
        yield from self._news

    def cancel(self, run_id: str, *, kill: bool) -> None:
        self.cancelled.append(kill)

    def close(self) -> None: ...


class Life:
    """Processes of ours and jobs, with one provision log and one hub."""

    def __init__(self, tmp_path: Path) -> None:
        self.hub, self.log = ScriptedHub(), ProvisionLog(tmp_path / "state")
        # It is made once in a while, which takes a second.
        self.hub.files[f"me/stillroom-runs/{code_path(code_hash())}"] = b"code"
        self.run = tmp_path / "work" / "runs" / "sft-one"
        self.run.mkdir(parents=True)
        self.rows = tmp_path / "work" / "rows.jsonl"
        self.rows.write_bytes(ROWS)
        self.there = tmp_path / "there"
        saved = self.there / "workspace" / "out" / "checkpoint.bin"
        saved.parent.mkdir(parents=True)
        saved.write_bytes(CHECKPOINT)
        self.inner = Inner(self.there, self.news())

    def news(self) -> list[RunUpdate]:
        files = [RemoteFile(path="out/checkpoint.bin", sha256=sha256(CHECKPOINT), num_bytes=350)]
        return [
            self.state("running", 1.0),
            AppendedLines(path="runs/sft-one/log.txt", offset=0, data=b"one\n"),
            Heartbeat(),
            self.state("running", 2.0),
            RemoteFiles(files=files, is_last=False),
            AppendedLines(path="runs/sft-one/log.txt", offset=4, data=b"two\n"),
            self.state("succeeded", 3.0),
            RemoteFiles(files=files, is_last=True),
        ]

    def state(self, status: str, elapsed_s: float) -> RemoteState:
        return RemoteState(
            run_json=status.encode(), elapsed_s=elapsed_s, root=str(self.there), clock=1.0
        )

    def host(
        self, moments: Moments | None = None, *, machine: Machine = MACHINE, **keywords: Any
    ) -> HfJobsHost:
        keywords = {"token": "hf_own", "pause": self.work, **keywords}
        api = self.hub.api(moments)
        return HfJobsHost(machine, self.run, api=api, provision_log=self.log, **keywords)

    def work(self, _seconds: float = 0) -> None:
        """Lets the service do its jobs while our side waits."""
        for job in self.hub.jobs.values():
            if job.stage == "SCHEDULING":
                job.stage = "RUNNING"
                is_done = self.job(job.asked).run(lambda packages: self.inner)
                job.stage = "COMPLETED" if is_done else "ERROR"

    def job(self, asked: dict[str, Any], moments: Moments | None = None) -> JobProgram:
        variables = asked["env"]
        return JobProgram(
            Bucket(self.hub.api(moments), variables[BUCKET_VARIABLE]),
            variables[RUN_VARIABLE],
            start=variables[START_VARIABLE],
            secrets=msgspec.json.decode(asked["secrets"][SECRETS_VARIABLE]),
            pause=lambda seconds: None,
            post_every_s=0.05,
        )

    def spec(self) -> JobSpec:
        return JobSpec(machine=MACHINE, files=[], home_paths=[])

    def start_of(self, **keywords: Any) -> LaunchRequest:
        file = PlacedFile(remote_path="workspace/rows.jsonl", sha256=sha256(ROWS))
        keywords = {"max_hours": 1.0, "secrets": {"KEY": SECRET}, **keywords}
        return LaunchRequest(
            run_id=self.run.name,
            files=[file],
            home_paths=[],
            home_root="/home",
            request=b"{}",
            **keywords,
        )

    def sending(self, host: HfJobsHost) -> int:
        blobs = [Blob(sha256=sha256(ROWS), num_bytes=len(ROWS), source=str(self.rows))]
        missing = host.missing(blobs)
        return sum(host.send([blob for blob in blobs if blob.sha256 in missing], missing))

    def until_started(self, host: HfJobsHost) -> None:
        host.provision()
        host.prepare(self.spec(), lambda text: None)
        self.sending(host)
        host.start(self.start_of())

    def whole_run(self, moments: Moments | None = None) -> list[RunUpdate]:
        """Does what a run's follower does with its machine."""
        host = self.host(moments)
        self.until_started(host)
        told = list(host.follow(self.run.name, {}))
        brought = b"".join(host.fetch(self.run.name, "out/checkpoint.bin", 0))
        assert brought == CHECKPOINT
        host.remove(self.run.name)
        host.release()
        host.close()
        return told


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


def growth(news: Sequence[RunUpdate]) -> bytes:
    return b"".join(each.data for each in news if isinstance(each, AppendedLines))


def states(news: Sequence[RunUpdate]) -> list[bytes]:
    return [each.run_json for each in news if isinstance(each, RemoteState)]


def test_a_run_goes_through_a_job_and_all_of_it_comes_back(life):
    life.hub.files.clear()
    told = life.whole_run()
    assert states(told)[-1] == b"succeeded"
    assert growth(told) == b"one\ntwo\n"
    assert told[-1] == RemoteFiles(files=life.news()[-1].files, is_last=True)
    (run,) = life.inner.started
    assert run.secrets == {"KEY": SECRET}
    assert life.inner.contents == {sha256(ROWS): ROWS}


def test_nothing_of_a_run_that_is_here_stays_in_the_bucket_but_its_inputs(life):
    life.whole_run()
    left = sorted(path.split("/", 2)[2] for path in life.hub.files)
    assert [name.partition("/")[0] for name in left] == ["code", "store"]
    assert left[1] == f"store/{sha256(ROWS)}"


def files_of_runs(life: Life) -> list[str]:
    return sorted(path.split("/", 2)[2] for path in life.hub.files if "/runs/" in path)


def test_a_job_whose_run_is_removed_ends_before_and_writes_no_more(life):
    host = life.host()
    life.until_started(host)
    (job,) = life.hub.jobs.values()
    job.stage = "RUNNING"
    # Another run, whose id begins with that of this one.
    life.hub.files["me/stillroom-runs/runs/sft-one-2/claim"] = b"other"

    host.cancel(life.run.name, kill=True)
    host.remove(life.run.name)

    assert job.stage == "CANCELED"
    assert life.hub.calls.index("cancel_job") < life.hub.calls.index("list_bucket_tree")
    assert files_of_runs(life) == ["runs/sft-one-2/claim"]


def test_the_bucket_keeps_nothing_of_a_run_that_was_deleted_here(life, monkeypatch):
    monkeypatch.setattr(hf_jobs, "_api_and_token", lambda run: (life.hub.api(), "hf_own"))
    life.until_started(life.host())
    life.work()
    (entry,) = life.log.entries()
    release_job(entry, life.log)
    assert "runs/sft-one/claim" in files_of_runs(life)

    shutil.rmtree(life.run)
    release_job(entry, life.log)

    assert files_of_runs(life) == []
    assert not life.log.entries()


def test_checkpoints_that_a_run_deletes_do_not_stay_in_the_bucket(life):
    old, kept = (RemoteFile(path=f"out/{data.decode()}.bin", sha256=sha256(data), num_bytes=3)
                 for data in (b"old", b"new"))  # fmt: skip
    never = RemoteFile(path="out/gone.bin", sha256=sha256(b"gone"), num_bytes=4)
    for file in (old, kept):
        (life.there / "workspace" / file.path).write_bytes(Path(file.path).stem.encode())
    lists = [[old, never], [old, kept], [kept]]
    life.inner = Inner(
        life.there,
        [life.state("running", 1.0), *(RemoteFiles(files=each, is_last=False) for each in lists)],
    )
    host = life.host()
    life.until_started(host)
    (job,) = life.hub.jobs.values()
    job.stage = "RUNNING"
    told = []

    def post(news):
        told.extend(each for each in news if isinstance(each, RemoteFiles))
        store = [path for path in life.hub.files if "/outputs/" in path]
        named = {file.sha256 for each in told[-1:] for file in each.files}
        assert named <= {path.rpartition("/")[2] for path in store}

    side = life.job(job.asked)
    side._post = post
    # Each list on its own, as if it came ten seconds after the last.
    side._collect_batch = lambda heard: [heard.get(timeout=20)]
    assert side.run(lambda packages: life.inner)
    assert [[file.path for file in each.files] for each in told] == [
        ["out/old.bin"],
        ["out/old.bin", "out/new.bin"],
        ["out/new.bin"],
    ]
    left = {path.rpartition("/")[2] for path in life.hub.files if "/outputs/" in path}
    assert left == {kept.sha256}


def test_what_a_run_has_read_stays_also_if_it_wrote_the_same(life):
    same = RemoteFile(path="out/rows.jsonl", sha256=sha256(ROWS), num_bytes=len(ROWS))
    (life.there / "workspace" / same.path).write_bytes(ROWS)
    life.inner = Inner(
        life.there, [life.state("succeeded", 1.0), RemoteFiles(files=[same], is_last=True)]
    )
    host = life.host()
    life.until_started(host)
    list(host.follow(life.run.name, {}))
    host.remove(life.run.name)
    assert f"me/stillroom-runs/store/{sha256(ROWS)}" in life.hub.files


def test_a_run_that_begins_from_anothers_output_has_it_after_the_other_is_removed(life):
    host = life.host()
    life.until_started(host)
    list(host.follow(life.run.name, {}))
    checkpoint = life.run / "checkpoint.bin"
    checkpoint.write_bytes(CHECKPOINT)
    blob = Blob(sha256=sha256(CHECKPOINT), num_bytes=len(CHECKPOINT), source=str(checkpoint))
    other = life.host()
    missing = other.missing([blob])
    host.remove(life.run.name)
    list(other.send([blob] if missing else [], missing))
    assert other.missing([blob]) == {}


def test_a_run_that_wrote_the_same_as_another_keeps_it_after_the_other_is_removed(life):
    hosts = [life.host()]
    life.until_started(hosts[0])
    list(hosts[0].follow("sft-one", {}))
    life.run = life.run.with_name("sft-two")
    life.run.mkdir()
    hosts.append(life.host())
    life.until_started(hosts[1])
    list(hosts[1].follow("sft-two", {}))
    hosts[0].remove("sft-one")
    assert b"".join(hosts[1].fetch("sft-two", "out/checkpoint.bin", 0)) == CHECKPOINT


def test_outputs_of_a_job_that_an_earlier_version_started_are_downloaded(life, monkeypatch):
    host = life.host()
    life.until_started(host)
    with monkeypatch.context() as earlier:
        earlier.setattr(RunPaths, "output", lambda _, sha256: content_path(sha256))
        list(host.follow(life.run.name, {}))
    assert b"".join(host.fetch(life.run.name, "out/checkpoint.bin", 0)) == CHECKPOINT


def test_a_second_run_sends_no_file_again(life):
    life.whole_run()
    assert life.sending(life.host()) == 0


def test_a_job_has_the_belt_of_the_service_and_its_secrets_apart(life):
    life.whole_run()
    (job,) = life.hub.jobs.values()
    assert job.asked["timeout"] == 5400  # max_hours, and half an hour for the installation
    assert job.asked["flavor"] == FLAVOR
    assert SECRET in job.asked["secrets"][SECRETS_VARIABLE]
    rest = {key: value for key, value in job.asked.items() if key != "secrets"}
    assert SECRET not in str(rest)
    assert SECRET.encode() not in b"".join(life.hub.files.values())


MAX_MOMENTS = 40


@pytest.mark.parametrize("moment", range(1, MAX_MOMENTS + 1))
def test_a_follower_killed_at_any_moment_goes_on_and_no_job_stays_up(life, moment):
    try:
        life.whole_run(Moments(kill_at=moment))
    except KilledError:
        listed = {entry.request_id for entry in life.log.entries()}
        assert not life.hub.costing or listed
        host = life.host()
        life.until_started(host)
        try:
            told = list(host.follow(life.run.name, {}))
            assert states(told)[-1:] in ([], [b"succeeded"])
        except MachineGoneError:
            pass  # All of it was here, and what was in the bucket had been deleted.
        host.release()
    assert len(life.hub.jobs) == 1
    assert not life.hub.costing
    assert not life.log.entries()


@pytest.mark.parametrize("seed", range(4))
def test_followers_killed_one_after_another_start_one_job_and_leave_none_up(life, seed):
    draw = random.Random(seed)
    text = b""
    for _ in range(draw.randrange(2, 7)):
        moments = Moments(kill_at=draw.randrange(1, MAX_MOMENTS))
        host, seen = life.host(moments), {"runs/sft-one/log.txt": len(text)}
        try:
            life.until_started(host)
            for news in host.follow(life.run.name, seen):
                if isinstance(news, AppendedLines):
                    assert news.offset == len(text)
                    text += news.data
        except KilledError:
            pass
    host = life.host()
    life.until_started(host)
    text += growth(list(host.follow(life.run.name, {"runs/sft-one/log.txt": len(text)})))
    host.release()
    assert text == b"one\ntwo\n"
    assert len(life.hub.jobs) == 1
    assert not life.hub.costing
    assert not life.log.entries()


def test_every_moment_of_a_run_is_tried(life):
    moments = Moments()
    life.whole_run(moments)
    assert moments.passed == MAX_MOMENTS


@pytest.mark.parametrize("moment", range(1, MAX_MOMENTS + 1))
def test_what_a_deleted_run_left_up_is_put_down_by_whoever_looks_next(life, moment):
    # The job does nothing in this life, so that it would cost until its time is over.
    host = life.host(Moments(kill_at=moment), pause=lambda seconds: None)
    try:
        life.until_started(host)
    except KilledError:
        shutil.rmtree(life.run)
    host = life.host()
    for entry in life.log.entries():
        assert entry.name == host.name
        host.release()
    assert not life.hub.costing


def test_a_file_that_was_changed_here_is_told_from_its_start_once_more(life):
    host = life.host()
    life.until_started(host)
    list(host.follow(life.run.name, {}))
    told = list(life.host().follow(life.run.name, {}))
    assert growth(told) == b"one\ntwo\n"
    assert states(told)[-1] == b"succeeded"


def test_a_file_that_begins_anew_is_passed_on(life):
    path = "runs/sft-one/log.txt"
    again = [
        AppendedLines(path=path, offset=0, data=b"a long first line\n"),
        RemoteFiles(files=[], is_last=False),
        AppendedLines(path=path, offset=0, data=b"new\n"),
    ]
    life.inner = Inner(life.there, [*again, RemoteFiles(files=[], is_last=True)])
    host = life.host()
    life.until_started(host)
    told = [news for news in host.follow(life.run.name, {}) if isinstance(news, AppendedLines)]
    assert [news.data for news in told] == [b"a long first line\n", b"new\n"]


def test_a_file_that_begins_anew_between_two_followers_is_passed_on(life):
    path = "runs/sft-one/log.txt"
    host = life.host()
    life.until_started(host)
    (job,) = life.hub.jobs.values()
    job.stage = "RUNNING"
    side = life.job(job.asked)
    side._post([AppendedLines(path=path, offset=0, data=b"a long first line\n")])
    all_news = host.follow(life.run.name, {})
    while not isinstance(next(all_news), Heartbeat):
        pass
    all_news.close()
    side._post([AppendedLines(path=path, offset=0, data=b"new\n")])
    assert growth([next(life.host().follow(life.run.name, {path: 18}))]) == b"new\n"


@pytest.mark.parametrize("data", [b"odd", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"])
def test_what_is_no_batch_of_updates_is_refused(life, data):
    host = life.host()
    life.until_started(host)
    life.hub.files[f"me/stillroom-runs/runs/{life.run.name}/news/00000001.bin"] = data
    with pytest.raises(MachineError, match="is not a batch of updates"):
        list(host.follow(life.run.name, {}))


def test_a_job_that_ends_without_a_word_is_gone(life):
    host = life.host(pause=lambda seconds: None)
    life.until_started(host)
    (job,) = life.hub.jobs.values()
    job.stage, job.message, job.log = "ERROR", "OOM", ["Killed"]
    with pytest.raises(MachineGoneError, match=r"ERROR: OOM\): Killed") as caught:
        list(host.follow(life.run.name, {}))
    assert "hf jobs inspect" in caught.value.fix
    host.release()
    assert not life.log.entries()


def test_what_stands_in_a_jobs_way_is_told_here(life):
    life.inner = Inner(life.there, MachineError("no wheel for this Python", "name another"))
    host = life.host()
    life.until_started(host)
    with pytest.raises(MachineGoneError, match="hf: no wheel for this Python"):
        list(host.follow(life.run.name, {}))


def test_a_second_job_of_one_run_ends_at_once(life):
    host = life.host()
    life.until_started(host)
    life.work()
    (job,) = life.hub.jobs.values()
    again = {**job.asked, "env": {**job.asked["env"], START_VARIABLE: "another"}}
    assert life.job(again).run(lambda packages: pytest.fail("it must not run"))


def test_a_content_that_is_not_what_it_was_does_not_start(life):
    host = life.host()
    life.until_started(host)
    del life.hub.files[f"me/stillroom-runs/store/{sha256(ROWS)}"]
    with pytest.raises(MachineGoneError, match="is not in the bucket"):
        list(host.follow(life.run.name, {}))


def test_a_wish_to_stop_reaches_the_run_and_a_second_kill_the_job(life):
    host = life.host()
    life.until_started(host)
    (job,) = life.hub.jobs.values()
    job.stage = "RUNNING"
    host.cancel(life.run.name, kill=False)
    host.cancel(life.run.name, kill=True)
    assert job.stage == "RUNNING"
    assert life.job(job.asked).run(lambda packages: life.inner)
    assert life.inner.cancelled == [False, True]
    host.cancel(life.run.name, kill=True)
    assert job.stage == "CANCELED"


def test_a_job_that_has_not_begun_is_ended_by_the_first_wish(life):
    host = life.host()
    life.until_started(host)
    host.cancel(life.run.name, kill=False)
    assert not life.hub.costing


def test_the_hub_may_be_away_while_a_job_runs(life):
    host = life.host()
    life.until_started(host)
    (job,) = life.hub.jobs.values()
    tries = iter([refusal(503), refusal(429), OSError("no network"), *[None] * 1000])

    def next_try(_seconds: float) -> None:
        life.hub.away = next(tries)

    side = life.job(job.asked)
    side._pause = next_try
    next_try(0)
    assert side.run(lambda packages: life.inner)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (refusal(401), MachineError, "hf auth login"),
        (refusal(402), MachineError, "billing"),
        (refusal(403), MachineError, "token"),
        (refusal(429), UnreachableError, "Stillroom retries"),
        (refusal(502), UnreachableError, "Stillroom retries"),
        (OSError("no network"), UnreachableError, "status.huggingface.co"),
    ],
)
def test_errors_of_the_hub_say_whether_to_wait(life, error, kind, text):
    life.hub.away = error
    with pytest.raises(kind) as caught:
        life.host().provision()
    assert text in caught.value.fix


def test_a_job_that_the_service_refuses_is_not_waited_for(life):
    host = life.host()
    host.provision()
    life.hub.refuses_jobs = refusal(402, "no credit")
    with pytest.raises(MachineGoneError, match=r"could not start the job of .*no credit") as caught:
        host.start(life.start_of())
    assert "billing" in caught.value.fix
    assert not life.log.entries()


def test_nothing_goes_into_a_bucket_that_everybody_can_read(life):
    life.hub.is_private = False
    with pytest.raises(MachineError, match="the bucket me/stillroom-runs is public"):
        life.host().provision()


def test_without_a_token_the_log_in_is_named(life):
    with pytest.raises(MachineError) as caught:
        life.host(token=None).provision()
    assert "hf auth login" in caught.value.fix


def test_a_flavors_price_and_memory_are_the_services(life):
    host = life.host()
    assert host.price_per_hour() == PRICE
    facts = host.facts()
    assert facts.gpu_memory_gb == [24.0, 24.0]
    assert facts.memory_gb == 46
    wrong = Machine(name="hf", hf_jobs=HfJobsFlavor(flavor="a10"))
    with pytest.raises(MachineError, match="no flavor 'a10'"):
        life.host(machine=wrong).facts()


def test_a_jobs_time_is_bounded_by_its_timeout_its_hours_and_its_budget(life):
    flavor = HfJobsFlavor(flavor=FLAVOR, timeout="90m")
    assert time_limit(flavor, life.start_of(max_hours=9), None) == 5400
    assert time_limit(flavor, life.start_of(max_hours=0.5), 2.0) == 3600
    run = life.start_of(max_hours=9, budget_usd=3.0, spent_usd=1.0)
    assert time_limit(flavor, run, 2.0) == 3600
    with pytest.raises(MachineError, match="leave the job 180 s"):
        time_limit(flavor, life.start_of(max_hours=9, budget_usd=0.1), 2.0)


def test_the_run_stops_before_the_service_would_end_its_job(life):
    host = life.host()
    host.provision()
    host.prepare(life.spec(), lambda text: None)
    life.sending(host)
    host.start(life.start_of(max_hours=9, budget_usd=1.5))
    life.work()
    (run,) = life.inner.started
    # An hour is paid for, of which a tenth or ten minutes are for the last checkpoint.
    assert 0.89 < run.max_hours <= 0.9
    assert run.reserve_s == 360


def test_the_installation_in_a_job_counts_as_time_of_the_machine(life, monkeypatch):
    host = life.host()
    life.until_started(host)
    (job,) = life.hub.jobs.values()
    job.stage = "RUNNING"
    side = life.job(job.asked)
    side._started_at -= 120
    assert side.run(lambda packages: life.inner)
    states = [each for each in host.follow(life.run.name, {}) if isinstance(each, RemoteState)]
    assert 122 <= states[-1].elapsed_s < 180


def test_the_tokens_and_secrets_of_a_job_are_no_childs_variables(life, monkeypatch):
    from stillroom.remote.providers import hf_job_program

    seen = {}

    class Side:
        def __init__(self, bucket: Any, run_id: str, **keywords: Any) -> None:
            seen.update(keywords, environment=dict(os.environ))

        def run(self, _open: Any) -> bool:
            return True

    variables = {
        BUCKET_VARIABLE: "me/bucket",
        RUN_VARIABLE: "sft-one",
        START_VARIABLE: "once",
        SECRETS_VARIABLE: f'{{"KEY": "{SECRET}"}}',
        "HF_TOKEN": "hf_own",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hf_job_program, "JobProgram", Side)
    assert hf_job_program.main() == 0
    assert seen["secrets"] == {"KEY": SECRET}
    assert SECRET not in str(seen["environment"])
    assert "hf_own" not in str(seen["environment"])
