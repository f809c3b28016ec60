"""What the parts of a remote run tell one another: the machine, the job spec, the files, the view.

A remote run has two folders. The one here is the run's own: everything that looks at runs reads it.
The one there belongs to an ordinary worker in a workspace of its own, made for this run alone. The
follower (`remote/follower/`), a process here, is the only one that writes the folder here.
"""

from typing import Literal

import msgspec

from stillroom.remote.machine import Machine

RUN_FILE = "run:"
"""How the source of a sent file begins that lies in the run's own folder."""


class SentFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the run reads: where it lies here, and where it will lie there."""

    source: str
    """Its absolute path here; or `RUN_FILE` and the name of a file in the run's folder."""
    place: str
    """Its path there, relative to the folder that holds `workspace/` and `outside/`."""


class PathMapping(msgspec.Struct, frozen=True, kw_only=True):
    """A folder or file here, and the place there that stands for it (see `home_paths.py`)."""

    home: str
    """Its absolute path here, which is what requests name and what outputs record."""
    place: str
    """Its path there, relative as `SentFile.place`; or `package:` and a path inside Stillroom's
    own package, which is there already. For the home `~` it is the user's own folder here, as it
    is (see `home_paths.home_variable`)."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The content of remote.json: all that the follower needs to have a run done elsewhere.

    It holds no secrets, only their names.
    """

    machine: Machine
    files: list[SentFile]
    home_paths: list[PathMapping]
    key_names: list[str] = []
    """The secrets that the run's process needs, by the names of their variables."""
    variables: list[str] = []
    """Those of them that have to be in the process's environment, where libraries look for them:
    HF_TOKEN, WANDB_API_KEY, and what keys.yml gives to tools."""
    packages: list[str] = []
    """The requirements, beside our own, of tools.py and rewards.py, e.g. `rapidfuzz==3.9`."""
    extras: list[str] = []
    """The extras of Stillroom that the run needs there, e.g. `train`."""
    outputs: list[str] = []
    """The files and folders that the run writes beside its own folder, relative to the workspace;
    what else begins with their names (manifests, journals) comes back with them."""
    start_after: list[str] = []
    """The runs here that must have ended before anything is sent."""
    budget_usd: float | None = None
    """The most that machine and teacher may cost together; None for no limit."""


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """A content that is sent: named by its hash, so that it is sent once."""

    sha256: str
    num_bytes: int
    source: str
    """The absolute path here of a file with this content."""


class PlacedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is to lie in the run's folder there before it starts."""

    place: str
    sha256: str
    is_executable: bool = False


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine is told to start; telling it twice starts it once."""

    run_id: str
    files: list[PlacedFile]
    home_paths: list[PathMapping]
    home_root: str
    """The workspace here, for which `workspace/` there stands."""
    request: bytes
    """request.json as it is here; the machine writes its own workspace and inputs into it."""
    copies: dict[str, bytes] = {}
    """The small files of the run's folder, by their names (given_config.yml)."""
    notes: list[str] = []
    """The run's first notes to the user."""
    outputs: list[str] = []
    secrets: dict[str, str] = {}
    """Handed to the worker through its standard input, and written nowhere."""
    variables: list[str] = []
    """Those of the secrets that the worker's environment holds too, as `JobSpec.variables`."""
    max_hours: float
    price_per_hour: float | None = None
    budget_usd: float | None = None
    spent_usd: float = 0.0
    """What the machine has cost before the start: bringing it up, sending, installing."""
    reserve_s: float = 0.0
    """The seconds of the machine that are kept back for the last checkpoint and bringing back."""


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a run there that is finished and may be brought back."""

    path: str
    """Relative to the workspace there, and so to the one here."""
    sha256: str
    num_bytes: int


class AppendedLines(msgspec.Struct, frozen=True, kw_only=True, tag="growth"):
    """Whole new lines of a growing file; `offset` 0 begins it anew."""

    path: str
    offset: int
    data: bytes


class RemoteState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """The run's state there, as `read_run` there sees it: the truth about its process."""

    run_json: bytes
    elapsed_s: float
    """Seconds since the start there, by the monotonic clock there."""
    root: str
    """The absolute path there of the folder that holds `workspace/` and `outside/`, which texts
    may name."""
    clock: float
    """The time there, in seconds since the epoch, when this was said."""


class RemoteFiles(msgspec.Struct, frozen=True, kw_only=True, tag="files"):
    """All finished files of the run there by now, e.g. each whole checkpoint.

    `is_last`: the run has ended, and these are all there will be.
    """

    files: list[RemoteFile]
    is_last: bool


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="pulse"):
    """Nothing new, but the connection lives."""


RunUpdate = AppendedLines | RemoteState | RemoteFiles | Heartbeat
"""What a machine tells about a run, in order."""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What check_setup finds on a machine; None where it could not be found out."""

    system: str
    python: str | None = None
    python_version: str | None = None
    has_uv: bool = False
    num_processors: int | None = None
    memory_gb: float | None = None
    free_disk_gb: float | None = None
    blocked_folder: str | None = None
    """The folder there that would have to be written to and must not be."""
    gpus: list[str] = []
    """Each GPU's name and memory, e.g. `NVIDIA H100 80GB HBM3, 79.6 GB`."""
    gpu_memory_gb: list[float] = []
    driver: str | None = None
    stillroom_version: str | None = None
    """The version that is installed there for us; None if none is."""
    has_same_code: bool = False
    """Whether exactly this version's code is there."""
    clock_ahead_s: float | None = None
    """How far its clock is ahead of the one here."""
    start_s: float | None = None
    """How long a worker took to answer there, from the call to its first line."""


Phase = Literal[
    "waiting", "bringing_up", "preparing", "sending", "running", "bringing_back", "over"
]
"""How far the follower has come with a run."""


class RemoteView(msgspec.Struct, frozen=True, kw_only=True):
    """The content of remote_view.json: how old the view is, and what the machine has cost."""

    where: str
    phase: Phase
    last_contact: str | None = None
    """When the machine answered last; None if it never has."""
    problem: str | None = None
    """Why it cannot be reached at the moment, and what to do; None if it can."""
    machine_usd: float | None = None
    """What the machine has cost so far; None without a price."""
    seconds_there: float = 0.0
    """How long the machine has been used, by its own monotonic clock where it is known."""
    has_started: bool = False
    """Whether the machine has been told to start: from then on only it knows how the run stands."""
