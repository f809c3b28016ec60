"""The program in a job of Hugging Face: does one run, and reports on it through the bucket.

The job's machine is a machine like any other, reached without a connection: what a follower does
over ssh is done here over a channel to a process of this machine. Nobody may be at the other end of
the bucket; the job ends when the run has ended and all of it is in the bucket.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import msgspec

from stillroom.errors import EngineError
from stillroom.remote.channel import LocalChannel
from stillroom.remote.host import RunHost, UnreachableError
from stillroom.remote.providers.hf_bucket import (
    BUCKET_VARIABLE,
    RUN_VARIABLE,
    SECRETS_VARIABLE,
    START_VARIABLE,
    TOKEN_VARIABLE,
    Bucket,
    JobFailure,
    JobPackages,
    JobStart,
    JobUpdate,
    RunPaths,
    content_path,
)
from stillroom.remote.records import (
    AppendedLines,
    Blob,
    LaunchRequest,
    RemoteFile,
    RemoteFiles,
    RemoteState,
    RunUpdate,
)
from stillroom.remote.ssh.host import ChannelHost

_POST_EVERY_S = 10.0
_TRIES = 30
_AGAIN_S = 20.0
_RESERVE_S = 600.0
_RESERVE_PART = 0.1
_HOUR_S = 3600.0

_End = EngineError | None
"""What ends the queue of updates: the error that broke it off, or None after the last."""
_Queue = SimpleQueue[RunUpdate | _End]


def main() -> int:
    """Does the run of this job and returns the exit code: 0 if all of it is in the bucket."""
    from huggingface_hub import HfApi

    bucket = Bucket(HfApi(token=os.environ[TOKEN_VARIABLE]), os.environ[BUCKET_VARIABLE])
    secrets = msgspec.json.decode(os.environ.pop(SECRETS_VARIABLE), type=dict[str, str])
    # No child of this process is to have it: the run gets its secrets through standard input.
    del os.environ[TOKEN_VARIABLE]
    job = JobProgram(
        bucket, os.environ[RUN_VARIABLE], start=os.environ[START_VARIABLE], secrets=secrets
    )
    return 0 if job.do(host_in_job) else 1


def host_in_job(packages: JobPackages) -> RunHost:
    """Returns the machine that this job has, which is reached by starting a process on it."""
    return ChannelHost(packages.spec.machine, LocalChannel(), local=packages.home)


class JobProgram:
    """One job: takes the run's spec from the bucket, has it done, and posts its updates there."""

    def __init__(
        self,
        bucket: Bucket,
        run_id: str,
        *,
        start: str,
        secrets: Mapping[str, str],
        pause: Callable[[float], None] = time.sleep,
        post_every_s: float = _POST_EVERY_S,
    ) -> None:
        self._bucket, self._run_id, self._paths = bucket, run_id, RunPaths(run_id)
        self._start, self._secrets, self._pause = start, secrets, pause
        self._post_every_s = post_every_s
        self._started_at = time.monotonic()
        self._setup_s = 0.0
        """How long the job lasted before the run began, which is paid for too."""
        self._number = 1
        self._root = ""
        self._uploaded = set[str]()
        self._cancellations = set[str]()

    def do(self, open_host: Callable[[JobPackages], RunHost]) -> bool:
        """Does the run; returns whether everything of it is in the bucket."""
        if not self._claim():
            _log(f"another job does the run {self._run_id}; this one ends")
            return True
        packages = self._read(self._paths.packages, JobPackages)
        start = self._read(self._paths.start, JobStart)
        host = open_host(packages)
        try:
            host.prepare(packages.spec, _log)
            self._send_contents(host, start.run)
            host.start(self._within_limits(start))
            self._setup_s = time.monotonic() - self._started_at
            self._report(host, start.run)
        except EngineError as error:
            _log(f"{error.problem}\nfix: {error.fix}")
            self._post([JobFailure(problem=error.problem, fix=error.fix)])
            return False
        finally:
            host.close()
        return True

    def _claim(self) -> bool:
        """Returns whether this is the job that does the run; a start may have arrived twice."""
        if self._paths.claim in self._trying(lambda: self._bucket.sizes([self._paths.claim])):
            owner = self._trying(lambda: self._bucket.read(self._paths.claim)).decode()
            return owner == self._start
        self._trying(lambda: self._bucket.put([(self._start.encode(), self._paths.claim)]))
        return True

    def _within_limits(self, start: JobStart) -> LaunchRequest:
        """Returns the run with what is left of its time and money, so that it stops by itself.

        A run that the service ends could not bring its last checkpoint to the bucket.
        """
        run, used_s = start.run, time.monotonic() - self._started_at
        reserve_s = max(run.reserve_s, min(_RESERVE_S, _RESERVE_PART * start.timeout_s))
        left_s = max(0.0, start.timeout_s - used_s - reserve_s)
        spent_usd = run.spent_usd + (run.price_per_hour or 0.0) * used_s / _HOUR_S
        return msgspec.structs.replace(
            run,
            secrets=dict(self._secrets),
            max_hours=min(run.max_hours, left_s / _HOUR_S),
            reserve_s=reserve_s,
            spent_usd=spent_usd,
        )

    def _send_contents(self, host: RunHost, run: LaunchRequest) -> None:
        """Puts the run's files from the bucket where the run finds them, one after another."""
        hashes = sorted({file.sha256 for file in run.files})
        sizes = self._trying(lambda: self._bucket.sizes(map(content_path, hashes)))
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "content"
            for sha256 in hashes:
                path = content_path(sha256)
                if path not in sizes:
                    raise EngineError(
                        f"a file of the run ({sha256[:12]}…) is not in the bucket",
                        "start the run again: the file is then sent again",
                    )
                self._trying(lambda path=path: self._bucket.download(path, target))
                blob = Blob(sha256=sha256, num_bytes=sizes[path], source=str(target))
                for _ in host.send([blob], host.missing([blob])):
                    pass
                target.unlink()

    def _report(self, host: RunHost, run: LaunchRequest) -> None:
        """Posts the run's updates until it has ended, and passes cancellations on."""
        received: _Queue = SimpleQueue()
        Thread(target=self._receive, args=(host, received), daemon=True).start()
        is_over = False
        while not is_over:
            self._pass_cancellation(host)
            batch = self._gather(received)
            if batch and (batch[-1] is None or isinstance(batch[-1], EngineError)):
                is_over, error = True, batch.pop()
                if isinstance(error, EngineError):
                    raise error
            updates = [self._for_bucket(each) for each in _shortened(batch)]
            if updates:
                self._post(updates)
            for each in updates:
                if isinstance(each, RemoteFiles):
                    self._forget_deleted(each, run)

    def _receive(self, host: RunHost, received: _Queue) -> None:
        seen: dict[str, int] = {}
        tries = 0
        while True:
            try:
                for update in host.follow(self._run_id, seen):
                    tries = 0
                    if isinstance(update, AppendedLines):
                        seen[update.path] = update.offset + len(update.data)
                    received.put(update)
                received.put(None)
                return
            except UnreachableError as error:
                tries += 1
                if tries >= _TRIES:
                    received.put(error)
                    return
                self._pause(1.0)
            except EngineError as error:
                received.put(error)
                return

    def _gather(self, received: _Queue) -> list[RunUpdate | _End]:
        """Returns the updates of some seconds: the hub takes only so many writes an hour."""
        batch: list[RunUpdate | _End] = []
        deadline = time.monotonic() + self._post_every_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                batch.append(received.get(timeout=left_s))
            except Empty:
                break
            if batch[-1] is None or isinstance(batch[-1], EngineError):
                break
        return batch

    def _for_bucket(self, update: JobUpdate) -> JobUpdate:
        """Returns an update as it is posted, once the files that it lists are in the bucket."""
        if isinstance(update, RemoteState):
            self._root = update.root
            return msgspec.structs.replace(update, elapsed_s=update.elapsed_s + self._setup_s)
        if not isinstance(update, RemoteFiles):
            return update
        uploaded = [file for file in update.files if self._has_uploaded(file)]
        return RemoteFiles(files=uploaded, is_last=update.is_last)

    def _has_uploaded(self, file: RemoteFile) -> bool:
        """Brings a file to the bucket; returns False if the run has deleted it meanwhile."""
        path, source = content_path(file.sha256), Path(self._root) / "workspace" / file.path

        def upload() -> bool:
            if self._bucket.sizes([path]).get(path) == file.num_bytes:
                return True
            if not source.is_file():
                return False
            self._bucket.put([(source, path)])
            return True

        if file.sha256 not in self._uploaded and self._trying(upload):
            self._uploaded.add(file.sha256)
        return file.sha256 in self._uploaded

    def _forget_deleted(self, listed: RemoteFiles, run: LaunchRequest) -> None:
        """Deletes checkpoints from the bucket that the run itself has deleted."""
        keep = {file.sha256 for file in listed.files} | {file.sha256 for file in run.files}
        gone = self._uploaded - keep
        paths = self._trying(lambda: self._bucket.sizes(map(content_path, gone))) if gone else {}
        self._trying(lambda: self._bucket.delete(sorted(paths)))
        self._uploaded -= gone

    def _post(self, updates: list[JobUpdate]) -> None:
        data, path = msgspec.msgpack.encode(updates), self._paths.updates(self._number)
        self._trying(lambda: self._bucket.put([(data, path)]))
        self._number += 1

    def _pass_cancellation(self, host: RunHost) -> None:
        """Cancels or kills the run if the bucket says so; each is done once."""
        marks = {self._paths.cancel: False, self._paths.kill: True}
        try:
            found = self._bucket.sizes([mark for mark in marks if mark not in self._cancellations])
            for mark in found:
                host.cancel(self._run_id, kill=marks[mark])
                self._cancellations.add(mark)
        except UnreachableError as error:
            _log(error.problem)

    def _read(self, path: str, kind: type[Any]) -> Any:
        return msgspec.msgpack.decode(self._trying(lambda: self._bucket.read(path)), type=kind)

    def _trying(self, call: Callable[[], Any]) -> Any:
        """Returns what a call returns; the hub may be away for ten minutes."""
        for _ in range(_TRIES):
            try:
                return call()
            except UnreachableError as error:
                _log(error.problem)
                self._pause(_AGAIN_S)
        return call()


def _shortened(batch: list[Any]) -> Iterator[JobUpdate]:
    """Yields updates without those states and lists of files that later ones replace."""
    last: dict[type[Any], int] = {type(each): number for number, each in enumerate(batch)}
    for number, update in enumerate(batch):
        replaces = isinstance(update, RemoteState | RemoteFiles) and last[type(update)] == number
        if replaces or isinstance(update, AppendedLines):
            yield update


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
