"""The program inside a Hugging Face job: executes one run, and reports through the bucket.

It does over a local channel what a follower does over ssh. The user's machine may be offline; the
job ends when the run has ended and all its files are in the bucket.
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
_RETRY_S = 20.0
_RESERVE_S = 600.0
_RESERVE_SHARE = 0.1
_HOUR_S = 3600.0

_LastItem = EngineError | None
"""The item after the last update in the queue: an error, or None if there was none."""
_Queue = SimpleQueue[RunUpdate | _LastItem]


def main() -> int:
    """Executes the job's run and returns the exit code: 0 if all its files are in the bucket."""
    from huggingface_hub import HfApi

    bucket = Bucket(HfApi(token=os.environ[TOKEN_VARIABLE]), os.environ[BUCKET_VARIABLE])
    secrets = msgspec.json.decode(os.environ.pop(SECRETS_VARIABLE), type=dict[str, str])
    # Child processes must not inherit it: the run gets its secrets through standard input.
    del os.environ[TOKEN_VARIABLE]
    job = JobProgram(
        bucket, os.environ[RUN_VARIABLE], start=os.environ[START_VARIABLE], secrets=secrets
    )
    return 0 if job.run(host_in_job) else 1


def host_in_job(packages: JobPackages) -> RunHost:
    """Returns the host for the job's own machine, over a local channel."""
    return ChannelHost(packages.spec.machine, LocalChannel(), local=packages.local_packages)


class JobProgram:
    """One job: reads the run's spec from the bucket, executes it, and posts its updates there."""

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
        """How long the job lasted before the run started, which is billed too."""
        self._batch_number = 1
        self._root = ""
        self._uploaded = set[str]()
        self._cancellations = set[str]()

    def run(self, open_host: Callable[[JobPackages], RunHost]) -> bool:
        """Executes the run; returns whether all its files are in the bucket."""
        if not self._claim():
            _log(f"another job executes the run {self._run_id}; this one exits")
            return True
        packages = self._read(self._paths.packages, JobPackages)
        start = self._read(self._paths.start, JobStart)
        host = open_host(packages)
        try:
            host.prepare(packages.spec, _log)
            self._place_files(host, start.run)
            host.start(self._limited_launch(start))
            self._setup_s = time.monotonic() - self._started_at
            self._post_updates(host)
        except EngineError as error:
            _log(f"{error.problem}\nfix: {error.fix}")
            self._post([JobFailure(problem=error.problem, fix=error.fix)])
            return False
        finally:
            host.close()
        return True

    def _claim(self) -> bool:
        """Claims the run, since two jobs may be started for it; returns False if another did so."""
        if self._paths.claim in self._retry(lambda: self._bucket.sizes([self._paths.claim])):
            owner = self._retry(lambda: self._bucket.read(self._paths.claim)).decode()
            return owner == self._start
        self._retry(lambda: self._bucket.put([(self._start.encode(), self._paths.claim)]))
        return True

    def _limited_launch(self, start: JobStart) -> LaunchRequest:
        """Returns the launch request with the job's remaining time and budget as the run's limits.

        If the service terminated the job first, the last checkpoint would not be uploaded.
        """
        run, used_s = start.run, time.monotonic() - self._started_at
        reserve_s = max(run.reserve_s, min(_RESERVE_S, _RESERVE_SHARE * start.timeout_s))
        left_s = max(0.0, start.timeout_s - used_s - reserve_s)
        spent_usd = run.spent_usd + (run.price_per_hour or 0.0) * used_s / _HOUR_S
        return msgspec.structs.replace(
            run,
            secrets=dict(self._secrets),
            max_hours=min(run.max_hours, left_s / _HOUR_S),
            reserve_s=reserve_s,
            spent_usd=spent_usd,
        )

    def _place_files(self, host: RunHost, run: LaunchRequest) -> None:
        """Downloads the run's files from the bucket to the machine, one at a time."""
        hashes = sorted({file.sha256 for file in run.files})
        sizes = self._retry(lambda: self._bucket.sizes(map(content_path, hashes)))
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "content"
            for sha256 in hashes:
                path = content_path(sha256)
                if path not in sizes:
                    raise EngineError(
                        f"a file of the run ({sha256[:12]}…) is not in the bucket",
                        "start the run again: the file is then uploaded again",
                    )
                self._retry(lambda path=path: self._bucket.download(path, target))
                blob = Blob(sha256=sha256, num_bytes=sizes[path], source=str(target))
                for _ in host.send([blob], host.missing([blob])):
                    pass
                target.unlink()

    def _post_updates(self, host: RunHost) -> None:
        """Posts the run's updates until it has ended, and forwards cancellations."""
        received: _Queue = SimpleQueue()
        Thread(target=self._receive, args=(host, received), daemon=True).start()
        has_ended = False
        while not has_ended:
            self._forward_cancellation(host)
            batch = self._collect_batch(received)
            if batch and (batch[-1] is None or isinstance(batch[-1], EngineError)):
                has_ended, error = True, batch.pop()
                if isinstance(error, EngineError):
                    raise error
            updates = list(map(self._prepare_update, _without_superseded(batch)))
            if updates:
                self._post(updates)
            for update in updates:
                if isinstance(update, RemoteFiles):
                    self._delete_pruned(update)

    def _receive(self, host: RunHost, received: _Queue) -> None:
        """Puts the run's updates into the queue, and then a `_LastItem`."""
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

    def _collect_batch(self, received: _Queue) -> list[RunUpdate | _LastItem]:
        """Collects updates for some seconds, since the hub limits the number of writes per hour."""
        batch: list[RunUpdate | _LastItem] = []
        deadline = time.monotonic() + self._post_every_s
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                batch.append(received.get(timeout=left_s))
            except Empty:
                break
            if batch[-1] is None or isinstance(batch[-1], EngineError):
                break
        return batch

    def _prepare_update(self, update: JobUpdate) -> JobUpdate:
        """Returns an update to post, after uploading the files that it lists."""
        if isinstance(update, RemoteState):
            self._root = update.root
            return msgspec.structs.replace(update, elapsed_s=update.elapsed_s + self._setup_s)
        if not isinstance(update, RemoteFiles):
            return update
        uploaded = [file for file in update.files if self._upload(file)]
        return RemoteFiles(files=uploaded, is_last=update.is_last)

    def _upload(self, file: RemoteFile) -> bool:
        """Uploads a file to the bucket; returns False if the run has deleted it meanwhile."""
        path, source = self._paths.output(file.sha256), Path(self._root) / "workspace" / file.path

        def upload() -> bool:
            if self._bucket.sizes([path]).get(path) == file.num_bytes:
                return True
            if not source.is_file():
                return False
            self._bucket.put([(source, path)])
            return True

        if file.sha256 not in self._uploaded and self._retry(upload):
            self._uploaded.add(file.sha256)
        return file.sha256 in self._uploaded

    def _delete_pruned(self, listed: RemoteFiles) -> None:
        """Deletes from the bucket the checkpoints that the run has deleted."""
        pruned = self._uploaded - {file.sha256 for file in listed.files}
        outputs = [self._paths.output(sha256) for sha256 in pruned]
        paths = self._retry(lambda: self._bucket.sizes(outputs)) if outputs else {}
        self._retry(lambda: self._bucket.delete(sorted(paths)))
        self._uploaded -= pruned

    def _post(self, updates: list[JobUpdate]) -> None:
        """Writes a batch of updates to the bucket."""
        data, path = msgspec.msgpack.encode(updates), self._paths.update_batch(self._batch_number)
        self._retry(lambda: self._bucket.put([(data, path)]))
        self._batch_number += 1

    def _forward_cancellation(self, host: RunHost) -> None:
        """Cancels or kills the run, once each, if the bucket has the mark for it."""
        marks = {self._paths.cancel: False, self._paths.kill: True}
        try:
            new = self._bucket.sizes([mark for mark in marks if mark not in self._cancellations])
            for mark in new:
                host.cancel(self._run_id, kill=marks[mark])
                self._cancellations.add(mark)
        except UnreachableError as error:
            _log(error.problem)

    def _read(self, path: str, kind: type[Any]) -> Any:
        return msgspec.msgpack.decode(self._retry(lambda: self._bucket.read(path)), type=kind)

    def _retry(self, call: Callable[[], Any]) -> Any:
        """Makes a call, and retries for ten minutes while the hub is unreachable."""
        for _ in range(_TRIES):
            try:
                return call()
            except UnreachableError as error:
                _log(error.problem)
                self._pause(_RETRY_S)
        return call()


def _without_superseded(batch: list[Any]) -> Iterator[JobUpdate]:
    """Yields a batch's updates; of its states and file lists, only the last of each."""
    last: dict[type[Any], int] = {type(each): index for index, each in enumerate(batch)}
    for index, update in enumerate(batch):
        is_latest = isinstance(update, RemoteState | RemoteFiles) and last[type(update)] == index
        if is_latest or isinstance(update, AppendedLines):
            yield update


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
