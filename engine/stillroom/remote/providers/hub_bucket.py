"""The private bucket on the Hugging Face Hub over which a job and our side here talk.

A job can be neither reached nor spoken to: what either side has to say is a file of the bucket, and
the names of the files here say what each is.
"""

import importlib.util
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stillroom.errors import EngineError, missing_extra
from stillroom.remote.host import MachineError, UnreachableError

_TOO_MANY = 429
_SERVER_ERROR = 500
_LONGEST = 600
_NEEDS = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token that may write",
    402: "jobs are paid for beforehand: see https://huggingface.co/settings/billing",
    403: "use a token that may write repositories and start jobs "
    "(https://huggingface.co/settings/tokens), in a namespace whose plan has jobs",
    404: "look at `namespace` of the machine in machines.yml",
}


def content_path(sha256: str) -> str:
    """The file with a content, which later runs find there too."""
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

    def news(self, number: int) -> str:
        """The news of the run with this number, from 1 on; each file is written once."""
        return f"{self.folder}/news/{number:08d}.bin"


class Bucket:
    """A bucket. `api` is huggingface_hub's `HfApi`, or has the same methods."""

    def __init__(self, api: Any, name: str) -> None:
        self._api, self.name = api, name

    def make(self) -> None:
        """Makes the bucket, private, unless it is there.

        Raises MachineError if others can read it.
        """
        with hub_errors(f"could not make the private bucket {self.name}"):
            self._api.create_bucket(self.name, private=True, exist_ok=True)
            is_private = self._api.bucket_info(self.name).private
        if not is_private:
            raise MachineError(
                f"everybody can read the bucket {self.name}, and your rows would go there",
                f"make it private: https://huggingface.co/buckets/{self.name}",
            )

    def sizes(self, paths: Iterable[str]) -> dict[str, int]:
        """Returns the bytes of those of the files that are there."""
        with hub_errors(f"could not look into the bucket {self.name}"):
            found = self._api.get_bucket_paths_info(self.name, list(paths))
            return {each.path: each.size for each in found}

    def put(self, files: Sequence[tuple[Path | bytes, str]]) -> None:
        """Writes files, each whole or not at all."""
        if files:
            with hub_errors(f"could not write to the bucket {self.name}"):
                self._api.batch_bucket_files(self.name, add=list(files))

    def download(self, path: str, target: Path) -> None:
        """Brings a file here, which must be there."""
        with hub_errors(f"could not read {path} of the bucket {self.name}"):
            self._api.download_bucket_files(
                self.name, [(path, target)], raise_on_missing_files=True
            )

    def read(self, path: str) -> bytes:
        """Returns a small file, which must be there."""
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
        """Deletes files, which must be there."""
        if paths:
            with hub_errors(f"could not remove files of the bucket {self.name}"):
                self._api.batch_bucket_files(self.name, delete=list(paths))


@contextmanager
def hub_errors(problem: str) -> Generator[None]:
    """Raises the hub's errors as ours: UnreachableError where trying again may help."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except EngineError:
        raise
    except HfHubHTTPError as error:
        status = error.response.status_code
        text = f"{problem}: {_line(error)}"
        if status == _TOO_MANY or status >= _SERVER_ERROR:
            raise UnreachableError(text, "nothing: it is tried again") from error
        fix = _NEEDS.get(status, "see what the message says, and start the run again")
        raise MachineError(text, fix) from error
    except Exception as error:  # of the network and of huggingface_hub's other packages
        raise UnreachableError(
            f"{problem}: {type(error).__name__}: {_line(error)}",
            "nothing: it is tried again; https://status.huggingface.co shows whether the hub is up",
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
