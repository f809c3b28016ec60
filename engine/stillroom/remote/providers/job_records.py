"""What our side and a job tell one another through the bucket."""

import msgspec

from stillroom.remote.records import JobSpec, LaunchRequest, RemoteFile, RunUpdate
from stillroom.remote.ssh.requirements import LocalPackages

BUCKET_VARIABLE = "STILLROOM_JOB_BUCKET"
RUN_VARIABLE = "STILLROOM_JOB_RUN"
CODE_VARIABLE = "STILLROOM_JOB_CODE"
SECRETS_VARIABLE = "STILLROOM_JOB_SECRETS"
"""The run's secrets as JSON. The service keeps a job's secrets encrypted, apart from its
environment, and gives them to its process alone; the job has no standard input."""
START_VARIABLE = "STILLROOM_JOB_START"
"""A random text: of two jobs that were started for one run, only one does it."""
TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105


class JobPackages(msgspec.Struct, frozen=True, kw_only=True):
    """What a job installs before it starts the run."""

    spec: JobSpec = msgspec.field(name="order")
    home: LocalPackages


class JobStart(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a job does."""

    run: LaunchRequest
    """Without its secrets."""
    timeout_s: float
    """The time after which the service ends the job."""


class JobFailure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """Why the job could not do the run, or not bring it to its end."""

    problem: str
    fix: str


JobNews = RunUpdate | JobFailure


class JobView(msgspec.Struct, kw_only=True):
    """What our side remembers of a job, in the run's folder here."""

    next_news: int = 1
    """The number of the news that is read next."""
    ends: dict[str, int] = {}
    """The bytes of each growing file that the news before it have told."""
    files: list[RemoteFile] = []
    """The finished files, as they were named last."""
    outputs: list[str] = []
    """The hashes of all that were ever named, by which they are deleted from the bucket."""
