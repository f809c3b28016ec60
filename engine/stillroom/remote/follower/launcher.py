"""Launches a run on its machine; each step is skipped if an earlier follower completed it."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stillroom.errors import EngineError, RunError
from stillroom.jobs.remote_runs import read_follower_start
from stillroom.jobs.supervise import read_run
from stillroom.remote.bundle.layout import Contents, read_contents
from stillroom.remote.follower.local_run import (
    FollowRecord,
    GrownFile,
    LocalRun,
    stamp_of,
    write_record,
)
from stillroom.remote.host import RunHost
from stillroom.remote.known_machines import load_probe, save_probe
from stillroom.remote.records import LaunchRequest, PlacedFile
from stillroom.remote.run_files import is_output
from stillroom.run_folder import RunFolder
from stillroom.settings import Workspace

_POLL_S = 0.5
_MIN_BYTES_FOR_RATE = 1 << 20
_MB = 1e6
_HOUR_S = 3600.0
_MIN_RESERVE_S = 60.0
_MAX_BUDGET_SHARE = 0.25
_SLOW_BYTES_PER_S = 10e6
_CHECKPOINT_PER_MODEL = 3
"""The size of a checkpoint relative to the model's: its weights and two optimiser states."""
_WORKSPACE = "workspace/"
_WEIGHTS = frozenset({".safetensors", ".bin", ".gguf", ".pt"})


class Launcher:
    """Launches a run: waits its turn, provisions and prepares the machine, and uploads files."""

    def __init__(
        self,
        run: LocalRun,
        host: RunHost,
        secrets: Mapping[str, str],
        sleep: Callable[[float], None],
    ) -> None:
        self._run, self._host, self._secrets, self._sleep = run, host, secrets, sleep

    def launch(self) -> None:
        """Launches the run; returns when the machine has confirmed the start.

        Also returns if a launch was already requested and cannot be repeated; then only the machine
        knows whether the run has started. Raises RunCancelledError, UnreachableError,
        MachineGoneError, or another EngineError.
        """
        run, host = self._run, self._host
        start = read_follower_start(run.folder)
        missing = sorted(set(start.secret_names) - self._secrets.keys())
        if run.view.has_started and (missing or run.is_cancelled):
            return
        if missing:
            raise RunError(
                "the local process that follows this run was restarted without "
                f"{', '.join(missing)} in its environment",
                "set those environment variables where stillroom runs, and start the run again",
            )
        self._wait_for_earlier_runs()
        run.lock_outputs()
        run.stop_if_cancelled()
        run.view.record_phase("bringing_up")
        if run.spec.machine.access.bills_from == "provision":
            # A cloud bills from provisioning on, not from the first contact.
            run.view.record_use()
        host.provision()
        run.view.record_contact()
        run.record.price_per_hour = host.price_per_hour()
        self._check_price()
        run.stop_if_cancelled()
        run.view.record_phase("preparing")
        host.prepare(run.spec, self._show_step)
        run.view.record_contact()
        self._cache_facts()
        run.stop_if_cancelled()
        self._start(self._upload())

    def _show_step(self, text: str) -> None:
        """Shows the current step; an empty text only records that the machine answers."""
        self._run.view.record_contact()
        if text:
            self._run.show_progress(text)
            sys.stderr.write(f"{text}\n")

    def _check_price(self) -> None:
        """Raises RunError if there is a budget but the machine's price is unknown."""
        spec = self._run.spec
        if spec.budget_usd is not None and self._run.record.price_per_hour is None:
            raise RunError(
                f"budget_usd includes the cost of {spec.machine.name}, whose provider lists no "
                "price",
                f"set price_per_hour of {spec.machine.name} in {spec.machine.file}, or leave "
                "budget_usd out",
            )

    def _cache_facts(self) -> None:
        """Caches the machine's facts for later plans.

        Cached facts are replaced if Stillroom was not installed when they were collected.
        """
        workspace, machine = Workspace(self._run.root), self._run.spec.machine
        probe = load_probe(workspace, machine)
        if probe is None or probe.facts.stillroom_version is None:
            # Without them, plans are less accurate; the run is unaffected.
            with suppress(EngineError, OSError):
                save_probe(workspace, machine, self._host.facts(), self._run.record.price_per_hour)

    def _wait_for_earlier_runs(self) -> None:
        """Waits until the runs of the spec's `start_after` have ended."""
        folder = self._run.folder
        for run_id in self._run.spec.start_after:
            while not read_run(RunFolder(folder.path.with_name(run_id))).status.is_final:
                self._run.stop_if_cancelled()
                self._run.show_progress(f"wait for {run_id}", unit="runs", is_throttled=True)
                self._sleep(_POLL_S)

    def _upload(self) -> Contents:
        """Uploads the files that the machine lacks; returns the contents of all the run's files."""
        run = self._run
        run.view.record_phase("sending")
        contents = read_contents(run.folder, run.spec, is_stopped=run.folder.cancel_mark.exists)
        run.stop_if_cancelled()
        if not run.view.has_started:
            record_outputs(run.record, run.root, run.spec.outputs, contents.files)
            write_record(run.folder, run.record)
        missing = self._host.missing(contents.blobs)
        run.view.record_contact()
        blobs = [blob for blob in contents.blobs if blob.sha256 in missing]
        total, done = sum(blob.num_bytes for blob in blobs), sum(missing.values())
        started_at, done_before = time.monotonic(), done
        for num_bytes in self._host.send(blobs, missing) if blobs else ():
            done += num_bytes
            run.view.record_contact()
            phase = f"send to {run.spec.machine.name}"
            run.show_progress(phase, round(done / _MB), round(total / _MB), "MB", is_throttled=True)
            run.stop_if_cancelled()
        if (num_sent := done - done_before) >= _MIN_BYTES_FOR_RATE:
            run.record.bytes_per_s = num_sent / max(0.001, time.monotonic() - started_at)
        return contents

    def _start(self, contents: Contents) -> None:
        """Requests the launch and records it. Raises RunError if the budget is already spent."""
        run, view = self._run, self._run.view
        used_s, spent_usd, budget = view.used_s, view.machine_usd or 0.0, run.spec.budget_usd
        if budget is not None and spent_usd >= budget:
            raise RunError(
                f"the machine cost ${spent_usd:.2f} before the run started, which exceeds the "
                f"run's budget of ${budget:g}",
                "raise budget_usd; uploaded files and installed packages stay on the machine",
            )
        request = self._request(contents, spent_usd)
        run.stop_if_cancelled()
        view.record_launch()
        self._host.start(request)
        run.record.before_start_s, run.record.is_started = used_s, True
        write_record(run.folder, run.record, durable=True)

    def _request(self, contents: Contents, spent_usd: float) -> LaunchRequest:
        """Returns the request that launches the run on the machine."""
        folder, spec, record = self._run.folder, self._run.spec, self._run.record
        weights = [blob for blob in contents.blobs if Path(blob.source).suffix in _WEIGHTS]
        return LaunchRequest(
            run_id=folder.run_id,
            files=contents.files,
            home_paths=spec.home_paths,
            home_root=folder.read_request().workspace,
            request=folder.request_file.read_bytes(),
            # The small files with which the run's folder was created, such as given_config.yml.
            run_files={
                path.name: path.read_bytes()
                for path in sorted(folder.path.glob("given_*"))
                if path.is_file() and not path.is_symlink()
            },
            notes=list(folder.read().notes),
            outputs=spec.outputs,
            secrets=dict(self._secrets),
            variables=spec.variables,
            max_hours=spec.machine.max_hours,
            price_per_hour=record.price_per_hour,
            budget_usd=spec.budget_usd,
            spent_usd=spent_usd,
            reserve_s=reserve_s(
                price_per_hour=record.price_per_hour,
                budget_usd=spec.budget_usd,
                model_bytes=sum(blob.num_bytes for blob in weights),
                bytes_per_s=record.bytes_per_s,
            ),
        )


def record_outputs(
    record: FollowRecord, root: Path, outputs: Sequence[str], files: Sequence[PlacedFile]
) -> None:
    """Records the outputs that exist locally, so that later changes by other processes are noticed.

    Uploaded outputs, such as rows and their journal, count as mirrored up to their current size.
    """
    for path in _output_paths(root, outputs):
        name = path.relative_to(root).as_posix()
        if path.exists() and is_output(name, outputs):
            record.initial_stamps[name] = stamp_of(path)
    for file in files:
        name = file.remote_path.removeprefix(_WORKSPACE)
        # Files outside of the workspace do not have the prefix.
        if name in record.initial_stamps and name != file.remote_path:
            status = (root / name).stat()
            record.grown[name] = GrownFile(
                remote_bytes=status.st_size,
                local_bytes=status.st_size,
                changed_at=status.st_mtime_ns,
            )


def _output_paths(root: Path, outputs: Sequence[str]) -> Iterator[Path]:
    """Yields the paths of the outputs, of the files in them, and of their sibling files."""
    for output in outputs:
        path = root / output
        yield path
        yield from path.rglob("*") if path.is_dir() else ()
        for sibling in path.parent.iterdir() if path.parent.is_dir() else ():
            yield sibling
            if sibling.name == f".{path.name}" and sibling.is_dir():
                yield from sibling.rglob("*")


def reserve_s(
    *,
    price_per_hour: float | None,
    budget_usd: float | None,
    model_bytes: int,
    bytes_per_s: float | None,
) -> float:
    """Returns the machine time in seconds to reserve for the last checkpoint and its download.

    At most a quarter of the time that the budget pays for; 0 without a budget or a price.
    """
    if not price_per_hour or budget_usd is None:
        return 0.0
    download_s = _CHECKPOINT_PER_MODEL * model_bytes / (bytes_per_s or _SLOW_BYTES_PER_S)
    affordable_s = budget_usd / price_per_hour * _HOUR_S
    return min(_MIN_RESERVE_S + download_s, _MAX_BUDGET_SHARE * affordable_s)
