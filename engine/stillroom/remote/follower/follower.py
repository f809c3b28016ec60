"""The course of a run on another machine, from waiting for its turn to the last file brought back.

Each step finds its work done if a follower before this one has done it, so that a follower may be
killed at any moment. What is true of the run is on the disk: `run.json` and `remote_view.json`.
"""

import errno
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress

import msgspec

from stillroom.errors import EngineError, RunCancelledError
from stillroom.jobs.failures import resume_hint
from stillroom.outputs import OutputHeldError
from stillroom.remote.follower.download import Download
from stillroom.remote.follower.downloader import Downloader
from stillroom.remote.follower.launcher import Launcher
from stillroom.remote.follower.local_run import LocalRun
from stillroom.remote.follower.mirror import Mirror, OutOfStepError
from stillroom.remote.follower.retry import Backoff
from stillroom.remote.host import MachineGoneError, RunHost, UnreachableError
from stillroom.remote.records import AppendedLines, JobSpec, RemoteFiles, RemoteState, RunUpdate
from stillroom.run_folder import RunFailure, RunFolder, RunState
from stillroom.types import RunStatus

_POLL_S = 0.5
_CLEAN_UP_FOR_S = 24 * 3600.0
_SILENT_S = 3600.0
_MB = 1e6


class Follower:
    """Has one run done on its machine, and writes how it stands into its folder here."""

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
        self._record, self._views = self._run.record, self._run.views
        self._mirror = Mirror(folder, spec, self._run.root, self._record)
        self._launcher = Launcher(self._run, host, secrets, sleep)
        self._backoff, self._clock = backoff or Backoff(), clock
        self._missed_since: float | None = None
        """When the machine did not answer any more."""
        self._sent_cancels: set[bool] = set()
        self._is_due = self._is_abandoned = False
        """Whether the next step follows at once; whether the run's folder here is gone."""

    def run(self) -> None:
        """Returns when the run has ended, all of it is here, and nothing is left on its machine."""
        try:
            while not self._is_over:
                if self._is_deleted:
                    self._abandon()
                else:
                    self._try_unless_deleted()
                self._wait()
        finally:
            self._run.close()
            self._host.close()

    @property
    def _is_over(self) -> bool:
        return self._views.is_over or self._is_abandoned

    @property
    def _is_deleted(self) -> bool:
        return not self._folder.state_file.exists()

    def _try_unless_deleted(self) -> None:
        try:
            self._try()
        except FileNotFoundError:
            if not self._is_deleted:
                raise

    def _try(self) -> None:
        """Goes as far as it can; what stands in the way is shown, and tried again later."""
        try:
            self._advance()
        except RunCancelledError:
            self._end(RunStatus.CANCELLED)
        except OutOfStepError:
            self._is_due = True
        except UnreachableError as error:
            self._miss(error)
        except MachineGoneError as error:
            self._lose(error)
        except EngineError as error:
            self._record_error(error.problem, error.fix)
        except OSError as error:
            self._record_error(f"the system here refused: {error}", _fix_of(error))
        # The outermost handler of the run here: a fault of ours must not make its state untrue.
        except Exception as error:
            traceback.print_exc()
            name = f"unexpected {type(error).__name__}: {str(error)[:300]}"
            self._record_error(name, f"the traceback is in {self._folder.path / 'follower.log'}")

    def _advance(self) -> None:
        if not self._run.has_ended:
            if not self._record.is_started:
                self._launcher.launch()
            # A follower before this one had them; who has taken one meanwhile is left alone.
            with suppress(OutputHeldError):
                self._run.lock_outputs()
            self._follow()
        self._clean_up()

    def _follow(self) -> None:
        """Mirrors the run until it has ended there and all of it is here."""
        self._views.phase("running")
        self._sent_cancels.clear()
        root, outputs = self._run.root, self._spec.outputs
        files = Download(self._folder, root, outputs, self._record, self._fetch)
        last: RemoteFiles | None = None
        began = time.monotonic()
        with (
            Downloader(files) as downloader,
            closing(self._host.follow(self._folder.run_id, self._mirror.seen)) as all_news,
        ):
            for news in all_news:
                self._backoff.held(time.monotonic() - began)
                self._take(news)
                if isinstance(news, RemoteFiles):
                    downloader.bring(news)
                    last = news if news.is_last else None
                downloader.raise_error()
                self._pass_cancel()
            if last is None or self._mirror.final is None:
                raise UnreachableError(
                    f"{self._spec.machine.name} said no more about the run", "it is asked again"
                )
            self._download_rest(downloader, files, last)
        self._finish(files, last)

    def _take(self, news: RunUpdate) -> None:
        self._missed_since = None
        if isinstance(news, RemoteState):
            self._views.contact(elapsed_s=news.elapsed_s)
            self._confirm_start(news)
            self._mirror.take_state(news)
            return
        self._views.contact()
        if isinstance(news, AppendedLines):
            self._mirror.take_growth(news)

    def _confirm_start(self, news: RemoteState) -> None:
        """Notes that the run is there, although the answer to the start was lost."""
        record = self._record
        if not record.is_started:
            record.before_start_s = max(0.0, self._views.used_s - news.elapsed_s)
            record.is_started = True

    def _fetch(self, path: str, offset: int) -> Generator[bytes]:
        return self._host.fetch(self._folder.run_id, path, offset)

    def _download_rest(self, downloader: Downloader, files: Download, last: RemoteFiles) -> None:
        """Waits until all files are here."""
        self._views.phase("bringing_back")
        before = files.num_bytes
        while not downloader.is_done(last):
            downloader.raise_error()
            done, total = round(files.num_bytes / _MB), round(files.num_wanted / _MB)
            phase = f"bring back from {self._spec.machine.name}"
            self._run.show(phase, min(done, total), total, "MB", at_once=False)
            if files.num_bytes > before:
                self._views.contact()
            self._sleep(_POLL_S / 10)

    def _finish(self, files: Download, last: RemoteFiles) -> None:
        """Writes the run's end; all that it has written is here and verified."""
        final = self._mirror.final
        if final is None or files.bytes_missing(last.files):
            raise UnreachableError("not all files are here", "they are asked for again")
        if files.taken:
            final = _without_its_place(final, files.taken, self._folder)
        self._folder.write(final)
        self._views.contact()

    def _clean_up(self) -> None:
        """Removes the run there and puts the machine down, if it is ours to stop.

        A machine that costs is put down also where the run's folder cannot be removed.
        """
        machine = self._spec.machine
        ended_at = self._folder.state_file.stat().st_mtime
        left: EngineError | None = None
        if self._views.view.has_started and not machine.keep_remote:
            try:
                self._host.remove(self._folder.run_id)
            except MachineGoneError:
                pass
            except EngineError as error:
                left = error
        self._host.release()
        if left is not None and time.time() - ended_at < _CLEAN_UP_FOR_S:
            raise left
        self._views.over()

    def _abandon(self) -> None:
        """Ends a run there whose folder somebody has deleted here: nobody can ask after it."""
        run_id = self._folder.run_id
        try:
            with suppress(MachineGoneError):
                self._host.cancel(run_id, kill=True)
                self._host.remove(run_id)
            self._host.release()
        except EngineError as error:
            sys.stderr.write(f"{run_id} was deleted here, and cannot be ended there: {error}\n")
        else:
            self._is_abandoned = True

    def _pass_cancel(self) -> None:
        """Passes the user's wishes on, each once over each connection."""
        for is_wished, kill in ((self._run.is_to_stop, False), (self._run.is_to_die, True)):
            if is_wished and kill not in self._sent_cancels:
                self._host.cancel(self._folder.run_id, kill=kill)
                self._sent_cancels.add(kill)

    def _miss(self, error: UnreachableError) -> None:
        """Shows that the machine does not answer, which says nothing about the run there.

        One that has not answered for longer than any run may take there has ended by itself.
        """
        machine, heard_at = self._spec.machine, self._record.contact_at
        silent_s = time.time() - heard_at if heard_at is not None else 0.0
        is_running = self._record.is_started and not self._run.has_ended
        if self._missed_since is None:
            self._missed_since = self._clock()
        # The clock here may have been set meanwhile, so a while of it was tried in vain too.
        has_tried = self._clock() - self._missed_since > _SILENT_S
        if is_running and has_tried and silent_s > machine.max_hours * 3600 + _SILENT_S:
            problem = (
                f"{machine.name} has not answered for {silent_s / 3600:.0f} hours, so the run "
                f"there has stopped by itself (max_hours: {machine.max_hours:g})"
            )
            fix = f"if the machine comes back, its files are in {machine.folder} there"
            self._lose(MachineGoneError(problem, fix))
            return
        wish = "\nthe wish to stop is passed on as soon as it answers" if is_running else ""
        self._views.problem(f"{error}{wish if self._run.is_to_stop else ''}")

    def _lose(self, error: MachineGoneError) -> None:
        """Ends a run whose machine is gone: what is here stays, and it can go on elsewhere."""
        if self._run.has_ended:
            self._clean_up()
        elif not self._views.view.has_started:
            self._end(RunStatus.FAILED, error.problem, error.fix)
        elif self._record.is_started:
            kind = self._folder.read().kind
            fix = "its last files are lost" + (
                resume_hint(self._folder, kind) or "; start it again"
            )
            self._end(RunStatus.INTERRUPTED, error.problem, f"{error.fix}; {fix}")
        elif self._run.is_to_stop:
            self._end(RunStatus.CANCELLED)
        else:
            problem = f"the run had not begun there: {error.problem}"
            self._end(RunStatus.FAILED, problem, f"{error.fix}; then start the run again")

    def _record_error(self, problem: str, fix: str) -> None:
        """Ends a run that could not be started; one that was goes on, and is asked after again."""
        if self._views.view.has_started or self._run.has_ended:
            self._views.problem(f"{problem}\nfix: {fix}")
        else:
            self._end(RunStatus.FAILED, problem, fix)

    def _end(self, status: RunStatus, problem: str | None = None, fix: str = "") -> None:
        self._run.end(status, problem, fix)
        self._is_due = self._run.has_ended

    def _wait(self) -> None:
        """Waits before the next try; a new wish to stop ends the wait."""
        if self._is_due or self._is_over:
            self._is_due = False
            return
        had_wish = self._run.is_to_stop
        deadline = time.monotonic() + self._backoff.next_s()
        while time.monotonic() < deadline:
            if self._run.is_to_stop and not had_wish:
                return
            self._sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))


def _without_its_place(final: RunState, taken: list[str], folder: RunFolder) -> RunState:
    """Returns the end of a run whose output somebody else wrote meanwhile."""
    names = ", ".join(taken[:4])
    failure = RunFailure(
        problem=f"the run is done, but {names} was written here by somebody else meanwhile",
        fix=f"its own is in {folder.path / 'brought_back'}: compare them, and move it by hand",
    )
    return msgspec.structs.replace(final, status=RunStatus.FAILED, error=failure)


def _fix_of(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on this machine; the run goes on, and it is tried again"
    return "check the permissions of the run's folder; it is tried again"
