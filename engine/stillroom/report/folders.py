"""Reads run folders for the report; any file in them may be missing or damaged."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stillroom.errors import DataError
from stillroom.files import read_json
from stillroom.run_folder import RemoteView, RunFolder, RunState, read_remote_state
from stillroom.types import RunKind

TRAINING_KINDS = frozenset((RunKind.SFT, RunKind.DPO, RunKind.DISTILL))

_Document = TypeVar("_Document")
_LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class Run:
    """A run whose run.json could be read."""

    folder: Path
    state: RunState

    @property
    def run_id(self) -> str:
        """The id of the run, which is the name of its folder."""
        return self.folder.name

    @property
    def remote_view(self) -> RemoteView | None:
        """The state of a run on another machine; None if it runs on this machine."""
        return read_remote_state(self.folder)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A file that the report leaves out because it cannot be read."""

    name: str
    """The name of the file and of its folder."""
    reason: str


class FolderReader:
    """Reads the files of run folders, and records unreadable files instead of raising errors."""

    def __init__(self) -> None:
        self.unreadable: list[Unreadable] = []

    def runs(self, path: Path) -> list[Run]:
        """Returns the runs whose folders are under `path`, oldest first."""
        runs: list[Run] = []
        for folder in self._folders(path):
            state = self.document(RunFolder(folder).state_file, RunState, is_required=True)
            if state is not None:
                runs.append(Run(folder, state))
        return sorted(runs, key=lambda run: (run.state.created_at, run.run_id))

    def document(
        self, path: Path, kind: type[_Document], *, is_required: bool = False
    ) -> _Document | None:
        """Returns a JSON document, or None if it is missing or damaged."""
        try:
            return read_json(path, kind)
        except FileNotFoundError:
            if is_required:
                self.note(path, "is missing")
        except DataError as error:
            self.note(path, str(error.__cause__))
        except OSError as error:
            self.note(path, str(error))
        return None

    def note(self, path: Path, reason: str) -> None:
        """Records that a file was left out, and the reason."""
        name = f"{path.parent.name}/{path.name}"
        self.unreadable.append(Unreadable(name, reason[:_LONGEST_REASON]))

    def _folders(self, path: Path) -> list[Path]:
        try:
            entries = sorted(path.iterdir())
            return [entry for entry in entries if entry.is_dir() and entry.name[0] != "."]
        except FileNotFoundError:
            return []
        except OSError as error:
            self.note(path, str(error))
            return []
