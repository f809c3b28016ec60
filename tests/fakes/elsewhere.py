"""Runs on another machine without one: the files of a job laid out in another folder."""

import json
import os
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from pydantic import BaseModel

import stillroom
from fakes.reporters import KeptReporter
from stillroom.api.operations import operation_of_run
from stillroom.files import write_json
from stillroom.home_paths import home_variable
from stillroom.jobs.operations import run_operation
from stillroom.lineage import now
from stillroom.remote.bundle.job_spec import PackedJob, pack
from stillroom.remote.bundle.layout import read_contents
from stillroom.remote.bundle.needs import Needs
from stillroom.remote.machine import Machine
from stillroom.remote.machines import find_machine, users_machines_file
from stillroom.remote.records import JobSpec
from stillroom.run_folder import NewRun, RunFolder, RunRequest, RunState, create_run
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus

_TIMES = frozenset(
    {"created_at", "started_at", "duration_s", "seconds", "machine_seconds", "phase_seconds"}
)
_OF_TIMED = frozenset({"sha256", "num_bytes"})
"""What the records of files say in which times stand."""


def own_machine(text: str = "box: {ssh: me@gpu.test, price_per_hour: 2}") -> None:
    """Names machines in the user's own machines.yml, whose folder the test has chosen."""
    users_machines_file().parent.mkdir(parents=True, exist_ok=True)
    users_machines_file().write_text(text + "\n", encoding="utf-8")


def box(workspace: Workspace) -> Machine:
    return find_machine(workspace, "box")


def packed_run(
    workspace: Workspace, needs: Needs, *, kind: RunKind = RunKind.SFT, **new: Any
) -> tuple[PackedJob, RunFolder]:
    """Packs what a run needs, and creates its folder as an operation does."""
    packed = pack(workspace, box(workspace), needs)
    run_files = {**new.pop("run_files", {}), **packed.run_files}
    inputs = [path for path in needs.files if path.exists()]
    return packed, create_run(
        workspace, kind, {}, NewRun(inputs=inputs, run_files=run_files, **new)
    )


def lay_out(run: RunFolder, spec: JobSpec, base: Path) -> dict[str, str]:
    """Puts the files of a job below a folder, as the other machine does; returns a variable."""
    contents = read_contents(run, spec)
    sources = {blob.sha256: blob.source for blob in contents.blobs}
    (base / "workspace").mkdir(parents=True, exist_ok=True)
    for file in contents.files:
        (base / file.remote_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sources[file.sha256], base / file.remote_path)
    package = Path(stillroom.__file__).resolve().parent
    pairs = []
    for path in spec.home_paths:
        inside = path.remote_path.removeprefix("package:")
        there = (
            package / inside if path.remote_path.startswith("package:") else base / path.remote_path
        )
        pairs.append((path.home_path, path.remote_path if path.home_path == "~" else str(there)))
    return home_variable(pairs)


@contextmanager
def away(variable: dict[str, str]) -> Generator[None]:
    """Lets this process take itself for one on the other machine."""
    with patch.dict(os.environ, variable):
        yield


def do_run(workspace: Workspace, kind: RunKind, request: BaseModel, run_id: str) -> RunFolder:
    """Does the work of a run in this process, in a folder as its own process finds it."""
    folder = RunFolder(workspace.runs / run_id)
    folder.path.mkdir(parents=True, exist_ok=True)
    details = request.model_dump(mode="json")
    write_json(
        folder.request_file,
        RunRequest(kind=kind, workspace=str(workspace.root), request=details),
    )
    state = RunState(run_id=run_id, kind=kind, status=RunStatus.RUNNING, created_at=now())
    folder.write(state)
    result = run_operation(operation_of_run(kind), folder, KeptReporter(), {})
    done = {"status": RunStatus.SUCCEEDED, "result": msgspec.to_builtins(result)}
    folder.write(msgspec.structs.replace(state, **done))
    return folder


def changed(home: Path, elsewhere: Path, *, is_timed: bool = False) -> list[str]:
    """Returns the files of a workspace that a run elsewhere wrote otherwise than one at home."""
    at_home, there = _written(home), _written(elsewhere)
    names = sorted(at_home.keys() | there.keys())
    return [
        name
        for name in names
        if name not in at_home
        or name not in there
        or without_times(at_home[name], is_timed=is_timed)
        != without_times(there[name], is_timed=is_timed)
    ]


def _written(root: Path) -> dict[str, Path]:
    """Returns what runs write, without what each side has for itself."""
    own = {"request.json", "run.json", "remote.json", "hashes.json"}
    return {name: path for name, path in files_below(root).items() if path.name not in own}


def files_below(folder: Path) -> dict[str, Path]:
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


def without_times(path: Path, *, is_timed: bool = False) -> Any:
    """Returns what a file holds, of JSON documents without the times that a run took.

    With `is_timed` the hashes of files go too, as times stand in those.
    """
    dropped = _TIMES | (_OF_TIMED if is_timed else frozenset())
    data = path.read_bytes()
    if path.suffix == ".json":
        return _timeless(json.loads(data), dropped)
    if path.suffix == ".jsonl":
        lines = data.splitlines()
        return sorted(json.dumps(_timeless(json.loads(line), dropped)) for line in lines)
    return data


def _timeless(value: Any, dropped: frozenset[str]) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(inner, dropped) for k, inner in value.items() if k not in dropped}
    return [_timeless(inner, dropped) for inner in value] if isinstance(value, list) else value


def naming(folder: Path, name: str) -> list[str]:
    """Returns the files below a folder that hold a name, except for the machine's own hashes."""
    pattern = re.compile(re.escape(name.encode()))
    return [
        at
        for at, path in files_below(folder).items()
        # Written only if a model's files have not changed for two seconds, and never downloaded.
        if at != ".stillroom/hashes.json" and pattern.search(path.read_bytes())
    ]
