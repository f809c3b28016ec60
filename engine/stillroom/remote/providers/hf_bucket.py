"""The private bucket on the Hugging Face Hub through which a job and our side communicate.

Nothing reaches a job from outside: what either side has to say is a file of the bucket.
"""

import importlib.util
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

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

_TOO_MANY = 429
_SERVER_ERROR = 500
_LONGEST = 600
_MAX_BATCH_BYTES = 1 << 29
_NEEDS = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token that may write",
    402: "jobs are paid for beforehand: see https://huggingface.co/settings/billing",
    403: "use a token that may write repositories and start jobs "
    "(https://huggingface.co/settings/tokens), in a namespace whose plan has jobs",
    404: "look at `namespace` of the machine in machines.yml",
}


def content_path(sha256: str) -> str:
    """The file with a content, which later runs find, too."""
    return f"store/{sha256}"


def code_path(code: str) -> str:
    """The archive of our package's code with this hash."""
    return f"code/{code}.tar.gz"


class RunPaths:
    """The files of one run."""

    def __init__(self, run_id: str) -> None:
        self.folder = f"runs/{run_id}"
        self.packages = f"{self.folder}/packages.bin"
        """What has to be installed for it."""
        self.start = f"{self.folder}/start.bin"
        """What has to be started, without secrets."""
        self.claim = f"{self.folder}/claim"
        """Which start did it: a second job of the same run ends at once."""
        self.cancel = f"{self.folder}/cancel"
        self.kill = f"{self.folder}/kill"

    def updates(self, number: int) -> str:
        """The batch of the run's updates with this number, from 1 on; each is written once."""
        return f"{self.folder}/news/{number:08d}.bin"


class Bucket:
    """A bucket. `api` is huggingface_hub's `HfApi`, or has the same methods."""

    def __init__(self, api: Any, name: str) -> None:
        self._api, self.name = api, name

    def make(self) -> None:
        """Makes the private bucket unless it exists.

        Raises MachineError if others can read it.
        """
        with hub_errors(f"could not make the private bucket {self.name}"):
            self._api.create_bucket(self.name, private=True, exist_ok=True)
            is_private = self._api.bucket_info(self.name).private
        if not is_private:
            raise MachineError(
                f"everybody can read the bucket {self.name}, and your rows would be in it",
                f"make it private: https://huggingface.co/buckets/{self.name}",
            )

    def sizes(self, paths: Iterable[str]) -> dict[str, int]:
        """Returns the bytes of those of the files that exist."""
        with hub_errors(f"could not look into the bucket {self.name}"):
            found = self._api.get_bucket_paths_info(self.name, list(paths))
            return {each.path: each.size for each in found}

    def put(self, files: Sequence[tuple[Path | bytes, str]]) -> None:
        """Writes files, each whole or not at all."""
        if files:
            with hub_errors(f"could not write to the bucket {self.name}"):
                self._api.batch_bucket_files(self.name, add=list(files))

    def download(self, path: str, target: Path) -> None:
        """Downloads a file, which must exist."""
        with hub_errors(f"could not read {path} of the bucket {self.name}"):
            self._api.download_bucket_files(
                self.name, [(path, target)], raise_on_missing_files=True
            )

    def read(self, path: str) -> bytes:
        """Returns a small file, which must exist."""
        with TemporaryDirectory() as folder:
            target = Path(folder) / "file"
            self.download(path, target)
            return target.read_bytes()

    def names(self, prefix: str) -> list[str]:
        """Returns the paths of the files below a folder."""
        with hub_errors(f"could not look into the bucket {self.name}"):
            found = list(self._api.list_bucket_tree(self.name, prefix, recursive=True))
            return [each.path for each in found if each.type == "file"]

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes files, which must exist."""
        if paths:
            with hub_errors(f"could not remove files of the bucket {self.name}"):
                self._api.batch_bucket_files(self.name, delete=list(paths))


@contextmanager
def hub_errors(problem: str) -> Generator[None]:
    """Translates the hub's errors: to UnreachableError where trying again may help."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except EngineError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        text = f"{problem}: {_line(error)}"
        if status == _TOO_MANY or status >= _SERVER_ERROR:
            raise UnreachableError(text, "no action needed: it is retried") from error
        fix = _NEEDS.get(status, "see what the message says, and start the run again")
        raise MachineError(text, fix) from error
    except Exception as error:  # of the network and of huggingface_hub's other packages
        raise UnreachableError(
            f"{problem}: {type(error).__name__}: {_line(error)}",
            "no action needed: it is retried; see https://status.huggingface.co",
        ) from error


def check_hub_installed() -> None:
    """Raises MissingExtraError if huggingface_hub is not installed, or knows no buckets."""
    if importlib.util.find_spec("huggingface_hub") is None:
        raise missing_extra("hf-jobs", "a machine of Hugging Face Jobs")
    from huggingface_hub import HfApi

    if not hasattr(HfApi, "batch_bucket_files") or not hasattr(HfApi, "run_job"):
        raise missing_extra("hf-jobs", "a machine of Hugging Face Jobs, with this huggingface_hub,")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:_LONGEST]


BUCKET_VARIABLE = "STILLROOM_JOB_BUCKET"
RUN_VARIABLE = "STILLROOM_JOB_RUN"
CODE_VARIABLE = "STILLROOM_JOB_CODE"
SECRETS_VARIABLE = "STILLROOM_JOB_SECRETS"
"""The run's secrets as JSON. The service keeps a job's secrets encrypted, apart from its
environment, and gives them to its process alone; the job has no standard input."""
START_VARIABLE = "STILLROOM_JOB_START"
"""A random text: of two jobs that were started for one run, only one does it."""
TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105


class JobPackages(msgspec.Struct, frozen=True, kw_only=True):
    """What a job installs before it starts the run."""

    spec: JobSpec = msgspec.field(name="order")
    home: LocalPackages


class JobStart(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a job does."""

    run: LaunchRequest
    """Without its secrets."""
    timeout_s: float
    """The time after which the service ends the job."""


class JobFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """Why the job could not do the run, or not bring it to its end."""

    problem: str
    fix: str


JobUpdate = RunUpdate | JobFailure


class JobView(msgspec.Struct, kw_only=True):
    """What our side remembers of a job, in the run's folder here."""

    next_batch: int = msgspec.field(name="next_news", default=1)
    """The number of the batch of updates that is read next."""
    ends: dict[str, int] = {}
    """The bytes of each growing file up to that batch."""
    files: list[RemoteFile] = []
    """The latest list of finished files."""
    outputs: list[str] = []
    """The hashes of all files that were ever listed, by which they are deleted from the bucket."""


class UpdateReader:
    """The updates of a run's job from where an earlier reader stopped. `run` is its folder here.

    seen: how many bytes of each growing file were downloaded; these are skipped. If a piece is
    missing, because the local file was changed, all updates are read again.
    """

    def __init__(self, bucket: Bucket, run: Path, seen: Mapping[str, int]) -> None:
        self._bucket, self._paths, self._file = bucket, RunPaths(run.name), run / JOB_FILE
        self._view = self._read_view()
        self._known = dict(seen)
        """How far each file is known."""
        ends = self._view.ends
        self._seen = {path: end for path, end in seen.items() if ends.get(path) != end}
        """What is here of the next batch, during which an earlier reader was killed."""
        self._has_restarted = False

    @property
    def files(self) -> list[RemoteFile]:
        """The latest list of finished files."""
        return self._view.files

    @property
    def outputs(self) -> set[str]:
        """The hashes of all files that were ever listed."""
        return set(self._view.outputs)

    def next(self) -> Sequence[JobUpdate] | None:
        """Returns what the next batch adds to what is here; None if there is none yet."""
        batch = self._read(self._view.next_batch)
        if batch is None:
            return None
        if self._lacks_some(batch) and not self._has_restarted:
            self._has_restarted = True
            self._seen, self._view.next_batch = dict(self._known), 1
            return self.next()
        fresh = [each for update in batch if (each := self._unseen(update)) is not None]
        for update in fresh:
            if isinstance(update, RemoteFiles):
                self._view.files = update.files
                hashes = {file.sha256 for file in update.files}
                self._view.outputs = sorted(hashes.union(self._view.outputs))
                write_json(self._file, self._view)
        return fresh

    def mark_taken(self) -> None:
        """Notes that the batch of the last call is here."""
        self._view.next_batch += 1
        self._view.ends = dict(self._known)
        write_json(self._file, self._view)

    def _read(self, number: int) -> list[JobUpdate] | None:
        path = self._paths.updates(number)
        num_bytes = self._bucket.sizes([path]).get(path)
        if num_bytes is None:
            return None
        try:
            if num_bytes > _MAX_BATCH_BYTES:
                raise ValueError(f"{num_bytes >> 20} MB")
            return msgspec.msgpack.decode(self._bucket.read(path), type=list[JobUpdate])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise MachineError(
                f"{path} of the bucket {self._bucket.name} is no batch of updates: {error}",
                "look at who can write to the bucket, cancel the run, and start it again",
            ) from error

    def _lacks_some(self, batch: Sequence[JobUpdate]) -> bool:
        """Returns whether a file grows from further on than is known of it."""
        ends = dict(self._known)
        for update in batch:
            if isinstance(update, AppendedLines):
                if update.offset > ends.get(update.path, 0):
                    return True
                ends[update.path] = update.offset + len(update.data)
        return False

    def _unseen(self, update: JobUpdate) -> JobUpdate | None:
        """Returns the part of an update that is not here yet; None if all of it is."""
        if not isinstance(update, AppendedLines):
            return update
        path, seen = update.path, self._seen.get(update.path, 0)
        end = update.offset + len(update.data)
        if end >= seen:
            # From this place on nothing of the file is here yet, also if it restarts.
            self._seen.pop(path, None)
        if end <= seen:
            return None
        if update.offset < seen:
            data = update.data[seen - update.offset :]
            update = AppendedLines(path=path, offset=seen, data=data)
        self._known[path] = end
        return update

    def _read_view(self) -> JobView:
        with suppress(FileNotFoundError, DataError):
            return read_json(self._file, JobView)
        return JobView()
