"""The calls of huggingface_hub for jobs, and the time limit and price of a job."""

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stillroom.remote.host import MachineError, UnreachableError
from stillroom.remote.machine import HfJobsFlavor
from stillroom.remote.providers.hf_bucket import BUCKET_VARIABLE, CODE_VARIABLE, hub_errors
from stillroom.remote.providers.provision_log import ProvisionLog
from stillroom.remote.records import LaunchRequest

_IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"
_LABEL = "stillroom-run"
_FINAL_STAGES = frozenset({"COMPLETED", "CANCELED", "ERROR", "DELETED"})
_NOT_FOUND = 404
_LOG_LINES = 15
_MAX_CHARS = 600
_SETUP_S = 1800.0
_MIN_JOB_S = 300.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PER_HOUR = {"second": 3600.0, "minute": 60.0, "hour": 1.0}
_HOUR_S = 3600.0

_BOOT = f"""
import os, sys, tarfile, tempfile
from huggingface_hub import HfApi
folder = tempfile.mkdtemp()
archive = folder + "/code.tar.gz"
files = [(os.environ["{CODE_VARIABLE}"], archive)]
HfApi().download_bucket_files(os.environ["{BUCKET_VARIABLE}"], files, raise_on_missing_files=True)
tarfile.open(archive).extractall(folder, filter="data")
sys.path.insert(0, folder)
from stillroom.remote.providers.hf_job_program import main
sys.exit(main())
"""


class HubJobs:
    """The jobs of a namespace. `api` is huggingface_hub's `HfApi` or a compatible object."""

    def __init__(self, api: Any, namespace: str | None = None) -> None:
        self._api, self._namespace = api, namespace

    @property
    def namespace(self) -> str:
        """The user or organisation that owns the jobs; the token's user if none was given."""
        if self._namespace is None:
            with hub_errors("could not get the user of the Hugging Face token"):
                self._namespace = str(self._api.whoami()["name"])
        return self._namespace

    def find_hardware(self, flavor: str) -> Any:
        """Returns the hardware and price that the service lists for a flavor; None if unknown."""
        with hub_errors("could not list the flavors of Hugging Face Jobs"):
            flavors = self._api.list_jobs_hardware()
        return next((each for each in flavors if each.name == flavor), None)

    def run(
        self,
        run_id: str,
        flavor: HfJobsFlavor,
        *,
        variables: Mapping[str, str],
        secrets: Mapping[str, str],
        timeout_s: float,
        packages: list[str],
    ) -> str:
        """Starts the job of a run and returns its id; the service enforces `timeout_s`.

        packages: the requirements of the program in the job.
        """
        with hub_errors(f"could not start the job of {run_id}"):
            job = self._api.run_job(
                image=flavor.image or _IMAGE,
                command=_command(packages),
                env=dict(variables),
                secrets=dict(secrets),
                flavor=flavor.flavor,
                timeout=int(timeout_s),
                name=f"stillroom-{run_id}",
                labels={_LABEL: run_id},
                namespace=self.namespace,
            )
        return str(job.id)

    def find(self, run_id: str) -> str | None:
        """Returns the id of the job that was started for a run; None if there is none."""
        with hub_errors("could not list the jobs"):
            jobs = list(self._api.list_jobs(labels={_LABEL: run_id}, namespace=self.namespace))
        return str(jobs[0].id) if jobs else None

    def stage(self, job_id: str) -> str:
        """Returns a job's stage: SCHEDULING, RUNNING, or a final one."""
        from huggingface_hub.errors import HfHubHTTPError

        with hub_errors(f"could not get the status of the job {job_id}"):
            try:
                job = self._api.inspect_job(job_id=job_id, namespace=self.namespace)
            except HfHubHTTPError as error:
                if error.response.status_code != _NOT_FOUND:
                    raise
                return "DELETED"
        return _stage(job)

    def has_ended(self, job_id: str) -> bool:
        """Returns whether a job has ended, after which it costs nothing."""
        return self.stage(job_id) in _FINAL_STAGES

    def cancel(self, job_id: str) -> None:
        """Cancels a job immediately."""
        with hub_errors(f"could not cancel the job {job_id}"):
            self._api.cancel_job(job_id=job_id, namespace=self.namespace)

    def final_log(self, job_id: str) -> str:
        """Returns a job's final status and the tail of its log; "" if they are unavailable."""
        with suppress(UnreachableError, MachineError), hub_errors("could not read the job's log"):
            job = self._api.inspect_job(job_id=job_id, namespace=self.namespace)
            lines = self._api.fetch_job_logs(
                job_id=job_id, namespace=self.namespace, follow=False, tail=_LOG_LINES
            )
            log = " | ".join(line.strip() for line in lines)[-_MAX_CHARS:]
            return f" ({_stage(job)}: {job.status.message or 'no message'}): {log}"
        return ""

    def release(self, provision_log: ProvisionLog, name: str, *, run: Path | None) -> None:
        """Cancels a job and removes its entry once the service reports that it has ended.

        Does nothing if another run still needs it.
        """
        with provision_log.lock_entry(name) as locked:
            if locked.entry is None or not locked.drop_run(run):
                return
            job_id = locked.entry.request_id or self.find(name.removeprefix("stillroom-"))
            if job_id is None:
                # If the process that requested the job was killed, the request may still succeed.
                if locked.entry.is_request_expired:
                    locked.remove()
                return
            if not self.has_ended(job_id):
                self.cancel(job_id)
                if not self.has_ended(job_id):
                    raise UnreachableError(
                        f"the job {job_id} is still running although it was cancelled",
                        "no action needed: Stillroom retries; to cancel it now: "
                        f"`hf jobs cancel {job_id}`",
                    )
            locked.remove()


def time_limit(flavor: HfJobsFlavor, run: LaunchRequest, price: float | None) -> float:
    """Returns the time limit of a job in seconds, which the service enforces.

    Raises MachineError if the budget or the timeout is too small for a job.
    """
    timeout = flavor.timeout
    has_unit = timeout[-1] in _UNITS
    seconds = float(timeout[:-1]) * _UNITS[timeout[-1]] if has_unit else float(timeout)
    limits = [seconds, run.max_hours * _HOUR_S + _SETUP_S]
    if price and run.budget_usd is not None:
        limits.append((run.budget_usd - run.spent_usd) / price * _HOUR_S)
    limit = min(limits)
    if limit < _MIN_JOB_S:
        raise MachineError(
            f"budget_usd and timeout leave the job {max(0.0, limit):.0f} s, but it needs at least "
            f"{_MIN_JOB_S:.0f} s to install packages and start",
            "raise budget_usd, or `timeout` of the machine in machines.yml",
        )
    return limit


def price_of(hardware: Any) -> float | None:
    """Returns the price of listed hardware in US dollars per hour; None for an unknown unit."""
    factor = _PER_HOUR.get(str(hardware.unit_label))
    return None if factor is None else round(float(hardware.unit_cost_usd) * factor, 4)


def _command(packages: list[str]) -> list[str]:
    """Returns the command of a job, which downloads the code from the bucket and runs it."""
    options = [option for each in packages for option in ("--with", each)]
    run = ["uv", "run", "--no-project", "--python", ">=3.11", *options, "python", "-P", "-c", _BOOT]
    line = f"command -v uv >/dev/null || pip install -q uv; exec {shlex.join(run)}"
    return ["sh", "-c", line]


def _stage(job: Any) -> str:
    stage = job.status.stage
    return str(getattr(stage, "value", stage))
