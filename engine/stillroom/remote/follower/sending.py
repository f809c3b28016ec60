"""What is sent for a run: its files by their contents, and the request to start it."""

import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stillroom.errors import RunError
from stillroom.files import file_sha256
from stillroom.remote.cost import reserve_s
from stillroom.remote.follower.bring_back import stamp_of
from stillroom.remote.follower.record import FollowRecord, GrownFile
from stillroom.remote.records import Blob, Order, PlacedFile, SentFile, StartThere
from stillroom.remote.run_files import is_output
from stillroom.run_folder import REMOTE_FILE, RunFolder

_WORKSPACE = "workspace/"
_MODEL = frozenset({".safetensors", ".bin", ".gguf", ".pt"})
_OWN = frozenset({"run.json", "request.json", REMOTE_FILE})


@dataclass(frozen=True, slots=True)
class HashedFile:
    """A file to send, and its content."""

    file: SentFile
    blob: Blob
    is_executable: bool


def hash_files(order: Order) -> list[HashedFile]:
    """Returns the files of an order with their contents, read now.

    Raises RunError for one that is gone.
    """
    hashed: list[HashedFile] = []
    for file in order.files:
        path = Path(file.source)
        try:
            about, sha256 = path.stat(), file_sha256(path)
        except FileNotFoundError as error:
            raise RunError(
                f"{path} is gone since this run was started", "put it back, and start it again"
            ) from error
        blob = Blob(sha256=sha256, num_bytes=about.st_size, source=str(path))
        hashed.append(HashedFile(file, blob, bool(about.st_mode & stat.S_IXUSR)))
    return hashed


def note_outputs(
    record: FollowRecord, root: Path, outputs: Sequence[str], files: Sequence[HashedFile]
) -> None:
    """Notes how the outputs are here before the run, so that nothing of somebody else is replaced.

    Those that are sent, such as rows and their journal, grow from where they are.
    """
    for output in outputs:
        parent = (root / output).parent
        found = parent.iterdir() if parent.is_dir() else ()
        for path in [root / output, *found]:
            name = path.relative_to(root).as_posix()
            if path.exists() and is_output(name, outputs):
                record.before[name] = stamp_of(path)
    for hashed in files:
        name = hashed.file.place.removeprefix(_WORKSPACE)
        if name != hashed.file.place and is_output(name, outputs):
            path = root / name
            record.before[name] = stamp_of(path)
            size = hashed.blob.num_bytes
            changed_at = path.stat().st_mtime_ns if path.exists() else 0
            record.grown[name] = GrownFile(there=size, here=size, changed_at=changed_at)


def start_request(
    folder: RunFolder,
    order: Order,
    files: Sequence[HashedFile],
    *,
    secrets: Mapping[str, str],
    record: FollowRecord,
    spent_usd: float,
) -> StartThere:
    """Returns what the machine is told to start."""
    request, machine = folder.read_request(), order.machine
    models = [f for f in files if Path(f.file.source).suffix in _MODEL]
    return StartThere(
        run_id=folder.run_id,
        files=[
            PlacedFile(
                place=each.file.place, sha256=each.blob.sha256, is_executable=each.is_executable
            )
            for each in files
        ],
        home_paths=order.home_paths,
        home_root=request.workspace,
        request=folder.request_file.read_bytes(),
        copies=_copies(folder),
        notes=list(folder.read().notes),
        outputs=order.outputs,
        secrets=dict(secrets),
        max_hours=machine.max_hours,
        price_per_hour=record.price_per_hour,
        budget_usd=order.budget_usd,
        spent_usd=spent_usd,
        reserve_s=reserve_s(
            price_per_hour=record.price_per_hour,
            budget_usd=order.budget_usd,
            model_bytes=sum(f.blob.num_bytes for f in models),
            bytes_per_s=record.bytes_per_s,
        ),
    )


def _copies(folder: RunFolder) -> dict[str, bytes]:
    """Returns the small files that the run's folder began with, such as given_config.yml."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.path.glob("given_*"))
        if path.is_file() and path.name not in _OWN and not path.is_symlink()
    }
