"""The records of remote runs: the machine, the job spec, the agent's messages, the view.

A remote run has two folders. The local one is the run's own: everything that looks at runs reads
it. The one on the machine belongs to an ordinary worker in a workspace made for this run alone. The
follower (`remote/follower/`), a local process, is the only one that writes the local folder.
"""

from typing import Annotated, Literal

import msgspec

from stillroom.remote.machine import Machine

RUN_FILE = "run:"
"""How the source of a sent file begins that is in the run's own folder."""
PACKAGE = "package:"
"""How a place begins that is inside Stillroom's own package, which the machine has already."""


_Path = Annotated[str, msgspec.Meta(max_length=4096)]
_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Size = Annotated[int, msgspec.Meta(ge=0)]
"""What another machine sends is within bounds, or it is no message: a machine may be anybody's."""

MissingBlobs = Annotated[dict[str, int], msgspec.Meta(max_length=1_000_000)]
"""The reply of `have`."""


class SentFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the run reads: its local path, and its path on the machine."""

    source: str
    """Its absolute local path; or `RUN_FILE` and the name of a file in the run's folder."""
    place: str
    """Its path on the machine, relative to the folder with `workspace/` and `outside/`."""


class PathMapping(msgspec.Struct, frozen=True, kw_only=True):
    """A local folder or file, and the place that stands for it (see `home_paths.py`)."""

    home: str
    """Its absolute local path, which is what requests name and what outputs record."""
    place: str
    """Its path on the machine, relative as `SentFile.place`; or `PACKAGE` and a path inside
    Stillroom's own package. For the home `~` it is the user's own local folder, as it is (see
    `home_paths.home_variable`)."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The content of remote.json: all that the follower needs to have a run done on a machine.

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
    """The requirements of tools.py and rewards.py besides our own, e.g. `rapidfuzz==3.9`."""
    extras: list[str] = []
    """The extras of Stillroom that the run needs, e.g. `train`."""
    outputs: list[str] = []
    """The files and folders that the run writes outside of its own folder, relative to the
    workspace; what else begins with their names (manifests, journals) is downloaded with them."""
    start_after: list[str] = []
    """The local runs that must have ended before anything is sent."""
    budget_usd: float | None = None
    """The most that machine and teacher may cost together; None for no limit."""


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """A content that is sent: named by its hash, so that it is sent once."""

    sha256: str
    num_bytes: int
    source: str
    """The absolute local path of a file with this content."""


class PlacedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the run's folder on the machine must hold before the run starts."""

    place: str
    sha256: str
    is_executable: bool = False


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of `start`: the run to launch; requesting it twice launches it once."""

    run_id: str
    files: list[PlacedFile]
    home_paths: list[PathMapping]
    home_root: str
    """The local workspace; its counterpart on the machine is `workspace/`."""
    request: bytes
    """The local request.json; the agent writes its own workspace and inputs into it."""
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
    """What the machine has cost before the start: provisioning, sending, installing."""
    reserve_s: float = 0.0
    """The seconds of the machine that are reserved for the last checkpoint and its download."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A request of `put`: a piece of a content, and the size of the whole."""

    sha256: str
    num_bytes: int
    offset: int
    data: bytes


class PieceStored(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to a content's last piece: whether the whole has the right hash."""

    sha256: str
    is_stored: bool


class FollowRequest(msgspec.Struct, frozen=True, array_like=True):
    """The request of `follow`: a run, and how many bytes of its appended files are known."""

    run_id: str
    seen: dict[str, int] = {}


class FetchRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request of `fetch`: a finished file of a run, and the first byte of it that is wanted."""

    run_id: str
    path: str
    """Relative to the run's workspace on the machine."""
    offset: int = 0


class CancelRequest(msgspec.Struct, frozen=True, array_like=True):
    """The request of `cancel`: that a run stops, or that its processes are killed."""

    run_id: str
    kill: bool = False


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a run on a machine that is finished and may be downloaded."""

    path: _Path
    """Relative to the workspace on the machine, and so to the local one."""
    sha256: _Sha256
    num_bytes: _Size


class AppendedLines(msgspec.Struct, frozen=True, kw_only=True, tag="growth"):
    """Whole new lines of a file that the run appends to; `offset` 0 replaces the file."""

    path: _Path
    offset: _Size
    data: bytes


class RemoteState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """The run's state, as `read_run` sees it on the machine: the truth about its process."""

    run_json: Annotated[bytes, msgspec.Meta(max_length=8 << 20)]
    elapsed_s: float
    """Seconds since the start, by the machine's monotonic clock."""
    root: _Path
    """The machine's absolute path of the folder with `workspace/` and `outside/`, which texts may
    name."""
    clock: float
    """The machine's time, in seconds since the epoch, when this was sent."""


class RemoteFiles(msgspec.Struct, frozen=True, kw_only=True, tag="files"):
    """All finished files of the run by now, e.g. each whole checkpoint.

    `is_last`: the run has ended, and these are all there will be.
    """

    files: Annotated[list[RemoteFile], msgspec.Meta(max_length=200_000)]
    is_last: bool


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="pulse"):
    """Nothing new, but the connection is alive."""


RunUpdate = AppendedLines | RemoteState | RemoteFiles | Heartbeat
"""The replies of `follow`."""


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
    """The folder that would have to be written to and must not be."""
    gpus: list[str] = []
    """Each GPU's name and memory, e.g. `NVIDIA H100 80GB HBM3, 79.6 GB`."""
    gpu_memory_gb: list[float] = []
    driver: str | None = None
    stillroom_version: str | None = None
    """The version of Stillroom that was sent last; None if none was."""
    has_same_code: bool = False
    """Whether the machine has exactly this version's code."""
    clock_ahead_s: float | None = None
    """How far its clock is ahead of the local one."""
    start_s: float | None = None
    """How long the agent took to answer, from the call to its first line."""


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
    seconds_used: float = msgspec.field(name="seconds_there", default=0.0)
    """How long the machine has been used, by its own monotonic clock where it is known."""
    has_started: bool = False
    """Whether the launch was requested: from then on only the machine knows how the run stands."""
