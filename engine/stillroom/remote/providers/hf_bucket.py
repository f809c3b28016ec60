"""The private bucket on the Hugging Face Hub by which a job and the user's machine communicate.

A job accepts no connections, so both sides exchange messages as files of the bucket.
"""

import importlib.util
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from stillroom import bounds
from stillroom.errors import DataError, EngineError, missing_extra
from stillroom.files import read_json, write_json
from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.records import (
    AppendedLines,
    JobSpec,
    LaunchRequest,
    RemoteFile,
    RemoteFiles,
    RunUpdate,
)
from stillroom.remote.ssh.requirements import LocalPackages
from stillroom.run_folder import JOB_FILE

_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
_MAX_CHARS = 600
_FIXES = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token with write access",
    402: "jobs need prepaid credit: see https://huggingface.co/settings/billing",
    403: "use a token that may write repositories and start jobs "
    "(https://huggingface.co/settings/tokens), in a namespace whose plan includes jobs",
    404: "check `namespace` of the machine in machines.yml",
}


def content_path(sha256: str) -> str:
    """Returns the path of an input file in the bucket, which all runs share."""
    return f"store/{sha256}"


def code_path(code: str) -> str:
    """Returns the path of the archive of Stillroom's code with this hash."""
    return f"code/{code}.tar.gz"


class RunPaths:
    """The paths of one run's files in the bucket."""

    def __init__(self, run_id: str) -> None:
        self.folder = f"runs/{run_id}"
        self.packages = f"{self.folder}/packages.bin"
        """The packages to install, as `JobPackages`."""
        self.start = f"{self.folder}/start.bin"
        """The run to start, as `JobStart`, without secrets."""
        self.claim = f"{self.folder}/claim"
        """The id of the job that executes the run; any other job of the run exits immediately."""
        self.cancel = f"{self.folder}/cancel"
        self.kill = f"{self.folder}/kill"

    def output(self, sha256: str) -> str:
        """Returns the path of an output file, which is this run's alone and deleted with it."""
        return f"{self.folder}/outputs/{sha256}"

    def update_batch(self, number: int) -> str:
        """Returns the path of a batch of updates; batches are numbered from 1 and written once."""
        return f"{self.folder}/news/{number:08d}.bin"


class Bucket:
    """A bucket. `api` is huggingface_hub's `HfApi` or a compatible object."""

    def __init__(self, api: Any, name: str) -> None:
        self._api, self.name = api, name

    def create(self) -> None:
        """Creates the private bucket unless it exists.

        Raises MachineError if the bucket is public.
        """
        with hub_errors(f"could not create the private bucket {self.name}"):
            self._api.create_bucket(self.name, private=True, exist_ok=True)
            is_private = self._api.bucket_info(self.name).private
        if not is_private:
            raise MachineError(
                f"the bucket {self.name} is public, but your rows would be uploaded to it",
                f"make it private: https://huggingface.co/buckets/{self.name}",
            )

    def sizes(self, paths: Iterable[str]) -> dict[str, int]:
        """Returns the sizes in bytes of the files that exist, by path."""
        with hub_errors(f"could not list files in the bucket {self.name}"):
            files = self._api.get_bucket_paths_info(self.name, list(paths))
            return {file.path: file.size for file in files}

    def put(self, files: Sequence[tuple[Path | bytes, str]]) -> None:
        """Writes files atomically, given as pairs of local path or content, and bucket path."""
        if files:
            with hub_errors(f"could not write to the bucket {self.name}"):
                self._api.batch_bucket_files(self.name, add=list(files))

    def download(self, path: str, target: Path) -> None:
        """Downloads an existing file."""
        with hub_errors(f"could not read {path} in the bucket {self.name}"):
            self._api.download_bucket_files(
                self.name, [(path, target)], raise_on_missing_files=True
            )

    def read(self, path: str) -> bytes:
        """Returns the content of an existing small file."""
        with TemporaryDirectory() as folder:
            target = Path(folder) / "file"
            self.download(path, target)
            return target.read_bytes()

    def list_files(self, folder: str) -> list[str]:
        """Returns the paths of the files below a folder."""
        with hub_errors(f"could not list files in the bucket {self.name}"):
            # The hub takes a prefix of paths, which another folder's name may begin with too.
            items = list(self._api.list_bucket_tree(self.name, f"{folder}/", recursive=True))
            return [item.path for item in items if item.type == "file"]

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes existing files."""
        if paths:
            with hub_errors(f"could not delete files in the bucket {self.name}"):
                self._api.batch_bucket_files(self.name, delete=list(paths))

    def delete_run(self, run_id: str) -> None:
        """Deletes a run's files, but no input files, which all runs share."""
        self.delete(self.list_files(RunPaths(run_id).folder))


@contextmanager
def hub_errors(problem: str) -> Generator[None]:
    """Converts the hub's errors to UnreachableError if a retry may help, else to MachineError."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except EngineError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        text = f"{problem}: {_one_line(error)}"
        if status == _TOO_MANY_REQUESTS or status >= _SERVER_ERROR:
            raise UnreachableError(text, "no action needed: Stillroom retries") from error
        fix = _FIXES.get(status, "fix the error reported by the Hub, then try again")
        raise MachineError(text, fix) from error
    except Exception as error:  # Network errors and errors of huggingface_hub's dependencies.
        raise UnreachableError(
            f"{problem}: {type(error).__name__}: {_one_line(error)}",
            "no action needed: Stillroom retries; see https://status.huggingface.co",
        ) from error


def check_hub_installed() -> None:
    """Raises MissingExtraError if huggingface_hub is not installed or too old for jobs."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise missing_extra("hf-jobs", "a Hugging Face Jobs machine")
    from huggingface_hub import HfApi

    if not hasattr(HfApi, "batch_bucket_files") or not hasattr(HfApi, "run_job"):
        raise missing_extra("hf-jobs", "a Hugging Face Jobs machine (huggingface_hub is too old)")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_CHARS]


BUCKET_VARIABLE = "STILLROOM_JOB_BUCKET"
RUN_VARIABLE = "STILLROOM_JOB_RUN"
CODE_VARIABLE = "STILLROOM_JOB_CODE"
SECRETS_VARIABLE = "STILLROOM_JOB_SECRETS"
"""The run's secrets as JSON. The service stores a job's secrets encrypted, separately from its
environment, and passes them only to its process; the job has no standard input."""
START_VARIABLE = "STILLROOM_JOB_START"
"""A random id, so that only one of two jobs that were started for a run executes it."""
TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105


class JobPackages(msgspec.Struct, frozen=True, kw_only=True):
    """The packages that a job installs before it starts the run."""

    spec: JobSpec = msgspec.field(name="order")
    local_packages: LocalPackages = msgspec.field(name="home")
    """The packages that are installed on the user's machine."""


class JobStart(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a job executes."""

    run: LaunchRequest
    """The launch request, without its secrets."""
    timeout_s: float
    """The time after which the service terminates the job."""


class JobFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """The error because of which the job could not execute or finish the run."""

    problem: str
    fix: str


JobUpdate = RunUpdate | JobFailure


class ReaderPosition(msgspec.Struct, kw_only=True):
    """The reader's position in a job's updates, stored in the run's local folder."""

    next_batch: int = msgspec.field(name="next_news", default=1)
    """The number of the batch to read next."""
    ends: dict[str, int] = {}
    """The size in bytes of each growing file before that batch."""
    files: list[RemoteFile] = []
    """The latest list of finished files."""


class UpdateReader:
    """Reads the updates of a run's job, starting where an earlier reader stopped.

    run: the run's local folder.
    seen: the number of bytes of each growing file that are mirrored already and are skipped. If
    bytes are missing because the local file was changed, all updates are read again.
    """

    def __init__(self, bucket: Bucket, run: Path, seen: Mapping[str, int]) -> None:
        self._bucket, self._paths, self._file = bucket, RunPaths(run.name), run / JOB_FILE
        self._position = self._read_position()
        self._ends = dict(seen)
        """The number of bytes received so far of each growing file."""
        ends = self._position.ends
        self._skipped = {path: end for path, end in seen.items() if ends.get(path) != end}
        """Where new bytes begin in files that a killed reader's unfinished batch has extended."""
        self._has_restarted = False

    @property
    def files(self) -> list[RemoteFile]:
        """The latest list of finished files."""
        return self._position.files

    def next_batch(self) -> Sequence[JobUpdate] | None:
        """Returns the next batch, without what is mirrored already; None if there is none yet."""
        batch = self._read(self._position.next_batch)
        if batch is None:
            return None
        # The local file was changed, so all batches are read again, but only once.
        if self._has_gap(batch) and not self._has_restarted:
            self._has_restarted = True
            self._skipped, self._position.next_batch = dict(self._ends), 1
            return self.next_batch()
        updates = [each for update in batch if (each := self._new_part(update)) is not None]
        for update in updates:
            if isinstance(update, RemoteFiles):
                self._position.files = update.files
                write_json(self._file, self._position)
        return updates

    def mark_processed(self) -> None:
        """Records that the batch returned by `next_batch` has been processed."""
        self._position.next_batch += 1
        self._position.ends = dict(self._ends)
        write_json(self._file, self._position)

    def _read(self, number: int) -> list[JobUpdate] | None:
        """Returns a batch of updates; None if it is not in the bucket yet."""
        path = self._paths.update_batch(number)
        num_bytes = self._bucket.sizes([path]).get(path)
        if num_bytes is None:
            return None
        try:
            if num_bytes > bounds.JOB_UPDATES.limit:
                raise ValueError(f"it has {num_bytes >> 20} MB")
            return msgspec.msgpack.decode(self._bucket.read(path), type=list[JobUpdate])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MachineError(
                f"{path} in the bucket {self._bucket.name} is not a batch of updates: {error}",
                "check who can write to the bucket, cancel the run, and start it again",
            ) from error

    def _has_gap(self, batch: Sequence[JobUpdate]) -> bool:
        """Returns whether a batch appends beyond the end of what was received of a file."""
        ends = dict(self._ends)
        for update in batch:
            if isinstance(update, AppendedLines):
                if update.offset > ends.get(update.path, 0):
                    return True
                ends[update.path] = update.offset + len(update.data)
        return False

    def _new_part(self, update: JobUpdate) -> JobUpdate | None:
        """Returns an update without bytes that are mirrored already; None if nothing remains."""
        if not isinstance(update, AppendedLines):
            return update
        path, start = update.path, self._skipped.get(update.path, 0)
        end = update.offset + len(update.data)
        if end >= start:
            # All later data of the file is new, also if the file is replaced.
            self._skipped.pop(path, None)
        if end <= start:
            return None
        if update.offset < start:
            data = update.data[start - update.offset :]
            update = AppendedLines(path=path, offset=start, data=data)
        self._ends[path] = end
        return update

    def _read_position(self) -> ReaderPosition:
        with suppress(FileNotFoundError, DataError):
            return read_json(self._file, ReaderPosition)
        return ReaderPosition()
