"""Where the agent keeps the files of a run on its machine."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from stillroom.errors import EngineError
from stillroom.files import FileLock, read_json
from stillroom.remote.agent.store import AgentFolder
from stillroom.remote.host import MachineGoneError
from stillroom.run_folder import RunFolder


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of start.json: what is known about a run since its start; no secrets."""

    started: float
    """The monotonic clock of this machine when the run was started."""
    outputs: list[str] = []
    placed: dict[str, str] = {}
    """The hashes of the files that were sent, by their paths relative to the workspace."""


@dataclass(frozen=True, slots=True)
class AgentRun:
    """The folder of one run: a workspace of its own, and the files from outside of it."""

    run_id: str
    base: Path

    @property
    def workspace(self) -> Path:
        """The folder that stands for the user's workspace."""
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
        """Returns the lock that a start holds until it is done."""
        return FileLock(self.base / "start.lock")

    def keeper_lock(self) -> FileLock:
        """Returns the lock that the run's processes inherit: it is held as long as one lives."""
        return FileLock(self.base / "keeper.lock")

    def read_start(self) -> StartRecord:
        """Returns what is known since the start. Raises MachineGoneError if there was none."""
        try:
            return read_json(self.start_file, StartRecord)
        except FileNotFoundError as error:
            raise MachineGoneError(
                f"there is no run {self.run_id!r} in {self.base.parent}",
                "somebody has deleted it, or this is not the machine that it was started on",
            ) from error


def agent_run(agent: AgentFolder, run_id: str) -> AgentRun:
    """Returns the folder of a run, which may not exist. Raises EngineError for no id."""
    if not run_id or "/" in run_id or run_id.startswith("."):
        raise EngineError(f"{run_id!r} is not a run id", "give the run's id")
    # Nothing is written through a link, and the user's own folder may be one.
    return AgentRun(run_id, agent.runs.resolve() / run_id)
