"""Follows a run on another machine, from its launch to the last downloaded file.

Each step is skipped if an earlier follower completed it, so a follower may be killed at any time.
The run's state is on disk, in `run.json` and `remote_view.json`.
"""

import errno
import random
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress

import msgspec

from stillroom.errors import EngineError, RunCancelledError
from stillroom.jobs.failures import resume_hint
from stillroom.outputs import OutputHeldError
from stillroom.remote.follower.download import Download, Downloader
from stillroom.remote.follower.launcher import Launcher
from stillroom.remote.follower.local_run import LocalRun
from stillroom.remote.follower.mirror import Mirror, OutOfSyncError
from stillroom.remote.host import (
    AccessDeniedError,
    MachineGoneError,
    RunHost,
    UnreachableError,
)
from stillroom.remote.records import AppendedLines, JobSpec, RemoteFiles, RemoteState, RunUpdate
from stillroom.run_folder import RunFailure, RunFolder, RunState
from stillroom.types import RunStatus

_POLL_S = 0.5
_MAX_CLEAN_UP_S = 24 * 3600.0
_UNREACHABLE_S = 3600.0
_MB = 1e6
_FIRST_WAIT_S, _SHORT_WAIT_S, _LONG_WAIT_S = 1.0, 5.0, 30.0
_NUM_SHORT_WAITS = 60
"""The number of short waits, so that a network that is back within minutes is noticed quickly."""
_STABLE_S = 10.0


class Backoff:
    """Computes how long to wait before each retry.

    At first 1 to 5 seconds, after some minutes 30 seconds; not at all after a connection that has
    lasted for 10 seconds. Each wait is shortened at random, by up to a half.
    """

    def __init__(
        self, *, max_s: float = _LONG_WAIT_S, draw: Callable[[], float] = random.random
    ) -> None:
        self._max_s, self._draw = max_s, draw
        self._num_tries = 0
        self._connected_s = 0.0

    def record_connected(self, seconds: float) -> None:
        """Records how long the connection has lasted so far."""
        self._connected_s = max(self._connected_s, seconds)

    def next_s(self) -> float:
        """Returns the number of seconds to wait before the next try."""
        if self._connected_s >= _STABLE_S:
            self._num_tries = 0
            self._connected_s = 0.0
            return 0.0
        self._num_tries += 1
        max_s = _SHORT_WAIT_S if self._num_tries <= _NUM_SHORT_WAITS else _LONG_WAIT_S
        # Five doublings exceed the longest wait.
        doubled_s = _FIRST_WAIT_S * 2 ** min(self._num_tries - 1, 5)
        wait_s = min(self._max_s, max_s, doubled_s)
        return wait_s * (0.5 + 0.5 * self._draw())


class Follower:
    """Executes one run on its machine, and mirrors its state and files into its local folder."""

    def __init__(
        self,
        folder: RunFolder,
        spec: JobSpec,
        host: RunHost,
        secrets: Mapping[str, str],
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
    ) -> None:
        self._folder, self._spec, self._host, self._sleep = folder, spec, host, sleep
        self._run = LocalRun(folder, spec)
        self._record, self._view = self._run.record, self._run.view
        self._mirror = Mirror(folder, spec, self._run.root, self._record)
        self._launcher = Launcher(self._run, host, secrets, sleep)
        self._backoff, self._clock = backoff or Backoff(), clock
        self._unreachable_since: float | None = None
        """When the machine stopped answering; None while it answers."""
        self._sent_cancels: set[bool] = set()
        self._is_due = False
        """Whether the next step follows without a wait."""
        self._is_abandoned = False
        """Whether the run was removed because its local folder was deleted."""

    def run(self) -> None:
        """Follows the run until it has ended, is downloaded, and its machine is cleaned up."""
        try:
            while not self._is_done:
                if self._is_deleted:
                    self._abandon()
                else:
                    self._step_unless_deleted()
                self._wait()
        finally:
            self._run.close()
            self._host.close()

    @property
    def _is_done(self) -> bool:
        return self._view.is_done or self._is_abandoned

    @property
    def _is_deleted(self) -> bool:
        return not self._folder.state_file.exists()

    def _step_unless_deleted(self) -> None:
        """Makes a step; ignores files that are missing because the run was deleted meanwhile."""
        try:
            self._step()
        except FileNotFoundError:
            if not self._is_deleted:
                raise

    def _step(self) -> None:
        """Advances the run as far as possible; records a problem, which is retried later."""
        try:
            self._advance()
        except RunCancelledError:
            self._end(RunStatus.CANCELLED)
        except OutOfSyncError:
            self._is_due = True
        except UnreachableError as error:
            self._record_unreachable(error)
        except MachineGoneError as error:
            self._record_gone(error)
        except EngineError as error:
            is_denied = isinstance(error, AccessDeniedError)
            self._record_error(error.problem, error.fix, is_denied=is_denied)
        except OSError as error:
            self._record_error(
                f"the local operating system reported an error: {error}", _os_error_fix(error)
            )
        # The outermost handler: a bug in this program must not leave a wrong state behind.
        except Exception as error:
            traceback.print_exc()
            problem = f"unexpected {type(error).__name__}: {str(error)[:300]}"
            log = self._folder.path / "follower.log"
            self._record_error(
                problem, f"this is a bug in Stillroom; report it with the traceback in {log}"
            )

    def _advance(self) -> None:
        """Launches the run, follows it and cleans up, each unless it is done already."""
        if not self._run.has_ended:
            if not self._record.is_started:
                self._launcher.launch()
            # An earlier follower held the locks; another run may have acquired one since.
            with suppress(OutputHeldError):
                self._run.lock_outputs()
            self._follow()
        self._clean_up()

    def _follow(self) -> None:
        """Mirrors the run until it has ended and all its files are downloaded."""
        self._view.record_phase("running")
        self._sent_cancels.clear()
        root, outputs = self._run.root, self._spec.outputs
        download = Download(self._folder, root, outputs, self._record, self._fetch)
        last_list: RemoteFiles | None = None
        connected_at = time.monotonic()
        with (
            Downloader(download) as downloader,
            closing(self._host.follow(self._folder.run_id, self._mirror.seen)) as updates,
        ):
            for update in updates:
                self._backoff.record_connected(time.monotonic() - connected_at)
                self._handle(update)
                if isinstance(update, RemoteFiles):
                    downloader.submit(update)
                    last_list = update if update.is_last else None
                downloader.raise_error()
                self._forward_cancellation()
            if last_list is None or self._mirror.final is None:
                raise UnreachableError(
                    f"connection to {self._spec.machine.name} lost",
                    "no action needed: the connection is retried",
                )
            self._await_files(downloader, download, last_list)
        self._finish(download, last_list)

    def _handle(self, update: RunUpdate) -> None:
        """Records the contact, and mirrors a state or lines; the downloader handles files."""
        self._unreachable_since = None
        if isinstance(update, RemoteState):
            self._view.record_contact(elapsed_s=update.elapsed_s)
            if not self._record.is_started:
                # The run was started, but the reply was lost.
                self._record.before_start_s = max(0.0, self._view.used_s - update.elapsed_s)
                self._record.is_started = True
            self._mirror.write_state(update)
            if self._mirror.final is not None:
                self._view.record_end()
            return
        self._view.record_contact()
        if isinstance(update, AppendedLines):
            self._mirror.append_lines(update)

    def _fetch(self, path: str, offset: int) -> Generator[bytes]:
        return self._host.fetch(self._folder.run_id, path, offset)

    def _await_files(self, downloader: Downloader, download: Download, files: RemoteFiles) -> None:
        """Waits until all of these files are downloaded, and shows the progress."""
        self._view.record_phase("bringing_back")
        num_bytes = download.num_bytes_done
        while not downloader.is_done(files):
            downloader.raise_error()
            done = round(download.num_bytes_done / _MB)
            total = round(download.num_bytes_total / _MB)
            phase = f"download from {self._spec.machine.name}"
            self._run.show_progress(phase, min(done, total), total, "MB", is_throttled=True)
            if download.num_bytes_done > num_bytes:
                num_bytes = download.num_bytes_done
                self._view.record_contact()
            self._sleep(_POLL_S / 10)

    def _finish(self, download: Download, listed: RemoteFiles) -> None:
        """Writes the run's final state, once all its files are downloaded and verified."""
        final = self._mirror.final
        if final is None or download.bytes_missing(listed.files):
            raise UnreachableError(
                "some files are not downloaded yet", "no action needed: the download is retried"
            )
        if final.error is not None and "start_training(resume=" in final.error.problem:
            # The machine's advice is to resume the run; only a local hint is trusted as the fix.
            fix = final.error.fix + resume_hint(self._folder, final.kind)
            final = msgspec.structs.replace(
                final, error=RunFailure(problem=final.error.problem, fix=fix)
            )
        if download.conflicts:
            final = _with_output_conflict(final, download.conflicts, self._folder)
        self._run.write_final(final)
        self._view.record_contact()

    def _clean_up(self) -> None:
        """Removes the run from its machine, and releases the machine if Stillroom provisioned it.

        The machine is released even if the run's folder cannot be removed.
        """
        ended_at = self._folder.state_file.stat().st_mtime
        removal_error: EngineError | None = None
        if self._view.has_started and not self._spec.machine.keep_remote:
            try:
                self._host.remove(self._folder.run_id)
            except MachineGoneError:
                pass
            except EngineError as error:
                removal_error = error
        self._host.release()
        if removal_error is not None and time.time() - ended_at < _MAX_CLEAN_UP_S:
            raise removal_error
        self._view.record_done()

    def _abandon(self) -> None:
        """Kills and removes the remote run after its local folder was deleted."""
        run_id = self._folder.run_id
        try:
            with suppress(MachineGoneError):
                self._host.cancel(run_id, kill=True)
                self._host.remove(run_id)
            self._host.release()
        except EngineError as error:
            machine = self._spec.machine.name
            sys.stderr.write(
                f"{run_id} was deleted locally; killing it on {machine} failed: {error}\n"
            )
        else:
            self._is_abandoned = True

    def _forward_cancellation(self) -> None:
        """Forwards the user's cancellation, once per connection."""
        for is_wanted, kill in (
            (self._run.is_cancelled, False),
            (self._run.is_kill_requested, True),
        ):
            if is_wanted and kill not in self._sent_cancels:
                self._host.cancel(self._folder.run_id, kill=kill)
                self._sent_cancels.add(kill)

    def _record_unreachable(self, error: UnreachableError) -> None:
        """Records that the machine does not answer; its run may continue.

        If the machine was silent for longer than `max_hours`, the run has stopped by itself.
        """
        machine, contact_at = self._spec.machine, self._record.contact_at
        unreachable_s = time.time() - contact_at if contact_at is not None else 0.0
        is_running = self._record.is_started and not self._run.has_ended
        if self._unreachable_since is None:
            self._unreachable_since = self._clock()
        # The wall clock may have been changed, so retries must also have failed for an hour.
        has_retried = self._clock() - self._unreachable_since > _UNREACHABLE_S
        if is_running and has_retried and unreachable_s > machine.max_hours * 3600 + _UNREACHABLE_S:
            problem = (
                f"{machine.name} has not answered for {unreachable_s / 3600:.0f} hours, so its "
                f"run has stopped by itself (max_hours: {machine.max_hours:g})"
            )
            fix = f"if the machine is up again, the run's files are in {machine.folder} on it"
            self._record_gone(MachineGoneError(problem, fix))
            return
        is_queued = is_running and self._run.is_cancelled
        queued = f"\ncancellation is queued until {machine.name} answers" if is_queued else ""
        self._view.record_problem(f"{error}{queued}")

    def _record_gone(self, error: MachineGoneError) -> None:
        """Ends a run whose machine is gone; it can be resumed from its downloaded files."""
        if self._run.has_ended:
            self._clean_up()
        elif not self._view.has_started:
            self._end(RunStatus.FAILED, error.problem, error.fix)
        elif self._record.is_started:
            kind = self._folder.read().kind
            fix = "files that were not downloaded are lost" + (
                resume_hint(self._folder, kind) or "; start it again"
            )
            self._end(RunStatus.INTERRUPTED, error.problem, f"{error.fix}; {fix}")
        elif self._run.is_cancelled:
            self._end(RunStatus.CANCELLED)
        else:
            problem = f"the run had not started: {error.problem}"
            self._end(RunStatus.FAILED, problem, f"{error.fix}; then start the run again")

    def _record_error(self, problem: str, fix: str, *, is_denied: bool = False) -> None:
        """Fails a run that cannot have started; otherwise only records the problem.

        is_denied: whether the machine's user may not access a file, which a retry does not change.
        """
        may_run = self._record.is_started if is_denied else self._view.has_started
        if may_run or self._run.has_ended:
            self._view.record_problem(f"{problem}\nfix: {fix}")
        else:
            self._end(RunStatus.FAILED, problem, fix)

    def _end(self, status: RunStatus, problem: str | None = None, fix: str = "") -> None:
        self._run.end(status, problem, fix)
        self._is_due = self._run.has_ended

    def _wait(self) -> None:
        """Waits before the next try, or until the run is cancelled."""
        if self._is_due or self._is_done:
            self._is_due = False
            return
        was_cancelled = self._run.is_cancelled
        deadline = time.monotonic() + self._backoff.next_s()
        while time.monotonic() < deadline:
            if self._run.is_cancelled and not was_cancelled:
                return
            self._sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))


def _with_output_conflict(final: RunState, conflicts: list[str], folder: RunFolder) -> RunState:
    """Returns the final state of a run whose output was written locally in the meantime."""
    names = ", ".join(conflicts[:4])
    failure = RunFailure(
        problem=f"the run succeeded, but another local process wrote to {names} meanwhile",
        fix=f"the run's output is in {folder.path / 'brought_back'}: compare the files, and move "
        "those that you want to keep",
    )
    return msgspec.structs.replace(final, status=RunStatus.FAILED, error=failure)


def _os_error_fix(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on the local disk; the run continues, and the step is retried"
    return "check the permissions of the run's folder; the step is retried"
