"""The records of remote runs: the machine, the job spec, the agent's messages, the view.

A remote run has two folders. The local one is the run's own, and all tools read it. The one on the
machine belongs to an ordinary worker, in a workspace made for this run alone. Only the follower
(`remote/follower/`), a local process, writes the local folder.
"""

from typing import Annotated

import msgspec

from stillroom.remote.machine import Machine

RUN_FILE_PREFIX = "run:"
"""The prefix of a sent file's source if the file is in the run's own folder."""
PACKAGE_PREFIX = "package:"
"""The prefix of a path inside Stillroom's own package, which the machine already has."""

_Path = Annotated[str, msgspec.Meta(max_length=4096)]
_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Size = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e10)]
# These four types bound the messages of other machines, which are not trusted.

MissingBlobs = Annotated[dict[str, int], msgspec.Meta(max_length=1_000_000)]
"""The reply of the agent's command `have`: the hashes that the machine lacks, each with the number
of bytes that it has received so far."""


class SentFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that the run reads: its local path, and its path on the machine."""

    source: str
    """Its absolute local path, or `RUN_FILE_PREFIX` and the name of a file in the run's folder."""
    remote_path: str = msgspec.field(name="place")
    """Its path on the machine, relative to the folder with `workspace/` and `outside/`."""
    is_optional: bool = False
    """Whether the run starts without it if it is deleted before it is sent."""


class PathMapping(msgspec.Struct, frozen=True, kw_only=True):
    """Maps a local file or folder to its path on the machine (see `home_paths.py`)."""

    home_path: str = msgspec.field(name="home")
    """Its absolute local path, which requests name and outputs record; or `~`."""
    remote_path: str = msgspec.field(name="place")
    """Its path on the machine, relative like `SentFile.remote_path`, or `PACKAGE_PREFIX` and a path
    inside Stillroom's own package. For `~`, the user's local home folder instead (see
    `home_paths.home_variable`)."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The content of remote.json: what the follower needs to execute a run on a machine.

    It has no secrets, only their names.
    """

    machine: Machine
    files: list[SentFile]
    home_paths: list[PathMapping]
    key_names: list[str] = []
    """The names of the environment variables of the secrets that the run's process needs."""
    variables: list[str] = []
    """The subset of `key_names` that must be in the process's environment, where libraries read
    them: HF_TOKEN, WANDB_API_KEY, and the keys that keys.yml allows for tools."""
    packages: list[str] = []
    """The requirements of tools.py and rewards.py, e.g. `rapidfuzz==3.9`."""
    extras: list[str] = []
    """The extras of Stillroom that the run needs, e.g. `train`."""
    outputs: list[str] = []
    """The files and folders that the run writes outside of its own folder, relative to the
    workspace; files whose names begin with theirs (manifests, journals) are downloaded too."""
    start_after: list[str] = []
    """The local runs that must have ended before anything is sent."""
    budget_usd: float | None = None
    """The maximum cost of machine and teacher together; None for no limit."""


class Blob(msgspec.Struct, frozen=True, kw_only=True):
    """File content to send, identified by its hash so that it is sent only once."""

    sha256: str
    num_bytes: int
    source: str
    """The absolute local path of a file with this content."""


class PlacedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that must be in the run's folder on the machine before the run starts."""

    remote_path: str = msgspec.field(name="place")
    """As `SentFile.remote_path`."""
    sha256: str
    is_executable: bool = False


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request of the command `start`: a run to launch; repeated requests launch it once."""

    run_id: str
    files: list[PlacedFile]
    home_paths: list[PathMapping]
    home_root: str
    """The path of the local workspace; on the machine it is `workspace/`."""
    request: bytes
    """The local request.json; the agent replaces its workspace and inputs."""
    run_files: dict[str, bytes] = msgspec.field(name="copies", default_factory=dict[str, bytes])
    """The contents of small files of the run's folder by name, e.g. given_config.yml."""
    notes: list[str] = []
    """The run's first notes to the user."""
    outputs: list[str] = []
    secrets: dict[str, str] = {}
    """The secrets by name, passed to the worker through its standard input, never to disk."""
    variables: list[str] = []
    """The secrets that are also set in the worker's environment, as in `JobSpec.variables`."""
    max_hours: float
    price_per_hour: float | None = None
    budget_usd: float | None = None
    spent_usd: float = 0.0
    """What the machine has cost before the start: provisioning, sending, installing."""
    reserve_s: float = 0.0
    """The machine time in seconds reserved for the last checkpoint and its download."""


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A request of the command `put`: some bytes of a blob, and the size of the whole blob."""

    sha256: str
    num_bytes: int
    offset: int
    data: bytes


class PieceStored(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `put` to a blob's last piece: whether the whole blob is stored and verified."""

    sha256: str
    is_stored: bool


class FollowRequest(msgspec.Struct, frozen=True, array_like=True):
    """The request of `follow`: a run, and how many bytes of each growing file are mirrored."""

    run_id: str
    seen: dict[str, int] = {}


class FetchRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request of `fetch`: a finished file of a run, and the offset to read it from."""

    run_id: str
    path: str
    """Relative to the run's workspace on the machine."""
    offset: int = 0


class CancelRequest(msgspec.Struct, frozen=True, array_like=True):
    """The request of `cancel`: asks a run to stop, or with `kill` kills its processes."""

    run_id: str
    kill: bool = False


class RemoteFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a run on a machine that is finished and may be downloaded."""

    path: _Path
    """Relative to the workspace, both on the machine and locally."""
    sha256: _Sha256
    num_bytes: _Size


class AppendedLines(msgspec.Struct, frozen=True, kw_only=True, tag="growth"):
    """Complete new lines of a file that the run appends to; `offset` 0 replaces the file."""

    path: _Path
    offset: _Size
    data: bytes


class RemoteState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """The run's state, as `read_run` returns it on the machine."""

    run_json: Annotated[bytes, msgspec.Meta(max_length=8 << 20)]
    elapsed_s: _Seconds
    """Seconds from the start to now, or to the run's end, by the machine's clock."""
    root: _Path
    """The absolute path, on the machine, of the folder with `workspace/` and `outside/`; logs and
    messages may contain it."""
    clock: _Seconds
    """The machine's clock, in seconds since the epoch, when this was sent."""


class RemoteFiles(msgspec.Struct, frozen=True, kw_only=True, tag="files"):
    """All files of the run that are finished so far, e.g. complete checkpoints.

    `is_last`: the run has ended, and the list is complete.
    """

    files: Annotated[list[RemoteFile], msgspec.Meta(max_length=200_000)]
    is_last: bool


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="pulse"):
    """A sign that the connection is alive, sent while there is nothing new."""


RunUpdate = AppendedLines | RemoteState | RemoteFiles | Heartbeat
"""The replies of `follow`."""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The result of probing a machine; a field is None if it could not be determined."""

    system: str
    python: str | None = None
    python_version: str | None = None
    has_uv: bool = False
    num_processors: int | None = None
    memory_gb: float | None = None
    free_disk_gb: float | None = None
    blocked_folder: str | None = None
    """The folder that is not writable, so that Stillroom's folder cannot be created."""
    gpus: list[str] = []
    """Each GPU's name and memory, e.g. `NVIDIA H100 80GB HBM3, 79.6 GB`."""
    gpu_memory_gb: list[float] = []
    driver: str | None = None
    stillroom_version: str | None = None
    """The version of Stillroom on the machine; None if none is installed."""
    has_same_code: bool = False
    """Whether the machine has exactly the same code of Stillroom as this one."""
    clock_ahead_s: float | None = None
    """How far its clock is ahead of the local one, in seconds."""
    start_s: float | None = None
    """The time from starting the agent to its first reply."""
