"""Where things lie on the machine, and whom a command there talks to."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from stillroom.remote.frames import Frames

FREE_DISK = (
    "free some space there (the machine's folder `store` may be deleted while no run is on its way "
    "to it), or give the machine another `folder:` in machines.yml"
)
OTHER_FOLDER = "give the machine a `folder:` in machines.yml that its user may write to"
_SILENCE_S = 7200
"""A command that hears nothing for so long is ended: the other side may be gone without a word."""

_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class AgentFolder:
    """The folder on this machine in which everything of ours lies, and the other side."""

    root: Path
    frames: Frames

    @property
    def store(self) -> Path:
        """The folder with the contents, each in a file that is named by its SHA-256."""
        return self.root / "store"

    @property
    def runs(self) -> Path:
        """The folder with one folder for each run."""
        return self.root / "runs"

    def receive(self, kind: type[_Message] | Any) -> _Message | None:
        """Returns the other side's next message, or None after its last (see `Frames.receive`).

        The process ends if nothing comes for two hours.
        """
        signal.alarm(_SILENCE_S)
        try:
            return self.frames.receive(kind)
        finally:
            signal.alarm(0)
