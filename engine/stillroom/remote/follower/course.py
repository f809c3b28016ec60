"""The course of a run on another machine, from waiting for its turn to the last file brought back.

Each step finds its work done if a follower before this one has done it, so that a follower may be
killed at any moment. What is true of the run is on the disk: `run.json` and `remote_view.json`.
"""

import time
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from stillroom.errors import EngineError, RunCancelledError, RunError
from stillroom.jobs.failures import going_on
from stillroom.jobs.remote_runs import KILL_MARK, read_follower_start
from stillroom.jobs.supervise import read_run
from stillroom.lineage import now
from stillroom.outputs import OutputLock
from stillroom.remote.follower.bring_back import BringBack
from stillroom.remote.follower.bringer import Bringer
from stillroom.remote.follower.mirror import Mirror, OutOfStepError
from stillroom.remote.follower.record import read_record, write_record
from stillroom.remote.follower.retry import Backoff
from stillroom.remote.follower.sending import note_outputs, start_request
from stillroom.remote.follower.views import Views
from stillroom.remote.host import MachineGoneError, RunHost, UnreachableError
from stillroom.remote.package.contents import Contents, read_contents
from stillroom.remote.records import FilesThere, Growth, Order, StateThere
from stillroom.run_folder import Progress, RunFailure, RunFolder, RunState
from stillroom.types import RunStatus

_POLL_S = 0.5
_SHOW_EVERY_S = 1.0
_RATE_FROM_BYTES = 1 << 20
_CLEAN_UP_FOR_S = 24 * 3600.0
_SILENT_S = 3600.0
_MB = 1e6


class Follower:
    """Has one run done on its machine, and writes how it stands into its folder here."""

    def __init__(
        self,
        folder: RunFolder,
        order: Order,
        host: RunHost,
        secrets: Mapping[str, str],
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._folder, self._order, self._host, self._secrets = folder, order, host, secrets
        self._root, self._sleep = Path(folder.read_request().workspace), sleep
        self._record = read_record(folder)
        self._views = Views(folder, order.machine, self._record)
        self._mirror = Mirror(folder, order, self._root, self._record)
        self._backoff = Backoff()
        self._locks: list[OutputLock] = []
        self._sent_cancels: set[bool] = set()
        self._shown_at = 0.0
        self._is_due = False
        """Whether the next step follows at once."""

    def run(self) -> None:
        """Returns when the run has ended, all of it is here, and nothing is left on its machine."""
        try:
            while not self._views.is_over:
                self._try()
                self._wait()
        finally:
            for lock in self._locks:
                lock.release()
            self._host.close()

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
            self._stumble(error.problem, error.fix)
        except OSError as error:
            self._stumble(f"the system here refused: {error}", _here_fix(error))
        # The outermost handler of the run here: a fault of ours must not make its state untrue.
        except Exception as error:
            traceback.print_exc()
            name = f"unexpected {type(error).__name__}: {str(error)[:300]}"
            self._stumble(name, f"the traceback is in {self._folder.path / 'follower.log'}")

    def _advance(self) -> None:
        if self._folder.read().status.is_final:
            self._clean_up()
            return
        if not self._record.is_started:
            self._bring_to_start()
        self._follow()
        self._clean_up()

    def _bring_to_start(self) -> None:
        has_started = self._views.view.has_started
        lacking = sorted(set(read_follower_start(self._folder).secret_names) - self._secrets.keys())
        if has_started and (lacking or self._folder.cancel_mark.exists()):
            return  # It may have begun: the machine knows, and if it has not, `_lose` ends the run.
        if lacking:
            raise RunError(
                f"the process that follows this run ended, and what followed it was not given "
                f"{', '.join(lacking)}",
                "set those variables where stillroom runs, and start the run again",
            )
        self._wait_for_others()
        self._lock_outputs()
        self._stop_if_cancelled()
        self._views.phase("bringing_up")
        self._host.bring_up()
        self._views.contact()
        self._record.price_per_hour = self._host.price_per_hour()
        self._stop_if_cancelled()
        self._views.phase("preparing")
        self._host.prepare(self._order, lambda text: self._show(text, 0, 1, "steps", at_once=True))
        self._views.contact()
        self._stop_if_cancelled()
        self._start(self._send())

    def _wait_for_others(self) -> None:
        for run_id in self._order.start_after:
            while not read_run(RunFolder(self._folder.path.with_name(run_id))).status.is_final:
                self._stop_if_cancelled()
                self._show(f"wait for {run_id}", 0, 1, "runs")
                self._sleep(_POLL_S)

    def _lock_outputs(self) -> None:
        """Keeps other runs here from writing the same outputs, as a run here does."""
        if self._locks:
            return
        for output in self._order.outputs:
            if (self._root / output).suffix:
                lock = OutputLock(self._root / output)
                lock.acquire("a run elsewhere", run_id=self._folder.run_id)
                self._locks.append(lock)

    def _send(self) -> Contents:
        self._views.phase("sending")
        wish = self._folder.cancel_mark
        contents = read_contents(self._folder, self._order, is_stopped=wish.exists)
        self._stop_if_cancelled()
        if not self._views.view.has_started:
            note_outputs(self._record, self._root, self._order.outputs, contents.files)
        write_record(self._folder, self._record)
        missing = self._host.missing(contents.blobs)
        self._views.contact()
        wanted = [blob for blob in contents.blobs if blob.sha256 in missing]
        total = sum(blob.num_bytes for blob in wanted)
        done = sum(missing.values())
        began, first = time.monotonic(), done
        for num_bytes in self._host.send(wanted, missing):
            done += num_bytes
            self._views.contact()
            phase = f"send to {self._order.machine.name}"
            self._show(phase, round(done / _MB), round(total / _MB), "MB")
            self._stop_if_cancelled()
        if done - first >= _RATE_FROM_BYTES:
            self._record.bytes_per_s = (done - first) / max(0.001, time.monotonic() - began)
        return contents

    def _start(self, contents: Contents) -> None:
        used_s, spent = self._views.used_s, self._views.machine_usd or 0.0
        start = start_request(
            self._folder,
            self._order,
            contents,
            secrets=self._secrets,
            record=self._record,
            spent_usd=spent,
        )
        if self._order.budget_usd is not None and spent >= self._order.budget_usd:
            raise RunError(
                f"the machine has cost ${spent:.2f} before the run began, and the budget is "
                f"${self._order.budget_usd:g}",
                "give a larger budget_usd; what was sent and installed stays there",
            )
        self._views.started()
        self._host.start(start)
        self._record.before_start_s, self._record.is_started = used_s, True
        write_record(self._folder, self._record, durable=True)

    def _follow(self) -> None:
        """Mirrors the run until it has ended there and all of it is here."""
        self._views.phase("running")
        self._sent_cancels.clear()
        files = BringBack(self._folder, self._root, self._order.outputs, self._record, self._fetch)
        last: FilesThere | None = None
        began = time.monotonic()
        with (
            Bringer(files) as bringer,
            closing(self._host.follow(self._folder.run_id, self._mirror.seen)) as all_news,
        ):
            for news in all_news:
                self._backoff.held(time.monotonic() - began)
                self._views.contact(
                    elapsed_s=news.elapsed_s if isinstance(news, StateThere) else None
                )
                if isinstance(news, StateThere):
                    self._confirm_start(news)
                    self._mirror.take_state(news)
                elif isinstance(news, Growth):
                    self._mirror.take_growth(news)
                elif isinstance(news, FilesThere):
                    bringer.bring(news)
                    last = news if news.is_last else None
                bringer.raise_error()
                self._pass_cancel()
            if last is None or self._mirror.final is None:
                raise UnreachableError(
                    f"{self._order.machine.name} said no more about the run", "it is asked again"
                )
            self._bring_rest(bringer, files, last)
        self._finish(files, last)

    def _confirm_start(self, news: StateThere) -> None:
        """Notes that the run is there, although the answer to the start was lost."""
        record = self._record
        if not record.is_started:
            record.before_start_s = max(0.0, self._views.used_s - news.elapsed_s)
            record.is_started = True

    def _fetch(self, path: str, offset: int) -> Generator[bytes]:
        return self._host.fetch(self._folder.run_id, path, offset)

    def _bring_rest(self, bringer: Bringer, files: BringBack, last: FilesThere) -> None:
        self._views.phase("bringing_back")
        missing = files.bytes_missing(last.files)
        before = files.num_bytes
        while not bringer.is_done(last):
            bringer.raise_error()
            phase = f"bring back from {self._order.machine.name}"
            done = min(missing, files.num_bytes - before)
            self._show(phase, round(done / _MB), round(missing / _MB), "MB")
            if files.num_bytes > before:
                self._views.contact()
            self._sleep(_POLL_S / 10)

    def _finish(self, files: BringBack, last: FilesThere) -> None:
        """Writes the run's end; all that it has written is here and verified."""
        final = self._mirror.final
        if final is None or files.bytes_missing(last.files):
            raise UnreachableError("not all files are here", "they are asked for again")
        if files.taken:
            final = _without_its_place(final, files.taken, self._folder)
        self._folder.write(final)
        self._views.contact()

    def _clean_up(self) -> None:
        """Removes the run there and puts the machine down, if it is ours to stop."""
        view, machine = self._views.view, self._order.machine
        ended_at = self._folder.state_file.stat().st_mtime
        try:
            if view.has_started and not machine.keep_remote:
                self._host.remove(self._folder.run_id)
            self._host.put_down()
        except MachineGoneError:
            pass
        except EngineError:
            if machine.is_ours_to_stop or time.time() - ended_at < _CLEAN_UP_FOR_S:
                raise
        self._views.over()

    def _pass_cancel(self) -> None:
        """Passes a wish to stop on, once to each connection."""
        if self._folder.cancel_mark.exists() and False not in self._sent_cancels:
            self._host.cancel(self._folder.run_id, kill=False)
            self._sent_cancels.add(False)
        if (self._folder.path / KILL_MARK).exists() and True not in self._sent_cancels:
            self._host.cancel(self._folder.run_id, kill=True)
            self._sent_cancels.add(True)

    def _stop_if_cancelled(self) -> None:
        if self._folder.cancel_mark.exists():
            raise RunCancelledError

    def _miss(self, error: UnreachableError) -> None:
        """Shows that the machine does not answer, which says nothing about the run there.

        One that has not answered for longer than any run may take there has ended by itself.
        """
        machine, heard_at = self._order.machine, self._record.contact_at
        silent_s = time.time() - heard_at if heard_at is not None else 0.0
        is_running = self._record.is_started and not self._folder.read().status.is_final
        if is_running and silent_s > machine.max_hours * 3600 + _SILENT_S:
            self._lose(
                MachineGoneError(
                    f"{machine.name} has not answered for {silent_s / 3600:.0f} hours, so the run "
                    f"there has stopped by itself (max_hours: {machine.max_hours:g})",
                    f"if the machine comes back, its files are in {machine.folder} there",
                )
            )
            return
        wish = ""
        if self._folder.cancel_mark.exists():
            wish = "\nthe wish to stop is passed on as soon as it answers"
        self._views.problem(f"{error}{wish}")

    def _lose(self, error: EngineError) -> None:
        """Ends a run whose machine is gone: what is here stays, and it can go on elsewhere."""
        if not self._views.view.has_started:
            self._end(RunStatus.FAILED, error.problem, error.fix)
            return
        if self._folder.read().status.is_final:
            self._clean_up()
            return
        if not self._record.is_started:
            if self._folder.cancel_mark.exists():
                self._end(RunStatus.CANCELLED)
            else:
                self._end(RunStatus.FAILED, "the run had not begun there", "start the run again")
            return
        kind = self._folder.read().kind
        fix = "its last files are lost" + (going_on(self._folder, kind) or "; start it again")
        self._end(RunStatus.INTERRUPTED, error.problem, f"{error.fix}; {fix}")

    def _stumble(self, problem: str, fix: str) -> None:
        """Ends a run that could not be started; one that was goes on, and is asked after again."""
        if self._views.view.has_started or self._folder.read().status.is_final:
            self._views.problem(f"{problem}\nfix: {fix}")
        else:
            self._end(RunStatus.FAILED, problem, fix)

    def _end(self, status: RunStatus, problem: str | None = None, fix: str = "") -> None:
        """Writes the end of a run that does not end on its machine."""
        error = RunFailure(problem=problem, fix=fix) if problem is not None else None
        state = msgspec.structs.replace(
            self._folder.read(), status=status, ended_at=now(), error=error, progress=None
        )
        # On a full disk it is tried again.
        with suppress(OSError):
            self._folder.write(state)
        self._is_due = True

    def _show(self, phase: str, done: int, total: int, unit: str, *, at_once: bool = False) -> None:
        """Shows what is done for the run before it begins, or after it has ended."""
        clock = time.monotonic()
        if clock - self._shown_at < _SHOW_EVERY_S and not at_once:
            return
        self._shown_at = clock
        progress = Progress(phase=phase, done=done, total=total, unit=unit, eta_s=None)
        state = msgspec.structs.replace(self._folder.read(), progress=progress)
        self._folder.write(state, durable=False)

    def _wait(self) -> None:
        """Waits before the next try; a new wish to stop ends the wait."""
        if self._is_due or self._views.is_over:
            self._is_due = False
            return
        had_wish = self._folder.cancel_mark.exists()
        deadline = time.monotonic() + self._backoff.next_s()
        while time.monotonic() < deadline:
            if self._folder.cancel_mark.exists() and not had_wish:
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


def _here_fix(error: OSError) -> str:
    import errno

    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on this machine; the run goes on, and it is tried again"
    return "check the permissions of the run's folder; it is tried again"
