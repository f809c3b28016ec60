"""The steps until a run has begun on its machine; each finds its work done if it was."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from stillroom.errors import EngineError, RunError
from stillroom.jobs.remote_runs import read_follower_start
from stillroom.jobs.supervise import read_run
from stillroom.remote.bundle.contents import Contents, read_contents
from stillroom.remote.follower.local_run import LocalRun
from stillroom.remote.follower.record import write_record
from stillroom.remote.follower.sending import launch_request, note_outputs
from stillroom.remote.host import RunHost
from stillroom.remote.known_machines import recall, remember
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace

_POLL_S = 0.5
_RATE_FROM_BYTES = 1 << 20
_MB = 1e6


class Launcher:
    """Brings a run to its start: its turn, the machine, what it needs there, its files."""

    def __init__(
        self,
        run: LocalRun,
        host: RunHost,
        secrets: Mapping[str, str],
        sleep: Callable[[float], None],
    ) -> None:
        self._run, self._host, self._secrets, self._sleep = run, host, secrets, sleep

    def launch(self) -> None:
        """Returns when the machine has confirmed the start, or alone can know whether it began.

        Raises RunCancelledError, UnreachableError, MachineGoneError, or another EngineError.
        """
        run, host = self._run, self._host
        known = read_follower_start(run.folder)
        lacking = sorted(set(known.secret_names) - self._secrets.keys())
        if run.views.view.has_started and (lacking or run.is_to_stop):
            return
        if lacking:
            raise RunError(
                "the process that follows this run ended, and the one that took its place was not "
                f"given {', '.join(lacking)}",
                "set those variables where stillroom runs, and start the run again",
            )
        self._wait_for_others()
        run.lock_outputs()
        run.stop_if_cancelled()
        run.views.phase("bringing_up")
        if run.spec.machine.skypilot is not None:
            # A cloud bills from the moment at which it has the machine, not from our first contact.
            run.views.in_use()
        host.provision()
        run.views.contact()
        run.record.price_per_hour = host.price_per_hour()
        self._refuse_unknown_price()
        run.stop_if_cancelled()
        run.views.phase("preparing")
        host.prepare(run.spec, run.show)
        run.views.contact()
        self._learn_facts()
        run.stop_if_cancelled()
        self._start(self._send())

    def _refuse_unknown_price(self) -> None:
        """Raises RunError if a budget cannot be kept, since nobody says what the machine costs."""
        spec = self._run.spec
        if spec.budget_usd is not None and self._run.record.price_per_hour is None:
            raise RunError(
                f"budget_usd counts what {spec.machine.name} costs, and its provider names no "
                "price",
                f"write price_per_hour to the entry {spec.machine.name} in {spec.machine.file}, "
                "or leave budget_usd out",
            )

    def _learn_facts(self) -> None:
        """Keeps what the machine has, for plans to come, unless that is known."""
        workspace, machine = Workspace(self._run.root), self._run.spec.machine
        if recall(workspace, machine) is None:
            # Without them a plan is less exact, and the run none the worse.
            with suppress(EngineError, OSError):
                remember(workspace, machine, self._host.facts(), self._run.record.price_per_hour)

    def _wait_for_others(self) -> None:
        folder = self._run.folder
        for run_id in self._run.spec.start_after:
            while not read_run(RunFolder(folder.path.with_name(run_id))).status.is_final:
                self._run.stop_if_cancelled()
                self._run.show(f"wait for {run_id}", unit="runs", at_once=False)
                self._sleep(_POLL_S)

    def _send(self) -> Contents:
        run = self._run
        run.views.phase("sending")
        wish = run.folder.cancel_mark
        contents = read_contents(run.folder, run.spec, is_stopped=wish.exists)
        run.stop_if_cancelled()
        if not run.views.view.has_started:
            note_outputs(run.record, run.root, run.spec.outputs, contents.files)
            write_record(run.folder, run.record)
        missing = self._host.missing(contents.blobs)
        run.views.contact()
        wanted = [blob for blob in contents.blobs if blob.sha256 in missing]
        if wanted:
            total, done = sum(blob.num_bytes for blob in wanted), sum(missing.values())
            began, first = time.monotonic(), done
            for num_bytes in self._host.send(wanted, missing):
                done += num_bytes
                run.views.contact()
                phase = f"send to {run.spec.machine.name}"
                run.show(phase, round(done / _MB), round(total / _MB), "MB", at_once=False)
                run.stop_if_cancelled()
            if done - first >= _RATE_FROM_BYTES:
                run.record.bytes_per_s = (done - first) / max(0.001, time.monotonic() - began)
        return contents

    def _start(self, contents: Contents) -> None:
        run, views = self._run, self._run.views
        used_s, spent, budget = views.used_s, views.machine_usd or 0.0, run.spec.budget_usd
        if budget is not None and spent >= budget:
            raise RunError(
                f"the machine has cost ${spent:.2f} before the run began, and the budget is "
                f"${budget:g}",
                "give a larger budget_usd; what was sent and installed stays there",
            )
        start = launch_request(
            run.folder,
            run.spec,
            contents,
            secrets=self._secrets,
            record=run.record,
            spent_usd=spent,
        )
        run.stop_if_cancelled()
        views.started()
        self._host.start(start)
        run.record.before_start_s, run.record.is_started = used_s, True
        write_record(run.folder, run.record, durable=True)
