"""Machines for tests: what they answer is scripted, and nothing is connected."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stillroom.errors import EngineError
from stillroom.files import FileLock, write_json
from stillroom.remote.machine import Machine, SshAddress
from stillroom.remote.records import JobSpec, MachineFacts
from stillroom.run_folder import REMOTE_FILE, VIEW_FILE, RemoteView, RunFolder, RunState, create_run
from stillroom.settings import Workspace
from stillroom.types import RunKind, RunStatus

GPU_BOX = MachineFacts(
    system="Linux x86_64",
    python="/usr/bin/python3",
    python_version="3.12.3",
    num_processors=16,
    memory_gb=128.0,
    free_disk_gb=500.0,
    gpus=["NVIDIA H100 80GB HBM3, 79.6 GB"],
    gpu_memory_gb=[79.6],
    driver="570.1",
    start_s=2.5,
)


@dataclass
class ScriptedMachines:
    """Opens machines by their names; one that has an error raises it when it is looked at."""

    answers: Mapping[str, MachineFacts | EngineError]
    price_per_hour: float | None = None
    """What providers ask for an hour."""
    asked: list[str] = field(default_factory=list)
    num_open: int = 0

    def __call__(self, machine: Machine) -> Any:
        self.num_open += 1
        return _Scripted(self, machine)


@dataclass
class _Scripted:
    """Of `RunHost` what looking at a machine needs."""

    machines: ScriptedMachines
    machine: Machine

    def facts(self) -> MachineFacts:
        self.machines.asked.append(self.machine.name)
        answer = self.machines.answers[self.machine.name]
        if isinstance(answer, EngineError):
            raise answer
        return answer

    def price_per_hour(self) -> float | None:
        return self.machines.price_per_hour

    def close(self) -> None:
        self.machines.num_open -= 1


def name_machines(root: Path, text: str) -> Workspace:
    """Writes the workspace's machines.yml."""
    (root / "machines.yml").write_text(text, encoding="utf-8")
    return Workspace(root)


def add_remote_run(
    workspace: Workspace,
    view: RemoteView | None,
    *,
    machine: Machine | None = None,
    budget_usd: float | None = None,
    kind: RunKind = RunKind.SFT,
    status: RunStatus = RunStatus.RUNNING,
    **state: Any,
) -> RunFolder:
    """Makes the folder of a run that is done elsewhere, as a follower would have left it."""
    chosen = machine or Machine(name="gpu-box", ssh=SshAddress(host="me@host"))
    folder = create_run(workspace, kind, {"config": "config.yml"})
    spec = JobSpec(machine=chosen, files=[], home_paths=[], budget_usd=budget_usd)
    write_json(folder.path / REMOTE_FILE, spec)
    if view is not None:
        write_json(folder.path / VIEW_FILE, view)
    started = folder.read()
    folder.write(
        RunState(
            run_id=folder.run_id,
            kind=kind,
            status=status,
            created_at=started.created_at,
            **state,
        )
    )
    return folder


@contextmanager
def followed(folder: RunFolder) -> Iterator[None]:
    """Has the run's follower seem alive: else one is started whenever the run is read."""
    locks = [FileLock(folder.path / "follower.lock"), folder.owner_lock()]
    assert all(lock.try_acquire() for lock in locks)
    try:
        yield
    finally:
        for lock in locks:
            lock.release()
