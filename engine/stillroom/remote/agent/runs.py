"""The folders in which the agent keeps the files of a run."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillroom.errors import EngineError
from stillroom.files import FileLock, read_json
from stillroom.remote.agent.store import AgentFolder
from stillroom.remote.host import MachineGoneError
from stillroom.run_folder import RunFolder


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of start.json: facts about a run's start, without secrets."""

    started_at: float = msgspec.field(name="started")
    """When the run was started, in seconds on this machine's monotonic clock."""
    outputs: list[str] = []
    placed: dict[str, str] = {}
    """The hashes of the run's input files, by path relative to the workspace."""


@dataclass(frozen=True, slots=True)
class AgentRun:
    """The folder of one run: a workspace for it alone, and inputs from outside the workspace."""

    run_id: str
    base: Path

    @property
    def workspace(self) -> Path:
        """The folder that replaces the user's workspace."""
        return self.base / "workspace"

    @property
    def folder(self) -> RunFolder:
        """The run's folder in that workspace."""
        return RunFolder(self.workspace / "runs" / self.run_id)

    @property
    def start_file(self) -> Path:
        """The file with the run's `StartRecord`."""
        return self.base / "start.json"

    def start_lock(self) -> FileLock:
        """Returns the lock that is held while the run is being started."""
        return FileLock(self.base / "start.lock")

    def keeper_lock(self) -> FileLock:
        """Returns the lock that the run's processes inherit, held as long as one of them lives."""
        return FileLock(self.base / "keeper.lock")

    def read_start(self) -> StartRecord:
        """Returns the record of the start. Raises MachineGoneError if the run was not started."""
        try:
            return read_json(self.start_file, StartRecord)
        except FileNotFoundError as error:
            raise MachineGoneError(
                f"there is no run {self.run_id!r} in {self.base.parent}: it was deleted, or "
                "the run was started on a different machine",
                "check that machines.yml still names the machine on which the run was started",
            ) from error


def agent_run(agent: AgentFolder, run_id: str) -> AgentRun:
    """Returns the folder of a run, which may not exist. Raises EngineError for an invalid id."""
    if not run_id or "/" in run_id or run_id.startswith("."):
        raise EngineError(f"{run_id!r} is not a run id", "give the run's id")
    # Files are never written through a symbolic link, and the user's folder may be one.
    return AgentRun(run_id, agent.runs.resolve() / run_id)
