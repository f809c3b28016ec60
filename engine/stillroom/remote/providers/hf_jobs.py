"""A Hugging Face job as a machine: it is provisioned when a run starts, and ends with the run.

A job accepts no connections, so everything is exchanged through a private bucket (`hf_bucket.py`);
in the job, `hf_job_program.py` does what a follower does with other machines. Each run has its own
job.
"""

import platform
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import msgspec

from stillroom.remote.frames import quote_remote_fix
from stillroom.remote.host import MachineError, MachineGoneError, UnreachableError
from stillroom.remote.machine import HfJobsFlavor, Machine
from stillroom.remote.providers.hf_bucket import (
    BUCKET_VARIABLE,
    CODE_VARIABLE,
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
    UpdateReader,
    check_hub_installed,
    code_path,
    content_path,
)
from stillroom.remote.providers.hf_calls import HubJobs, price_of, time_limit
from stillroom.remote.providers.provision_log import ProvisionedMachine, ProvisionLog
from stillroom.remote.records import (
    Blob,
    Heartbeat,
    JobSpec,
    LaunchRequest,
    MachineFacts,
    RemoteFiles,
    RemoteState,
    RunUpdate,
)
from stillroom.remote.ssh.bootstrap import code_archive, code_hash
from stillroom.remote.ssh.requirements import (
    LocalPackages,
    local_packages,
    run_requirements,
)
from stillroom.settings import Workspace

_BUCKET = "stillroom-runs"
_FETCHED_FOLDER = ".remote_fetched"
_POLL_S = 6.0
_POLLS_PER_STATUS = 5
"""The number of polls of the bucket per query of the job's status."""
_PIECE_BYTES = 1 << 20
_GROUP_BYTES = 64 << 20


class HfJobsHost:
    """A `RunHost` for one run, which a Hugging Face job executes.

    run: the run's local folder.
    api: huggingface_hub's `HfApi` or a compatible object.
    token: the token with which the job accesses the bucket.
    """

    def __init__(
        self,
        machine: Machine,
        run: Path | None,
        *,
        api: Any,
        token: str | None,
        provision_log: ProvisionLog,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._machine, self._run = machine, run
        # Machines of this kind have `hf_jobs`; the default only satisfies the type checker.
        self._flavor = machine.hf_jobs or HfJobsFlavor(flavor="cpu-basic")
        self._jobs = HubJobs(api, self._flavor.namespace)
        self._api, self._token, self._log, self._pause = api, token, provision_log, pause
        self._num_polls = 0

    @property
    def name(self) -> str:
        """The job's name."""
        return f"stillroom-{self._run_folder.name}"

    def provision(self) -> None:
        """Checks the token and creates the bucket. The job itself is started by `start`."""
        if self._token is None:
            raise MachineError(
                f"{self._machine.name}: there is no Hugging Face token on this machine",
                "log in with `hf auth login`, or set HF_TOKEN",
            )
        self._bucket.create()

    def price_per_hour(self) -> float | None:
        """Returns the price in machines.yml, or else the flavor's listed price, in US dollars."""
        if self._machine.price_per_hour is not None:
            return self._machine.price_per_hour
        hardware = self._jobs.find_hardware(self._flavor.flavor)
        return None if hardware is None else price_of(hardware)

    def facts(self) -> MachineFacts:
        """Returns the flavor's hardware as listed by the service."""
        hardware = self._jobs.find_hardware(self._flavor.flavor)
        if hardware is None:
            raise MachineError(
                f"{self._machine.name}: Hugging Face has no flavor {self._flavor.flavor!r}",
                "use a flavor that `hf jobs hardware` lists",
            )
        accelerator = hardware.accelerator
        return MachineFacts(
            system=f"a Hugging Face job ({hardware.pretty_name}), provisioned when a run starts",
            has_uv=self._flavor.image is None,
            num_processors=_leading_int(hardware.cpu),
            memory_gb=_leading_int(hardware.ram),
            free_disk_gb=_leading_int(hardware.ephemeral_storage),
            gpus=[]
            if accelerator is None
            else [f"{accelerator.quantity} x {accelerator.model}, {accelerator.vram} in total"],
            gpu_memory_gb=[] if accelerator is None else _gpu_memory_gb(accelerator),
        )

    def prepare(self, spec: JobSpec, report: Callable[[str], None]) -> None:
        """Uploads Stillroom's code and the list of packages for the job to the bucket."""
        bucket, code = self._bucket, code_path(code_hash())
        if code not in bucket.sizes([code]):
            report("upload code")
            bucket.put([(code_archive(), code)])
        packages = JobPackages(spec=spec, local_packages=local_packages())
        bucket.put([(msgspec.msgpack.encode(packages), self._paths.packages)])

    def missing(self, blobs: Sequence[Blob]) -> dict[str, int]:
        """Returns the hashes of missing blobs, each with 0 bytes: a bucket has no partial blobs."""
        stored = self._bucket.sizes([content_path(blob.sha256) for blob in blobs])
        missing = [b for b in blobs if stored.get(content_path(b.sha256)) != b.num_bytes]
        return {blob.sha256: 0 for blob in missing}

    def send(self, blobs: Sequence[Blob], offsets: Mapping[str, int]) -> Iterator[int]:
        """Uploads blobs to the bucket; the job verifies their hashes before the run starts."""
        bucket = self._bucket
        for group in _upload_groups(blobs):
            bucket.put([(Path(blob.source), content_path(blob.sha256)) for blob in group])
            yield sum(blob.num_bytes for blob in group)

    def start(self, run: LaunchRequest) -> None:
        """Starts the job that executes the run, unless it was started before."""
        with self._log.lock_entry(self.name) as locked:
            entry = locked.add(self._machine, self.name, self._run_folder)
            if entry.request_id is not None:
                return
            # An interrupted start may have succeeded.
            job_id = self._jobs.find(run.run_id)
            if job_id is None:
                try:
                    job_id = self._start_job(run)
                except MachineError as error:
                    # The service has rejected it, so there will never be a job.
                    locked.remove()
                    raise MachineGoneError(error.problem, error.fix) from error
            locked.update(request_id=job_id, price_per_hour=self.price_per_hour())

    def follow(self, run_id: str, seen: Mapping[str, int]) -> Generator[RunUpdate]:
        """Yields the run's updates, which the job writes to the bucket every few seconds."""
        reader, has_ended = UpdateReader(self._bucket, self._run_folder, seen), False
        if reader.files:
            yield RemoteFiles(files=reader.files, is_last=False)
        while True:
            batch = reader.next_batch()
            for update in batch or []:
                yield self._check_update(update)
                if isinstance(update, RemoteFiles) and update.is_last:
                    return
            if batch is not None:
                reader.mark_processed()
                continue
            if has_ended:
                raise self._lost_job_error()
            # Read the bucket once more for the job's last updates before it counts as lost.
            has_ended = self._has_job_ended()
            yield Heartbeat()
            if not has_ended:
                self._pause(_POLL_S)

    def fetch(self, run_id: str, path: str, offset: int) -> Generator[bytes]:
        """Yields the bytes of a finished file, which is among the run's outputs in the bucket."""
        files = UpdateReader(self._bucket, self._run_folder, {}).files
        file = next((each for each in files if each.path == path), None)
        if file is None:
            raise UnreachableError(
                f"{path} is not in the bucket yet", "no action needed: Stillroom retries"
            )
        fetched = self._run_folder / _FETCHED_FOLDER / file.sha256
        if not fetched.is_file() or fetched.stat().st_size != file.num_bytes:
            fetched.parent.mkdir(exist_ok=True)
            self._download(path, file.sha256, fetched)
        with fetched.open("rb") as stream:
            stream.seek(offset)
            while data := stream.read(_PIECE_BYTES):
                yield data
        fetched.unlink()
        with suppress(OSError):  # The folder has other files.
            fetched.parent.rmdir()

    def cancel(self, run_id: str, *, kill: bool) -> None:
        """Writes a mark to the bucket that the job polls for; a second `kill` cancels the job."""
        paths, bucket = RunPaths(run_id), self._bucket
        is_repeated = kill and paths.kill in bucket.sizes([paths.kill])
        job_id = self._job_id()
        if job_id is not None and (is_repeated or self._jobs.stage(job_id) == "SCHEDULING"):
            self._jobs.cancel(job_id)
        bucket.put([(b"now\n", paths.kill if kill else paths.cancel)])

    def remove(self, run_id: str) -> None:
        """Deletes the run's files and its outputs from the bucket; input files stay for later runs.

        The job is cancelled first if it has not ended, since it would write more.
        """
        self.release()
        self._bucket.delete_run(run_id)

    def release(self) -> None:
        """Cancels the job if there is one that has not ended."""
        self._jobs.release(self._log, self.name, run=self._run_folder)

    def close(self) -> None:
        """Does nothing: there is no connection."""

    @property
    def _run_folder(self) -> Path:
        if self._run is None:
            raise ValueError("this host was opened without a run")
        return self._run

    @property
    def _paths(self) -> RunPaths:
        return RunPaths(self._run_folder.name)

    @property
    def _bucket(self) -> Bucket:
        return Bucket(self._api, f"{self._jobs.namespace}/{_BUCKET}")

    def _start_job(self, run: LaunchRequest) -> str:
        """Writes the run to the bucket, starts its job, and returns the job's id."""
        price = self.price_per_hour()
        timeout_s = time_limit(self._flavor, run, price)
        public_run = msgspec.structs.replace(run, secrets={}, price_per_hour=price)
        start = JobStart(run=public_run, timeout_s=timeout_s)
        self._bucket.put([(msgspec.msgpack.encode(start), self._paths.start)])
        return self._jobs.run(
            run.run_id,
            self._flavor,
            variables={
                BUCKET_VARIABLE: self._bucket.name,
                RUN_VARIABLE: run.run_id,
                START_VARIABLE: token_hex(8),
                CODE_VARIABLE: code_path(code_hash()),
            },
            secrets={
                TOKEN_VARIABLE: self._token or "",
                SECRETS_VARIABLE: msgspec.json.encode(run.secrets).decode(),
            },
            timeout_s=timeout_s,
            packages=_bootstrap_packages(local_packages()),
        )

    def _download(self, path: str, sha256: str, target: Path) -> None:
        """Downloads a file of the run, `path` in its folder, from the bucket to `target`."""
        # Jobs of earlier versions put their outputs next to the inputs.
        bucket_paths = [self._paths.output(sha256), content_path(sha256)]
        sizes = self._bucket.sizes(bucket_paths)
        found = [bucket_path for bucket_path in bucket_paths if bucket_path in sizes]
        if not found:
            # The run has deleted a checkpoint, as the next update will show.
            raise UnreachableError(
                f"{path} is no longer in the bucket", "no action needed: Stillroom retries"
            )
        self._bucket.download(found[0], target)

    def _job_id(self) -> str | None:
        entry = self._log.find(self.name)
        if entry is not None and entry.request_id is not None:
            return entry.request_id
        return self._jobs.find(self._run_folder.name)

    def _check_update(self, update: JobUpdate) -> RunUpdate:
        """Returns an update of the run. Raises MachineGoneError for the job's failure."""
        if isinstance(update, JobFailure):
            problem = f"{self._machine.name}: {update.problem}"
            raise MachineGoneError(*quote_remote_fix(problem, update.fix))
        if isinstance(update, RemoteState):
            # The state is some seconds old; the service's clocks are assumed to be accurate.
            return msgspec.structs.replace(update, clock=time.time())
        return update

    def _has_job_ended(self) -> bool:
        """Returns whether the job has ended; checks it at every fifth call only, else False."""
        self._num_polls += 1
        if self._num_polls % _POLLS_PER_STATUS:
            return False
        job_id = self._job_id()
        return job_id is None or self._jobs.has_ended(job_id)

    def _lost_job_error(self) -> MachineGoneError:
        """Returns the error for a job that ended without posting its last update."""
        job_id = self._job_id()
        text = "" if job_id is None else self._jobs.final_log(job_id)
        return MachineGoneError(
            f"the job {job_id or self.name} ended without reporting the run's result{text}",
            f"see `hf jobs inspect {job_id or 'ID'}` for the reason",
        )


def open_job(machine: Machine, run: Path | None = None) -> HfJobsHost:
    """Returns the host for a run in a job; nothing is started yet.

    Raises MissingExtraError if huggingface_hub is not installed.
    """
    api, token = _api_and_token(run)
    return HfJobsHost(machine, run, api=api, token=token, provision_log=ProvisionLog())


def release_job(entry: ProvisionedMachine, provision_log: ProvisionLog) -> None:
    """Cancels the job of an entry of the provision log, unless its run still needs it.

    Also deletes the files in the bucket of a run whose local folder was deleted.
    Raises MissingExtraError if huggingface_hub is not installed.
    """
    namespace = None if entry.machine.hf_jobs is None else entry.machine.hf_jobs.namespace
    api, _ = _api_and_token(next(map(Path, entry.runs), None))
    jobs = HubJobs(api, namespace)
    jobs.release(provision_log, entry.name, run=None)
    if provision_log.find(entry.name) is None:
        for run in map(Path, entry.runs):
            if not run.exists():
                Bucket(api, f"{jobs.namespace}/{_BUCKET}").delete_run(run.name)


def _api_and_token(run: Path | None) -> tuple[Any, str | None]:
    """Returns the hub's API client and the token, which a run's workspace may override.

    Raises MissingExtraError if huggingface_hub is not installed.
    """
    check_hub_installed()
    from huggingface_hub import HfApi, get_token

    workspace_token = None if run is None else Workspace(run.parents[1]).read_key(TOKEN_VARIABLE)
    token = workspace_token or get_token()
    return HfApi(token=token), token


def _bootstrap_packages(local: LocalPackages) -> list[str]:
    """Returns the pinned requirements of the program in the job."""
    required = run_requirements(local, [], [], python_version=platform.python_version())
    names = {requirement.name.lower() for requirement in required}
    return [
        f"{name}=={version}"
        for name, version in sorted(local.versions.items())
        if name in names | {"huggingface-hub", "packaging"}
    ]


def _upload_groups(blobs: Sequence[Blob]) -> Iterator[list[Blob]]:
    """Yields the distinct blobs in groups of up to 64 MB that are uploaded together."""
    group, size = list[Blob](), 0
    for blob in {blob.sha256: blob for blob in blobs}.values():
        if group and size + blob.num_bytes > _GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(blob)
        size += blob.num_bytes
    if group:
        yield group


def _leading_int(text: object) -> int | None:
    """Returns the leading number of a text such as `16 GB`; None if there is none."""
    word = (str(text).split() or [""])[0]
    return int(word) if word.isdecimal() else None


def _gpu_memory_gb(accelerator: Any) -> list[float]:
    """Returns the memory in GB of each of a flavor's GPUs; empty if it is not listed."""
    number, memory = _leading_int(accelerator.quantity), _leading_int(accelerator.vram)
    return [memory / number] * number if number and memory else []
