"""A scripted Hugging Face: buckets in memory, and jobs that a test lets work.

It takes what the installed huggingface_hub takes: each call is bound to the real method's own
signature. Each call is a moment at which our side may be killed.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from fakes.moments import Moments

FLAVOR = "a10g-large"
PRICE = 1.5


@dataclass
class ScriptedJob:
    """A job of the scripted service."""

    asked: dict[str, Any]
    stage: str = "SCHEDULING"
    message: str | None = None
    log: list[str] = field(default_factory=list)


@dataclass
class ScriptedHub:
    """What exists at Hugging Face, whichever process of ours lives."""

    files: dict[str, bytes] = field(default_factory=dict)
    """The contents of all buckets, by bucket and path."""
    jobs: dict[str, ScriptedJob] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    away: Exception | None = None
    """The error of every call, while there is one."""
    refuses_jobs: Exception | None = None
    is_private: bool = True

    def api(self, moments: Moments | None = None) -> SimpleNamespace:
        """Returns an `HfApi` as a process of ours makes it."""
        return _Api(self, moments or Moments()).namespace()

    @property
    def costing(self) -> list[str]:
        """The ids of the jobs that have not ended."""
        return [each for each, job in self.jobs.items() if job.stage in ("SCHEDULING", "RUNNING")]


def refusal(status: int, text: str = "no") -> HfHubHTTPError:
    """Returns the error that the hub answers with a status."""
    request = httpx2.Request("GET", "https://hub")
    return HfHubHTTPError(text, response=httpx2.Response(status, request=request))


class _Api:
    def __init__(self, hub: ScriptedHub, moments: Moments) -> None:
        self._hub, self._moments = hub, moments

    def namespace(self) -> SimpleNamespace:
        methods = [name for name in vars(type(self)) if not name.startswith("_")]
        methods.remove("namespace")
        return SimpleNamespace(**{name: self._bound(name) for name in methods})

    def _bound(self, name: str) -> Callable[..., Any]:
        real = inspect.signature(getattr(HfApi, name))

        def call(*arguments: Any, **keywords: Any) -> Any:
            bound = real.bind(None, *arguments, **keywords).arguments
            del bound["self"]
            with self._call(name):
                return getattr(self, name)(**bound)

        return call

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        with self._moments.around():
            self._hub.calls.append(name)
            if self._hub.away is not None:
                raise self._hub.away
            yield

    def whoami(self) -> dict[str, Any]:
        return {"name": "me"}

    def create_bucket(self, bucket_id: str, private: bool, exist_ok: bool) -> None:
        assert private
        assert exist_ok

    def bucket_info(self, bucket_id: str) -> SimpleNamespace:
        return SimpleNamespace(id=bucket_id, private=self._hub.is_private)

    def get_bucket_paths_info(self, bucket_id: str, paths: list[str]) -> list[SimpleNamespace]:
        found = {path: self._hub.files.get(f"{bucket_id}/{path}") for path in paths}
        return [SimpleNamespace(path=p, size=len(data)) for p, data in found.items() if data]

    def list_bucket_tree(
        self, bucket_id: str, prefix: str, recursive: bool
    ) -> Iterator[SimpleNamespace]:
        assert recursive
        start = f"{bucket_id}/{prefix}"
        for path in [path for path in self._hub.files if path.startswith(start)]:
            yield SimpleNamespace(path=path.removeprefix(f"{bucket_id}/"), type="file")

    def batch_bucket_files(
        self,
        bucket_id: str,
        add: list[tuple[Path | bytes, str]] | None = None,
        delete: list[str] | None = None,
    ) -> None:
        for source, path in add or []:
            data = source if isinstance(source, bytes) else source.read_bytes()
            self._hub.files[f"{bucket_id}/{path}"] = data
        for path in delete or []:
            del self._hub.files[f"{bucket_id}/{path}"]

    def download_bucket_files(
        self, bucket_id: str, files: list[tuple[str, Path]], raise_on_missing_files: bool
    ) -> None:
        assert raise_on_missing_files
        for path, target in files:
            if f"{bucket_id}/{path}" not in self._hub.files:
                raise refusal(404, f"{path} is not there")
            Path(target).write_bytes(self._hub.files[f"{bucket_id}/{path}"])

    def list_jobs_hardware(self) -> list[SimpleNamespace]:
        chip = SimpleNamespace(quantity="2", model="A10G", vram="48 GB")
        return [
            SimpleNamespace(
                name=FLAVOR,
                pretty_name="Nvidia A10G - large",
                cpu="12 vCPU",
                ram="46 GB",
                ephemeral_storage="100 GB",
                accelerator=chip,
                unit_cost_usd=PRICE / 60,
                unit_label="minute",
            )
        ]

    def run_job(self, **asked: Any) -> SimpleNamespace:
        if self._hub.refuses_jobs is not None:
            raise self._hub.refuses_jobs
        job_id = f"job{len(self._hub.jobs)}"
        self._hub.jobs[job_id] = ScriptedJob(asked)
        return SimpleNamespace(id=job_id)

    def list_jobs(self, labels: dict[str, str], namespace: str) -> Iterator[SimpleNamespace]:
        for job_id, job in self._hub.jobs.items():
            if labels.items() <= job.asked["labels"].items():
                yield SimpleNamespace(id=job_id)

    def inspect_job(self, job_id: str, namespace: str) -> SimpleNamespace:
        if job_id not in self._hub.jobs:
            raise refusal(404)
        job = self._hub.jobs[job_id]
        return SimpleNamespace(
            id=job_id, status=SimpleNamespace(stage=job.stage, message=job.message)
        )

    def fetch_job_logs(self, job_id: str, namespace: str, follow: bool, tail: int) -> Iterator[str]:
        yield from self._hub.jobs[job_id].log[-tail:]

    def cancel_job(self, job_id: str, namespace: str) -> None:
        self._hub.jobs[job_id].stage = "CANCELED"
