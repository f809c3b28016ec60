"""What is sent for a run: its files by their contents, and the request to start it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stillroom.remote.bundle.contents import Contents
from stillroom.remote.cost import reserve_s
from stillroom.remote.follower.download import stamp_of
from stillroom.remote.follower.record import FollowRecord, GrownFile
from stillroom.remote.records import JobSpec, LaunchRequest, PlacedFile
from stillroom.remote.run_files import is_output
from stillroom.run_folder import RunFolder

_WORKSPACE = "workspace/"
_MODEL = frozenset({".safetensors", ".bin", ".gguf", ".pt"})


def note_outputs(
    record: FollowRecord, root: Path, outputs: Sequence[str], files: Sequence[PlacedFile]
) -> None:
    """Notes how the outputs are here before the run, so that nothing of somebody else is replaced.

    Those that are sent, such as rows and their journal, grow from where they are.
    """
    for path in _beside(root, outputs):
        name = path.relative_to(root).as_posix()
        if path.exists() and is_output(name, outputs):
            record.before[name] = stamp_of(path)
    for file in files:
        name = file.place.removeprefix(_WORKSPACE)
        if name in record.before and name != file.place:
            about = (root / name).stat()
            record.grown[name] = GrownFile(
                there=about.st_size, here=about.st_size, changed_at=about.st_mtime_ns
            )


def _beside(root: Path, outputs: Sequence[str]) -> Iterator[Path]:
    """Yields the outputs that are here, what is in them, and what lies beside them."""
    for output in outputs:
        path = root / output
        yield path
        yield from path.rglob("*") if path.is_dir() else ()
        for other in path.parent.iterdir() if path.parent.is_dir() else ():
            yield other
            if other.name == f".{path.name}" and other.is_dir():
                yield from other.rglob("*")


def launch_request(
    folder: RunFolder,
    spec: JobSpec,
    contents: Contents,
    *,
    secrets: Mapping[str, str],
    record: FollowRecord,
    spent_usd: float,
) -> LaunchRequest:
    """Returns what the machine is told to start."""
    request, machine = folder.read_request(), spec.machine
    models = [blob for blob in contents.blobs if Path(blob.source).suffix in _MODEL]
    return LaunchRequest(
        run_id=folder.run_id,
        files=contents.files,
        home_paths=spec.home_paths,
        home_root=request.workspace,
        request=folder.request_file.read_bytes(),
        copies=_copies(folder),
        notes=list(folder.read().notes),
        outputs=spec.outputs,
        secrets=dict(secrets),
        variables=spec.variables,
        max_hours=machine.max_hours,
        price_per_hour=record.price_per_hour,
        budget_usd=spec.budget_usd,
        spent_usd=spent_usd,
        reserve_s=reserve_s(
            price_per_hour=record.price_per_hour,
            budget_usd=spec.budget_usd,
            model_bytes=sum(blob.num_bytes for blob in models),
            bytes_per_s=record.bytes_per_s,
        ),
    )


def _copies(folder: RunFolder) -> dict[str, bytes]:
    """Returns the small files that the run's folder began with, such as given_config.yml."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.path.glob("given_*"))
        if path.is_file() and not path.is_symlink()
    }
